"""One sample of one request on the host: its tokens, when it stops, and the text so far."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np

from outpace.sampling import Chooser
from outpace.statistics import Stats
from outpace.types import (
    I32,
    Acceptance,
    Delta,
    FinishReason,
    Result,
    SamplingParams,
    TokenLogprob,
)


class Decoder(Protocol):
    """The part of a tokenizer that turns ids back into text."""

    def decode(self, ids: SequenceOf[int] | I32, *, skip_special: bool = True) -> str: ...


class Sequence:
    """Committed tokens and everything that is decided from them. Knows nothing of models, batches or drafters."""

    def __init__(
        self,
        request: int,
        sample: int,
        prompt: I32,
        params: SamplingParams,
        chooser: Chooser,
        *,
        limit: int,
        eos_ids: tuple[int, ...],
        decoder: Decoder | None,
        acceptance: Acceptance,
        size: int,
        drafter: str,
        adaptive: bool = False,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.request, self.sample, self.params, self.chooser = request, sample, params, chooser
        self.limit = limit  # most committed tokens, prompt included
        self.acceptance: Acceptance = acceptance
        self.size = size  # most nodes a step; 0: plain decoding
        self.adaptive = adaptive  # the policy chooses how many of them
        self.drafter, self.notes = drafter, notes
        self.prompt_length = self.length = len(prompt)
        self._tokens = np.empty(limit, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._text = TextSoFar(decoder, params.stop_strings)
        self.row = -1  # -1: not admitted
        self.reserved = 0  # KV bytes
        self.prefilled = 0  # prompt positions whose KV is written
        self.finish_reason: FinishReason | None = None
        self.stopped_by: str | int | None = None
        self.error: str | None = None
        self.sources: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.stats = Stats(prompt_tokens=len(prompt))
        self._reported = 0
        self._added = time.perf_counter()
        self._first: float | None = None

    @property
    def tokens(self) -> I32:
        """All committed tokens int32 [length]: a view."""
        return self._tokens[: self.length]

    @property
    def output(self) -> I32:
        """The committed output tokens int32 [length - prompt]: a view."""
        return self._tokens[self.prompt_length : self.length]

    @property
    def decoding(self) -> bool:
        """Whether all of the prompt but its last token is in the KV cache."""
        return self.prefilled >= self.prompt_length - 1

    @property
    def room(self) -> int:
        """The most tokens that may still be committed."""
        return self.limit - self.length

    def append(self, tokens: I32, sources: SequenceOf[str]) -> int:
        """Commit ``tokens`` up to the first that ends the sequence; returns how many were kept (at least 1)."""
        given, kept = tokens.tolist(), 0
        for token in given:
            self._tokens[self.length] = token
            self.length += 1
            kept += 1
            if token in self._stop_ids:
                self.finish_reason, self.stopped_by = "stop", token
                self._text.add(self._tokens[self.length - 1 : self.length - 1])
            else:
                self._text.add(self._tokens[self.length - 1 : self.length])
                if self._text.stopped_by is not None:
                    self.finish_reason, self.stopped_by = "stop", self._text.stopped_by
                elif self.length == self.limit:
                    self.finish_reason = "length"
            if self.finish_reason:
                break
        self.chooser = self.chooser.after(given[:kept])
        self.sources.extend(sources[:kept])
        return kept

    def delta(self) -> Delta:
        """What was gained since the last delta; the last one carries the result."""
        start, self._reported = self._reported, self.length - self.prompt_length
        now = time.perf_counter()
        gained = self._reported - start
        if self._first is None and gained:
            self._first = now
            self.stats.time_to_first_token = now - self._added
            self.stats.first_delta_tokens = gained
        if self._first is not None:
            self.stats.decode_seconds = now - self._first
        self.stats.total_seconds = now - self._added
        return Delta(
            request=self.request,
            sample=self.sample,
            text=self._text.take(final=self.finish_reason is not None),
            token_ids=tuple(self.output[start:].tolist()),
            sources=tuple(self.sources[start:]),
            logprobs=tuple(self.logprobs[start:]),
            finish_reason=self.finish_reason,
            result=self._result() if self.finish_reason else None,
        )

    def _result(self) -> Result:
        assert self.finish_reason is not None
        return Result(
            request=self.request,
            sample=self.sample,
            text=self._text.whole,
            token_ids=tuple(self.output.tolist()),
            sources=tuple(self.sources),
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_length,
            seed=self.chooser.noise.seed,
            drafter=self.drafter,
            acceptance=self.acceptance,
            stats=self.stats,
            logprobs=tuple(self.logprobs),
            stopped_by=self.stopped_by,
            error=self.error,
            notes=self.notes,
        )


class TextSoFar:
    """Text from tokens that arrive one at a time: whole characters only, and nothing that may yet be a stop string.

    A token is decoded with the few before it, since a tokenizer may join or strip at the seam. Text is fed token by
    token however many a step commits, so it cannot depend on the steps.
    """

    def __init__(self, decoder: Decoder | None, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=1)
        self._alone: dict[int, str] = {}  # texts of tokens decoded by themselves
        self._ids: list[int] = []
        self._context = 0  # ids before here are settled; those from here to ``_read`` give the next ones their context
        self._read = 0
        self._taken = 0
        self.whole = ""
        self.stopped_by: str | None = None

    def add(self, ids: I32) -> None:
        """One more token int32 [1] (or none)."""
        if self._decoder is None or not len(ids):
            return
        self._ids.append(int(ids[0]))
        text = self._unread()
        if text and not text.endswith("�"):
            self._extend(text)
            self._context, self._read = self._read, len(self._ids)

    def take(self, *, final: bool) -> str:
        """The text that may be shown since the last call; ``final`` releases what was held back."""
        if final and self.stopped_by is None and self._decoder is not None and self._read < len(self._ids):
            self._extend(self._unread())
            self._context = self._read = len(self._ids)
        end = len(self.whole) if final else len(self.whole) - self._held()
        text, self._taken = self.whole[self._taken : end], max(self._taken, end)
        return text

    def _unread(self) -> str:
        assert self._decoder is not None
        after = self._decoder.decode(self._ids[self._context :])
        return after[len(self._before(self._decoder)) :]

    def _before(self, decoder: Decoder) -> str:
        context = self._ids[self._context : self._read]
        if len(context) != 1:
            return decoder.decode(context) if context else ""
        token = context[0]
        if token not in self._alone:
            self._alone[token] = decoder.decode(context)
        return self._alone[token]

    def _extend(self, text: str) -> None:
        searched = len(self.whole)
        self.whole += text
        found = [(self.whole.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if found:  # the one that begins first, and of those the one given first
            at, self.stopped_by = min(found, key=lambda hit: hit[0])
            self.whole = self.whole[:at]

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for n in range(min(self._longest - 1, len(self.whole)), 0, -1):
            if any(stop.startswith(self.whole[-n:]) for stop in self._stops):
                return n
        return 0
