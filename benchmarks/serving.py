"""Servers side by side: throughput, time to the first token and between tokens, at several concurrencies.

    python -m benchmarks serving --prompts prompts.jsonl --concurrency 1 4 8 16
    python -m benchmarks serving --prompts prompts.jsonl --server llamacpp='llama-server -m MODEL.gguf --port {port}'

All servers run from the beginning; one of ours is asked for drafted answers, for plain ones, and for plain ones again,
the control: two processes differ by several per cent in where their weights lie. A round asks each the same prompts at
each concurrency, one after the other (A B C, C B A, B C A, A C B ...), and every round asks others, in an order of
chance; answers are greedy and end where the model ends them; ours share no KV. A ratio is a round's tokens/s over those
of our plain answers in the same round. Answers that end in a loop draft far better than other text; since answers of a
round share the machine, tokens/s cannot leave them out, but the speed of an answer after its first token can: a line
below the table has that of the others. ``cpu`` is processor time a token and, of ours, the part of it that the event
loop's thread took; Linux only.

TPOT is an answer's time after its first token over its other tokens, and its p50 and p99 are over answers. ICL is the
time between two pieces of a stream, and its p50 and p99 are over all of them (docs/serving.md: what others call these).
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.figures import Measuring, add_json, at_least_one, emit
from benchmarks.servers import OURS, Spent, Started, spent, started
from outpace.cli.terminal import table
from outpace.common.arrays import repeated_tail
from outpace.measure import machine
from outpace.measure.prompts import read_prompts
from outpace.measure.remote import Remote, RemoteError

PLAIN, CONTROL = "outpace plain", "outpace plain again"
OFF = {"speculation": {"off": True}}
OURS_ASK: dict[str, dict[str, Any]] = {"outpace": {}, PLAIN: OFF, CONTROL: OFF}
P99 = ("tpot_p99", "icl_p99")  # compared with plain's


Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shot:
    """An answer as it came. ``at``: when each piece did, in seconds; ``tokens``: as the server counts them; ``ids``:
    theirs, where the server gives them."""

    begun: float
    at: tuple[float, ...]
    tokens: int
    text: str
    ids: tuple[int, ...] = ()

    @property
    def first(self) -> float:
        """Seconds to the first token; of an empty answer, none."""
        return self.at[0] - self.begun if self.at else math.nan

    @property
    def per_token(self) -> float:
        """Seconds a token after the first one came, over the whole answer; of an answer of one token, none."""
        return (self.at[-1] - self.at[0]) / (self.tokens - 1) if self.at and self.tokens > 1 else math.nan

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [now - before for before, now in zip(self.at, self.at[1:], strict=False)]


def read(remote: Remote, body: Body) -> Shot:
    """The answer to a chat. Lines are stamped as they come, and parsed when the answer has ended. Raises RemoteError
    for what is no whole answer."""
    at = urlsplit(remote.base)
    connection = http.client.HTTPConnection(at.netloc, timeout=remote.timeout)
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines: list[tuple[float, bytes]] = []
    begun = time.perf_counter()
    try:
        connection.request(
            "POST", f"{at.path}/chat/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RemoteError(f"HTTP {response.status}: {response.read(1000)!r}", status=response.status)
        while line := response.readline():
            if line.startswith(b"data:"):
                lines.append((time.perf_counter(), line[5:].strip()))
    except (OSError, http.client.HTTPException) as error:
        raise RemoteError(f"{at.netloc} ended an answer in the middle ({error!r})") from error
    finally:
        connection.close()
    return parsed(begun, lines)


def parsed(begun: float, lines: Sequence[tuple[float, bytes]]) -> Shot:
    """The answer that these events with their times are. Raises RemoteError for one that is not whole."""
    if not lines or lines[-1][1] != b"[DONE]":
        raise RemoteError(f"a stream ended without [DONE], after {lines[-1][1][:500] if lines else b'nothing'!r}")
    at: list[float] = []
    text, tokens, ids = "", None, list[int]()
    for moment, data in lines[:-1]:
        chunk = json.loads(data)
        if "error" in chunk:
            raise RemoteError(f"a stream ended with an error: {chunk['error']}")
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        piece, more = "", list[int]()
        for choice in chunk.get("choices", ()):
            piece += (choice.get("delta") or {}).get("content") or ""
            more += choice.get("token_ids") or ()
        ids += more
        if piece or more:
            at.append(moment)
            text += piece
    if tokens is None:
        raise RemoteError("a stream has no usage, so its tokens cannot be counted")
    return Shot(begun, tuple(at), tokens, text, tuple(ids))


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which ``part`` of them lie, between neighbours in proportion; NaN of none."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return math.nan
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def figures(shots: Sequence[Shot]) -> dict[str, float]:
    """Of answers that were asked for together; times in seconds."""
    begun = min(shot.begun for shot in shots)
    ended = max(shot.at[-1] if shot.at else shot.begun for shot in shots)
    seconds = max(ended - begun, 1e-9)
    firsts = [shot.first for shot in shots]
    return {
        "requests": len(shots),
        "tokens": sum(shot.tokens for shot in shots),
        "seconds": seconds,
        "requests_per_second": len(shots) / seconds,
        "tokens_per_second": sum(shot.tokens for shot in shots) / seconds,
        "first_p50": quantile(firsts, 0.5),
        "first_p99": quantile(firsts, 0.99),
        **between(shots),
    }


def between(shots: Iterable[Shot]) -> dict[str, float]:
    """Seconds after the first token, over answers and over gaps: TPOT and ICL, as docs/serving.md has them."""
    shots = list(shots)
    each, gaps = [shot.per_token for shot in shots], [gap for shot in shots for gap in shot.gaps]
    return {
        "tpot_p50": quantile(each, 0.5),
        "tpot_p99": quantile(each, 0.99),
        "icl_p50": quantile(gaps, 0.5),
        "icl_p99": quantile(gaps, 0.99),
    }


def together(remote: Remote, bodies: Sequence[Body], concurrency: int) -> list[Shot]:
    """All answers, so many at once. Raises RemoteError."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: read(remote, body), bodies))


