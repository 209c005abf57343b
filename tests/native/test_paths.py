"""One answer on every CPU: all instruction-set paths of this machine, emulated tiles among them, give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import BLOCKS, Tiny, feed, packed, random_bytes
from test_eagle import LAYERS, VOCAB, chooser, config
from test_parallel_network import checkpoint, said, some

from outpace import Engine, SamplingParams, _native
from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.native import NativeEagle, NativeParallel
from outpace.errors import ParameterError
from outpace.measure.replay import engine_for, replay
from outpace.measure.trace import read, tracing
from outpace.models.options import LoadOptions
from tests.learned import random_checkpoint

EMULATED = "avx512-amx-emulated"
FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "qwen2moe", "glm4moe", "gpt-oss", "deepseek2", "mistral3",
)  # fmt: skip
WIDTHS = (1, 2, 3, 5, 8, 13, 16, 17, 40)


def every_path() -> list[str]:
    """Those that this machine runs, and emulated tiles where they were built (scripts/setup, not light)."""
    paths = list(_native.usable_isas())
    try:
        return [*paths, _native.kernels(EMULATED)]
    except ValueError:
        return paths


PATHS = every_path()


def bits(values: Any) -> Any:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def agree(compute: Callable[[str], Any]) -> None:
    """``compute(path)``, float32 of any shape, has the same bits on every path."""
    expected = bits(compute(PATHS[0]))
    for path in PATHS[1:]:
        assert np.array_equal(bits(compute(path)), expected), f"{path} differs from {PATHS[0]}"


def pairs(rng: np.random.Generator, n: int) -> tuple[Any, Any, Any]:
    """Pairs of bfloat16 as int32 [n], twice, and sums float32 [n]: of any size below 2, half of them nearly cancel."""
    a, b = (rng.integers(0, 1 << 32, n, np.uint32) & 0xBFFFBFFF for _ in range(2))
    a[::3] = a[::3] & 0x807FFFFF | 0x20000000  # exponents that meet the sums', also among the smallest
    b[::3] = b[::3] & 0x807FFFFF | rng.integers(0x10, 0x40, len(b[::3])).astype(np.uint32) << np.uint32(24)
    sums = (rng.integers(0, 1 << 32, n, np.uint32) & 0xBFFFFFFF).view(np.float32)
    edge = slice(1, None, 16)  # sums beside 2^-126, and odd products that only rounding takes across it
    a[edge] = a[edge] & 0x807F007F | rng.integers(49, 55, len(a[edge])).astype(np.uint32) << np.uint32(23)
    b[edge] = b[edge] & 0x807F007F | rng.integers(49, 55, len(b[edge])).astype(np.uint32) << np.uint32(23)
    sums[edge] = np.where(rng.integers(0, 2, len(sums[edge])), np.float32(2.0**-126), -np.float32(2.0**-126))
    odd = (a & 0xFFFF0000).view(np.float32) * (b & 0xFFFF0000).view(np.float32)
    return a.view(np.int32), b.view(np.int32), np.where(np.arange(n) % 2, sums, -odd).astype(np.float32)


def rounded(exact: Fraction) -> float:
    """The float32 nearest to ``exact``, ties to even; 0 below 2^-126."""
    if exact == 0:
        return 0.0
    exponent = 0
    while abs(exact) >= 2 ** (exponent + 1):
        exponent += 1
    while abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    value = round(exact / unit) * unit  # Python rounds halves to even, too
    return float(value) if abs(value) >= Fraction(2) ** -126 else 0.0


def element(pair: int, odd: bool) -> Fraction:
    """One bfloat16 of an int32 pair; 0 for a denormal one."""
    high = np.array([pair & 0xFFFF0000 if odd else pair << 16 & 0xFFFF0000], np.uint32)
    value = float(high.view(np.float32)[0])
    return Fraction(value) if abs(value) >= 2.0**-126 else Fraction(0)


def test_the_rule_for_pairs(rng: np.random.Generator) -> None:
    """fma(even, even, fma(odd, odd, sum)), each rounded once, denormals as zero: exact fractions say so."""
    a, b, sums = pairs(rng, 800)
    found = _native.dot_pairs(a, b, sums, PATHS[0])
    order_matters = 0
    for i in range(len(sums)):
        x, y, start = int(a[i]) & 0xFFFFFFFF, int(b[i]) & 0xFFFFFFFF, float(sums[i])
        total = Fraction(start) if abs(start) >= 2.0**-126 else Fraction(0)
        odd, even = (element(x, is_odd) * element(y, is_odd) for is_odd in (True, False))
        expected = rounded(Fraction(rounded(total + odd)) + even)
        order_matters += expected != rounded(Fraction(rounded(total + even)) + odd)
        assert found[i] == np.float32(expected), (hex(x), hex(y), start)
    assert order_matters > 25


def test_pairs_on_every_path(rng: np.random.Generator) -> None:
    a, b, sums = pairs(rng, 160_000)
    agree(lambda path: _native.dot_pairs(a, b, sums, path))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_products(kind: str, data: st.DataObject) -> None:
    """Any size and width, and activations of any size: down to denormals."""
    block = BLOCKS[kind][0]
    rows, cols = data.draw(st.integers(1, 80)), block * data.draw(st.integers(1, 3 if block == 256 else 20))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    matrix = packed(random_bytes(rng, kind, rows, cols), kind, rows, cols)
    tokens = data.draw(st.integers(1, 40))
    x = (rng.normal(0, 1, (tokens, cols)) * 10.0 ** rng.integers(-44, 5, (tokens, 1))).astype(np.float32)
    agree(lambda path: matrix.product(x, path))


def test_products_about_the_least_normal_number() -> None:
    """What rounds up to 2^-126 is 2^-126, what does not is 0. ARM would call both tiny before it rounds: both 0."""
    step = 2.0**-23
    weights = np.zeros((80, 32), np.float32)
    weights[:, 0] = (1 + step * np.arange(80)) * 2.0**-63
    x = np.zeros((80, 32), np.float32)
    x[:, 0] = (1 - step * (np.arange(80) - 4) / 2) * 2.0**-63 * (-1.0) ** np.arange(80)
    exact = x[:, :1].astype(np.float64) * weights[:, 0] * 2.0**126  # 48 bits at most
    large = exact.astype(np.float32).astype(np.float64)
    expected = np.where(abs(large) < 1, 0.0, large) * 2.0**-126
    assert (abs(large[abs(exact) < 1]) == 1).sum() > 30
    matrix = packed(weights.view(np.uint8), "F32", 80, 32)
    for path in PATHS:
        assert np.array_equal(matrix.product(x, path), expected), path


def forwards(
    tiny: Tiny, rng: np.random.Generator, kind: str, kv_dtype: str, family: str, sizes: dict[str, int]
) -> None:
    tokens = rng.integers(0, 100, 150 + len(WIDTHS))
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 6, 0, 9, 10, 11, 5, -1, 14]

    def logits(path: str) -> Any:
        model = tiny.load(kind, family, sizes, isa=path, threads=2, kv_dtype=kv_dtype)
        assert model.isa == path
        row = model.kv.alloc()
        found, at = [feed(model, row, tokens[:60], 60)], 60
        for width in WIDTHS:
            found.append(feed(model, row, tokens[at : at + width]))
            at += width
        found.append(feed(model, row, tokens[: len(parents)], parents=parents))
        model.close()
        return np.concatenate(found)

    agree(logits)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float32"])
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_forwards_of_every_format(kind: str, kv_dtype: str, tiny: Tiny, rng: np.random.Generator) -> None:
    """Every width after a context, a block's end among them, then a tree."""
    sizes = {"hidden": 256, "inner": 256} if BLOCKS[kind][0] > 32 else {}
    forwards(tiny, rng, kind, kv_dtype, "llama", {**sizes, "head_dim": 64} if sizes else sizes)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "int4", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_of_every_family(family: str, kv_dtype: str, tiny: Tiny, rng: np.random.Generator) -> None:
    for kind, sizes in (("Q4_1", {"window": 7} if family == "gemma3" else {}), ("BF16", {"heads": 6, "head_dim": 40})):
        forwards(tiny, rng, kind, kv_dtype, family, sizes)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
