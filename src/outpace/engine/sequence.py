"""One sample of one request on the host: its tokens, when it stops, and the text so far.

What a step would add is computed first, as an ``Extension``, and taken up by ``commit``, which cannot fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from outpace import _fast
from outpace.common.arrays import I32
from outpace.engine.kv_store import Chain, Reading
from outpace.engine.request import Request
from outpace.engine.results import TARGET, Delta, FinishReason, Result
from outpace.engine.statistics import Counted, Stats
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.exact.drafts import Draft
from outpace.exact.rules import pruned
from outpace.exact.sampling import Chooser, TokenLogprob
from outpace.text.answer import TextError, TextReader, TextState

BUNCH = 64  # steps that are counted together
VERIFIED = 8  # tokens of a resumed answer that the target chooses again, where that is asked for
RESUMED = "resumed"  # the source of tokens that an answer was resumed after


class Extension(NamedTuple):
    """What committing some tokens would make of a sequence."""

    tokens: list[int]  # those that are kept: up to the first that ends it
    chooser: Chooser | None  # None: without rules, it is known by its index
    text: TextState
    shown: str  # text that may be shown now
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    error: str | Exception | None = None


class Sequence:
    """Committed tokens and everything that is decided from them. Knows nothing of models, batches or drafters."""

    def __init__(
        self,
        request: Request,
        sample: int,
        chooser: Chooser,
        reader: TextReader,
        *,
        eos_ids: tuple[int, ...] = (),
        text_of: Callable[[int], str] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.request, self.sample, self._chooser = request, sample, chooser
        self._reader, self._text_of = reader, text_of  # of committed text; of a token by itself
        self.size = request.size  # most nodes a step; falls to 0 when its drafter failed
        self.attempts = 0  # at giving it a row, that failed
        self.paused = False  # no memory for a draft in this step
        self.drafter = request.drafter
        self.notes = list(notes)
        params = request.params
        self.prompt_length = self.length = len(request.prompt)
        memory = np.empty(min(request.limit, self.length + 64), np.int32)
        memory[: self.length] = request.prompt
        self._hold(memory)
        self.left = False  # it has ended, and the engine is through with it
        self.result: Result | None = None  # that of its last delta
        self.unsent: Delta | None = None  # the last one, until it is on its way
        self.pending = int(request.prompt[-1])  # the last committed token, whose KV is not written yet
        self._stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._text = reader.start
        self._shown: list[str] = []
        self._known = 0  # pieces of it that were committed
        self.row = -1  # -1: it waits
        self.native: _fast.native.Row | None = None  # itself in its row, as steps take it (``step.native_row``)
        # What its drafter learns from (``step.native_row``): whether C++ observes what becomes final; whether Python
        # does, with hidden states or not; how many likeliest tokens after each verified one Python gets.
        self.listens = self.observes = self.reads = False
        self.ranks = 0
        self.ruled = bool(chooser.rules)
        self.branch = 0  # where its beginning parts from another row's that could not be shared so far
        self.cached = 0  # positions whose KV is written
        self.chain: Chain | None = None  # names of its beginnings on the disk
        self.reading: Reading | None = None  # what its row is given from there
        self.finish_reason: FinishReason | None = None
        self.stopped_by: str | int | None = None
        self.error: str | None = None
        self.cause: OutpaceError | None = None
        self.sources: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self._reported = self._reported_text = 0
        self.delivered: Delta | None = None  # what it was resumed after
        self._again: list[int] = []  # of that: the tokens up to which the target must choose the same again
        self._covered = 0  # characters that were delivered before it was resumed
        self._unscored = self._rescored = 0  # tokens of those without log-probabilities, and with
        self._drafted = 0  # nodes verified since the last delta
        self._uncounted: list[Counted] = []
        self._first: float | None = None

    def _hold(self, memory: I32) -> None:
        # Two ways to the same memory: numpy's own code is large, and cold in every step; and drafters may only read,
        # whatever flag they set.
        self._tokens, self.buffer = np.frombuffer(memory.data.toreadonly(), np.int32), memory.data

    @property
    def tokens(self) -> I32:
        """All committed tokens int32 [length]: a view that cannot be written to."""
        return self._tokens[: self.length]

    @property
    def chooser(self) -> Chooser:
        """Of the next output token."""
        behind = self.length - self.prompt_length - self._chooser.index
        if behind and not self._chooser.states:
            self._chooser = self._chooser.after(range(behind))
        return self._chooser

    @property
    def output(self) -> I32:
        """The committed output tokens int32 [length - prompt]: a view."""
        return self._tokens[self.prompt_length : self.length]

    @property
    def limit(self) -> int:
        return self.request.limit

    @property
    def decoding(self) -> bool:
        """Whether all committed tokens but the last are in the KV cache."""
        return self.cached >= self.length - 1

    @property
    def room(self) -> int:
        """The most tokens that may still be committed."""
        return self.limit - self.length

    def resume(self, tokens: list[int], verify: bool) -> None:
        """Begin after output ``tokens``, which this very request has produced and delivered. ``verify``: the target
        chooses the last few again. Raises ParameterError for tokens that cannot be this request's, or RuleError."""
        if not tokens:
            return
        allowed = len(pruned(Draft.chain(tokens), self._chooser))
        end = self.extended(tokens[:allowed]) if allowed else None
        taken = 0 if end is None else len(end.tokens)
        if end is None or taken < len(tokens):
            why = f"token {tokens[taken]} at index {taken}, which a rule of this request forbids there"
            if end is not None and end.finish_reason is not None:
                why = f"{len(tokens)} tokens, but token {end.tokens[-1]} at index {taken - 1} ends the answer"
            raise ParameterError(
                Argument("resume"), f" has {why} (sample {self.sample}): give what this very request has produced"
            )
        self.delivered = Delta(
            self.request.id, self.sample, end.shown, tuple(tokens), (RESUMED,) * taken, finish_reason=end.finish_reason
        )
        known = tokens[:-VERIFIED] if verify else tokens
        if known:
            self.commit(end if known is tokens else self.extended(known), [RESUMED] * len(known))
        self._again = tokens if verify else []
        self._reported, self._covered = len(tokens), len(end.shown)
        self._unscored, self._rescored = len(known), len(tokens) - len(known)

    def extended(self, tokens: list[int]) -> Extension:
        """What ``tokens`` (at least one) would make of it: kept up to the first that ends it.

        Raises RuleError or TextError when a rule or the tokenizer fails, ParameterError when it was resumed after
        other tokens.
        """
        if self._again:
            self._check_again(tokens)
        if self.length + len(tokens) < self.limit and self._stop_ids.isdisjoint(tokens) and not self._chooser.states:
            added = self._reader.add_all(self._text, tokens)
            if added is not None:  # as nearly always: nothing of what follows
                return Extension(tokens, None, *added)
        text, shown, kept = self._text, "", 0
        stopped_by: str | int | None = None
        reason: FinishReason | None = None
        params, done = self.request.params, self.length - self.prompt_length
        for token in tokens:
            kept += 1
            early = done + kept <= params.min_tokens
            if token in self._stop_ids and not early:
                reason, stopped_by = "stop", token
                text, more = self._reader.add(text, token, hide=not params.include_stop)
            else:
                text, more = self._reader.add(text, token, may_stop=not early)
            shown += more
            if text.stopped_by is not None:
                reason, stopped_by = "stop", text.stopped_by
            elif reason is None and self.length + kept == self.limit:
                reason = "length"
            if reason:
                break
        if reason:
            text, more = self._reader.finish(text)
            shown += more
            if text.stopped_by is not None and stopped_by is None:
                reason, stopped_by = "stop", text.stopped_by
        given = tokens[:kept]
        chooser = None
        if self._chooser.states:  # nothing follows a token that ends it: a grammar need not take it
            chooser = self._chooser.after(given[:-1] if reason else given)
        return Extension(given, chooser, text, shown, reason, stopped_by)

    def _check_again(self, tokens: list[int]) -> None:
        done = self.length - self.prompt_length
        for i, (token, given) in enumerate(zip(tokens, self._again[done:], strict=False), done):
            if token != given:
                raise ParameterError(
                    Argument("resume"), f" has token {given} at index {i} (sample {self.sample}), where this request "
                    f"chooses {token}: give what this very request has produced, with its seed",
                )  # fmt: skip

    def spelled(self, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
        """The same, with the tokens' texts where there is a tokenizer. Raises TextError."""
        if self._text_of is None:
            return logprobs
        try:
            return [token.with_texts(self._text_of) for token in logprobs]
        except Exception as error:
            raise TextError(f"the tokenizer could not spell a token: {error!r}") from error

    def ended(self, reason: FinishReason, error: str | Exception | None = None) -> Extension:
        """An extension by nothing that ends it."""
        try:
            text, shown = self._reader.finish(self._text)
        except TextError:  # what could not be decoded is left out; the request ends for a reason of its own
            text, shown = self._text, self._text.pending
        return Extension([], None, text, shown, reason, None, error)

    def commit(
        self,
        extension: Extension,
        sources: SequenceOf[str] = (),
        logprobs: SequenceOf[TokenLogprob] = (),
        cached: int | None = None,
    ) -> None:
        """Take up what ``extended`` computed. ``sources``: who wrote each token; ``cached``: positions whose KV is then
        written (None: as many as before).

        A signal's handler may raise between any two calls. What the last assignment has not taken up is as it was: what
        lists and the buffer hold beyond is written over by the next commit.
        """
        n, text, reason = len(extension.tokens), extension.text, extension.finish_reason
        at, done, token = self.length, self.length - self.prompt_length, self.pending
        if at + n > len(self._tokens):
            grown = np.empty(min(self.limit, 2 * (at + n)), np.int32)
            grown[:at] = self.tokens
            self._hold(grown)
        buffer = self.buffer
        for token in extension.tokens:
            buffer[at] = token
            at += 1
        self.sources[done:] = sources[:n]
        self.logprobs[max(done - self._unscored, 0) :] = logprobs[:n]
        self._shown[self._known :] = [extension.shown] if extension.shown else []
        if reason is not None:
            self.stopped_by, error = extension.stopped_by, extension.error
            self.error = None if error is None else str(error)
            self.cause = error if isinstance(error, OutpaceError) else None
            text = text._replace(held="", shown=b"")
        chooser = extension.chooser or self._chooser
        new = token, at, text, chooser, len(self._shown), self.cached if cached is None else cached, reason
        self.pending, self.length, self._text, self._chooser, self._known, self.cached, self.finish_reason = new

    def count(self, step: Counted) -> None:
        """Take down what a step did, for ``stats``: counted in bunches, since that code is cold in every step."""
        self._uncounted.append(step)
        if step.levels:
            self._drafted += len(step.sources)
        if len(self._uncounted) == BUNCH:
            self.count_up()

    def count_up(self) -> None:
        """Bring ``stats`` up to date."""
        while self._uncounted:
            self.stats.add(self._uncounted.pop(0))

    def plainly(self, why: str) -> None:
        """Its drafter failed: it goes on without it."""
        self.size, self.native = 0, None
        if why not in self.notes:
            self.notes.append(why)

    def begin(self) -> None:
        """It has its row: for the first time, or again."""
        if not self.stats.queue_seconds:
            self.stats.queue_seconds = time.perf_counter() - self.request.added

    @property
    def reported(self) -> bool:
        """Whether there is nothing new for a delta."""
        ended = self.finish_reason is None or self.result is not None
        return ended and self._reported >= self.length - self.prompt_length

    def delta(self) -> Delta:
        """What was gained since the last delta, and is ``unsent`` then; the last one carries the result."""
        start = self._reported
        end, pieces = max(start, self.length - self.prompt_length), self._known
        text = "".join(self._shown[self._reported_text : pieces])
        covered = min(self._covered, len(text))
        now = time.perf_counter()
        gained = end - start
        first = self._first is None and gained > 0
        if first:
            self._first = now
            self.stats.time_to_first_token = now - self.request.added
            self.stats.first_delta_tokens = gained
        if self._first is not None:
            self.stats.decode_seconds = now - self._first
        self.stats.total_seconds = now - self.request.added
        result = self._result() if self.finish_reason else None
        delta = Delta(
            request=self.request.id,
            sample=self.sample,
            text=text[covered:],
            token_ids=tuple(self.buffer[self.length - gained : self.length].tolist()),
            sources=tuple(self.sources[start:end]),
            logprobs=tuple(self.logprobs[start - self._unscored : end - self._unscored]),
            prompt_logprobs=tuple(self.prompt_logprobs) if first and self.delivered is None else (),
            drafted=self._drafted,
            finish_reason=self.finish_reason,
            result=result,
        )
        left = self._covered - covered
        self._reported, self._reported_text, self._covered, self._drafted = end, pieces, left, 0
        self.result, self.unsent = result, delta
        return delta

    def _result(self) -> Result:
        assert self.finish_reason is not None
        request = self.request
        self.stats.queue_seconds = self.stats.queue_seconds or self.stats.total_seconds
        return Result(
            request=request.id,
            sample=self.sample,
            text="".join(self._shown),
            token_ids=tuple(self.output.tolist()),
            sources=tuple(self.sources),
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_length,
            seed=request.seed,
            drafter=request.drafter,
            acceptance=request.acceptance,
            stats=self.stats,
            logprobs=tuple(self.logprobs[self._rescored :]),
            prompt_logprobs=tuple(self.prompt_logprobs),
            stopped_by=self.stopped_by,
            error=self.error,
            cause=self.cause,
            notes=tuple(self.notes),
            pieces=self._pieces(),
        )

    def _pieces(self) -> tuple[tuple[str, str], ...]:
        """See ``Result.pieces``."""
        left = "".join(self._shown)
        reader = self._reader.without_stops()
        state = reader.start
        found: list[tuple[str, str]] = []
        try:
            for token, source in zip(self.output.tolist(), self.sources, strict=True):
                state, text = reader.add_all(state, (token,)) or reader.add(state, token)
                piece = text[: len(left)]  # what stopped it is cut off
                left = left[len(piece) :]
                if found and found[-1][1] == source:
                    found[-1] = found[-1][0] + piece, source
                elif piece:
                    found.append((piece, source))
        except TextError:  # the rest is nobody's
            pass
        return (*found, (left, TARGET)) if left else tuple(found)


class Prepared(NamedTuple):
    """A request that was checked, with its samples: what ``Engine.submit`` queues."""

    request: Request
    sequences: list[Sequence]