@dataclass
class Served:
    """A server, what is asked of it beside prompts (``more``), and what was seen by concurrency. ``ids``: it gives the
    token ids of a piece."""

    name: str
    server: Started
    model: str
    ids: bool
    more: Mapping[str, Any] = field(default_factory=dict)
    rounds: dict[int, list[list[Shot]]] = field(default_factory=dict)
    used: dict[int, Spent] = field(default_factory=dict)

    def bodies(self, prompts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
        more = {"return_token_ids": True} if self.ids else {}
        base = {"model": self.model, "max_tokens": tokens, "temperature": 0, **more, **self.more}
        return [{**base, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]

    def crowd(self, prompts: Sequence[str], tokens: int, concurrency: int) -> None:
        """A round at ``concurrency``."""
        before = spent(self.server.pid) if Path("/proc/self/stat").exists() else None
        shots = together(self.server.remote, self.bodies(prompts, tokens), concurrency)
        self.rounds.setdefault(concurrency, []).append(shots)
        if before is not None:
            self.used[concurrency] = self.used.get(concurrency, Spent(0, 0)) + (spent(self.server.pid) - before)


def opened(name: str, server: Started, more: Mapping[str, Any] | None = None) -> Served:
    """A server that answers and is warm. Raises RemoteError."""
    served = Served(name, server, server.remote.model(None), ids=True, more=more or {})
    prompts = ["Say hello to everyone in the room, please.", "Name three rivers."]
    try:
        together(server.remote, served.bodies(prompts, 24), 1)
    except RemoteError as error:
        if error.status != 400:
            raise
        served.ids = False
        together(server.remote, served.bodies(prompts, 24), 1)
    together(server.remote, served.bodies(prompts * 4, 16), 4)
    return served


def paired(all_of: Sequence[Served]) -> None:
    """Leave out what not all servers were asked: Ctrl-C came between two of them."""
    for concurrency in {each for served in all_of for each in served.rounds}:
        complete = min(len(served.rounds.get(concurrency, ())) for served in all_of)
        for served in all_of:
            if complete:
                del served.rounds[concurrency][complete:]
            else:
                served.rounds.pop(concurrency, None)


def report(all_of: Sequence[Served]) -> dict[str, Any]:
    """The figures by name and concurrency, with ratios to our plain answers where they were asked for."""
    plain = next((served for served in all_of if served.name == PLAIN), None)
    found: dict[str, Any] = {}
    for served in all_of:
        by_concurrency: dict[str, Any] = {}
        for concurrency, rounds in served.rounds.items():
            each = [figures(shots) for shots in rounds]
            pooled = figures([shot for shots in rounds for shot in shots])
            for name in ("requests_per_second", "tokens_per_second"):  # pauses between rounds are others' turns
                pooled[name] = sum(one[name] * one["seconds"] for one in each) / sum(one["seconds"] for one in each)
            pooled["seconds"] = sum(one["seconds"] for one in each)
            value: dict[str, Any] = dict(pooled)
            if concurrency in served.used:
                used = served.used[concurrency]
                value["cpu_per_token"] = used.all / max(pooled["tokens"], 1)
                value["loop_share"] = used.loop / used.all if used.all else 0.0
            if plain is not None and plain is not served:
                value["ratios"] = ratios(rounds, plain.rounds[concurrency])
                value["ratio"] = median(value["ratios"])
                value["quartiles"] = [quantile(value["ratios"], part) for part in (0.25, 0.75)]
                other = between(shot for shots in plain.rounds[concurrency] for shot in shots)
                value |= {f"{name}_ratio": pooled[name] / other[name] for name in P99 if other[name] > 0}
            by_concurrency[str(concurrency)] = value
        found[served.name] = {"concurrency": by_concurrency}
    return found


def ratios(rounds: Sequence[Sequence[Shot]], plain: Sequence[Sequence[Shot]]) -> list[float]:
    """Tokens/s over plain's, round by round."""
    return [
        figures(own)["tokens_per_second"] / figures(other)["tokens_per_second"]
        for own, other in zip(rounds, plain, strict=True)
    ]


def without_loops(all_of: Sequence[Served]) -> dict[str, Any]:
    """By concurrency: how many of our plain answers end in a loop, and by name the speed of answers to other prompts
    after their first token over that of plain ones, pooled."""
    plain = next((served for served in all_of if served.name == PLAIN), None)
    if plain is None:
        return {}
    found: dict[str, Any] = {}
    for concurrency, rounds in plain.rounds.items():
        loops = [[repeated_tail(shot.ids) > 0 for shot in shots] for shots in rounds]
        speeds = {served.name: _pace(served.rounds[concurrency], loops) for served in all_of}
        base = speeds.pop(PLAIN)
        found[str(concurrency)] = {
            "answers": sum(map(len, loops)),
            "looping": sum(map(sum, loops)),
            "speeds": {name: speed / base for name, speed in speeds.items()},
        }
    return found


def _pace(rounds: Sequence[Sequence[Shot]], left_out: Sequence[Sequence[bool]]) -> float:
    """Tokens/s of answers after their first token, pooled."""
    pairs = zip(rounds, left_out, strict=True)
    shots = [shot for own, out in pairs for shot, not_it in zip(own, out, strict=True) if shot.at and not not_it]
    seconds = sum(shot.at[-1] - shot.at[0] for shot in shots)
    return sum(shot.tokens - 1 for shot in shots) / seconds if seconds else math.nan


def same_answers(a: Served, b: Served) -> tuple[int, int]:
    """How many answers of two servers differ, and of how many."""
    pairs = [
        (x.text, y.text)
        for concurrency in a.rounds
        for own, other in zip(a.rounds[concurrency], b.rounds[concurrency], strict=True)
        for x, y in zip(sorted(own, key=_text), sorted(other, key=_text), strict=True)
    ]
    return sum(x != y for x, y in pairs), len(pairs)


def _text(shot: Shot) -> str:
    return shot.text


def commands(given: argparse.Namespace) -> dict[str, str]:
    """Servers to start, by name."""
    drafted = "" if given.drafter is None else f" --drafter {given.drafter}"
    found = {"outpace": f"{OURS} {given.options}".strip() + drafted}
    for server in given.server:
        name, _, command = server.partition("=")
        if not name or "{port}" not in command or name in found or name in OURS_ASK:
            raise RemoteError(f"--server {server!r} is not NAME=COMMAND with a {{port}} and a name of its own")
        found[name] = command
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as outpace bench takes them")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="another; repeatable")
    parser.add_argument("--options", default="", help="more arguments of our servers, such as '-m demo-gemma'")
    parser.add_argument("--drafter", help="of our server (default: its own default)")
    parser.add_argument("--concurrency", type=at_least_one, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument(
        "--rounds", type=at_least_one, default=18, help="a multiple of 6 asks ours in every order as often"
    )
    parser.add_argument("--requests", type=at_least_one, default=2, help="for each reader in a round")
    parser.add_argument("--tokens", type=at_least_one, default=64, help="of an answer, at most")
    add_json(parser)
    parser.add_argument("--log", type=Path, default=Path("serving.log"), help="what the servers say")


def run(given: argparse.Namespace) -> int:
    rows = [row.turns[0] for row in read_prompts(given.prompts, None)]
    random.Random(0).shuffle(rows)  # files go by category, and long prompts would all meet one concurrency
    value: dict[str, Any] = {"machine": machine.cpu(), "tokens": given.tokens, "failed": {}, "commands": {}}
    with ExitStack() as stack:
        servers: list[Served] = []
        for name, command in commands(given).items():
            try:
                server = stack.enter_context(started(command, given.log))
                asked_of = {key: {**more, "reuse_prefix": False} for key, more in OURS_ASK.items()}
                each = asked_of if name == "outpace" else {name: {}}
                servers += [opened(key, server, more) for key, more in each.items()]
                value["commands"][name] = command
            except RemoteError as error:
                value["failed"][name] = str(error)
                print(f"{name} is left out: {error}", file=sys.stderr)
        asked = 0
        with Measuring() as measuring:
            for number in range(given.rounds):
                first = number // 2 % len(servers)
                turns = [*servers[first:], *servers[:first]][:: -1 if number % 2 else 1]
                for concurrency in given.concurrency:
                    count = max(concurrency * given.requests, 4)
                    prompts = [rows[(asked + i) % len(rows)] for i in range(count)]
                    asked += count
                    for served in turns:
                        served.crowd(prompts, given.tokens, concurrency)
                    print(f"round {number + 1} of {given.rounds}, {concurrency} at once", file=sys.stderr)
        paired(servers)
        value["servers"] = report(servers)
        value["without_loops"] = without_loops(servers)
        ours = {served.name: served for served in servers}
        if {"outpace", PLAIN} <= ours.keys():
            differ, count = same_answers(ours["outpace"], ours[PLAIN])
            value["changed"] = {"answers": count, "changed": differ}
    show(value)
    emit(given, value)
    return measuring.end(1 if value.get("changed", {}).get("changed") or not value["servers"] else 0)


def show(value: Mapping[str, Any]) -> None:
    """A table; milliseconds."""
    print(f"{value['machine']['model']}, {value['machine']['cores']} cores, {value['tokens']} tokens")
    head = "server", "at once", "req/s", "tok/s", "of plain", "first p50", "p99", "TPOT p50", "p99", "ICL p50", "p99"
    times = ("first_p50", "first_p99", "tpot_p50", "tpot_p99", "icl_p50", "icl_p99")
    rows = []
    for name, figures in value["servers"].items():
        for concurrency, row in figures["concurrency"].items():
            ratio = "{:.2f} ({:.2f}-{:.2f})".format(row["ratio"], *row["quartiles"]) if "ratio" in row else "-"
            rows.append((
                name, concurrency, f"{row['requests_per_second']:.2f}", f"{row['tokens_per_second']:.1f}",
                ratio, *(f"{1000 * row[key]:.0f}" for key in times),
                f"{1000 * row['cpu_per_token']:.1f}" if "cpu_per_token" in row else "-",
                f"{row['loop_share']:.1%}" if "loop_share" in row else "-",
            ))  # fmt: skip
    print(table((*head, "cpu ms/token", "loop"), rows))
    for concurrency, rest in value["without_loops"].items():
        others = ", ".join(f"{name} {speed:.2f}" for name, speed in rest["speeds"].items())
        print(
            f"{concurrency} at once: loops end {rest['looping']} of {rest['answers']} plain answers; an answer to the "
            f"other prompts, after its first token, is as fast as plain's by {others}"
        )
    if "changed" in value:
        print(f"drafted answers that differ from plain ones: {value['changed']}")
    for name, why in value["failed"].items():
        print(f"{name}: LEFT OUT: {why}")
