"""Lookups beside a network that pays by the level: together they are worth no less than the better one alone. Seconds
by a price table (a check of a model of 1.27B and its draft model, as measured), without a clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import pytest

from outpace.common.arrays import F64, I32
from outpace.control.cost import Cost
from outpace.drafters.base import DraftCost, Drafter, DrafterNeeds, RowView
from outpace.drafters.composed import ComposedDrafter
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts
from tests.simulated import Driven, verdicts, view

TARGET = Cost((1, 2, 4, 8, 16, 32, 64), (28e-3, 29e-3, 32e-3, 41e-3, 66e-3, 125e-3, 240e-3))
TOKENS, LEARNING, ANSWER, MOST = 2400, 600, 200, 15
WRONG, BY_LOOKUP = 1_000_000, 2_000_000  # more than any position's token, which is its number


@dataclass
class Story:
    """A text, and what is drafted at each position. ``said``, ``right`` [T]: the network's word for its token, and
    whether it is the text's; ``copied`` [T]: tokens from here on that a lookup has right; ``found``: whether it finds
    anything."""

    said: F64
    right: list[bool]
    copied: list[int]
    found: list[bool]
    at: int = 0


class Lookup(Drafter):
    """A chain of what followed earlier, which is right as far as the text is a copy."""

    name, needs, cost = "lookup", DrafterNeeds(), DraftCost()

    def __init__(self, story: Story) -> None:
        self.story = story

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        its, made = self.story, Draft()
        for n in range(int(sizes[0]) if its.found[its.at] else 0):
            right = n < its.copied[its.at]
            made.add(its.at + n if right else BY_LOOKUP + n, n - 1, CLAIMED ** (n + 1))
        return Drafts.of([made], (self.name,))


class Network(Drafter):
    """A chain a level each, as draft models draft; ``levels`` counts its forwards."""

    name, needs, cost = "network", DrafterNeeds(draws=True), DraftCost("network", nodes=True, reads=True)

    def __init__(self, story: Story) -> None:
        self.story, self.levels, self.asked = story, 0, 0

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        its, made, path, level = self.story, Draft(), 1.0, 0
        (row,), size = rows, int(sizes[0])
        good = True
        most = (min(size, MOST) if row.floor else min(size, row.depth or 0)) if row.depth else 0
        for level in range(1, most + 1):
            at = its.at + level - 1
            good = good and its.right[at]
            path *= float(its.said[at])
            made.add(at if good else WRONG + level, level - 2, path)
            if path < row.floor:
                break
        self.levels += level
        self.asked += level > 0
        return replace(Drafts.of([made], (self.name,)), levels=np.array([level], np.int32))


def modest(rng: np.random.Generator, n: int, chance: float) -> tuple[F64, F64]:
    """Says 0.4 in the mean, whatever it is."""
    said = np.clip(rng.beta(1.1, 0.9, n), 0.03, 0.99)
    return said, np.clip(chance + 0.1 * (said - said.mean()), 0, 1)


def calibrated(rng: np.random.Generator, n: int, chance: float) -> tuple[F64, F64]:
    said = np.clip(rng.beta(2 * chance, 2 * (1 - chance), n), 0.02, 0.98)
    return said, said


NETWORKS: dict[str, tuple[Callable[[np.random.Generator, int, float], tuple[F64, F64]], float, float]] = {
    "0.9, modest": (modest, 0.9, 3.2e-3),
    "0.97, modest": (modest, 0.97, 3.2e-3),
    "0.6": (calibrated, 0.6, 3.2e-3),
    "0.27": (calibrated, 0.27, 3.2e-3),
    "eagle, 0.6": (calibrated, 0.6, 1.2e-3),
}
# How much of the text is a copy, in runs of how many tokens on average; how often a lookup finds something elsewhere.
LOOKUPS: dict[str, tuple[float, float, float]] = {
    "rarely right": (0.1, 3.0, 0.8),
    "often right": (0.75, 8.0, 0.9),
    "right in bursts": (0.4, 30.0, 0.7),
}
CLAIMED = 0.85  # whatever it is


def story_of(network: str, lookup: str, seed: int) -> Story:
    n, rng, luck = TOKENS + 400, np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    words, chance, _ = NETWORKS[network]
    said, chances = words(rng, n, chance)
    right = (rng.random(n) < chances).tolist()
    share, run, found = LOOKUPS[lookup]
    copies, inside = list[bool](), False
    for draw in luck.random(n).tolist():
        inside = draw >= 1 / run if inside else draw < share / (1 - share) / run
        copies.append(inside)
    copied = [0] * (n + 1)
    for t in reversed(range(n)):
        copied[t] = copied[t + 1] + 1 if copies[t] else 0
    finds = [bool(its) or draw < found for its, draw in zip(copied, luck.random(n + 1).tolist(), strict=True)]
    return Story(said, right, copied, finds)


class Run:
    """Answers of ``ANSWER`` tokens, one after the other, by a new policy: what they took so far, prompts aside."""

    def __init__(self, network: str, lookup: str, parts: Sequence[str], seed: int, draws: bool = True) -> None:
        self.story, self.rng = story_of(network, lookup, seed), np.random.default_rng(seed)
        self.level, self.network = NETWORKS[network][2], Network(self.story)
        self.seconds, self.steps, self.request = 0.0, 0, 0
        self.network.needs = DrafterNeeds(draws=draws)
        made: dict[str, Drafter] = {"lookup": Lookup(self.story), "network": self.network}
        self.drafter = made[parts[0]] if len(parts) == 1 else ComposedDrafter([made[each] for each in parts])
        self.policy = Driven(TARGET, vocab=2 * BY_LOOKUP, names=self.drafter.names or (self.drafter.name,))

    def answer(self, prompt: int = 60, read: bool = False) -> int:
        """How many of the prompt's tokens were read beside the target. ``read``: what the network reads takes time."""
        story, policy, start = self.story, self.policy, self.story.at
        its = view(request=self.request, cost=self.drafter.cost, drafter=self.drafter.name)
        its, found = its._replace(limit=prompt + 40 + ANSWER), 0
        policy.prompts[0] = prompt if read else 1
        for at in range(0, prompt - 1 if read else 0, 512):
            count = min(512, prompt - 1 - at)
            found += policy.read(its, at, count, self.level / 8, TARGET.width(64) / 64 * count)[1]
        known = prompt if found else 0  # tokens that the network has read
        while story.at - start < ANSWER:
            sizes = policy.plan([its], [MOST], [prompt + story.at - start])
            before, drafts = self.network.levels, Drafts.empty(1)
            if sizes.nodes[0]:
                drafts = self.drafter.propose(policy.asked([its]), np.array(sizes.nodes, np.int32))
            kept, _ = policy.trim(drafts)
            draft, path, at = kept.row(0), list[int](), -1
            for n in range(len(draft)):
                if draft.parents[n] == at and draft.tokens[n] == story.at + len(path):
                    path.append(at := n)
            tokens = np.arange(story.at, story.at + len(path) + 1, dtype=np.int32)
            drafting, body = self.level * (self.network.levels - before), TARGET.width(1 + len(draft))
            if read and drafting:
                context = prompt + story.at - start
                drafting += self.level / 8 * (context - max(known, policy.starts[0]))
                known = context
            noise = np.exp(0.02 * self.rng.standard_normal(2))
            verdict = Verdict(tokens, np.array(path, np.int32))
            policy.learn(Verdicts.of([verdict]), 5e-5 + drafting * noise[0], body * noise[1])
            story.at, self.seconds, self.steps = story.at + len(tokens), self.seconds + drafting + body, self.steps + 1
        policy.release(0)
        self.request += 1
        return found


