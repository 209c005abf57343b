"""Logit rules: penalties, bias, masks, forbidden words, foreign processors; which drafted nodes rules allow.

A rule's state is immutable along a node's path, so that a draft's branches never see each other: ``advance`` returns
a new state and leaves the old one as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from outpace.common.arrays import F32, I32, U32
from outpace.errors import Argument, ParameterError
from outpace.exact.drafts import Draft
from outpace.exact.masks import allowed_mask, allows, called, everything, fault, forced_by, packed
from outpace.exact.sampling import Chooser
from outpace.params import LogitRule, SamplingParams

__all__ = [
    "AllowedTokens",
    "BadWords",
    "Bias",
    "FunctionRule",
    "MinTokens",
    "NoRepeat",
    "Penalties",
    "ProcessorRule",
    "allowed_mask",
    "forced",
    "pruned",
    "rules_for",
]

MOST_FORCED = 64  # tokens; a step verifies no more


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
    bits: U32 | None = field(default=None, repr=False)  # the same as a mask

    def start(self, prompt: I32) -> None:
        return None

    def advance(self, state: None, token: int) -> None:
        return None

    def apply(self, state: None, logits: F32) -> None:
        kept = logits[self.ids]
        logits.fill(-np.inf)
        logits[self.ids] = kept

    def mask(self, state: None) -> U32 | None:
        return self.bits


class Forbids:
    """Base of rules that forbid a few tokens, those of ``forbidden(state)``."""

    def __init__(self, vocab_size: int) -> None:
        self._everything = everything(vocab_size)

    def forbidden(self, state: Any) -> I32:
        """int32 [n]."""
        raise NotImplementedError

    def apply(self, state: Any, logits: F32) -> None:
        logits[self.forbidden(state)] = -np.inf

    def mask(self, state: Any) -> U32:
        return self._without(self.forbidden(state))

    def _without(self, ids: I32) -> U32:
        if not len(ids):
            return self._everything
        bits = self._everything.copy()
        # one word may lose several bits, which indexed assignment would not add up
        np.bitwise_and.at(bits, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        return bits


class MinTokens(Forbids):
    """Forbids ``ids``, which would end the answer, before it has ``least`` tokens. Its state is how many it has."""

    def __init__(self, least: int, ids: Iterable[int], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._least, self._ids = least, np.unique(np.array(list(ids), np.int32))
        self._none = np.zeros(0, np.int32)
        self._early = self._without(self._ids)

    def start(self, prompt: I32) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return min(state + 1, self._least)

    def forbidden(self, state: int) -> I32:
        return self._ids if state < self._least else self._none

    def mask(self, state: int) -> U32:
        return self._early if state < self._least else self._everything


class BadWords(Forbids):
    """Forbids the token that would complete one of ``sequences`` of token ids in the output.

    Its state is the end of the output, as long as the longest sequence but one.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        super().__init__(vocab_size)
        last: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            *before, end = (int(token) for token in sequence)
            last.setdefault(tuple(before), set()).add(end)
        self._last = {before: np.array(sorted(ends), np.int32) for before, ends in last.items()}
        self._lengths = sorted({len(before) for before in self._last})
        self._single = self._last.get((), np.zeros(0, np.int32))
        self._usual = self._without(self._single)

    def start(self, prompt: I32) -> tuple[int, ...]:
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        longest = self._lengths[-1]
        return (*state, token)[-longest:] if longest else ()

    def forbidden(self, state: tuple[int, ...]) -> I32:
        begun = [
            self._last[state[len(state) - n :]]
            for n in self._lengths
            if 0 < n <= len(state) and state[len(state) - n :] in self._last
        ]
        return np.unique(np.concatenate([self._single, *begun])) if begun else self._single

    def mask(self, state: tuple[int, ...]) -> U32:
        ids = self.forbidden(state)
        return self._usual if ids is self._single else self._without(ids)


class NoRepeat(Forbids):
    """Forbids the token that would complete a run of ``n`` tokens that prompt and output have already (Paulus et al.,
    arXiv 1705.04304). Its state is the tokens so far, int32 [S]."""

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._before = n - 1
        self._none = np.zeros(0, np.int32)

    def start(self, prompt: I32) -> I32:
        return np.array(prompt, np.int32)

    def advance(self, state: I32, token: int) -> I32:
        return np.append(state, np.int32(token))

    def forbidden(self, state: I32) -> I32:
        runs = len(state) - self._before  # each is followed by a token
        if runs <= 0:
            return self._none
        same = np.ones(runs, np.bool_)
        for i in range(self._before):
            same &= state[i : i + runs] == state[runs + i]
        return np.unique(state[self._before :][same])


