"""A tiny model whose every mistake shows: its logits are a hash of the whole prefix that its KV cache says it has.

A stale slot, a wrong position, a sibling that leaks through the mask or a row that is not rolled back changes the
prefix, and with it every logit that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.common.fair_lock import FairLock
from outpace.errors import MemoryLimitError
from outpace.models.base import Batch, HostHiddenStates, HostOutput, KVCache, Model, ModelInfo

BYTES = 8  # what a position takes


class ToyError(Exception):
    """The toy failed because a test told it to."""


class ToyKV:
    """Stores token ids, positions and the number of layers that wrote them where a real cache has keys and values.

    Blocks of four positions, shared by reference and copied on write: what the protocol asks for, in plain Python.
    """

    settle = KVCache.settle

    block = 4

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._blocks: dict[int, np.ndarray] = {}
        self._users: dict[int, int] = {}  # how many rows have a block
        self._rows: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def alloc(self) -> int:
        row = next(i for i in range(len(self._rows) + 1) if i not in self._rows)
        self._rows[row], self._lengths[row] = [], 0
        return row

    def free(self, row: int) -> None:
        self._drop(row, 0)
        del self._rows[row], self._lengths[row]

    def length(self, row: int) -> int:
        return self._lengths[row]

    recurrent = windowed = False

    def reachable(self, row: int, n: int) -> int:
        return min(max(n, 0), self._lengths[row])

    def truncate(self, row: int, n: int) -> None:
        assert 0 <= n <= self._lengths[row]
        self._lengths[row] = n
        self._drop(row, -(-n // self.block))

    def compact(self, row: int, start: int, keep: I32) -> None:
        assert start + keep.max(initial=-1) < self._lengths[row]
        for i, slot in enumerate((start + keep).tolist()):
            if start + i != slot:
                self._own(row, (start + i) // self.block)
                self._slot(row, start + i)[:] = self._slot(row, slot)
        self.truncate(row, start + len(keep))

    def fork(self, src: int, dst: int, n: int) -> None:
        assert n <= self._lengths[src], f"{n} positions of a row that has {self._lengths[src]}"
        assert not self._rows[dst], "the row is not empty"
        self._rows[dst] = self._rows[src][: -(-n // self.block)]
        for block in self._rows[dst]:
            self._users[block] += 1
        self._lengths[dst] = n

    def growth(self, row: int, n: int) -> int:
        held, length = self._rows[row], self._lengths[row]
        more = max(-(-(length + n) // self.block) - len(held), 0)
        copied = n > 0 and length % self.block and self._users[held[length // self.block]] > 1
        return (more + bool(copied)) * self.block * BYTES

    def bytes_for(self, positions: int) -> int:
        return -(-positions // self.block) * self.block * BYTES

    def exclusive(self, rows: Sequence[int]) -> int:
        users = Counter(block for row in rows for block in self._rows[row])
        return sum(n == self._users[block] for block, n in users.items()) * self.block * BYTES

    @property
    def bytes(self) -> int:
        return len(self._blocks) * self.block * BYTES

    @property
    def rows(self) -> list[int]:
        return sorted(self._rows)

    def check(self) -> None:
        users = Counter(block for held in self._rows.values() for block in held)
        assert users == Counter(self._users), "a block's users are miscounted"
        assert set(users) == set(self._blocks), "a block leaked"
        assert self.limit is None or self.bytes <= self.limit
        for row, held in self._rows.items():
            n = self._lengths[row]
            assert len(held) == -(-n // self.block), f"row {row} has {len(held)} blocks for {n} positions"
            assert [self._slot(row, i)[1] for i in range(n)] == list(range(n)), f"row {row}: wrong positions"

    def write(self, row: int, tokens: I32, positions: I32, layers: int = 1) -> None:
        if self.limit is not None and self.bytes + self.growth(row, len(tokens)) > self.limit:
            raise MemoryLimitError("full")
        for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
            n = self._lengths[row]
            if n % self.block == 0:
                self._rows[row].append(self._new())
            self._own(row, n // self.block)
            self._slot(row, n)[:] = token, position, layers
            self._lengths[row] = n + 1

    def prefix(self, row: int, n: int) -> list[int]:
        return [int(self._slot(row, i)[0]) for i in range(n)]

    def layers(self, row: int, n: int) -> int:
        """What the least of the first n slots has."""
        return min((int(self._slot(row, i)[2]) for i in range(n)), default=1 << 20)

    def _slot(self, row: int, i: int) -> np.ndarray:
        found: np.ndarray = self._blocks[self._rows[row][i // self.block]][i % self.block]
        return found

    def _new(self) -> int:
        block = next(i for i in range(len(self._blocks) + 1) if i not in self._blocks)
        self._blocks[block], self._users[block] = np.full((self.block, 3), -99, np.int64), 1
        return block

    def _own(self, row: int, index: int) -> None:
        """Copy on write."""
        block = self._rows[row][index]
        if self._users[block] > 1:
            self._users[block] -= 1
            self._rows[row][index] = own = self._new()
            self._blocks[own][:] = self._blocks[block]

    def _drop(self, row: int, keep: int) -> None:
        for block in self._rows[row][keep:]:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block], self._blocks[block]
        del self._rows[row][keep:]


class ToyOutput(HostOutput):
    """Hidden states are the token and its position, [n, T, 2]; only of rows that read them."""

    def __init__(self, batch: Batch, logits: F32) -> None:
        super().__init__(batch.wanted, logits)
        self._batch = batch

    def hidden_states(self, at: I32) -> HostHiddenStates:
        rows = np.searchsorted(self._batch.starts, at, side="right") - 1
        assert self._batch.hidden_rows is None or self._batch.hidden_rows[rows].all(), (
            "hidden states of a row that has none"
        )
        one = np.stack([self._batch.token[at], self._batch.position[at]], axis=-1).astype(np.float32)
        return HostHiddenStates(np.repeat(one[:, None], len(self._batch.hidden_layers), axis=1))


class BrokenOutput(ToyOutput):
    """A forward that went wrong without saying so until it is read."""

    def logits(self, at: I32) -> F32:
        raise ToyError("the toy was told to fail")


class ToyModel(Model):
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
        self.kv, self.lock = ToyKV(limit), FairLock()
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
        lengths = {row: self.kv.length(row) for row in self.kv.rows}
        try:
            return self._forward(batch)
        except BaseException:  # as every model: when it raises, every row is as long as it was
            for row, n in lengths.items():
                self.kv.truncate(row, n)
            raise

    def _forward(self, batch: Batch) -> HostOutput:
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
    spelling, texts, special_ids, eos_ids, bos_id = None, None, (), (), None

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> I32:
        return np.array([ord(c) - 97 for c in text], np.int32)

    def encode_raw(self, text: str, *, add_special: bool = True) -> I32:
        return self.encode(text)

    def decode(self, ids: object, *, skip_special: bool = True) -> str:
        return "".join(chr(97 + int(i)) for i in ids)  # type: ignore[attr-defined]
