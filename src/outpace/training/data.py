"""A folder of training data: a target's answers to prompts, which ``outpace train data`` or ``import`` wrote.

``meta.json`` is written first and says whose answers these are; a shard ``answers-00000.parquet`` is complete or not
there. The rows of all shards, in order, are the data: how they are cut into shards means nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import I32, repeated_tail
from outpace.common.files import StrPath, replacing, write_json
from outpace.common.units import format_bytes
from outpace.errors import Argument, DataError, ParameterError
from outpace.models.fingerprint import ARITHMETIC, difference
from outpace.training import packages

with packages():
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

I64 = npt.NDArray[np.int64]
Key = tuple[str, int, float]  # prompt id, sample, temperature: what a folder has once

FORMAT = 1
META = "meta.json"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("sample", pa.int32()),
        ("temperature", pa.float32()),
        ("seed", pa.int64()),
        ("prompt_length", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("finish", pa.string()),
    ]
)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"answers-{number:05d}.parquet"


def states_path(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05d}.bin"


def read_meta(folder: StrPath) -> dict[str, Any]:
    """Raises DataError that names the file and the remedy."""
    path = Path(folder) / META
    if not path.is_file():
        raise DataError(f"{folder} is no folder of training data (it has no {META}): make one with outpace train data")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): make the data again, or restore the file") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        version = meta.get("format") if isinstance(meta, dict) else None
        raise DataError(f"{path} has format {version}, and this version reads {FORMAT}: make the data again")
    for name, kind in (("model", str), ("target", dict), ("options", dict), ("load", dict), ("counts", dict)):
        if not isinstance(meta.get(name), kind):
            raise DataError(f"{path} has no {name}: make the data again, or restore the file")
    return meta


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    write_json(folder / META, meta)


def shards(folder: Path) -> list[Path]:
    """The shards there are, in order. Raises DataError when one is missing between others."""
    found = sorted(folder.glob("answers-*.parquet"))
    for number, path in enumerate(found):
        if path != shard_path(folder, number):
            raise DataError(
                f"{shard_path(folder, number)} is missing, though {found[-1].name} is there: restore it, or remove the "
                "later ones to have their answers made again"
            )
    return found


def read_shard(path: Path, fingerprint: str | None) -> pa.Table:
    """A shard, checked: its pages' checksums, columns, and whose answers it has. Raises DataError that names it."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{path} is damaged or no shard ({reason}): remove it and all later ones, and run what made the data again"
        ) from error
    if not table.schema.equals(SCHEMA):
        raise DataError(f"{path} has other columns than a shard of answers: remove it, or make the data again")
    owner = (table.schema.metadata or {}).get(b"target", b"").decode()
    if owner != (fingerprint or ""):
        raise DataError(
            f"{path} has answers of the target {owner or 'without files'}, its folder those of "
            f"{fingerprint or 'one without files'}: move it away"
        )
    return table


def write_shard(path: Path, columns: Mapping[str, list[Any]], fingerprint: str | None) -> None:
    """Whole or not at all. Equal rows make equal bytes. Raises OSError."""
    schema = SCHEMA.with_metadata({"target": fingerprint or ""})
    table = pa.table(dict(columns), schema=schema)
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def free_space(path: Path) -> int:
    """Bytes that are free on the disk where ``path`` lies, or will."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Turn a disk that cannot be written, mostly since it is full, into a DataError. ``kept``: what is safe."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}; {format_bytes(free_space(path))} are free there): "
            f"{kept}; make room and run the same command again, and it goes on"
        ) from error


# -- answers ----------------------------------------------------------------------------------------------------------


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
        meta = read_meta(folder)
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
    tables = []
    for path in shards(folder):
        tables.append(read_shard(path, meta["target"].get("fingerprint")))
        _check(path, tables[-1], int(meta["target"]["vocab_size"]))
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    lengths = pc.list_value_length(table["tokens"]).to_numpy()
    return Columns(
        table["id"].to_pylist(), table["source"].to_pylist(), table["finish"].to_pylist(),
        table["sample"].to_numpy(), table["temperature"].to_numpy(), table["seed"].to_numpy(),
        table["prompt_length"].to_numpy(), np.cumsum(np.concatenate([[0], lengths]), dtype=np.int64),
        pc.list_flatten(table["tokens"]).to_numpy().copy(),  # kernels want arrays that can be written
        np.cumsum([0, *map(len, tables)], dtype=np.int64),
    )  # fmt: skip


def _check(path: Path, table: pa.Table, vocabulary: int) -> None:
    """Raises DataError where a shard's cells are no answers to prompts."""
    tokens = pc.list_flatten(table["tokens"])
    if any(column.null_count for column in (*table.columns, tokens)):
        raise DataError(f"{path} has empty cells: remove it, or make the data again")
    least, most = pc.min_max(tokens).as_py().values()
    if len(tokens) and not 0 <= least <= most < vocabulary:
        wrong = most if most >= vocabulary else least
        raise DataError(f"{path} has token {wrong}, and its target has {vocabulary}: make the data again")
    prompts, lengths = table["prompt_length"].to_numpy(), pc.list_value_length(table["tokens"]).to_numpy()
    if not bool(np.all((prompts >= 1) & (prompts < lengths))):
        raise DataError(f"{path} has an answer without tokens, or without a prompt: make the data again")


