"""gpt-oss folders as published, experts in MXFP4, against transformers, which unpacks them, and the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from native_helpers import feed
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outpace.errors import ModelError
from outpace.models.native.build import estimate, open_weights
from outpace.models.native.model import load_native

SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "num_local_experts": 6, "num_experts_per_tok": 3,
    "head_dim": 32, "sliding_window": 20, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in bfloat16; every pattern of bits in its experts' blocks, scales that are sane."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("gpt-oss")
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
    model.to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, (count, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_blocks_are_transformers_values(folder: Path) -> None:
    """Bit for bit, once the gguf package has read what the native backend packs."""
    model, weights, _ = open_weights(folder, None, "auto")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(model.layers):
        at = f"model.layers.{layer}.mlp.experts."
        joined, down = (
            convert_moe_packed_tensors(
                tensors[f"{at}{name}_blocks"], tensors[f"{at}{name}_scales"], dtype=torch.float32
            ).numpy()
            for name in ("gate_up_proj", "down_proj")
        )
        for part, expected in (("gate", joined[..., ::2]), ("up", joined[..., 1::2]), ("down", down)):
            stored = weights.experts(layer, part)
            rows = gguf.dequantize(stored.data.reshape(stored.shape[0], -1), gguf.GGMLQuantizationType.MXFP4)
            ours = rows.reshape(stored.pieces, -1, stored.columns)[:, : stored.rows]
            assert np.array_equal(ours, expected.swapaxes(1, 2)), (layer, part)


def test_answers_are_those_of_the_unpacked_model(folder: Path, isa: str, rng: np.random.Generator) -> None:
    ours = load_native(folder, isa=isa)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).float().eval()  # fmt: skip
    tokens = rng.integers(0, 120, 100)
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    got = feed(ours, ours.kv.alloc(), tokens)
    assert (got.argmax(-1) == expected.argmax(-1)).mean() > 0.9
    assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.995
    assert ours.info.dtype == "mxfp4"
    every = ours.info.kv_bytes_per_position
    assert estimate(folder) == (ours.info.weight_bytes, every, every // 2, 20)  # half of the layers have a window


def test_damaged_blocks_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    name = "model.layers.1.mlp.experts.down_proj_scales"

    def served(tensors: dict[str, torch.Tensor], **changes: Any) -> None:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        load_native(tmp_path)

    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        served({key: tensor for key, tensor in whole.items() if key != name})
    with pytest.raises(ModelError, match=rf"{name} is \[6, 64, 2\] of type U8, but must be \[6, 64, 3\] of type U8"):
        served(whole | {name: whole[name][..., :2].contiguous()})
    with pytest.raises(ModelError, match="method 'fp8'"):
        served(whole, quantization_config={"quant_method": "fp8"})
