"""Choices in torch, as a card makes them, against ``sampling.choose``: the same noise, the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.exact import noise
from outpace.exact.noise import Noise, Stream
from outpace.exact.sampling import Chooser, choose, judged
from outpace.models.base import Batch
from outpace.models.torch import choose as there
from outpace.models.torch.choose import CANDIDATES, LEFT, Asked
from outpace.models.torch.output import TorchOutput
from outpace.params import SamplingParams

VOCAB = 3000


def asked(choosers: list[Chooser]) -> Asked:
    return Asked.of(torch.from_numpy(Asked.packed(choosers, np.zeros(len(choosers), np.int64)).copy()))


def chosen(logits: Any, choosers: list[Chooser]) -> list[int]:
    filtered = any(c.params.filtered for c in choosers)
    found: list[int] = there.sampled(torch.from_numpy(logits), asked(choosers), filtered)[0].tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 2**20),
    index=st.integers(0, 2**31),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=40),
)
def test_noise_is_numpy_s_to_the_bit(seed: int, sample: int, index: int, tokens: list[int]) -> None:
    ids = np.array(sorted(tokens), np.int32)
    expected = Noise(seed, sample).gumbel(index, ids, Stream.CHOICE)
    chooser = Chooser(SamplingParams(temperature=1.0), Noise(seed, sample), index)
    found = there.gumbel(there.uniform(torch.from_numpy(ids.astype(np.int64))[None], asked([chooser]))).numpy()[0]
    assert found.view(np.int64).tolist() == expected.view(np.int64).tolist()


def test_the_logarithm_is_the_noise_s_to_the_bit() -> None:
    x = np.concatenate([np.random.default_rng(0).uniform(0, 23, 20000), 2.0 ** -np.arange(1, 40), [1.0, 1 - 2**-33]])
    assert there._log(torch.from_numpy(x)).numpy().tobytes() == noise.log(x).tobytes()


KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "top_n_sigma": {"top_n_sigma": 2.0},
    "all": {"top_k": 200, "top_p": 0.97, "min_p": 0.01, "top_n_sigma": 3.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_choices_are_those_of_the_host(kind: str, temperature: float) -> None:
    rng = np.random.default_rng(len(kind))
    logits = (rng.standard_normal((60, VOCAB)) * 3).astype(np.float32)
    logits[:20] = np.round(logits[:20])  # ties
    logits[20:30, rng.integers(0, VOCAB, 900)] = -np.inf
    params = SamplingParams(temperature=temperature, **KINDS[kind])
    choosers = [Chooser(params, Noise(int(rng.integers(2**63)), i % 3), 7 * i) for i in range(len(logits))]
    expected = [choose(row, c.params, c.noise, c.index) for row, c in zip(logits, choosers, strict=True)]
    found = chosen(logits, choosers)
    assert [a for a in found if a != LEFT] == [b for a, b in zip(found, expected, strict=True) if a != LEFT]
    assert found.count(LEFT) <= (len(found) // 2 if temperature > 1.5 else 3)  # flat: filters may keep more than fit
    assert len(set(found)) > 5


@pytest.mark.parametrize("kind", [*KINDS, "greedy"])
def test_near_ties_are_those_of_the_host(kind: str) -> None:
    rng, share = np.random.default_rng(7), 0.02
    logits = (rng.standard_normal((80, VOCAB)) * 3).astype(np.float32)
    logits[0, :2] = 30.0
    params = SamplingParams(temperature=0.0 if kind == "greedy" else 0.7, **KINDS.get(kind, {}))
    choosers = [Chooser(params, Noise(5, i), i) for i in range(len(logits))]
    expected = [judged(row, c.params, c.noise, c.index, share) for row, c in zip(logits, choosers, strict=True)]
    values = torch.from_numpy(logits)

    def found(rounding: float) -> list[tuple[int, int]]:
        if params.greedy:
            return list(zip(*there.greedy(values, rounding).tolist(), strict=True))
        return list(zip(*there.sampled(values, asked(choosers), params.filtered, rounding).tolist(), strict=True))

    pairs = [(a, b) for a, b in zip(found(share), expected, strict=True) if a[0] != LEFT]
    assert len(pairs) > 40
    assert all(a == b for a, b in pairs)
    assert 0 < sum(near for _, near in expected) < len(expected)
    assert expected[0][1] or not params.greedy
    assert found(0.0) == [(token, 0) for token, _ in found(share)]
    assert not any(judged(row, c.params, c.noise, c.index, 0.0)[1] for row, c in zip(logits, choosers, strict=True))


def test_rows_of_several_kinds_are_chosen_together() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((len(KINDS), VOCAB)) * 4).astype(np.float32)
    choosers = [Chooser(SamplingParams(temperature=0.8, **each), Noise(9), 3) for each in KINDS.values()][1:]
    expected = [choose(row, c.params, c.noise, c.index) for row, c in zip(logits[1:], choosers, strict=True)]
    assert chosen(logits[1:], choosers) == expected


def test_what_cannot_be_decided_there_is_left() -> None:
    flat = np.zeros((1, VOCAB), np.float32)  # a filter that keeps more than CANDIDATES
    assert VOCAB > 2 * CANDIDATES
    assert chosen(flat, [Chooser(SamplingParams(temperature=1.0, top_p=0.9), Noise(1), 0)]) == [LEFT]
    edge = np.full((1, VOCAB), -np.inf, np.float32)
    edge[0, :4] = 0.0  # the sums reach exactly 1/2: another order of sums might not
    assert chosen(edge, [Chooser(SamplingParams(temperature=1.0, top_p=0.5), Noise(1), 0)]) == [LEFT]
    for wrong in (np.nan, np.inf):
        broken = np.zeros((1, VOCAB), np.float32)
        broken[0, 5] = wrong
        assert chosen(broken, [Chooser(SamplingParams(temperature=1.0), Noise(1), 0)]) == [LEFT]
        assert there.greedy(torch.from_numpy(broken))[0].tolist() == [LEFT]
    assert there.greedy(torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3]))[0].tolist() == [1, LEFT]


def test_near_ties_of_what_is_left_are_the_host_s() -> None:
    """A filter keeps more than CANDIDATES, of which the likeliest alone are looked at there."""
    params, share = SamplingParams(temperature=1.0, top_p=0.9), 0.2
    logits = np.random.default_rng(4).standard_normal((40, VOCAB)).astype(np.float32) / 10
    batch = Batch.pack(list(range(40)), [np.zeros(1, np.int32)] * 40, [0] * 40, [True] * 40)
    output = TorchOutput(batch, torch.from_numpy(logits), rounding=share)
    output._on_device = True
    choosers = [Chooser(params, Noise(i), i) for i in range(40)]
    expected = [judged(row, params, c.noise, c.index, share) for row, c in zip(logits, choosers, strict=True)]
    assert output.choose(batch.wanted, choosers).tolist() == [token for token, _ in expected]
    assert [output.near_ties(batch.wanted[i : i + 1]) for i in range(40)] == [near for _, near in expected]
    assert 0 < sum(near for _, near in expected) < 40
    there_too = there.sampled(torch.from_numpy(logits), asked(choosers), True, share)
    assert set(there_too[0].tolist()) == {LEFT}
    assert there_too[1].tolist() != [near for _, near in expected]


def test_likeliest_is_by_logit_then_by_id() -> None:
    logits = torch.tensor([[0.0, -0.0, 2.0, -1.0, 2.0, -2.0]])
    assert there.likeliest(logits, 6).tolist() == [[2, 4, 0, 1, 3, 5]]
