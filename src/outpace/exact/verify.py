"""Which drafted tokens are kept. Pure functions: no model, no generator, no clock; what they need is passed in.

Nodes: -1 is the pending token, 0 .. k - 1 the draft's nodes. "After node i" means after the path that ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from outpace.common.arrays import F64, I32
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts

Choose = Callable[[I32, I32], I32]  # (rows [n], nodes [n]) -> the target's choice after each [n]
Distribution = Callable[[int], F64]  # node -> p [V]


def walk(choose: Choose, drafts: Drafts) -> Verdicts:
    """``coupled``: follow the draft while the target's own choice is one of the node's children.

    ``choose(rows, nodes)`` is asked only for visited nodes, once each, all rows of a level at a time. The tokens
    gained are the choices themselves, so nothing about the draft can show in them. Among equal siblings the first wins.
    """
    b, w = drafts.tokens.shape
    parents = (
        drafts.parents if drafts.parents is not None else np.broadcast_to(np.arange(-1, w - 1, dtype=np.int32), (b, w))
    )
    exists = np.arange(w) < drafts.widths[:, None]
    gained = np.zeros((b, w + 1), np.int32)
    path = np.zeros((b, w), np.int32)
    accepted = np.zeros(b, np.int32)
    at = np.full(b, -1, np.int32)
    active = np.arange(b, dtype=np.int32)
    while len(active):
        choices = choose(active, at[active])
        gained[active, accepted[active]] = choices
        if w == 0:
            break
        agrees = (drafts.tokens[active] == choices[:, None]) & (parents[active] == at[active, None]) & exists[active]
        child = agrees.argmax(axis=1).astype(np.int32)
        active, child = active[agrees.any(axis=1)], child[agrees.any(axis=1)]
        path[active, accepted[active]] = child
        accepted[active] += 1
        at[active] = child
    return Verdicts(gained, accepted, path)


class Chance(Protocol):
    """Where ``reject`` takes its luck from: noise in production, every outcome in turn in a proof."""

    def accept(self, probability: float, depth: int, trial: int) -> bool:
        """True with ``probability``. ``depth``: accepted so far; ``trial``: which candidate of the node this is."""

    def draw(self, weights: F64, depth: int) -> int:
        """A token with probability proportional to ``weights`` [V], not all zero."""

    def choose(self, p: F64, depth: int) -> int:
        """The token that plain sampling takes from ``p`` [V], ``depth`` accepted tokens further on."""


def reject(p: Distribution, draft: Draft, chance: Chance) -> Verdict:
    """``rejection``: speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; many candidates: SpecInfer,
    arXiv 2305.09781, algorithm 2). The output is distributed as sampling from p.

    Candidates x of a node are tried in the order proposed: accept with min(1, p(x) / q(x)), q the distribution that x
    was drawn from (one-hot without ``draft.q``); after a refusal p becomes norm(max(p - q, 0)). When all are refused,
    the recovered token is drawn from what p has become. A duplicate is a trial of its own.
    """
    at = -1
    path: list[int] = []
    tokens: list[int] = []
    while True:
        target = p(at)
        weights = target
        accepted = None
        children = draft.children(at)
        for trial, node in enumerate(children):
            token = draft.tokens[node]
            if draft.q is None:
                probability = float(weights[token])
            else:
                q = draft.q[node]
                if not q[token] > 0:
                    raise ValueError(f"draft node {node} has token {token}, which its own distribution q rules out")
                probability = min(1.0, float(weights[token] / q[token]))
            if probability > 0 and chance.accept(probability, len(path), trial):
                accepted = node
                break
            weights = _residual(weights, token, None if draft.q is None else draft.q[node])
        if accepted is None:
            last = chance.draw(weights, len(path)) if children else chance.choose(target, len(path))
            return Verdict(np.array([*tokens, last], np.int32), np.array(path, np.int32))
        path.append(accepted)
        tokens.append(draft.tokens[accepted])
        at = accepted


def _residual(p: F64, token: int, q: F64 | None) -> F64:
    """norm(max(p - q, 0)) [V]; p itself when nothing remains (p = q: the refusal had no probability)."""
    if q is None:
        left = p.copy()
        left[token] = 0.0
    else:
        left = np.maximum(p - q, 0.0)
    total = float(left.sum())
    return left / total if total > 0 else p
