"""The choice on its own: its distribution, ties, filters, errors, log-probabilities."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.common.arrays import F32, F64
from outpace.errors import NoTokenAllowedError
from outpace.exact.noise import GUMBEL_MAX, Noise, Stream
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser, choose, filtered, probabilities, scores, token_logprob
from outpace.params import SamplingParams

# Few distinct values, so that ties are common; some tokens forbidden.
tied = st.lists(st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=1, max_size=12)
real = st.lists(st.floats(-40, 40, width=32), min_size=1, max_size=40)
some_logits = st.one_of(tied, real).filter(lambda x: max(x) > -np.inf).map(lambda x: np.array(x, np.float32))
some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.001, 0.3, 0.7, 1.0, 1.7, 100.0]),
    top_n_sigma=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0, 100.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0]),
)


def slow_filter(logits: F32, params: SamplingParams) -> list[int]:
    """The definition, word for word: top-n-sigma, top-k by (logit, lowest id), then top-p among those, then min-p."""
    ids = [i for i in range(len(logits)) if logits[i] > -np.inf]
    order = sorted(ids, key=lambda i: (-logits[i], i))
    peak = float(logits[order[0]])
    if params.top_n_sigma:
        limit = peak - params.top_n_sigma * statistics.pstdev(float(logits[i]) for i in ids)
        order = [i for i in order if float(logits[i]) >= limit]
    if params.top_k:
        order = order[: params.top_k]
    weight = {i: np.exp((float(logits[i]) - peak) / params.temperature) for i in order}
    if params.top_p < 1:
        total, reached, kept = sum(weight.values()), 0.0, []
        for i in order:
            kept.append(i)
            reached += weight[i] / total
            if reached >= params.top_p:
                break
        order = kept
    if params.min_p:
        order = [i for i in order if (float(logits[i]) - peak) / params.temperature >= np.log(params.min_p)]
    return sorted(order)


def near_a_boundary(logits: F32, params: SamplingParams) -> bool:
    """Whether rounding may decide what top-n-sigma, top-p or min-p keeps."""
    finite = np.float64(logits[logits > -np.inf])
    below = (finite.max() - finite) - params.top_n_sigma * finite.std()
    if params.top_n_sigma and np.abs(below).min() < 1e-9 * (1 + np.abs(finite).max()):
        return True
    p = np.sort(probabilities(logits, params.with_(top_p=1.0, min_p=0.0)))[::-1]
    gaps = (np.float64(logits) - float(logits.max())) / params.temperature - np.log(max(params.min_p, 1e-300))
    on_top_p = params.top_p < 1 and np.abs(np.cumsum(p) - params.top_p).min() < 1e-12
    return bool(on_top_p or (0 < params.min_p < 1 and np.abs(gaps[np.isfinite(gaps)]).min(initial=1) < 1e-9))


@settings(deadline=None, max_examples=400)
@given(some_logits, some_params)
def test_filters_keep_what_their_definition_keeps(logits: F32, params: SamplingParams) -> None:
    kept = filtered(logits, params)
    if not near_a_boundary(logits, params):
        assert kept.tolist() == slow_filter(logits, params)
    assert len(kept)
    assert (np.diff(kept) > 0).all()
    assert int(np.argmax(logits)) in kept.tolist()


def test_top_n_sigma_keeps_the_same_at_every_temperature() -> None:
    logits = np.array([4.0, 3.0, 1.0, 0.0, -np.inf, -8.0], np.float32)  # the mean is 0, the deviation 4.24
    for n, kept in ((0.2, [0]), (0.5, [0, 1]), (0.8, [0, 1, 2]), (1.0, [0, 1, 2, 3]), (3.0, [0, 1, 2, 3, 5])):
        for temperature in (0.01, 1.0, 50.0):
            assert filtered(logits, SamplingParams(temperature=temperature, top_n_sigma=n)).tolist() == kept
    one = np.array([-np.inf, 2.0], np.float32)
    assert filtered(one, SamplingParams(temperature=1.0, top_n_sigma=0.1)).tolist() == [1]


@settings(deadline=None, max_examples=300)
@given(some_logits, some_params, st.integers(0, 2**64 - 1), st.integers(0, 1000), st.sampled_from(list(Stream)))
def test_pruning_never_changes_the_choice(
    logits: F32, params: SamplingParams, seed: int, index: int, stream: Stream
) -> None:
    noise = Noise(seed)
    assert choose(logits, params, noise, index, stream) == np.argmax(scores(logits, params, noise, index, stream))
    greedy = params.with_(temperature=0.0)
    assert choose(logits, greedy, noise, index, stream) == np.argmax(logits)


def test_the_fast_search_finds_the_exact_winner_at_the_real_vocabulary_size() -> None:
    for seed, options in enumerate(
        [{}, {}, {"temperature": 0.05}, {"temperature": 100.0}, {"top_p": 0.9}, {"top_k": 50}]
    ):
        params = SamplingParams(**{"temperature": 1.0, **options})
        logits = np.random.default_rng(seed).normal(0, 3, 49_152).astype(np.float32)
        for index in range(6):
            expected = np.argmax(scores(logits, params, Noise(seed), index, Stream.CHOICE))
            assert choose(logits, params, Noise(seed), index) == expected


class Fixed(Noise):
    """Noise whose every value is given."""

    values: F64

    def uniform(self, index: int, tokens: np.ndarray, stream: Stream) -> F64:
        uniform: F64 = np.exp(-np.exp(-self.values[tokens]))
        return uniform

    def gumbel(self, index: int, tokens: np.ndarray, stream: Stream) -> F64:
        return self.values[tokens]


def test_pruning_at_its_very_edge() -> None:
    """The likeliest token has the least noise and another the most there is: it must still win."""
    noise = object.__new__(Fixed)
    Fixed.values = np.array([-3.13, GUMBEL_MAX, *[0.0] * 20])
    for gap, winner in ((26.0, 1), (26.005, 1), (26.02, 0)):
        logits = np.array([0.0, -gap, *[-40.0] * 20], np.float32)  # many that are pruned, so that pruning happens
        assert choose(logits, SamplingParams(temperature=1.0), noise, 0) == winner


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.array([0, 5, 5, 1, 5], np.float32)
    assert choose(logits, SamplingParams(), Noise(0), 0) == 1
    assert filtered(logits, SamplingParams(temperature=1.0, top_k=2)).tolist() == [1, 2]
    assert filtered(logits, SamplingParams(temperature=1.0, top_p=0.3)).tolist() == [1]
    noise = object.__new__(Fixed)
    Fixed.values = np.zeros(5)
    assert choose(logits, SamplingParams(temperature=1.0), noise, 0) == 1


@settings(deadline=None, max_examples=100)
@given(some_logits, some_params)
def test_probabilities_are_a_softmax_over_what_is_kept(logits: F32, params: SamplingParams) -> None:
    p = probabilities(logits, params)
    kept = filtered(logits, params)
    expected = torch.softmax(torch.from_numpy(logits[kept]).double() / params.temperature, 0).numpy()
    np.testing.assert_allclose(p[kept], expected, rtol=1e-12, atol=1e-300)
    assert np.isclose(p.sum(), 1)
    assert (np.delete(p, kept) == 0).all()
    assert probabilities(logits, params.with_(temperature=0.0)).tolist() == np.eye(len(p))[np.argmax(logits)].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("function", ["choose", "probabilities"])
def test_logits_that_allow_no_choice_are_refused(temperature: float, function: str) -> None:
    chooser = Chooser(SamplingParams(temperature=temperature, top_p=0.9, top_k=2), Noise(0), 0)
    decide = getattr(chooser, function)
    with pytest.raises(NoTokenAllowedError, match="every token is forbidden"):
        decide(np.full(5, -np.inf, np.float32))
    for bad in (np.nan, np.inf):
        with pytest.raises(FloatingPointError, match="dtype='float32'"):
            decide(np.array([1, 2, bad, -np.inf], np.float32))


def test_the_chooser_is_immutable_and_counts_outputs() -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0)
    start = Chooser.start(params, Noise(4), rules_for(params, 6), np.array([1], np.int32))
    logits = np.zeros(6, np.float32)
    before = start.scores(logits)
    left, right = start.advance(2), start.advance(3)
    assert (left.index, right.index, left.advance(2).index) == (1, 1, 2)
    assert left.probabilities(logits)[2] < left.probabilities(logits)[3]
    assert right.probabilities(logits)[2] > right.probabilities(logits)[3]
    assert (start.scores(logits) == before).all()
    assert (logits == 0).all(), "the model's own logits were changed"
    assert start.choose(logits) == np.argmax(before)


@settings(deadline=None, max_examples=200)
@given(some_logits, st.integers(0, 50), st.data())
def test_logprobs_are_torchs_log_softmax(logits: F32, top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    found = token_logprob(logits, token, top)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0).numpy()
    assert found.token == token
    np.testing.assert_allclose(found.logprob, expected[token], rtol=1e-12, atol=1e-12)
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top]
    assert [i for i, _, _ in found.top] == best
    spelled = found.with_texts(lambda token: f"<{token}>")
    assert (spelled.text, [a.text for a in spelled.top]) == (f"<{token}>", [f"<{i}>" for i in best])
    assert (spelled.token, spelled.logprob) == (found.token, found.logprob)
    assert [a.logprob for a in spelled.top] == [a.logprob for a in found.top]
    np.testing.assert_allclose([value for _, value, _ in found.top], expected[best], rtol=1e-12, atol=1e-12)
