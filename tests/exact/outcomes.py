"""Runs a function of chance through every outcome, with its probability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from outpace.common.arrays import F64, I32
from outpace.exact.drafts import Draft

T = TypeVar("T")


class EveryOutcome:
    """A ``verify.Chance`` that replays a script of decisions and notes where it could have gone otherwise."""

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self.taken: list[int] = []
        self.options: list[list[tuple[int, float]]] = []
        self.weight = 1.0

    def _decide(self, options: list[tuple[int, float]]) -> int:
        at = len(self.taken)
        which = self._script[at] if at < len(self._script) else 0
        self.taken.append(which)
        self.options.append(options)
        self.weight *= options[which][1]
        return options[which][0]

    def accept(self, probability: float, depth: int, trial: int) -> bool:
        assert 0 <= probability <= 1
        return bool(self._decide([(v, p) for v, p in ((1, probability), (0, 1 - probability)) if p > 0]))

    def draw(self, weights: F64, depth: int) -> int:
        assert abs(weights.sum() - 1) < 1e-12
        return self._decide([(int(t), float(weights[t])) for t in np.flatnonzero(weights > 0)])

    def choose(self, p: F64, depth: int) -> int:
        return self.draw(p, depth)


def every_outcome(run: Callable[[EveryOutcome], T]) -> Iterator[tuple[float, T]]:
    """``(probability, result)`` of every way in which ``run`` can go."""
    script: list[int] = []
    while True:
        chance = EveryOutcome(script)
        result = run(chance)
        yield chance.weight, result
        taken = chance.taken
        while taken and taken[-1] + 1 == len(chance.options[len(taken) - 1]):
            taken.pop()
        if not taken:
            return
        script = [*taken[:-1], taken[-1] + 1]


def draft_of(tokens: Iterable[int], parents: I32 | None = None, q: F64 | None = None) -> Draft:
    """A draft (``parents`` None: a chain) of which nobody knows what it is worth."""
    made = Draft.chain(list(tokens))
    return replace(made, q=q, parents=made.parents if parents is None else parents.tolist())
