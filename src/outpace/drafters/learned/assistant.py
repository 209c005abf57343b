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
from outpace.drafters.learned.drafter import Ask, Network, Predicted
from outpace.drafters.learned.native import fitting, refusals
from outpace.drafters.learned.picks import chosen, likeliest
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.drafts import Draft, Drafts
from outpace.models.native.build import build_beside
from outpace.models.native.model import NativeModel
from outpace.models.weights import safetensors
from outpace.models.weights.facts import Facts, read_config

_native = _fast.native


class NativeAssistant(Network):
    """Chains, a small forward a token. Weights stay as they are stored.

    Raises DrafterError for another target than its own, ModelError for what cannot be read.
    """

    latest = True

    def __init__(self, target: NativeModel, folder: Path) -> None:
        facts = Facts(str(folder / "config.json"), read_config(folder), verdict="is no assistant that can be read")
        text, info = {**facts.part("text_config").all, "architectures": ["Gemma4ForCausalLM"]}, target.info
        hidden = facts.whole("backbone_hidden_size", 1536)
        if (hidden, text.get("vocab_size", 262144)) != (info.hidden_size, info.vocab_size):
            raise DrafterError(
                f"the assistant is for a target with hidden states of {hidden} numbers and {text.get('vocab_size')} "
                f"tokens, and {info.name} has {info.hidden_size} and {info.vocab_size}: use its own"
            )
        _, stored = safetensors.read_folder(folder)
        names = ["pre_projection.weight", "post_projection.weight"]
        self._centroids: tuple[F32, I32, int] | None = None
        if facts.flag("use_ordered_embeddings", False):
            names.append("masked_embedding.centroids.weight")
        if missing := [name for name in names if name not in stored]:
            raise DrafterError(f"{folder} has no tensor {missing[0]!r}: get all of its files")
        self._pre, self._post, *centroids = (safetensors.plain(stored[name], name) for name in names)
        if centroids:
            order = safetensors.whole(stored["masked_embedding.token_ordering"], "masked_embedding.token_ordering")
            groups = order.astype(np.int32).reshape(len(centroids[0]), -1)
            self._centroids = centroids[0], groups, facts.whole("centroid_intermediate_top_k", 32, len(groups))
        with fitting():
            weights = build_beside(folder, text, target.stored, info.max_length, target.threads)
            self._model: _native.Model | None = _native.Model(
                weights, target.runtime, target.isa, "bfloat16", -1, beside=target.native
            )
        self._target, self._layers = target, len(text.get("layer_types") or ()) or int(text["num_hidden_layers"])
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
