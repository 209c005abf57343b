"""The engine: requests go in, ``step`` decodes all of them together, deltas and results come out.

What a step computes is in step.py, how it is applied in core.py.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from outpace.common.arrays import I32
from outpace.common.fair_lock import any_mine
from outpace.common.files import StrPath
from outpace.common.progress import Advance, in_notebook, progress
from outpace.control import cost as costs
from outpace.control.adaptive import Adaptive
from outpace.control.cost import Cost
from outpace.drafters.base import Drafter, DrafterSource, described
from outpace.drafters.none import NoDrafter
from outpace.engine import intake
from outpace.engine.core import Core
from outpace.engine.drafting import Drafting
from outpace.engine.kv_files import Counts
from outpace.engine.request import Request, Size, StepRecord
from outpace.engine.results import Delta, Errors, Result
from outpace.engine.scheduler import Pace, Scheduler
from outpace.engine.sequence import Prepared, Sequence
from outpace.engine.statistics import Stats, pooled
from outpace.engine.step import advance
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.exact.noise import Noise, fresh_seed
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.models.base import Model
from outpace.params import Acceptance, Prompt, SamplingKeywords, SamplingParams
from outpace.text.answer import TextReader
from outpace.text.token_bytes import token_texts

if TYPE_CHECKING:
    from outpace.engine.core import Core
    from outpace.engine.intake import EngineOptions
    from outpace.engine.request import EngineKeywords, EngineLoadKeywords, RequestKeywords
    from outpace.text.tokenizer import Tokenizer

Prepare = Callable[..., Prepared]  # Engine.prepare


def prepared_one(
    prepare: Prepare, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any]
) -> Prepared:
    """One request with one sample. Raises ParameterError, and what ``prepare`` raises."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise ParameterError(f"generate takes one prompt, and this is a list of {len(prompt)}: use generate_many")
    prepared = prepare(prompt, params, **options)
    n = len(prepared.sequences)
    if n != 1:
        raise ParameterError(Argument("n", n), " samples make several results: use generate_many")
    return prepared


def prepared_many(
    prepare: Prepare,
    prompts: SequenceOf[Prompt],
    params: SamplingParams | SequenceOf[SamplingParams] | None,
    options: Mapping[str, Any],
) -> list[Prepared]:
    """A request a prompt. Raises ParameterError, and what ``prepare`` raises."""
    if isinstance(prompts, str):
        raise ParameterError("generate_many takes a list of prompts, and this is one text: use generate")
    if not isinstance(prompts, SequenceOf) and not hasattr(prompts, "__array__"):
        raise ParameterError(f"the prompts are a {type(prompts).__name__}: give a list of prompts")
    each = list(params) if isinstance(params, SequenceOf) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise ParameterError(f"{len(each)} params for {len(prompts)} prompts: give one for all, or one each")
    return [prepare(prompt, own, **options) for prompt, own in zip(prompts, each, strict=True)]


def checked_errors(errors: Errors) -> bool:
    """Whether an answer's error is raised. Raises ParameterError."""
    if errors not in ("raise", "return"):
        raise ParameterError(Argument("errors", errors), " is unknown: use raise, or return (the result has the error)")
    return errors == "raise"


def bar(samples: int, shown: bool | None) -> AbstractContextManager[Advance]:
    """Progress of so many answers. ``shown``: None in a notebook alone, where several are awaited."""
    return progress("answers", samples, speed=True, shown=in_notebook() and samples > 1 if shown is None else shown)


