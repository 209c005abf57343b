"""Does a server say the same, whatever goes on around a request? An even sample of ways to ask, and a score.

    python -m benchmarks invariance --prompts prompts.jsonl --requests 400
    python -m benchmarks invariance --prompts prompts.jsonl --requests 10000 --journal run
    python -m benchmarks invariance --prompts prompts.jsonl --server llamacpp='llama-server -m X.gguf --port {port}' \\
        --also llamacpp:drafted='llama-server -m X.gguf --port {port} --spec-type ngram-simple'

Questions are prompts, greedily, with noise and with a grammar. Each is asked alone first; then in every way: crowded
and beside clients that leave, streamed, with its prefix warmed or not reused, with speculation off, of other sizes and
drafters, and of servers that were started again, with other threads, drafters, rows, chunks and memory. Answers are
compared as ``outpace verify --url`` does: changed is another token, text or end; bits, another logprob alone.

``--server`` names more servers, a column each; NAME, up to a hyphen, says what it can be told: llamacpp, vllm, or what
every OpenAI-compatible server takes. ``--also NAME:WHAT=COMMAND`` is another start of it.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import servers
from benchmarks.figures import Measuring, add_json, emit
from outpace.cli.terminal import table
from outpace.common.progress import progress
from outpace.errors import Argument, ParameterError
from outpace.measure import machine
from outpace.measure.prompts import PromptRow, read_prompts
from outpace.measure.remote import Answer, Remote, RemoteError, Token, Way, bodies, difference
from outpace.params import SamplingParams

T = TypeVar("T")
Fields = Mapping[str, Any]
Question = tuple[str, Fields]  # the name of its noise, and the body of a chat without model
ASKED = 10  # times that a question is asked, if there are enough of them
PAUSE = 0.05  # seconds until a client that left comes again
KINDS = ("answers", "changed", "bits", "failed", "near_ties")
_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}}
NOISES: dict[str, tuple[SamplingParams, Fields]] = {
    "greedy": (SamplingParams(seed=1000), {}),
    "temperature 0.8, top_p": (SamplingParams(seed=1001, temperature=0.8, top_p=0.95), {}),
    "temperature 1, penalty": (SamplingParams(seed=1002, temperature=1.0, presence_penalty=0.5), {}),
    "grammar": (SamplingParams(seed=1003, temperature=0.8), _JSON),
}
CROWDS = {"alone": (1, 0), "4 at once": (4, 0), "16 at once": (16, 0), "16, and some leave": (16, 4)}
FIRST = "first start"  # which also says what is expected
STARTS = {FIRST: "", "started again": ""}
WARM = "prefix warmed"
LIKED = "as it likes"
OUR_STARTS = {
    **STARTS,
    "one thread": "--threads 1",
    "drafter ngram": "--drafter ngram",
    "drafter none": "--drafter none",
    "4 rows": "--max-rows 4",
    "small chunks": "--prefill-delay 0.001",
    "little memory": "--kv-memory 8MiB",
}
OUR_AXES: dict[str, dict[str, Fields]] = {
    "prefix": {WARM: {}, "prefix not reused": {"reuse_prefix": False}},
    "speculation": {
        LIKED: {},
        "off": {"speculation": {"off": True}},
        "size 1": {"speculation": {"size": 1}},
        "size 8": {"speculation": {"size": 8}},
        "drafter suffix": {"speculation": {"drafter": "suffix"}},
    },
}
AXES: dict[str, dict[str, dict[str, Fields]]] = {  # of others; {item} in a field is the request's number
    "llamacpp": {"prefix": {WARM: {}, "prefix not reused": {"cache_prompt": False}}},
    "vllm": {"prefix": {WARM: {}, "prefix not reused": {"cache_salt": "{item}"}}},
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A kind of server. ``starts``: more arguments, or a command of its own, by name; ``axes``: fields of a request by
    axis and value. ``ours``: it names its bits by a fingerprint, and counts preemptions."""

    name: str
    command: str
    starts: Mapping[str, str]
    axes: Mapping[str, Mapping[str, Fields]]
    ours: bool = False

    def start(self, name: str) -> str:
        more = self.starts[name]
        return more if "{port}" in more else f"{self.command} {more}".strip()