def test_an_eagle(kv_dtype: str, tiny: Tiny, rng: np.random.Generator) -> None:
    """Drafts and their chances, greedy and sampled."""
    eagle = random_checkpoint(rng, config(norm_output=True, fc_norm=True), sharp=2.0)
    tokens = rng.integers(0, VOCAB, 70).astype(np.int32)
    states = rng.normal(0, 1, (70, LAYERS, 64)).astype(np.float32)

    def drafts(path: str) -> Any:
        model = tiny.load("Q4_1", "llama", {"vocab": VOCAB}, isa=path, threads=2)
        head = NativeEagle(model, eagle, kv_dtype=kv_dtype)
        head.feed([0], [tokens], [states])
        found = []
        for choice in (None, chooser(0.8)):
            made = head.draft([Ask(0, tokens[-1:], states[-1:], 16, 4, 4, choice)])
            row = made.row(0)
            found += [np.array(row.tokens), np.array(row.parents), *bits(made.confidence[0])]
            head.kv.truncate(0, 70)
        head.close()
        model.close()
        return np.concatenate([np.ravel(values) for values in found])

    agree(drafts)


def test_a_block_drafter(tiny: Tiny, rng: np.random.Generator) -> None:
    rows = {i: some(rng, 20 + 50 * i, temperature=0.9 * i) for i in range(2)}

    def drafts(path: str) -> Any:
        model = tiny.load("Q8_0", "llama", {"vocab": VOCAB}, isa=path, threads=2)
        blocks = NativeParallel(model, checkpoint(markov="rnn"))
        for i, row in rows.items():
            blocks.feed([i], [row.positions], [row.hidden_states], [row.positions])
        found = said(blocks, rows, branch=4)
        blocks.close()
        model.close()
        return np.concatenate([np.ravel(values) for values in found.values()])

    agree(drafts)


