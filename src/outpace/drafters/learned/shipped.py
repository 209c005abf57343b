"""The trained drafter that comes with Outpace's source, for the demo model: where it is, whether ``auto`` uses it.

It takes twice what a wheel may, so it is no package data: a checkout has it in ``drafters/``, where an installation
from that checkout finds it (``scripts/setup`` makes one); any other looks in the cache folder.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.common.files import cache_dir
from outpace.drafters.catalogue import AUTO
from outpace.drafters.learned.checkpoint import read
from outpace.errors import DrafterError, ModelError
from outpace.models.base import ModelInfo
from outpace.models.fingerprint import fingerprint_of
from outpace.models.options import LoadOptions
from outpace.models.weights.facts import read_config

log = logging.getLogger(__name__)

TARGET = "demo"  # the model that it drafts for, by the name that loads it
FOLDER = "demo-eagle"
NAMES = (TARGET, FOLDER)  # what ``eagle:`` takes for it
SPEC = f"eagle:{TARGET}"
BESIDE = f"{AUTO}+{SPEC}"  # what ``auto`` stands for where it pays


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``auto`` stands for beside a target, and why; ``why`` is empty where no drafter was trained for it."""

    spec: str
    why: str = ""


def places() -> tuple[Path, ...]:
    """Where it may lie, the first that is there counts: a checkout of the source, then the cache folder."""
    root = Path(__file__).resolve().parents[4]
    checkout = (root / "drafters",) if (root / "native" / "CMakeLists.txt").is_file() else ()
    return tuple(place / FOLDER for place in (*checkout, cache_dir() / "drafters"))


def folder() -> Path | None:
    """Where it lies; None where it does not."""
    return next((place for place in places() if (place / "config.json").is_file()), None)


def located(info: ModelInfo, options: LoadOptions) -> Path:
    """Its folder, to run it beside a target loaded with ``options``. Raises DrafterError: not here, or not for it."""
    path = folder()
    if path is None:
        raise DrafterError(f"{SPEC} is not here: {_remedy()}")
    its = _card(path).get("target", {})
    found = fingerprint_of(info.name, options)
    if its.get("fingerprint") != found:
        raise DrafterError(
            f"{SPEC} was trained for the demo model ({its.get('fingerprint')}), and this is {info.name} ({found}): "
            "train one for it (outpace train eagle), or leave it out; a folder of that name is ./demo"
        )
    return path


def choose(info: ModelInfo, options: LoadOptions) -> Choice:
    """What ``auto`` stands for beside a target loaded with ``options``.

    The drafter is used beside its own target on the native backend, if its card says that it pays there (``default``).
    """
    path = folder()
    if path is None:
        return Choice(AUTO, f"{SPEC} is not here: {_remedy()}" if info.name == TARGET else "")
    try:
        card = _card(path)
        if info.vocab_size != card.get("target", {}).get("vocab_size"):  # another model, without a look at its file
            return Choice(AUTO)
        if card["target"].get("fingerprint") != fingerprint_of(info.name, options):
            return Choice(AUTO)
        if info.backend != "native":
            return Choice(AUTO, f"{SPEC} was measured on the native backend alone: name it to use it here")
        if card.get("default") is not True:
            return Choice(AUTO, f"{SPEC} is no faster by its card ({path / 'README.md'}): name it to use it")
        read(path)  # the weights are those that the card was written for
    except ModelError as error:
        log.warning("auto stands for %s alone, since its trained drafter cannot be used: %s", AUTO, error)
        return Choice(AUTO, str(error))
    return Choice(BESIDE, f"{path} was trained for this model")


def _card(path: Path) -> dict[str, Any]:
    """The object ``outpace`` of its config.json. Raises ModelError."""
    card = read_config(path).get("outpace")
    if not isinstance(card, dict) or not isinstance(card.get("target", {}), dict):
        raise ModelError(f"{path / 'config.json'} has no object outpace: get the folder again from the source")
    return card


def _remedy() -> str:
    *_, cached = places()
    return f"copy drafters/{FOLDER} of Outpace's source to {cached}, or install from a checkout (scripts/setup)"
