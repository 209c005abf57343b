"""Each matrix product against numpy float64 on the same quantised inputs; packing against the gguf package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import BLOCKS, HALVES, dequantized, packed, random_bytes

FORMATS = list(BLOCKS)


def as_encoded(x: Any, matrix: Any) -> Any:
    """The activations [n, cols] as kernels see them, float64: int8 with a scale for each 16, bfloat16, or as is."""
    if matrix.format == "B16":
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32).astype(np.float64)
    if matrix.format in ("H16", "F32"):
        return x.astype(np.float64)
    n, cols = x.shape
    halves = np.zeros((n, -(-cols // 16) * 16), np.float32)
    halves[:, :cols] = x
    halves = halves.reshape(n, -1, 16)
    most = np.abs(halves).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    q = np.rint(halves * inverse).astype(np.float64)
    scaled = q * (most / np.float32(127)).astype(np.float64)
    return scaled.reshape(n, -1)[:, :cols]


@pytest.mark.parametrize("kind", FORMATS)
def test_packing_changes_no_value(kind: str, rng: np.random.Generator) -> None:
    cols = 3 * max(BLOCKS[kind][0], 32)
    raw = random_bytes(rng, kind, 37, cols)
    assert np.array_equal(packed(raw, kind, 37, cols).unpack(), dequantized(raw, kind).astype(np.float32))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", FORMATS)
def test_products_match_float64(kind: str, isa: str, data: st.DataObject) -> None:
    block = BLOCKS[kind][0]
    rows, tokens = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    cols = block * data.draw(st.integers(1, 3 if block == 256 else 9 if block == 32 else 150))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    raw = random_bytes(rng, kind, rows, cols)
    matrix = packed(raw, kind, rows, cols)
    x = (rng.normal(0, 1, (tokens, cols)) * rng.choice([1e-3, 1, 30], (tokens, 1))).astype(np.float32)
    w, a = dequantized(raw, kind).astype(np.float64), as_encoded(x, matrix)
    bound = 3e-6 * (np.abs(a) @ np.abs(w).T) + 1e-30
    assert (np.abs(matrix.product(x, isa) - a @ w.T) <= bound).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_product_does_not_depend_on_the_width(kind: str, isa: str, rng: np.random.Generator) -> None:
    cols = 512
    matrix = packed(random_bytes(rng, kind, 80, cols), kind, 80, cols)
    x = rng.normal(0, 1, (64, cols)).astype(np.float32)
    alone = np.concatenate([matrix.product(x[i : i + 1], isa) for i in range(64)])
    for width in (*range(2, 20), 31, 64):
        assert np.array_equal(matrix.product(x[:width], isa), alone[:width]), width


def whole_numbers(rng: np.random.Generator, kind: str, rows: int, cols: int) -> Any:
    """Raw bytes of a matrix of whole numbers, often the most extreme ones, small enough that float32 sums are exact."""
    raw = random_bytes(rng, kind, rows, cols).reshape(-1, BLOCKS[kind][1])
    extreme = rng.choice(np.array([0, 0x7F, 0x80, 0xF0, 0x0F, 0xFF], np.uint8), raw.shape)
    raw = np.where(rng.random(raw.shape) < 0.7, extreme, raw)
    if kind in ("Q4_K", "Q5_K"):
        raw[:, 4:16] = 7  # all eight scales and minima
    elif kind == "IQ4_XS":
        raw[:, 2:8] = np.where(
            rng.random((len(raw), 1)) < 0.5, [0xAA] * 2 + [0x11] * 4, [0x55] * 2 + [0xFF] * 4
        )  # 1 or -1
    elif kind == "Q6_K":
        raw[:, 192:208] = rng.integers(-3, 4, (len(raw), 16)).astype(np.int8).view(np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if HALVES.get(kind)])
def test_integer_sums_are_exact_at_the_extremes(kind: str, isa: str, rng: np.random.Generator) -> None:
    raw = whole_numbers(rng, kind, 96, 512)
    x = np.where(rng.random((9, 512)) < 0.8, rng.choice([-127, 127], (9, 512)), rng.integers(-127, 128, (9, 512)))
    x[:, ::16] = 127  # so that every scale is 1
    expected = x.astype(np.float64) @ dequantized(raw, kind).astype(np.float64).T
    assert np.abs(expected).max() < 2**24
    assert np.array_equal(packed(raw, kind, 96, 512).product(x.astype(np.float32), isa), expected)


@pytest.mark.parametrize("target", ["int8", "int4", "bf16", "f32"])
def test_own_quantisation_is_as_fine_as_it_says(target: str, isa: str, rng: np.random.Generator) -> None:
    w = rng.normal(0, 0.1, (48, 160)).astype(np.float32)
    got = packed(w.view(np.uint8), "F32", 48, 160, target).unpack()
    groups = w.reshape(48, -1, 32)
    spread = groups.max(-1) - groups.min(-1)
    step = {
        "int8": np.abs(groups).max(-1) / 127,
        "int4": spread / 15,
        "bf16": np.abs(groups).max(-1) / 128,
        "f32": 0 * spread,
    }
    error = np.abs(got - w).reshape(48, -1, 32).max(-1)
    assert (
        error <= 0.51 * step[target] + 2e-3 * np.abs(groups).max(-1) * (target == "int4") + 1e-3 * step[target] * 127
    ).all()
    matrix = packed(w.view(np.uint8), "F32", 48, 160, target)
    x = rng.normal(0, 1, (3, 160)).astype(np.float32)
    a = as_encoded(x, matrix)
    assert np.allclose(matrix.product(x, isa), a @ got.astype(np.float64).T, rtol=1e-4, atol=1e-4)


def test_rows_of_heads_are_put_in_order(rng: np.random.Generator) -> None:
    w = rng.normal(0, 1, (32, 64)).astype(np.float32)
    stored = w.reshape(2, 2, 8, 64).swapaxes(1, 2).reshape(32, 64)  # as GGUF keeps Llama's queries: 2 heads of 16
    assert np.array_equal(packed(np.ascontiguousarray(stored).view(np.uint8), "F32", 32, 64, heads=2).unpack(), w)


@pytest.mark.parametrize(
    ("rows", "cols", "kind", "size", "message"),
    [
        (4, 30, "Q4_1", 80, "do not fit"),
        (4, 32, "Q4_1", 79, "needs 80 bytes"),
        (0, 32, "Q4_1", 0, "not possible"),
        (1 << 40, 32, "Q4_1", 80, "not possible"),
    ],
)
def test_wrong_sizes_are_refused(rows: int, cols: int, kind: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed(np.zeros(size, np.uint8), kind, rows, cols)


def test_a_scale_that_is_no_float16_is_refused_unless_its_values_are_zero(rng: np.random.Generator) -> None:
    raw = random_bytes(rng, "MXFP4", 4, 64).reshape(-1, 17)
    raw[3, 0] = 90  # 2^-38
    with pytest.raises(ValueError, match="a scale of type MXFP4 is no float16: use a file of another"):
        packed(raw, "MXFP4", 4, 64)
    raw[3, 1:] = 0x80  # of either sign
    assert np.array_equal(packed(raw, "MXFP4", 4, 64).unpack(), dequantized(raw.reshape(4, -1), "MXFP4"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float, isa: str, rng: np.random.Generator) -> None:
    for kind in FORMATS:
        matrix = packed(random_bytes(rng, kind, 16, 256), kind, 16, 256)
        x = rng.normal(0, 1, (1, 256)).astype(np.float32)
        x[0, 70] = bad
        assert not np.isfinite(matrix.product(x, isa)).any(), kind


def test_tiny_activations(isa: str, rng: np.random.Generator) -> None:
    matrix = packed(random_bytes(rng, "Q4_1", 16, 256), "Q4_1", 16, 256)
    for magnitude in (1e-25, 1e-35, 1e-42, 0.0):
        x = (rng.normal(0, 1, (2, 256)) * magnitude).astype(np.float32)
        assert (np.abs(matrix.product(x, isa)) <= 100 * magnitude).all()
