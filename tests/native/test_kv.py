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

CAPACITY = 150


def machine(model: Any) -> type[RuleBasedStateMachine]:
    reference = model.kv.alloc(CAPACITY)

    class Rows(RuleBasedStateMachine):
        """Rows are fed, cut, compacted, forked and freed; each must go on as a fresh row with its tokens would."""

        def __init__(self) -> None:
            super().__init__()
            for row in model.kv.rows:
                if row != reference:
                    model.kv.free(row)
            self.tokens: dict[int, list[int]] = {}

        @rule()
        @precondition(lambda self: len(self.tokens) < 3)
        def alloc(self) -> None:
            self.tokens[model.kv.alloc(CAPACITY)] = []

        def pick(self, i: int) -> int:
            return sorted(self.tokens)[i % len(self.tokens)]

        @rule(i=st.integers(0, 9), new=st.lists(st.integers(0, 99), min_size=1, max_size=40))
        @precondition(lambda self: self.tokens)
        def feed(self, i: int, new: list[int]) -> None:
            row = self.pick(i)
            new = new[: CAPACITY - len(self.tokens[row]) - 1]
            if not new:
                return
            self.tokens[row] += new
            got = feed(model, row, new)
            model.kv.truncate(reference, 0)
            assert np.array_equal(got[-1], feed(model, reference, self.tokens[row])[-1])

        @rule(i=st.integers(0, 9), n=st.integers(0, CAPACITY))
        @precondition(lambda self: self.tokens)
        def truncate(self, i: int, n: int) -> None:
            row = self.pick(i)
            n = min(n, len(self.tokens[row]))
            model.kv.truncate(row, n)
            del self.tokens[row][n:]

        @rule(i=st.integers(0, 9), j=st.integers(0, 9), n=st.integers(0, CAPACITY))
        @precondition(lambda self: len(self.tokens) > 1)
        def fork(self, i: int, j: int, n: int) -> None:
            src, dst = self.pick(i), self.pick(j)
            if src == dst:
                return
            n = min(n, len(self.tokens[src]))
            model.kv.fork(src, dst, n)
            self.tokens[dst] = self.tokens[src][:n]

        @rule(i=st.integers(0, 9))
        @precondition(lambda self: self.tokens)
        def free(self, i: int) -> None:
            row = self.pick(i)
            model.kv.free(row)
            del self.tokens[row]
            model._handle.kv_poison()

        @invariant()
        def consistent(self) -> None:
            model.kv.check()
            assert model.kv.rows == sorted([reference, *self.tokens])
            assert all(model.kv.length(row) == len(tokens) for row, tokens in self.tokens.items())
            assert model.kv.bytes == (1 + len(self.tokens)) * model.kv.bytes_for(CAPACITY)

    return Rows


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
def test_random_use(kv_dtype: str, tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1, kv_dtype=kv_dtype)
    run_state_machine_as_test(machine(model), settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


def test_memory_is_bounded_and_given_back(tiny: Tiny) -> None:
    limit = 40 * (2 * 2 * 2 * 16 * 2 * 64)  # blocks of 64 positions: layers, heads, keys and values, dim, bytes
    model = tiny.load("Q4_1", threads=1, kv_memory=limit)
    assert model.kv.limit == limit
    assert model.kv.bytes_for(64) == limit // 40 == 64 * model.info.kv_bytes_per_position
    rows = [model.kv.alloc(64 * 10) for _ in range(4)]
    assert model.kv.bytes == limit
    with pytest.raises(MemoryLimitError, match="kv_memory"):
        model.kv.alloc(1)
    for row in rows:
        model.kv.free(row)
    assert model.kv.bytes == 0
    assert model.kv.rows == []


def test_memory_is_taken_up_as_rows_grow(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc(4000)
    assert model._handle.kv_held == 0
    feed(model, row, np.zeros(65, np.int32))
    assert model._handle.kv_held == model.kv.bytes_for(65)


def test_misuse_is_refused(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc(10)
    feed(model, row, [1, 2, 3])
    for call in (
        lambda: model.kv.truncate(row, 4),
        lambda: model.kv.truncate(row, -1),
        lambda: model.kv.compact(row, 1, np.array([1, 0], np.int32)),
        lambda: model.kv.compact(row, 1, np.array([2], np.int32)),
        lambda: model.kv.compact(row, 9, np.array([], np.int32)),
        lambda: model.kv.fork(row, row, 1),
        lambda: model.kv.alloc(0),
        lambda: model.kv.alloc(1 << 40),
        lambda: feed(model, row, np.zeros(8, np.int32)),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(IndexError, match="not in use"):
        model.kv.length(5)
    assert model.kv.length(row) == 3


def test_a_full_length_row(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1, max_length=20)
    assert model.info.max_length == 20
    row = model.kv.alloc(40)
    feed(model, row, np.zeros(20, np.int32))
    with pytest.raises(ValueError, match="beyond the model's 20"):
        feed(model, row, [0])


@pytest.mark.parametrize(
    "change",
    [
        {"token": [100]}, {"token": [-1]}, {"row": [3]}, {"position": [1]}, {"parent": [0]}, {"parent": [-2]},
        {"starts": [0, 2]}, {"starts": [0]}, {"wanted": [1]}, {"wanted": [-1]}, {"layers": 3}, {"taps": (2,)},
        {"row": [0, 0]},
    ],
)  # fmt: skip
def test_malformed_batches_change_nothing(change: dict[str, Any], tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc(10)
    good: dict[str, Any] = {
        "token": [1],
        "row": [row],
        "position": [0],
        "parent": [-1],
        "starts": [0, 1],
        "wanted": [0],
    }
    arrays = {k: v if k in ("taps", "layers") else np.array(v, np.int32) for k, v in (good | change).items()}
    with pytest.raises((ValueError, IndexError)):
        model.forward(Batch(**arrays))
    assert model.kv.length(row) == 0
    model.forward(Batch(**{k: np.array(v, np.int32) for k, v in good.items()}))


def test_taps_and_short_forwards(tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("F32", threads=2, sizes={"layers": 4})
    tokens = rng.integers(0, 100, 140).astype(np.int32)
    row, other = model.kv.alloc(200), model.kv.alloc(200)
    at = np.arange(140, dtype=np.int32)
    full = model.forward(Batch.pack([row], [tokens], [0], [True], taps=(0, 3, 1)))
    short = model.forward(Batch.pack([other], [tokens], [0], [True], taps=(1,), layers=2))
    assert full.taps(at).shape == (140, 3, 64)
    assert np.array_equal(full.taps(at)[:, 2], short.taps(at)[:, 0])
    assert not np.array_equal(full.logits(at), short.logits(at))
    with pytest.raises(IndexError):
        full.taps(np.array([140], np.int32))
    model.kv.truncate(row, 139)  # a narrow forward takes another way to its taps
    again = model.forward(Batch.pack([row], [tokens[139:]], [139], [True], taps=(0, 3, 1)))
    assert np.array_equal(again.taps(np.array([0], np.int32)), full.taps(at[139:]))


def test_only_wanted_positions_have_logits(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc(10)
    output = model.forward(Batch.pack([row], [np.arange(5, dtype=np.int32)], [0], [False]))
    with pytest.raises(IndexError, match="not wanted"):
        output.logits(np.array([4], np.int32))


def test_closing(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=2)
    model.close()
    model.close()
    with pytest.raises(ValueError, match="closed"):
        model.forward(Batch.pack([0], [np.zeros(1, np.int32)], [0], [True]))
