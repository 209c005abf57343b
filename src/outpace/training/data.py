"""``Answers``: a target's answers to prompts, read from a folder that ``outpace train data`` or ``import`` made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import I32, repeated_tail
from outpace.common.files import StrPath
from outpace.errors import Argument, DataError, ParameterError
from outpace.training import folder as folders

I64 = npt.NDArray[np.int64]
Key = tuple[str, int, float]  # prompt id, sample, temperature: what a folder has once


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ``tokens`` int32 [L]: the prompt's ``prompt_length``, then the answer, EOS included."""

    id: str  # the prompt's
    source: str
    tokens: I32
    prompt_length: int
    temperature: float = 0.0
    sample: int = 0
    finish: str = "stop"
    seed: int = 0

    @property
    def key(self) -> Key:
        return self.id, self.sample, float(np.float32(self.temperature))

    def loop_start(self) -> int:
        """Where an answer that ran into its limit begins to repeat itself to its end (``repeated_tail``); its length if
        it does not."""
        loops = self.finish == "length"
        return len(self.tokens) - (repeated_tail(self.tokens[self.prompt_length :]) if loops else 0)


@dataclass(frozen=True, slots=True)
class Columns:
    """All n answers of a folder, tokens end to end: answer i has ``tokens[starts[i] : starts[i + 1]]``."""

    ids: list[str]
    sources: list[str]
    finishes: list[str]
    samples: I32  # [n]
    temperatures: npt.NDArray[np.float32]  # [n]
    seeds: I64  # [n]
    prompt_lengths: I32  # [n]
    starts: I64  # [n + 1]
    tokens: I32
    shards: I64  # [s + 1]: shard j has answers shards[j] .. shards[j + 1] - 1


