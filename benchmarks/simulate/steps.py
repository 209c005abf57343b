"""What an engine's steps take on this machine: measured once, kept as JSON with the machine's name."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.figures import made
from benchmarks.servers import OURS, started
from outpace import Engine
from outpace.common.files import write_json
from outpace.errors import ParameterError

ROWS = (1, 2, 4, 8, 12, 16)
CONTEXT = 512  # tokens before those that are timed
STEPS = 24  # that are timed at each count of rows


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds. ``decode``: of a plain step by ``rows``; ``prefill``: of a prompt's token; ``start``: from a server's
    command to its first answer."""

    rows: tuple[int, ...]
    decode: tuple[float, ...]
    prefill: float
    start: float

    def step(self, rows: int, prompt: int) -> float:
        """A step in which ``rows`` decode beside ``prompt`` tokens of a prompt."""
        return (float(np.interp(rows, self.rows, self.decode)) if rows else 0.0) + prompt * self.prefill


def read(path: Path) -> Steps:
    """What ``measure`` has written. Raises ParameterError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return Steps(tuple(found["rows"]), tuple(found["decode"]), found["prefill"], found["start"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path} has no measured steps ({error!r}): --measure writes them") from error


def measure(path: Path, log: Path) -> Steps:
    """Measure plain decoding of the demo model on one thread, and write ``path``. Raises OutpaceError, OSError."""
    rng = np.random.default_rng(0)
    with Engine.load("demo", drafter="none", threads=1, prefix_rows=0) as engine:
        vocabulary = engine.model.info.vocab_size
        decode, chunks = [], []
        for rows in ROWS:
            for _ in range(rows):
                prompt = rng.integers(0, vocabulary, CONTEXT + 1).tolist()
                engine.add(prompt, max_tokens=STEPS + rows + 2, ignore_eos=True)
            chunks.append(_timed(engine))  # the first prompt, beside no row that decodes
            for _ in range(rows):
                engine.step()
            decode.append(median(_timed(engine) for _ in range(STEPS)))
            while not engine.idle:
                engine.step()
    begun = time.perf_counter()
    with started(f"{OURS} --threads 1", log):
        start = time.perf_counter() - begun
    steps = Steps(ROWS, tuple(float(each) for each in np.maximum.accumulate(decode)), median(chunks) / CONTEXT, start)
    value: dict[str, Any] = {**made(), "model": "demo", "threads": 1, "context": CONTEXT, "steps": asdict(steps)}
    write_json(path, value)
    return steps


def _timed(engine: Engine) -> float:
    begun = time.perf_counter()
    engine.step()
    return time.perf_counter() - begun
