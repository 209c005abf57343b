"""Speculative decoding: draft, one target forward, verify, commit. ``Engine.step`` is the algorithm."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from outpace.arrays import I32
from outpace.control import cost as costs
from outpace.control.adaptive import AUTO_SIZE
from outpace.control.auto import policy_for
from outpace.control.cost import Cost
from outpace.control.policy import PLAIN, Fixed, Load, Policy
from outpace.drafters.base import Drafter, Event, RowView
from outpace.drafters.none import NoDrafter
from outpace.engine.results import TARGET, Delta, Result
from outpace.engine.scheduler import Plan, Scheduler
from outpace.engine.sequence import Sequence
from outpace.engine.statistics import Stats, pooled
from outpace.engine.verifier import Verifier
from outpace.errors import ParameterError
from outpace.exact.drafts import Drafts, Verdict, Verdicts
from outpace.exact.noise import Noise, fresh_seed
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, Model, Output
from outpace.params import ACCEPTANCES, Acceptance, Prompt, SamplingParams

if TYPE_CHECKING:
    from outpace.models.text.tokenizer import Tokenizer

Size = int | Literal["auto"]


class Engine:
    """Decodes requests together, exactly as the target alone would have. One thread owns an engine.

    ``size``: tokens drafted a step, or "auto": what pays, which needs ``cost`` (measured now, if not before, unless it
    is given); ``acceptance``: see docs/exactness.md; ``max_rows``: requests that run at once;
    ``prefill_chunk``: prompt tokens a step; ``kv_memory``: a hard bound in bytes over target and drafter (never more
    than the model's own); ``prefix_rows``: finished rows whose KV is kept for prompts that begin alike.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        drafter: Drafter | None = None,
        size: Size = "auto",
        acceptance: Acceptance = "coupled",
        max_rows: int = 16,
        prefill_chunk: int = 512,
        kv_memory: int | None = None,
        prefix_rows: int = 0,
        cost: Cost | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.drafter = drafter or NoDrafter()
        self.size = self.check_options(size, acceptance, max_rows, prefill_chunk, prefix_rows)
        self.adaptive = size == "auto" and not isinstance(self.drafter, NoDrafter)
        self.acceptance: Acceptance = acceptance
        self.drafter.check_acceptance(acceptance)
        self._scheduler = Scheduler(
            model.kv,
            self.drafter,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            kv_memory=min((bound for bound in (kv_memory, model.kv.limit) if bound is not None), default=None),
            prefix_rows=prefix_rows,
        )
        self._policy: Policy = Fixed()
        if self.adaptive:
            cost = costs.of(model) if cost is None else cost
            self._policy = policy_for(self.drafter, cost)
        self._ids = itertools.count()
        self._finished = Stats(requests=0)
        self._closed = False

    @classmethod
    def load(cls, model: str = "demo", *, drafter: str = "none", **options: Any) -> Engine:
        """Load a model by name, folder or file, with its tokenizer and drafter.

        ``model``: "demo", a Hugging Face id, a folder, or a .gguf file. ``drafter``: a spec such as "ngram" or
        "model:PATH" (docs/drafters.md). ``options``: those of this class, and of ``LoadOptions`` (backend, dtype,
        device, threads, max_length, revision, trust_remote_code, allow_pickle).
        Raises ModelError, DrafterError, MemoryLimitError, ParameterError.
        """
        from outpace.engine.load import load_engine

        return load_engine(cls, model, drafter, options)

    @staticmethod
    def check_options(
        size: Size = "auto",
        acceptance: Acceptance = "coupled",
        max_rows: int = 16,
        prefill_chunk: int = 512,
        prefix_rows: int = 0,
    ) -> int:
        """Validate the engine's own options before anything is loaded, and return the most nodes a step.

        Raises ParameterError.
        """
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("prefill_chunk", prefill_chunk, 1),
            ("prefix_rows", prefix_rows, 0),
        ):
            if value < least:
                raise ParameterError(f"{name}={value} is out of range: give at least {least}")
        _checked_acceptance(acceptance)
        return _checked_size(size)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        drafter: bool = True,
        size: Size | None = None,
        acceptance: Acceptance | None = None,
    ) -> int:
        """Queue a request and return its id. It runs when ``step`` is called.

        ``prompt``: text (as a user's message through the chat template, if the model has one; ``raw`` for the text
        itself), token ids, or chat messages. ``drafter=False`` decodes plainly; ``size`` and ``acceptance`` override
        the engine's. Raises ParameterError, DrafterError (ValueErrors) or MemoryLimitError; then nothing was queued.
        """
        if self._closed:
            raise ParameterError("this engine is closed: make a new one")
        params = params or SamplingParams()
        acceptance = self.acceptance if acceptance is None else _checked_acceptance(acceptance)
        adaptive = self.adaptive and size in (None, "auto")
        most = self.size if size is None else _checked_size(size)
        if size == "auto" and not self.adaptive:
            raise ParameterError(f"size=auto needs an engine made with it: this one's size is fixed at {self.size}")
        if most > self.size:
            raise ParameterError(
                f"size={size} is more than the engine's {self.size}: make the engine with a larger one"
            )
        if not drafter or isinstance(self.drafter, NoDrafter):
            most = 0
        if most:
            self.drafter.check_acceptance(acceptance)
        info = self.model.info
        tokens = self.encode(prompt, raw=raw)
        _check_ids("the prompt", tokens, info.vocab_size)
        if len(tokens) >= info.max_length:
            context = f"the context holds {info.max_length}, the answer included"
            raise ParameterError(f"the prompt has {len(tokens)} tokens, but {context}: shorten the prompt")
        if params.stop_strings and self.tokenizer is None:
            raise ParameterError("stop strings need a tokenizer, and this engine has none: use stop_ids")
        _check_ids("stop_ids", np.asarray(params.stop_ids, np.int32), info.vocab_size)
        limit = min(len(tokens) + (params.max_tokens or info.max_length), info.max_length)
        rules = rules_for(params, info.vocab_size)
        seed = fresh_seed() if params.seed is None else params.seed
        notes = ("typical acceptance is lossy: not the target's distribution",) if acceptance == "typical" else ()
        request = next(self._ids)
        sequences = [
            Sequence(
                request,
                sample,
                tokens,
                params,
                Chooser.start(params, Noise(seed, sample), rules, tokens),
                limit=limit,
                eos_ids=info.eos_ids,
                decoder=self.tokenizer,
                acceptance=acceptance,
                size=most,
                adaptive=adaptive and most > 0,
                drafter=self.drafter.name if most else "none",
                notes=notes,
            )
            for sample in range(params.n)
        ]
        for sequence in sequences:
            self._scheduler.submit(sequence)
        return request

    def encode(self, prompt: Prompt, *, raw: bool = False) -> I32:
        """The token ids int32 [n] that ``prompt`` stands for. Raises ParameterError when there are none."""
        if not isinstance(prompt, SequenceOf) and not hasattr(prompt, "__array__"):
            raise ParameterError(f"the prompt is a {type(prompt).__name__}: give text, token ids, or chat messages")
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
            if self.tokenizer is None:
                raise ParameterError("this engine has no tokenizer: give token ids")
            if isinstance(prompt, str) and not prompt:
                raise ParameterError("the prompt is empty: give some text")
            if isinstance(prompt, str) and (raw or not self.tokenizer.has_chat_template):
                tokens = self.tokenizer.encode(prompt)
            else:
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                tokens = self.tokenizer.encode_chat(messages)  # type: ignore[arg-type]
        else:
            tokens = _token_ids(prompt, self.model.info.vocab_size)
        if not len(tokens):
            raise ParameterError("the prompt is empty: give at least one token")
        return tokens.astype(np.int32)

    def cancel(self, request: int) -> list[Delta]:
        """End a request's samples now and return their last deltas (none if it is over or unknown)."""
        deltas = []
        for sequence in self._scheduler.cancel(request):
            sequence.finish_reason = "cancelled"
            deltas.append(self._finish(sequence))
        return deltas

    @property
    def idle(self) -> bool:
        """Whether ``step`` would have nothing to do."""
        return self._scheduler.idle

    # -- the algorithm -----------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One step for every row that can run: draft, one target forward, verify, commit.

        When it raises, nothing was committed or what was is whole: the engine may go on.
        """
        clock = _Clock()
        plan = self._scheduler.plan()
        if not plan.decoding and not plan.chunks:
            return []
        try:
            return self._run(plan, clock)
        except BaseException:
            self._scheduler.roll_back()
            raise

    def _run(self, plan: Plan, clock: _Clock) -> list[Delta]:
        clock.start("draft")
        drafting = any(s.size for s in plan.decoding)
        drafts = self._draft(plan) if drafting else Drafts.empty(len(plan.decoding))
        clock.start("target")
        batch = self._pack(plan, drafts)
        output = self.model.forward(batch)
        clock.start("verify")
        failures: dict[int, str] = {}
        verifier = Verifier(plan.decoding, drafts, batch, output, failures)
        verdicts = verifier.verdicts()
        choices = [verifier.every(i) for i in range(len(drafts))] if self.drafter.needs.choices else None
        clock.start("other")
        events = self._commit(plan, drafts, batch, output, verdicts, choices, failures)
        clock.start("draft")
        self.drafter.observe(events)
        decisions = self._policy.learn(verdicts, clock.so_far()) if drafting else [PLAIN] * len(drafts)
        clock.start("other")
        for sequence, decision in zip(plan.decoding, decisions, strict=True):
            sequence.stats.decide(decision.size, decision.expected)
        return self._deltas(plan, clock)

    def _draft(self, plan: Plan) -> Drafts:
        """What the policy asks of the drafter, and keeps of what it proposes."""
        views = [_view(s) for s in plan.decoding]
        most = [min(s.size, s.room - 1) for s in plan.decoding]
        load = Load([s.length - 1 for s in plan.decoding], sum(chunk.count for chunk in plan.chunks))
        sizes, depths = self._policy.plan(views, most, load)
        drafting = [i for i, size in enumerate(sizes) if size]
        if drafting:
            if self.drafter.stepwise is not None:
                views = [replace(view, depth=depth) for view, depth in zip(views, depths, strict=True)]
            asked = [sizes[i] for i in drafting]
            drafts = self.drafter.propose([views[i] for i in drafting], np.array(asked, np.int32))
            within = all(width <= size for width, size in zip(drafts.widths.tolist(), asked, strict=True))
            assert within, "a drafter proposed more than it was asked for"
            drafts = drafts.among(drafting, len(views))
        else:
            drafts = Drafts.empty(len(views))
        return self._policy.trim(views, drafts, load)

    def _pack(self, plan: Plan, drafts: Drafts) -> Batch:
        if len(plan.decoding) == 1 and not plan.chunks:
            only, width = plan.decoding[0], int(drafts.widths[0])
            tokens_of = np.empty(1 + width, np.int32)
            tokens_of[0], tokens_of[1:] = only.tokens[-1], drafts.tokens[0, :width]
            tree = None if drafts.parents is None else [-1, *(p + 1 for p in drafts.parents[0, :width].tolist())]
            return Batch.single(only.row, tokens_of, only.length - 1, tree, self.drafter.needs.taps)
        rows, tokens, starts, wanted, parents = [], [], [], [], []
        for i, sequence in enumerate(plan.decoding):
            draft = drafts.row(i)
            rows.append(sequence.row)
            tokens.append(np.concatenate([sequence.tokens[-1:], draft.tokens]))
            starts.append(sequence.length - 1)
            wanted.append(True)
            parents.append(None if draft.parents is None else np.concatenate([[-1], draft.parents + 1]))
        for chunk in plan.chunks:
            rows.append(chunk.sequence.row)
            tokens.append(chunk.tokens)
            starts.append(chunk.start)
            wanted.append(False)
            parents.append(None)
        return Batch.pack(rows, tokens, starts, wanted, parents, taps=self.drafter.needs.taps)

    def _commit(
        self,
        plan: Plan,
        drafts: Drafts,
        batch: Batch,
        output: Output,
        verdicts: Verdicts,
        choices: list[I32] | None,
        failures: dict[int, str],
    ) -> list[Event]:
        """Settle the KV cache and the sequences; what became final, as events for the drafter."""
        kv, events = self.model.kv, []
        for i, sequence in enumerate(plan.decoding):
            start = sequence.length
            draft, verdict = drafts.row(i), verdicts.row(i)
            sources = drafts.sources_of(i)
            if i in failures:  # what was accepted before the dead end stays
                verdict = Verdict(verdict.tokens[:-1], verdict.path)
            kept = sequence.append(verdict.tokens, [*(sources[n] for n in verdict.path), TARGET])
            if i in failures and sequence.finish_reason is None:  # a stop before the dead end comes first
                sequence.finish_reason, sequence.error = "error", failures[i]
            sequence.stats.count(draft, sources, verdict, kept)
            if draft.parents is None or not kept:
                kv.truncate(sequence.row, start - 1 + kept)
            else:
                kv.compact(sequence.row, start - 1, _new_tokens(verdict, kept))
            taps = None
            if batch.taps or (sequence.params.wants_logprobs and kept):
                at = batch.starts[i] + _new_tokens(verdict, kept)
                if sequence.params.wants_logprobs:
                    top = [sequence.params.top_logprobs] * kept
                    sequence.logprobs.extend(output.logprobs(at[:kept], verdict.tokens[:kept], top))
                taps = output.taps(at) if batch.taps else None
            said = None if choices is None else choices[i]
            events.append(Event(sequence.row, start, verdict.tokens[:kept], verdict, taps, said))
        for j, chunk in enumerate(plan.chunks, len(plan.decoding)):
            chunk.sequence.prefilled += chunk.count
            span = np.arange(batch.starts[j], batch.starts[j + 1], dtype=np.int32)
            taps = output.taps(span) if batch.taps else None
            after = chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + chunk.count]
            events.append(Event(chunk.sequence.row, chunk.start + 1, after, None, taps))
        return events

    def _deltas(self, plan: Plan, clock: _Clock) -> list[Delta]:
        seconds = clock.so_far()
        for chunk in plan.chunks:
            chunk.sequence.stats.prefill_seconds += sum(seconds.values())
        deltas = []
        for sequence in plan.decoding:
            for phase, spent in seconds.items():
                sequence.stats.seconds[phase] += spent
            deltas.append(self._finish(sequence) if sequence.finish_reason else sequence.delta())
        return deltas

    def _finish(self, sequence: Sequence) -> Delta:
        self._policy.release(sequence.row)
        self._scheduler.release(sequence)
        delta = sequence.delta()
        self._finished = pooled([self._finished, sequence.stats])
        return delta

    # -- conveniences ------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        """Deltas of one request as they come. Closing the iterator cancels it. Options as in ``add``.

        Other requests of this engine run along, but their deltas are not seen here: call ``step`` for those.
        """
        request = self.add(prompt, params, **options)
        left = (params or SamplingParams()).n
        try:
            while left:
                for delta in self.step():
                    if delta.request == request:
                        left -= delta.result is not None
                        yield delta
        finally:
            self.cancel(request)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Result:
        """Run one request with one sample to its end. Options as in ``add``."""
        if params is not None and params.n != 1:
            raise ParameterError(f"n={params.n} samples make several results: use generate_many")
        return self.generate_many([prompt], params, **options)[0]

    def generate_many(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Result]:
        """Run requests together; results in the order of the prompts, and of the samples within one."""
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, SequenceOf) else list(params)
        if len(each) != len(prompts):
            raise ParameterError(f"{len(each)} params for {len(prompts)} prompts: give one for all, or one each")
        requests: list[int] = []
        results: dict[tuple[int, int], Result] = {}
        try:
            for prompt, its in zip(prompts, each, strict=True):
                requests.append(self.add(prompt, its, **options))
            mine = set(requests)
            while len(results) < sum(its.n for its in each):
                for delta in self.step():
                    if delta.result is not None and delta.request in mine:
                        results[delta.request, delta.sample] = delta.result
        finally:
            for request in requests:
                self.cancel(request)
        return [results[key] for key in sorted(results)]

    @property
    def stats(self) -> Stats:
        """Pooled over the requests that have ended."""
        return pooled([self._finished])

    def check(self) -> None:
        """Assert the engine's invariants (docs/how-it-works.md). Cheap; tests call it after every step."""
        for sequence in self._scheduler.running:
            length = self.model.kv.length(sequence.row)
            expected = sequence.length - 1 if sequence.decoding else sequence.prefilled
            assert length == expected, f"row {sequence.row} has KV for {length} positions, not {expected}"
            assert sequence.finish_reason is None, "a finished sequence still runs"
            assert sequence.length < sequence.limit
        self._scheduler.check()

    def close(self) -> None:
        """Cancel what runs and give back memory. Calling twice is allowed."""
        if not self._closed:
            self._closed = True
            for request in self._scheduler.requests:
                self.cancel(request)
            self._scheduler.close()
            self.drafter.close()
            self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Clock:
    """Splits a step's wall time among its phases."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._phase, self._since = "other", time.perf_counter()

    def start(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def so_far(self) -> dict[str, float]:
        self.start(self._phase)
        return self._seconds


def _new_tokens(verdict: Verdict, kept: int) -> I32:
    """Which of a row's new tokens in the batch (the pending one is 0) stay in its KV: int32 [max(kept, 1)]."""
    return np.array([0, *(node + 1 for node in verdict.path.tolist()[: max(kept - 1, 0)])], np.int32)


