"""The trained drafter that comes with Outpace, for the demo model: where it is, and whether it may be used.

It lies beside this file with 4-bit weights, which draft beside the demo model what the original in ``drafters/`` does.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from outpace.drafters.catalogue import AUTO
from outpace.drafters.learned.checkpoint import read
from outpace.errors import DrafterError, ModelError
from outpace.models.base import ModelInfo
from outpace.models.fingerprint import fingerprint_of
from outpace.models.options import LoadOptions
from outpace.models.weights.facts import read_config

log = logging.getLogger(__name__)

TARGET = "demo"  # the model that it drafts for, by the name that loads it
NAMES = (TARGET, "demo-eagle")  # what ``eagle:`` takes for it
SPEC = f"eagle:{TARGET}"
BESIDE = f"{AUTO}+{SPEC}"  # what ``auto`` stands for where it pays


def folder() -> Path:
    """Where it lies."""
    return Path(__file__).parent / "demo"


def located(info: ModelInfo, options: LoadOptions) -> Path:
    """Its folder, to run it beside a target loaded with ``options``. Raises DrafterError where it is not for it."""
    path = folder()
    target = _card(path).get("target", {})
    found = fingerprint_of(info.name, options)
    if target.get("fingerprint") != found:
        raise DrafterError(
            f"{SPEC} was trained for the demo model ({target.get('fingerprint')}), and this is {info.name} ({found}): "
            "train one for it (outpace train eagle), or leave it out; a folder of that name is ./demo"
        )
    return path


def beside(info: ModelInfo, options: LoadOptions) -> tuple[bool, str]:
    """Whether ``auto`` uses it beside a target loaded with ``options``, and why ("": it is not for that one): on the
    native backend, if its card says that it pays there (``default``)."""
    path = folder()
    try:
        card = _card(path)
        if info.vocab_size != card.get("target", {}).get("vocab_size"):  # another model, without a look at its file
            return False, ""
        if card["target"].get("fingerprint") != fingerprint_of(info.name, options):
            return False, ""
        if info.backend != "native":
            return False, f"{SPEC} was measured on the native backend alone: name it to use it here"
        if card.get("default") is not True:
            return False, f"{SPEC} is no faster by its card ({path / 'config.json'}): name it to use it"
        read(path)  # the weights are those that the card was written for
    except ModelError as error:
        log.warning("auto stands for %s alone, since its trained drafter cannot be used: %s", AUTO, error)
        return False, str(error)
    return True, f"{path} was trained for this model"


def _card(path: Path) -> dict[str, Any]:
    """The object ``outpace`` of its config.json. Raises ModelError."""
    card = read_config(path).get("outpace")
    if not isinstance(card, dict) or not isinstance(card.get("target", {}), dict):
        raise ModelError(f"{path / 'config.json'} has no object outpace: install Outpace again")
    return card
