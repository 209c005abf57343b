"""Chi-square at the real vocabulary size: what is sampled through drafts is distributed as the target says.

Contexts are the last token modulo a few, each with its own Zipf-like logits; given the context, a token is a draw from
the context's distribution, so the counts of every context are compared with it, over seeds and output positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

import outpace.engine.walk
from outpace import Engine, SamplingParams
from outpace.common.arrays import F32, F64, I32
from outpace.common.fair_lock import FairLock
from outpace.drafters.base import Drafter, RowView
from outpace.engine.results import Result
from outpace.exact.drafts import Draft, Drafts, Verdict
from outpace.exact.noise import Stream
from outpace.exact.verify import Chance, Distribution
from outpace.models.base import Batch, HostOutput, Model, ModelInfo
from tests.toy import ToyKV

VOCAB, CONTEXTS, SIZE = 49_152, 2, 2
SEEDS, LENGTH = 26, 40
BIASED = 1e-6  # what a wrong sampler must stay under, and a right one far above


def zipf(context: int, seed: int, sharpness: float = 1.15) -> F32:
    """Logits [V] shaped like a language model's: a power law over shuffled ids, with some noise."""
    rng = np.random.default_rng([seed, context])
    ranks = rng.permutation(VOCAB) + 1.0
    return (-sharpness * np.log(ranks) + rng.normal(0, 0.3, VOCAB) + 9).astype(np.float32)


TARGET = np.stack([zipf(c, 1) for c in range(CONTEXTS)])
# A drafter that is near the target: the rest of its log-probability is another language's.
DRAFTER = 0.7 * TARGET + 0.3 * np.stack([zipf(c, 2) for c in range(CONTEXTS)])


class Contextual(Model):
    """A model whose logits depend on the last token's context alone."""

    def __init__(self) -> None:
        self.kv, self.lock = ToyKV(), FairLock()
        self.info = ModelInfo("contextual", "toy", VOCAB, 1, 1, 4096, (), "float32", "cpu", 0, 8)

    def forward(self, batch: Batch) -> HostOutput:
        for b in range(len(batch.starts) - 1):
            at = slice(batch.starts[b], batch.starts[b + 1])
            self.kv.write(int(batch.row[at][0]), batch.token[at], batch.position[at])
        return HostOutput(batch.wanted, TARGET[batch.token[batch.wanted] % CONTEXTS])

    def close(self) -> None:
        pass


class Likeliest(Drafter):
    """Deterministic, as a lookup is: the drafter's likeliest token; q is one-hot."""

    name = "likeliest"

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        best = TARGET.argmax(axis=1)
        chains = []
        for view, size in zip(rows, sizes, strict=True):
            chain = [int(view.tokens[-1])]
            for _ in range(size):
                chain.append(int(best[chain[-1] % CONTEXTS]))
            chains.append(chain[1:])
        return Drafts.chains(chains, self.name)


class Sampling(Drafter):
    """Draws from q: from the request's noise, as a draft model does; under ``coupled`` the choice's own noise."""

    name = "sampling"

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        width = int(sizes.max())
        tokens, q = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width, VOCAB))
        for i, view in enumerate(rows):
            rejection = view.acceptance == "rejection"
            chooser, last = view.chooser, int(view.tokens[-1])
            for depth in range(sizes[i]):
                logits = DRAFTER[last % CONTEXTS]
                last = tokens[i, depth] = chooser.choose(logits, Stream.DRAFT if rejection else Stream.CHOICE)
                if rejection:
                    q[i, depth] = chooser.probabilities(logits)
                chooser = chooser.advance(last)
        return Drafts(tokens, sizes, q=q if rows[0].acceptance == "rejection" else None, sources=(self.name,))


def sample(params: SamplingParams, drafter: Drafter, acceptance: str) -> tuple[list[Result], float]:
    """What is sampled through the engine, and the acceptance rate."""
    with Engine(Contextual(), drafter=drafter, size=SIZE, acceptance=acceptance, max_rows=8) as engine:  # type: ignore[arg-type]
        each = [params.with_(seed=seed, max_tokens=LENGTH) for seed in range(SEEDS)]
        results = engine.generate_many([[seed] for seed in range(SEEDS)], each)
        return results, engine.stats.acceptance_rate