# -- writing ----------------------------------------------------------------------------------------------------------

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
        if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / META).exists())):
            raise DataError(f"{path} is there and holds something else than training data: name another folder")
        if (path / META).exists():
            self.meta = self._resumed(target, options)
            for cut_short in path.glob(".*.tmp"):  # by a kill
                cut_short.unlink()
        else:
            self.meta = {
                "format": FORMAT, "model": model, "target": dict(target), "load": dict(load),
                "options": dict(options), "counts": {"answers": 0, "tokens": 0, "answer_tokens": 0},
            }  # fmt: skip
            with writing(path, "nothing was begun"):
                path.mkdir(parents=True, exist_ok=True)
                write_meta(path, self.meta)
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
        path = shard_path(self.path, self._number)
        columns = {name: [getattr(answer, name) for answer in self._rows] for name in SCHEMA.names}
        self._alone()
        with writing(self.path, f"{self.meta['counts']['answers']} answers are there"):
            write_shard(path, columns, self._fingerprint)
            self.meta = {**read_meta(self.path), "counts": self.counts}  # which states are kept may be new
            write_meta(self.path, self.meta)
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
        meta = read_meta(self.path)
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
        there = len(shards(self.path))
        if there not in (self._number, self._number + 1):
            raise DataError(f"{self.path} is being written by another process: let one end before the other begins")


# -- import -----------------------------------------------------------------------------------------------------------

IMPORTED = {"made by": "import"}


def import_answers(
    files: Sequence[StrPath],
    writer: Writer,
    *,
    temperature: float = 0.0,
    max_length: int | None = None,
    done: Callable[[int], None] = lambda size: None,
    say: Callable[[str], None] = lambda what: None,
) -> tuple[int, int]:
    """Append what ``files`` have and the folder has not; how many were new, and how many were there already.

    A line is {"id", "prompt": [ids], "answer": [ids]}, and perhaps "source", "finish", "temperature" (else
    ``temperature``), "sample", "seed". A last line that has no end is being written, and left for the next time.
    ``max_length``: most tokens of prompt and answer. Raises DataError that names the line.
    """
    new = known = 0
    vocabulary = int(writer.meta["target"]["vocab_size"])
    with writer:
        for path in map(Path, files):
            for where, line in _lines(path, say):
                answer = _answer(where, line, vocabulary, temperature)
                if max_length is not None and len(answer.tokens) > max_length:
                    raise DataError(
                        f"{where}: {len(answer.tokens)} tokens, but the target's context holds {max_length}"
                    )
                if answer.key in writer.known:
                    known += 1
                else:
                    writer.add(answer)
                    new += 1
                done(len(line))
    return new, known


def _lines(path: Path, say: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    say(f"{path}, line {number}: it has no end yet and is left out")
                elif line.strip():
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): give a file of JSON lines") from error


def _answer(where: str, line: bytes, vocabulary: int, temperature: float) -> Answer:
    try:
        value = json.loads(line)
        id_, source, finish = str(value["id"]), str(value.get("source", "all")), str(value.get("finish", "stop"))
        prompt, answer = _ids(value, "prompt", vocabulary), _ids(value, "answer", vocabulary)
        own = (
            float(value.get("temperature", temperature)),
            int(value.get("sample", 0)),
            finish,
            int(value.get("seed", 0)),
        )
    except KeyError as error:
        raise DataError(
            f"{where}: no {error.args[0]}: a line has id, prompt and answer (lists of token ids)"
        ) from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{where}: {error}: write one JSON object a line, with lists of token ids") from error
    return Answer(id_, source, np.concatenate([prompt, answer]), len(prompt), *own)


def _ids(value: dict[str, Any], name: str, vocabulary: int) -> np.ndarray[Any, Any]:
    """int32 [n]. Raises ValueError."""
    ids = value[name]
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{name} is no list of token ids")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = max(ids) if max(ids) >= vocabulary else min(ids)
        raise ValueError(f"{name} has token {wrong}, and the target has {vocabulary}")
    return np.array(ids, np.int32)
