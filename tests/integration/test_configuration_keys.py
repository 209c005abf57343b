"""Every field of a configuration, changed or left out: the model that transformers makes of it, or a refusal.

And every key of GGUF's specification, with another value: another answer, or a refusal by name, of both backends alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import pytest
import torch
import transformers

from outpace.common.arrays import F32
from outpace.errors import ModelError
from outpace.models.architecture import Family
from outpace.models.base import Batch
from outpace.models.families import FAMILIES
from outpace.models.native.model import load_native
from outpace.models.torch import gguf as torch_gguf
from outpace.models.torch.model import TransformersModel
from outpace.models.weights.gguf import GGUFFile
from tests.exported import export

SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 11, "sliding_window": 9, "attn_logit_softcapping": 3.0,
               "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "gemma4": {"sliding_window": 9, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
               "num_hidden_layers": 8, "num_kv_shared_layers": 2, "final_logit_softcapping": 5.0,
               "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 90,
               "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
               "tie_word_embeddings": True},
    "ministral3": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.4,
    }},
    "gemma3": {"query_pre_attn_scalar": 11, "sliding_window": 9, "sliding_window_pattern": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                "logits_scaling": 2.0},
    "phi3": {"original_max_position_embeddings": 64},
    "granite4": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 24, "shared_intermediate_size": 40, "position_embedding_type": "rope",
        "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "head_dim": 16, "mamba_num_heads": 2,
        "mamba_head_dim": 48, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "time_step_min": 1e-9,
    },
    "falcon_h1": {
        "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_ssm": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
        "mlp_multipliers": [0.6, 1.7], "ssm_multipliers": [0.5, 1.4, 0.7, 1.3, 0.4], "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.3, "key_multiplier": 0.4, "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "granite_moe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
                    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                    "logits_scaling": 2.0},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "glm4_moe_lite": LATENT,
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 9,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen3_5_moe": {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_next": {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 24, "num_dense_layers": 1, "tie_word_embeddings": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 16,
             "intermediate_size": 96},
    "qwen3_5": {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
                "linear_num_value_heads": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
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
    "layer_types": [["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2,
                    ["linear_attention", "full_attention"] * 2, ["conv", "full_attention"] * 2],
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
    "full_attn_idxs": [[0, 2]], "mtp_layers_block_type": [["moe"]], "mamba_hidden_act": ["gelu"],
    "moe_latent_size": [32], "mlp_hidden_act": ["silu", "relu"], "mamba_ssm_cache_dtype": ["bfloat16"],
    "time_step_min": [],
    "layers_block_type": [["linear_attention", "full_attention"] * 2, ["moe", "full_attention", "mlp", "mlp"]],
    "mlp_only_layers": [[1], [0, 2]], "moe_layer_end_index": [-1, 2], "num_nextn_predict_layers": [0, 2],
    "n_group": [2], "topk_group": [2], "swiglu_limit": [0.5], "num_experts_per_tok": [1, 3], "moe_k": [1, 3],
    "per_layer_config": [
        {"5": {"head_dim": 16, "num_key_value_heads": 1}, "7": {"head_dim": 16, "num_key_value_heads": 2}},
        {"5": {"head_dim": 16}, "7": {"head_dim": 16}}, {"1": {"intermediate_size": 20}}, {},
    ],
    "top_k_experts": [1, 3], "qk_layernorm": [True], "topk_method": ["greedy", "noaux_tc"],
    "mlp_layer_types": [["sparse"] * 4, ["sparse", "dense"] * 2], "position_embedding_type": ["nope"],
    "time_step_limit": [], "mlp_multipliers": [[1.0, 1.0], [0.2, 3.0], None], "mamba_d_ssm": [None, 64],
    "ssm_multipliers": [None, *([1.0] * i + [3.0] + [1.0] * (4 - i) for i in range(5))],
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
        if key in config and key not in ("architectures", "model_type", "time_step_min"):  # docs/recurrent.md has why
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
    if family.varied:  # as published ones have it
        more = MORE[family.name]
        fields |= {key: more[key] for key in ("global_head_dim", "num_global_key_value_heads")}
        del fields["per_layer_config"]
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
        found: F32 = module(torch.from_numpy(TEXT.astype(np.int64))[None], use_cache=False).logits[0].float().numpy()
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
STRETCHED = ("dynamic",)


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
        if (
            not sparse and key not in fields and crc32(f"{family.name} {key}".encode()) % 6
        ):  # each such field in a sixth of the families
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
            bidirectional = key == "use_bidirectional_attention" or other.get("sliding_window") == 0  # sees nothing
            assert not isinstance(ours, str) or bidirectional, f"{what}: {ours}"
            assert isinstance(ours, str) or same(ours, expected, 1e-4), (
                f"{what}: torch has another model than transformers'"
            )
    assert served > (4 if sparse else 30)


GGUF = [family for family in FAMILIES if family.gguf is not None]
PATTERN = "attention.sliding_window_pattern"
UNCHANGED = {  # keys of the specification that change no logit of a decoder
    "classifier.output_labels", "decoder_start_token_id", "pooling_type", "rope.dimension_sections",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "tensor_data_layout", "vocab_size",
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "attention.causal": [False], "rope.scaling.type": ["yarn", "longrope", "no such"], "tensor_data_layout": ["x"],
    "attention.sliding_window": [5], "attention.sliding_window_pattern": [3, np.array([True, False, False, True])],
    "rope.dimension_count": [4, 2], "rope.dimension_sections": [np.array([2, 1, 1])], "context_length": [50],
    "attention.head_count": [2, np.array([4, 2, 4, 4])], "attention.head_count_kv": [1, np.array([2, 1, 2, 2])],
    "block_count": [3], "expert_gating_func": [4, 0.37], "attention.layer_norm_rms_epsilon": [0.1],
}  # fmt: skip


def architecture(family: Family) -> str:
    """Of its files, of those with experts where they have another."""
    found = family.gguf_mixed or family.gguf
    assert found is not None
    return found


def specification() -> list[str]:
    """The keys behind the architecture's name, in gguf-py and in llama.cpp's readers of old files."""
    found = ["rope.scale_linear"]
    places: list[type] = [gguf.constants.Keys]
    for place in places:
        for value in vars(place).values():
            if isinstance(value, type):
                places.append(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                found.append(value.removeprefix("{arch}.").replace("{dense}", "dense_2"))
    assert len(found) > 90
    return sorted(found)


def exported(family: Family, path: Path, transformers_type: str = "", **more: Any) -> Any:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    sizes = SIZES | MORE.get(family.name, {}) | ({"query_pre_attn_scalar": 8} if family.query_scalar else {}) | more
    config = transformers.AutoConfig.for_model(transformers_type or family.transformers, **sizes)
    model = perturbed(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    export(model, architecture(family), path)
    return model


def answers(path: Path, family: Family, changes: dict[str, Any]) -> list[F32 | str]:
    """Of both backends, from a file with other metadata; transformers reads mixtures from the file itself."""
    file = GGUFFile.open(path)
    file.metadata |= {f"{architecture(family)}.{key}": value for key, value in changes.items()}
    found = [answer(lambda: load_native(file, kv_dtype="float32", threads=1))]
    cpu = torch.device("cpu")
    if family.mixture is family.recurrent is None and not family.modules:
        found.append(answer(lambda: TransformersModel(torch_gguf.build(file, torch.float32, cpu), name="tiny")))
    return found


@pytest.mark.parametrize("family", GGUF, ids=lambda family: family.name)
def test_no_key_of_a_gguf_file_is_ignored(family: Family, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    plain = logits(exported(family, path))
    for ours in answers(path, family, {}):
        assert not isinstance(ours, str) and same(ours, plain), ours  # noqa: PT018
    there = GGUFFile.open(path).metadata
    for key in specification():
        now = there.get(f"{architecture(family)}.{key}")
        for value in VALUES.get(key, [2, 0.37] if now is None else [2 * now]):
            what = f"{architecture(family)}.{key}={value}"
            if isinstance(value, int) and isinstance(now, int) and value == now:
                continue
            native_answer, torch_answer = (answers(path, family, {key: value}) * 2)[:2]
            if isinstance(native_answer, str) or isinstance(torch_answer, str):
                both = f"{what}: {native_answer} / {torch_answer}"
                assert isinstance(native_answer, str), both
                assert isinstance(torch_answer, str), both
                for message in (native_answer, torch_answer):
                    assert key in message or str(value) in message or "tensor" in message or " must " in message, both
                continue
            assert same(native_answer, torch_answer), f"{what}: the backends have different models"
            experts_alone = family.mixture is not None and family.mixture.first is None  # there are no dense layers
            idle = experts_alone and key == "feed_forward_length"
            idle |= not family.rotates and key.startswith("rope.")
            grows = family.grows and key == "rope.scaling.original_context_length"
            if key == "context_length" or (key in UNCHANGED and not grows) or idle:
                assert same(native_answer, plain), what
            else:
                assert not same(native_answer, plain, 1e-4), f"{what} is ignored"


@pytest.mark.parametrize("family", GGUF, ids=lambda family: family.name)
def test_values_that_change_nothing_are_served(family: Family, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    plain = logits(exported(family, path))
    tries: tuple[dict[str, Any], ...] = (
        {"attention.causal": True, "attention.clamp_kqv": 0.0, "expert_count": 0, "expert_used_count": 0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": True},
        {"rope.scaling.factor": 0.0, "rope.scale_linear": 8.0},
        {"rope.scaling.attn_factor": 1.0, "use_parallel_residual": False, "attention.scale": 0.0, "logit_scale": 0.0},
        {"final_logit_softcapping": 0.0, "rope.scale_linear": 1.0, "attention.sliding_window": 64, "vocab_size": 90},
    )
    for changes in tries:
        if family.scales and "attention.scale" in changes:
            continue
        if family.mixture is not None:
            for key in ("expert_count", "expert_used_count"):
                changes.pop(key, None)
        for key in ("attention.sliding_window", "final_logit_softcapping"):
            if f"{family.gguf}.{key}" in GGUFFile.open(path).metadata:
                changes.pop(key, None)
        for ours in answers(path, family, changes):
            assert not isinstance(ours, str) and same(ours, plain), (changes, ours)  # noqa: PT018


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_factor_without_a_type_is_linear(architecture: str, tmp_path: Path) -> None:
    """As llama.cpp reads it, under its old name, too."""
    family = next(family for family in FAMILIES if family.gguf == architecture)
    linear: dict[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    if len(family.ropes) > 1:
        linear = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    path = tmp_path / "m.gguf"
    expected = logits(exported(family, path, rope_parameters=linear))
    file = GGUFFile.open(path)
    typed = {f"{architecture}.rope.scaling.type": "linear", f"{architecture}.rope.scaling.factor": 4.0}
    assert typed.items() <= file.metadata.items()
    none = dict.fromkeys(("rope.scaling.type", "rope.scaling.factor"))
    for changes in ({}, {"rope.scaling.type": None}, {**none, "rope.scale_linear": 4.0}):
        for ours in answers(path, family, changes):
            assert not isinstance(ours, str) and same(ours, expected), (changes, ours)  # noqa: PT018


def test_windows_of_olmo_3_files(tmp_path: Path) -> None:
    """Their architecture is olmo2; the pattern may be listed, and only layers that see all are stretched."""
    family = next(family for family in FAMILIES if family.gguf == "olmo2")
    linear = {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0}
    ropes = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}
    for kinds, pattern in (
        (["sliding_attention"] * 3 + ["full_attention"], None),
        (["full_attention"] + ["sliding_attention"] * 3, np.array([False, True, True, True])),
    ):
        path = tmp_path / "m.gguf"
        sizes = {"sliding_window": 6, "layer_types": kinds, "rope_parameters": ropes}
        expected = logits(exported(family, path, "olmo3", **sizes))
        window = {"attention.sliding_window": 6}
        for ours in answers(path, family, window if pattern is None else {**window, PATTERN: pattern}):
            assert not isinstance(ours, str) and same(ours, expected), ours  # noqa: PT018
    for ours in answers(path, family, {**window, PATTERN: np.array([True])}):
        assert isinstance(ours, str) and "names 1 of its 4 layers" in ours  # noqa: PT018


def tiny(family: Family, **fields: Any) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = SIZES | MORE.get(family.name, {}) | fields
    config = transformers.AutoConfig.for_model(family.transformers, **sizes)
    return perturbed(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [each for each in FAMILIES if each.mixture is each.recurrent is None and not (each.modules or each.grows)],
    ids=lambda family: family.name,
)
def test_torch_serves_other_activations_through_the_modules(family: Family, dtype: torch.dtype) -> None:
    """In 16 bits, too, where one activation for another can hide behind rounding; the usual one runs as ours."""

    def replaced(module: Any) -> Any:  # what no configuration says
        for layer in module.model.layers:
            mlp = getattr(layer, "mlp", None) or layer.shared_mlp
            name = next(each for each in ("activation_fn", "act_fn", "activation") if hasattr(mlp, each))
            setattr(mlp, name, torch.nn.Softsign())
        return module

    usual = "silu" if family.activation == "silu" else "gelu_pytorch_tanh"
    for made, ours in (
        *((tiny(family, **{family.activation_key: name}), name == usual) for name in (usual, "gelu", "relu", "relu2")),
        (replaced(tiny(family)), False),
    ):
        exact = logits(made)
        module = made.to(dtype)
        rounded = logits(module)
        model = TransformersModel(module, name="tiny")
        assert (model._own is not None) == ours, model._own
        size = np.abs(exact).max()
        assert np.abs(run(model) - exact).max() < 4 * np.abs(rounded - exact).max() + 1e-4 * size
