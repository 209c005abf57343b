"""Lookups that draft in another engine, which hands out nothing of a request but its tokens."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from time import perf_counter
from types import SimpleNamespace
from typing import cast

from outpace import _fast
from outpace.common.arrays import I32
from outpace.control.adaptive import Adaptive
from outpace.drafters.base import DraftContext
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.drafters.registry import build, parse
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Model
from outpace.models.native.output import describe
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams

METHODS = ("ngram", "suffix")  # that need neither the target's forwards nor its hidden states
WIDER = 4  # nodes that are asked for each token of a chain: a composition's branches are dropped
SAVE = 30.0  # seconds between two writes of a history's file

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Row:
    """A request in the engine's batch. ``tokens`` int32 [L]: all that it has."""

    number: int
    tokens: I32
    native: _fast.native.Row


class Lookups:
    """Drafts for the rows of another engine's batch: at most ``nodes`` a row, texts of up to ``longest`` tokens.

    ``step`` holds the drafts of the rows that were given to ``draft``, in their order. Raises DrafterError.
    """

    def __init__(self, spec: DrafterSpec, vocab: int, longest: int, nodes: int, policy: Adaptive | None = None) -> None:
        target = cast(Model, SimpleNamespace(info=SimpleNamespace(vocab_size=vocab)))
        self._drafter = build(spec, DraftContext(target, None, LoadOptions(), nodes))
        self.step = _fast.native.Rows(vocab, [], "target")
        self._chooser = describe(Chooser(SamplingParams(temperature=0.0), Noise(0), 0), [])
        self._longest, self._policy = longest, policy
        parts = zip(getattr(self._drafter, "parts", (self._drafter,)), spec.parts or (spec,), strict=True)
        self._files = [
            (part, each.options["file"])
            for part, each in parts
            if isinstance(part, SuffixDrafter) and "file" in each.options
        ]
        self._saved, self._saving = -SAVE, Thread()
        self._told = set[str]()
        self._live: Sequence[Row] = ()
        self._numbers = set[int]()
        self._requests = 0
        self._close = weakref.finalize(self, self._drafter.close)

    def close(self) -> None:
        """Save a history, if it has a file; at the latest when the process ends."""
        if self._saving.is_alive():
            self._saving.join()
        self._close()

    def open(self, prompt: int) -> tuple[int, _fast.native.Row]:
        """A new row, the first ``prompt`` tokens of which were no answer: its number, and what ``draft`` takes."""
        number = next(n for n in range(len(self._numbers) + 1) if n not in self._numbers)
        self._numbers.add(number)
        self._requests += 1
        native = self.step.row(
            row=number, request=self._requests, prompt=prompt, adaptive=self._policy is not None,
            drafter=self._drafter.name, native=self._drafter.native, names=self._drafter.names, natively=True,
            drafts=True, reads=False, ruled=False, acceptance="coupled", watched=False, chooser=self._chooser,
            levels=None, nodes=False, trims=True, reads_prompts=False, limit=self._longest,
        )  # fmt: skip
        return number, native

    def keep(self, rows: Sequence[Row]) -> None:
        """The batch's rows: all others have left it."""
        live = {row.number for row in rows}
        gone = [row for row in self._live if row.number not in live]
        for row in gone:
            if self._policy is not None:
                self._policy.release(row.number)
            self._drafter.release(row.number, row.tokens)
        self._live, self._numbers = rows, live
        now = perf_counter()
        if gone and now - self._saved >= SAVE:  # engines' processes are often killed, and then close nothing
            self._saved = now
            self._save()

    def draft(self, rows: Sequence[tuple[Row, int]]) -> None:
        """Draft for rows, each with the most nodes that it may have."""
        given = [(row.native, row.tokens, len(row.tokens), nodes) for row, nodes in rows]
        self.step.begin(None if self._policy is None else self._policy.native, given, [])
        _, failed = self.step.propose()
        for _, why in failed:
            self._tell(f"outpace's drafter failed, and proposes nothing: {why}")

    def _save(self) -> None:
        """Write histories beside the engine's steps: a disk may take longer than one."""
        if self._saving.is_alive():
            return
        kept = [(part, file, part.snapshot()) for part, file in self._files]

        def write() -> None:
            for part, file, tokens in kept:
                try:
                    part.save(file, tokens)
                except DrafterError as error:  # requests go on
                    self._tell(f"outpace keeps no history: {error}")

        if kept:
            self._saving = Thread(target=write, name="outpace-history")
            self._saving.start()

    def _tell(self, why: str) -> None:
        """Log it once: a step comes every few milliseconds."""
        if why not in self._told:
            self._told.add(why)
            log.warning("%s", why)


def likeliest(parents: Sequence[int], gains: Sequence[float]) -> list[int]:
    """The nodes of a tree's path that goes to the likeliest child each time; ``gains``: chances of whole paths."""
    best: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent not in best or gains[node] > gains[best[parent]]:
            best[parent] = node
    path: list[int] = []
    while (node := best.get(path[-1] if path else -1, -1)) >= 0:
        path.append(node)
    return path


def files(spec: DrafterSpec) -> list[str]:
    """The files of histories that the spec names."""
    return [str(each.options["file"]) for each in spec.parts or (spec,) if "file" in each.options]


def checked(text: str, engine: str) -> DrafterSpec:
    """The spec, where nothing of it needs more than ``engine`` hands out. Raises DrafterError."""
    given = parse(text)
    for part in given.parts or (given,):
        if part.made is not None or part.name not in METHODS:
            raise DrafterError(
                f"{part.name} does not draft inside {engine}, which hands out tokens alone: use "
                f"{' or '.join(METHODS)}, or both joined by +; trained drafters are exported for it (docs/engines.md)"
            )
    return given
