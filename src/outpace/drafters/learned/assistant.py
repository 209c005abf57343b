"""Gemma 4's assistant, a published drafter (transformers 5.23, models/gemma4_assistant), beside a native target.

A small decoder without keys and values: its layers read those that the target's last storing layer of their kind has of
the row. It reads the target's normed last hidden state and the pending token's embedding, and gives the next token and
what stands in for the hidden state after it; a chain stays at the pending token's position, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.drafters.learned import assistant_files
from outpace.drafters.learned.drafter import Ask, Network, Predicted
from outpace.drafters.learned.native import fitting, refusals
from outpace.drafters.learned.picks import chosen, likeliest
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.drafts import Draft, Drafts
from outpace.models.native.build import build_beside, unpacked
from outpace.models.native.model import NativeModel

_native = _fast.native


class NativeAssistant(Network):
    """Chains, a small forward a token. Weights stay as they are stored.

    Raises DrafterError for another target than its own, ModelError for what cannot be read.
    """

    latest = True

    def __init__(self, target: NativeModel, path: Path) -> None:
        own, info = assistant_files.read(path), target.info
        if (own.hidden, own.model.vocab) != (info.hidden_size, info.vocab_size):
            raise DrafterError(
                f"the assistant is for a target with hidden states of {own.hidden} numbers and {own.model.vocab} "
                f"tokens, and {info.name} has {info.hidden_size} and {info.vocab_size}: use its own"
            )
        with fitting():
            wide, narrow = own.hidden, own.model.hidden
            self._pre = unpacked(own.before, (narrow, 2 * wide), "what reads the target's hidden states")
            self._post = unpacked(own.after, (wide, narrow), "what stands in for them")
            self._centroids: tuple[F32, I32, int] | None = None
            if own.centroids is not None:
                vectors, groups, most = own.centroids
                self._centroids = unpacked(vectors, (len(groups), narrow), "the groups' centroids"), groups, most
            weights = build_beside(own.model, own.weights, target.stored, info.max_length, target.threads)
            self._model: _native.Model | None = _native.Model(
                weights, target.runtime, target.isa, "bfloat16", -1, beside=target.native
            )
        self._target, self._layers = target, own.model.layers
        self.ids = np.arange(info.vocab_size, dtype=np.int32)

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in asks]
        given: list[Any] = [ask.hidden_states for ask in asks]
        tokens = [ask.pending for ask in asks]
        most = [min(ask.levels, ask.nodes) for ask in asks]
        for level in range(max(most, default=0)):
            on = [i for i in range(len(asks)) if level < most[i]]
            ids = [np.array([tokens[i]], np.int32) for i in on]
            logits, after = self.extend([asks[i].row for i in on], ids, [given[i] for i in on])
            if not np.isfinite(logits).any(1).all():
                raise NotFiniteError("the assistant produced NaN or infinite logits: check its weights")
            for i, each, state in zip(on, logits, after, strict=True):
                chooser = asks[i].chooser
                if chooser is None or chooser.params.greedy:
                    best, chances = likeliest(each, 1)
                else:
                    best, chances = chosen(each, self.ids, chooser, level, 1)
                tokens[i], given[i] = best[0], state
                found[i][0].append(best[0])
                found[i][1].append(float(np.exp(min(chances[0], 0.0))))
        return Drafts.of([Draft.chain(ids, np.cumprod(chances).tolist()) for ids, chances in found])

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        model, parts, n = self._live(), self._target.parts, len(rows)
        states = [
            each.features if isinstance(each, Predicted) else parts.norm(np.ascontiguousarray(each[-1:, 0]))
            for each in given
        ]
        last = np.array([each[-1] for each in tokens], np.int32)
        read = np.concatenate([parts.embed(last), np.concatenate(states)], 1)
        features = np.stack([self._pre @ each for each in read])  # row by row: none depends on others
        every = np.arange(n + 1, dtype=np.int32)
        positions = np.array([self._target.kv.length(row) for row in rows], np.int32)
        with refusals():
            result = model.forward(
                last, np.array(rows, np.int32), positions, np.full(n, -1, np.int32), every, every[:n],
                (self._layers - 1,), self._layers, None, features,
            )  # fmt: skip
        normed = _native.final_norm(model, np.ascontiguousarray(result.hidden_states()[:, 0]))
        logits = result.logits(every[:n])
        if self._centroids is not None:
            logits = self._of_the_best(logits, normed)
        return logits, [Predicted((self._post @ each)[None]) for each in normed]

    def _of_the_best(self, logits: F32, normed: F32) -> F32:
        """Logits of tokens of the best groups alone, the others -inf."""
        assert self._centroids is not None
        centroids, groups, most = self._centroids
        kept = np.full_like(logits, -np.inf)
        for row, state in enumerate(normed):
            ids = groups[np.argsort(-(centroids @ state), kind="stable")[:most]].reshape(-1)
            kept[row, ids] = logits[row, ids]
        return kept

    def close(self) -> None:
        self._model = None

    def _live(self) -> _native.Model:
        if self._model is None:
            raise ValueError("this drafter is closed: build it again")
        return self._model
