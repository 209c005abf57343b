"""A tiny model whose every mistake shows: its logits are a hash of the whole prefix that its KV cache says it has.

A stale slot, a wrong position, a sibling that leaks through the mask or a row that is not rolled back changes the
prefix, and with it every logit that follows.
"""

from __future__ import annotations

import numpy as np

from outpace.arrays import F32, I32
from outpace.errors import MemoryLimitError
from outpace.models.base import Batch, HostOutput, ModelInfo

BYTES = 8  # what a position takes


class ToyError(Exception):
    """The toy failed because a test told it to."""


class ToyKV:
    """Stores token ids, positions and the number of layers that wrote them where a real cache has keys and values."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._slots: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}

    def alloc(self, capacity: int) -> int:
        if self.limit is not None and self.bytes + self.bytes_for(capacity) > self.limit:
            raise MemoryLimitError("full")
        row = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[row] = np.full((capacity, 3), -99, np.int64)
        self._lengths[row] = 0
        return row

    def free(self, row: int) -> None:
        del self._slots[row], self._lengths[row]

    def length(self, row: int) -> int:
        return self._lengths[row]

    def capacity(self, row: int) -> int:
        return len(self._slots[row])

    def truncate(self, row: int, n: int) -> None:
        assert 0 <= n <= self._lengths[row]
        self._lengths[row] = n

    def compact(self, row: int, start: int, keep: I32) -> None:
        assert start + keep.max(initial=-1) < self._lengths[row]
        self._slots[row][start : start + len(keep)] = self._slots[row][start + keep]
        self._lengths[row] = start + len(keep)

    def fork(self, src: int, dst: int, n: int) -> None:
        assert n <= self._lengths[src]
        self._slots[dst][:n] = self._slots[src][:n]
        self._lengths[dst] = n

    def bytes_for(self, capacity: int) -> int:
        return capacity * BYTES

    @property
    def bytes(self) -> int:
        return sum(self.bytes_for(len(s)) for s in self._slots.values())

    @property
    def rows(self) -> list[int]:
        return sorted(self._slots)

    def check(self) -> None:
        for row, slots in self._slots.items():
            n = self._lengths[row]
            assert (slots[:n, 1] == np.arange(n)).all(), f"row {row}: positions {slots[:n, 1]}"

    def write(self, row: int, tokens: I32, positions: I32, layers: int = 1) -> None:
        n = self._lengths[row]
        assert n + len(tokens) <= len(self._slots[row]), "a row outgrew its reservation"
        self._slots[row][n : n + len(tokens), 0] = tokens
        self._slots[row][n : n + len(tokens), 1] = positions
        self._slots[row][n : n + len(tokens), 2] = layers
        self._lengths[row] = n + len(tokens)

    def prefix(self, row: int, n: int) -> list[int]:
        return self._slots[row][:n, 0].tolist()

    def layers(self, row: int, n: int) -> int:
        """What the least of the first n slots has."""
        return int(self._slots[row][:n, 2].min(initial=1 << 20))


class ToyOutput(HostOutput):
    """Taps are what a hidden state must know: the token and its position, [n, T, 2]."""

    def __init__(self, batch: Batch, logits: F32) -> None:
        super().__init__(batch.wanted, logits)
        self._batch = batch

    def taps(self, at: I32) -> F32:
        one = np.stack([self._batch.token[at], self._batch.position[at]], axis=-1).astype(np.float32)
        return np.repeat(one[:, None], len(self._batch.taps), axis=1)


class BrokenOutput(ToyOutput):
    """A forward that went wrong without saying so until it is read."""

    def logits(self, at: I32) -> F32:
        raise ToyError("the toy was told to fail")


class ToyModel:
    """Logits float32 [V], a pure function of the prefix. ``blur`` mixes in other logits: an imperfect draft model."""

    def __init__(
        self,
        vocab: int = 11,
        *,
        seed: int = 0,
        blur: float = 0.0,
        max_length: int = 96,
        limit: int | None = None,
        eos: tuple[int, ...] = (),
        memory: int = 3,
        layers: int = 1,
    ) -> None:
        self.kv = ToyKV(limit)
        self._vocab, self._seed, self._blur, self._memory = vocab, seed, blur, memory
        self.info = ModelInfo("toy", "toy", vocab, 1, layers, max_length, eos, "float32", "cpu", 0, BYTES)
        self.forwards: list[Batch] = []
        self.fail: str | None = None  # "forward": the next forward raises; "output": what it returns does
        self._known: dict[tuple[int, ...], F32] = {}

    def logits_after(self, prefix: list[int], layers: int | None = None) -> F32:
        """What it says after ``prefix``, by its last ``memory`` tokens and their number; fewer layers blur it."""
        if layers is not None and layers < self.info.layers:
            other = np.random.default_rng([self._seed + 1, *prefix[-self._memory :]]).normal(0, 2, self._vocab)
            return (0.8 * self.logits_after(prefix) + 0.2 * other).astype(np.float32)
        context = (len(prefix) % 2, *prefix[-self._memory :])
        known = self._known.get(context)
        if known is None:
            logits = np.random.default_rng([self._seed, *context]).normal(0, 2, self._vocab)
            if self._blur:
                other = np.random.default_rng([self._seed + 1, *context]).normal(0, 2, self._vocab)
                logits = (1 - self._blur) * logits + self._blur * other
            known = self._known[context] = logits.astype(np.float32)
        return known

    def forward(self, batch: Batch) -> HostOutput:
        self.forwards.append(batch)
        failing, self.fail = self.fail, None
        if failing == "forward":
            raise ToyError("the toy was told to fail")
        wanted = set(batch.wanted.tolist())
        logits = []
        for b in range(len(batch.starts) - 1):
            span = range(batch.starts[b], batch.starts[b + 1])
            row = int(batch.row[batch.starts[b]])
            base = self.kv.length(row)
            cached = self.kv.prefix(row, base)
            layers = self.info.layers if batch.layers is None else batch.layers
            assert self.kv.layers(row, base) >= layers, "it reads what a forward of fewer layers left"
            paths: list[list[int]] = []
            for i in span:
                parent = int(batch.parent[i])
                path = [*(paths[parent] if parent >= 0 else cached), int(batch.token[i])]
                assert int(batch.position[i]) == len(path) - 1, "a position does not follow from its parent's"
                paths.append(path)
                if i in wanted:
                    logits.append(self.logits_after(path, batch.layers))
            at = slice(batch.starts[b], batch.starts[b + 1])
            self.kv.write(row, batch.token[at], batch.position[at], layers)
        kind = BrokenOutput if failing == "output" else ToyOutput
        return kind(batch, np.array(logits, np.float32).reshape(-1, self._vocab))

    def close(self) -> None:
        pass


class ToyTokenizer:
    """One character a token: 0 is 'a', 1 is 'b', ..."""

    has_chat_template = False

    def encode(self, text: str) -> I32:
        return np.array([ord(c) - 97 for c in text], np.int32)

    def decode(self, ids: object, *, skip_special: bool = True) -> str:
        return "".join(chr(97 + int(i)) for i in ids)  # type: ignore[attr-defined]
