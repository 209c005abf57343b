"""Servers side by side: throughput, time to the first token and between tokens, at several concurrencies, in one run.

    python -m benchmarks.serving --prompts prompts.jsonl --concurrency 1 4 8 16
    python -m benchmarks.serving --prompts prompts.jsonl --server llamacpp='llama-server -m MODEL.gguf --port {port}'

Ours is served twice, drafted and plain; all servers run from the beginning. A round asks every server the same prompts
at each concurrency, in turn and first in turn (A B B A ...), and every round asks others; answers are greedy and end
where the model ends them. A ratio is a round's tokens/s over those of our plain server in the same round. ``--ramp``
adds a load of 1, 16, then 1 readers, each for so many seconds, and compares its windows and its p99. ``cpu`` is
processor time a token and, of ours, the part of it that the event loop's thread took; Linux only.

TPOT is an answer's time after its first token over its other tokens, and its p50 and p99 are over answers. ICL is the
time between two pieces of a stream, and its p50 and p99 are over all of them (docs/serving.md: what others call these).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import load
from benchmarks.load import Shot
from benchmarks.servers import OURS, Spent, Started, end_with_servers, spent, started
from outpace.errors import OutpaceError
from outpace.measure import machine
from outpace.measure.prompts import read_prompts
from outpace.measure.remote import RemoteError

PLAIN = "outpace plain"
CROWD = 16  # readers in the middle of a ramp
P99 = ("tpot_p99", "icl_p99")  # compared with plain's


@dataclass
class Served:
    """A server, and what was seen of it by concurrency. ``ids``: it tells the token ids of a piece."""

    name: str
    its: Started
    model: str
    ids: bool
    rounds: dict[int, list[list[Shot]]] = field(default_factory=dict)
    used: dict[int, Spent] = field(default_factory=dict)
    ramps: list[list[float]] = field(default_factory=list)
    ramp_shots: list[Shot] = field(default_factory=list)

    def bodies(self, prompts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
        told = {"return_token_ids": True} if self.ids else {}
        base = {"model": self.model, "max_tokens": tokens, "temperature": 0, **told}
        return [{**base, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]

    def crowd(self, prompts: Sequence[str], tokens: int, concurrency: int) -> None:
        """A round at ``concurrency``."""
        before = spent(self.its.pid) if Path("/proc/self/stat").exists() else None
        shots = load.together(self.its.remote, self.bodies(prompts, tokens), concurrency)
        self.rounds.setdefault(concurrency, []).append(shots)
        if before is not None:
            self.used[concurrency] = self.used.get(concurrency, Spent(0, 0)) + (spent(self.its.pid) - before)

    def ramp(self, prompts: Sequence[str], tokens: int, seconds: float, parts: int) -> None:
        """1, many, 1 readers, each for so long and in so many windows. A phase begins when the one before has ended."""
        speeds: list[float] = []
        for concurrency in (1, CROWD, 1):
            shots = load.during(self.its.remote, self.bodies(prompts, tokens), concurrency, seconds)
            begun = min(shot.begun for shot in shots)
            speeds += load.windows(shots, begun, [begun + seconds * (i + 1) / parts for i in range(parts)])
            self.ramp_shots += shots
        self.ramps.append(speeds)


def opened(name: str, its: Started) -> Served:
    """It answers; what was said meanwhile warms it. Raises RemoteError."""
    served = Served(name, its, its.remote.model(None), ids=True)
    prompts = ["Say hello to everyone in the room, please.", "Name three rivers."]
    try:
        load.together(its.remote, served.bodies(prompts, 24), 1)
    except RemoteError as error:
        if error.status != 400:
            raise
        served.ids = False
        load.together(its.remote, served.bodies(prompts, 24), 1)
    load.together(its.remote, served.bodies(prompts * 4, 16), 4)
    return served


def report(all_of: Sequence[Served]) -> dict[str, Any]:
    """The figures by server and concurrency, with ratios to our plain server where it was run."""
    plain = next((its for its in all_of if its.name == PLAIN), None)
    found: dict[str, Any] = {}
    for served in all_of:
        mine: dict[str, Any] = {}
        for concurrency, rounds in served.rounds.items():
            each = [load.figures(shots) for shots in rounds]
            told = load.figures([shot for shots in rounds for shot in shots])
            for name in ("requests_per_second", "tokens_per_second"):  # pauses between rounds are others' turns
                told[name] = sum(its[name] * its["seconds"] for its in each) / sum(its["seconds"] for its in each)
            told["seconds"] = sum(its["seconds"] for its in each)
            value: dict[str, Any] = dict(told)
            if concurrency in served.used:
                used = served.used[concurrency]
                value["cpu_per_token"] = used.all / max(told["tokens"], 1)
                value["loop_share"] = used.loop / used.all if used.all else 0.0
            if plain is not None and plain is not served:
                value["ratios"] = ratios(rounds, plain.rounds[concurrency])
                value["ratio"] = median(value["ratios"])
                its = load.between(shot for shots in plain.rounds[concurrency] for shot in shots)
                value |= {f"{name}_ratio": told[name] / its[name] for name in P99 if its[name] > 0}
            mine[str(concurrency)] = value
        found[served.name] = {"concurrency": mine}
        if served.ramps:
            found[served.name]["ramp"] = ramp(served, plain)
    return found


def ratios(rounds: Sequence[Sequence[Shot]], plain: Sequence[Sequence[Shot]]) -> list[float]:
    """Tokens/s over plain's, round by round."""
    return [
        load.figures(mine)["tokens_per_second"] / load.figures(other)["tokens_per_second"]
        for mine, other in zip(rounds, plain, strict=True)
    ]


