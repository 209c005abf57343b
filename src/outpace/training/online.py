"""``outpace train online``: a drafter learns from what was recorded while it served, in rounds, when nobody needs the
processor, and is replaced only by one that is better on recent answers that were held out."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.files import StrPath, locked
from outpace.errors import DataError
from outpace.models.processors import usable_cores
from outpace.training import folder as folders
from outpace.training import snapshots
from outpace.training.data import Answer, Answers
from outpace.training.methods import open_run
from outpace.training.options import EagleOptions, LoopOptions, OnlineOptions
from outpace.training.record import write_answers
from outpace.training.setup import Run
from outpace.training.versions import Versions

_REPLAYED = "replayed"


class Pace:
    """Waits between steps, so that this process takes ``share`` CPU seconds a second and works on an idle machine."""

    def __init__(
        self, share: float, most_load: float, poll: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._share, self._load, self._poll, self._sleep = share, most_load * usable_cores(), poll, sleep
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def __call__(self) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        if (rest := (cpu - self._cpu) / self._share - (wall - self._wall)) > 0:
            self._sleep(rest)
        self.idle()
        self._wall, self._cpu = time.monotonic(), cpu  # what other threads did meanwhile counts next time

    def idle(self) -> None:
        """Wait until the machine is idle."""
        while self._load < math.inf and os.getloadavg()[0] > self._load:
            self._sleep(self._poll)


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one: simulated tokens a step on held-out recorded answers, and what it took."""

    answers: int  # recorded ones that it learnt from or was judged on
    replayed: int
    before: float
    after: float  # the best seen; the drafter's where nothing was better
    kept: bool
    steps: int
    tokens: int
    seconds: float
    cpu_seconds: float


def run_round(
    data: StrPath,
    drafter: StrPath,
    out: StrPath,
    options: OnlineOptions,
    *,
    replay: StrPath | None = None,
    model: str | None = None,
    threads: int | None = None,
    pace: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> Round:
    """Tune the drafter in ``out`` (at first: ``drafter``) on what ``data`` has now, and replace it where that helps.

    ``replay``: a folder of older answers of the same target. Raises DataError, ParameterError, ModelError.
    """
    options.check()
    begun, cpu = time.perf_counter(), time.process_time()
    data, replay = Path(data), None if replay is None else Path(replay)
    versions = Versions(Path(out))
    start = versions.newest or drafter
    work = versions.folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    recorded, replayed = _merged(data, replay, work / "data", options)
    loop_options = LoopOptions(
        steps=options.steps, lr=options.lr, warm_up=max(1, options.steps // 6), evaluate=options.evaluate,
        snapshot=math.inf, tokens=options.tokens, longest=options.longest,
        held_out=options.held_out, judged=options.judged, seed=options.seed,
    )  # fmt: skip
    run = Run(work / "data", work / "best", loop_options, model, threads, say=say, pace=pace, split=_split)
    with open_run(run, EagleOptions(start=os.fspath(start))) as loop:
        before = loop.simulate().tokens_per_step
        say(f"{before:.3f} tokens a step on held-out recorded answers before this round")
        loop.at.best = before + options.gain
        at = loop.run()
        best = max([before, *(row["tokens_per_step"] for row in loop.rows)])
    kept = (work / "best" / "config.json").exists()
    if kept:
        (work / "best" / snapshots.NAME).unlink(missing_ok=True)
        versions.publish(work / "best")
    done = Round(
        recorded, replayed, before, best, kept, at.step, at.tokens, round(time.perf_counter() - begun, 1),
        round(time.process_time() - cpu, 1),
    )  # fmt: skip
    versions.note(asdict(done))
    shutil.rmtree(work, ignore_errors=True)
    return done


def watch(
    data: StrPath,
    drafter: StrPath,
    out: StrPath,
    options: OnlineOptions,
    *,
    rounds: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    **given: Any,
) -> list[Round]:
    """Rounds whenever ``options.least`` tokens are new and the machine is idle: ``rounds`` of them, or until it is
    ended. ``given``: of ``run_round``. What a folder lacks yet is waited for. Raises as ``run_round``."""
    options.check()
    done: list[Round] = []
    pace = Pace(options.share, options.most_load, options.poll)
    known: frozenset[str] = frozenset()  # what the last round saw
    data, out = Path(data), Path(out)
    with locked(Versions(out).folder / "lock"):  # a second process waits
        while rounds is None or len(done) < rounds:
            keys, new = _fresh(data, known)
            if new < options.least:
                time.sleep(options.poll)
                continue
            pace.idle()
            known = keys
            last = run_round(data, drafter, out, options, pace=pace, say=say, **given)
            done.append(last)
            say(
                f"round {len(done)}: {last.before:.3f} to {last.after:.3f} tokens a step, "
                f"{'kept' if last.kept else 'no gain'}; {last.cpu_seconds:.0f} CPU seconds in {last.seconds:.0f} s"
            )
    return done


def _fresh(data: Path, known: frozenset[str]) -> tuple[frozenset[str], int]:
    """What identifies the answers there are, and how many answer tokens are in those that are not ``known``."""
    if not (data / folders.META).exists() or not folders.shards(data):
        return known, 0
    keys, new = set(), 0
    for answer in Answers.open(data):
        key = f"{answer.id}:{hashlib.sha256(answer.tokens.tobytes()).hexdigest()}"
        keys.add(key)
        new += 0 if key in known else len(answer.tokens) - answer.prompt_length
    return frozenset(keys), new


def _merged(data: Path, replay: Path | None, out: Path, options: OnlineOptions) -> tuple[int, int]:
    """A folder of the recorded answers and, drawn by chance, older ones; how many of each."""
    recorded = Answers.open(data)
    newer = [replace(answer, source="") for answer in recorded]
    older: list[Answer] = []
    if replay is not None:
        pool = Answers.open(replay)
        if pool.target["fingerprint"] != recorded.target["fingerprint"]:
            raise DataError(f"{replay} has answers of another target than {data}: replay answers of this one")
        known, room = {answer.id for answer in newer}, options.replay_share * int(recorded.lengths().sum())
        for i in np.random.default_rng([options.seed, len(newer)]).permutation(len(pool)).tolist():
            answer = pool[i]
            if room < len(answer.tokens):
                break
            if answer.id not in known:
                room -= len(answer.tokens)
                older.append(replace(answer, source=_REPLAYED))
    out.mkdir(parents=True, mode=0o700)
    write_answers(folders.shard_path(out, 0), [*newer, *older], recorded.target["fingerprint"])
    meta = {name: value for name, value in recorded.meta.items() if name != "hidden_states"}
    folders.write_meta(out, {**meta, "counts": {**meta["counts"], "answers": len(newer) + len(older)}})
    return len(newer), len(older)


def _split(answers: Answers, options: LoopOptions) -> tuple[Answers, Answers]:
    """Judged on recorded answers alone. Sampled ones count, too: where nobody asks greedily, they are what there is."""
    old = np.array([answer.source == _REPLAYED for answer in answers], bool)
    train, out = answers.select(np.flatnonzero(~old)).split(options.held_out, options.seed)
    count = int(np.searchsorted(np.cumsum(out.lengths()), options.judged)) + 1
    older = answers.select(np.flatnonzero(old))
    everything = Answers(answers.path, answers.meta, answers.columns, np.concatenate([train.index, older.index]))
    return everything, out.select(np.arange(min(count, len(out))))
