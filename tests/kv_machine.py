"""The contract of a KV cache (models/base.py), under random use: what a model says from it, and the memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outpace.models.base import Batch
from tests.native.native_helpers import feed

# A tree of which several paths end at different depths, and two of them.
TREE = [-1, 0, 0, 1, 1, 2, 3, 6, -1]
PATHS = ([0, 2, 5], [0, 1, 3, 6], [8], [])


class Memory:
    """What the cache should hold, as plainly as can be: blocks are numbers, and a row is a list of them."""

    def __init__(self, block: int) -> None:
        self.block = block  # positions
        self.rows: dict[int, list[int]] = {}
        self._next = 0

    def shared(self, block: int) -> bool:
        return sum(block in blocks for blocks in self.rows.values()) > 1

    def new(self) -> int:
        self._next += 1
        return self._next

    def growth(self, row: int, length: int, n: int) -> int:
        blocks = self.rows[row]
        copy = n > 0 and length % self.block > 0 and self.shared(blocks[-1])
        return -(-(length + n) // self.block) - len(blocks) + copy

    def grow(self, row: int, length: int, n: int) -> None:
        blocks = self.rows[row]
        if n > 0 and length % self.block > 0 and self.shared(blocks[-1]):
            blocks[-1] = self.new()
        while len(blocks) * self.block < length + n:
            blocks.append(self.new())

    def write(self, row: int, first: int, last: int) -> None:
        blocks = self.rows[row]
        for i in range(first // self.block, -(-last // self.block)):
            if self.shared(blocks[i]):
                blocks[i] = self.new()

    def cut(self, row: int, length: int) -> None:
        del self.rows[row][-(-length // self.block) :]

    def used(self) -> int:
        return len({block for blocks in self.rows.values() for block in blocks})

    def exclusive(self, rows: set[int]) -> int:
        kept = {block for row, blocks in self.rows.items() if row not in rows for block in blocks}
        return len({block for row in rows for block in self.rows[row]} - kept)


def machine(
    model: Any,
    reference: Any,
    sizes: Sequence[int],
    longest: int,
    same: Callable[[Any, Any], bool] = np.array_equal,
    poison: Callable[[], None] = lambda: None,
    windows: bool = False,
) -> type[RuleBasedStateMachine]:
    """``reference``: the same model with a cache of its own, whose only row shares nothing; ``sizes``: what a row grows
    by; ``poison``: makes what no row holds unreadable; ``windows``: rows give back what no window reaches, so that they
    can be cut in some places only, and take at most what ``bytes_for`` says beside their last forward's."""
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
            self.memory = Memory(model.kv.block)
            self.behind: dict[int, int] = {}  # where a row's last forward began

        def pick(self, i: int) -> int:
            return sorted(self.tokens)[i % len(self.tokens)]

        @rule()
        @precondition(lambda self: len(self.tokens) < 4)
        def alloc(self) -> None:
            row = model.kv.alloc()
            assert row not in self.tokens
            self.tokens[row], self.memory.rows[row], self.behind[row] = [], [], 0

        @rule(
            start=st.integers(0, 9),
            count=st.integers(1, 4),
            more=st.lists(st.sampled_from(sizes), min_size=4, max_size=4),
        )
        @precondition(lambda self: self.tokens)
        def feed(self, start: int, count: int, more: list[int]) -> None:
            chosen = sorted(self.tokens)[start % len(self.tokens) :][:count]
            batch = []
            for row, size in zip(chosen, more, strict=False):
                n = min(size, longest - len(self.tokens[row]))
                if n > 0:
                    batch.append((row, [(7 * row + 3 * i + len(self.tokens[row])) % 97 for i in range(n)]))
            if not batch:
                return
            lengths = [len(self.tokens[row]) for row, _ in batch]
            fed = [np.array(new, np.int32) for _, new in batch]
            most = sum(model.kv.growth(row, len(new)) for row, new in batch)
            before = model.kv.bytes
            output = model.forward(Batch.pack([row for row, _ in batch], fed, lengths, [True] * len(batch)))
            assert model.kv.bytes - before <= most
            for (row, new), length in zip(batch, lengths, strict=True):
                self.behind[row] = length
                self.memory.grow(row, length, len(new))
                self.tokens[row] += new
            ends = np.cumsum([len(new) for new in fed]).astype(np.int32) - 1
            for (row, _), logits in zip(batch, output.logits(ends), strict=True):
                assert same(logits, expected(self.tokens[row]))

        @rule(i=st.integers(0, 9), path=st.sampled_from(PATHS), other=st.sampled_from([None, *PATHS]))
        @precondition(lambda self: self.tokens)
        def tree(self, i: int, path: list[int], other: list[int] | None) -> None:
            """A tree's kept path; ``other``: that of a fork made in between, so that both share what they compact."""
            row = self.pick(i)
            start = len(self.tokens[row])
            if start + len(TREE) > longest:
                return
            nodes = [(11 * j + start) % 97 for j in range(len(TREE))]
            feed(model, row, nodes, parents=TREE)
            self.behind[row] = start
            self.memory.grow(row, start, len(nodes))
            kept = [(row, path)]
            if other is not None and len(self.tokens) < 4:
                copy = model.kv.alloc()
                model.kv.fork(row, copy, start + len(nodes))
                self.tokens[copy], self.memory.rows[copy] = list(self.tokens[row]), list(self.memory.rows[row])
                self.behind[copy] = start
                kept.append((copy, other))
            for its, keep in kept:
                model.kv.compact(its, start, np.array(keep, np.int32))
                moved = [j for j, node in enumerate(keep) if node != j]
                if moved:
                    self.memory.write(its, start + moved[0], start + len(keep))
                self.tokens[its] += [nodes[j] for j in keep]
                self.memory.cut(its, len(self.tokens[its]))

        def reached(self, row: int, n: int) -> int:
            """Where a row can be cut at n positions or before; always from a little before its last forward on."""
            n = min(n, len(self.tokens[row]))
            found = model.kv.reachable(row, n)
            assert found == n or (windows and 0 <= found < n < self.behind[row])
            return int(found)

        @rule(i=st.integers(0, 9))
        @precondition(lambda self: self.tokens)
        def keep(self, i: int) -> None:
            row = self.pick(i)
            model.kv.keep(row)
            assert model.kv.reachable(row, len(self.tokens[row])) == len(self.tokens[row])

        @rule(i=st.integers(0, 9), n=st.integers(0, longest))
        @precondition(lambda self: self.tokens)
        def truncate(self, i: int, n: int) -> None:
            row = self.pick(i)
            n = self.reached(row, n)
            model.kv.truncate(row, n)
            del self.tokens[row][n:]
            self.memory.cut(row, n)

        @rule(i=st.integers(0, 9), n=st.integers(0, longest))
        @precondition(lambda self: 0 < len(self.tokens) < 4)
        def fork(self, i: int, n: int) -> None:
            src, dst = self.pick(i), model.kv.alloc()
            n = self.reached(src, n)
            model.kv.fork(src, dst, n)
            self.behind[dst] = min(n, self.behind[src])
            self.tokens[dst] = self.tokens[src][:n]
            self.memory.rows[dst] = list(self.memory.rows[src])
            self.memory.cut(dst, n)

        @rule(i=st.integers(0, 9), poisoned=st.booleans())
        @precondition(lambda self: self.tokens)
        def free(self, i: int, poisoned: bool) -> None:
            row = self.pick(i)
            model.kv.free(row)
            del self.tokens[row], self.memory.rows[row]
            if poisoned:
                poison()

        @invariant()
        def consistent(self) -> None:
            model.kv.check()
            assert model.kv.rows == sorted(self.tokens)
            assert all(model.kv.length(row) == len(tokens) for row, tokens in self.tokens.items())
            if windows:
                most = sum(model.kv.bytes_for(len(each)) + 3 * unit for each in self.tokens.values())
                assert 0 <= model.kv.bytes <= min(most, self.memory.used() * unit)
                assert model.kv.exclusive(sorted(self.tokens)) == model.kv.bytes
                return
            assert model.kv.bytes == self.memory.used() * unit
            for row, tokens in self.tokens.items():
                for n in (0, 1, model.kv.block, 100):
                    assert model.kv.growth(row, n) == self.memory.growth(row, len(tokens), n) * unit
            for chosen in (set(list(self.tokens)[:1]), set(list(self.tokens)[1:3]), set(self.tokens)):
                assert model.kv.exclusive(sorted(chosen)) == self.memory.exclusive(chosen) * unit

        def teardown(self) -> None:
            """Whatever became of the rows, each has its own tokens' keys and values."""
            poison()
            for row, tokens in self.tokens.items():
                assert same(feed(model, row, [5])[-1], expected([*tokens, 5]))
            model.kv.check()

    return Rows
