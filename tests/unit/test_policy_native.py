"""The policy at its seam: what it may never do, whatever it thinks, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.control.adaptive import Adaptive
from outpace.control.auto import AUTO_SIZE
from outpace.control.cost import Cost
from outpace.control.policy import Load
from outpace.drafters.base import DraftCost, RowView
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts
from tests.simulated import CPU, DEAR, FREE, Machine, chains, run, text, verdicts, view

DEARER = Cost((1, 64), (1.0, 190.0))  # a node costs three steps, as a table says that was measured beside other work
KINDS = [DraftCost(), DraftCost(levels="a"), DraftCost(levels="a", nodes=True), DraftCost(trims=False)]
SECONDS = {"draft": 0.01, "target": 1.0, "verify": 0.0, "other": 0.0}


def tree(rng: np.random.Generator, size: int, chain: bool) -> Draft:
    made = Draft()
    for i in range(int(rng.integers(0, size + 1))):
        parent = i - 1 if chain else int(rng.integers(-1, i)) if i else -1
        above = made.gains[parent] if parent >= 0 else 1.0
        made.add(i, parent, above * float(rng.choice([0.0, 0.03, 0.5, 0.9, 1.0])), int(rng.integers(0, 2)))
    return made


def verdict(rng: np.random.Generator, drafts: Drafts, i: int, level: float) -> Verdict:
    draft, path, at = drafts.row(i), [], -1
    while children := draft.children(at):
        if rng.random() > level:
            break
        at = children[int(rng.integers(0, len(children)))]
        path.append(at)
    return Verdict(np.zeros(len(path) + 1, np.int32), np.array(path, np.int32))


def drive(policy: Adaptive, seed: int, steps: int, most_rows: int, shape: int) -> list[Any]:
    """Everything that a policy says in a run of rows that come and go, leave in the middle of a step, and steps that
    fail; with what must hold of it."""
    rng = np.random.default_rng(seed)
    said: list[Any] = []
    rows: list[RowView] = []
    level, fresh = 0.5, 0
    for _ in range(steps):
        while not rows or (len(rows) < most_rows and rng.random() < 0.2):
            fresh += 1
            kind = KINDS[int(rng.integers(0, 4)) if rng.random() < 0.5 else 0]
            acceptance = "rejection" if rng.random() < 0.2 else "coupled"
            t, adaptive = float(rng.choice([0.0, 0.5, 1.0])), bool(rng.random() < 0.9)
            free = next(n for n in range(99) if n not in [v.row for v in rows])
            rows.append(
                view(free, fresh, cost=kind, acceptance=acceptance, t=t, adaptive=adaptive, drafter=kind.levels or "x")
            )
        if rng.random() < 0.02:
            level = float(rng.random())
        load = Load(rng.integers(1, 9000, len(rows)).tolist(), int(rng.choice([0, 0, 0, 5, 64, 512])))
        most = [int(rng.integers(0, AUTO_SIZE + 1)) for _ in rows]
        sizes = policy.plan(rows, most, load)
        assert all(0 <= level <= n <= m for level, n, m in zip(sizes.levels, sizes.nodes, most, strict=True))
        assert all(v.adaptive or n == m for v, n, m in zip(rows, sizes.nodes, most, strict=True))
        said.append(tuple(map(tuple, sizes)))
        if rng.random() < 0.1:
            continue  # the step failed, and is planned again
        drafts = Drafts.of(
            [tree(rng, size, shape == 0 or (shape == 2 and rng.random() < 0.5)) for size in sizes.nodes], ("a", "b")
        )
        if rng.random() < 0.1:
            drafts = Drafts(drafts.tokens, drafts.widths, drafts.parents, sources=("a",))
        if rng.random() < 0.2:
            q = np.broadcast_to(drafts.tokens[..., None].astype(float), (*drafts.tokens.shape, 2))
            drafts = replace(drafts, q=np.ascontiguousarray(q))
        kept, decisions = policy.trim(rows, drafts, load)
        check(rows, drafts, kept)
        assert [d.size for d in decisions] == kept.widths.tolist()
        assert all(d.why for d in decisions)
        said.append((kept.tokens.tolist(), kept.widths.tolist(), [tuple(d) for d in decisions]))
        if rng.random() < 0.1:
            continue
        result = Verdicts.of([verdict(rng, kept, i, level) for i in range(len(rows))])
        views = list(rows)
        while rows and rng.random() < 0.1:  # who has ended leaves before the policy learns
            policy.release(rows.pop(int(rng.integers(0, len(rows)))).row)
        seconds = {name: float(rng.random()) * scale for name, scale in
                   (("other", 0.1), ("draft", 0.1), ("target", 3.0), ("verify", 0.1))}  # fmt: skip
        policy.learn(views, kept, result, seconds)
    for last in rows:
        policy.release(last.row)
    assert len(policy) == 0, "a released row leaves nothing"
    return said


def check(rows: list[RowView], drafts: Drafts, kept: Drafts) -> None:
    """What is kept of each draft is a part of it, with the parents of its nodes (a token is its node's index)."""
    for i, row in enumerate(rows):
        before, after = drafts.row(i), kept.row(i)
        nodes = after.tokens
        assert nodes == sorted(set(nodes))
        assert set(nodes) <= set(before.tokens)
        for n, node in enumerate(nodes):
            parent = after.parents[n]
            assert before.parents[node] == (nodes[parent] if parent >= 0 else -1)
        assert kept.sources_of(i) == [drafts.sources_of(i)[node] for node in nodes]
        if after.q is not None:
            assert (after.q[:, 0] == nodes).all()
        sampled = row.acceptance == "rejection" and drafts.q is not None
        if not row.adaptive or not row.cost.trims or sampled:
            assert len(after) == len(before), "verified whole"


@given(
    st.integers(0, 2**32),
    st.sampled_from([FREE, CPU, DEAR, DEARER]),
    st.integers(1, 120),
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from([None, 1.0, 1.5]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_its_promises_hold_and_it_repeats(
    seed: int, cost: Cost, steps: int, rows: int, shape: int, stretch: float | None
) -> None:
    first, again = (drive(Adaptive(cost, stretch=stretch), seed, steps, rows, shape) for _ in range(2))
    assert first == again


def test_explaining_changes_no_decision_and_says_what_each_node_is_worth() -> None:
    plain, explained = Adaptive(CPU), Adaptive(CPU, explain=True)
    outcomes = [run(policy, Machine(CPU), [text(0)], steps=100) for policy in (plain, explained)]
    assert outcomes[0].widths == outcomes[1].widths
    drafts = chains([4], [0.8])
    explained.plan([view(7)], [15], Load([5]))
    _, (decision,) = explained.trim([view(7)], drafts, Load([5]))
    assert len(decision.worth) == 4
    assert all(0 <= w <= 1 for w in decision.worth)
    assert "takes the time of" in decision.why
    assert plain.explain is False


def test_state_is_bounded() -> None:
    policy = Adaptive(CPU)
    rng = np.random.default_rng(0)
    for step in range(3000):  # rows come and go, batches and contexts of all sizes
        rows = [view(i, 10_000 * step + i) for i in range(int(rng.integers(1, 40)))]
        policy.plan(rows, [3] * len(rows), Load(rng.integers(1, 100_000, len(rows)).tolist()))
        kept, _ = policy.trim(rows, chains([1] * len(rows), [0.5] * len(rows)), Load([1] * len(rows)))
        policy.learn(rows, kept, verdicts([0] * len(rows)), SECONDS)
    assert len(policy) <= 40
    assert len(policy.learnt().curves) <= 48


def test_a_row_that_changes_hands_without_release_begins_anew() -> None:
    policy = Adaptive(CPU)
    for _ in range(3):
        policy.plan([view(0, 1)], [5], Load([9]))
        kept, _ = policy.trim([view(0, 1)], chains([0], [0.5]), Load([9]))
        policy.learn([view(0, 1)], kept, verdicts([0]), SECONDS)
    policy.plan([view(0, 2, adaptive=False)], [5], Load([9]))
    assert len(policy) == 1
    assert policy.plan([view(0, 2, adaptive=False)], [5], Load([9])).nodes == [5]


def test_seconds_that_no_clock_gives_do_no_harm() -> None:
    policy = Adaptive(CPU)
    for target in (0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300):
        policy.plan([view()], [5], Load([9]))
        kept, _ = policy.trim([view()], chains([3], [0.5]), Load([9]))
        policy.learn([view()], kept, verdicts([0]), {**SECONDS, "target": target})
    assert run(policy, Machine(CPU), [text(1)]).speedup > 0.9


def test_nonsense_is_refused() -> None:
    policy = Adaptive(CPU)
    with pytest.raises(ValueError, match="differ in length"):
        policy.plan([view()], [3, 4], Load([5]))
    policy.plan([view()], [3], Load([5]))
    with pytest.raises(ValueError, match="rows of the last plan"):
        policy.trim([], Drafts.empty(0), Load([]))
    wrong = Drafts(np.zeros((1, 2), np.int32), np.array([2], np.int32), np.array([[0, -1]], np.int32), sources=("a",))
    with pytest.raises(ValueError, match="parent"):
        policy.trim([view()], wrong, Load([5]))
    with pytest.raises(ValueError, match="rows of the last plan"):
        policy.learn([], Drafts.empty(0), Verdicts.of([]), SECONDS)
    with pytest.raises(ValueError, match=r"more was accepted|leaves the draft"):
        policy.learn([view()], Drafts.empty(1), verdicts([1]), SECONDS)