@dataclass(frozen=True, slots=True)
class Item:
    """A question asked in a way: the value of each axis, ``start``, ``crowd`` and ``stream`` among them."""

    number: int
    question: int
    ways: Mapping[str, str]

    def fields(self, contender: Contender) -> dict[str, Any]:
        """What is sent beside the question."""
        found: dict[str, Any] = {}
        for axis, values in contender.axes.items():
            found |= values[self.ways[axis]]
        return {k: value.format(item=self.number) if isinstance(value, str) else value for k, value in found.items()}


class Journal(dict[str, Any]):
    """What was found so far, a JSON line each in ``path``, where a run that was interrupted goes on. Threads may add.
    Raises ParameterError for a file of another ``run``."""

    def __init__(self, path: Path | None, run: Any) -> None:
        super().__init__()
        self._path, self._lock = path, threading.Lock()
        if path is not None and path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]  # a last line that was cut short is asked again
            try:
                self.update(json.loads(line) for line in whole.splitlines())
            except (ValueError, TypeError) as error:
                raise ParameterError(f"{path} is no journal of this benchmark: name another file") from error
            if whole and self["run"] != json.loads(json.dumps(run)):
                raise ParameterError(f"{path} is of another run: give another ", Argument("journal"))
            path.write_bytes(whole + b"\n" if whole else b"")
        if "run" not in self:
            self.add("run", run)

    def add(self, key: str, value: Any) -> None:
        """Keep a value of JSON."""
        with self._lock:
            self[key] = value
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(json.dumps([key, value]).encode() + b"\n")


