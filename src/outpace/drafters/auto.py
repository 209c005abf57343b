"""What ``auto`` stands for beside a target: what was measured here, else what suits most text."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.drafters import measured
from outpace.drafters.catalogue import AUTO
from outpace.drafters.learned import shipped
from outpace.models.base import ModelInfo
from outpace.models.options import LoadOptions


@dataclass(frozen=True, slots=True)
class Choice:
    """``spec``, and why; ``why`` is empty where there was nothing to choose from."""

    spec: str
    why: str = ""
    measured: bool = False


def choose(info: ModelInfo, options: LoadOptions, drafts: bool = False) -> Choice:
    """For a target loaded with ``options``: the fastest drafter that was measured beside it (``outpace drafters
    --measure``); else lookups with the layer of its own files that drafts (``drafts``: there is one), or with the
    drafter that was trained for it and comes with Outpace."""
    found = measured.known(info.name, options)
    if found is not None:
        return Choice(found.spec or AUTO, found.why, measured=True)
    return unmeasured(info, options, drafts)


def unmeasured(info: ModelInfo, options: LoadOptions, drafts: bool) -> Choice:
    """What it stands for until something was measured."""
    if drafts:
        return Choice(f"{AUTO}+mtp", "the model's own files have a layer that drafts")
    use, why = shipped.beside(info, options)
    return Choice(shipped.BESIDE if use else AUTO, why)
