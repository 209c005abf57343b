"""One sample of one request on the host: its tokens, when it stops, and the text so far."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

import numpy as np

from outpace.arrays import I32
from outpace.engine.results import Delta, FinishReason, Result
from outpace.engine.statistics import Stats
from outpace.engine.text import Decoder, TextSoFar
from outpace.exact.sampling import Chooser, TokenLogprob
from outpace.params import Acceptance, SamplingParams


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
