"""How many experts a forward reads, against transformers' routers; a mixture that computes a dense model's layers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.experts.grow import grow
from outpace.control.cost import measure
from outpace.models import demo
from outpace.models.base import Batch, Model
from outpace.models.native.model import NativeModel, load_native
from tests.truncate import truncated


def experts_of(model: NativeModel, tokens: list[int], width: int) -> float:
    """That a forward of the last ``width`` tokens reads."""
    row = model.kv.alloc()
    before = len(tokens) - width
    if before:
        model.forward(Batch.pack([row], [np.array(tokens[:before], np.int32)], [0], [False]))
    output = model.forward(Batch.pack([row], [np.array(tokens[before:], np.int32)], [before], [True]))
    model.kv.free(row)
    return output.experts


def test_the_experts_that_a_forward_reads_are_those_that_routers_choose(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=24, num_experts_per_tok=3,
        mlp_only_layers=[0], norm_topk_prob=True,
    )  # fmt: skip
    theirs = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path)
    tokens = [5, 71, 5, 13, 44, 96, 1, 0, 7, 7, 7]
    with torch.no_grad():
        routers = theirs(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = [logits.topk(3, -1).indices for logits in routers if logits is not None and logits.numel()]
    model = load_native(tmp_path, threads=2)
    for width in (1, 2, 4, 8, 11):
        expected = np.mean([len(set(each[-width:].flatten().tolist())) for each in chosen])
        assert experts_of(model, tokens, width) == expected, width
    assert (model.info.experts, model.info.used_experts) == (24, 3)
    cost = measure(model, budget=0.2)
    assert (cost.experts, cost.used, cost.read[0]) == (24, 3, 3.0)
    assert all(low <= high for low, high in zip(cost.read, cost.read[1:], strict=False))
    assert cost.expert >= 0
    model.close()


@pytest.mark.parametrize("name", ["granite_moe", "deepseek_v3"])
def test_torch_counts_what_is_counted_natively(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("torch")
    from test_architectures import saved

    from outpace.models.torch.model import TransformersModel

    module, tokens = saved(name, tmp_path), rng.integers(0, 120, 40).astype(np.int32)
    natively = load_native(tmp_path, dtype="float32", kv_dtype="float32", threads=1)
    each: list[Model] = [natively, *(TransformersModel(module, name=name, graphs=graphs) for graphs in (False, True))]
    first, *others = (model.info for model in each)
    assert all(o.experts == first.experts > o.used_experts == first.used_experts > 0 for o in others)
    found = []
    for model in each:
        rows, read = [model.kv.alloc() for _ in range(2)], []
        for begin, end in ((0, 17), (17, 18), (18, 21), (21, 32), (32, 40)):
            both = [tokens[begin:end], tokens[::-1][begin : (begin + end + 1) // 2]]  # rows of other widths, and ends
            at = [begin, model.kv.length(rows[1])]
            read.append(model.forward(Batch.pack(rows, both, at, [True, True])).experts)
        found.append(read)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[2] == found[1]
    assert len(set(found[0])) > 1


def test_a_grown_mixture_says_what_the_dense_model_says(tmp_path: Path) -> None:
    """The demo model's first layer as 16 experts of which a token goes to 4."""
    source, out = truncated(demo.smollm2(), 1, tmp_path), tmp_path / "mixture.gguf"
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((200, 576)).astype(np.float32)
    grow(source, out, lambda layer: inputs, experts=16, used=4, inner=512)
    names = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(out).tensors}
    assert names["blk.0.ffn_up_exps.weight"] == [576, 512, 16]
    assert names["blk.0.ffn_gate_inp.weight"] == [576, 16]
    tokens = rng.integers(0, 40_000, 24).astype(np.int32)
    logits = []
    for path in (source, out):
        model = load_native(path, threads=2)
        row = model.kv.alloc()
        logits.append(model.forward(Batch.pack([row], [tokens], [0], [True])).logits(np.arange(24, dtype=np.int32)))
        if path == out:
            assert experts_of(model, tokens.tolist(), 1) == 4
            assert experts_of(model, tokens.tolist(), 24) > 8, "tokens go to different copies"
            parts = [tensor for tensor in gguf.GGUFReader(out).tensors if "_exps" in tensor.name]
            assert model.info.expert_bytes == pytest.approx(sum(part.n_bytes for part in parts) / 16, rel=0.3)
            assert model.info.read_bytes(1) == model.info.weight_bytes - 12 * model.info.expert_bytes
        model.close()
    assert np.abs(logits[1] - logits[0]).max() < 0.02 * logits[0].std()