def _view(sequence: Sequence) -> RowView:
    return RowView(
        sequence.row,
        sequence.request,
        sequence.tokens,
        sequence.limit,
        sequence.chooser,
        sequence.acceptance,
        sequence.adaptive,
    )


def _checked_size(size: Size) -> int:
    """The most nodes that ``size`` allows a step."""
    if isinstance(size, str) and size == "auto":
        return AUTO_SIZE
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 0 <= size <= 63:
        raise ParameterError(f"size={size} is out of range: draft 0 (plain decoding) to 63 tokens a step, or auto")
    return int(size)


def _checked_acceptance(acceptance: Acceptance) -> Acceptance:
    if acceptance not in ACCEPTANCES:
        raise ParameterError(f"acceptance={acceptance!r} is unknown: use one of {', '.join(ACCEPTANCES)}")
    return acceptance


def _token_ids(prompt: Any, vocab_size: int) -> I32:
    """The prompt as token ids int32 [n], before a float is cut or an id too large wraps. Raises ParameterError."""
    try:
        ids = np.asarray(prompt) if len(prompt) else np.zeros(0, np.int32)
    except (ValueError, OverflowError):
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ParameterError("the prompt is neither text nor a list of token ids nor chat messages: give one of them")
    _check_ids("the prompt", ids, vocab_size)
    return ids.astype(np.int32)


def _check_ids(name: str, ids: np.ndarray[Any, Any], vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ParameterError(f"{name} has token id {wrong[0]}, but this model's ids go from 0 to {vocab_size - 1}")
