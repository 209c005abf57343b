"""The steps of the last answers, for ``GET /v1/traces/{id}``: what a trace's file has, one answer at a time."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.engine.request import Request, StepRecord
from outpace.engine.results import Result
from outpace.errors import ParameterError
from outpace.measure.trace import VERSION, facts, request_line, result_line, spelling, step_line, tokens_of
from outpace.measure.view import shown
from outpace.server.errors import APIError

_STEPS = 20_000  # of one request; what comes later is left out
_RUNNING = 1024  # requests of an engine whose steps are kept though no answer asks for them yet


@dataclass(slots=True)
class _Steps:
    """What is known of one request of an engine."""

    request: Request
    steps: list[StepRecord] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    cut: bool = False


class _Watch:
    """Keeps an engine's steps by request. Its methods but ``of`` are the engine's, in its thread."""

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine, self._most = engine, most + _RUNNING
        self._lock = threading.Lock()
        self._requests: dict[int, _Steps] = {}

    def step(self, record: StepRecord) -> None:
        """Take down a step, for each request that had a part in it."""
        with self._lock:
            for number in record.requests:
                known = self._steps(number)
                if known is None:
                    continue
                if len(known.steps) == _STEPS:
                    known.cut = True
                    continue
                rows = tuple(row for row in record.rows if row.request == number)
                chunks = tuple(chunk for chunk in record.chunks if chunk.request == number)
                known.steps.append(replace(record, rows=rows, chunks=chunks))

    def result(self, result: Result) -> None:
        """Take down how a sample ended; the record of its last step comes after."""
        with self._lock:
            known = self._steps(result.request)
            if known is not None:
                known.results.append(result)

    def of(self, request: int) -> _Steps | None:
        """What is known of a request, as of now."""
        with self._lock:
            known = self._requests.get(request)
            return known and _Steps(known.request, list(known.steps), list(known.results), known.cut)

    def forget(self, request: int) -> None:
        """Let go of a request."""
        with self._lock:
            self._requests.pop(request, None)

    def _steps(self, request: int) -> _Steps | None:
        known = self._requests.get(request)
        if known is None:
            try:
                known = self._requests[request] = _Steps(self._engine.request(request))
            except ParameterError:
                return None  # it ended before this began to watch
            while len(self._requests) > self._most:
                del self._requests[next(iter(self._requests))]
        return known


@dataclass(frozen=True, slots=True)
class _Answer:
    scope: str
    watch: _Watch
    engine: Engine
    requests: tuple[int, ...]
    samples: int


class Traces:
    """The steps of the last ``most`` answers, with ``probabilities`` what decided their tokens, too. An answer's are
    shown to its own API key alone."""

    def __init__(self, most: int, probabilities: bool = False) -> None:
        self._most, self._probabilities = most, probabilities
        self._watches: WeakKeyDictionary[Engine, _Watch] = WeakKeyDictionary()
        self._answers: dict[str, _Answer] = {}
        self._order: deque[str] = deque()

    async def watch(self, serving: AsyncEngine) -> None:
        """Keep this engine's steps from now on."""

        watch = self._watches.setdefault(serving.engine, _Watch(serving.engine, self._most))

        def begin(engine: Engine) -> None:
            if engine.on_step == watch.step:
                return
            recorder = engine.on_result

            def both(result: Result) -> None:
                if recorder is not None:
                    recorder(result)
                watch.result(result)

            engine.on_step, engine.on_result = watch.step, both
            engine.probabilities = self._probabilities

        await serving.ask(begin)

    def began(self, id_: str, scope: str, engine: Engine, requests: list[int], samples: int) -> None:
        """An answer whose steps are to be found under ``id_``."""
        self._answers[id_] = _Answer(scope, self._watches[engine], engine, tuple(requests), samples)
        self._order.append(id_)
        if len(self._order) > self._most:
            old = self._answers.pop(self._order.popleft())
            for request in old.requests:
                old.watch.forget(request)

    def of(self, id_: str, scope: str) -> dict[str, Any]:
        """An answer's trace, as the step viewer reads it. Raises APIError (404)."""
        answer = self._answers.get(id_)
        if answer is None or answer.scope != scope:
            raise APIError(404, f"no trace of {id_!r} is kept: those of the last {self._most} answers are", param="id")
        requests = [known for request in answer.requests if (known := answer.watch.of(request)) is not None]
        tokenizer = answer.engine.tokenizer
        assert tokenizer is not None, "the server refuses models without a tokenizer"
        steps = sorted((step for known in requests for step in known.steps), key=lambda step: step.index)
        spell, used = spelling(tokenizer), sorted({token for step in steps for token in tokens_of(step)})
        lines = [shown({"request": request_line(known.request, tokenizer)}) for known in requests]
        lines += [{"texts": [[token, spell(token)] for token in used]}, *map(step_line, steps)]
        ended = [result for known in requests for result in known.results]
        lines += [{"result": result_line(result, requests[0].request, tokenizer)} for result in ended]
        cut = None if len(ended) == answer.samples else "it has not ended"
        if any(known.cut for known in requests):
            cut = f"only the first {_STEPS} steps are kept"
        return {"name": id_, "cut": cut, "header": {"trace": VERSION, **facts(answer.engine, None)}, "lines": lines}
