"""The kernel for attention against the reference: on a card, or in Triton's interpreter where there is none.

./scripts/scale runs them, in an environment that has Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither a card nor TRITON_INTERPRET=1", allow_module_level=True)

from outpace.models.base import Batch
from outpace.models.torch import attention, between, decoder, fused, kernel
from outpace.models.torch.kv import SPLIT, LayerShape, Seen, TorchKV
from outpace.models.torch.model import TransformersModel
from tests.integration.test_architectures import tiny

CLOSE = {torch.float32: 5e-6, torch.float16: 2e-3}
if torch.cuda.is_available():  # the interpreter's products of bfloat16 are wrong: triton 11584
    CLOSE[torch.bfloat16] = 2e-2


def drawn(rng: np.random.Generator, dtype: torch.dtype, device: str, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(size)).to(device, dtype)


def test_it_is_what_runs(device: str) -> None:
    assert attention._mixture(torch.device(device), torch.float32, 64, 64, 3) is kernel.mixture
    assert attention._mixture(torch.device(device), torch.float64, 64, 64, 3) is attention.mixture


def test_sizes_that_it_cannot_do_have_the_reference(device: str) -> None:
    own = kernel.mixture

    def fails(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if query.shape[2] == 80:
            raise RuntimeError("out of resource: shared memory")
        return own(query, *args, **kwargs)

    with patch.object(kernel, "mixture", fails):
        attention._mixture.cache_clear()
        found = [attention._mixture(torch.device(device), torch.float32, size, 16, 1) for size in (80, 48)]
        attention._mixture.cache_clear()
    assert found == [attention.mixture, fails]


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_ragged_rows_and_trees_agree_with_the_reference(device: str, data: st.DataObject) -> None:
    some = data.draw
    heads, groups = some(st.integers(1, 2)), some(st.sampled_from([1, 3, 4]))
    dk, dv = some(st.sampled_from([(16, 16), (24, 16), (64, 64), (16, 80)]))
    dtype = some(st.sampled_from(list(CLOSE)))
    window = some(st.sampled_from([None, 5, 300]))
    lengths = some(st.lists(st.sampled_from([0, 1, 7, 70, 255, 300]), min_size=1, max_size=3))
    widths = [some(st.integers(1, 9)) for _ in lengths]
    parents = [np.array([some(st.integers(-1, i - 1)) for i in range(n)], np.int32) for n in widths]
    given: dict[str, Any] = {
        "scale": dk**-0.5, "window": window, "softcap": some(st.sampled_from([None, 20.0])),
        "sinks": torch.linspace(-1, 2, heads * groups, device=device) if some(st.booleans()) else None,
    }  # fmt: skip
    where = torch.device(device)
    kv = TorchKV([LayerShape(heads, dk, dv)], dtype, where, block=8)
    rows = [kv.alloc() for _ in lengths]

    def run(counts: list[int], starts: list[int], trees: list[Any], mix: Any) -> torch.Tensor:
        used = [i for i, n in enumerate(counts) if n]
        tokens = [np.zeros(counts[i], np.int32) for i in used]
        batch = Batch.pack([rows[i] for i in used], tokens, [starts[i] for i in used], [True] * len(used), trees)
        n = len(batch)
        query, key, value = (
            drawn(np.random.default_rng([n, i]), dtype, device, n, h, d)
            for i, (h, d) in enumerate(((heads * groups, dk), (heads, dk), (heads, dv)))
        )
        with kv.writing(attention.counts(batch)), patch.object(attention, "_mixture", lambda *sizes: mix):
            plan = attention.plan(batch, kv, (window,), where)
            kv.keys[0].index_copy_(1, plan.write, key.transpose(0, 1))
            kv.values[0].index_copy_(1, plan.write, value.transpose(0, 1))
            return attention.mixed(0, plan, query, **given)

    if any(lengths):
        run(lengths, [0] * len(lengths), [None for n in lengths if n], attention.mixture)
    found = []
    for mix in (attention.mixture, kernel.mixture):
        found.append(run(widths, lengths, parents, mix))
        for row, length in zip(rows, lengths, strict=True):
            kv.truncate(row, length)
    assert float((found[0].float() - found[1].float()).abs().max()) < CLOSE[dtype]


@pytest.mark.parametrize("sinks", [False, True])
def test_one_row_s_bits_do_not_depend_on_the_others(device: str, sinks: bool) -> None:
    """As ``strict`` calls it: rows of one token, blocks of SPLIT slots."""
    rng = np.random.default_rng(1)
    keys, values = (drawn(rng, torch.float32, device, 2, 4 * SPLIT, 16) for _ in range(2))
    query = drawn(rng, torch.float32, device, 3, 4, 16)
    sink = torch.linspace(-1, 1, 4, device=device) if sinks else None
    slots = torch.from_numpy(rng.integers(0, 4 * SPLIT, (3, 600)))
    lengths = [600, 40, 300]

    def run(order: list[int], length: int, bounded: bool = True) -> torch.Tensor:
        at, hidden = torch.zeros((len(order), length), dtype=torch.int64), torch.ones((len(order), 1, 1, length)).bool()
        for b, i in enumerate(order):
            at[b, : lengths[i]], hidden[b, ..., : lengths[i]] = slots[i, : lengths[i]], False
        ends = torch.tensor([[0, lengths[i]] for i in order], device=device).flatten() if bounded else None
        seen = Seen(at.flatten().to(device), hidden.to(device), 0, True, ends)
        return kernel.mixture(query[order], keys, values, seen, len(order), scale=0.25, softcap=None, sinks=sink)

    whole = run([0, 1, 2], 768)
    for i, most in enumerate((768, 64, 512)):
        assert torch.equal(run([i], most)[0], whole[i])
        assert torch.equal(run([i], 1024, bounded=False)[0], whole[i])
    assert torch.equal(run([2, 1, 0], 768), whole.flip(0))


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("normed", "width", "turned"), [(True, 64, 64), (False, 24, 16), (True, 80, 0)])
def test_what_stands_between_products_agrees_with_the_reference(
    device: str, dtype: torch.dtype, normed: bool, width: int, turned: int
) -> None:
    """And each token's bits are its own."""
    rng, heads, kv, n = np.random.default_rng(width), 3, 2, 5

    def norm(size: int) -> between.Norm:
        module = torch.nn.RMSNorm(size, device=device, dtype=dtype)
        module.weight.data = drawn(rng, dtype, device, size)
        return between.Norm(module, 0.5 if normed else 0.0, 1e-6)

    x, out, wide = (drawn(rng, dtype, device, n, size) for size in (100, 100, 260))
    qkv, (pool_k, pool_v) = drawn(rng, dtype, device, n, (heads + 2 * kv) * width), torch.zeros(2, kv, 9, width)
    table = (drawn(rng, dtype, device, n, 1, turned), drawn(rng, dtype, device, n, 1, turned)) if turned else None
    norms = (norm(width), norm(width)) if normed else (None, None)
    outer, write = norm(100) if normed else None, torch.tensor([4, 8, 0, 1, 7], device=device)

    def run(ops: Any, order: list[int]) -> list[torch.Tensor]:
        keys, values = pool_k.to(device, dtype), pool_v.to(device, dtype)
        turns = None if table is None else tuple(each[order] for each in table)
        query = ops.placed(qkv[order], heads, *norms, turns, keys, values, write[order])
        return [
            *ops.added(x[order], out[order], 0.5, outer), *(ops.gated(wide[order], name) for name in ("silu", "gelu")),
            query, keys[:, write[order]].transpose(0, 1), values[:, write[order]].transpose(0, 1),
        ]  # fmt: skip

    every = run(fused, [0, 1, 2, 3, 4])
    for ours, expected in zip(every, run(between, [0, 1, 2, 3, 4]), strict=True):
        torch.testing.assert_close(ours, expected, atol=4 * CLOSE[dtype], rtol=4 * CLOSE[dtype])
    for ours, whole in zip(run(fused, [3, 1]), every, strict=True):
        assert torch.equal(ours, whole[[3, 1]])
    assert decoder._operations(torch.device(device), dtype) is fused