class Collected:
    """Results of ``requests``, from their deltas."""

    def __init__(self, requests: SequenceOf[Prepared], errors: Errors, advance: Advance) -> None:
        self._order = {prepared.request.id: place for place, prepared in enumerate(requests)}
        self._raises, self._advance = checked_errors(errors), advance
        self._results: dict[tuple[int, int], Result] = {}
        self._total = sum(len(prepared.sequences) for prepared in requests)

    @property
    def complete(self) -> bool:
        return len(self._results) == self._total

    def take(self, delta: Delta) -> None:
        """Raises what ended a request, where errors are to be raised."""
        result, place = delta.result, self._order[delta.request]
        self._advance(int(result is not None), len(delta.token_ids))
        if result is None:
            return
        self._results[place, delta.sample] = result
        if self._raises:
            try:
                result.raise_for_error()
            except OutpaceError as error:
                if len(self._order) > 1:
                    error.add_note(f"in prompt {place + 1} of {len(self._order)}; errors='return' returns all results")
                raise

    @property
    def results(self) -> list[Result]:
        """In the order of the requests, and of the samples within one."""
        return [self._results[key] for key in sorted(self._results)]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Between two steps. ``stats``: pooled over samples that have ended, run or were preempted.
    ``kv_bound``: bytes that KV can come to, by the bound on memory or else by rows and length."""

    running: int
    waiting: int
    rows: int  # the most that run at once
    kv_bytes: int
    kv_bound: int
    block_bytes: int
    prefix_rows: int  # kept for requests that begin alike
    preemptions: int
    stats: Stats
    disk: Counts | None  # of KV that is kept there


def snapshot(core: Core, options: EngineOptions, memory: int | None) -> Snapshot:
    """In the engine's thread. ``memory``: the bound in bytes."""
    scheduler, kv = core.scheduler, core.model.kv
    preempted = [each for each in scheduler.sequences if each.row < 0 and each.stats.preemptions]
    begun = [*scheduler.running, *preempted]
    for sequence in begun:
        sequence.count_up()
    return Snapshot(
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        rows=options.max_rows,
        kv_bytes=kv.bytes,
        kv_bound=options.max_rows * kv.bytes_for(core.model.info.max_length) if memory is None else memory,
        block_bytes=kv.bytes_for(kv.block),
        prefix_rows=len(scheduler.prefixes),
        preemptions=scheduler.preemptions,
        stats=pooled([core.finished, *(sequence.stats for sequence in begun)]),
        disk=None if scheduler.store is None else scheduler.store.counts,
    )


