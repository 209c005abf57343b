"""``rejection`` with a learned drafter, by enumeration: whatever it draws, the output is distributed as the target's.

The drafter is the real one, over a toy network of a smaller vocabulary; every draw of it and every decision of the
verification is gone through. Chains, what a tree's drafter does instead, and a lookup beside it in one tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from outpace.common.arrays import F32
from outpace.drafters.base import Drafter, Event, RowView
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.exact.drafts import Draft
from outpace.exact.noise import Noise, Stream
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.models.base import HostHiddenStates
from outpace.params import SamplingParams
from tests.exact.outcomes import EveryOutcome, every_outcome
from tests.exact.test_verify import Language, output, same
from tests.toy import ToyModel
from tests.toy_head import ToyHead

VOCAB, IDS = 4, (0, 1, 3)  # what the network can say
PROMPT = np.array([2, 1, 3, 2, 1, 0, 2, 1], np.int32)  # the lookup has two guesses at what follows
PARAMS = [
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.5, top_p=0.95, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, allowed_tokens=[1, 2, 3]),
]


@dataclass(frozen=True, slots=True)
class Enumerated(Chooser):
    """Draws for a draft as ``chance`` says, and never with the noise that the target chooses with."""

    chance: EveryOutcome | None = None

    def advance(self, token: int) -> Chooser:
        its = Chooser(self.params, self.noise, self.index, self.rules, self.states).advance(token)
        return Enumerated(its.params, its.noise, its.index, its.rules, its.states, self.chance)

    def choose(self, logits: F32, stream: Stream = Stream.CHOICE) -> int:
        assert stream is Stream.DRAFT
        assert self.chance is not None
        return self.chance.draw(self.probabilities(logits), 0)


def made(kind: str) -> Drafter:
    branch = 1 if kind == "chain" else 3
    network = LearnedDrafter(ToyHead(ToyModel(VOCAB, seed=5), IDS), (0, 2), "eagle", VOCAB, branch=branch)
    if "+" not in kind:
        return network
    return ComposedDrafter([NgramDrafter(candidates=2), network])


def drafted(drafter: Drafter, params: SamplingParams, size: int) -> Iterator[tuple[float, Draft]]:
    """Every draft for a row that has ``PROMPT``, with its probability."""
    positions = np.arange(len(PROMPT) - 1)
    hidden_states = np.stack([PROMPT[:-1], positions], -1).astype(np.float32)[:, None].repeat(2, 1)
    drafter.observe([Event(0, 1, PROMPT[1:], hidden_states=HostHiddenStates(hidden_states))])
    rules = rules_for(params, VOCAB)
    start = Chooser.start(params, Noise(0), rules, PROMPT)

    def run(chance: EveryOutcome) -> Draft:
        chooser = Enumerated(start.params, start.noise, 0, start.rules, start.states, chance)
        view = RowView(0, 0, PROMPT, 90, chooser, "rejection")
        return drafter.propose([view], np.array([size], np.int32)).row(0)

    return every_outcome(run)


@pytest.mark.parametrize("params", PARAMS, ids=["cool", "filtered", "masked"])
@pytest.mark.parametrize(("kind", "size"), [("chain", 3), ("tree", 3), ("ngram+tree", 4)])
def test_output_is_the_target_s(kind: str, size: int, params: SamplingParams) -> None:
    drafter, target = made(kind), Language(VOCAB, params, 7, PROMPT)
    drafts = list(drafted(drafter, params, size))
    assert abs(sum(weight for weight, _ in drafts) - 1) < 1e-12
    shapes = {tuple(draft.parents) for _, draft in drafts}
    assert len(shapes) == 1, "what is drawn decides how much is drafted"
    assert len(drafts) > 3
    (_, first), *_ = drafts
    assert first.q is not None
    assert ("+" in kind) == (len(set(first.parents)) < len(first))
    assert same(output(target, iter(drafts), size + 1), target.sequences(size + 1))


def test_a_wrong_q_would_show() -> None:
    """The same sum, where the drafter hands over another distribution than it drew from."""
    params = PARAMS[0]
    drafter, target = made("chain"), Language(VOCAB, params, 7, PROMPT)
    wrong = ((w, replace(d, q=np.full_like(d.q, 1 / VOCAB))) for w, d in drafted(drafter, params, 2))
    assert not same(output(target, wrong, 3), target.sequences(3))