class Answers:
    """A folder's answers, or some of them, in order. Small enough to be held in memory: 4 bytes a token.

    ``target``: the identity of the model that gave them (models/fingerprint.py). ``index`` int64 [n]: which of the
    folder's answers these are.
    """

    def __init__(self, path: StrPath, meta: Mapping[str, Any], columns: Columns, index: I64) -> None:
        self.path, self.meta, self.columns, self.index = Path(path), meta, columns, index
        self.target: Mapping[str, Any] = meta["target"]

    @classmethod
    def open(cls, path: StrPath) -> Answers:
        """Read a folder; one that is still being made, as far as it has come.

        Raises DataError that names the file and the remedy.
        """
        folder = Path(path)
        meta = folders.read_meta(folder)
        columns = read_columns(folder, meta)
        count, written = len(columns.ids), meta["counts"].get("answers", 0)
        if count < written:
            raise DataError(
                f"{folder} has {count} answers, but {written} were written: restore its last shards, or run what made "
                "the data again, and it makes them again"
            )
        if not count:
            raise DataError(f"{folder} has no answers yet: run what makes them (outpace train data) first")
        return cls(folder, meta, columns, np.arange(count))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Answer:
        n, all_ = int(self.index[i]), self.columns
        return Answer(
            all_.ids[n], all_.sources[n], all_.tokens[all_.starts[n] : all_.starts[n + 1]], int(all_.prompt_lengths[n]),
            float(all_.temperatures[n]), int(all_.samples[n]), all_.finishes[n], int(all_.seeds[n]),
        )  # fmt: skip

    def __iter__(self) -> Iterator[Answer]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> I32:
        """Tokens of each answer, its prompt included: int32 [n]."""
        return np.diff(self.columns.starts)[self.index].astype(np.int32)

    def prompt_lengths(self) -> I32:
        """int32 [n]."""
        return self.columns.prompt_lengths[self.index]

    def token_counts(self, prompts: bool = False) -> I64:
        """How often each token occurs: int64 [V]. ``prompts``: tokens of prompts count, too."""
        counted = [a.tokens if prompts else a.tokens[a.prompt_length :] for a in self]
        return np.bincount(np.concatenate([np.zeros(0, np.int32), *counted]), minlength=self.target["vocab_size"])

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits of the contents, in order: independent of shards, folder and time."""
        digest = hashlib.sha256(str(self.target.get("fingerprint")).encode())
        for a in self:
            facts = [a.id, a.source, a.sample, a.temperature, a.seed, a.prompt_length, a.finish, len(a.tokens)]
            digest.update(json.dumps(facts).encode())
            digest.update(a.tokens.astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def select(self, indices: Sequence[int] | I64) -> Answers:
        """Some of these answers, by their places here: for smaller sizes of one set, or one temperature."""
        return Answers(self.path, self.meta, self.columns, self.index[np.asarray(indices, np.int64)])

    def split(self, held_out: float, seed: int = 0) -> tuple[Answers, Answers]:
        """Answers to train on, and those held out: of about that share of the prompts, none of which is on both sides.

        Which prompts are held out follows from their ids and ``seed``, so that most stay so as a folder grows. Raises
        ParameterError when the share is not from 0 to 1, or one side would have none though its share is not 0.
        """
        if not 0 <= held_out <= 1:
            raise ParameterError(Argument("held_out", held_out), " is no share: give 0 to 1")
        ids = [self.columns.ids[n] for n in self.index]
        order = sorted({(hashlib.sha256(f"{seed}:{id_}".encode()).digest(), id_) for id_ in ids})
        count = len(order) if held_out == 1 else max(round(held_out * len(order)), int(held_out > 0))
        if count == len(order) and held_out < 1:
            raise ParameterError(
                f"{len(order)} prompts are too few to hold out a share of {held_out}: make more answers"
            )
        out = {id_ for _, id_ in order[:count]}
        mask = np.array([id_ in out for id_ in ids], bool)
        return self.select(np.flatnonzero(~mask)), self.select(np.flatnonzero(mask))


def read_columns(folder: Path, meta: Mapping[str, Any]) -> Columns:
    """Every shard of a folder, checked against the target's vocabulary. Raises DataError."""
    paths = folders.shards(folder)
    tables = [folders.read_shard(path, meta["target"].get("fingerprint")) for path in paths]
    pieces = [
        _tokens(path, table, int(meta["target"]["vocab_size"])) for path, table in zip(paths, tables, strict=True)
    ]
    rows = np.cumsum([0, *(table.num_rows for table in tables)])

    def column(name: str) -> list[Any]:
        return [value for table in tables for value in table.column(name).to_pylist()]

    lengths = np.concatenate([np.zeros(1, np.int64), *(sizes for sizes, _ in pieces)])
    return Columns(
        column("id"), column("source"), column("finish"),
        np.array(column("sample"), np.int32), np.array(column("temperature"), np.float32),
        np.array(column("seed"), np.int64), np.array(column("prompt_length"), np.int32),
        np.cumsum(lengths), np.concatenate([np.zeros(0, np.int32), *(tokens for _, tokens in pieces)]),
        rows.astype(np.int64),
    )  # fmt: skip


def _tokens(path: Path, table: Any, vocabulary: int) -> tuple[I64, I32]:
    """Lengths int64 [n] and tokens, end to end, of a shard."""
    lists = table.column("tokens").combine_chunks()
    if any(column.null_count for column in table.columns) or lists.values.null_count:
        raise DataError(f"{path} has empty cells: remove it, or make the data again")
    lengths = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    tokens = lists.flatten().to_numpy().astype(np.int32)
    prompts = table.column("prompt_length").to_numpy()
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        wrong = int(tokens.max()) if tokens.max() >= vocabulary else int(tokens.min())
        raise DataError(f"{path} has token {wrong}, and its target has {vocabulary}: make the data again")
    if not bool(np.all((prompts >= 1) & (prompts < lengths))):
        raise DataError(f"{path} has an answer without tokens, or without a prompt: make the data again")
    return lengths, tokens
