"""The seam for drafting methods: Drafter, and the views and events through which it sees the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outpace import _fast
from outpace.common.arrays import I32
from outpace.common.files import StrPath
from outpace.errors import DrafterError
from outpace.exact.drafts import Draft, Drafts, Verdict
from outpace.exact.rules import Penalties
from outpace.exact.sampling import Chooser
from outpace.params import Acceptance

if TYPE_CHECKING:
    from outpace.models.base import HiddenStates, Model
    from outpace.models.options import LoadOptions
    from outpace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What the engine has to hand to a drafter.

    ``hidden_layers``: layers of the target, from 0, whose outputs ``observe`` gets. ``choices``: the target's choice
    after every node, not only after visited ones. ``draws``: under ``rejection``, proposals are sampled (from
    ``Stream.DRAFT``) and carry q. ``ranks``: how many of the target's likeliest tokens after each verified token
    ``rank`` gets. ``target_rows``: it drafts in the target's own KV of its rows.
    """

    hidden_layers: tuple[int, ...] = ()
    choices: bool = False
    draws: bool = False
    ranks: int = 0
    target_rows: bool = False


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What drafting takes, as the policy has to know it.

    ``levels``: the source that takes a forward of its own for every depth (None: asking costs once). ``nodes``: a row
    may be asked for more nodes than that, since others draft beside that source, or it branches. ``trims``: nodes may
    be dropped once they are known; False: a draft is verified whole or not at all. ``reads``: it reads all of a row's
    tokens by forwards of its own, a prompt beside the target's.
    """

    levels: str | None = None
    nodes: bool = False
    trims: bool = True
    reads: bool = False


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter is built with: the ``target`` and its ``tokenizer`` (None: there is no text).

    ``options``: how the target was loaded; a draft model follows suit. ``max_size``: no row will be asked for more
    nodes a step. ``acceptance``: the engine's; a request may ask for another.
    """

    target: Model
    tokenizer: Tokenizer | None
    options: LoadOptions
    max_size: int
    acceptance: Acceptance = "coupled"


class RowView(NamedTuple):
    """One decoding row, as a drafter sees it before a step.

    ``row``: its number in the KV cache; ``request``: its request's id. ``tokens`` int32 [L]: all committed tokens, the
    pending one last; a view, not to be kept. ``limit``: the most committed tokens that the row will ever have.
    ``chooser``: of the next output token: parameters, noise, rules and their state. ``acceptance``: how its drafts are
    verified. ``adaptive``: the policy chooses how much is drafted, not the request. ``depth``: levels that a stepwise
    drafter may draft (None: as many as nodes); ``floor``: where it is not 0, EAGLE stops by it instead, where no path's
    chance is as large. ``start``: a drafter that reads all of a row's tokens, and would have to read some before this
    one, reads from here on instead. ``drafter``: the name of the one that the request chose ("none": it decodes
    plainly), and its ``cost``. ``in_step``: the row in its policy's step, for compositions (None: it has none).
    """

    row: int
    request: int
    tokens: I32
    limit: int
    chooser: Chooser
    acceptance: Acceptance
    adaptive: bool = False
    depth: int | None = None
    floor: float = 0.0
    start: int = 0
    drafter: str = ""
    cost: DraftCost = DraftCost()
    in_step: _fast.native.InStep | None = None


class Event(NamedTuple):
    """Something became final in a row that goes on: a prefill chunk, or a verdict's tokens.

    ``row``: its number; ``tokens`` int32 [n]: committed since the last event; ``start``: the index of the first of them
    in the sequence. ``verdict``: None for a prefill chunk. ``hidden_states`` [m, T, H]: of positions start - 1 to
    start + m - 2, whose KV is final. ``choices`` int32 [1 + nodes]: the target's choice after the pending token, then
    after each node.
    """

    row: int
    start: int
    tokens: I32
    verdict: Verdict | None = None
    hidden_states: HiddenStates | None = None
    choices: I32 | None = None


def draws_now(view: RowView) -> bool:
    """Whether what is drafted for the row is sampled, with its q."""
    return view.acceptance == "rejection" and not view.chooser.params.greedy


def level_by_level(view: RowView) -> bool:
    """Whether every level of the row's draft needs its logits in Python: to draw from a q that is known, or for rules
    that forbid tokens."""
    return draws_now(view) or any(type(rule) is not Penalties for rule in view.chooser.rules)


def levels(rows: Sequence[RowView], sizes: I32) -> I32:
    """How many levels int32 [B] a stepwise drafter may draft for each row: no more than the policy gives it."""
    allowed = [size if view.depth is None else min(size, view.depth) for view, size in zip(rows, sizes, strict=True)]
    return np.array(allowed, np.int32)


