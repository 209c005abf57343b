"""Products through tiles (Intel AMX), which plain C++ stands in for here: the same bits as by the other kernels.

Forwards through them are among those of test_paths.py. Where there are tiles the path ``avx512-amx`` is one of
``usable_isas()``, and the other tests of this folder run on it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import BLOCKS, HALVES, Tiny, packed, random_bytes

from outpace import _native
from outpace.errors import ParameterError

EMULATED = "avx512-amx-emulated"
pytestmark = pytest.mark.skipif("avx512" not in _native.usable_isas(), reason="their sums become floats in AVX-512")


def built() -> bool:
    try:
        return _native.kernels(EMULATED) == EMULATED
    except ValueError:
        return False


emulated = pytest.mark.skipif(
    not built(), reason="scripts/setup builds the path (OUTPACE_EMULATE_TILES=1), light does not"
)


@emulated
@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", sorted(HALVES))
def test_tiles_give_the_same_bits(kind: str, data: st.DataObject) -> None:
    block = BLOCKS[kind][0]
    rows, cols = data.draw(st.integers(1, 70)), block * data.draw(st.integers(1, 3 if block == 256 else 20))
    tokens = data.draw(st.integers(1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    matrix = packed(random_bytes(rng, kind, rows, cols), kind, rows, cols)
    x = rng.normal(0, 1, (tokens, cols)).astype(np.float32)
    assert np.array_equal(matrix.product(x, EMULATED), matrix.product(x, "avx512"))


@emulated
def test_every_number_of_tokens(rng: np.random.Generator) -> None:
    for kind in sorted(HALVES):
        matrix = packed(random_bytes(rng, kind, 40, 512), kind, 40, 512)
        x = rng.normal(0, 1, (40, 512)).astype(np.float32)
        expected = matrix.product(x, "avx512")
        for tokens in range(1, 41):
            assert np.array_equal(matrix.product(x[:tokens], EMULATED), expected[:tokens]), (kind, tokens)


@emulated
def test_the_check_at_start_passes_what_is_equal_and_names_what_is_not() -> None:
    assert _native.differing_product(EMULATED, "avx512") == ""
    assert _native.differing_product(EMULATED, "avx512", spoiled=3) == "Q4_0 with 3 tokens"
    if "avx512-amx" in _native.usable_isas():
        assert _native.differing_product("avx512-amx", "avx512-bf16") == ""


def test_what_is_said_of_tiles(tiny: Tiny) -> None:
    found, usable = _native.amx(), _native.usable_isas()
    assert EMULATED not in usable
    assert _native.kernels("avx512") != EMULATED
    assert (found["off"] == "") == ("avx512-amx" in usable) == bool(found["from"])
    if found["off"]:
        with pytest.raises(ParameterError, match="avx512-amx"):
            tiny.load(isa="avx512-amx")
