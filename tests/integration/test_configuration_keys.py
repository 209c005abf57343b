"""Every field of a configuration, changed or left out: the model that transformers makes of it, or a refusal.

And every key of GGUF's specification, with another value: another answer, or a refusal by name, of both backends alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from outpace.common.arrays import F32
from outpace.errors import ModelError
from outpace.models.base import Batch
from outpace.models.families import FAMILIES, Family
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
    "transformers_version": [], "return_dict": [], "_name_or_path": [], "no_rope_layers": [[0, 1, 1, 0], [1, 1, 1, 1]],
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
            others = [2 * value]
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


def written(family: Family, folder: Path, sparse: bool) -> dict[str, Any]:
    """A tiny random model of the family in ``folder``, and its whole configuration; ``sparse``: without what says layer
    by layer where windows and rotations are, which follows from other fields."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(family.transformers, **(SIZES | MORE.get(family.name, {})))
    perturbed(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    fields = {**config.to_dict(), **json.loads((folder / "config.json").read_text())}
    if not sparse:
        return fields
    if family.windows is not None and family.windows.flag is not None:
        fields |= {family.windows.flag: True, "sliding_window": 6, "max_window_layers": 2}
    return {key: value for key, value in fields.items() if key not in ("layer_types", "no_rope_layers")}


def theirs(folder: Path) -> Any:
    """transformers' model; "incomplete" without some tensor, "refused" where it raises."""
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if found["missing_keys"]:
            return "incomplete"
        logits(model)
    except Exception:
        return "refused"
    return model.eval()


def logits(module: Any) -> F32:
    with torch.inference_mode():
        found: F32 = module(torch.from_numpy(TEXT.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    return found


def run(model: Any) -> F32:
    batch = Batch.pack([model.kv.alloc()], [TEXT], [0], [True])
    found: F32 = model.forward(batch).logits(batch.wanted)
    return found


def answer(make: Callable[[], Any]) -> F32 | str:
    """Logits, or why there are none."""
    try:
        return run(make())
    except ModelError as error:
        return str(error)


def native(path: Path) -> F32 | str:
    return answer(lambda: load_native(path, dtype="float32", kv_dtype="float32", threads=1))


def same(a: F32, b: F32, close: float = 2e-3) -> bool:  # natively, queries are bfloat16
    return a.shape == b.shape and bool(np.abs(a - b).max() < close * np.abs(b).max())


# Refused by the native backend although these texts have the same logits: what is stretched shows in longer ones.
STRETCHED = ("dynamic", "yarn")


BY_LAYER = (
    "layer_types", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window",
    "sliding_window_pattern", "max_window_layers",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sparse"),
    [(each, sparse) for each in FAMILIES for sparse in (False, True) if not sparse or each.windows is not None],
    ids=lambda value: getattr(value, "name", "sparse" if value else "whole"),
)
def test_a_folder_is_the_model_that_transformers_makes_of_it(family: Family, sparse: bool, tmp_path: Path) -> None:
    fields = written(family, tmp_path, sparse)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    plain = logits(theirs(tmp_path))
    assert same(native(tmp_path), plain)
    served = 0
    for key, value in changes(fields):
        if sparse and key not in BY_LAYER:
            continue
        what = f"{key}={value}"
        other = {k: v for k, v in fields.items() if k != key} if value is ... else fields | {key: value}
        if key == "rope_parameters" and value is not ... and len(family.ropes) > 1:
            other[key] = {"full_attention": value, "sliding_attention": fields[key]["sliding_attention"]}
        file.write_text(json.dumps(other))
        module, ours = theirs(tmp_path), native(tmp_path)
        if module == "refused":
            continue
        if module == "incomplete":
            assert isinstance(ours, str), f"{what}: served without some tensor"
            continue
        expected = logits(module)
        if isinstance(ours, str):
            named = key in ours or repr(value) in ours or "tensor" in ours or "rope scaling" in ours
            assert named, f"{what}: {ours}"
            assert not same(plain, expected, 1e-6) or any(kind in str(value) for kind in STRETCHED), f"{what}: {ours}"
        else:
            assert same(ours, expected), f"{what}: another model than transformers'"
            served += 1
        if not same(plain, expected, 1e-6) or isinstance(ours, str):
            ours = answer(lambda module=module: TransformersModel(module, name="tiny"))
            assert not isinstance(ours, str) or key == "use_bidirectional_attention", f"{what}: {ours}"
            assert isinstance(ours, str) or same(ours, expected, 1e-4), (
                f"{what}: torch has another model than transformers'"
            )
    assert served > (4 if sparse else 50)
