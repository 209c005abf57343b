"""Every field of a configuration, changed or left out: the model that transformers makes of it, or a refusal.

And every key of GGUF's specification, with another value: another answer, or a refusal by name, of both backends alike.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from outpace.common.arrays import F32
from outpace.errors import ModelError
from outpace.models.base import Batch
from outpace.models.families import FAMILIES
from outpace.models.native.model import load_native
from outpace.models.torch.model import TransformersModel

SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma3": {"query_pre_attn_scalar": 11, "sliding_window": 9},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                "logits_scaling": 2.0},
    "phi3": {"original_max_position_embeddings": 64},
}  # fmt: skip
TEXT = np.random.default_rng(5).integers(3, 90, 30).astype(np.int32)
OTHER: dict[str, list[Any]] = {  # values for fields whose own value does not say what else could stand there
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 300.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
    ],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "swish"],
    "hidden_activation": ["gelu", "silu", None],
    "sliding_window": [8, None, 64],
    "layer_types": [["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2],
    "dtype": ["bfloat16"], "problem_type": [], "id2label": [], "label2id": [], "architectures": [], "model_type": [],
    "transformers_version": [], "_name_or_path": [], "no_rope_layers": [[0, 1, 1, 0], [1, 1, 1, 1]],
    "bos_token_id": [5], "eos_token_id": [5], "pad_token_id": [5],
    "query_pre_attn_scalar": [7], "head_dim": [16],
    # ... and fields of other families, which transformers ignores
    "attention_multiplier": [0.7], "embedding_multiplier": [3.0], "residual_multiplier": [0.3], "logits_scaling": [4.0],
    "final_logit_softcapping": [2.0], "attn_logit_softcapping": [2.0], "use_sliding_window": [True],
    "sliding_window_pattern": [2, 3], "max_window_layers": [0, 2], "use_bidirectional_attention": [True],
    "rope_theta": [300.0], "partial_rotary_factor": [0.5], "rope_scaling": [{"rope_type": "linear", "factor": 4.0}],
    "rope_local_base_freq": [300.0], "clip_qkv": [0.5], "attention_bias": [True], "mlp_bias": [True],
    "qk_layernorm": [True],
}  # fmt: skip


def changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields with other values; ... for one that is left out."""
    for key in sorted({*config, *OTHER}):
        value = config.get(key)
        if key in OTHER:
            others = OTHER[key]
        elif isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [2 * value, max(1, value // 2)]
        elif isinstance(value, float):
            others = [value * 8 + 0.125]
        else:
            raise AssertionError(f"say what else {key}={value!r} could be")
        yield from ((key, other) for other in others if other != value)
        if key in config and key not in ("architectures", "model_type"):
            yield key, ...


def perturbed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2))
    return model.eval()


def folder_of(name: str, folder: Path) -> dict[str, Any]:
    family = next(family for family in FAMILIES if family.name == name)
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family.transformers, **(SIZES | MORE.get(name, {})))
    model = perturbed(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((folder / "config.json").read_text())
    return {**config.to_dict(), **written}


def theirs(folder: Path) -> F32 | None:
    """transformers' logits; None where it has none."""
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if found["missing_keys"]:
            return None
        with torch.inference_mode():
            return (
                model.eval()(torch.from_numpy(TEXT.astype(np.int64))[None], use_cache=False, return_dict=True)
                .logits[0]
                .numpy()
            )
    except Exception:
        return None


def run(model: Any) -> F32:
    batch = Batch.pack([model.kv.alloc()], [TEXT], [0], [True])
    return model.forward(batch).logits(batch.wanted)


def native(folder: Path) -> F32 | str:
    try:
        return run(load_native(folder, dtype="float32", kv_dtype="float32", threads=1))
    except ModelError as error:
        return str(error)
