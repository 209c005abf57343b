"""A request that runs: what it asks of an engine, its parts as they come, what it holds of the server, what it cost.

A ``Part`` is what one choice gained at a time; a ``Whole`` is all parts of a choice: streamed and unstreamed answers
are made of the same.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.common.arrays import I32
from outpace.engine.aio import Running
from outpace.engine.results import TARGET, Delta, Result
from outpace.exact.noise import fresh_seed
from outpace.exact.sampling import TokenLogprob
from outpace.params import SamplingParams
from outpace.server import errors
from outpace.server.conversation.pieces import Event, Joined, OutputParser, Plain, Segment, Segmenter
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.observe.delays import Delay
from outpace.server.schema import Answer
from outpace.text.answer import TextReader

_EXACT = 2**53  # whole numbers below it survive JSON anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine is asked: every prompt (token ids int32 [P]) with the same parameters.

    ``options``: of ``Engine.prepare``; ``parser``: of a choice's text, by the choice's index; ``trace``: the answer
    says who wrote it; ``nothing``: only the prompts are read, and what is written is left out; ``texts``: the prompts,
    where the answer repeats them; ``notes``: what of the request changed nothing; ``resume``: token ids, by choice,
    that the answer goes on after, ``verify`` the last of them.
    """

    prompts: list[I32]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    parser: Callable[[int], OutputParser] | None = None
    trace: bool = False
    nothing: bool = False
    texts: list[str] = field(default_factory=list)
    user: str | None = None
    notes: list[str] = field(default_factory=list)
    resume: list[list[int]] | None = None
    verify: bool = False

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n

    def resumed(self, prompt: int) -> dict[str, Any]:
        """Options of ``Engine.prepare`` that say what this prompt's answers go on after."""
        if self.resume is None:
            return {}
        first = prompt * self.params.n
        return {"resume": self.resume[first : first + self.params.n], "verify_resume": self.verify}


def seeded(params: SamplingParams) -> SamplingParams:
    """``params`` with a seed: their own, or a fresh one that the answer reports."""
    return params if params.seed is not None else params.with_(seed=fresh_seed() % _EXACT)


@dataclass(slots=True)
class Part:
    """What a choice gained. ``finish``: OpenAI's reason, with the last one; ``stop_reason``: the stop string or token
    id, or "deadline". ``written``: the text with who wrote what of it, where that was asked for; ``drafted``: draft
    tokens that were verified meanwhile."""

    index: int
    events: list[Event]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    written: Sequence[tuple[str, str]] = ()
    drafted: int = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    result: Result | None = None

    @property
    def joined(self) -> Joined:
        """What it says."""
        joined = Joined()
        joined.add(self.events)
        return joined


class Colours:
    """Which drafter wrote which part of a choice's text, or the target. ``reader``: of tokens, without stop strings."""

    def __init__(self, reader: TextReader) -> None:
        self._reader, self._state = reader, reader.start
        self._unshown: deque[tuple[str, str]] = deque()  # of tokens whose text may yet be cut off

    def of(self, delta: Delta) -> list[tuple[str, str]]:
        """``(text, source)``: the texts together are the delta's. A token that shows nothing by itself has an empty
        one: a character is credited to the token that ends it."""
        for token, source in zip(delta.token_ids, delta.sources, strict=True):
            self._state, text = self._reader.add(self._state, token)
            self._unshown.append((text, source))
        left, shown = delta.text, []
        while self._unshown and (left or not self._unshown[0][0]):
            text, source = self._unshown.popleft()
            piece, left = left[: len(text)], left[len(text) :]
            shown.append((piece, source))
            if len(piece) < len(text):
                self._unshown.appendleft((text[len(piece) :], source))
        if left:
            shown.append((left, shown[-1][1] if shown else TARGET))
        return shown


@dataclass(slots=True)
class Choice:
    """Makes parts of one sample's deltas. ``colours``: who wrote what, where the request asks for it; ``nothing``: only
    the prompt is read, so generated tokens are left out."""

    index: int
    parser: OutputParser = field(default_factory=Plain)
    colours: Colours | None = None
    nothing: bool = False
    segmenter: Segmenter = field(default_factory=Segmenter)
    _calls: Joined = field(default_factory=Joined)
    _last: Segment | None = None

    def feed(self, delta: Delta) -> Part:
        """What ``delta`` means."""
        if self.nothing:
            delta = replace(delta, text="", token_ids=(), sources=(), logprobs=())
        pieces = self.parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self.parser.finish()]
        events = self.segmenter.feed(pieces, last=delta.finish_reason is not None)
        self._calls.add(event for event in events if event.segment.kind == "call")
        self._last = events[-1].segment if events else self._last
        written = () if self.colours is None else self.colours.of(delta)
        part = Part(self.index, events, delta.token_ids, delta.logprobs, delta.prompt_logprobs, written, delta.drafted)
        if delta.result is not None:
            part.result = delta.result
            part.finish, part.stop_reason = self._finish(delta.result)
        return part

    def _finish(self, result: Result) -> tuple[str, str | int | None]:
        if self.nothing:
            return "length", None
        if result.finish_reason == "stop":
            whole = [call.whole for call in self._calls.calls]
            broken = self._last is not None and self._last.kind == "call" and not whole[-1]
            if broken and not isinstance(result.stopped_by, str):  # the model's end came within a call
                return "length", result.stopped_by
            return "tool_calls" if any(whole) and not broken else "stop", result.stopped_by
        return "length", "deadline" if result.finish_reason == "deadline" else None