def ramp(served: Served, plain: Served | None) -> dict[str, Any]:
    """Windows (means over rounds) and times between tokens of a load that goes 1, many, 1."""
    speeds = [sum(window) / len(window) for window in zip(*served.ramps, strict=True)]
    told: dict[str, Any] = {"windows": speeds, **load.between(served.ramp_shots)}
    if plain is not None and plain is not served:
        other = ramp(plain, None)
        told["window_ratios"] = [
            mine / its if its else None for mine, its in zip(speeds, other["windows"], strict=True)
        ]
        told["worst_window"] = min((its for its in told["window_ratios"] if its is not None), default=None)
        told |= {f"{name}_ratio": told[name] / other[name] for name in P99 if other[name] > 0}
    return told


def same_answers(a: Served, b: Served) -> tuple[int, int]:
    """How many answers of two servers differ, and of how many."""
    pairs = [
        (x.text, y.text)
        for concurrency in a.rounds
        for mine, other in zip(a.rounds[concurrency], b.rounds[concurrency], strict=True)
        for x, y in zip(sorted(mine, key=_text), sorted(other, key=_text), strict=True)
    ]
    return sum(x != y for x, y in pairs), len(pairs)


def _text(shot: Shot) -> str:
    return shot.text


def commands(given: argparse.Namespace) -> dict[str, str]:
    """Servers to start, by name."""
    ours = f"{OURS} {given.options}".strip()
    drafted = "" if given.drafter is None else f" --drafter {given.drafter}"
    found = {"outpace": ours + drafted, PLAIN: f"{ours} --drafter none"}
    for server in given.server:
        name, _, command = server.partition("=")
        if not name or "{port}" not in command or name in found:
            raise RemoteError(f"--server {server!r} is not NAME=COMMAND with a {{port}} and a name of its own")
        found[name] = command
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as outpace bench takes them")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="another; repeatable")
    parser.add_argument("--options", default="", help="more arguments of our servers, such as '-m demo-gemma'")
    parser.add_argument("--drafter", help="of our drafted server (default: its own default)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2, help="for each reader in a round")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--ramp", type=float, default=0.0, metavar="SECONDS", help="of each phase of a ramp")
    parser.add_argument("--windows", type=int, default=3, help="of a phase of a ramp")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--log", type=Path, default=Path("serving.log"), help="what the servers say")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except OutpaceError as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    rows = [row.turns[0] for row in read_prompts(given.prompts, None)]
    value: dict[str, Any] = {"machine": machine.cpu(), "tokens": given.tokens, "failed": {}, "commands": {}}
    with ExitStack() as held:
        servers: list[Served] = []
        for name, command in commands(given).items():
            try:
                servers.append(opened(name, held.enter_context(started(command, given.log))))
                value["commands"][name] = command
            except RemoteError as error:
                value["failed"][name] = str(error)
                print(f"{name} is left out: {error}", file=sys.stderr)
        asked = 0
        for number in range(given.rounds):
            turns = servers if number % 2 == 0 else servers[::-1]
            for concurrency in given.concurrency:
                count = max(concurrency * given.requests, 4)
                prompts = [rows[(asked + i) % len(rows)] for i in range(count)]
                asked += count
                for served in turns:
                    served.crowd(prompts, given.tokens, concurrency)
                print(f"round {number + 1} of {given.rounds}, {concurrency} at once", file=sys.stderr)
            if given.ramp:
                prompts = [rows[(asked + i) % len(rows)] for i in range(4 * CROWD)]
                asked += len(prompts)
                for served in turns:
                    served.ramp(prompts, given.tokens, given.ramp, given.windows)
        value["servers"] = report(servers)
        ours = {served.name: served for served in servers}
        if {"outpace", PLAIN} <= ours.keys():
            differ, count = same_answers(ours["outpace"], ours[PLAIN])
            value["changed"] = {"answers": count, "changed": differ}
    show(value)
    if given.json is not None:
        given.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return 1 if value.get("changed", {}).get("changed") or not value["servers"] else 0


