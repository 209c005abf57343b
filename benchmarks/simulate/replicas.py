"""Simulated replicas: what each computes in its steps, on a clock of the simulation.

A replica admits and prefills as ``outpace.engine.scheduler`` does, its kept prefixes are the engine's own
``PrefixCache``, and requests come to it by the router's own ``Routes``. Texts are ASCII, and four letters are a token.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmarks.simulate.steps import Steps
from outpace.common.arrays import I32, common_prefix
from outpace.engine.intake import EngineOptions
from outpace.engine.prefixes import PIECE, PrefixCache
from outpace.integrations.ray.routing import beginnings

CHUNK = EngineOptions().prefill_chunk  # prompt tokens a step
KEPT = EngineOptions().prefix_rows


class Router(Protocol):
    """``Routes``, or what it is compared with."""

    def choose(self, begins: Sequence[str], load: Mapping[str, int], avoid: Any = ()) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """``pause``: seconds after the answer before this one (of the first turn: after the beginning of everything)."""

    pause: float
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    system: str
    turns: Sequence[Turn]


@dataclass(slots=True)
class Request:
    """One turn. ``prompt``, ``answer``: int32 tokens; ``delivered``: tokens; times in seconds, ``gap`` the longest
    that a lost replica left; ``computed``, ``found``: prompt tokens, also of what was resumed."""

    conversation: Conversation
    turn: int
    begins: list[str]
    prompt: I32
    answer: I32
    at: float
    first: float = math.nan
    last: float = math.nan
    gap: float = 0.0
    delivered: int = 0
    computed: int = 0
    found: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Row:
    request: Request
    tokens: I32
    cached: int

    @property
    def decoding(self) -> bool:
        return self.cached >= len(self.tokens) - 1


class Replica:
    """A server. ``rows``: answers that are written at once."""

    def __init__(self, steps: Steps, rows: int) -> None:
        self._steps, self._most = steps, rows
        self._waiting: deque[Request] = deque()
        self._running: list[_Row] = []
        self._kept, self._ids = PrefixCache(KEPT), itertools.count()
        self._chunks: list[tuple[_Row, int]] = []
        self._began = self._each = 0.0  # when its present steps began, and what one takes
        self._count = 0  # of those steps; 0: idle
        self.busy = 0.0

    @property
    def until(self) -> float | None:
        """When it wants ``settle``; None: idle."""
        return self._began + self._count * self._each if self._count else None

    def take(self, request: Request, now: float) -> None:
        """A request comes: it joins after the step that runs."""
        self._waiting.append(request)
        if not self._count:
            self._plan(now)
        elif len(self._running) < self._most:
            self._count = max(1, min(self._count, math.ceil((now - self._began) / self._each)))

    def settle(self, now: float) -> list[Request]:
        """The steps until ``now`` are done; the requests that they ended."""
        ended = self._advance(self._count)
        self._plan(now)
        return ended

    def die(self, now: float) -> list[Request]:
        """What it had not ended, with what it had delivered."""
        if self._count:
            self._advance(min(self._count - 1, int((now - self._began) / self._each)))
        return [*(row.request for row in self._running), *self._waiting]

    def _advance(self, steps: int) -> list[Request]:
        self.busy += steps * self._each
        if not steps:
            return []
        for row, count in self._chunks:
            row.cached += count
            row.request.computed += count
        chunked = {id(row) for row, _ in self._chunks}
        ended, left = [], []
        for row in self._running:
            request = row.request
            if row.decoding and id(row) not in chunked:
                begun = self._began + self._each
                if math.isnan(request.first):
                    request.first = begun
                elif request.delivered == len(row.tokens) - len(request.prompt) and request.lost:
                    request.gap = max(request.gap, begun - request.last)
                request.last = self._began + steps * self._each
                request.delivered += steps
                row.cached += steps
            if request.delivered == len(request.answer):
                self._keep(request)
                ended.append(request)
            else:
                left.append(row)
        self._running = left
        return ended

    def _plan(self, now: float) -> None:
        while self._waiting and len(self._running) < self._most and self._admit(self._waiting[0]):
            self._waiting.popleft()
        budget, self._chunks = CHUNK, []
        for row in self._running:
            if not row.decoding and budget:
                count = min(budget, len(row.tokens) - 1 - row.cached)
                self._chunks.append((row, count))
                budget -= count
        decoding = [row.request for row in self._running if row.decoding]
        self._began, self._each = now, self._steps.step(len(decoding), CHUNK - budget)
        self._count = 1 if self._chunks else min((len(each.answer) - each.delivered for each in decoding), default=0)

    def _admit(self, request: Request) -> bool:
        """Whether it runs now: it waits for a row that is being prefilled and will share more."""
        tokens = np.concatenate([request.prompt, request.answer[: request.delivered]])
        begin = tokens[:-1]
        kept, shared, _ = self._kept.find(begin, lambda row, n: n)
        soon = 0
        for row in self._running:
            common = common_prefix(begin, row.tokens[:-1])
            if common >= PIECE:
                ready = min(common, row.cached)
                kept, shared = (-1, ready) if ready > shared else (kept, shared)
                soon = soon if row.decoding else max(soon, common)
        if soon > shared:
            return False
        if kept >= 0:
            self._kept.used(kept)
        request.found += shared
        self._running.append(_Row(request, tokens, shared))
        return True

    def _keep(self, request: Request) -> None:
        if len(self._kept) == KEPT:
            self._kept.forget(self._kept.rows[0])
        self._kept.keep(next(self._ids), np.concatenate([request.prompt, request.answer[:-1]]))


@dataclass(slots=True)
class Outcome:
    """``routed``: requests that each replica was sent; ``died``: replicas; ``down``, ``busy``: replica seconds;
    ``choosing``: seconds of this machine's time for all choices."""

    answered: list[Request] = field(default_factory=list)
    routed: dict[str, int] = field(default_factory=dict)
    died: int = 0
    down: float = 0.0
    busy: float = 0.0
    choices: int = 0
    choosing: float = 0.0


