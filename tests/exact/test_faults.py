"""Every call across a seam of a step fails in turn, and nothing is lost but what the fault belongs to.

Batches with chains, trees, several samples and shared prefixes; at any call an exception, exhausted memory or
KeyboardInterrupt. All other requests finish with exactly the tokens of plain decoding, the engine's invariants hold
after every step, no row and no block leaks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import outpace.engine.walk
from outpace import Engine, SamplingParams
from outpace.common.arrays import F32, I32
from outpace.drafters.base import Drafter, RowView
from outpace.engine.request import StepRecord
from outpace.engine.results import Result
from outpace.errors import MemoryLimitError, ParameterError
from outpace.exact.drafts import Drafts
from tests.driving import finished
from tests.exact.test_engine_property import STEM, VOCAB, Scripted, plain
from tests.toy import BYTES, ToyModel, ToyTokenizer


class SomeError(Exception):
    """What a test makes a call raise."""


class Fuse:
    """Counts calls by name; the ``at``-th call of ``name`` raises ``error``."""

    def __init__(self, name: str = "", at: int = 0, error: type[BaseException] = SomeError) -> None:
        self.name, self.at, self.error = name, at, error
        self.calls: Counter[str] = Counter()
        self.blown = False

    def wrap(self, holder: Any, kind: str, *names: str) -> None:
        """Put the fuse before methods of ``holder``."""
        for name in names:
            setattr(holder, name, self.through(f"{kind}.{name}", getattr(holder, name)))

    def through(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def fused(*args: Any, **named: Any) -> Any:
            self.calls[name] += 1
            if name == self.name and self.calls[name] == self.at:
                self.blown = True
                raise self.error("blown")
            return call(*args, **named)

        return fused


class Never:
    """A rule that changes what is said and has a state: every other token may not be 1."""

    def __init__(self) -> None:
        self.calls = 0

    def start(self, prompt: I32) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def apply(self, state: int, logits: F32) -> None:
        if state % 2:
            logits[1] = -np.inf


ASKED: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = [
    (STEM[:20], {"temperature": 0.9, "max_tokens": 14}, {}),
    (STEM[:24], {"temperature": 1.1, "n": 3, "max_tokens": 9, "logprobs": True}, {}),
    ([*STEM[:18], 3], {"max_tokens": 17, "top_logprobs": 1}, {}),
    ([2, 4], {"temperature": 1.0, "max_tokens": 12}, {"acceptance": "rejection"}),
    ([5, 1, 0], {"max_tokens": 12}, {"drafter": False}),
    (STEM[:22], {"temperature": 1.0, "max_tokens": 8, "prompt_logprobs": 0}, {"size": 2}),
]
RULED = len(ASKED)  # the request whose rule may fail


def build(fuse: Fuse, script: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    target = ToyModel(VOCAB, seed=1, max_length=72, eos=(5,), memory=100)
    drafter = Scripted(target, script, 5, reads=True)
    fuse.wrap(target.kv, "kv", "alloc", "fork", "truncate", "compact", "growth", "exclusive")
    fuse.wrap(drafter, "drafter", "propose", "observe", "fork", "release")
    forward = target.forward

    def watched(batch: Any) -> Any:
        output = fuse.through("model.forward", forward)(batch)
        fuse.wrap(output, "output", "verify", "choose", "logits", "logprobs", "hidden_states")
        return output

    target.forward = watched  # type: ignore[method-assign]

    monkeypatch.setattr(outpace.engine.walk, "walk", fuse.through("verify.walk", outpace.engine.walk.walk))
    return Engine(
        target,
        ToyTokenizer(),  # type: ignore[arg-type]
        drafter=drafter,
        size=15,
        max_rows=5,
        prefill_chunk=7,
        prefix_rows=2,
        kv_memory=80 * BYTES,
    )


def run(engine: Engine, fuse: Fuse, ruled: bool) -> tuple[dict[tuple[int, int], Result], int]:
    """All requests to their end, through whatever a step raises; the results, and how many steps raised."""
    raised = 0
    for seed, (prompt, params, options) in enumerate(ASKED):
        engine.add(prompt, SamplingParams(seed=seed, ignore_eos=True, **params), **options)
    if ruled:
        rule = Never()
        fuse.wrap(rule, "rule", "start", "advance", "apply")
        try:
            engine.add(
                STEM[:9], SamplingParams(seed=RULED, temperature=1.0, max_tokens=10, ignore_eos=True, rules=[rule])
            )
        except Exception:
            raised += 1
    results: dict[tuple[int, int], Result] = {}
    for _ in range(600):
        if engine.idle:
            break
        try:
            deltas = engine.step()
        except (Exception, KeyboardInterrupt):
            raised += 1
            assert raised < 4, "it goes on raising"
            deltas = []
        engine.check()
        for delta in deltas:
            if delta.result is not None:
                assert (delta.request, delta.sample) not in results
                results[delta.request, delta.sample] = delta.result
    assert engine.idle, "it never came to an end"
    return results, raised


@cache
def expected(request: int, sample: int) -> tuple[Any, ...]:
    """(tokens, finish reason, text) of plain decoding."""
    prompt, options, _ = ASKED[request]
    model = ToyModel(VOCAB, seed=1, max_length=72, eos=(5,), memory=100)
    return plain(model, prompt, SamplingParams(seed=request, ignore_eos=True, **options), request, sample)


def judge(engine: Engine, results: dict[tuple[int, int], Result], but: set[int]) -> None:
    """Every request but some has plain decoding's tokens, and the engine leaves nothing behind."""
    target: Any = engine.model
    for request, (prompt, options, chosen) in enumerate(ASKED):
        params = SamplingParams(seed=request, ignore_eos=True, **options)
        for sample in range(params.n):
            result = results[request, sample]
            if request in but:
                continue
            assert result.error is None, result.error
            tokens, reason, text = expected(request, sample)
            if chosen.get("acceptance") == "rejection":
                assert len(result.token_ids) == len(tokens)  # its distribution has a proof of its own
                continue
            assert (list(result.token_ids), result.finish_reason, result.text) == (tokens, reason, text)
            assert len(result.logprobs) == (len(tokens) if params.wants_logprobs else 0)
            if params.prompt_logprobs is not None:
                assert [p and p.token for p in result.prompt_logprobs] == [None, *prompt[1:]]
    engine.close()
    assert target.kv.rows == []
    assert target.kv.bytes == 0


