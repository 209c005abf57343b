"""What decided a row's tokens, for whoever watches steps: p, q, the target's likeliest tokens, and random numbers.

All of it is computed once more from the logits of a step that has its verdicts: it costs nothing unless it is
asked for, and changes no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from outpace.common.arrays import F64
from outpace.engine.request import Likely, Place, Trial
from outpace.engine.walk import OWN_FAULTS
from outpace.exact.chance import NoiseChance
from outpace.exact.drafts import Draft
from outpace.exact.noise import Noise, Stream
from outpace.exact.sampling import Chooser
from outpace.exact.verify import reject
from outpace.models.base import Output
from outpace.params import Acceptance

LIKELIEST = 5  # tokens of a place, beside its choice and what was drafted there


@dataclass(frozen=True, slots=True)
class Explained:
    """Of k verified nodes: ``p`` and ``q`` [k] of each one's token (q NaN: not known), and where the target chose:
    after the pending token, then after each node. Greedy rows have p at temperature 1, since their own is 1 or 0."""

    p: tuple[float, ...] = ()
    q: tuple[float, ...] = ()
    places: tuple[Place, ...] = ()


def explained(
    chooser: Chooser, acceptance: Acceptance, draft: Draft, verdict: tuple[Sequence[int], Sequence[int]],
    start: int, output: Output,
) -> Explained:  # fmt: skip
    """Of the row whose pending token is packed at ``start``; ``verdict``: tokens, and a path of ``draft``. Where the
    row's rules leave no token, or fail, there is no place, and none after it."""
    coupled = acceptance == "coupled"
    greedy = chooser.params.greedy
    warm = chooser.params.with_(temperature=1.0) if greedy else chooser.params
    choosers, of, shown = {-1: chooser}, dict[int, F64](), dict[int, F64]()
    choices = dict(zip((-1, *verdict[1]), verdict[0], strict=True))  # what follows each node
    chance = _Watched(chooser.noise, chooser.index)
    for node in range(-1, len(draft)):
        if node >= 0 and draft.parents[node] not in shown:
            continue
        try:
            if node >= 0:
                choosers[node] = choosers[draft.parents[node]].advance(draft.tokens[node])
            at = np.array([start + node + 1], np.int32)
            logits = output.logits(at)[0]
            p = choosers[node].probabilities(logits)
            if coupled and node not in choices:
                choices[node] = int(output.choose(at, (choosers[node],))[0])
            shown[node] = replace(choosers[node], params=warm).probabilities(logits) if greedy else p
            of[node] = p
        except OWN_FAULTS:  # a wrong draft's; on the path it is the row's own, which its verdict met
            continue
    if not shown:
        return Explained()
    if not coupled:
        with suppress(KeyError):  # as far as the verdict went
            reject(of.__getitem__, draft, chance)
    depth = {node: n for n, node in enumerate((-1, *verdict[1]))}
    noise = chooser.noise if coupled and not greedy else None
    places = []
    for node, p in shown.items():
        children, n = draft.children(node), depth.get(node, -1)
        known = [choices[node]] if node in choices else []
        residual = chance.residual.get(n)
        likeliest = _likeliest(p, [*known, *(draft.tokens[child] for child in children)], noise, choosers[node].index)
        drawn = _drawn(draft, children[0]) if children and not (coupled and draft.q is None) else None
        places.append(
            Place(
                node,
                choices.get(node, -1),
                likeliest,
                () if coupled or n < 0 else chance.trials(n, children),
                () if residual is None else _likeliest(residual, known),
                () if drawn is None else tuple(drawn(one.token) for one in likeliest),
            )
        )
    q = [math.nan if coupled else 1.0] * len(draft)
    if draft.q is not None:
        q = [float(own[token]) for own, token in zip(draft.q, draft.tokens, strict=True)]
    pairs = zip(draft.parents, draft.tokens, strict=True)
    p_of = (float(shown[parent][token]) if parent in shown else math.nan for parent, token in pairs)
    return Explained(tuple(p_of), tuple(q), tuple(places))


def _drawn(draft: Draft, node: int) -> Callable[[int], float]:
    """q by token, of what ``node`` was drawn from."""
    if draft.q is None:
        return lambda token: float(token == draft.tokens[node])
    q = draft.q[node]
    return lambda token: float(q[token])


def _likeliest(p: F64, more: Sequence[int], noise: Noise | None = None, index: int = 0) -> tuple[Likely, ...]:
    """The likeliest tokens of ``p`` [V], and ``more``, by falling p; with the ``noise`` of their choice."""
    top = np.argpartition(-p, LIKELIEST)[:LIKELIEST] if len(p) > LIKELIEST else np.arange(len(p))
    ids = np.unique([*(token for token in top if p[token] > 0), *(token for token in more if token >= 0)])
    ids = ids[np.argsort(-p[ids], kind="stable")].astype(np.int32)
    added = np.zeros(len(ids)) if noise is None else noise.gumbel(index, np.sort(ids), Stream.CHOICE)
    if noise is not None:
        added = added[np.searchsorted(np.sort(ids), ids)]
    return tuple(Likely(int(token), float(p[token]), float(g)) for token, g in zip(ids, added, strict=True))


@dataclass(frozen=True, slots=True)
class _Watched(NoiseChance):
    """The luck of ``reject``, which writes down what it is asked: chance and outcome by depth and trial, and what a
    depth's last token was drawn from."""

    tried: dict[tuple[int, int], tuple[float, bool]] = field(default_factory=dict)
    residual: dict[int, F64] = field(default_factory=dict)

    def accept(self, probability: float, depth: int, trial: int) -> bool:
        accepted = NoiseChance.accept(self, probability, depth, trial)
        self.tried[depth, trial] = probability, accepted
        return accepted

    def draw(self, weights: F64, depth: int) -> int:
        self.residual[depth] = weights
        return NoiseChance.draw(self, weights, depth)

    def trials(self, depth: int, children: Sequence[int]) -> tuple[Trial, ...]:
        """Of the node that was reached at ``depth``, up to the child that was accepted; one that had no chance was not
        asked about."""
        found = []
        for i, child in enumerate(children):
            probability, accepted = self.tried.get((depth, i), (0.0, False))
            uniform = self.noise.uniform(self.index + depth, np.array([i], np.int32), Stream.ACCEPT)
            found.append(Trial(child, probability, float(uniform[0]), accepted))
            if accepted:
                break
        return tuple(found)


def numbered_as_proposed(of: Explained, nodes: Sequence[int], k: int) -> Explained:
    """``of`` verified nodes, which were ``nodes`` of the k that were proposed, numbered as these."""
    if not of.places:
        return of
    p, q = [math.nan] * k, [math.nan] * k
    for node, its_p, its_q in zip(nodes, of.p, of.q, strict=True):
        p[node], q[node] = its_p, its_q
    places = tuple(
        place._replace(
            node=place.node if place.node < 0 else nodes[place.node],
            trials=tuple(trial._replace(node=nodes[trial.node]) for trial in place.trials),
        )
        for place in of.places
    )
    return Explained(tuple(p), tuple(q), places)
