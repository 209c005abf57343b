"""Hidden states of the target along whole answers: what a learned drafter reads. Computed, or kept beside the answers.

Kept ones are bfloat16 [sum of L][T + 1][h] in ``states-00000.bin``, beside that shard of answers: of T layers, then the
state before the final norm. Computed ones are rounded alike, so that it cannot show which were read.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import F32, I32
from outpace.common.files import StrPath
from outpace.common.units import format_bytes
from outpace.errors import Argument, DataError, NotFiniteError, ParameterError
from outpace.models.base import Batch
from outpace.models.fingerprint import ARITHMETIC, difference, identity
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.training import packages
from outpace.training.data import Answers, free_space, read_meta, states_path, write_meta, writing

if TYPE_CHECKING:
    import torch

    from outpace.models.base import Model

BF16 = npt.NDArray[np.uint16]  # the upper halves of float32
CHUNK = 256  # tokens a forward


def default_layers(layers: int) -> tuple[int, ...]:
    """EAGLE-3's layers, as outputs of layers counted from 0: of 1, N // 2 - 1 and N - 4. Raises ParameterError."""
    if layers < 8:
        raise ParameterError(
            f"a target of {layers} layers is too small for the usual layers: give ", Argument("layers"), " yourself"
        )
    return 1, layers // 2 - 1, layers - 4


