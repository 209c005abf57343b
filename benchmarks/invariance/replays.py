"""Answers told again: made drafted and in a crowd, replayed after a restart with another drafter, beside a load."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.invariance.ask import Progress, Say, leaving, together
from benchmarks.invariance.journal import Journal
from benchmarks.invariance.plan import Question
from outpace.measure.remote import Remote

MADE = 16  # at once, when answers are made
REPLAYED = 4  # at once, beside as many clients that leave
AGAIN = "--drafter ngram --threads 1"  # of the server that replays
SEEDS = 5000


class Replays:
    """``count`` answers to questions under seeds of their own, ``altered`` of them altered too. ``score``: what
    ``journal`` has of them."""

    def __init__(self, questions: Sequence[Question], count: int, altered: int, journal: Journal) -> None:
        dice = random.Random(count)
        self._asked = [_body(questions[i % len(questions)], SEEDS + i) for i in range(count)]
        self._altered = {i: (dice.random(), dice.randrange(1, 1000)) for i in dice.sample(range(count), altered)}
        self._jobs = [*((i, False) for i in range(count)), *((i, True) for i in self._altered)]
        dice.shuffle(self._jobs)
        self._journal = journal

    def run(self, command: str, log: Path, say: Say) -> None:
        """Make the answers, restart, replay. What the journal has is not asked again. Raises RemoteError."""
        journal, asked = self._journal, self._asked
        unmade = [i for i in range(len(asked)) if _made(i) not in journal]
        todo = [job for job in self._jobs if _again(*job) not in journal]
        progress = Progress(len(unmade) + len(todo), lambda line: say(f"replays: {line}"))

        def make(remote: Remote, i: int) -> None:
            journal.add(_made(i), remote.post("/chat/completions", asked[i]))
            progress.step()

        def again(remote: Remote, job: tuple[int, bool]) -> None:
            i, other = job
            answer = alter(journal[_made(i)], *self._altered[i])[0] if other else journal[_made(i)]
            journal.add(_again(*job), remote.post("/replay", {"request": asked[i], "answer": answer}))
            progress.step()

        if unmade:
            with servers.started(command, log) as its:
                together(partial(make, its.remote), unmade, MADE)
        if todo:
            with servers.started(f"{command} {AGAIN}", log) as its, leaving(its.remote, asked, REPLAYED):
                together(partial(again, its.remote), todo, REPLAYED)

    def score(self) -> dict[str, Any]:
        """Of those replayed: how many were ``drafted`` when they were made, and came out ``identical``; of those
        altered, how many were ``caught`` at that very token; ``wrong``: the others."""
        counts = dict.fromkeys(("replayed", "drafted", "identical", "altered", "caught"), 0)
        wrong = []
        for i, other in self._jobs:
            said = self._journal.get(_again(i, other))
            if said is None:
                continue
            answer = self._journal[_made(i)]
            if other:
                at = alter(answer, *self._altered[i])[1]
                found = said["choices"][0]["difference"] or {}
                good = not said["identical"] and (found["what"], found["index"]) == ("token", at)
                counts["altered"] += 1
                counts["caught"] += good
            else:
                good = said["identical"]
                counts["replayed"] += 1
                counts["identical"] += good
                counts["drafted"] += bool((answer["usage"].get("speculation") or {}).get("drafted"))
            if not good:
                wrong.append({"answer": i, "altered": other, "said": said})
        return {**counts, "wrong": wrong}


def alter(answer: Mapping[str, Any], where: float, by: int) -> tuple[dict[str, Any], int]:
    """``answer`` with the token at a part ``where`` of its length another, and the token's index. ``by``: from 1; how
    far its id moves."""
    altered = copy.deepcopy(dict(answer))
    ids = altered["choices"][0]["token_ids"]
    at = int(where * len(ids))
    ids[at : at + 1] = [its - by if its >= by else its + by for its in ids[at : at + 1] or [0]]
    return altered, at


def _body(question: Question, seed: int) -> dict[str, Any]:
    return {**question.body, "seed": seed, "return_token_ids": True}


def _made(answer: int) -> str:
    return f"made {answer}"


def _again(answer: int, altered: bool) -> str:
    return f"replayed {answer}{' altered' if altered else ''}"