class Drafter:
    """Base of every drafting method. A new method overrides ``propose`` and what it needs of the rest.

    A row is known by its number from the first call that names it (``observe``, ``fork`` or ``propose``) until
    ``release``; a drafter that is behind, for whatever reason, catches up from ``RowView.tokens``. What it raises costs
    no request anything: its rows go on plainly. MemoryLimitError in ``propose`` only means: nothing this time.

    Under ``coupled`` nothing that a drafter does can show in the output. Under ``rejection`` a proposal that was
    sampled must carry its ``q``, drawn from ``Stream.DRAFT``, and its size must not depend on the tokens drawn.
    """

    name: str = "drafter"
    needs: DrafterNeeds = DrafterNeeds()
    cost: DraftCost = DraftCost()
    native: _fast.native.NativeDrafter | None = None  # what of it is C++: proposes the same, from the same events
    names: tuple[str, ...] = ()  # of what ``native`` numbers its sources by
    retires: bool = False  # whether ``retire`` keeps anything
    notes: tuple[str, ...] = ()  # what its user should know of it, in every result
    why: str = ""  # auto stands for it; "" where it was named, or there was nothing to choose from

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        """At most ``sizes[i]`` nodes (int32 [B], each at least 1) for ``rows[i]``; fewer, or none, is fine."""
        raise NotImplementedError

    def drafts_natively(self, view: RowView) -> bool:
        """Whether ``native`` drafts for the row ``view``, and ``propose`` is not asked."""
        return self.native is not None and not (self.needs.draws and level_by_level(view))

    @property
    def in_python(self) -> Sequence[Drafter]:
        """Itself, or those of its parts, that get events and ranks beside a native model, too: it gives ``native`` its
        own."""
        return [] if self.native is not None and (self.native.hidden_layers or not self.observes) else [self]

    def check_acceptance(self, acceptance: Acceptance) -> None:
        """Raise DrafterError when this drafter's proposals could not be verified exactly under ``acceptance``."""

    @property
    def observes(self) -> bool:
        """Whether ``observe`` does anything: if not, no events are made."""
        return type(self).observe is not Drafter.observe

    def observe(self, events: Sequence[Event]) -> None:
        """Learn from ``events``: called after every prefill chunk and every verdict."""

    def read_prompts(self, rows: Sequence[tuple[int, I32, int, int]]) -> Mapping[int, tuple[int, int]]:
        """``rows``: numbers, beginnings of prompts int32 [n], how many of these the target has just read, and
        ``RowView.start``. What is read now, no draft has to. Called where ``cost.reads``, and drafts are expected to
        pay for it. Of each row that was read: how far, in its tokens, and how many of them now."""
        return {}

    def rank(self, row: int, tokens: I32, ids: I32) -> None:
        """``ids`` int32 [n, needs.ranks]: what the target finds likeliest after each of ``row``'s verified ``tokens``
        int32 [n] (the pending token and the draft's nodes), best first; -1: none. A native model gives them to
        ``native`` instead."""

    def fork(self, src: int, dst: int, n: int) -> None:
        """The row ``dst`` begins with the first ``n`` tokens of ``src``. A drafter may ignore it and catch up."""

    def release(self, row: int, tokens: I32 | None = None) -> None:
        """``row`` is gone; keep nothing of it. ``tokens``: all that it committed, where its request ended well."""

    def retire(self, row: int, tokens: I32 | None = None) -> None:
        """As ``release``, but the target's KV of ``row`` stays, under its number, for rows that begin alike: what a
        ``fork`` of it would take may be kept until ``release``, which then follows."""
        self.release(row, tokens)

    def growth(self, row: int, positions: int) -> int:
        """KV bytes more that drafting takes once ``row`` has so many ``positions`` (the row may be unknown yet, and
        then takes the most)."""
        return 0

    @property
    def bytes(self) -> int:
        """KV bytes in use now."""
        return 0

    def check(self, rows: Sequence[int]) -> None:
        """Assert own invariants, given the ``rows`` that are alive; anything else must have been released."""

    def close(self) -> None:
        """Give back memory and threads."""


class TreeDrafter(Drafter):
    """Base of methods that look tokens up: what they propose is certain, and what became of it teaches them nothing.

    A new one overrides ``trees`` instead of ``propose``; its ``observe`` may go by an event's tokens, not by the path.
    """

    def trees(self, rows: Sequence[RowView], sizes: Sequence[int]) -> list[Draft]:
        """At most ``sizes[i]`` nodes for ``rows[i]``."""
        raise NotImplementedError

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        return Drafts.of(self.trees(rows, sizes.tolist()), (self.name,))


class LookupDrafter(TreeDrafter):
    """Base of methods that look tokens up in C++: ``native`` proposes for every row, whoever drives the step."""

    native: _fast.native.NativeDrafter

    def __init__(self, native: _fast.native.NativeDrafter) -> None:
        self.native, self.names = native, (self.name,)

    def trees(self, rows: Sequence[RowView], sizes: Sequence[int]) -> list[Draft]:
        return [
            Draft(*lists)
            for lists in self.native.trees(
                [
                    (view.row, view.request, len(view.tokens) - view.chooser.index, view.tokens, size)
                    for view, size in zip(rows, sizes, strict=True)
                ]
            )
        ]


# What a public call takes as a drafter: a spec, a path, one that is made, or what makes one.
DrafterSource = StrPath | Drafter | Callable[[DraftContext], Drafter]


def described(drafter: Drafter, text: str = "") -> Drafter:
    """``drafter``, which ``text`` names, if it says of itself what the engine reads. Raises DrafterError."""
    if not isinstance(drafter, Drafter):
        hint = "Engine.load takes specs" if isinstance(drafter, str) else "see outpace.drafters.base"
        raise DrafterError(f"{drafter!r} is no Drafter: {hint}")
    text = text or type(drafter).__name__
    for attribute, kind in (("name", str), ("needs", DrafterNeeds), ("cost", DraftCost)):
        if not isinstance(value := getattr(drafter, attribute), kind):
            raise DrafterError(f"{text}: its {attribute} is {value!r}: it must be a {kind.__name__}")
    return drafter
