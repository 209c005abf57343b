"""The noise: the published generator bit for bit, a logarithm that is right, numbers independent of each other."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outpace.exact.noise import GUMBEL_MAX, Noise, Stream, log, philox, to_uniform

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
TWO_ULP = 2 * 2.0**-52


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    c = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    words = philox((np.array([c[0]], np.uint32), *c[1:]), low | high << 32)
    assert " ".join(f"{word[0]:08x}" for word in words) == expected


def test_a_number_is_addressed_as_documented() -> None:
    """Counter (token // 4, output index, sample, stream), word token % 4, key = seed, low half first."""
    seed, index, sample, token = 0x0123456789ABCDEF, 77, 3, 4 * 1234 + 2
    words = philox((np.array([1234], np.uint32), index, sample, int(Stream.ACCEPT)), seed)
    assert Noise(seed, sample).bits(index, np.array([token], np.int32), Stream.ACCEPT)[0] == words[2][0]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**20),
    st.integers(0, 60_000),
    st.integers(4, 200),
    st.sampled_from(list(Stream)),
)
def test_a_whole_span_has_the_bits_of_its_tokens_alone(
    seed: int, index: int, first: int, count: int, stream: Stream
) -> None:
    noise, ids = Noise(seed), np.arange(first, first + count, dtype=np.int32)
    whole = noise.bits(index, ids, stream)
    shuffled = np.random.default_rng(seed).permutation(count)
    assert (noise.bits(index, ids[shuffled], stream) == whole[shuffled]).all()
    assert noise.bits(index, ids[:1], stream)[0] == whole[0]


def test_ids_that_only_look_contiguous() -> None:
    ids = np.array([4, 9, 6, 7], np.int32)  # the ends fit, the middle does not
    alone = [Noise(1).bits(0, ids[i : i + 1], Stream.CHOICE)[0] for i in range(4)]
    assert Noise(1).bits(0, ids, Stream.CHOICE).tolist() == alone
    assert len(Noise(1).bits(0, ids[:0], Stream.CHOICE)) == 0


def test_log_is_within_two_units_in_the_last_place() -> None:
    smallest, largest = to_uniform(np.array([0, 2**32 - 1], np.uint32))
    assert (smallest, largest) == (2.0**-33, 1 - 2.0**-33)
    edges = [smallest, largest, 0.5, 2**-0.5, np.nextafter(2**-0.5, 0), np.nextafter(2**-0.5, 1)]
    edges += [
        1.0, np.nextafter(1, 0), np.nextafter(1, 2), 1 - 2.0**-20, 1 + 2.0**-20, 2.0, 22.873, 2.0**-33 * 1.5, np.e,
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    x = np.concatenate([edges, to_uniform(rng.integers(0, 2**32, 3000).astype(np.uint32)), rng.uniform(1e-9, 23, 3000)])
    with mpmath.workprec(120):
        exact = [mpmath.log(mpmath.mpf(float(value))) for value in x]
        for value, mine, true in zip(x, log(x), exact, strict=True):
            assert abs(mpmath.mpf(float(mine)) - true) <= TWO_ULP * abs(true), (value.hex(), mine, true)


def test_log_agrees_with_numpy_over_every_exponent() -> None:
    x = np.concatenate([np.ldexp(m, np.arange(-1000, 1000)) for m in (0.5, 0.7, 0.75, 1 - 2.0**-53)])
    np.testing.assert_array_max_ulp(log(x), np.log(x), maxulp=2)


def test_gumbel_never_exceeds_its_bound() -> None:
    """``choose`` prunes by this bound: if it were too small, a choice could be wrong once in four billion draws."""
    highest = float(-log(-log(to_uniform(np.array([2**32 - 1], np.uint32))))[0])
    assert 22.87 < highest < GUMBEL_MAX < highest + 0.01


def test_streams_samples_indices_and_seeds_are_independent() -> None:
    ids = np.arange(20_000, dtype=np.int32)
    noises = {
        "reference": Noise(1, 0).uniform(0, ids, Stream.CHOICE),
        "seed": Noise(2, 0).uniform(0, ids, Stream.CHOICE),
        "high half of the seed": Noise(1 + 2**32, 0).uniform(0, ids, Stream.CHOICE),
        "sample": Noise(1, 1).uniform(0, ids, Stream.CHOICE),
        "index": Noise(1, 0).uniform(1, ids, Stream.CHOICE),
        **{stream.name: Noise(1, 0).uniform(0, ids, stream) for stream in Stream if stream is not Stream.CHOICE},
    }
    names = list(noises)
    matrix = np.corrcoef([noises[name] for name in names])
    np.fill_diagonal(matrix, 0)
    worst = np.unravel_index(np.abs(matrix).argmax(), matrix.shape)
    assert abs(matrix[worst]) < 5 / len(ids) ** 0.5, [names[i] for i in worst]
    for name in names:
        assert stats.kstest(noises[name], "uniform").pvalue > 1e-5, name
        assert abs(np.corrcoef(noises[name][1:], noises[name][:-1])[0, 1]) < 5 / len(ids) ** 0.5, name


def test_streams_keep_their_numbers() -> None:
    """They are part of what a seed means: two of one number would be one noise, another number another answer."""
    assert {stream.name: stream.value for stream in Stream} == {"CHOICE": 0, "DRAFT": 1, "ACCEPT": 2, "RESIDUAL": 3}
