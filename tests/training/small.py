"""A target of a few thousand numbers for training tests, and answers that follow a rule which can be learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.drafters.learned.config import Decoder, MedusaConfig, ParallelConfig
from outpace.training.objective import Simulated, TrainBatch
from outpace.training.target import DraftVocabulary, TargetParts

HIDDEN, VOCAB, LAYERS = 16, 40, (0, 1, 2)
WORDS = DraftVocabulary.of(np.arange(1, 31), VOCAB)  # token 0 and the last nine are not in it
IDS = torch.from_numpy(WORDS.ids)


def decoder(layers: int = 2, qk_norm: bool = False) -> Decoder:
    return Decoder(HIDDEN, layers, 4, 2, 8, 24, 1e-5, 1e4, 256, qk_norm)


def parallel_config(**changed: Any) -> ParallelConfig:
    made = ParallelConfig(
        decoder(qk_norm=True), VOCAB, len(WORDS), LAYERS, 4, mask_token=0, markov_rank=3, confidence=True
    )
    return replace(made, **changed)


def medusa_config(heads: int = 3) -> MedusaConfig:
    return MedusaConfig(HIDDEN, VOCAB, len(WORDS), heads, layers=1)


def target(seed: int = 0) -> TargetParts:
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return TargetParts(embedding, 1.0, embedding, torch.ones(HIDDEN), 1e-5)


def following(tokens: Tensor) -> Tensor:
    """What the target says after tokens: it counts to 30 and begins anew."""
    return tokens % 30 + 1


def heard(tokens: Tensor, parts: TargetParts) -> Tensor:
    """A state before the final norm after which the target is sure of it."""
    head = parts.head[following(tokens)]
    return 3 * head / head.norm(dim=-1, keepdim=True)


def batch(lengths: list[int], parts: TargetParts, seed: int = 0, prompt: int = 3) -> TrainBatch:
    """Sequences that count up from starts of their own, with ``prompt`` tokens given; hidden states tell the token."""
    draw = torch.Generator().manual_seed(seed)
    firsts = torch.randint(1, 30, (len(lengths),), generator=draw).tolist()
    tokens = [(first - 1 + torch.arange(n)) % 30 + 1 for first, n in zip(firsts, lengths, strict=True)]
    states = []
    for its in tokens:
        hidden_states = torch.randn(len(its), len(LAYERS), HIDDEN, generator=draw) * 0.1 + parts.embedding[its][:, None]
        states.append(torch.cat((hidden_states, heard(its, parts)[:, None]), 1))
    return TrainBatch.pack([t.numpy() for t in tokens], states, [prompt - 1] * len(lengths), seed)


def rows(given: TrainBatch, b: int) -> slice:
    return slice(given.starts[b], given.starts[b + 1])


def fit(objective: Any, given: TrainBatch, steps: int, rate: float) -> tuple[float, float]:
    """The loss before and after ``steps`` of Adam, each with a seed of its own."""
    optimiser = torch.optim.Adam([p for p in objective.network.parameters() if p.requires_grad], lr=rate)
    found: list[float] = []
    for step in range(steps):
        optimiser.zero_grad()
        loss, _ = objective.loss(replace(given, seed=step))
        loss.backward()
        optimiser.step()
        found.append(float(loss.detach()))
    return found[0], sum(found[-3:]) / 3


def served(given: TrainBatch, accepted: list[list[int]]) -> tuple[int, int]:
    """Steps and tokens of decoding answers plainly forward, ``accepted[b][i]``: of the draft whose pending token is the
    answer's i-th, by the simplest loop there is."""
    steps = tokens = 0
    for b, its in enumerate(accepted):
        own = rows(given, b)
        at = own.start + int(given.loss_mask[own].nonzero()[0]) + 1  # the answer's first token is pending
        while at < own.stop - 1:
            gained = min(its[at - own.start] + 1, own.stop - 1 - at)
            steps, tokens, at = steps + 1, tokens + gained, at + gained
    return steps, tokens


def same(found: Simulated, steps: int, tokens: int) -> bool:
    return (found.steps, found.tokens) == (steps, tokens)
