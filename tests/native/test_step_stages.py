"""What ``_native.Rows`` does without a model: drafts are put and checked, and the batch is packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Tiny

from outpace import _native
from outpace.common.arrays import I32
from outpace.control.adaptive import Adaptive
from outpace.control.cost import Cost
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.native.output import describe
from outpace.params import SamplingParams
from tests.oracles.packing import draft_fault, pack_step

VOCAB, FIRST = 9, 10  # the cache's row of a step's first


def ints(values: Any) -> I32:
    return np.array(values, np.int32)


def stepped(
    committed: list[list[int]],
    most: list[int],
    chunks: Sequence[tuple[list[int], int, int, bool]] = (),
    policy: Any = None,
) -> Any:
    """A step of rows whose drafter is in Python, where it is to draft; row i is ``FIRST`` + i in the cache."""
    step = _native.Rows(VOCAB, [], "target")
    rows = [
        (row_of(step, i), np.array(tokens, np.int32).data, len(tokens), n)
        for i, (tokens, n) in enumerate(zip(committed, most, strict=True))
    ]
    given = [
        (row_of(step, len(rows) + j), np.array(tokens, np.int32), *rest) for j, (tokens, *rest) in enumerate(chunks)
    ]
    step.begin(policy, rows, given)
    left, failed = step.propose()
    assert failed == []
    assert policy or left == [i for i, n in enumerate(most) if n]
    return step


def row_of(step: Any, number: int) -> Any:
    chooser = describe(Chooser(SamplingParams(), Noise(0), 0), [])
    return step.row(
        FIRST + number, number, 1, False, "drafter", None, (), False, True, False, False, "coupled", False, chooser,
        None, False, True, False, 999,
    )  # fmt: skip


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


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "propose": lambda step, model: step.propose(),
    "put": lambda step, model: step.put([0], Drafts(ints([[1, 2, 3]]), ints([3]))),
    "put nowhere": lambda step, model: step.put([7], Drafts(ints([[1]]), ints([1]))),
    "lead": lambda step, model: step.lead(0, [1, 2], "grammar"),
    "lead nowhere": lambda step, model: step.lead(0, [VOCAB], "grammar"),
    "keep": lambda step, model: step.keep(0, [0]),
    "keep an orphan": lambda step, model: step.keep(0, [1]),
    "drop": lambda step, model: step.drop([0]),
    "trim": lambda step, model: step.trim(),
    "pack": lambda step, model: step.pack(),
    "forward": lambda step, model: step.forward(model),
    "verify": lambda step, model: step.verify(step.forward(model)),
    "settle": lambda step, model: step.settle(model),
    "decide": lambda step, model: step.decide(0, [1, 2, 3], [0, 1]),
    "decide nowhere": lambda step, model: step.decide(1, [1, 2], [5]),
    "observe": lambda step, model: step.observe([(0, 1), (5, -1)]),
    "learn": lambda step, model: step.learn(0.1, 0.1),
    "end": lambda step, model: step.end(),
    "look": lambda step, model: (
        step.outcome(), step.drafts(True), step.verdicts(), step.decisions(), step.paths, step.sizes, step.undecided,
        step.starts, step.batch, step.draft(0), step.verdict(0),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A native model of 9 tokens, with the rows that steps of two rows name."""
    with Tiny() as tiny:
        loaded = tiny.load("Q8_0", sizes={"vocab": VOCAB}, threads=1)
        for _ in range(FIRST + 2):
            loaded.kv.alloc()
        yield loaded.native
        loaded.close()


@settings(deadline=None, max_examples=400)
@given(
    calls=st.lists(st.sampled_from(sorted(CALLS)), min_size=3, max_size=14),
    rows=st.integers(1, 2),
    learns=st.booleans(),
)
def test_calls_in_any_order_are_refused_or_do_what_they_say(
    model: Any, calls: list[str], rows: int, learns: bool
) -> None:
    """Whatever is called when, nothing is read or written that is not the step's: a crash would be the finding."""
    policy = Adaptive(Cost((1, 4), (1.0, 1.2))).native if learns else None
    for row in range(rows):
        model.kv_truncate(FIRST + row, 0)
    step = stepped([[1]] * rows, [4] * rows, policy=policy)
    for call in calls:
        with suppress(ValueError, IndexError):
            CALLS[call](step, model)
        drafts, verdicts = Drafts(*step.drafts(True)), Verdicts(*step.verdicts())
        for i in range(len(drafts.widths)):
            draft = drafts.row(i)
            assert all(-1 <= parent < n for n, parent in enumerate(draft.parents))
            assert all(0 <= token < VOCAB for token in draft.tokens)
            assert verdicts.accepted[i] <= len(draft)
    step.end()


def test_a_step_takes_its_own_rows_results_and_policy(model: Any) -> None:
    one, other = stepped([[1]], [4]), stepped([[1], [3]], [4, 4])
    tokens = ints([1]).data
    with pytest.raises(ValueError, match="a row of another Rows"):
        one.begin(None, [(row_of(other, 0), tokens, 1, 4)], [])
    mine = row_of(one, 0)
    with pytest.raises(ValueError, match="a row is in a step once"):
        one.begin(None, [(mine, tokens, 1, 4)] * 2, [])
    policy = Adaptive(Cost((1, 4), (1.0, 1.2))).native
    one.begin(policy, [(mine, tokens, 1, 4)], [])
    other.begin(policy, [(row_of(other, i), tokens, 1, 4) for i in range(2)], [])
    with pytest.raises(ValueError, match="another step"):
        one.trim()
    for row in range(2):
        model.kv_truncate(FIRST + row, 0)
    result = other.forward(model)
    one.pack()
    with pytest.raises(ValueError, match="a result of another batch"):
        one.verify(result)
    with pytest.raises(ValueError, match="packed or decided"):
        other.put([0], Drafts(ints([[1]]), ints([1])))