def test_a_model_s_proof_at_load_runs_it(device: str) -> None:
    """In chunks, side by side and as a tree, beside the model's own forward: with windows, and with soft caps."""
    with patch.object(kernel, "mixture", wraps=kernel.mixture) as counted:
        attention._mixture.cache_clear()
        TransformersModel(tiny("gemma2").to(device), name="m").close()
        attention._mixture.cache_clear()
    assert counted.call_count > 4


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outpace.models.torch.kernel import all_blocks, one_block

def built(kernel, **constants):
    kinds = {"slots": "*i64", "bounds": "*i64", "hidden": "*u8", "parts": "*fp32", "sums": "*fp32"}
    kinds |= {"scale": "fp32", "softcap": "fp32"}
    own = {name: "*bf16" for name in ("query", "keys", "values", "sinks", "out")} | kinds
    signature = {name: "constexpr" if name in constants else own.get(name, "i32") for name in kernel.arg_names}
    even = ("query", "keys", "values", "parts", "sums", "out", "head_keys", "head_values")  # as a launch finds them
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in even}
    return compile(ASTSource(kernel, signature, constants, attrs), target=GPUTarget("cuda", 90, 32))

for rows, masked, capped in ((16, True, False), (64, True, True), (64, False, False)):
    found = built(
        one_block, GROUPS=4, ROWS=rows, TILE=64, DK=128, DV=128, PADDED_K=128, PADDED_V=128, MASKED=masked,
        CAPPED=capped, BOUNDED=True,
    )
    print(found.metadata.shared, "mma" in found.asm["ptx"] and "cp.async" in found.asm["ptx"])
for sinks in (True, False):
    print(built(all_blocks, DV=128, PADDED_V=128, SINKS=sinks, PARTS=16).metadata.shared, True)
"""

SIZES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from outpace.models.torch.kernel import all_blocks, one_block

def kinds(kernel, changes):
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    rest = {name: 8 for name in kernel.arg_names if name not in changes[0]}
    return {str(binder(**rest, **each)[1]) for each in changes}

slots = torch.zeros(64, dtype=torch.int64)
sizes = [dict(width=n, length=n, covered=n, split=n, slots=slots[at:]) for n, at in ((1, 0), (16, 1), (17, 2))]
print(len(kinds(one_block, sizes)), len(kinds(all_blocks, [dict(blocks=n, count=n) for n in (1, 16, 17)])))
"""


def compiled(script: str) -> list[list[str]]:
    """The words of each line that it prints where kernels are compiled."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_sizes_that_change_from_step_to_step_compile_nothing_anew() -> None:
    assert compiled(SIZES) == [["1", "1"]]


def test_it_compiles_for_sm_90() -> None:
    """Llama 3.1 8B's shape; a program's shared memory is far under a card's 227 KiB, products are the card's own, and
    loads run ahead of them."""
    found = compiled(COMPILED)
    assert len(found) == 5
    assert all(int(shared) <= 100 << 10 and own == "True" for shared, own in found)
