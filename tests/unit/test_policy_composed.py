"""Lookups beside a network that pays by the level: together they are never worth less than the better one alone. Seconds
by a price table (a check of a model of 1.27B and its draft model, as measured), without a clock."""

from __future__ import annotations

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
from tests.simulated import Driven, view

TARGET = Cost((1, 2, 4, 8, 16, 32, 64), (28e-3, 29e-3, 32e-3, 41e-3, 66e-3, 125e-3, 240e-3))
TOKENS, LEARNING, ANSWER, MOST = 2400, 600, 200, 15
WRONG, BY_LOOKUP = 1_000_000, 2_000_000  # more than any position's token, which is its number


@dataclass
class Story:
    """A text, and what is drafted at each position. ``said``, ``right`` [T]: the network's word for its token, and
    whether it is the text's; ``copied`` [T]: tokens from here on that a lookup has right, ``found`` whether it finds
    anything; ``claimed`` [T]: its word for each."""

    said: F64
    right: list[bool]
    copied: list[int]
    found: list[bool]
    claimed: float
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
            made.add(its.at + n if right else BY_LOOKUP + n, n - 1, its.claimed ** (n + 1))
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
# How much of the text is a copy, in runs of how many tokens on average, and at which share of all places a lookup finds.
LOOKUPS: dict[str, tuple[float, float, float]] = {
    "rarely right": (0.1, 3.0, 0.8),
    "often right": (0.75, 8.0, 0.9),
    "right in bursts": (0.4, 30.0, 0.7),
    "nothing": (0.01, 3.0, 0.05),
}


def story_of(network: str, lookup: str, seed: int) -> Story:
    rng, n = np.random.default_rng(seed), TOKENS + 400
    words, chance, _ = NETWORKS[network]
    said, chances = words(rng, n, chance)
    share, run, found = LOOKUPS[lookup]
    copied, inside = [0] * (n + 1), False
    leave = 1 / run
    enter = leave * share / (1 - share)
    inside_at = []
    for _ in range(n):
        inside = rng.random() >= leave if inside else rng.random() < enter
        inside_at.append(inside)
    for t in reversed(range(n)):
        copied[t] = copied[t + 1] + 1 if inside_at[t] else 0
    finds = [bool(c) or bool(rng.random() < found) for c in copied]
    return Story(said, (rng.random(n) < chances).tolist(), copied, finds, 0.85)


def speed(story: Story, parts: list[str], level: float, seed: int, watch: Callable[..., None] | None = None) -> float:
    """Tokens a plain step, once the first are learned from."""
    made: dict[str, Drafter] = {"lookup": Lookup(story), "network": Network(story)}
    network = made["network"]
    drafter = made[parts[0]] if len(parts) == 1 else ComposedDrafter([made[each] for each in parts])
    policy, rng = Driven(TARGET, vocab=2 * BY_LOOKUP, names=drafter.names or (drafter.name,)), np.random.default_rng(seed)
    story.at, seconds, began = 0, 0.0, 0.0
    for request in range(TOKENS // ANSWER):
        its = view(request=request, cost=drafter.cost, drafter=drafter.name)
        its = its._replace(limit=100 + ANSWER)
        start = story.at
        while story.at - start < ANSWER:
            room = min(MOST, ANSWER + 20 - (story.at - start))
            sizes = policy.plan([its], [room], [60 + story.at - start])
            before = network.levels
            drafts = Drafts.of([Draft()], ("none",))
            if sizes.nodes[0]:
                drafts = drafter.propose(policy.asked([its]), np.array(sizes.nodes, np.int32))
            kept, decisions = policy.trim(drafts)
            draft, path, at = kept.row(0), [], -1
            for n in range(len(draft)):
                if draft.parents[n] == at and draft.tokens[n] == story.at + len(path):
                    path.append(at := n)
            levels, body = network.levels - before, TARGET.width(1 + len(draft))
            noise = np.exp(0.02 * rng.standard_normal(2))
            verdict = Verdict(np.arange(story.at, story.at + len(path) + 1, dtype=np.int32), np.array(path, np.int32))
            policy.learn(Verdicts.of([verdict]), 5e-5 + level * levels * noise[0], body * noise[1])
            if watch:
                watch(sizes, drafts, kept, len(path), levels, decisions)
            story.at += len(path) + 1
            seconds += level * levels + body
        policy.release(0)
        if story.at >= LEARNING and not began:
            began, first = seconds, story.at
    return (story.at - first) * TARGET.width(1) / (seconds - began)
