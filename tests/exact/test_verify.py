"""The rules of acceptance by enumeration: ``coupled`` gives plain decoding's tokens, ``rejection`` its distribution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from outpace.common.arrays import F32, F64, I32
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.exact.verify import reject, walk
from outpace.params import SamplingParams
from tests.exact.outcomes import draft_of, every_outcome

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "cool": SamplingParams(temperature=0.7),
    "own": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.0, top_k=2),
    "top-p": SamplingParams(temperature=0.7, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
    "top-n-sigma": SamplingParams(temperature=1.0, top_n_sigma=0.9),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 1.5, 1: -np.inf}),
    "mask": SamplingParams(temperature=1.0, allowed_tokens=[0, 2], top_p=0.9),
}
Path = tuple[int, ...]


def shapes(k: int, *, chains: bool) -> list[I32 | None]:
    """Every way in which k nodes can hang together; None is a chain."""
    if chains:
        return [None]
    return [np.array(parents, np.int32) for parents in product(*[range(-1, i) for i in range(k)])]


def paths(draft: Draft) -> list[Path]:
    """The tokens on the way to each node."""
    found: list[Path] = []
    for node in range(len(draft)):
        parent = draft.parents[node]
        found.append((*(found[parent] if parent >= 0 else ()), draft.tokens[node]))
    return found


class Language:
    """Random next-token logits after every path, under some parameters: a target, or with another seed a drafter."""

    def __init__(self, vocab: int, params: SamplingParams, seed: int, prompt: I32 | None = None) -> None:
        self.vocab, self._seed = vocab, seed
        prompt = np.array([0], np.int32) if prompt is None else prompt
        self._start = Chooser.start(params, Noise(0), rules_for(params, vocab), prompt)
        self._known: dict[Path, F64] = {}

    def logits(self, path: Path) -> F32:
        return np.random.default_rng([self._seed, len(path), *path]).normal(0, 1.2, self.vocab).astype(np.float32)

    def p(self, path: Path) -> F64:
        if path not in self._known:
            chooser = self._start
            for token in path:
                chooser = chooser.advance(token)
            self._known[path] = chooser.probabilities(self.logits(path))
        return self._known[path]

    def sequences(self, length: int) -> dict[Path, float]:
        """The exact distribution over sequences."""
        out = {(): 1.0}
        for _ in range(length):
            out = {(*x, t): w * self.p(x)[t] for x, w in out.items() for t in range(self.vocab) if self.p(x)[t] > 0}
        return out


def output(target: Language, drafts: Iterator[tuple[float, Draft]], length: int, rule=reject) -> dict[Path, float]:  # type: ignore[no-untyped-def]
    """The distribution over sequences of one verified step, continued plainly to ``length`` tokens."""
    out: dict[Path, float] = defaultdict(float)
    for drawn, draft in drafts:
        ends = [(), *paths(draft)]
        for weight, verdict in every_outcome(lambda chance: rule(lambda n: target.p(ends[n + 1]), draft, chance)):  # noqa: B023
            gained = {tuple(verdict.tokens.tolist()): drawn * weight}
            for _ in range(length - len(verdict.tokens)):
                gained = {(*x, t): w * target.p(x)[t] for x, w in gained.items() for t in range(target.vocab)}
            for x, w in gained.items():
                out[x] += w
    return out


def same(a: dict[Path, float], b: dict[Path, float]) -> bool:
    assert abs(sum(a.values()) - 1) < 1e-12
    return all(abs(a.get(x, 0.0) - b.get(x, 0.0)) < 1e-12 for x in {*a, *b})


def sampled_trees(drafter: Language, parents: I32 | None, size: int, *, replace: bool) -> Iterator[tuple[float, Draft]]:
    """Every draft that sampling can give, with its probability; siblings are drawn with or without replacement."""
    shape = draft_of([0] * size, parents)

    def extend(tokens: list[int], qs: list[F64], weight: float) -> Iterator[tuple[float, Draft]]:
        node = len(tokens)
        if node == size:
            yield weight, draft_of(tokens, parents, np.array(qs).reshape(size, drafter.vocab))
            return
        parent = shape.parents[node]
        ends = paths(draft_of(tokens, None if parents is None else parents[:node]))
        q = drafter.p(ends[parent] if parent >= 0 else ()).copy()
        if not replace:
            for sibling in range(node):
                if shape.parents[sibling] == parent:
                    q[tokens[sibling]] = 0.0
            if q.sum() == 0:  # nothing is left to propose: this shape cannot be filled
                q = drafter.p(ends[parent] if parent >= 0 else ()).copy()
            q /= q.sum()
        for token in np.flatnonzero(q > 0):
            yield from extend([*tokens, int(token)], [*qs, q], weight * float(q[token]))

    return extend([], [], 1.0)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("size", range(5))
def test_sampled_chains(name: str, size: int) -> None:
    vocab = 3 if size < 4 else 2
    params = PARAMS[name] if vocab == 3 else SamplingParams(temperature=PARAMS[name].temperature)
    target, drafter = Language(vocab, params, 1), Language(vocab, params, 2)
    drafts = sampled_trees(drafter, None, size, replace=True)
    assert same(output(target, drafts, size + 1), target.sequences(size + 1))


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("replace", [True, False])
def test_sampled_trees(name: str, replace: bool) -> None:
    target, drafter = Language(3, PARAMS[name], 3), Language(3, PARAMS[name], 4)
    expected = target.sequences(4)
    for parents in shapes(3, chains=False):
        assert same(output(target, sampled_trees(drafter, parents, 3, replace=replace), 4), expected)


@pytest.mark.parametrize("name", PARAMS)
def test_deterministic_trees_with_duplicates(name: str) -> None:
    target = Language(3, PARAMS[name], 5)
    expected = target.sequences(4)
    for parents in shapes(3, chains=False):
        for tokens in product(range(3), repeat=3):
            draft = draft_of(tokens, parents)
            assert same(output(target, iter([(1.0, draft)]), 4), expected)


@pytest.mark.parametrize("vocab", [4, 5])
def test_larger_vocabularies(vocab: int) -> None:
    params = SamplingParams(temperature=1.0, top_k=vocab - 1)
    target, drafter = Language(vocab, params, 6), Language(vocab, params, 7)
    for parents in shapes(2, chains=False):
        for replace in (True, False):
            drafts = sampled_trees(drafter, parents, 2, replace=replace)
            assert same(output(target, drafts, 3), target.sequences(3))


def test_a_zero_residual_never_divides() -> None:
    target = Language(3, SamplingParams(temperature=1.0), 8)
    twin = Language(3, SamplingParams(temperature=1.0), 8)  # p = q everywhere: nothing remains after a refusal
    for parents in shapes(3, chains=False):
        drafts = sampled_trees(twin, parents, 3, replace=True)
        assert same(output(target, drafts, 4), target.sequences(4))


def test_a_candidate_that_q_rules_out_is_a_bug_of_the_drafter() -> None:
    draft = draft_of([1], q=np.array([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="rules out"):
        list(every_outcome(lambda chance: reject(lambda n: np.array([0.5, 0.5]), draft, chance)))


def test_a_biased_rule_would_be_caught() -> None:
    """The proof can fail: without the residual, the same sum is off by far."""

    def biased(p, draft, chance):  # type: ignore[no-untyped-def]
        class NoResidual:
            accept = chance.accept
            choose = chance.choose

            def draw(self, weights: F64, depth: int) -> int:
                return int(chance.draw(p(-1) if depth == 0 else weights, depth))

        return reject(p, draft, NoResidual())

    params = SamplingParams(temperature=1.0)
    target, drafter = Language(3, params, 1), Language(3, params, 2)
    found = output(target, sampled_trees(drafter, None, 1, replace=True), 2, rule=biased)
    assert not same(found, target.sequences(2))


def test_coupled_and_rejection_agree_when_greedy() -> None:
    greedy = Language(3, PARAMS["greedy"], 10)
    for parents in shapes(3, chains=False):
        for tokens in product(range(3), repeat=3):
            draft = draft_of(tokens, parents)
            ends = [(), *paths(draft)]
            choose = lambda _, nodes, ends=ends: np.array([greedy.p(ends[n + 1]).argmax() for n in nodes])  # noqa: E731
            walked = walk(choose, Drafts.of([draft])).row(0)
            (_, rejected), *more = every_outcome(lambda chance: reject(lambda n: greedy.p(ends[n + 1]), draft, chance))  # noqa: B023
            assert not more
            assert rejected.tokens.tolist() == walked.tokens.tolist()


def plain(choice: dict[Path, int]) -> list[int]:
    """Plain decoding, as far as the choice function is defined, and one token beyond."""
    out: list[int] = []
    while tuple(out) in choice:
        out.append(choice[tuple(out)])
    return out


@pytest.mark.parametrize(
    ("vocab", "size", "chains"),
    [(2, k, False) for k in range(5)] + [(3, k, False) for k in range(4)] + [(5, 2, False), (3, 4, True), (4, 3, True)],
)
def test_every_draft_gives_the_tokens_of_plain_decoding(vocab: int, size: int, chains: bool) -> None:
    cases = 0
    for parents in shapes(size, chains=chains):
        for tokens in product(range(vocab), repeat=size):
            draft = draft_of(tokens, parents)
            ends = paths(draft)
            prefixes = list(dict.fromkeys([(), *ends]))  # duplicates among siblings are one prefix
            choices = np.array(list(product(range(vocab), repeat=len(prefixes))), np.int32)  # [C, P]
            column = np.array([prefixes.index(p) for p in [(), *ends]])
            c = len(choices)  # every choice function is a row of one batch
            drafts = Drafts(
                np.tile(draft.tokens, (c, 1)),
                np.full(c, size, np.int32),
                None if parents is None else np.tile(parents, (c, 1)),
            )
            asked: list[tuple[int, int]] = []

            def choose(rows: I32, nodes: I32, choices: I32 = choices, column: I32 = column, asked: list = asked) -> I32:  # type: ignore[type-arg]
                asked.extend(zip(rows.tolist(), nodes.tolist(), strict=True))
                return choices[rows, column[nodes + 1]]

            distinct = len(prefixes) == size + 1
            for row, verdict in enumerate(walk(choose, drafts)):
                expected = plain(dict(zip(prefixes, choices[row].tolist(), strict=True)))
                gained = verdict.tokens.tolist()
                # Among equal siblings only the first is followed, so what hangs under another may be missed.
                assert gained == expected if distinct else gained == expected[: len(gained)]
                assert [draft.tokens[n] for n in verdict.path] == gained[:-1]
                assert [draft.parents[n] for n in verdict.path] == [-1, *verdict.path.tolist()][:-1]
                cases += 1
                visited = [(row, -1), *((row, int(node)) for node in verdict.path)]
                assert set(visited) <= set(asked)
            assert len(asked) == len(set(asked)), "a node was asked for twice"
    assert cases >= vocab


def test_ragged_rows_do_not_see_each_other() -> None:
    drafts = Drafts.chains([[1, 2, 3], [], [1, 9]], "x")
    answers = {(0, -1): 1, (0, 0): 2, (0, 1): 7, (1, -1): 4, (2, -1): 1, (2, 0): 0}
    verdicts = walk(
        lambda rows, nodes: np.array([answers[r, n] for r, n in zip(rows.tolist(), nodes.tolist(), strict=True)]),
        drafts,
    )
    assert [v.tokens.tolist() for v in verdicts] == [[1, 2, 7], [4], [1, 0]]
    assert verdicts.accepted.tolist() == [2, 0, 1]


def test_what_pads_a_narrower_row_is_never_followed() -> None:
    """Row 1 has no node, row 2 one: what stands behind it in the batch would agree with every choice."""
    drafts = Drafts(np.zeros((3, 2), np.int32), np.array([2, 0, 1], np.int32), None)
    found = walk(lambda rows, nodes: np.zeros(len(rows), np.int32), drafts)
    assert found.accepted.tolist() == [2, 0, 1]
