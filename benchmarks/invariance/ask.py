"""A plan carried out: servers started one after another, requests in flight together, what differs written down."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import servers
from benchmarks.invariance.journal import Journal, read, told
from benchmarks.invariance.plan import FIRST, HIT, STREAMS, Dialect, Item, Question
from outpace.measure.remote import Answer, Remote, RemoteError
from outpace.measure.verify import difference

EVERY = 30.0  # seconds between two lines of progress
PAUSE = 0.05  # seconds until a client that left comes again
LEAVES = 150  # tokens of an answer that its reader does not wait for
Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contender:
    """A kind of server. ``command``: with its {port}; ``dialect``: what it can be told."""

    name: str
    command: str
    dialect: Dialect

    def start(self, name: str) -> str:
        """The command of one of the dialect's starts; one that holds a {port} is a command of its own."""
        more = self.dialect.starts[name]
        return more if "{port}" in more else f"{self.command} {more}".strip()


class Progress:
    """Says now and then how far a run is, and how long the rest may take."""

    def __init__(self, total: int, say: Say) -> None:
        self._total, self._done, self._say = total, 0, say
        self._begun = self._last = time.monotonic()
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._done += 1
            now = time.monotonic()
            if now - self._last < EVERY:
                return
            self._last = now
            rate = self._done / (now - self._begun)
            left = (self._total - self._done) / rate
            self._say(f"{self._done} of {self._total}, {rate:.2f} a second, about {left / 60:.0f} min left")


def run(
    its: Contender, questions: Sequence[Question], items: Sequence[Item], journal: Journal, log: Path, say: Say
) -> None:
    """Ask all that ``journal`` does not have. Raises RemoteError when a server does not start, dies, or does not answer
    a question that it is asked alone first; what fails later counts as such."""
    expected = dict.fromkeys(item.question for item in items)
    unknown = [q for q in expected if _reference(its, q) not in journal]
    todo = [item for item in items if _asked(its, item) not in journal]
    progress = Progress(len(unknown) + len(todo), lambda line: say(f"{its.name}: {line}"))
    for start in its.dialect.starts:
        mine = [item for item in todo if item.start == start]
        first = unknown if start == FIRST else []
        if not mine and not first:
            continue
        with servers.started(its.start(start), log) as running:
            remote = running.remote
            model = remote.model(None)
            for q in first:
                journal.add(_reference(its, q), told(remote.chat({**questions[q].body, "model": model})))
                progress.step()

            def one(item: Item, remote: Remote = remote, model: str = model) -> None:
                body = {**questions[item.question].body, "model": model, **its.dialect.fields(item)}
                found = outcome(its, remote, body, item, read(journal[_reference(its, item.question)]))
                journal.add(_asked(its, item), found)
                progress.step()

            for crowd, group in groupby(mine, lambda item: item.crowd):
                asked = list(group)
                beside = [{**questions[item.question].body, "model": model} for item in asked]
                with leaving(remote, beside, crowd.neighbours):
                    together(one, asked, crowd.concurrency)
                found = [journal[_asked(its, item)] for item in asked]
                wrong = sum(each is not None for each in found)
                say(f"{its.name}, {start}, {crowd.name}: {len(asked)} answers, {wrong} not as expected")
            if its.dialect.ours:
                before = journal.get(_preempted(its, start)) or 0
                journal.add(_preempted(its, start), before + preemptions(remote))


def outcome(
    its: Contender, remote: Remote, body: Mapping[str, Any], item: Item, expected: Answer
) -> dict[str, Any] | None:
    """None where the answer is the expected one, else what differs, or how it failed. Raises RemoteError when the
    server is gone, or ours has become another."""
    try:
        if item.prefix == HIT:
            remote.chat({**body, "max_tokens": 1})
        answer = remote.chat(body, stream=item.stream == STREAMS[1])
    except RemoteError as error:
        remote.models()  # raises when it is gone
        return {"failed": str(error)}
    if its.dialect.ours and answer.fingerprint != expected.fingerprint:
        raise RemoteError(
            f"the server is {answer.fingerprint}, and what is expected was said by {expected.fingerprint}: "
            "begin a journal of its own"
        )
    found = difference(expected, answer)
    return None if found is None else found.to_dict()


def preemptions(remote: Remote) -> int:
    """How often a server of ours has taken a row away until now. Raises RemoteError."""
    try:
        with urllib.request.urlopen(f"{remote.url}/metrics", timeout=remote.timeout) as response:
            lines = response.read().decode().splitlines()
    except OSError as error:
        raise RemoteError(f"{remote.url}/metrics cannot be read ({error})") from error
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("outpace_preemptions_total"))


def preempted(its: Contender, journal: Journal) -> dict[str, int]:
    """How often a row was taken away, by start; nothing of others' servers, which do not tell it here."""
    found = {start: journal.get(_preempted(its, start)) for start in its.dialect.starts}
    return {start: count for start, count in found.items() if count is not None}


def outcomes(its: Contender, items: Sequence[Item], journal: Journal) -> tuple[list[Item], list[dict[str, Any] | None]]:
    """What has been asked, in order, and what ``run`` found."""
    done = [item for item in items if _asked(its, item) in journal]
    return done, [journal[_asked(its, item)] for item in done]


def together(act: Callable[[T], None], over: Sequence[T], concurrency: int) -> None:
    """``act`` on all, so many at once. Raises what the first that fails raises; what has not begun is left."""
    if concurrency == 1:
        for each in over:
            act(each)
        return
    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(act, each) for each in over]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def leaving(remote: Remote, asked: Sequence[Mapping[str, Any]], neighbours: int) -> Iterator[None]:
    """Beside the block, clients that begin streams and go away after a little of each."""
    over = threading.Event()

    def neighbour(number: int) -> None:
        i = number
        while not over.is_set():
            body = {**asked[i % len(asked)], "seed": i, "max_tokens": LEAVES, "stream": True}
            request = urllib.request.Request(
                remote.base + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=remote.timeout) as response:
                response.read(300 + 97 * (i % 7))
            i += neighbours
            over.wait(PAUSE)

    with ThreadPoolExecutor(max(neighbours, 1)) as pool:
        running = [pool.submit(neighbour, i) for i in range(neighbours)]
        try:
            yield
        finally:
            over.set()
        for each in running:
            each.result()  # one that could not be a neighbour says so


def _reference(its: Contender, question: int) -> str:
    return f"{its.name} expects {question}"


def _preempted(its: Contender, start: str) -> str:
    return f"{its.name} preempted {start}"


def _asked(its: Contender, item: Item) -> str:
    return f"{its.name} asked {item.number}"
