"""The policy at its seam: what it may never do, whatever it thinks, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.control.adaptive import AUTO_SIZE
from outpace.control.cost import Cost
from outpace.drafters.base import DraftCost, RowView
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts
from outpace.models.native.output import describe
from tests.simulated import (
    CPU,
    DEAR,
    FREE,
    Driven,
    Machine,
    Outcome,
    chains,
    run,
    steady,
    text,
    verdicts,
    view,
)

DEARER = Cost((1, 64), (1.0, 190.0))  # a node costs three steps, as a table says that was measured beside other work
KINDS = [DraftCost(), DraftCost(levels="a"), DraftCost(levels="a", nodes=True), DraftCost(trims=False)]
SECONDS = 0.01, 1.0  # of drafting, and of all else
PAYS, TRIED = "the nodes that are expected to pay are verified", "nodes are tried, to learn whether drafts pay now"
DRAFTED = PAYS, TRIED
OTHERS = "drafts would slow down rows of the batch that gain nothing"


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


def drive(policy: Driven, seed: int, steps: int, most_rows: int, shape: int) -> list[Any]:
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
        contexts, prefill = rng.integers(1, 9000, len(rows)).tolist(), int(rng.choice([0, 0, 0, 5, 64, 512]))
        most = [int(rng.integers(0, AUTO_SIZE + 1)) for _ in rows]
        sizes = policy.plan(rows, most, contexts, prefill)
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
        kept, decisions = policy.trim(drafts)
        check(rows, drafts, kept)
        assert [d.size for d in decisions] == kept.widths.tolist()
        for row, decision in zip(rows, decisions, strict=True):
            assert decision.why
            assert not row.adaptive or "fixed" not in decision.why
            assert not row.adaptive or (decision.size > 0) == decision.why.startswith(DRAFTED)
        said.append((kept.tokens.tolist(), kept.widths.tolist(), [tuple(d) for d in decisions]))
        if rng.random() < 0.1:
            continue
        result = Verdicts.of([verdict(rng, kept, i, level) for i in range(len(rows))])
        while rows and rng.random() < 0.1:  # who has ended leaves before the policy learns
            policy.release(rows.pop(int(rng.integers(0, len(rows)))).row)
        policy.learn(result, 0.1 * float(rng.random()), 3.2 * float(rng.random()))
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
    first, again = (drive(Driven(cost, stretch=stretch), seed, steps, rows, shape) for _ in range(2))
    assert first == again


def test_explaining_changes_no_decision_and_says_what_each_node_is_worth() -> None:
    plain, explained = Driven(CPU), Driven(CPU, explain=True)
    outcomes = [run(policy, Machine(CPU), [text(0)], steps=100) for policy in (plain, explained)]
    assert outcomes[0].widths == outcomes[1].widths
    drafts = chains([4], [0.8])
    explained.plan([view(7)], [15], [5])
    _, (decision,) = explained.trim(drafts)
    assert len(decision.worth) == 4
    assert all(0 <= w <= 1 for w in decision.worth)
    assert "to bring" in decision.why
    assert plain.explain is False


def reasons(outcome: Outcome, first: int = 0) -> list[str]:
    """Of all rows, in the steps from ``first`` on."""
    return [decision.why for decisions in outcome.decisions[first:] for decision in decisions]


@pytest.mark.parametrize("kind", KINDS[:3:2], ids=["lookups", "lookups and a network"])
def test_a_drafter_that_rests_is_said_to_rest(kind: DraftCost) -> None:
    policy, its, rests = Driven(CPU), view(cost=kind), 0
    for _ in range(400):
        (nodes,) = policy.plan([its], [4], [9]).nodes
        _, (decision,) = policy.trim(chains([nodes], [0.05]))
        policy.learn(verdicts([0]), 0.1 * (nodes > 0), 1.0 + 0.1 * decision.size)
        if decision.why == "its drafter rests, since asking it has not paid lately":
            rests += 1
            assert not nodes
        elif not nodes:
            assert decision.why == "a plain step, to measure what one takes"
    assert rests > 100


def test_whole_drafts_that_are_not_expected_to_pay_are_tried() -> None:
    def whole(row: int, request: int) -> RowView:
        return view(row, request, cost=DraftCost(trims=False))

    sizes, why = [], []
    for chance in (0.0, 0.9):
        found = run(Driven(CPU), Machine(CPU, ask=0.01), [steady(0, chance, 1200)], views=whole)
        drafted = [decision.why for (decision,) in found.decisions[50:-20] if decision.size]
        sizes.append(len(drafted))
        why.append(set(drafted))
    assert 0 < sizes[0] < 20
    assert why[0] == {TRIED}
    assert PAYS in why[1]


def test_the_budget_fairness_and_the_stretch_are_told_apart() -> None:
    budget = "the budget of time that drafts may lose does not cover it"
    stretch = "the step would take longer than it may"
    wrong = run(Driven(CPU), Machine(CPU), [steady(0, 0.0, said=0.9)])
    assert any(why == budget for why in reasons(wrong))
    assert not any(why == OTHERS or why.startswith(stretch) for why in reasons(wrong))

    mixed = [steady(i, 0.0 if i else 0.95, 400) for i in range(4)]
    unfair = run(Driven(CPU), Machine(CPU, ask=0.003), mixed, rows=4)
    gains = [decisions[0].why for decisions in unfair.decisions if len(decisions) == 4]
    assert OTHERS in gains
    assert not any(why.startswith(stretch) for why in reasons(unfair))

    alike = [steady(i, 0.95, 400) for i in range(2)]  # a node fits, beside asking for it nothing does
    long = run(Driven(CPU, stretch=1.12), Machine(CPU, ask=0.05), alike, rows=2)
    assert sum(why.startswith(stretch) for why in reasons(long, 50)) > 20
    assert OTHERS not in reasons(long)


def test_state_is_bounded() -> None:
    policy = Driven(CPU)
    rng = np.random.default_rng(0)
    for step in range(3000):  # rows come and go, batches and contexts of all sizes
        rows = [view(i, 10_000 * step + i) for i in range(int(rng.integers(1, 40)))]
        policy.plan(rows, [3] * len(rows), rng.integers(1, 100_000, len(rows)).tolist())
        policy.trim(chains([1] * len(rows), [0.5] * len(rows)))
        policy.learn(verdicts([0] * len(rows)), *SECONDS)
    assert len(policy) <= 40
    assert len(policy.learnt().curves) <= 48


def test_a_row_that_changes_hands_without_release_begins_anew() -> None:
    policy = Driven(CPU)
    for _ in range(3):
        policy.plan([view(0, 1)], [5], [9])
        policy.trim(chains([0], [0.5]))
        policy.learn(verdicts([0]), *SECONDS)
    policy.plan([view(0, 2, adaptive=False)], [5], [9])
    assert len(policy) == 1
    assert policy.plan([view(0, 2, adaptive=False)], [5], [9]).nodes == [5]


def test_seconds_that_no_clock_gives_do_no_harm() -> None:
    policy = Driven(CPU)
    for body in (0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300):
        policy.plan([view()], [5], [9])
        policy.trim(chains([3], [0.5]))
        policy.learn(verdicts([0]), SECONDS[0], body)
    assert run(policy, Machine(CPU), [text(1)]).speedup > 0.9


@pytest.mark.parametrize("beside", [False, True], ids=["prompts alone", "beside a row without a drafter"])
def test_a_draft_model_reads_as_much_of_a_prompt_s_end_as_is_worth_most(beside: bool) -> None:
    """By trying every number of tokens; short prompts whole, nothing new once the budget is spent, what was begun to
    its end."""
    cost = Cost((1, 2, 4, 8, 16, 32, 64), (28e-3, 29e-3, 32e-3, 41e-3, 66e-3, 125e-3, 240e-3))
    policy, step, tokens = Driven(cost), _native.Rows(16, [], "target"), np.zeros(5001, np.int32)
    token, saves = 0.15 * 240 / 64 / 28, 0.3

    def row(number: int, prompt: int, answer: int, drafts: bool = True) -> _native.Row:
        v = view(number)
        return step.row(
            number, number, prompt, drafts, "net", None, (), False, drafts, False, False, "coupled", False,
            describe(v.chooser, []), "net", True, True, True, prompt + answer,
        )  # fmt: skip

    plain = [(row(20, 10, 200, False), tokens, 20, 0)] if beside else []

    def begin(one: _native.Row, prompt: int) -> int:
        step.begin(policy.native, plain, [(one, tokens, 0, prompt - 1, False)])
        return step.reads(one)

    for number, (prompt, answer) in enumerate(
        [(2000, 32), (2000, 48), (2000, 200), (5000, 200), (90, 200), (400, 256)]
    ):
        found = prompt - begin(row(number, prompt, answer), prompt)
        n = np.arange(64, prompt + 1)
        worth = answer * saves * np.where(n < prompt, 1 - 8 / np.sqrt(n), 1) - n * token
        assert found == pytest.approx(int(n[worth.argmax()]), abs=1)
        assert (found == prompt) == (prompt in (90, 400))
    whole, begun, late = (row(number, 2000, 48) for number in (10, 11, 12))
    start = begin(begun, 2000)
    step.has_read([(begun, start, start + 100, 100)], 60.0, 1.0)  # more than the budget
    assert step.reads(begun) == start
    assert begin(late, 2000) == -1
    step.has_read([(whole, 0, 1900, 1900)], 0.0, 1.0)
    assert begin(whole, 2000) == 0


def test_a_prompt_that_was_begun_is_read_to_its_end_once_reading_turns_out_cheap() -> None:
    """Then all of it would be worth more, but its drafter has what it began with, and the budget covers no other."""
    cost = Cost((1, 2, 4, 8, 16, 32, 64), (28e-3, 29e-3, 32e-3, 41e-3, 66e-3, 125e-3, 240e-3))
    policy = Driven(cost)
    policy.prompts[0] = 2000
    its = view(0, cost=DraftCost("net", nodes=True, reads=True))._replace(limit=2200)
    found = [policy.read(its, at, min(128, 1999 - at), 0.004 * 28e-3, 128 * 240e-3 / 64) for at in range(0, 1999, 128)]
    (start,) = {start for start, _ in found}
    assert start > 64
    assert sum(new for _, new in found[:-1]) + found[-1][1] == 1999 - start