@dataclass(slots=True)
class Whole:
    """All parts of a choice, put together."""

    index: int
    joined: Joined = field(default_factory=Joined)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    written: list[tuple[str, str]] = field(default_factory=list)
    drafted: int = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    result: Result | None = None

    def add(self, part: Part) -> None:
        """Take up a part."""
        self.joined.add(part.events)
        self.token_ids.extend(part.token_ids)
        self.logprobs.extend(part.logprobs)
        self.written.extend(part.written)
        self.drafted += part.drafted
        if part.prompt_logprobs:
            self.prompt_logprobs = part.prompt_logprobs
        if part.result is not None:
            self.finish, self.stop_reason, self.result = part.finish, part.stop_reason, part.result


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked, and what for. ``kind``: what the answer's id begins with; ``scope``: whose KV may be shared."""

    kind: str
    request_id: str
    scope: str = ""


class Observer:
    """Base of metrics, logs and spans; by itself it does nothing. Called in the event loop: no method may take long."""

    def began(self, generation: Generation) -> None:
        """The request was queued."""

    def gained(self, generation: Generation, parts: Sequence[Part]) -> None:
        """Parts of the answer have come."""

    def ended(self, generation: Generation, error: APIError | None) -> None:
        """The request is over: with ``error``; or all choices have ended; or, neither, the client went away."""

    def refused(self, error: APIError) -> None:
        """A request was answered with an error that ended no generation."""

    def delayed(self, delay: Delay) -> None:
        """The event loop was so late."""


