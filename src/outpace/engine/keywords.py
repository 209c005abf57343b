"""Keywords of ``Engine``'s methods, typed for editors and type checkers.

scripts/tables.py writes these classes from what defines the keywords: dataclasses of options, and signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict

from outpace.models.options import LoadKeywords
from outpace.params import SamplingKeywords

if TYPE_CHECKING:
    from outpace.control.cost import Cost
    from outpace.engine.request import Size, StepRecord
    from outpace.params import Acceptance


class EngineKeywords(TypedDict, total=False):
    """Fields of ``EngineOptions`` as keywords. Written by scripts/tables.py."""

    size: Size
    acceptance: Acceptance
    max_rows: int
    prefill_chunk: int
    prefill_delay: float | None
    step_stretch: float | None
    prefix_rows: int


class OwnKeywords(TypedDict, total=False):
    """Parameters of ``Engine`` itself that ``Engine.load`` hands on. Written by scripts/tables.py."""

    on_step: Callable[[StepRecord], None] | None
    cost: Cost | None


class EngineLoadKeywords(LoadKeywords, EngineKeywords, OwnKeywords, total=False):
    """What ``Engine.load`` takes by name, beside the parameters in its signature."""


class OwnRequestKeywords(TypedDict, total=False):
    """Parameters of ``Engine.prepare``. Written by scripts/tables.py."""

    raw: bool
    add_special_tokens: bool
    drafter: str | bool | None
    size: Size | None
    acceptance: Acceptance | None
    reuse_prefix: bool
    cache_scope: str
    deadline: float | None
    priority: int
    owner: str
    resume: Sequence[int] | Sequence[Sequence[int]] | None
    verify_resume: bool


class RequestKeywords(OwnRequestKeywords, SamplingKeywords, total=False):
    """What a request takes by name."""
