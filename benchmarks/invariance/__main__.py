"""Does a server say the same, whatever goes on around a request? An even sample of ways to ask, and a score.

    python -m benchmarks.invariance --prompts prompts.jsonl --requests 400
    python -m benchmarks.invariance --prompts prompts.jsonl --requests 10000 --journal run
    python -m benchmarks.invariance --prompts prompts.jsonl --server llamacpp='llama-server -m X.gguf --port {port}' \\
        --also llamacpp:drafted='llama-server -m X.gguf --port {port} --spec-type ngram-simple'

Questions are prompts, greedily, with noise and with a grammar. Each is asked alone first; then all over: crowded and
beside clients that leave, streamed, with its prefix warmed and not reused, with speculation off, of other sizes and
drafters, and of servers that were started again, with other threads, drafters, rows, chunks and memory. Each value of
an axis has its share of the requests. An answer has changed if a token has; in bits alone if only a logprob has.

``--server`` names more servers, a column each; NAME, up to a hyphen, says what it can be told: llamacpp, vllm, or what
every OpenAI-compatible server takes. ``--also NAME:WHAT=COMMAND`` is another start of it. What a server cannot be told
is a dash. ``--replays``: so many answers of ours are replayed after a restart with another drafter and one thread,
beside clients that leave, and a tenth of them again with one token altered, which has to be caught.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.invariance import replays
from benchmarks.invariance.ask import Contender, outcomes, preempted, run
from benchmarks.invariance.journal import Journal
from benchmarks.invariance.plan import OPENAI, OTHERS, OURS, OURS_OPTIONS, planned, questions
from benchmarks.invariance.report import score, table
from benchmarks.servers import OURS as COMMAND
from benchmarks.servers import end_with_servers
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.measure import machine
from outpace.measure.prompts import PromptRow, read_prompts

OUTPACE = "outpace"


def contenders(ours: bool, options: str, named: Sequence[str], also: Sequence[str]) -> list[Contender]:
    """Ours, and those of ``--server`` with their ``--also``. Raises ParameterError."""
    found = [Contender(OUTPACE, f"{COMMAND} {OURS_OPTIONS} {options}".strip(), OURS)] if ours else []
    for each in named:
        name, _, command = each.partition("=")
        if "{port}" not in command or name in (its.name for its in found):
            raise ParameterError(Argument("server", each), " is no NAME=COMMAND with a {port} and a name of its own")
        found.append(Contender(name, command, OTHERS.get(name.partition("-")[0], OPENAI)))
    for each in also:
        what, _, command = each.partition("=")
        name, _, start = what.partition(":")
        at = next((i for i, its in enumerate(found) if its.name == name), None)
        if at is None or not start or "{port}" not in command:
            raise ParameterError(
                Argument("also", each), " is no NAME:WHAT=COMMAND with a {port} and a server's name before the colon"
            )
        its = found[at]
        found[at] = replace(its, dialect=replace(its.dialect, starts={**its.dialect.starts, start: command}))
    if not found:
        raise ParameterError("nobody is asked: give ", Argument("server"))
    return found


def asked(path: Path, limit: int | None, longest: int | None) -> list[PromptRow]:
    """The prompts that are short enough. Raises ParameterError."""
    rows = [row for row in read_prompts(path) if longest is None or len(row.turns[0]) <= longest]
    if not rows:
        raise ParameterError(f"{path} has no prompt of at most {longest} characters: raise ", Argument("longest"))
    return rows if limit is None else [rows[i * len(rows) // limit] for i in range(min(limit, len(rows)))]


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """All that ``given`` asks for. Raises OutpaceError."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    servers = contenders(not given.without_ours, given.options, given.server, given.also)
    known = questions(asked(given.prompts, given.limit, given.longest), given.tokens)
    plans = {its.name: planned(its.dialect, len(known), given.requests) for its in servers if given.requests}
    this = {
        "servers": {its.name: [its.start(name) for name in its.dialect.starts] for its in servers},
        "questions": [dict(its.body) for its in known],
        "plans": {name: zlib.crc32(repr(items).encode()) for name, items in plans.items()},
        "replays": given.replays,
    }
    scores: dict[str, Any] = {}
    told: dict[str, Any] | None = None
    with Journal(given.journal, this, say) as journal:
        for its in servers if plans else ():
            items = plans[its.name]
            if not given.report:
                run(its, known, items, journal, given.log, say)
            done, found = outcomes(its, items, journal)
            scores[its.name] = {**score(done, known, found), "preemptions": preempted(its, journal)}
        if given.replays:
            (ours,) = contenders(True, given.options, (), ())
            its_replays = replays.Replays(known, given.replays, given.replays // 10, journal)
            if not given.report:
                its_replays.run(ours.command, given.log, say)
            told = its_replays.score()
    return {"scores": scores, "replays": told, "commands": this["servers"], "machine": machine.cpu()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as outpace bench takes them")
    parser.add_argument("--limit", type=int, help="so many prompts, spread evenly")
    parser.add_argument("--longest", type=int, default=300, help="leave out prompts of more characters")
    parser.add_argument("--requests", type=int, default=400, help="so many to each server; 0: replays alone")
    parser.add_argument("--tokens", type=int, default=16, help="of the longest answer; the shortest has half of them")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="one more, with {port}")
    parser.add_argument("--also", action="append", default=[], metavar="NAME:WHAT=COMMAND", help="a start of it")
    parser.add_argument("--without-ours", action="store_true", help="ask the others alone")
    parser.add_argument("--options", default="", help="more arguments of our server, such as '-m demo-gemma'")
    parser.add_argument("--replays", type=int, default=0, help="answers of ours to replay")
    parser.add_argument("--journal", type=Path, help="what was found; a run that was interrupted goes on with it")
    parser.add_argument("--report", action="store_true", help="ask nothing: the score of what the journal has")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--log", type=Path, default=Path("invariance.log"), help="what the servers say")
    given = parser.parse_args(arguments)
    try:
        found = measured(given)
    except OutpaceError as error:
        print(error, file=sys.stderr)
        return 2
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    scores = found["scores"]
    if scores:
        Console().print(table(scores))
    for name, its in scores.items():
        print(f"{name}: {its['changed']} of {its['answers']} answers changed, {its['bits']} more in bits alone")
        if its["preemptions"]:
            print(f"{name}: rows taken away: {its['preemptions']}")
        if its["first"] is not None:
            print(f"{name}: first: {json.dumps(its['first'])}")
    wrong = any(its["changed"] or its["failed"] or (name == OUTPACE and its["bits"]) for name, its in scores.items())
    if (told := found["replays"]) is not None:
        print(
            f"replays: {told['identical']} of {told['replayed']} identical ({told['drafted']} were drafted); "
            f"{told['caught']} of {told['altered']} altered tokens caught"
        )
        for each in told["wrong"][:5]:
            print(f"replays: WRONG: {json.dumps(each)}")
        wrong = wrong or bool(told["wrong"])
    return 1 if wrong else 0


if __name__ == "__main__":
    end_with_servers()
    sys.exit(main())