def test_a_trace_of_one_path_replays_on_every_other(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = str(tiny.path("Q4_1", tokenizer=1, vocab=180)), tmp_path / "run.trace"
    params = [SamplingParams(max_tokens=30, temperature=heat, seed=3, ignore_eos=True) for heat in (0.0, 0.9)]
    monkeypatch.setenv("OUTPACE_ISA", PATHS[0])
    with Engine.load(model, drafter="suffix", size=4) as engine, tracing(engine, file, load=LoadOptions()):
        engine.generate_many([[5, 6, 7, 5, 6], [9, 8]], params)
        assert engine.stats.drafted > 0
    for path in PATHS:
        monkeypatch.setenv("OUTPACE_ISA", path)
        trace = read(file)
        with engine_for(trace) as (again, drafter):
            report = replay(trace, again, drafter)
        assert (report.identical, report.tokens, report.notes) == (True, 60, ()), path


def test_a_callers_arithmetic_stays(tiny: Tiny) -> None:
    """Denormals are zero inside of the runtime alone."""
    least = np.array([1e-40], np.float32)
    model = tiny.load("Q4_1", threads=2)
    feed(model, model.kv.alloc(), np.arange(40))
    model.close()
    assert (least * np.float32(1))[0] == least[0] != 0


emulated = pytest.mark.skipif(EMULATED not in PATHS, reason="built by scripts/setup, not light, for AVX-512")


@emulated
def test_the_check_at_start_passes_what_is_equal_and_names_what_is_not() -> None:
    assert _native.differing_product(EMULATED, "avx512") == ""
    assert _native.differing_product(EMULATED, "avx512", spoiled=3) == "Q4_0 with 3 tokens"
    if "avx512-amx" in _native.usable_isas():
        assert _native.differing_product("avx512-amx", "avx512") == ""


def test_what_is_said_of_tiles(tiny: Tiny) -> None:
    found, usable = _native.amx(), _native.usable_isas()
    assert EMULATED not in usable
    assert (found["off"] == "") == ("avx512-amx" in usable) == bool(found["from"])
    if found["off"]:
        with pytest.raises(ParameterError, match="avx512-amx"):
            tiny.load(isa="avx512-amx")
