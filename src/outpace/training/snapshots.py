"""Snapshots of a training run: written whole or not at all, and refused beside anything else than what made them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outpace.common.files import replacing
from outpace.errors import Argument, TrainingError
from outpace.training.options import MAY_CHANGE

NAME = "snapshot.pt"
FORMAT = 1
_HIDDEN = "steps_ttt"  # had a say in every snapshot of EAGLE's; in older ones another option of its name hid it


def save(folder: Path, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write ``state`` (tensors and plain values). ``identity``: what has to be the same to go on. Raises OSError."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "identity": dict(identity), "state": dict(state)}, buffer)
    with replacing(folder / NAME) as file:
        file.write(buffer.getbuffer())


def load(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that ``save`` wrote last; None where there is none.

    Raises TrainingError for a snapshot of other data, another target or another recipe (but for the options in
    ``MAY_CHANGE``), and for one that is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return None
    known, state = _read(path)
    if _HIDDEN in identity and _HIDDEN not in known:
        raise TrainingError(
            f"{path} does not record its {_HIDDEN}, which may not be {identity[_HIDDEN]}: begin with "
            "its best drafter (", Argument("start"), f" {folder}), and give another folder as ", Argument("out"),
        )  # fmt: skip
    # An option that came after the snapshot was made had no say in it; older snapshots have some that are free now.
    others = [name for name in sorted(known) if name not in MAY_CHANGE and known[name] != identity.get(name)]
    if others:
        what = ", ".join(f"{name} {known[name]}, not {identity.get(name)}" for name in others)
        free = [part for name in MAY_CHANGE for part in (Argument(name), ", ")][:-1]
        raise TrainingError(
            f"{path} was made with {what}: give what it was made with (", *free, " may change), or another folder as ",
            Argument("out"),
        )  # fmt: skip
    return dict(state)


def optimiser(folder: Path, method: str) -> list[dict[str, Any]] | None:
    """The optimiser's state at the end of the training of ``method`` that made the drafter in ``folder``; None where no
    snapshot of one stayed. Raises TrainingError for one that is damaged."""
    path = folder / NAME
    if not path.exists():
        return None
    known, state = _read(path)
    return list(state["optimiser"]) if known.get("method") == method else None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Identity and state."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        known, state = found["identity"], found["state"]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"{path} cannot be read ({error}): remove it, and train again or go on without it"
        ) from error
    if found.get("format") != FORMAT:
        raise TrainingError(f"{path} is of format {found.get('format')}, not {FORMAT}: remove it and train again")
    return known, state
