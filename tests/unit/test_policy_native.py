"""The policy in C++ against its reference: the same decisions, step for step, by the same clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.control.adaptive import AUTO_SIZE, Adaptive
from outpace.control.cost import Cost
from outpace.control.policy import Load, Policy
from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts, Verdict, Verdicts
from outpace.exact.tree import Tree, pack
from tests.unit.test_policy import CPU, DEAR, DEARER, FREE, view

pytest.importorskip("outpace.control.adaptive_native", exc_type=ImportError)  # no extension, or an older one
from outpace.control.adaptive_native import NativeAdaptive

SLOPED = Cost((1, 2, 4, 8, 16, 32), (1.0, 1.05, 1.15, 1.5, 2.5, 4.9), 0.2, 2e-4, 3e-4)


def tree(rng: np.random.Generator, size: int, chain: bool) -> Tree:
    made = Tree()
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


def drive(policy: Policy, seed: int, steps: int, most_rows: int, shape: int) -> list[Any]:
    """Everything that a policy says in a run of rows that come and go; what happens to them is drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    said: list[Any] = []
    rows: list[RowView] = []
    level, fresh = 0.5, 0
    for _ in range(steps):
        while not rows or (len(rows) < most_rows and rng.random() < 0.2):
            fresh += 1
            acceptance = "rejection" if rng.random() < 0.2 else "coupled"
            t = float(rng.choice([0.0, 0.5, 1.0]))
            rows.append(view(fresh, adaptive=bool(rng.random() < 0.9), acceptance=acceptance, t=t))  # type: ignore[arg-type]
        if rng.random() < 0.02:
            level = float(rng.random())
        load = Load(rng.integers(1, 900, len(rows)).tolist(), int(rng.choice([0, 0, 0, 64])))
        sizes, _ = policy.plan(rows, [int(rng.integers(0, AUTO_SIZE + 1)) for _ in rows], load)
        said.append(list(sizes))
        trees = [tree(rng, size, shape == 0 or (shape == 2 and rng.random() < 0.5)) for size in sizes]
        drafts = pack(trees, ("a", "b"))
        if rng.random() < 0.1:
            drafts = Drafts(drafts.tokens, drafts.widths, drafts.parents, sources=("a",))
        if rng.random() < 0.2:
            drafts = replace(drafts, q=np.zeros((*drafts.tokens.shape, 2)))
        kept = policy.trim(rows, drafts, load)
        said.append((kept.tokens.tolist(), kept.widths.tolist()))
        verdicts = Verdicts.of([verdict(rng, kept, i, level) for i in range(len(rows))])
        seconds = {name: float(rng.random()) * scale for name, scale in
                   (("other", 0.1), ("draft", 0.1), ("target", 3.0), ("verify", 0.1))}  # fmt: skip
        said.append([str(d) + str(d.expected) for d in policy.learn(verdicts, seconds)])
        if rng.random() < 0.1:
            gone: Sequence[RowView] = [rows.pop(int(rng.integers(0, len(rows))))]
            policy.release(gone[0].row)
    return said


@given(
    st.integers(0, 2**32),
    st.sampled_from([FREE, CPU, DEAR, DEARER, SLOPED]),
    st.integers(1, 150),
    st.integers(1, 5),
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_the_same_decisions(seed: int, cost: Cost, steps: int, rows: int, shape: int) -> None:
    assert drive(NativeAdaptive(cost), seed, steps, rows, shape) == drive(Adaptive(cost), seed, steps, rows, shape)


def test_nonsense_is_refused() -> None:
    policy = NativeAdaptive(CPU)
    policy.plan([view()], [3], Load([5]))
    with pytest.raises(ValueError, match="rows of the last plan"):
        policy.trim([], Drafts.empty(0), Load([]))
    wrong = Drafts(np.zeros((1, 2), np.int32), np.array([2], np.int32), np.array([[0, -1]], np.int32), sources=("a",))
    with pytest.raises(ValueError, match="parent"):
        policy.trim([view()], wrong, Load([5]))
    with pytest.raises(ValueError, match="rows of the last plan"):
        policy.learn(Verdicts.of([]), dict.fromkeys(("draft", "target", "verify", "other"), 1.0))
