"""Counts are what their definitions say, and pooling adds counts, never ratios."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outpace.engine.statistics import PHASES, Stats, pooled
from outpace.exact.drafts import Verdict


def verdict(tokens: list[int], path: list[int]) -> Verdict:
    return Verdict(np.array(tokens, np.int32), np.array(path, np.int32))


def test_a_chain_by_position() -> None:
    stats = Stats()
    stats.count(3, 3, ["a"] * 3, [0, 1])
    stats.count(1, 3, ["b"] * 3, [])
    stats.count(1)
    assert (stats.steps, stats.tokens, stats.drafted, stats.accepted) == (3, 5, 6, 2)
    assert (stats.drafted_at, stats.accepted_at) == ([2, 2, 2], [1, 1, 0])
    assert stats.acceptance_by_position == [0.5, 0.5, 0.0]
    assert (stats.drafted_by, stats.accepted_by) == ({"a": 3, "b": 3}, {"a": 2})
    assert stats.tokens_per_step == 5 / 3
    assert stats.acceptance_rate == 2 / 6


def test_a_tree_by_depth() -> None:
    """Two siblings at each depth are one draft that had that position."""
    stats = Stats()
    stats.count(3, 2, ["a", "b", "c", "d"], [1, 3])
    assert (stats.drafted, stats.accepted, stats.drafted_at, stats.accepted_at) == (4, 2, [1, 1], [1, 1])
    assert stats.accepted_by == {"b": 1, "d": 1}


@pytest.mark.parametrize(("kept", "accepted"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_what_a_stop_cuts_off_was_not_accepted(kept: int, accepted: int) -> None:
    stats = Stats()
    stats.count(kept, 3, ["a"] * 3, [0, 1, 2])
    assert (stats.tokens, stats.accepted, sum(stats.accepted_at)) == (kept, accepted, accepted)


def test_pooling_adds_counts() -> None:
    a, b = Stats(), Stats()
    a.count(3, 2, ["a"] * 2, [0, 1])
    b.count(1, 1, ["a"], [])
    a.decode_seconds, b.decode_seconds, a.time_to_first_token, b.time_to_first_token = 1.0, 3.0, 0.2, 0.4
    a.first_delta_tokens, a.kv_bytes, b.kv_bytes, a.seconds["target"] = 1, 10, 30, 2.0
    total = pooled([a, pooled([b, Stats()])])
    assert (total.steps, total.tokens, total.requests, total.kv_bytes) == (2, 4, 3, 30)
    assert (total.drafted_at, total.accepted_at, total.accepted_by) == ([2, 1], [1, 1], {"a": 2})
    assert total.tokens_per_step == 2.0
    assert total.decode_tokens_per_second == (4 - 1) / 4.0
    assert total.time_to_first_token == pytest.approx(0.6 / 3)
    assert total.seconds == {**dict.fromkeys(PHASES, 0.0), "target": 2.0}
    assert (a.tokens, a.accepted_by, b.drafted_at) == (3, {"a": 2}, [1]), "pooling changed its parts"


def drafting(steps: int, drafted: int, nodes: int, accepted: int, on: float | None, off: float | None) -> Stats:
    """Of ``steps`` the first ``drafted`` verified so many nodes; of each ``accepted`` were accepted."""
    stats = Stats()
    for i in range(steps):
        path = list(range(accepted)) if i < drafted else []
        stats.count(1 + len(path), nodes if i < drafted else 0, ["a"] * nodes if i < drafted else [], path)
        stats.decide(nodes if i < drafted else 0, on if i < drafted else off)
    return stats


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (drafting(0, 0, 0, 0, None, None), ""),
        (drafting(8, 8, 3, 1, 1.5, None), "drafted in 8 of 8 steps, 1.50x expected"),
        (drafting(8, 2, 3, 1, 1.5, 0.9), "drafted in 2 of 8 steps, 1.50x expected; not in the others, 0.90x expected"),
        (drafting(8, 2, 3, 1, None, None), "drafted in 2 of 8 steps; no draft in the others"),
        (drafting(8, 0, 3, 1, None, 0.9), "no draft was expected to pay, the best 0.90x expected"),
        (drafting(8, 0, 3, 1, None, None), "no draft was made: the answer repeated nothing from before, or drafts had"
                                           " not paid lately"),
    ],
)  # fmt: skip
def test_a_decision_is_said_whole(stats: Stats, expected: str) -> None:
    """Whatever was decided there is a sentence; it speaks of what was off only where something was."""
    assert stats.decision == expected


@pytest.mark.parametrize(
    ("accepted", "cost", "verdict"),
    [(3, 2.0, "so drafting paid"), (1, 2.5, "so drafting did not pay"), (1, 2.0, "about as fast as plain decoding")],
)
def test_the_account_weighs_what_a_step_costs_and_brings(accepted: int, cost: float, verdict: str) -> None:
    """A step that takes c plain steps pays if it brings more than c tokens: one, and those accepted."""
    asked: list[float] = []
    said = drafting(40, 10, 4, accepted, 1.5, 0.9).account(lambda nodes: asked.append(nodes) or cost)
    assert asked == [4.0]
    assert f"drafted in 10 of 40 steps, 4.0 tokens each, of which {accepted:.2f} were accepted" in said
    assert f"brought {1 + accepted:.2f} tokens and takes about {cost:.2f} plain steps here" in said
    assert said.endswith(verdict)
    assert "plain steps" not in drafting(40, 10, 4, accepted, 1.5, 0.9).account()
    few = drafting(40, 2, 4, accepted, 1.5, 0.9).account(lambda _: cost)
    assert few.endswith("plain steps here"), "two drafts say nothing about a text"
    none = drafting(40, 0, 4, accepted, None, 0.9).account(lambda _: cost)
    assert f"checking one drafted token takes {cost:.2f} plain steps here" in none


def test_nothing_never_divides() -> None:
    empty = pooled([])
    assert empty.requests == 0
    assert [empty.tokens_per_step, empty.acceptance_rate, empty.decode_tokens_per_second] == [0.0, 0.0, 0.0]
    assert empty.end_to_end_tokens_per_second == 0.0
    assert json.loads(json.dumps(empty.to_dict()))["acceptance_by_position"] == []


def test_a_drafter_of_which_nothing_is_accepted_is_remarked_on() -> None:
    """After 64 tokens; not lookups, which find nothing in some texts, nor one that is right now and then."""
    named = {"eagle:org/it": 64, "model:small": 63, "suffix": 900, "dflash:org/it": 39 * 5}
    (said,) = Stats(drafted_by=named, accepted_by={"dflash:org/it": 5}).useless.values()
    assert said.startswith("eagle:org/it: 0 of 64 drafted tokens were accepted: it was likely made for another model")