def questions(rows: Sequence[PromptRow], tokens: int) -> list[Question]:
    """Every prompt under every noise, with the noise's name: answers of half of ``tokens`` up to all of them."""
    nowhere, least, found = Remote(""), max(tokens // 2, 1), list[Question]()
    for i, row in enumerate(rows):
        for name, (noise, more) in NOISES.items():
            params = noise.with_(max_tokens=least + i % (tokens - least + 1))
            (body,) = bodies([row], params, Way(name, nowhere, "", more=more), logprobs=True)
            del body["model"]
            found.append((name, body))
    return found


def planned(contender: Contender, known: int, requests: int) -> list[Item]:
    """So many requests in the order of starts and crowds, of the first questions. Each value of an axis, and each
    question, comes as often as any other. Raises ParameterError."""
    if requests < 1:
        raise ParameterError(Argument("requests", requests), " is out of range: give at least 1")
    dice, items = random.Random(0), list[Item]()
    axes = {"stream": ("whole", "streamed"), **contender.axes}
    ways, each = _deck(list(product(*axes.values())), dice), _deck(range(min(known, -(-requests // ASKED))), dice)
    phases = list(product(contender.starts, CROWDS))
    for i, (start, crowd) in enumerate(phases):
        while len(items) < (i + 1) * requests // len(phases):
            way = {"start": start, "crowd": crowd, **dict(zip(axes, next(ways), strict=True))}
            if start == "drafter none" and "speculation" in way:
                way["speculation"] = LIKED
            items.append(Item(len(items), next(each), way))
    return items


def _deck(cards: Sequence[T], dice: random.Random) -> Iterator[T]:
    """All cards, in a new order each time."""
    while True:
        yield from dice.sample(cards, len(cards))


def ask_all(
    contender: Contender, known: Sequence[Question], items: Sequence[Item], journal: Journal, log: Path
) -> None:
    """Ask what the journal does not have. Raises RemoteError when a server does not start, or dies, or does not answer
    a question that it is asked alone first; what fails later is counted."""
    with progress(contender.name, len(items)) as advance:
        for start in contender.starts:
            first = {item.question for item in items} if start == FIRST else set()
            unknown = [q for q in sorted(first) if f"{contender.name} expects {q}" not in journal]
            left = [
                i for i in items if i.ways["start"] == start and f"{contender.name} asked {i.number}" not in journal
            ]
            if not left and not unknown:
                continue
            with servers.started(contender.start(start), log) as running:
                remote = running.remote
                model = {"model": remote.model(None)}
                for q in unknown:
                    journal.add(f"{contender.name} expects {q}", asdict(remote.chat({**known[q][1], **model})))

                def one(item: Item, remote: Remote = remote, model: Fields = model) -> None:
                    body = {**known[item.question][1], **model, **item.fields(contender)}
                    expected = answer_of(journal[f"{contender.name} expects {item.question}"])
                    journal.add(
                        f"{contender.name} asked {item.number}", outcome(contender, remote, body, item, expected)
                    )
                    advance(1)

                for crowd, group in groupby(left, lambda item: item.ways["crowd"]):
                    asked = list(group)
                    concurrency, neighbours = CROWDS[crowd]
                    with leaving(remote, [{**known[i.question][1], **model} for i in asked], neighbours):
                        together(one, asked, concurrency)
                if contender.ours:
                    journal.add(f"{contender.name} preempted {start}", preemptions(remote))


def outcome(contender: Contender, remote: Remote, body: Fields, item: Item, expected: Answer) -> dict[str, Any] | None:
    """None where the answer is the expected one, else what differs, or how it failed. Raises RemoteError when the
    server is gone, or ours has become another."""
    try:
        if item.ways.get("prefix") == WARM:
            remote.chat({**body, "max_tokens": 1})
        answer = remote.chat(body, stream=item.ways["stream"] == "streamed")
    except RemoteError as error:
        remote.models()  # raises when it is gone
        return {"failed": str(error)}
    if contender.ours and answer.fingerprint != expected.fingerprint:
        raise RemoteError(f"the server is {answer.fingerprint}, and was {expected.fingerprint}: begin another journal")
    found = difference(expected, answer)
    return None if found is None else found.to_dict("a", "b")


def answer_of(value: Mapping[str, Any]) -> Answer:
    """An answer from its fields."""
    tokens = value["tokens"]
    return Answer(**{**value, "tokens": None if tokens is None else tuple(Token(**token) for token in tokens)})


def preemptions(remote: Remote) -> int:
    """How often a server of ours has taken a row away until now."""
    with urllib.request.urlopen(f"{remote.url}/metrics", timeout=remote.timeout) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("outpace_preemptions_total"))


def together(act: Callable[[T], None], over: Iterable[T], concurrency: int) -> None:
    """``act`` on all, so many at once. Raises what the first that fails raises."""
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(act, over))


@contextmanager
def leaving(remote: Remote, asked: Sequence[Fields], neighbours: int) -> Iterator[None]:
    """Beside the block, clients that begin streams and go away after a little of each."""
    over = threading.Event()

    def neighbour(number: int) -> None:
        for i in range(number, 1 << 30, max(neighbours, 1)):
            if over.is_set():
                return
            body = {**asked[i % len(asked)], "seed": i, "max_tokens": 150, "stream": True}
            request = urllib.request.Request(
                remote.base + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=remote.timeout) as response:
                response.read(300 + 97 * (i % 7))
            over.wait(PAUSE)

    with ThreadPoolExecutor(max(neighbours, 1)) as pool:
        running = [pool.submit(neighbour, i) for i in range(neighbours)]
        try:
            yield
        finally:
            over.set()
        for each in running:
            each.result()  # one that could not be a neighbour says so


def score(contender: Contender, items: Sequence[Item], known: Sequence[Question], journal: Journal) -> dict[str, Any]:
    """Counts of ``KINDS`` of what was asked, in all and by each value of each axis, and the first difference."""
    total = dict.fromkeys(KINDS, 0)
    by: dict[str, dict[str, dict[str, int]]] = {}
    first: dict[str, Any] | None = None
    for item in items:
        key = f"{contender.name} asked {item.number}"
        if key not in journal:
            continue
        found = journal[key]
        ways = {**item.ways, "noise": known[item.question][0]}
        each = [by.setdefault(axis, {}).setdefault(value, dict.fromkeys(KINDS, 0)) for axis, value in ways.items()]
        for counts in (total, *each):
            counts["answers"] += 1
            if found is not None:
                counts[_kind(found)] += 1
                counts["near_ties"] += _kind(found) == "changed" and found["near_tie"]
        if found is not None and (first is None or (_kind(found) == "changed" != first["kind"])):
            first = {"kind": _kind(found), **ways, "body": dict(known[item.question][1]), **found}
    taken = {start: journal.get(f"{contender.name} preempted {start}") for start in contender.starts}
    return {**total, "by": by, "first": first, "preemptions": {k: v for k, v in taken.items() if v is not None}}


def _kind(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return "failed"
    return "bits" if found["what"] == "logprob" else "changed"


def shown(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """A column a server; a dash for what one cannot be told, or was not asked."""
    rows = [["all", "", *(_cell(each) for each in scores.values())]]
    values = dict.fromkeys((axis, value) for each in scores.values() for axis, by in each["by"].items() for value in by)
    for axis, value in values:
        rows.append([axis, value, *(_cell(each["by"].get(axis, {}).get(value)) for each in scores.values())])
    return table(("answers changed (in bits alone)", "", *scores), rows, left=2)


def _cell(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "-"
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['changed']} of {counts['answers']} ({counts['bits']}){failed}"


def contenders(given: argparse.Namespace) -> list[Contender]:
    """Ours, and those of ``--server`` with their ``--also``. Raises ParameterError."""
    ours = f"{servers.OURS} --more-drafter suffix {given.options}".strip()
    found = {} if given.without_ours else {"outpace": Contender("outpace", ours, OUR_STARTS, OUR_AXES, ours=True)}
    for each in given.server:
        name, _, command = each.partition("=")
        if "{port}" not in command or name in found:
            raise ParameterError(Argument("server", each), " is no NAME=COMMAND with a {port} and a name of its own")
        found[name] = Contender(name, command, STARTS, AXES.get(name.partition("-")[0], {"prefix": {WARM: {}}}))
    for each in given.also:
        what, _, command = each.partition("=")
        name, _, start = what.partition(":")
        if name not in found or not start or "{port}" not in command:
            raise ParameterError(Argument("also", each), " is no NAME:WHAT=COMMAND with a {port} and a server's name")
        found[name] = replace(found[name], starts={**found[name].starts, start: command})
    return list(found.values())


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as outpace bench takes them")
    parser.add_argument("--limit", type=int, help="so many prompts, spread evenly")
    parser.add_argument("--longest", type=int, default=300, help="leave out prompts of more characters")
    parser.add_argument("--requests", type=int, default=400, help="so many to each server")
    parser.add_argument("--tokens", type=int, default=16, help="of the longest answer; the shortest has half of them")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="one more, with {port}")
    parser.add_argument("--also", action="append", default=[], metavar="NAME:WHAT=COMMAND", help="a start of it")
    parser.add_argument("--without-ours", action="store_true", help="ask the others alone")
    parser.add_argument("--options", default="", help="more arguments of our server, such as '-m demo-gemma'")
    parser.add_argument("--journal", type=Path, help="what was found; a run that was interrupted goes on with it")
    add_json(parser)
    parser.add_argument("--log", type=Path, default=Path("invariance.log"), help="what the servers say")


def run(given: argparse.Namespace) -> int:
    rows = [row for row in read_prompts(given.prompts, given.limit) if len(row.turns[0]) <= given.longest]
    if not rows:
        raise ParameterError(f"{given.prompts} has no prompt of at most {given.longest} characters")
    known, asked = questions(rows, given.tokens), contenders(given)
    plans = [(contender, planned(contender, len(known), given.requests)) for contender in asked]
    this = {
        "servers": {contender.name: [contender.start(name) for name in contender.starts] for contender in asked},
        "questions": [dict(body) for _, body in known],
        "requests": given.requests,
    }
    journal, scores = Journal(given.journal, this), {}
    with Measuring() as measuring:
        for contender, items in plans:
            ask_all(contender, known, items, journal, given.log)
    for contender, items in plans:
        if any(f"{contender.name} asked {item.number}" in journal for item in items):
            scores[contender.name] = score(contender, items, known, journal)
    found = {"scores": scores, "commands": this["servers"], "machine": machine.cpu()}
    print(shown(scores))
    wrong = any(figures["changed"] or figures["failed"] for figures in scores.values())
    wrong = wrong or bool(scores.get("outpace", {}).get("bits"))
    for name, figures in scores.items():
        print(f"{name}: {figures['changed']} of {figures['answers']} changed, {figures['bits']} more in bits alone; "
              f"rows taken away {figures['preemptions']}; first {json.dumps(figures['first'])}")  # fmt: skip
    emit(given, found)
    return measuring.end(1 if wrong else 0)
