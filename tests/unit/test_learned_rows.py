"""What a learned drafter's rows know of text that another row computed: samples, running rows and kept ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import Engine, SamplingParams, _native
from outpace.drafters.learned.drafter import Entries, LearnedDrafter
from tests.toy import ToyModel
from tests.toy_head import ToyHead

VOCAB = 6
TEXT = np.random.default_rng(3).integers(0, VOCAB, 60).tolist()
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True)


def engine(prefix_rows: int = 2) -> tuple[Engine, ToyHead]:
    target = ToyModel(VOCAB, seed=1, max_length=96)
    head = ToyHead(ToyModel(VOCAB, seed=1), range(VOCAB))
    drafter = LearnedDrafter(head, (0, 2), "eagle", VOCAB)
    return Engine(target, drafter=drafter, size=4, prefix_rows=prefix_rows, prefill_chunk=16), head


def positions(head: ToyHead) -> list[list[int]]:
    return [[position for _, position, _ in head.rows[row]] for row in sorted(head.rows)]


@pytest.mark.parametrize("second", [[*TEXT[:40], *[5, 1, 4, 4]], TEXT[:40], [*TEXT[:33], (TEXT[33] + 1) % VOCAB, 2, 3]])
def test_a_kept_row_spares_a_drafter_the_prompt_too(second: list[int]) -> None:
    """Also where texts part in its middle: the token where they do is the new text's own."""
    served, head = engine()
    served.generate(TEXT[:40], PARAMS)
    assert len(positions(head)[0]) >= 39
    head.calls.clear()
    served.add(second, PARAMS)
    for _ in range(8):
        served.step()
        served.check()
        if not served.idle and any(kind == "draft" for kind, _ in head.calls[-1:]):
            break
    new = positions(head)[-1]
    assert new == list(range(len(new)))
    assert len(new) >= len(second) - 1
    while not served.idle:
        served.step()
        served.check()
    served.close()
    assert head.rows == {}


def test_samples_draft_from_one_reading_of_the_prompt() -> None:
    served, head = engine(prefix_rows=0)
    served.add(TEXT, PARAMS.with_(n=3))
    while not served.idle:
        served.step()
        served.check()
        assert all(its == list(range(len(its))) for its in positions(head))
    assert served.stats.accepted > 0
    served.close()


def test_a_kept_row_without_memory_goes() -> None:
    served, head = engine(prefix_rows=1)
    for stem in (TEXT[:30], TEXT[30:], TEXT[10:40]):
        served.generate(stem, PARAMS)
        served.check()
        assert len(head.rows) == 1
    served.close()
    assert head.rows == {}


class Kept:
    """A row's entries: number, token and states of all; how many are read, and from which on states are kept."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int, Any]] = []
        self.read, self.first = 0, 0

    def copy(self, before: int) -> Kept:
        made = Kept()
        made.all = [entry for entry in self.all if entry[0] < before]
        made.read, made.first = min(self.read, len(made.all)), min(self.first, len(made.all))
        return made


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_entries_are_counted_alike_wherever_their_states_lie(data: st.DataObject) -> None:
    """In C++ (native targets), as numpy and as torch tensors (others): what waits, and its states, in any order of
    appends, reads, forks and ends."""
    rng = np.random.default_rng(0)
    inside, beside, tensors = _native.Entries(6), Entries(), Entries()
    rows: dict[int, Kept] = {}
    for _ in range(data.draw(st.integers(1, 14))):
        what = data.draw(st.sampled_from(["append", "append", "read", "unread", "fork", "retire", "release"]))
        row = data.draw(st.sampled_from(sorted(rows))) if rows else 0
        if what == "append" or not rows:
            row = data.draw(st.integers(0, 3))
            kept = rows.setdefault(row, Kept())
            first = (kept.all[-1][0] + 1 if kept.all else 0) + data.draw(st.integers(0, 2))
            n = data.draw(st.integers(1, 5))
            tokens, states = rng.integers(0, 99, n).astype(np.int32), rng.normal(size=(n, 2, 3)).astype(np.float32)
            kept.all += zip(range(first, first + n), tokens.tolist(), states, strict=True)
            inside.append(row, first, tokens, states)
            beside.append(row, first, tokens, states)
            tensors.append(row, first, tokens, torch.from_numpy(states))
        elif what == "read":
            n = data.draw(st.integers(0, len(rows[row].all) - rows[row].read))
            rows[row].read += n
            rows[row].first = rows[row].read - 1 if n else rows[row].first
            for each in (inside, beside, tensors):
                each.has_read(row, n)
        elif what == "unread":
            kept = rows[row]
            can = kept.read == len(kept.all) > kept.first
            assert [each.unread_last(row) for each in (inside, beside, tensors)] == [can] * 3
            kept.read -= can
        elif what == "fork":
            dst, before = 4 + (row == 4), data.draw(st.integers(0, 12))
            rows[dst] = rows[row].copy(before)
            for each in (inside, beside, tensors):
                each.release(dst)
                each.fork(row, dst, before)
        elif what == "retire":
            rows[row].first = max(rows[row].first, rows[row].read)
            for each in (inside, beside, tensors):
                each.retire(row)
        else:
            del rows[row]
            for each in (inside, beside, tensors):
                each.release(row)
        for each in (inside, beside, tensors):
            assert each.rows() == sorted(rows)
            for row, kept in rows.items():
                waits = kept.all[kept.read :]
                assert (each.read(row), each.waiting(row)) == (kept.read, len(waits))
                assert each.end(row) == (kept.all[-1][0] + 1 if kept.all else 0)
                assert each.kept(row) == len(kept.all) - kept.first
                tokens, at = each.unread(row, len(waits))
                assert (at.tolist(), tokens.tolist()) == ([e[0] for e in waits], [e[1] for e in waits])
                if waits:
                    assert np.array_equal(each.states(row, len(waits), 2), np.stack([e[2] for e in waits]))
