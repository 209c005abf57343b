"""Is an answer replayed as it was given, after a restart, and is an altered one caught?

    python -m benchmarks replays --prompts prompts.jsonl --count 1000 --journal run

The server that replays has another drafter and one thread, and clients beside that leave. A tenth of the answers is
replayed again with one token altered, which has to be caught at that very token.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.invariance import Journal, Question, leaving, questions, together
from outpace.errors import OutpaceError
from outpace.measure.prompts import read_prompts

ALTERED = 10  # one answer of so many is replayed with a token altered, too
MADE, REPLAYED = 16, 4  # at once, when answers are made and replayed
AGAIN = "--drafter ngram --threads 1"  # of the server that replays


def replayed(command: str, known: Sequence[Question], count: int, journal: Journal, log: Path) -> dict[str, Any]:
    """Make answers, replay them after a restart, some of them altered. How many were ``drafted``, came out
    ``identical``, and of the altered were ``caught`` at that very token; ``wrong``: the others."""
    dice = random.Random(count)
    asked = [{**known[i % len(known)][1], "seed": 5000 + i, "return_token_ids": True} for i in range(count)]
    altered = {i: (dice.random(), dice.randrange(1, 1000)) for i in dice.sample(range(count), count // ALTERED)}
    jobs = [*((i, False) for i in range(count)), *((i, True) for i in altered)]

    def make(i: int) -> None:
        journal.add(f"made {i}", remote.post("/chat/completions", asked[i]))

    def again(job: tuple[int, bool]) -> None:
        answer = alter(journal[f"made {job[0]}"], *altered[job[0]])[0] if job[1] else journal[f"made {job[0]}"]
        journal.add(f"replayed {job}", remote.post("/replay", {"request": asked[job[0]], "answer": answer}))

    if unmade := [i for i in range(count) if f"made {i}" not in journal]:
        with servers.started(command, log) as its:
            remote = its.remote
            together(make, unmade, MADE)
    if left := [job for job in jobs if f"replayed {job}" not in journal]:
        with servers.started(f"{command} {AGAIN}", log) as its, leaving(its.remote, asked, REPLAYED):
            remote = its.remote
            together(again, left, REPLAYED)
    counts, wrong = dict.fromkeys(("replayed", "drafted", "identical", "altered", "caught"), 0), []
    for i, other in jobs:
        answer, report = journal[f"made {i}"], journal[f"replayed {(i, other)}"]
        found = report["choices"][0]["difference"] or {"what": None, "index": None}
        at = alter(answer, *altered[i])[1] if other else None
        good = (found["what"], found["index"]) == ("token", at) if other else report["identical"]
        counts["altered" if other else "replayed"] += 1
        counts["caught" if other else "identical"] += good
        counts["drafted"] += not other and bool((answer["usage"].get("speculation") or {}).get("drafted"))
        if not good:
            wrong.append({"answer": i, "altered": other, "report": report})
    return {**counts, "wrong": wrong}


def alter(answer: Mapping[str, Any], where: float, by: int) -> tuple[dict[str, Any], int]:
    """``answer`` with the token at a part ``where`` of its length another one, ``by`` (from 1) away; and its index."""
    altered = copy.deepcopy(dict(answer))
    ids = altered["choices"][0]["token_ids"]
    at = int(where * len(ids))
    ids[at : at + 1] = [token - by if token >= by else token + by for token in ids[at : at + 1] or [0]]
    return altered, at


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as outpace bench takes them")
    parser.add_argument("--limit", type=int, help="so many prompts, spread evenly")
    parser.add_argument("--count", type=int, default=100, help="answers to replay")
    parser.add_argument("--tokens", type=int, default=16, help="of the longest answer")
    parser.add_argument("--options", default="", help="more arguments of our server, such as '-m demo-gemma'")
    parser.add_argument("--journal", type=Path, help="what was found; a run that was interrupted goes on with it")
    parser.add_argument("--log", type=Path, default=Path("replays.log"), help="what the servers say")
    given = parser.parse_args(arguments)
    command = f"{servers.OURS} --more-drafter suffix {given.options}".strip()
    try:
        known = questions(read_prompts(given.prompts, given.limit), given.tokens)
        journal = Journal(given.journal, {"server": command, "count": given.count, "questions": len(known)})
        found = replayed(command, known, given.count, journal, given.log)
    except OutpaceError as error:
        print(f"replays: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{count} {name}" for name, count in found.items() if name != "wrong"))
    for each in found["wrong"][:5]:
        print(f"WRONG: {json.dumps(each)}")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    servers.end_with_servers()
    sys.exit(main())
