"""What is not the model that its file says is refused by name; what loading takes is known before. See tests/fuzz."""

from __future__ import annotations

import pytest
from native_helpers import BLOCKS, Tiny

from outpace.errors import ModelError
from outpace.models.native.build import estimate


def test_a_tensor_that_nothing_reads_is_refused_by_name(tiny: Tiny) -> None:
    """A bias that was left out would make another model of it."""
    with pytest.raises(ModelError, match=r"the tensor 'blk\.0\.ffn_down\.bias' and 1 more"):
        tiny.load("Q4_1", "llama", {"ffn_bias": 1})


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16", "F32"]
)
def test_estimate(kind: str, tiny: Tiny) -> None:
    sizes = {"hidden": 256, "inner": 256, "head_dim": 64} if BLOCKS[kind][0] == 256 else {}
    for options in ({"kv_dtype": "float32"}, {"kv_dtype": "int8"}, {"quantize": "int8"}):
        model = tiny.load(kind, sizes=sizes, **options)
        info = model.info
        assert estimate(tiny.path(kind, **sizes), **options) == (info.weight_bytes, info.kv_bytes_per_position)
        model.close()
