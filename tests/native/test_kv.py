"""The KV cache keeps the contract of models/base.py, under random use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from native_helpers import Tiny, feed

from outpace.errors import MemoryLimitError
from outpace.models.base import Batch

LONGEST = 150
BLOCK = 64
# A tree of which several paths end at different depths, and two of them.
TREE = [-1, 0, 0, 1, 1, 2, 3, 6, -1]
PATHS = ([0, 2, 5], [0, 1, 3, 6], [8], [])


class Memory:
    """What the cache should hold, as plainly as can be: blocks are numbers, and a row is a list of them."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self._next = 0

    def shared(self, block: int) -> bool:
        return sum(block in blocks for blocks in self.rows.values()) > 1

    def new(self) -> int:
        self._next += 1
        return self._next

    def growth(self, row: int, length: int, n: int) -> int:
        blocks = self.rows[row]
        copy = n > 0 and length % BLOCK > 0 and self.shared(blocks[-1])
        return -(-(length + n) // BLOCK) - len(blocks) + copy

    def grow(self, row: int, length: int, n: int) -> None:
        blocks = self.rows[row]
        if n > 0 and length % BLOCK > 0 and self.shared(blocks[-1]):
            blocks[-1] = self.new()
        while len(blocks) * BLOCK < length + n:
            blocks.append(self.new())

    def write(self, row: int, first: int, last: int) -> None:
        blocks = self.rows[row]
        for i in range(first // BLOCK, -(-last // BLOCK)):
            if self.shared(blocks[i]):
                blocks[i] = self.new()

    def cut(self, row: int, length: int) -> None:
        del self.rows[row][-(-length // BLOCK) :]

    def used(self) -> int:
        return len({block for blocks in self.rows.values() for block in blocks})

    def exclusive(self, rows: set[int]) -> int:
        kept = {block for row, blocks in self.rows.items() if row not in rows for block in blocks}
        return len({block for row in rows for block in self.rows[row]} - kept)


def machine(model: Any, reference: Any) -> type[RuleBasedStateMachine]:
    """``reference``: the same model with a cache of its own, whose only row shares nothing."""
    plain = reference.kv.alloc()
    unit = model.kv.bytes_for(1)

    def expected(tokens: list[int]) -> Any:
        reference.kv.truncate(plain, 0)
        return feed(reference, plain, tokens)[-1]

    class Rows(RuleBasedStateMachine):
        """Rows grow alone and together, share, are cut, compacted and freed; each goes on as its tokens alone would."""

        def __init__(self) -> None:
            super().__init__()
            for row in model.kv.rows:
                model.kv.free(row)
            self.tokens: dict[int, list[int]] = {}
            self.memory = Memory()

        def pick(self, i: int) -> int:
            return sorted(self.tokens)[i % len(self.tokens)]

        @rule()
        @precondition(lambda self: len(self.tokens) < 4)
        def alloc(self) -> None:
            row = model.kv.alloc()
            assert row not in self.tokens
            self.tokens[row], self.memory.rows[row] = [], []

        @rule(
            start=st.integers(0, 9),
            count=st.integers(1, 4),
            sizes=st.lists(st.sampled_from(SIZES), min_size=4, max_size=4),
        )
        @precondition(lambda self: self.tokens)
        def feed(self, start: int, count: int, sizes: list[int]) -> None:
            chosen = sorted(self.tokens)[start % len(self.tokens) :][:count]
            batch = []
            for row, size in zip(chosen, sizes, strict=False):
                n = min(size, LONGEST - len(self.tokens[row]))
                if n > 0:
                    batch.append((row, [(7 * row + 3 * i + len(self.tokens[row])) % 100 for i in range(n)]))
            if not batch:
                return
            lengths = [len(self.tokens[row]) for row, _ in batch]
            fed = [np.array(new, np.int32) for _, new in batch]
            most = sum(model.kv.growth(row, len(new)) for row, new in batch)
            before = model.kv.bytes
            output = model.forward(Batch.pack([row for row, _ in batch], fed, lengths, [True] * len(batch)))
            assert model.kv.bytes - before <= most
            for (row, new), length in zip(batch, lengths, strict=True):
                self.memory.grow(row, length, len(new))
                self.tokens[row] += new
            ends = np.cumsum([len(new) for new in fed]).astype(np.int32) - 1
            for (row, _), logits in zip(batch, output.logits(ends), strict=True):
                assert np.array_equal(logits, expected(self.tokens[row]))

        @rule(i=st.integers(0, 9), path=st.sampled_from(PATHS), other=st.sampled_from([None, *PATHS]))
        @precondition(lambda self: self.tokens)
        def tree(self, i: int, path: list[int], other: list[int] | None) -> None:
            """A tree's kept path; ``other``: that of a fork made in between, so that both share what they compact."""
            row = self.pick(i)
            start = len(self.tokens[row])
            if start + len(TREE) > LONGEST:
                return
            nodes = [(11 * j + start) % 100 for j in range(len(TREE))]
            feed(model, row, nodes, parents=TREE)
            self.memory.grow(row, start, len(nodes))
            kept = [(row, path)]
            if other is not None and len(self.tokens) < 4:
                copy = model.kv.alloc()
                model.kv.fork(row, copy, start + len(nodes))
                self.tokens[copy], self.memory.rows[copy] = list(self.tokens[row]), list(self.memory.rows[row])
                kept.append((copy, other))
            for its, keep in kept:
                model.kv.compact(its, start, np.array(keep, np.int32))
                moved = [j for j, node in enumerate(keep) if node != j]
                if moved:
                    self.memory.write(its, start + moved[0], start + len(keep))
                self.tokens[its] += [nodes[j] for j in keep]
                self.memory.cut(its, len(self.tokens[its]))

        @rule(i=st.integers(0, 9), n=st.integers(0, LONGEST))
        @precondition(lambda self: self.tokens)
        def truncate(self, i: int, n: int) -> None:
            row = self.pick(i)
            n = min(n, len(self.tokens[row]))
            model.kv.truncate(row, n)
            del self.tokens[row][n:]
            self.memory.cut(row, n)

        @rule(i=st.integers(0, 9), n=st.integers(0, LONGEST))
        @precondition(lambda self: 0 < len(self.tokens) < 4)
        def fork(self, i: int, n: int) -> None:
            src, dst = self.pick(i), model.kv.alloc()
            n = min(n, len(self.tokens[src]))
            model.kv.fork(src, dst, n)
            self.tokens[dst] = self.tokens[src][:n]
            self.memory.rows[dst] = list(self.memory.rows[src])
            self.memory.cut(dst, n)

        @rule(i=st.integers(0, 9), poison=st.booleans())
        @precondition(lambda self: self.tokens)
        def free(self, i: int, poison: bool) -> None:
            row = self.pick(i)
            model.kv.free(row)
            del self.tokens[row], self.memory.rows[row]
            if poison:
                model._handle.kv_poison()

        @invariant()
        def consistent(self) -> None:
            model.kv.check()
            assert model.kv.rows == sorted(self.tokens)
            assert all(model.kv.length(row) == len(tokens) for row, tokens in self.tokens.items())
            assert model.kv.bytes == self.memory.used() * unit <= model._handle.kv_held
            for row, tokens in self.tokens.items():
                for n in (0, 1, BLOCK, 100):
                    assert model.kv.growth(row, n) == self.memory.growth(row, len(tokens), n) * unit
            for chosen in (set(list(self.tokens)[:1]), set(list(self.tokens)[1:3]), set(self.tokens)):
                assert model.kv.exclusive(sorted(chosen)) == self.memory.exclusive(chosen) * unit

        def teardown(self) -> None:
            """Whatever became of the rows, each has its own tokens' keys and values."""
            model._handle.kv_poison()
            for row, tokens in self.tokens.items():
                assert np.array_equal(feed(model, row, [5])[-1], expected([*tokens, 5]))
            model.kv.check()

    return Rows


SIZES = (1, 2, 5, 30, 63, 64, 65)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
def test_random_use(kv_dtype: str, tiny: Tiny) -> None:
    model, reference = (tiny.load("Q4_1", threads=1, kv_dtype=kv_dtype) for _ in range(2))
    chosen = settings(max_examples=40, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine(model, reference), settings=chosen)


def test_memory_is_bounded_and_given_back(tiny: Tiny) -> None:
    unit = 2 * 2 * 2 * 16 * 2 * BLOCK  # layers, heads, keys and values, dim, bytes, positions
    model = tiny.load("Q4_1", threads=1, kv_memory=4 * unit + 100)
    kv = model.kv
    assert kv.limit == 4 * unit + 100
    assert kv.block == BLOCK
    assert kv.bytes_for(1) == kv.bytes_for(64) == unit == 64 * model.info.kv_bytes_per_position
    a, b = kv.alloc(), kv.alloc()
    assert kv.bytes == model._handle.kv_held == 0
    feed(model, a, np.zeros(100, np.int32))
    feed(model, b, np.zeros(60, np.int32))
    assert kv.bytes == 3 * unit
    tokens = [np.zeros(n, np.int32) for n in (30, 5)]
    assert [kv.growth(row, len(t)) for row, t in zip((a, b), tokens, strict=True)] == [unit, unit]
    with pytest.raises(MemoryLimitError, match=f"{2 * unit} bytes .* only {unit + 100} of .* raise kv_memory"):
        model.forward(Batch.pack([a, b], tokens, [100, 60], [True] * 2))
    kv.check()
    assert (kv.length(a), kv.length(b), kv.bytes) == (100, 60, 3 * unit)
    model.forward(Batch.pack([a, b], [tokens[0], tokens[1][:4]], [100, 60], [True] * 2))
    assert kv.bytes == kv.exclusive([a, b]) == 4 * unit
    kv.truncate(a, 64)
    assert kv.bytes == 2 * unit
    kv.free(a)
    kv.free(b)
    assert kv.bytes == 0
    assert kv.rows == []
    assert model._handle.kv_held == 4 * unit  # spares, for the next rows
    kv.check()


def test_a_common_prefix_is_held_once(tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("Q4_1", threads=1)
    kv, unit = model.kv, model.kv.bytes_for(1)
    prefix = rng.integers(0, 100, 1000)
    first = kv.alloc()
    feed(model, first, prefix)
    rows = [first, *(kv.alloc() for _ in range(15))]
    for row in rows[1:]:
        kv.fork(first, row, 1000)
    assert kv.bytes == 16 * unit == kv.bytes_for(1000)
    assert kv.exclusive(rows[1:]) == 0
    assert all(kv.growth(row, 1) == unit for row in rows)  # each may have to copy the last block,
    after = [np.array([row, 1], np.int32) for row in rows]
    output = model.forward(Batch.pack(rows, after, [1000] * 16, [True] * 16))
    assert kv.bytes == (15 + 16) * unit  # but the last to write need not
    kv.check()
    alone = kv.alloc()
    for i, tokens in enumerate(after):
        kv.truncate(alone, 0)
        got = output.logits(np.array([2 * i, 2 * i + 1], np.int32))
        assert np.array_equal(feed(model, alone, [*prefix, *tokens])[-2:], got)


def test_compacting_what_is_shared_needs_room(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1, kv_memory=2 * 64 * 256)
    kv = model.kv
    row, other = kv.alloc(), kv.alloc()
    feed(model, row, [1, 2, 3])
    feed(model, row, [4, 5], parents=[-1, -1])
    kv.fork(row, other, 5)
    third = kv.alloc()
    feed(model, third, [1])
    with pytest.raises(MemoryLimitError, match="raise kv_memory"):
        kv.compact(row, 3, np.array([1], np.int32))
    assert (kv.length(row), kv.length(other)) == (5, 5)
    kv.compact(other, 3, np.array([0], np.int32))  # nothing moves, so nothing is copied
    kv.free(third)
    kv.compact(row, 3, np.array([1], np.int32))
    kv.check()
    alone = kv.alloc()
    kv.free(other)
    assert np.array_equal(feed(model, row, [6])[-1], feed(model, alone, [1, 2, 3, 5, 6])[-1])


def test_misuse_is_refused(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row, other = model.kv.alloc(), model.kv.alloc()
    feed(model, row, [1, 2, 3])
    feed(model, other, [1])
    for call in (
        lambda: model.kv.truncate(row, 4),
        lambda: model.kv.truncate(row, -1),
        lambda: model.kv.compact(row, 1, np.array([1, 0], np.int32)),
        lambda: model.kv.compact(row, 1, np.array([2], np.int32)),
        lambda: model.kv.compact(row, 9, np.array([], np.int32)),
        lambda: model.kv.fork(row, row, 1),
        lambda: model.kv.fork(row, other, 1),
        lambda: model.kv.fork(other, row, 2),
        lambda: model.kv.growth(row, -1),
        lambda: model.kv.bytes_for(1 << 40),
    ):
        with pytest.raises(ValueError):
            call()
    for call in (
        model.kv.length,
        model.kv.free,
        lambda row: model.kv.fork(row, other, 0),
        lambda row: model.kv.exclusive([row]),
    ):
        with pytest.raises(IndexError, match="not in use"):
            call(5)
    assert model.kv.length(row) == 3
    model.kv.check()


def test_a_full_length_row(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1, max_length=20)
    assert model.info.max_length == 20
    row = model.kv.alloc()
    feed(model, row, np.zeros(20, np.int32))
    with pytest.raises(ValueError, match="beyond the model's 20"):
        feed(model, row, [0])
    model.kv.check()


@pytest.mark.parametrize(
    "change",
    [
        {"token": [100]}, {"token": [-1]}, {"row": [3]}, {"position": [1]}, {"parent": [0]}, {"parent": [-2]},
        {"starts": [0, 2]}, {"starts": [0]}, {"wanted": [1]}, {"wanted": [-1]}, {"layers": 3}, {"hidden_layers": (2,)},
        {"row": [0, 0]},
    ],
)  # fmt: skip
def test_malformed_batches_change_nothing(change: dict[str, Any], tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc()
    good: dict[str, Any] = {
        "token": [1],
        "row": [row],
        "position": [0],
        "parent": [-1],
        "starts": [0, 1],
        "wanted": [0],
    }
    arrays = {k: v if k in ("hidden_layers", "layers") else np.array(v, np.int32) for k, v in (good | change).items()}
    with pytest.raises((ValueError, IndexError)):
        model.forward(Batch(**arrays))
    assert model.kv.length(row) == 0
    model.forward(Batch(**{k: np.array(v, np.int32) for k, v in good.items()}))


def test_hidden_states_and_short_forwards(tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("F32", threads=2, sizes={"layers": 4})
    tokens = rng.integers(0, 100, 140).astype(np.int32)
    row, other = model.kv.alloc(), model.kv.alloc()
    at = np.arange(140, dtype=np.int32)
    full = model.forward(Batch.pack([row], [tokens], [0], [True], hidden_layers=(0, 3, 1)))
    short = model.forward(Batch.pack([other], [tokens], [0], [True], hidden_layers=(1,), layers=2))
    assert full.hidden_states(at).numpy().shape == (140, 3, 64)
    assert np.array_equal(full.hidden_states(at).numpy()[:, 2], short.hidden_states(at).numpy()[:, 0])
    assert not np.array_equal(full.logits(at), short.logits(at))
    with pytest.raises(IndexError):
        full.hidden_states(np.array([140], np.int32))
    model.kv.truncate(row, 139)  # a narrow forward takes another way to its hidden states
    again = model.forward(Batch.pack([row], [tokens[139:]], [139], [True], hidden_layers=(0, 3, 1)))
    assert np.array_equal(again.hidden_states(np.array([0], np.int32)).numpy(), full.hidden_states(at[139:]).numpy())


def test_only_wanted_positions_have_logits(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc()
    output = model.forward(Batch.pack([row], [np.arange(5, dtype=np.int32)], [0], [False]))
    with pytest.raises(IndexError, match="not wanted"):
        output.logits(np.array([4], np.int32))


def test_closing(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=2)
    model.close()
    model.close()
    with pytest.raises(ValueError, match="closed"):
        model.forward(Batch.pack([0], [np.zeros(1, np.int32)], [0], [True]))
