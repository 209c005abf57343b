"""Lookahead: its window and pool by hand, the choices it is told, and what it gains where the target repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outpace.common.arrays import F32, I32
from outpace.drafters.base import Event, RowView
from outpace.drafters.forward.lookahead import LookaheadDrafter
from outpace.engine.engine import Engine
from outpace.errors import DrafterError
from outpace.exact.drafts import Drafts, Verdict
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams
from tests.toy import ToyModel


def view(tokens: list[int]) -> RowView:
    return RowView(0, 0, np.array(tokens, np.int32), 99, Chooser(SamplingParams(), Noise(0), 0), "coupled")


def propose(drafter: LookaheadDrafter, tokens: list[int], size: int) -> Drafts:
    return drafter.propose([view(tokens)], np.array([size], np.int32))


def tell(drafter: LookaheadDrafter, start: int, gained: list[int], choices: list[int]) -> None:
    verdict = Verdict(np.array(gained, np.int32), np.zeros(len(gained) - 1, np.int32))
    drafter.observe([Event(0, start, verdict.tokens, verdict, None, np.array(choices, np.int32))])


def test_the_window_is_refined_and_fills_the_pool() -> None:
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=2)
    first = propose(drafter, [5, 6, 7], 15).row(0)
    assert len(first) == 2  # one generation of two columns, a chain
    b = int(first.tokens[1])
    tell(drafter, 3, [8], [8, 21, 22])  # after a the target says 21, after b 22
    second = propose(drafter, [5, 6, 7, 8], 15).row(0)
    # One position on: column 1 of the first window is column 0 now, and what it led to hangs under it.
    assert second.tokens[0] == b
    leaf = second.children(0)
    assert [int(second.tokens[n]) for n in leaf if second.tokens[n] == 22] == [22]
    at = next(n for n in leaf if second.tokens[n] == 22)
    choices = [30] * (len(second) + 1)
    choices[at + 1] = 33
    tell(drafter, 4, [b], choices)  # the n-gram (b, 22, 33) is known now, and b is pending
    third = propose(drafter, [5, 6, 7, 8, b], 15).row(0)
    assert third.tokens[0] == 22
    assert 33 in [int(third.tokens[n]) for n in third.children(0)]
    drafter.release(0)
    drafter.check([])


@pytest.mark.parametrize("size", range(1, 16))
def test_no_more_nodes_than_asked_and_no_equal_siblings(size: int) -> None:
    drafter, rng, tokens = LookaheadDrafter(), np.random.default_rng(size), [1, 2, 3]
    for _ in range(60):
        draft = propose(drafter, tokens, size).row(0)
        assert len(draft) <= size
        pairs = list(zip(draft.parents, draft.tokens, strict=True))
        assert len(set(pairs)) == len(pairs)
        gained = rng.integers(0, 4, rng.integers(1, 4)).tolist()
        tell(drafter, len(tokens), gained, rng.integers(0, 4, len(draft) + 1).tolist())
        tokens += gained


def test_nothing_is_derived_from_what_a_rule_forbids() -> None:
    """-1 after a node: a rule forbids it or what follows. Such a column becomes no n-gram and no guess."""
    drafter, rng, tokens = LookaheadDrafter(window=3, ngram=3), np.random.default_rng(0), [5, 6, 7]
    for _ in range(30):
        draft = propose(drafter, tokens, 15).row(0)
        assert set(draft.tokens) <= {5, 6, 7}  # whatever the target said after a node was never 0 or -1
        tell(drafter, len(tokens), [int(rng.integers(5, 8))], [5, *[-1] * len(draft)])
        tokens.append(5)
    row = drafter._rows[0]
    assert not row.pool
    row.generations = [[10, 11, 12], [20, 21, 22]]
    draft = propose(drafter, tokens, 15).row(0)
    choices = [5, *[9] * len(draft)]
    choices[row.leaves[1] + 1] = -1  # one column alone
    tell(drafter, len(tokens), [5], choices)
    assert {first: list(grams) for first, grams in row.pool.items()} == {10: [(20, 9)], 12: [(22, 9)]}
    assert row.generations == [[20, 21, 22], [9, None, 9]]
    again = propose(drafter, [*tokens, 5], 15).row(0)
    under = {int(again.tokens[n]): [int(again.tokens[c]) for c in again.children(n)] for n in range(len(again))}
    assert 9 in under[20]
    assert {9, 22}.isdisjoint(set(under[21]) - {22})


def test_a_draft_that_was_not_verified_teaches_nothing() -> None:
    drafter, tokens = LookaheadDrafter(window=2, ngram=3), [5, 6, 7]
    propose(drafter, tokens, 15)
    tell(drafter, 3, [8], [8])  # the policy dropped it: only the pending token was followed
    assert drafter._rows[0].generations == [[int(drafter._rows[0].drafted[0][1])]]
    assert not drafter._rows[0].pool


class Listening(LookaheadDrafter):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[list[int], I32]] = []
        self.last: dict[int, tuple[list[int], Drafts]] = {}

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        drafts = super().propose(rows, sizes)
        for i, row in enumerate(rows):
            draft = drafts.row(i)
            paths = [row.tokens.tolist() + [draft.tokens[m] for m in draft.path(n)] for n in range(-1, len(draft))]
            self.last[row.row] = (paths, drafts)
        return drafts

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.verdict is not None and event.choices is not None and event.row in self.last:
                self.heard += list(zip(self.last.pop(event.row)[0], event.choices.tolist(), strict=True))
        super().observe(events)


def test_it_is_told_the_choice_after_every_node() -> None:
    listening = Listening()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with Engine(ToyModel(5), drafter=listening, size=9) as engine:
        engine.generate([1, 2], params)
    with Engine(ToyModel(5)) as plain:
        for path, choice in listening.heard[::7]:
            assert plain.generate(path, SamplingParams(max_tokens=1, ignore_eos=True)).token_ids == (choice,)
    assert len(listening.heard) > 50


class Alternates:
    """Even tokens after odd ones, odd after even; a grammar that cannot be asked about what it forbids."""

    def start(self, prompt: I32) -> int:
        return int(prompt[-1])

    def advance(self, state: int, token: int) -> int:
        if token % 2 == state % 2:
            raise ValueError(f"{token} after {state} is no sentence")
        return token

    def apply(self, state: int, logits: F32) -> None:
        logits[state % 2 :: 2] = -np.inf


def test_a_grammar_is_never_asked_about_what_it_forbids() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, rules=[Alternates()])
    with Engine(ToyModel(6, memory=1)) as plain:
        expected = plain.generate([1], params)
    with Engine(ToyModel(6, memory=1), drafter=LookaheadDrafter(), size=14) as engine:
        found = engine.generate([1], params)
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, "length")
    assert found.stats.accepted > 0


def test_it_gains_where_the_target_repeats_itself() -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with Engine(ToyModel(6, memory=1), drafter=LookaheadDrafter(), size=14) as engine:
        assert engine.generate([1], params).stats.tokens_per_step > 1.5


def test_rejection_and_options_out_of_range_are_refused() -> None:
    with pytest.raises(DrafterError, match="rejection"):
        Engine(ToyModel(5), drafter=LookaheadDrafter(), acceptance="rejection", size=4)
    for options in ({"window": 0}, {"ngram": 1}, {"guesses": 33}):
        with pytest.raises(DrafterError, match=f"{next(iter(options))}="):
            LookaheadDrafter(**options)