def pvalue(results: list[Result], params: SamplingParams) -> float:
    """Chi-square's p-value of everything sampled, were it sampled under ``params``."""
    statistic, freedom = 0.0, 0
    for context in range(CONTEXTS):
        drawn = [t for r in results for c, t in zip([r.seed, *r.token_ids], r.token_ids) if c % CONTEXTS == context]  # noqa: B905
        p = reference(TARGET[context], params)
        order = np.argsort(-p, kind="stable")
        # Bins are whole tokens in falling order, pooled until each has an expectation of at least 5.
        bins = np.zeros(VOCAB, np.int64)
        bins[order] = pooled_bins(p[order] * len(drawn))
        expected = np.bincount(bins, weights=p * len(drawn))
        assert expected.min() >= 5
        seen = np.bincount(bins[drawn], minlength=len(expected))
        assert (p[drawn] > 0).all(), "a token was sampled that the filters forbid"
        statistic += float(((seen - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
    assert freedom > 20
    return float(stats.chi2.sf(statistic, freedom))


def reference(logits: F32, params: SamplingParams) -> F64:
    """The distribution [V], computed apart from the code under test."""
    scaled = logits.astype(np.float64) / params.temperature
    if params.top_k:
        scaled[np.argsort(-scaled, kind="stable")[params.top_k :]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    out: F64 = weights / weights.sum()
    return out


def pooled_bins(expected: F64) -> np.ndarray:
    """A bin for each of the falling expectations, such that every bin's sum is at least 5; the last takes the rest."""
    bins, current, total = np.zeros(len(expected), np.int64), 0, 0.0
    left = expected[::-1].cumsum()[::-1]
    for i, value in enumerate(expected):
        bins[i] = current
        total += value
        if total >= 5 and i + 1 < len(left) and left[i + 1] >= 5.5:
            current, total = current + 1, 0.0
    return bins


OWN = SamplingParams(temperature=1.0)
CASES: dict[str, tuple[SamplingParams, Callable[[], Drafter], str, tuple[float, float]]] = {
    "coupled, likeliest": (OWN, Likeliest, "coupled", (0.05, 0.5)),
    "coupled, sampled": (SamplingParams(temperature=0.9, top_k=5000), Sampling, "coupled", (0.15, 0.8)),
    "rejection, one-hot q": (OWN, Likeliest, "rejection", (0.05, 0.5)),
    "rejection, sampled q": (OWN, Sampling, "rejection", (0.15, 0.8)),
    "rejection, sampled q, top-k": (SamplingParams(temperature=0.8, top_k=400), Sampling, "rejection", (0.15, 0.9)),
}


@pytest.mark.parametrize(("params", "drafter", "acceptance", "rates"), CASES.values(), ids=CASES.keys())
def test_what_is_sampled_is_the_targets_distribution(
    params: SamplingParams, drafter: Callable[[], Drafter], acceptance: str, rates: tuple[float, float]
) -> None:
    results, rate = sample(params, drafter(), acceptance)
    assert pvalue(results, params) > 1e-3
    # The same test sees other mistakes than the one below: here a temperature that is a fifth off.
    assert pvalue(results, params.with_(temperature=params.temperature * 1.2)) < BIASED
    assert rates[0] < rate < rates[1], "the drafts were never, or always, accepted: little was tested"


def no_residual(p: Distribution, draft: Draft, chance: Chance) -> Verdict:
    """Biased: accepts with min(1, p / q), but draws from p after a refusal."""
    at, tokens = -1, list[int]()
    for node in range(len(draft)):
        token, target = draft.tokens[node], p(at)
        q = 1.0 if draft.q is None else float(draft.q[node][token])
        if not chance.accept(min(1.0, float(target[token]) / q), node, 0):
            return Verdict(np.array([*tokens, chance.draw(target, node)], np.int32), np.arange(node, dtype=np.int32))
        tokens.append(token)
        at = node
    last = chance.choose(p(at), len(draft))
    return Verdict(np.array([*tokens, last], np.int32), np.arange(len(draft), dtype=np.int32))


@pytest.mark.parametrize("drafter", [Likeliest, Sampling])
def test_a_sampler_that_skips_the_residual_fails(
    monkeypatch: pytest.MonkeyPatch, drafter: Callable[[], Drafter]
) -> None:
    monkeypatch.setattr(outpace.engine.walk, "reject", no_residual)
    assert pvalue(sample(OWN, drafter(), "rejection")[0], OWN) < BIASED