class Simulation:
    """``count`` replicas; a replica that dies is replaced, under another name, after ``restart`` seconds."""

    def __init__(
        self, steps: Steps, router: Router, count: int, rows: int = 16, restart: float = 0.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        self._steps, self._router, self._rows, self._restart, self._clock = steps, router, rows, restart, clock
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order, self._names = itertools.count(), itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._load: dict[str, int] = {}
        self._held: list[Request] = []  # no replica lives
        self.outcome = Outcome()
        for _ in range(count):
            self._start(0.0)

    def run(self, conversations: Iterable[Conversation], deaths: Iterable[tuple[float, int]] = ()) -> Outcome:
        """Until all is answered. ``deaths``: when, and which of the replicas that live then."""
        for conversation in conversations:
            self._ask(conversation, 0, 0.0)
        for at, which in deaths:
            self._later(at, partial(self._die, which))
        while self._events:
            at, _, act = heapq.heappop(self._events)
            act(at)
        self.outcome.busy += sum(replica.busy for replica in self._replicas.values())
        return self.outcome

    def _later(self, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), act))

    def _start(self, now: float) -> None:
        name = f"replica-{next(self._names)}"
        self._replicas[name], self._load[name] = Replica(self._steps, self._rows), 0
        held, self._held = self._held, []
        for request in held:
            self._route(request, now)

    def _ask(self, conversation: Conversation, index: int, now: float) -> None:
        turn = conversation.turns[index]
        history = [message for past in conversation.turns[:index] for message in (past.question, past.answer)]
        texts = [conversation.system, *history, turn.question]
        roles = ["system", *["user", "assistant"] * index, "user"]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        request = Request(
            conversation, index, beginnings({"messages": messages}), _tokens("".join(texts)), _tokens(turn.answer),
            now + turn.pause,
        )  # fmt: skip
        self._later(request.at, lambda now: self._route(request, now))

    def _route(self, request: Request, now: float) -> None:
        begun = self._clock()
        name = self._router.choose(request.begins, self._load)
        self.outcome.choosing += self._clock() - begun
        self.outcome.choices += 1
        if name is None:
            self._held.append(request)
            return
        self._load[name] += 1
        self.outcome.routed[name] = self.outcome.routed.get(name, 0) + 1
        self._replicas[name].take(request, now)
        self._watch(name)

    def _watch(self, name: str) -> None:
        if (until := self._replicas[name].until) is not None:
            self._later(until, lambda now: self._settle(name, now))

    def _settle(self, name: str, now: float) -> None:
        replica = self._replicas.get(name)
        if replica is None or replica.until != now:  # dead, or its steps have changed since
            return
        for request in replica.settle(now):
            self._load[name] -= 1
            self.outcome.answered.append(request)
            if request.turn + 1 < len(request.conversation.turns):
                self._ask(request.conversation, request.turn + 1, now)
        self._watch(name)

    def _die(self, which: int, now: float) -> None:
        if not self._replicas:
            return
        name = list(self._replicas)[which % len(self._replicas)]
        replica = self._replicas.pop(name)
        del self._load[name]
        self.outcome.died += 1
        self.outcome.down += self._restart
        self._later(now + self._restart, self._start)
        for request in replica.die(now):
            request.lost += 1
            self._route(request, now)
        self.outcome.busy += replica.busy


def _tokens(text: str) -> I32:
    return np.frombuffer(text.encode("ascii"), np.int32)
