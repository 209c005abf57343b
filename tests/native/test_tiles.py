"""Products through tiles (Intel AMX), which plain C++ stands in for here: the same bits as by the other kernels.

Products and forwards through them are among those of test_paths.py. Where there are tiles the path ``avx512-amx`` is
one of ``usable_isas()``, and the other tests of this folder run on it.
"""

from __future__ import annotations

import pytest
from native_helpers import Tiny

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
