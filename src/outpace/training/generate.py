"""Answers from the target itself, through the engine that serves it: what a drafter has to learn."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.errors import Argument, MemoryLimitError, ParameterError
from outpace.measure.prompts import PromptRow, encode_turns
from outpace.params import SamplingParams
from outpace.training.data import Answer, Writer

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result

_AHEAD = 4  # requests that wait, so that no row does


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of every prompt: one greedy answer where 0 is a temperature, ``samples`` at each of the others."""

    samples: int = 1
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ParameterError(Argument("samples", self.samples), " is out of range: give at least 1")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ParameterError(Argument("temperature", list(self.temperatures)), ": give some, each once")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens)

    def each(self) -> list[tuple[float, int]]:
        """Temperature and sample of every answer to a prompt."""
        return [(t, sample) for t in self.temperatures for sample in range(self.samples if t else 1)]

    def options(self, prompts: Sequence[PromptRow]) -> dict[str, Any]:
        """What a folder records, and refuses to go on without."""
        return {
            "made by": "generate",
            "max_tokens": self.max_tokens,
            "samples": self.samples,
            "temperatures": list(self.temperatures),
            "prompts": f"{len(prompts)} ({hash_of(prompts)})",
        }


@dataclass(frozen=True, slots=True)
class Job:
    prompt: PromptRow
    temperature: float
    sample: int

    @property
    def seed(self) -> int:
        """Of 63 bits; the same whenever and beside whatever it is answered."""
        text = f"{self.prompt.id}\0{self.temperature!r}\0{self.sample}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def answer(self, prompt: Sequence[int], generated: Sequence[int], finish: str) -> Answer:
        tokens = np.array([*prompt, *generated], np.int32)
        own = self.temperature, self.sample, finish, self.seed
        return Answer(self.prompt.id, self.prompt.category, tokens, len(prompt), *own)


def hash_of(prompts: Sequence[PromptRow]) -> str:
    """8 hexadecimal digits of what is asked. Raises ParameterError when two prompts have one id."""
    digest, seen = hashlib.sha256(), set[str]()
    for row in prompts:
        if row.id in seen:
            raise ParameterError(f"two prompts have the id {row.id}: give each its own, or leave ids out")
        seen.add(row.id)
        digest.update(repr((row.id, row.turns[0], row.token_ids, row.messages)).encode())
    return digest.hexdigest()[:8]


def jobs(prompts: Sequence[PromptRow], plan: Plan, writer: Writer) -> list[Job]:
    """What is not answered yet, in the order in which it is written."""
    all_ = (Job(row, t, sample) for row in prompts for t, sample in plan.each())
    return [job for job in all_ if (job.prompt.id, job.sample, float(np.float32(job.temperature))) not in writer.known]


def most_tokens(engine: Engine, todo: Sequence[Job], max_tokens: int) -> int:
    """Prompts and answers of ``todo``, should every answer be as long as it may be."""
    total, known = 0, dict[str, int]()
    for job in todo:
        if job.prompt.id not in known:
            encoded = _encoded(engine, job)
            room = engine.model.info.max_length
            known[job.prompt.id] = 0 if isinstance(encoded, str) else min(len(encoded) + max_tokens, room)
        total += known[job.prompt.id]
    return total


def generate(
    engine: Engine,
    todo: Sequence[Job],
    writer: Writer,
    max_tokens: int,
    *,
    done: Callable[[int, int], None] = lambda answers, tokens: None,
    say: Callable[[str], None] = lambda what: None,
) -> int:
    """Answer ``todo`` and write the answers in its order, whatever order they end in. How many were left out.

    Prompts that do not fit the context or the memory are left out, and ``say`` is called. ``done(answers, tokens)`` is
    called after every step. What ends it (an error, Ctrl-C, a kill) leaves at most 20 seconds of finished answers
    unwritten. Raises DataError.
    """
    asked: dict[int, tuple[int, list[int]]] = {}  # request: its place in todo, its prompt
    ended: dict[int, Answer | None] = {}  # None: left out
    first = left_out = tokens = ready = 0

    def leave_out(place: int, why: str) -> None:
        nonlocal left_out, ready
        ended[place] = None
        left_out, ready = left_out + 1, ready + 1
        say(f"left out: {why}")

    def on_result(result: Result) -> None:
        nonlocal ready
        place, prompt = asked.pop(result.request)
        if result.finish_reason not in ("stop", "length") or not result.token_ids:
            leave_out(place, f"prompt {todo[place].prompt.id}: {result.error or result.finish_reason}")
            return
        ended[place] = todo[place].answer(prompt, result.token_ids, result.finish_reason)
        ready += 1

    waiting = deque(range(len(todo)))
    before, engine.on_result = engine.on_result, on_result
    try:
        with writer:
            while waiting or asked:
                while waiting and len(asked) < engine.options.max_rows + _AHEAD:
                    place = waiting.popleft()
                    found = _asked(engine, todo[place], max_tokens)
                    if isinstance(found, str):
                        leave_out(place, found)
                    else:
                        asked[found[0]] = place, found[1]
                tokens = sum(len(delta.token_ids) for delta in engine.step()) if asked else 0
                while first in ended:
                    answer = ended.pop(first)
                    first += 1
                    if answer is not None:
                        writer.add(answer)
                done(ready, tokens)
                ready = 0
    finally:
        engine.on_result = before
        for request in asked:
            engine.cancel(request)
    return left_out


def _encoded(engine: Engine, job: Job) -> list[int] | str:
    """A prompt's token ids, or why it has none."""
    try:
        tokens: list[int] = encode_turns(engine, job.prompt).tolist()
        return tokens
    except ParameterError as error:
        return str(error)


def _asked(engine: Engine, job: Job, max_tokens: int) -> tuple[int, list[int]] | str:
    """The request and its prompt, or why it cannot be asked."""
    prompt = _encoded(engine, job)
    if isinstance(prompt, str):
        return prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=job.temperature, seed=job.seed)
    try:
        return engine.add(prompt, params), prompt
    except MemoryLimitError as error:
        return f"prompt {job.prompt.id}: {error}"