class Engine:
    """Decodes requests together, exactly as the target alone would have. Any thread may call any method.

    One thread at a time has the engine, for a step or for what goes between two; threads that wait for an answer take
    turns to run steps, which are of all requests. A rule or listener that a step calls may not ask for another step
    (OutpaceError); requests that it cancels end with the step.

    ``model``: the target; ``tokenizer``: of its text (None: prompts are token ids, and answers have no text).
    ``drafter``: the one that requests get unless they choose; ``drafters``: others that they may choose, by name.
    ``options``: those of ``EngineOptions``. ``kv_memory``: a hard bound in bytes over target and drafters (never more
    than the model's own). ``cost``: what a forward costs, if that was measured (else it is now, where size is "auto").
    ``on_step``: is given every step's ``StepRecord`` once it is applied; what it raises reaches the caller of ``step``.
    ``cache_dir``: a folder that keeps the KV of prompts beyond memory and restarts, in at most ``cache_size`` bytes (or
    "8GiB", the default, where that is not more than a tenth of what is free); it belongs to the native backend.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        drafter: Drafter | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        kv_memory: int | None = None,
        cost: Cost | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        cache_dir: StrPath | None = None,
        cache_size: int | str | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.options = intake.engine_options(options)
        self._lock = model.lock  # of all that a step touches
        self.drafter = drafter or NoDrafter()
        for each in (self.drafter, *(drafters or {}).values()):
            described(each)
        self.drafter.check_acceptance(self.options.acceptance)
        own = {} if isinstance(self.drafter, NoDrafter) else {self.drafter.name: self.drafter}
        self.drafters: dict[str, Drafter] = {**own, **(drafters or {})}
        self.adaptive = self.options.size == "auto" and bool(self.drafters)
        policy = None
        if self.adaptive:
            policy = Adaptive(cost or costs.of(model), stretch=self.options.step_stretch)
        drafting = Drafting(self.drafters, policy)
        self._memory = min((bound for bound in (kv_memory, model.kv.limit) if bound is not None), default=None)
        self._store = intake.kv_store(model, cache_dir, cache_size)
        scheduler = Scheduler(
            model.kv,
            drafting,
            max_rows=self.options.max_rows,
            pace=Pace(self.options.prefill_chunk, self.options.prefill_delay),
            memory=self._memory,
            prefix_rows=self.options.prefix_rows,
            store=self._store,
        )
        self._core = Core(model, drafting, scheduler)
        self.on_step = on_step
        self._text_of = None if tokenizer is None else token_texts(tokenizer)
        self._ids = itertools.count()
        self._mailboxes: dict[int, deque[Delta]] = {}  # of requests that stream or generate waits for
        self._later: deque[Callable[[], object]] = deque()  # what was asked for within a step, for its end
        self._delivering = False  # deltas go out; True before that: it was interrupted
        self._busy = self._closed = False  # busy: in a step, or at the end of a request, which may call listeners

    @classmethod
    def load(
        cls,
        model: Any = "demo",
        *,
        drafter: DrafterSource | None = "auto",
        drafters: SequenceOf[DrafterSource] = (),
        tokenizer: Any = None,
        **options: Unpack[EngineLoadKeywords],
    ) -> Engine:
        """Load a model by name, folder or file, with its tokenizer and drafters.

        ``model``: "demo", a Hugging Face id, a folder, or a .gguf file; or a transformers model in memory, with its
        ``tokenizer`` or that one's folder (None: prompts are token ids). ``drafter``: a spec such as "auto", "ngram" or
        "model:PATH" (docs/drafters.md), the ``Path`` of a trained drafter, a datastore or a draft model, or one of your
        own: a Drafter, which the engine closes, or what makes one of a DraftContext; "none" or None decodes plainly.
        ``drafters``: more that requests may choose.
        ``options``: those of this class, and of ``LoadOptions`` (backend, dtype, device, threads, max_length, ...).
        Raises ModelError, DrafterError, MemoryLimitError, ParameterError.
        """
        from outpace.engine.intake import load_engines

        drafter = "none" if drafter is None or drafter == "" else drafter
        return load_engines(cls, model, [drafter], {"tokenizer": tokenizer, **options}, more=drafters)[0]

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]) -> int:
        """Queue a request and return its id. It runs when ``step`` is called. Arguments and errors as in ``prepare``;
        when it raises, nothing was queued."""
        return self.submit(self.prepare(prompt, params, **options))

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        add_special_tokens: bool = True,
        drafter: str | bool | None = None,
        size: Size | None = None,
        acceptance: Acceptance | None = None,
        reuse_prefix: bool = True,
        cache_scope: str = "",
        deadline: float | None = None,
        priority: int = 0,
        owner: str = "",
        resume: SequenceOf[int] | SequenceOf[SequenceOf[int]] | None = None,
        verify_resume: bool = False,
        shown_tokens: SequenceOf[int] = (),
        **sampling: Unpack[SamplingKeywords],
    ) -> Prepared:
        """A request, checked and ready for ``submit``; queues nothing, and may be called from any thread.

        ``prompt``: text (as a user's message through the chat template, if the model has one; ``raw`` for the text
        itself, in which special tokens such as ``<|im_end|>`` may be spelled), token ids, or chat messages.
        ``add_special_tokens=False``: no start token is put before a raw text. ``drafter``: the name of a loaded one,
        or False (plain decoding); ``size`` and ``acceptance`` override the engine's. ``reuse_prefix=False`` neither
        takes nor leaves KV that other requests share, since sharing shows in timing; ``cache_scope``: it is shared
        within one such name alone.
        ``deadline``: seconds from now, after which it ends as it is. ``priority``: higher runs first;
        ``owner``: within it, owners take turns. ``resume``: output token ids that this very request produced before
        (with n > 1 a list for each sample): deltas bring what follows, the result has all, with log-probabilities of
        what follows; ``verify_resume``: the target chooses the last 8 again, and the request ends in a ParameterError
        where they differ. ``shown_tokens``: special tokens that are part of the text though it skips others.
        ``sampling``: fields of ``SamplingParams``, which take the place of those in ``params``.
        Raises ParameterError, DrafterError (ValueErrors), MemoryLimitError or RuleError.
        """
        self._require_open()
        params = intake.sampling(params, sampling)
        info = self.model.info
        name = intake.drafter_of(drafter, self.drafter.name, self.drafters)
        acceptance = self.options.acceptance if acceptance is None else intake.checked_acceptance(acceptance)
        nodes, adaptive = intake.size_of(size, self.options.nodes, self.adaptive)
        if name == "none" or not nodes:
            name, nodes, adaptive = "none", 0, False
        else:
            self.drafters[name].check_acceptance(acceptance)
        intake.checked_flags(raw=raw, reuse_prefix=reuse_prefix, verify_resume=verify_resume)
        intake.checked_serving(deadline, priority, cache_scope, owner)
        tokens = self.encode(prompt, raw=raw, add_special_tokens=add_special_tokens)
        intake.check_params(params, info, self.tokenizer)
        request = Request(
            next(self._ids), tokens, params, fresh_seed() if params.seed is None else params.seed,
            intake.limit_of(tokens, params, info, self._core.scheduler.most_positions()),
            nodes, adaptive, acceptance, name, reuse_prefix, priority, deadline, time.perf_counter(), cache_scope,
            owner,
        )  # fmt: skip
        rules = rules_for(params, info.vocab_size, intake.encoder(self.tokenizer), info.eos_ids)
        notes = () if name == "none" else self.drafters[name].notes
        reader = TextReader(
            self.tokenizer, params.stop_strings, include_stop=params.include_stop,
            skip_special=params.skip_special_tokens, shown=shown_tokens, after=tokens,
        )  # fmt: skip
        sequences = [
            Sequence(
                request,
                sample,
                Chooser.start(params, Noise(request.seed, sample), rules, tokens),
                reader,
                eos_ids=info.eos_ids,
                text_of=self._text_of,
                notes=notes,
            )
            for sample in range(params.n)
        ]
        if resume is not None:
            each = intake.resumed(resume, params, acceptance, info.vocab_size)
            for sequence, own in zip(sequences, each, strict=True):
                sequence.resume(own, verify_resume)
        return Prepared(request, sequences)

    def submit(self, prepared: Prepared) -> int:
        """Queue ``prepared``, which ``prepare`` made, once, and return its id. Raises ParameterError when the engine
        was closed, ModelError when the model in memory that it was made of has changed since."""
        with self._lock:
            self._require_open()
            if self._core.scheduler.idle:  # once for requests that run together
                self.model.require_unchanged()
            submit: Callable[..., None] = (
                self._core.submit if self._busy else partial(self._core.change, self._core.submit)
            )
            submit(prepared.request, prepared.sequences)
        return prepared.request.id

    def encode(self, prompt: Prompt, *, raw: bool = False, add_special_tokens: bool = True) -> I32:
        """The token ids int32 [n] that ``prompt`` stands for; the rest as in ``prepare``. Raises ParameterError when
        there are none."""
        return intake.encode(
            prompt, self.tokenizer, self.model.info.vocab_size, raw=raw, add_special_tokens=add_special_tokens
        )

    def request(self, request: int) -> Request:
        """What was asked, of the ``request`` with this id, which runs or waits. Raises ParameterError for any other."""
        with self._lock:
            if request not in self._core.requests:
                raise ParameterError(f"request {request} neither runs nor waits: it has ended, or never was")
            return self._core.requests[request][0].request

    def cancel(self, request: int) -> list[Delta]:
        """End the samples of the ``request`` with this id now and return their last deltas (none if it is over).

        From within a step (a rule, ``on_result``, ``on_step``) it ends with the step, which brings its last deltas.
        """
        with self._lock:
            if self._busy:
                self._later.append(partial(self._alone, self._core.cancel, request))
                return []
            return self._end(request)

    def _end(self, request: int) -> list[Delta]:
        self._alone(self._core.cancel, request)
        outbox = self._core.outbox
        deltas = [delta for delta in outbox if delta.request == request]
        self._mailboxes.get(request, deque()).extend(deltas)  # whoever waits for it gets them, too
        self._core.outbox = deque(delta for delta in outbox if delta.request != request)
        return deltas

    def _catch_up(self) -> None:
        while self._later:
            self._later[0]()  # where it raises, it is called again
            self._later.popleft()

    @property
    def idle(self) -> bool:
        """Whether ``step`` would have nothing to do."""
        with self._lock:
            return self._core.scheduler.idle and not self._core.outbox and not self._later

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        """What is given every step's record; may be changed between steps."""
        return self._core.on_step

    @on_step.setter
    def on_step(self, listener: Callable[[StepRecord], None] | None) -> None:
        with self._lock:
            self._core.on_step = listener
            self._core.drafting.explain(listener is not None)

    @property
    def probabilities(self) -> bool:
        """Whether a step's record has p, q, the target's likeliest tokens and the random numbers of its rows, at some
        milliseconds a verified token; may be changed between steps."""
        return self._core.probabilities

    @probabilities.setter
    def probabilities(self, on: bool) -> None:
        with self._lock:
            self._core.probabilities = on

    @property
    def on_result(self) -> Callable[[Result], None] | None:
        """What is given every sample's result as it ends, before the step's record; ``request`` still knows it then."""
        return self._core.on_result

    @on_result.setter
    def on_result(self, listener: Callable[[Result], None] | None) -> None:
        self._core.on_result = listener

    def step(self) -> list[Delta]:
        """One step for every row that can run: draft, one target forward, verify, commit.

        Deltas of requests that ``stream`` or ``generate`` wait for go to those, all others to whoever calls this. When
        it raises, what was committed is whole and the rest is as it was: the engine may go on.
        """
        with self._lock:
            self._pump()
            deltas = list(self._core.outbox)
            self._core.outbox.clear()
        return deltas

    # -- conveniences ------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        errors: Errors = "raise",
        **options: Unpack[RequestKeywords],
    ) -> Iterator[Delta]:
        """Deltas of one request as they come. Closing the iterator cancels it. ``prompt``, ``params`` and ``options``:
        as in ``prepare``.

        Other requests of this engine run along, and keep their deltas: streams may be interleaved. A request that ends
        in an error, or whose engine is closed, raises it after its last delta; with ``errors="return"`` that delta's
        result has it.
        """
        raises = checked_errors(errors)
        prepared = self.prepare(prompt, params, **options)
        left, mail = len(prepared.sequences), deque[Delta]()
        try:
            self._begin([prepared], mail)
            while left:
                delta = self._next(mail)
                left -= delta.result is not None
                yield delta
                if delta.result is not None and raises:
                    delta.result.raise_for_error()
        finally:
            self._forget([prepared])

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        errors: Errors = "raise",
        **options: Unpack[RequestKeywords],
    ) -> Result:
        """Run one request with one sample to its end: ``engine.generate("Hi", max_tokens=8)``.

        ``prompt``: text, token ids or chat messages; ``params``: None decodes greedily, at most 256 tokens.
        ``options``: as in ``prepare``, or fields of ``SamplingParams``, which take the place of those in ``params``.
        Raises ParameterError (a ValueError), DrafterError, MemoryLimitError or RuleError; a request that ends in an
        error raises it, and with ``errors="return"`` its result has it.
        """
        return self._run([prepared_one(self.prepare, prompt, params, options)], errors, False)[0]

    def generate_many(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        errors: Errors = "raise",
        progress: bool | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Result]:
        """Run requests together; results in the order of ``prompts``, and of the samples within one.

        ``params``: for all of them, or one each. ``errors``, ``options``: as in ``generate``; the first error that is
        raised cancels the others. ``progress``: a bar on standard error; None: in a notebook.
        """
        return self._run(prepared_many(self.prepare, prompts, params, options), errors, progress)

    def _run(self, requests: SequenceOf[Prepared], errors: Errors, progress: bool | None) -> list[Result]:
        mail: deque[Delta] = deque()
        try:
            with bar(sum(len(prepared.sequences) for prepared in requests), progress) as advance:
                collected = Collected(requests, errors, advance)
                self._begin(requests, mail)
                while not collected.complete:
                    collected.take(self._next(mail))
        finally:
            self._forget(requests)
        return collected.results

    def _begin(self, requests: SequenceOf[Prepared], mail: deque[Delta]) -> None:
        """Queue requests together; their deltas go to ``mail``."""
        with self._lock:
            for prepared in requests:
                self._mailboxes[self.submit(prepared)] = mail

    def _next(self, mail: deque[Delta]) -> Delta:
        """The next delta in ``mail``, which steps of this thread or of others bring."""
        while not mail:
            with self._lock:
                if not mail:  # while this thread waited for the lock
                    self._pump()
        return mail.popleft()

    def _pump(self) -> None:
        """A step; deltas go to those who wait for them, and stay where nobody does."""
        self._require_no_step()
        self._catch_up()
        if not self._core.outbox or not self._core.scheduler.idle:
            self._alone(advance, self._core)
            self._catch_up()
        self._deliver()

    def _alone(self, change: Callable[..., None], *arguments: Any) -> None:
        """A change in which rules and listeners may be called."""
        try:
            self._busy = True
            self._core.change(change, *arguments)
        finally:
            self._busy = False

    def _deliver(self) -> None:
        outbox, kept, again = self._core.outbox, deque[Delta](), self._delivering
        self._delivering = True
        for delta in outbox:
            mail = self._mailboxes.get(delta.request, kept)
            if not again or not any(delta is other for other in mail):  # what was interrupted may have brought it
                mail.append(delta)
        self._core.outbox, self._delivering = kept, False

    def _require_open(self) -> None:
        if self._closed:
            raise ParameterError("this engine is closed: make a new one")

    def _require_no_step(self) -> None:
        if self._busy:
            raise OutpaceError(
                "a step of this engine is under way: rules and listeners may not generate, step or close it"
            )

    def _forget(self, requests: SequenceOf[Prepared]) -> None:
        """Nobody waits for ``requests`` any more: what still runs of them ends. For a stream the garbage collector may
        call this, while this very thread is inside another call."""
        for prepared in requests:
            self._mailboxes.pop(prepared.request.id, None)
            self._later.append(partial(self._end, prepared.request.id))
        if self._lock.mine:
            return
        if not any_mine():
            with self._lock:
                self._catch_up()
            return
        try:  # within another engine's step, whose lock a step of this one may be about to wait for
            if self._lock.acquire(blocking=False):
                self._catch_up()
        finally:
            if self._lock.mine:
                self._lock.release()

    @property
    def policy(self) -> Adaptive | None:
        """What decides how much is drafted, and has learnt from this engine's steps; None: requests do."""
        return self._core.drafting.policy

    def _all_drafters(self) -> list[Drafter]:
        return list({id(d): d for d in (*self.drafters.values(), self.drafter)}.values())

    @property
    def stats(self) -> Stats:
        """Pooled over the requests that have ended."""
        with self._lock:
            return pooled([self._core.finished])

    def snapshot(self) -> Snapshot:
        """What runs and waits, and all that was done so far. Raises ParameterError when the engine was closed."""
        with self._lock:
            self._require_open()
            return snapshot(self._core, self.options, self._memory)

    def check(self) -> None:
        """Assert the engine's invariants (docs/how-it-works.md). Cheap; tests call it after every step. Raises
        ParameterError when the engine was closed."""
        with self._lock:
            self._require_open()
            self._core.check()

    def close(self) -> None:
        """End what runs, in an OutpaceError, and give back memory, whatever fails on the way. Calling twice is allowed.
        ``step`` still returns the last deltas."""
        with self._lock, ExitStack() as closing:  # last in, first out
            if self._closed:
                return
            self._require_no_step()
            self._closed = True
            closing.callback(self.model.close)
            for drafter in self._all_drafters():
                closing.callback(drafter.close)
            if self._store is not None:
                closing.callback(self._store.close)
            closing.callback(self._core.scheduler.close)
            closing.callback(self._core.scheduler.save_kept)
            closing.callback(self._deliver)
            for request in list(self._core.requests):
                error = OutpaceError("the engine was closed while this request ran: make a new one")
                closing.callback(self._alone, self._core.cancel, request, error)

    def __repr__(self) -> str:
        info, work = self.model.info, self._core.scheduler
        state = "closed" if self._closed else f"{len(work.running)} running, {work.waiting} waiting"
        drafter, size = self.drafter.name, self.options.size
        return f"Engine({info.name!r}, {info.backend} {info.dtype}, drafter={drafter!r}, size={size!r}, {state})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