def show(value: Mapping[str, Any]) -> None:
    """A table; milliseconds."""
    console = Console()
    console = Console(width=max(console.width, 150))
    table = Table(title=f"{value['machine']['model']}, {value['machine']['cores']} cores, {value['tokens']} tokens")
    heads = "server", "at once", "req/s", "tok/s", "of plain", "first p50", "p99", "TPOT p50", "p99", "ICL p50", "p99"
    for column in (*heads, "cpu ms/token", "loop"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, its in value["servers"].items():
        for concurrency, row in its["concurrency"].items():
            times = ("first_p50", "first_p99", "tpot_p50", "tpot_p99", "icl_p50", "icl_p99")
            table.add_row(
                name, concurrency, f"{row['requests_per_second']:.2f}", f"{row['tokens_per_second']:.1f}",
                f"{row['ratio']:.2f}" if "ratio" in row else "-", *(f"{1000 * row[key]:.0f}" for key in times),
                f"{1000 * row['cpu_per_token']:.1f}" if "cpu_per_token" in row else "-",
                f"{row['loop_share']:.1%}" if "loop_share" in row else "-",
            )  # fmt: skip
    console.print(table)
    for name, its in value["servers"].items():
        if "ramp" in its:
            console.print(f"{name}, 1, {CROWD}, 1 readers: {_ramp_line(its['ramp'])}")
    if "changed" in value:
        console.print(f"drafted answers that differ from plain ones: {value['changed']}")
    for name, why in value["failed"].items():
        console.print(f"{name}: LEFT OUT: {why}")


def _ramp_line(its: Mapping[str, Any]) -> str:
    line = "tokens/s by window " + " ".join(f"{speed:.0f}" for speed in its["windows"])
    if "window_ratios" in its:
        line += "; of plain " + " ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in its["window_ratios"])
        told = [f"{name[:-4].upper()} {its[f'{name}_ratio']:.2f}" for name in P99 if f"{name}_ratio" in its]
        line += f"; p99 over plain's: {', '.join(told) or '-'}"
    return line


if __name__ == "__main__":
    end_with_servers()
    sys.exit(main())
