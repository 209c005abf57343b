"""Logit rules: penalties, bias and masks, and the seam where grammars and foreign processors plug in.

A rule's state is immutable along a node's path, so that a draft's branches never see each other: ``advance`` returns
a new state and leaves the old one as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace.arrays import F32, I32
from outpace.errors import ParameterError
from outpace.params import LogitRule, SamplingParams


@dataclass(frozen=True, slots=True)
class _Counts:
    seen: I32  # distinct prompt tokens, ascending
    output: Mapping[int, int]  # output token -> how often


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition (Keskar et al., arXiv 1909.05858; prompt and output), presence and frequency (output only)."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def start(self, prompt: I32) -> _Counts:
        return _Counts(np.unique(prompt).astype(np.int32), {})

    def advance(self, state: _Counts, token: int) -> _Counts:
        return _Counts(state.seen, {**state.output, token: state.output.get(token, 0) + 1})

    def apply(self, state: _Counts, logits: F32) -> None:
        ids = np.fromiter(state.output.keys(), np.int32, len(state.output))
        if self.repetition != 1.0:
            seen = np.union1d(state.seen, ids)
            value = logits[seen]
            logits[seen] = np.where(value > 0, value / np.float32(self.repetition), value * np.float32(self.repetition))
        if len(ids) and (self.presence or self.frequency):
            counts = np.fromiter(state.output.values(), np.float32, len(ids))
            logits[ids] -= np.float32(self.presence) + np.float32(self.frequency) * counts


@dataclass(frozen=True, slots=True)
class Bias:
    """Adds a constant to some logits; -inf forbids a token."""

    ids: I32  # [n]
    values: F32  # [n]

    def start(self, prompt: I32) -> None:
        return None

    def advance(self, state: None, token: int) -> None:
        return None

    def apply(self, state: None, logits: F32) -> None:
        logits[self.ids] += self.values


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Forbids every token but these."""

    ids: I32  # [n], ascending

    def start(self, prompt: I32) -> None:
        return None

    def advance(self, state: None, token: int) -> None:
        return None

    def apply(self, state: None, logits: F32) -> None:
        kept = logits[self.ids]
        logits.fill(-np.inf)
        logits[self.ids] = kept


class ProcessorRule:
    """Any ``transformers.LogitsProcessor``: called with the tokens so far [1, S] and the logits [1, V].

    The processor must be a pure function of its arguments: it sees draft prefixes that may never be committed.
    """

    def __init__(self, processor: Any) -> None:
        if not callable(processor):
            raise ParameterError(f"{processor!r} is not a LogitsProcessor: give an object that can be called")
        self._processor = processor

    def start(self, prompt: I32) -> tuple[int, ...]:
        return tuple(int(token) for token in prompt)

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def apply(self, state: tuple[int, ...], logits: F32) -> None:
        import torch

        ids = torch.tensor([state], dtype=torch.long)
        logits[:] = self._processor(ids, torch.from_numpy(logits.copy())[None])[0].numpy()


def rules_for(params: SamplingParams, vocab_size: int) -> tuple[LogitRule, ...]:
    """The rules that ``params`` ask for, in the order in which they apply. Raises ParameterError."""
    rules: list[LogitRule] = []
    penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties != Penalties():
        rules.append(penalties)
    if params.logit_bias:
        ids = _token_ids("logit_bias", list(params.logit_bias), vocab_size)
        rules.append(Bias(ids, np.array([params.logit_bias[int(i)] for i in ids], np.float32)))
    if params.allowed_tokens is not None:
        rules.append(AllowedTokens(np.unique(_token_ids("allowed_tokens", params.allowed_tokens, vocab_size))))
    for rule in params.rules:
        if isinstance(rule, LogitRule):
            rules.append(rule)
        else:
            rules.append(ProcessorRule(rule))
    return tuple(rules)


def _token_ids(name: str, ids: Sequence[int], vocab_size: int) -> I32:
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise ParameterError(f"{name} has token id {wrong[0]}, but this model's ids go from 0 to {vocab_size - 1}")
    return np.array(sorted(ids), np.int32)