CALLS = (
    "kv.alloc", "kv.fork", "kv.truncate", "kv.compact", "kv.growth", "kv.exclusive", "model.forward",
    "drafter.propose", "drafter.observe", "drafter.fork", "drafter.release",
    "output.verify", "output.choose", "output.logits", "output.logprobs", "output.hidden_states", "verify.walk",
)  # fmt: skip


CASES: list[tuple[str, str, type[BaseException]]] = [
    *(("tree", call, SomeError) for call in CALLS),
    *(("chain", call, SomeError) for call in CALLS if "compact" not in call),
    *(("tree", call, KeyboardInterrupt) for call in CALLS),
    *(("tree", call, MemoryLimitError) for call in CALLS if call.startswith(("kv.", "model.")) or "drafter" in call),
]


@pytest.mark.parametrize(("script", "call", "error"), CASES)
def test_any_call_may_fail(script: str, call: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Fuse()
    run(build(counted, script, monkeypatch), counted, ruled=True)
    n = counted.calls[call]
    assert n, "never called: this proves nothing"
    for at in sorted({1, (n + 1) // 2, n}):
        fuse = Fuse(call, at, error)
        engine = build(fuse, script, monkeypatch)
        results, raised = run(engine, fuse, ruled=True)
        if not fuse.blown:
            continue  # timing of wall clocks has no part in it, but an earlier survived fault may change what follows
        if call.startswith("drafter.") and error is not KeyboardInterrupt:
            assert not raised, "a drafter's fault reached the caller"
        assert raised <= 1
        judge(engine, results, but=set())


@pytest.mark.parametrize("error", [SomeError, MemoryLimitError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["rule.start", "rule.advance", "rule.apply"])
def test_a_rule_that_fails_ends_its_own_request(
    call: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Fuse()
    run(build(counted, "tree", monkeypatch), counted, ruled=True)
    n = counted.calls[call]
    assert n
    for at in sorted({1, 2, n // 2, n} & set(range(1, n + 1))):
        fuse = Fuse(call, at, error)
        engine = build(fuse, "tree", monkeypatch)
        if error is KeyboardInterrupt and call == "rule.start":
            continue
        results, raised = run(engine, fuse, ruled=True)
        assert fuse.blown
        if error is not KeyboardInterrupt and call != "rule.start":
            result = results[RULED, 0]
            assert not raised
            if result.error is not None:  # a draft's fault alone costs the draft
                assert "Never" in result.error
                assert "blown" in result.error
                assert result.finish_reason == "error"
        judge(engine, results, but=set())


DRIVER = {str(Path(outpace.engine.walk.__file__).with_name(f"{name}.py")) for name in (
    "core", "drafting", "prefix", "scheduler", "sequence", "step", "turns",
)}  # fmt: skip


class Interrupt:
    """What a signal's handler does: KeyboardInterrupt before the ``at``-th time that a step comes to a line of code."""

    def __init__(self, line: tuple[str, int] | None = None, at: int = 0) -> None:
        self.line, self.at = line, at
        self.lines: Counter[tuple[str, int]] = Counter()

    def step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def interrupted() -> Any:
            before = sys.gettrace()
            sys.settrace(self._called)
            try:
                return step()
            finally:
                sys.settrace(before)

        return interrupted

    def _called(self, frame: FrameType, what: str, value: object) -> Any:
        return self._reached if frame.f_code.co_filename in DRIVER else None

    def _reached(self, frame: FrameType, what: str, value: object) -> Any:
        if what == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.lines[line] += 1
            if line == self.line and self.lines[line] == self.at:
                raise KeyboardInterrupt
        return self._reached


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_between_any_two_lines_loses_nothing(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a row, nor a token, a log-probability or a delta: at every line that changes what a request has."""

    def interrupted(interrupt: Interrupt) -> None:
        engine = build(Fuse(), "tree", monkeypatch)
        monkeypatch.setattr(engine, "step", interrupt.step(engine.step))
        results, raised = run(engine, Fuse(), ruled=True)
        assert raised == (interrupt.line is not None)
        judge(engine, results, but=set())

    counted = Interrupt()
    interrupted(counted)
    lines = sorted(counted.lines.items())
    assert len(lines) > 500
    for line, times in lines[part::12]:
        try:
            interrupted(Interrupt(line, (times + 1) // 2))
        except Exception as error:
            error.add_note(f"interrupted at {line}")
            raise


@pytest.mark.parametrize("how", ["steps", "cancel", "no memory"])
def test_a_listener_that_raises_costs_no_request_its_end(how: str) -> None:
    """Every sample of every request ends once; the engine knows none of them afterwards."""
    target = ToyModel(VOCAB, seed=1, max_length=72, memory=100)
    engine = Engine(target, max_rows=2)
    heard = []

    def fail(result: Result) -> None:
        heard.append((result.request, result.sample))
        raise SomeError("heard")

    engine.on_result = fail
    ids = [engine.add([1, 2, i], SamplingParams(max_tokens=4, n=2, ignore_eos=True)) for i in range(3)]
    ended = []
    if how == "cancel":
        engine.step()
        for request in ids:
            with pytest.raises(SomeError):
                engine.cancel(request)
    if how == "no memory":
        monkey = target.kv.alloc

        def full() -> int:
            raise MemoryLimitError("full")

        target.kv.alloc = full  # type: ignore[method-assign]
    for _ in range(40):
        if engine.idle:
            break
        with suppress(SomeError):
            ended += [(delta.request, delta.sample) for delta in engine.step() if delta.result is not None]
        engine.check()
    if how == "no memory":
        target.kv.alloc = monkey  # type: ignore[method-assign]
    assert engine.idle
    every = [(request, sample) for request in ids for sample in range(2)]
    assert sorted(ended) == sorted(heard) == every
    for request in ids:
        with pytest.raises(ParameterError, match="neither runs nor waits"):
            engine.request(request)
    engine.close()
    assert target.kv.rows == []


class BrokenTokenizer(ToyTokenizer):
    """Cannot decode token 4."""

    def decode(self, ids: object, *, skip_special: bool = True) -> str:
        if 4 in ids:  # type: ignore[operator]
            raise SomeError("four")
        return super().decode(ids, skip_special=skip_special)


def test_a_tokenizer_that_fails_ends_only_whom_it_fails() -> None:
    target = ToyModel(VOCAB, seed=1, max_length=72, memory=100)
    engine = Engine(target, BrokenTokenizer(), drafter=Scripted(target, "tree", 0, reads=False), size=4)  # type: ignore[arg-type]
    allowed = engine.add([1, 2], SamplingParams(logit_bias={4: -np.inf}, max_tokens=9, ignore_eos=True))
    broken = engine.add([1, 2], SamplingParams(logit_bias={4: 50.0}, max_tokens=9, ignore_eos=True))
    results = finished(engine)
    assert results[allowed, 0].finish_reason == "length"
    assert results[broken, 0].finish_reason == "error"
    assert "four" in str(results[broken, 0].error)
    engine.close()
    assert target.kv.rows == []


def interleaved(*streams: Iterator[Any]) -> list[list[int]]:
    said: list[list[int]] = [[] for _ in streams]
    left = dict(enumerate(streams))
    while left:
        for i, stream in list(left.items()):
            delta = next(stream, None)
            if delta is None:
                del left[i]
            else:
                said[i].extend(delta.token_ids)
    return said


def test_streams_of_one_engine_may_be_interleaved_with_each_other_and_with_generate() -> None:
    target = ToyModel(VOCAB, seed=1, max_length=72, memory=100)
    engine = Engine(target, drafter=Scripted(target, "chain", 0, reads=False), size=4)
    params = [SamplingParams(seed=i, temperature=1.0, max_tokens=12, ignore_eos=True) for i in range(4)]
    third = engine.add([3], params[2])
    first, second = engine.stream([1], params[0]), engine.stream([2], params[1])
    begun = [list(next(first).token_ids), list(next(second).token_ids)]
    whole = engine.generate([4], params[3])
    said = interleaved(first, second)
    expected = [plain(target, [i + 1], params[i], i, 0)[0] for i in range(4)]
    assert [begun[0] + said[0], begun[1] + said[1]] == expected[:2]
    assert list(whole.token_ids) == expected[3]
    mine = [token for delta in engine.step() if delta.request == third for token in delta.token_ids]
    assert mine == expected[2], "deltas that nobody waited for were kept for whoever calls step"


def test_cancelling_a_request_ends_its_stream() -> None:
    target = ToyModel(VOCAB, seed=1, max_length=72)
    engine = Engine(target)
    stream = engine.stream([1], SamplingParams(max_tokens=20, ignore_eos=True))
    first = next(stream)
    assert [d.finish_reason for d in engine.cancel(first.request)] == ["cancelled"]
    assert [d.finish_reason for d in stream] == ["cancelled"]


def test_closing_gives_the_model_back_whatever_the_drafter_does() -> None:
    target = ToyModel(VOCAB)
    closed = []
    target.close = lambda: closed.append(True)  # type: ignore[method-assign]
    drafter = Scripted(target, "chain", 0, reads=False)

    def fail() -> None:
        raise SomeError("close")

    drafter.close = fail  # type: ignore[method-assign]
    engine = Engine(target, drafter=drafter, size=3)
    engine.add([1])
    engine.step()
    with pytest.raises(SomeError):
        engine.close()
    assert closed == [True]
    assert target.kv.rows == []


def test_a_deadline_ends_a_request_as_it_is_and_priority_goes_first() -> None:
    target = ToyModel(VOCAB, seed=1, max_length=72)
    engine = Engine(target, max_rows=1)
    late = engine.add([1], SamplingParams(ignore_eos=True), deadline=1e-9)
    low = engine.add([2], SamplingParams(max_tokens=3, ignore_eos=True))
    high = engine.add([3], SamplingParams(max_tokens=3, ignore_eos=True), priority=1)
    order, results = [], {}
    while not engine.idle:
        for delta in engine.step():
            if delta.result is not None:
                order.append(delta.request)
                results[delta.request] = delta.result
        engine.check()
    assert order == [late, high, low]
    assert results[late].finish_reason == "deadline"


def test_a_row_that_a_drafter_did_not_release_is_released_in_the_next_step() -> None:
    released, steps = list[int](), list[StepRecord]()

    class Clings(Drafter):
        def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
            return Drafts.chains([[1]] * len(rows))

        def release(self, row: int, tokens: I32 | None = None) -> None:
            released.append(row)
            if len(released) <= 2:
                raise RuntimeError("not yet")

    with Engine(ToyModel(), drafter=Clings(), size=1, prefix_rows=0) as engine:
        engine.on_step = steps.append
        engine.generate([1, 2], max_tokens=3, ignore_eos=True)
        assert released == [0, 0]
        engine.generate([1, 2], max_tokens=3, ignore_eos=True)
        assert released[:3] == [0, 0, 0]
    faults = [step.faults for step in steps if step.faults]
    assert len(faults) == 1, "told more than once"
    assert "failed to release a row" in faults[0][0]
