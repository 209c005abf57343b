"""What ``_native.Rows`` does without a model: drafts are put and checked, and the batch is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.common.arrays import I32
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.native.output import describe
from outpace.params import SamplingParams
from tests.oracles.packing import draft_fault, pack_step

VOCAB = 9


def ints(values: Any) -> I32:
    return np.array(values, np.int32)


def stepped(
    committed: list[list[int]], most: list[int], chunks: Sequence[tuple[list[int], int, int, bool]] = ()
) -> Any:
    """A step of rows whose drafter is in Python, where it is to draft; row i is 10 + i in the cache."""
    step = _native.Rows(VOCAB, [], "target")
    chooser = describe(Chooser(SamplingParams(), Noise(0), 0), [])

    def row(number: int) -> Any:
        return step.row(
            10 + number, number, 1, False, "drafter", None, (), False, True, False, False, "coupled", False, chooser,
            None, False, True,
        )  # fmt: skip

    rows = [
        (row(i), np.array(tokens, np.int32).data, len(tokens), n)
        for i, (tokens, n) in enumerate(zip(committed, most, strict=True))
    ]
    given = [(row(len(rows) + j), np.array(tokens, np.int32), *rest) for j, (tokens, *rest) in enumerate(chunks)]
    step.begin(None, rows, given)
    assert step.propose() == ([i for i, n in enumerate(most) if n], [])
    return step


@st.composite
def drafts(draw: st.DrawFn, b: int, *, wrong: bool) -> Drafts:
    w = draw(st.integers(0, 4))
    low, high = (-1, VOCAB) if wrong else (0, VOCAB - 1)
    tokens = np.array([[draw(st.integers(low, high)) for _ in range(w)] for _ in range(b)], np.int32).reshape(b, w)
    above = [[draw(st.integers(-1 - wrong, n - (not wrong))) for n in range(w)] for _ in range(b)]
    parents = draw(st.sampled_from([None, np.array(above, np.int32).reshape(b, w)]))
    widths = np.array([draw(st.integers(-1 if wrong else 0, w + wrong)) for _ in range(b)], np.int32)
    return Drafts(tokens, widths, parents)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_what_cannot_be_verified_is_refused(data: st.DataObject) -> None:
    most = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    found = data.draw(drafts(len(most), wrong=True))
    step = stepped([[1, 2]] * len(most), most)
    if draft_fault(found.tokens, found.widths, found.parents, most, VOCAB):
        with pytest.raises(ValueError, match=r"nodes|vocabulary of 9|before its parent"):
            step.put(list(range(len(most))), found)
    else:
        step.put(list(range(len(most))), found)
        kept = Drafts(*step.drafts(True))
        for i in range(len(most)):
            mine, its = kept.row(i), found.row(i)
            assert (mine.tokens, mine.parents) == (its.tokens, its.parents)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_step_is_packed_as_its_oracle_packs_it(data: st.DataObject) -> None:
    committed = data.draw(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=5), max_size=4))
    chunks = []
    for _ in range(data.draw(st.integers(0, 3))):
        tokens = data.draw(st.lists(st.integers(0, 8), min_size=2, max_size=7))
        first = data.draw(st.integers(0, len(tokens) - 2))
        chunks.append((tokens, first, data.draw(st.integers(1, len(tokens) - 1 - first)), data.draw(st.booleans())))
    found = data.draw(drafts(len(committed), wrong=False))
    step = stepped(committed, [5] * len(committed), chunks)
    if committed:
        step.put(list(range(len(committed))), found)
    step.trim()
    step.pack()
    expected = pack_step(
        list(range(10, 10 + len(committed) + len(chunks))),
        [*(len(tokens) - 1 for tokens in committed), *(first for _, first, _, _ in chunks)],
        [tokens[-1] for tokens in committed], found.tokens, found.widths, found.parents,
        [np.array(tokens[first : first + count], np.int32) for tokens, first, count, _ in chunks],
        [wanted for *_, wanted in chunks],
    )  # fmt: skip
    for name, mine in zip(("token", "row", "position", "parent", "starts", "wanted"), step.batch, strict=True):
        its = getattr(expected, name)
        assert mine.dtype == its.dtype == np.int32
        assert mine.tolist() == its.tolist()


def test_verdicts_of_a_model_in_python() -> None:
    step = stepped([[1, 2], [3], [4]], [3, 3, 0])
    step.put(
        [0, 1],
        Drafts(
            np.array([[5, 6, 7], [5, 6, 0]], np.int32),
            np.array([3, 2], np.int32),
            np.array([[-1, -1, 1], [-1, 0, -1]], np.int32),
        ),
    )
    step.trim()
    step.decide_all(
        Verdicts(
            np.array([[6, 7, 1], [0, 0, 0], [8, 0, 0]], np.int32),
            np.array([2, -1, 0], np.int32),
            np.array([[1, 2], [0, 0], [0, 0]], np.int32),
        )
    )
    assert step.undecided == [1]
    assert step.verdict(0) == ([6, 7, 1], [1, 2])
    assert step.verdict(1) == ([], [])
    with pytest.raises(ValueError, match="leaves the draft"):
        step.decide(1, [6, 1], [1])
    with pytest.raises(ValueError, match="one token more"):
        step.decide(1, [5, 6], [0, 1])
    step.decide(1, [5, 6, 1], [0, 1])
    assert step.undecided == []
    assert [(i, row, at, slots.tolist(), *rest) for i, row, at, slots, *rest in step.paths] == [
        (0, 10, 1, [0, 2, 3], False, True), (1, 11, 0, [0, 1, 2], True, False)
    ]  # fmt: skip
    rows = step.outcome()
    assert [row[:3] for row in rows] == [
        ([6, 7, 1], [1, 2], ["draft", "draft", "target"]),
        ([5, 6, 1], [0, 1], ["draft", "draft", "target"]),
        ([8], [], ["target"]),
    ]
    assert [row[4] for row in rows] == [2, 2, 0]


def test_what_must_follow_comes_first_and_nodes_are_dropped_with_their_parents() -> None:
    step = stepped([[1, 2]], [4])
    step.put([0], Drafts(ints([[5, 6, 7]]), ints([3]), ints([[-1, -1, 1]])))
    step.lead(0, [6, 8], "grammar")
    kept = Drafts(*step.drafts(False))
    assert kept.tokens[0].tolist() == [6, 8, 5, 7]
    assert kept.parents is not None
    assert kept.parents[0].tolist() == [-1, 0, -1, 0]
    assert kept.sources_of(0) == ["grammar", "grammar", "draft", "draft"]
    step.keep(0, [0, 3])
    assert step.draft(0)[:2] == ([6, 7], [-1, 0])
    with pytest.raises(ValueError, match="must ascend"):
        step.keep(0, [1, 0])