class Generation:
    """The caller closes it. ``results``: of the choices that have ended, by index."""

    def __init__(
        self, model: Served, work: Work, running: Running, caller: Caller, observers: Sequence[Observer]
    ) -> None:
        self.model, self.work, self.request_id, self.user = model, work, caller.request_id, work.user
        self._running, self._observers = running, observers
        self.held = AsyncExitStack()  # what it has of the server, given back when it closes
        self.id = f"{caller.kind}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.began = time.perf_counter()
        self.first_token_at: float | None = None  # by the same clock
        self._choices = {
            (request, sample): self._choice(i * work.params.n + sample)
            for i, request in enumerate(running.ids)
            for sample in range(work.params.n)
        }
        self.results: dict[int, Result] = {}
        self.tokens = 0  # that have come
        self.resumed = {  # what was delivered before, by choice
            index: choice.feed(delivered)
            for index, (choice, delivered) in enumerate(zip(self._choices.values(), running.delivered, strict=True))
            if delivered is not None
        }
        self._abort: APIError | None = None
        self._error: APIError | None = None
        self._closed = False

    def _choice(self, index: int) -> Choice:
        work = self.work
        parser = Plain() if work.parser is None else work.parser(index)
        return Choice(index, parser, Colours(self.reader(index)) if work.trace else None, work.nothing)

    def reader(self, index: int) -> TextReader:
        """How a choice's tokens become text, but for its stop strings."""
        work = self.work
        prompt = work.prompts[index // work.params.n]
        return TextReader(
            self.model.tokenizer, skip_special=work.params.skip_special_tokens,
            shown=work.options.get("shown_tokens", ()), after=prompt,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """Choices that have not ended."""
        return self._running.left

    @property
    def progress(self) -> PromptProgress:
        """Of reading the prompts."""
        total, reused, read = self._running.progress
        read = total if self.first_token_at is not None else read
        return PromptProgress(
            total=total, cache=reused, processed=read, time_ms=round(1e3 * (time.perf_counter() - self.began))
        )

    @property
    def in_order(self) -> list[Result]:
        """The results there are, by choice."""
        return [self.results[index] for index in sorted(self.results)]

    async def parts(self, timeout: float | None = None) -> list[Part]:
        """What has come; none when ``timeout`` seconds brought nothing. Raises APIError when a choice failed."""
        try:
            return await self._parts(timeout)
        except Exception as error:
            self._error = errors.of(error)
            self._error.observed = True
            raise self._error from error

    async def _parts(self, timeout: float | None) -> list[Part]:
        deltas = await self._running.get(timeout)
        if self._abort is not None:
            raise self._abort
        parts = []
        for delta in deltas:
            part = self._choices[delta.request, delta.sample].feed(delta)
            parts.append(part)
            self.tokens += len(part.token_ids)
            if (result := part.result) is not None:
                if result.finish_reason in ("error", "cancelled"):
                    raise _failure(result)
                self.model.admission.took(result.stats.total_seconds)
                self.results[part.index] = result
        if self.first_token_at is None and any(part.token_ids for part in parts):
            self.first_token_at = time.perf_counter()
        if parts:
            for observer in self._observers:
                observer.gained(self, parts)
        return parts

    def abort(self, error: APIError) -> None:
        """The reader gets ``error`` next."""
        self._abort = error
        self._running.wake()

    async def aclose(self) -> None:
        """Free its rows before the engine's next step. Calling twice is allowed."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.held.aclose()
        finally:
            for observer in self._observers:
                observer.ended(self, self._error)


def _failure(result: Result) -> APIError:
    if result.cause is not None and (failure := errors.of(result.cause)).status < 500:
        return failure
    return APIError(500, result.error or "the request was cancelled", code="generation_failed")


class Speculation(Answer):
    """Of all choices together. ``near_ties``: tokens that another order of sums might have chosen otherwise.
    ``off_because``: why nothing was drafted (None: something was). ``notes``: what was turned off or is lossy."""

    drafter: str
    acceptance: str
    steps: int
    drafted: int
    accepted: int
    tokens_per_step: float
    near_ties: int
    off_because: str | None
    notes: list[str]


class PromptProgress(Answer):
    """As llama.cpp has it: of the prompt's ``total`` tokens ``processed`` are read, of which ``cache`` had been."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Timings(Answer):
    """As llama.cpp has them, of all choices so far: milliseconds, and tokens a second. The first token comes of reading
    the prompt, so that none is written in its time. ``cache_n``: tokens of the prompt whose KV was there."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


def timings(generation: Generation) -> Timings:
    """What the request took so far."""
    progress, now, first = generation.progress, time.perf_counter(), generation.first_token_at
    read = progress.processed - progress.cache
    reading = ((now if first is None else first) - generation.began) if read else 0.0
    written, writing = max(generation.tokens - 1, 0), 0.0 if first is None else now - first
    results = generation.in_order
    return Timings(
        cache_n=progress.cache,
        prompt_n=read,
        prompt_ms=1e3 * reading,
        prompt_per_token_ms=1e3 * reading / read if read else 0.0,
        prompt_per_second=read / reading if reading else 0.0,
        predicted_n=generation.tokens,
        predicted_ms=1e3 * writing,
        predicted_per_token_ms=1e3 * writing / written if written else 0.0,
        predicted_per_second=written / writing if writing else 0.0,
        draft_n=sum(result.stats.drafted for result in results),
        draft_n_accepted=sum(result.stats.accepted for result in results),
    )


class PromptDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    """OpenAI's ``usage``, and ``speculation``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    speculation: Speculation


def usage(generation: Generation) -> Usage:
    """Of a request whose choices have all ended."""
    results = generation.in_order
    prompts = list({result.request: result for result in results}.values())
    prompt = sum(result.prompt_tokens for result in prompts)
    generated = 0 if generation.work.nothing else sum(result.completion_tokens for result in results)
    reused = sum(min(result.stats.reused_tokens, result.prompt_tokens) for result in prompts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptDetails(cached_tokens=reused),
        speculation=speculation(results, generation.work.notes),
    )


def speculation(results: Sequence[Result], notes: Sequence[str] = ()) -> Speculation:
    """Pooled over the choices. ``notes``: of the request."""
    steps = sum(result.stats.steps for result in results)
    tokens = sum(result.stats.tokens for result in results)
    return Speculation(
        drafter=results[0].drafter,
        acceptance=results[0].acceptance,
        steps=steps,
        drafted=sum(result.stats.drafted for result in results),
        accepted=sum(result.stats.accepted for result in results),
        tokens_per_step=tokens / steps if steps else 0.0,
        near_ties=sum(result.stats.near_ties for result in results),
        off_because=_off(results),
        notes=list(dict.fromkeys([*notes, *(note for result in results for note in result.notes)])),
    )


def _off(results: Sequence[Result]) -> str | None:
    reasons: list[str] = []
    for result in results:
        if result.drafter == "none":
            reasons.append("plain decoding was asked for, of this request or of the server")
        elif not result.stats.drafted_steps:
            reasons.append(result.stats.decision)
        else:
            return None
    return "; ".join(dict.fromkeys(reasons)) or None