class FunctionRule:
    """A function of the tokens so far, prompt and output, int32 [S], and the logits, float32 [V]: it changes these in
    place, or returns others. It must be pure: it sees draft prefixes that may never be committed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def start(self, prompt: I32) -> tuple[int, ...]:
        return tuple(int(token) for token in prompt)

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def apply(self, state: tuple[int, ...], logits: F32) -> None:
        try:
            changed = self._call(state, logits)
            if changed is not None:
                logits[:] = changed
        except Exception as error:
            raise fault(getattr(self._function, "__name__", type(self._function).__name__), error) from error

    def _call(self, state: tuple[int, ...], logits: F32) -> Any:
        return self._function(np.array(state, np.int32), logits)


class ProcessorRule(FunctionRule):
    """Any ``transformers.LogitsProcessor``: called with tensors of the tokens so far [1, S] and the logits [1, V]."""

    def _call(self, state: tuple[int, ...], logits: F32) -> Any:
        import torch

        return self._function(torch.tensor([state]), torch.from_numpy(logits.copy())[None])[0].numpy()


def rules_for(
    params: SamplingParams,
    vocab_size: int,
    encode: Callable[[str], Sequence[int] | I32] | None = None,
    eos_ids: Sequence[int] | None = None,
) -> tuple[LogitRule, ...]:
    """The rules that ``params`` ask for, in the order in which they apply.

    ``encode``: the tokenizer's, without start and end tokens, for texts among ``bad_words``; ``eos_ids``: the model's,
    for ``min_tokens``. Raises ParameterError.
    """
    rules: list[LogitRule] = []
    penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties != Penalties():
        rules.append(penalties)
    if params.logit_bias:
        ids = _token_ids("logit_bias", list(params.logit_bias), vocab_size)
        rules.append(Bias(ids, np.array([params.logit_bias[int(i)] for i in ids], np.float32)))
    if params.allowed_tokens is not None:
        ids = np.unique(_token_ids("allowed_tokens", params.allowed_tokens, vocab_size))
        rules.append(AllowedTokens(ids, packed(np.isin(np.arange(vocab_size), ids))))
    if params.min_tokens:
        assert eos_ids is not None, "min_tokens needs the model's own ids of the end"
        ends = (*params.stop_ids, *(() if params.ignore_eos else eos_ids))
        rules.append(MinTokens(params.min_tokens, [i for i in ends if i < vocab_size], vocab_size))
    if params.bad_words:
        rules.append(BadWords(_sequences(params.bad_words, vocab_size, encode), vocab_size))
    if params.no_repeat_ngram_size:
        rules.append(NoRepeat(params.no_repeat_ngram_size, vocab_size))
    for rule in params.rules:
        if isinstance(rule, LogitRule):
            rules.append(rule)
        elif inspect.isroutine(rule) or isinstance(rule, partial):
            rules.append(FunctionRule(rule))
        elif callable(rule):
            rules.append(ProcessorRule(rule))
        else:
            raise ParameterError(f"{rule!r} is no LogitRule: give one, a function, or a transformers LogitsProcessor")
    return tuple(rules)


def _sequences(
    words: Sequence[str | Sequence[int]], vocab_size: int, encode: Callable[[str], Sequence[int] | I32] | None
) -> set[tuple[int, ...]]:
    """``bad_words`` as token ids. A text counts as it begins an answer and as it follows a space."""
    found: set[tuple[int, ...]] = set()
    for word in words:
        if not isinstance(word, str):
            _token_ids("bad_words", word, vocab_size)
            found.add(tuple(word))
            continue
        if encode is None:
            raise ParameterError(
                Argument("bad_words"), f" has the text {word!r}, and there is no tokenizer: give token ids"
            )
        for text in {word, word.lstrip(), f" {word.lstrip()}"}:
            ids = tuple(int(token) for token in encode(text))
            if not ids:
                raise ParameterError(Argument("bad_words"), f" has {word!r}, which has no tokens: remove it")
            found.add(ids)
    return found


def _token_ids(name: str, ids: Sequence[int], vocab_size: int) -> I32:
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        limits = f" has token id {wrong[0]}, but this model's ids go from 0 to {vocab_size - 1}"
        raise ParameterError(Argument(name), limits)
    return np.array(sorted(ids), np.int32)


# -- rules and drafts ------------------------------------------------------------------------------------------------


def forced(chooser: Chooser, most: int = MOST_FORCED) -> list[int]:
    """Tokens that must come next under the rules, at most ``most``: to be drafted, never imposed. Raises RuleError."""
    asked = [i for i, rule in enumerate(chooser.rules) if getattr(rule, "forced", None) is not None]
    rules, states = [chooser.rules[i] for i in asked], [chooser.states[i] for i in asked]
    tokens: list[int] = []
    while rules and len(tokens) < most:
        more = forced_by(rules, states)[: most - len(tokens)]
        if not more:
            break
        tokens += more
        for token in more:
            states = [called(rule, "advance", state, token) for rule, state in zip(rules, states, strict=True)]
    return tokens


def pruned(draft: Draft, chooser: Chooser) -> list[int]:
    """The nodes of ``draft``, ascending, that no rule's mask forbids on the way from ``chooser``, the pending token's.

    A node goes with all that follows it. No rule is advanced over a token that it forbids. Nodes that were drawn
    (``draft.q``) all stay: under rejection a draw may not be undone by what it is. Raises RuleError.
    """
    asked = [i for i, rule in enumerate(chooser.rules) if getattr(rule, "mask", None) is not None]
    if not asked or draft.q is not None:
        return list(range(len(draft)))
    rules = [chooser.rules[i] for i in asked]
    states: dict[int, list[Any]] = {-1: [chooser.states[i] for i in asked]}  # after a node, once a child asks
    tested = [i for i, rule in enumerate(rules) if hasattr(rule, "allows")]
    masked = [i for i in range(len(rules)) if i not in tested]
    masks: dict[int, U32 | None] = {}  # of those that can give nothing but a mask
    tokens, kept = draft.tokens, []
    alive = {-1}
    for node, token in enumerate(tokens):
        parent = draft.parents[node]
        if parent not in alive:
            continue
        if parent not in masks:
            if parent not in states:
                above = states[draft.parents[parent]]
                states[parent] = [called(r, "advance", s, tokens[parent]) for r, s in zip(rules, above, strict=True)]
            masks[parent] = allowed_mask([rules[i] for i in masked], [states[parent][i] for i in masked])
        mask, current = masks[parent], states[parent]
        if (mask is None or allows(mask, token)) and all(called(rules[i], "allows", current[i], token) for i in tested):
            alive.add(node)
            kept.append(node)
    return kept
