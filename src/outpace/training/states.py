"""``HiddenStateSource``: the target's hidden states for a trainer, from a folder or from the target itself."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from outpace.errors import DataError
from outpace.models.base import Model
from outpace.training import folder as folders
from outpace.training import packages
from outpace.training.data import Answers
from outpace.training.hidden_states import BF16, default_layers, forward_states, open_target, with_last

with packages():
    import torch

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
        found = self._source.states(i)
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)

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
            path = folders.states_path(answers.path, number)
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
