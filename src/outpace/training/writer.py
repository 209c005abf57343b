"""Writing a folder of training data: answers in order, shard by shard, nothing finished lost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from outpace.common.files import StrPath
from outpace.errors import Argument, DataError, ParameterError
from outpace.models.fingerprint import ARITHMETIC, difference
from outpace.training import folder as folders
from outpace.training.data import Answer, Answers, Columns, Key, read_columns

SHARD = 512  # answers
EVERY = 20.0  # seconds after which an unfinished shard is written as it is


class Writer:
    """Appends answers to a folder, which it makes or goes on with. The last shard is written again as it grows.

    ``model``, ``load``: how the target is loaded again; ``target``: its identity; ``options``: what the answers depend
    on beside. Raises DataError for a folder of another target, options or kind, and when the disk is full: what was
    written is whole then, and the next Writer goes on.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        model: str,
        target: Mapping[str, Any],
        load: Mapping[str, Any],
        options: Mapping[str, Any],
        shard: int = SHARD,
        every: float = EVERY,
    ) -> None:
        if shard < 1:
            raise ParameterError(Argument("shard", shard), " is out of range: give at least 1 answer")
        path = Path(path)
        self.path, self._shard, self._every = path, shard, every
        self._fingerprint = target.get("fingerprint")
        if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / folders.META).exists())):
            raise DataError(f"{path} is there and holds something else than training data: name another folder")
        if (path / folders.META).exists():
            self.meta = self._resumed(target, options)
            for cut_short in path.glob(".*.tmp"):  # by a kill
                cut_short.unlink()
        else:
            self.meta = {
                "format": folders.FORMAT, "model": model, "target": dict(target), "load": dict(load),
                "options": dict(options), "counts": {"answers": 0, "tokens": 0, "answer_tokens": 0},
            }  # fmt: skip
            with folders.writing(path, "nothing was begun"):
                path.mkdir(parents=True, exist_ok=True)
                folders.write_meta(path, self.meta)
        columns = read_columns(path, self.meta)
        self.known: set[Key] = set()
        self._rows: list[Answer] = []  # of the shard that is not full
        self._count = self._tokens = self._answer_tokens = 0
        self._number, self._written = 0, time.monotonic()
        self._unsaved = False
        self._load(columns)

    def __len__(self) -> int:
        return self._count

    @property
    def counts(self) -> dict[str, int]:
        """How many answers there are, tokens with their prompts, and tokens without."""
        return {"answers": self._count, "tokens": self._tokens, "answer_tokens": self._answer_tokens}

    def add(self, answer: Answer) -> None:
        """Append one. Raises DataError when it is there already."""
        if answer.key in self.known:
            raise DataError(f"{self.path} has an answer to {answer.id}, sample {answer.sample}, already")
        self._take(answer)
        self._unsaved = True
        if len(self._rows) >= self._shard or time.monotonic() - self._written > self._every:
            self.flush()

    def extend(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            self.add(answer)

    def flush(self) -> None:
        """Write what is not written yet."""
        if not self._unsaved:
            return
        path = folders.shard_path(self.path, self._number)
        columns: dict[str, list[Any]] = {
            "id": [a.id for a in self._rows],
            "source": [a.source for a in self._rows],
            "sample": [a.sample for a in self._rows],
            "temperature": [a.temperature for a in self._rows],
            "seed": [a.seed for a in self._rows],
            "prompt_length": [a.prompt_length for a in self._rows],
            "tokens": [a.tokens for a in self._rows],
            "finish": [a.finish for a in self._rows],
        }
        self._alone()
        with folders.writing(self.path, f"{self.meta['counts']['answers']} answers are there"):
            folders.write_shard(path, columns, self._fingerprint)
            self.meta = {**folders.read_meta(self.path), "counts": self.counts}  # which states are kept may be new
            folders.write_meta(self.path, self.meta)
        self._unsaved, self._written = False, time.monotonic()
        if len(self._rows) >= self._shard:
            self._rows, self._number = [], self._number + 1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, DataError):  # after a full disk there is nothing more to try
            self.flush()

    def _take(self, answer: Answer) -> None:
        self.known.add(answer.key)
        self._rows.append(answer)
        self._count += 1
        self._tokens += len(answer.tokens)
        self._answer_tokens += len(answer.tokens) - answer.prompt_length

    def _resumed(self, target: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        meta = folders.read_meta(self.path)
        if (what := difference(meta["target"], target, ARITHMETIC)) is not None:
            raise DataError(f"{self.path} has answers of another target ({what}): name another folder, or that model")
        was = meta["options"]
        for name in (*was, *(name for name in options if name not in was)):
            if was.get(name) != options.get(name):
                raise DataError(
                    f"{self.path} was begun with {name} {was.get(name)}, and now it is {options.get(name)}: "
                    "go on with the same, or name another folder"
                )
        return meta

    def _load(self, columns: Columns) -> None:
        """Go on behind what is there: full shards stay, a last one that is not full is taken up again."""
        bounds = columns.shards.tolist()
        everything = Answers(self.path, self.meta, columns, np.arange(len(columns.ids)))
        for number in range(len(bounds) - 1):
            self._number, self._rows = number, []
            for i in range(bounds[number], bounds[number + 1]):
                self._take(everything[i])
        if len(self._rows) >= self._shard:
            self._rows, self._number = [], self._number + 1

    def _alone(self) -> None:
        """Raise DataError when the folder has shards that this Writer did not write."""
        there = len(folders.shards(self.path))
        if there not in (self._number, self._number + 1):
            raise DataError(f"{self.path} is being written by another process: let one end before the other begins")