def with_last(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """The layers to read: ``layers``, then the last of ``count``, whose output the final norm reads."""
    if not all(0 <= layer < count for layer in layers):
        raise ParameterError(Argument("layers", list(layers)), f" are not all in the target: it has 0 to {count - 1}")
    return (*layers, count - 1)


def bfloat16(values: F32) -> BF16:
    """Rounded to nearest, ties to even. Raises NotFiniteError."""
    if not np.isfinite(values).all():
        raise NotFiniteError("the target's hidden states are NaN or infinite: check its weights")
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def forward_states(model: Model, sequences: Sequence[I32], layers: tuple[int, ...]) -> Iterator[BF16]:
    """The outputs of ``layers`` along each of ``sequences`` int32 [L]: [L, len(layers), h], in order.

    Forwards are filled with the tokens of as many sequences as fit. Rows that it takes are free again at the end, also
    when the caller stops early.
    """
    rows: dict[int, int] = {}  # sequence: its row
    parts: dict[int, list[BF16]] = {}
    at = [0] * len(sequences)
    first = 0  # the first sequence that is not finished
    try:
        while first < len(sequences):
            room, here = CHUNK, list[tuple[int, int]]()  # sequences in this forward, and how many tokens of each
            for i in range(first, len(sequences)):
                count = min(room, len(sequences[i]) - at[i])
                here.append((i, count))
                room -= count
                if not room:
                    break
            for i, _ in here:
                if i not in rows:
                    rows[i], parts[i] = model.kv.alloc(), []
            tokens = [sequences[i][at[i] : at[i] + count] for i, count in here]
            batch = Batch.pack(
                [rows[i] for i, _ in here], tokens, [at[i] for i, _ in here], [False] * len(here), hidden_layers=layers
            )
            states = bfloat16(model.forward(batch).hidden_states(np.arange(len(batch), dtype=np.int32)).numpy())
            for (i, count), start in zip(here, batch.starts.tolist(), strict=False):
                parts[i].append(states[start : start + count])
                at[i] += count
            while first < len(sequences) and at[first] == len(sequences[first]):
                model.kv.free(rows.pop(first))
                yield np.concatenate(parts.pop(first))
                first += 1
    finally:
        for row in rows.values():
            model.kv.free(row)


def open_target(meta: Mapping[str, Any], threads: int | None = None) -> Model:
    """The target of a folder of answers, loaded as it was when it gave them. Raises ModelError, DataError."""
    options = LoadOptions(**{**meta["load"], "threads": threads})
    model, _ = load(meta["model"], options)
    check_target(meta, model, options)
    return model


def check_target(meta: Mapping[str, Any], model: Model, options: LoadOptions) -> None:
    """Raises DataError when ``model`` is not the one that gave the answers."""
    if (what := difference(meta["target"], identity(model, options), ARITHMETIC)) is not None:
        raise DataError(f"these answers are another target's ({what}): train beside that one, or make answers anew")


def state_bytes(layers: int, hidden: int) -> int:
    """What a token takes: ``layers`` states of ``hidden`` numbers."""
    return 2 * layers * hidden


class Cache:
    """The kept states of a folder: what there is, what is missing, and making the rest.

    ``layers``: those read, without the last (None: those that the folder has, else EAGLE-3's). Raises DataError for
    a folder that keeps others.
    """

    def __init__(self, path: StrPath, layers: Sequence[int] | None = None) -> None:
        self.path = path = Path(path)
        self.answers = Answers.open(path)
        meta = self.answers.meta
        count = int(meta["target"]["layers"])
        has = tuple(meta["hidden_states"]["layers"]) if "hidden_states" in meta else None
        kept = sorted(path.glob("states-*"))
        wanted = has or default_layers(count) if layers is None else tuple(layers)
        if kept and wanted != has:
            raise DataError(
                f"{path} keeps the outputs of layers {list(has or ())}, not {list(wanted)}: ask for those, "
                f"or remove {kept[0].name} and the like"
            )
        self.layers = with_last(wanted, count)
        hidden = int(meta["target"]["hidden_size"])
        self.bytes_per_token = state_bytes(len(self.layers), hidden)
        starts, bounds = self.answers.columns.starts, self.answers.columns.shards
        self.sizes: list[int] = (np.diff(starts[bounds]) * self.bytes_per_token).tolist()

    @property
    def bytes(self) -> int:
        """What all states take."""
        return sum(self.sizes)

    @property
    def missing(self) -> int:
        """What is still to be written."""
        there = (self._there(number) for number in range(len(self.sizes)))
        return self.bytes - sum(path.stat().st_size for path in there if path is not None)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        paths = (states_path(self.path, number) for number in range(len(self.sizes)))
        return all(p.exists() and p.stat().st_size == size for p, size in zip(paths, self.sizes, strict=True))

    def check_room(self) -> None:
        """Raises DataError when the disk cannot hold what is missing."""
        check_room(self.path, self.missing, "the hidden states")

    def fill(self, model: Model, done: Callable[[int, int], None] = lambda answers, tokens: None) -> int:
        """Compute what is missing; tokens computed. ``done(answers, tokens)`` is called for every answer.

        What is written stays, whatever ends it: the next ``fill`` goes on behind it. Raises DataError for a full disk.
        """
        self.check_room()
        meta = {
            **read_meta(self.path),
            "hidden_states": {"layers": list(self.layers[:-1]), "dtype": "bfloat16"},
        }
        with writing(self.path, "nothing was begun"):
            write_meta(self.path, meta)
        total = 0
        for number in range(len(self.sizes)):
            total += self._fill(number, model, done)
        return total

    def _there(self, number: int) -> Path | None:
        """The file with a shard's states, as far as there are some."""
        whole = states_path(self.path, number)
        return next((path for path in (whole, whole.with_suffix(".part")) if path.exists()), None)

    def _fill(self, number: int, model: Model, done: Callable[[int, int], None]) -> int:
        whole = states_path(self.path, number)
        part = whole.with_suffix(".part")
        starts, bounds = self.answers.columns.starts, self.answers.columns.shards
        offsets = starts[bounds[number] : bounds[number + 1] + 1] - starts[bounds[number]]
        if whole.exists() and whole.stat().st_size == self.sizes[number]:
            done(len(offsets) - 1, 0)
            return 0
        with writing(whole, "what was written before is kept"):
            if whole.exists():  # its shard has grown since
                whole.replace(part)
            have = part.stat().st_size // self.bytes_per_token if part.exists() else 0
            first = int(np.searchsorted(offsets, have, side="right")) - 1  # answers whose states are whole
            if have > offsets[-1]:
                raise DataError(f"{part} is larger than its answers' states: remove it, and run the same command again")
            with part.open("ab") as file:
                file.truncate(int(offsets[first]) * self.bytes_per_token)
                done(first, 0)
                sequences = [self.answers[i].tokens for i in range(bounds[number] + first, bounds[number + 1])]
                for states in forward_states(model, sequences, self.layers):
                    file.write(states.tobytes())
                    done(1, len(states))
                file.flush()
                os.fsync(file.fileno())
            part.replace(whole)
        return int(offsets[-1] - offsets[first])


def check_room(path: StrPath, size: int, what: str) -> None:
    """Raises DataError when ``size`` more bytes are not free where ``path`` lies."""
    free = free_space(Path(path))
    if size > free:
        raise DataError(
            f"{what} would take {format_bytes(size)}, and {format_bytes(free)} are free on the disk of {path}: "
            f"{format_bytes(size - free)} are missing"
        )


# -- for a trainer ----------------------------------------------------------------------------------------------------

AHEAD = 16_384  # tokens whose states wait to be read
TOGETHER = 1_024  # tokens computed between two looks at what is wanted next


class HiddenStateSource:
    """States of ``answers``: ``layers``' outputs (None: EAGLE-3's), then the state before the final norm.

    Read from the folder where it keeps them, else computed by ``model`` (None: the answers' own target, which is loaded
    as it was when it gave them) in a thread of their own, ahead of who reads. ``threads``: of a target that is loaded.
    ``cached`` says which. Raises DataError and ModelError.
    """

    def __init__(
        self,
        answers: Answers,
        layers: Sequence[int] | None = None,
        *,
        model: Model | None = None,
        threads: int | None = None,
        ahead: int = AHEAD,
    ) -> None:
        with packages():  # making data needs no torch
            import torch

        self._torch = torch
        count = int(answers.target["layers"])
        self.answers = answers
        self.layers = with_last(default_layers(count) if layers is None else layers, count)
        self.hidden = int(answers.target["hidden_size"])
        kept = _Kept.open(answers, self.layers, ahead)
        self.cached = kept is not None  # whether states are read, not computed
        self._source: _Kept | _Computed
        if kept is not None:
            self._source = kept
        else:
            target = open_target(answers.meta, threads) if model is None else model
            self._source = _Computed(answers, self.layers, target, model is None, ahead)

    def plan(self, order: Iterable[int]) -> None:
        """Say what will be read next, by place in ``answers``, in order; it replaces what was planned before."""
        self._source.plan(order)

    def states(self, i: int) -> torch.Tensor:
        """bfloat16 [L, T + 1, h] of answer i. What was not planned is computed while the caller waits."""
        return self._torch.from_numpy(self._source.states(i).view(np.int16)).view(self._torch.bfloat16)

    def close(self) -> None:
        """End the thread and close a target that was loaded here. Calling twice is allowed."""
        self._source.close()

    def __enter__(self) -> HiddenStateSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class _Kept:
    """States in files, mapped; the system reads what is planned ahead of who asks, a bounded number of tokens."""

    def __init__(self, answers: Answers, maps: list[Any], columns: list[int] | None, ahead: int) -> None:
        self._answers, self._maps, self._columns, self._ahead = answers, maps, columns, ahead
        self._todo: deque[int] = deque()
        self._read = 0  # tokens ahead

    @classmethod
    def open(cls, answers: Answers, layers: tuple[int, ...], ahead: int) -> _Kept | None:
        """None where not all of ``answers`` are kept, or not these layers."""
        count, hidden = int(answers.target["layers"]), int(answers.target["hidden_size"])
        kept = answers.meta.get("hidden_states")
        if kept is None:
            return None
        has = with_last(kept["layers"], count)
        if not set(layers) <= set(has):
            return None
        starts, bounds = answers.columns.starts, answers.columns.shards
        lengths = np.diff(starts[bounds]).tolist()
        needed = set((np.searchsorted(bounds, answers.index, side="right") - 1).tolist())
        maps: list[Any] = []
        for number, length in enumerate(lengths):
            path = states_path(answers.path, number)
            if number not in needed:
                maps.append(None)
                continue
            size = 2 * length * len(has) * hidden
            if not path.exists() or path.stat().st_size < size:
                return None
            if path.stat().st_size > size:
                raise DataError(f"{path} is larger than its answers' states: remove it, and run outpace train cache")
            maps.append(np.memmap(path, np.uint16, "r", shape=(length, len(has), hidden)))
        return cls(answers, maps, None if layers == has else [has.index(layer) for layer in layers], ahead)

    def plan(self, order: Iterable[int]) -> None:
        self._todo, self._read = deque(order), 0

    def states(self, i: int) -> BF16:
        while self._todo and self._read < self._ahead:
            self._fetch(later := self._place(self._todo.popleft()))
            self._read += len(later)
        found = self._place(i)
        self._read = max(self._read - len(found), 0)
        return np.array(found if self._columns is None else found[:, self._columns])

    def close(self) -> None:
        self._todo.clear()

    def _place(self, i: int) -> Any:
        n, columns = int(self._answers.index[i]), self._answers.columns
        number = int(np.searchsorted(columns.shards, n, side="right")) - 1
        before = columns.starts[columns.shards[number]]
        return self._maps[number][columns.starts[n] - before : columns.starts[n + 1] - before]

    @staticmethod
    def _fetch(part: Any) -> None:
        """Ask the system to read a part of a map; not on Windows, where maps have no such call."""
        whole: mmap.mmap = part._mmap
        if hasattr(whole, "madvise"):
            start = (part.ctypes.data - np.frombuffer(whole, np.uint8).ctypes.data) // mmap.PAGESIZE * mmap.PAGESIZE
            whole.madvise(mmap.MADV_WILLNEED, start, part.nbytes)


class _Computed:
    """States from the target, computed by a thread in the order of the plan, a bounded number of tokens ahead."""

    def __init__(self, answers: Answers, layers: tuple[int, ...], model: Model, owns: bool, ahead: int) -> None:
        self._answers, self._layers, self._model, self._owns, self._ahead = answers, layers, model, owns, ahead
        self._lengths = answers.lengths().tolist()
        self._changed = threading.Condition()
        self._todo: deque[int] = deque()
        self._ready: dict[int, deque[BF16]] = {}
        self._under_way: list[int] = []
        self._wanted: int | None = None  # what the reader waits for
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hidden-states", daemon=True)
        self._thread.start()

    def plan(self, order: Iterable[int]) -> None:
        with self._changed:
            self._todo = deque(order)
            self._ready.clear()
            self._under_way.clear()
            self._changed.notify_all()

    def states(self, i: int) -> BF16:
        i = i if i >= 0 else i + len(self._answers)
        with self._changed:
            while not self._ready.get(i):
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise ValueError("this source of states is closed: make another")
                self._wanted = i
                self._changed.notify_all()
                self._changed.wait()
            self._wanted = None
            found = self._ready[i].popleft()
            if not self._ready[i]:
                del self._ready[i]
            self._changed.notify_all()
            return found

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._owns:
            self._model.close()

    def _run(self) -> None:
        try:
            while (group := self._next()) is not None:
                sequences = [self._answers[i].tokens for i in group]
                for i, states in zip(group, forward_states(self._model, sequences, self._layers), strict=True):
                    with self._changed:
                        if self._closed:
                            return
                        if i in self._under_way:  # else the plan was replaced meanwhile
                            self._under_way.remove(i)
                            self._ready.setdefault(i, deque()).append(states)
                        self._changed.notify_all()
        except BaseException as error:  # whatever it is, the reader gets it, not a thread that nobody watches
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> list[int] | None:
        """What to compute together now; None: it is over."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                urgent = None if self._wanted is None or self._ready.get(self._wanted) else self._wanted
                if urgent is not None:
                    if urgent in self._todo:
                        self._todo.remove(urgent)
                    self._todo.appendleft(urgent)
                waiting = sum(self._lengths[i] * len(states) for i, states in self._ready.items())
                group, tokens = list[int](), 0
                while (
                    self._todo
                    and tokens < TOGETHER
                    and (waiting + tokens < self._ahead or (urgent is not None and not group))
                ):
                    group.append(self._todo.popleft())
                    tokens += self._lengths[group[-1]]
                if group:
                    self._under_way = group.copy()
                    return group
                self._changed.wait()