@functools.cache
def speed(network: str, lookup: str, parts: tuple[str, ...], seed: int) -> tuple[float, float]:
    """Tokens a plain step, and the share of steps in which the network was asked, once the first are learned from."""
    run, learned = Run(network, lookup, parts, seed), (0, 0.0, 0, 0)
    for _ in range(TOKENS // ANSWER):
        run.answer()
        if run.story.at < LEARNING + ANSWER:
            learned = run.story.at, run.seconds, run.steps, run.network.asked
    at, took, before, others = learned
    tokens, seconds = run.story.at - at, run.seconds - took
    return tokens * TARGET.width(1) / seconds, (run.network.asked - others) / (run.steps - before)


def mean(network: str, lookup: str, *parts: str) -> tuple[float, float]:
    # Alone, neither depends on the other.
    own = network if "network" in parts else next(iter(NETWORKS)), lookup if "lookup" in parts else next(iter(LOOKUPS))
    found = [speed(*own, parts, seed) for seed in range(3)]
    return fmean(its for its, _ in found), fmean(share for _, share in found)


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_composition_is_worth_no_less_than_its_better_part(network: str, lookup: str) -> None:
    (alone, _), (looked_up, _) = mean(network, lookup, "network"), mean(network, lookup, "lookup")
    assert mean(network, lookup, "lookup", "network")[0] > 0.97 * max(alone, looked_up)


def test_a_network_is_asked_where_it_adds_to_what_a_lookup_found() -> None:
    parts = "lookup", "network"
    assert mean("0.9, modest", "rarely right", *parts)[1] > 0.95, "whatever the lookup says of itself"
    assert mean("0.27", "often right", *parts)[1] < 0.15
    bursts, (alone, _) = mean("0.6", "right in bursts", *parts), mean("0.6", "right in bursts", "network")
    assert 0.4 < bursts[1] < 0.97
    assert bursts[0] > 1.1 * alone, "each where it is the better one"


@pytest.mark.parametrize("parts", [("lookup", "network"), ("network", "lookup")])
def test_a_network_that_never_draws_is_weighed_beside_lookups_as_one_that_does(parts: tuple[str, ...]) -> None:
    """As a draft model of another tokenizer. Behind prompts, which it reads by what it has saved."""
    found = []
    for draws in (True, False):
        run = Run("0.97, modest", "often right", parts, 0, draws)
        found.append([(run.answer(2000, read=True), run.steps, run.network.levels) for _ in range(5)])
    assert found[0] == found[1]


def test_a_fallback_comes_after_the_network_that_it_is_one_of() -> None:
    network = Network(story_of("0.6", "often right", 0))
    network.needs = DrafterNeeds()
    lookups = [Fixed(name, Draft()) for name in "ab"]
    composed = ComposedDrafter([network, *lookups], (False, False, True))
    assert composed._native.order == [1, 0, 2]


def test_what_lookups_bring_pays_for_no_reading() -> None:
    """A network that adds little to lookups learns so with the end of one prompt."""
    for seed in range(3):
        run = Run("0.27", "often right", ("lookup", "network"), seed)
        read = [run.answer(2000, read=True) for _ in range(9)]
        assert 0 < read[0] < 600
        assert sum(read[1:]) < 500, "all of a prompt, now and then, when all that was accepted paid for it"


class Fixed(Drafter):
    """Proposes the same tree for every row."""

    needs, cost = DrafterNeeds(), DraftCost()

    def __init__(self, name: str, draft: Draft) -> None:
        self.name, self.draft = name, draft

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        return Drafts.of([self.draft] * len(rows), (self.name,))


def asked_again(policy: Driven, its: RowView) -> None:
    """Plain steps until the row's drafter is asked."""
    while not policy.plan([its], [MOST], [200]).nodes[0]:
        policy.trim(Drafts.empty(1))
        policy.learn(verdicts([0]), 5e-5, TARGET.width(1))


def test_a_token_that_must_follow_is_worth_as_much_where_lookups_have_it_too() -> None:
    wrong = Draft.chain([1, 2, 3], [0.3, 0.09, 0.027])
    composed = ComposedDrafter([Fixed("a", wrong), Fixed("b", wrong)])
    policy = Driven(TARGET, names=composed.names, explain=True)
    its = view(0, cost=composed.cost, drafter=composed.name)
    for after in range(41):
        asked_again(policy, its)
        drafts = composed.propose(policy.asked([its]), np.array([MOST], np.int32))
        policy._step.put([0], drafts)
        if after == 40:
            policy._step.lead(0, [1, 2, 3], "grammar")
        policy._step.trim()
        size, *_, worth = policy._step.decisions()[0][:4]
        policy.learn(verdicts([0]), 5e-5, TARGET.width(1 + size))
    assert size == 3
    assert min(worth) > 0.9


def test_a_composition_inside_another_has_sources_of_its_own() -> None:
    parts = [Fixed(name, Draft.chain([token], [0.5])) for token, name in enumerate("abcd", 1)]
    composed = ComposedDrafter([ComposedDrafter(parts[:3]), parts[3]])
    policy = Driven(TARGET, names=composed.names)
    its = view(0, cost=composed.cost, drafter=composed.name)
    asked_again(policy, its)
    found = composed.propose(policy.asked([its]), np.array([MOST], np.int32)).row(0)
    assert (found.tokens, found.sources) == ([1, 2, 3, 4], [0, 0, 0, 1])


class Shallow(Fixed):
    """A network whose every draft takes three levels."""

    needs, cost = DrafterNeeds(draws=True), DraftCost("network", nodes=True, reads=True)

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        levels = np.array([3 if row.depth else 0 for row in rows], np.int32)
        drafts = [self.draft if each else Draft() for each in levels]
        return replace(Drafts.of(drafts, (self.name,)), levels=levels)


def test_rows_that_have_drafted_stay_so_while_the_same_composition_drafts_for_others() -> None:
    """As where C++ drafts for one row and Python for another, or two compositions serve a batch."""
    network = Shallow("network", Draft.chain([21, 22, 23], [0.6, 0.36, 0.2]))
    found = Draft.chain([11, 12, 13, 14, 15], [0.95**n for n in range(1, 6)])
    composed = [ComposedDrafter([Fixed("lookup", each), network]) for each in (Draft(), found)]
    policy = Driven(TARGET, vocab=64, names=composed[0].names)
    rows = [view(row, cost=composed[0].cost, drafter=composed[0].name)._replace(limit=5000) for row in range(2)]
    drafted, known, context = 0, False, 100
    for _ in range(20):
        sizes = policy.plan(rows, [MOST, MOST], [context, context])
        asked, made, levels = policy.asked(rows), [Draft(), Draft()], [0, 0]
        for i in range(2):
            if sizes.nodes[i]:
                drafts = composed[i].propose([asked[i]], np.array([sizes.nodes[i]], np.int32))
                made[i], levels[i] = drafts.row(0), 0 if drafts.levels is None else int(drafts.levels[0])
        drafts = replace(Drafts.of(made, composed[0].names), levels=np.array(levels, np.int32))
        kept, decisions = policy.trim(drafts)
        assert not known or "not read" not in decisions[0].why
        known, drafted = levels[0] > 0, drafted + (levels[0] > 0)
        gained = [min(1, len(kept.row(0))), len(kept.row(1))]
        policy.learn(verdicts(gained), 5e-5 + 3.2e-3 * max(levels), TARGET.width(2 + int(kept.widths.sum())))
        context += 1
    assert drafted > 2
