"""GGUF files of families that only transformers can describe: served, or refused with the reason and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outpace.common.installing import install
from outpace.errors import ModelError
from outpace.models.base import Batch
from outpace.models.families import of_gguf
from outpace.models.load import estimate, load
from outpace.models.options import LoadOptions
from outpace.models.refused import RECURRENT
from outpace.models.weights.gguf import GGUFFile
from tests.exported import WORDS, export
from tests.integration.test_configuration_keys import UNCHANGED, specification

COMMON = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": len(WORDS), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "stablelm": COMMON | {"partial_rotary_factor": 0.5},
    "starcoder2": COMMON | {"rope_theta": 3000.0, "sliding_window": 11},
    "gemma2": COMMON | {"head_dim": 8, "query_pre_attn_scalar": 256, "sliding_window": 4096},
}


def made(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return module


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_of_transformers_is_served(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = made(family)
    path = export(module, family, tmp_path / f"{family}.gguf", tokenizer=True)
    here = of_gguf(family) is not None  # the native backend knows it, too
    options = LoadOptions(backend="transformers" if here else "auto", device="cpu", dtype="float32")
    with caplog.at_level("INFO", logger="outpace"):
        model, tokenizer = load(str(path), options)
    assert here or f"the architecture '{family}' is not one of llama" in caplog.text
    assert here or "using transformers" in caplog.text
    assert (model.info.backend, model.info.max_length, model.info.eos_ids) == ("transformers", 96, (1,))
    taken = estimate(str(path), options)
    assert (taken.weights, taken.kv_bytes_per_position) == (model.info.weight_bytes, model.info.kv_bytes_per_position)
    tokens = tokenizer.encode("ab, the quick brown fox; jumps over 123 dogs", add_special=False)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"
    batch = Batch.pack([model.kv.alloc()], [tokens], [0], [True])
    with torch.inference_mode():
        expected = module(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    assert np.abs(model.forward(batch).logits(batch.wanted) - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("stablelm", {"leave_out": "blk.1.ffn_up.weight"}, "incomplete: it has no tensor for .*layers.1.mlp.up_proj"),
        ("starcoder2", {"extra": "rope_freqs.weight"}, "'rope_freqs.weight' that a starcoder2 model does not use"),
        ("gpt2", {"more": {"rope.scaling.type": "longrope"}}, "gpt2.rope.scaling.type is 'longrope', where .* 'none'"),
        ("gpt2", {"more": {"rope.freq_base": 100.0}}, "gpt2.rope.freq_base is 100.0"),
        ("gpt2", {"more": {"logit_scale": 0.5}}, "gpt2.logit_scale is 0.5, .*use the original Hugging Face model"),
        ("stablelm", {"more": {"final_logit_softcapping": 5.0}}, "final_logit_softcapping is 5.0"),
    ],
)
def test_what_would_be_another_model_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = export(made(family), family, tmp_path / "other.gguf", tokenizer=True, **changes)
    with pytest.raises(ModelError, match=message):
        load(str(path), LoadOptions(device="cpu"))


@pytest.mark.parametrize("family", CONFIGS)
def test_no_key_is_ignored(family: str, tmp_path: Path) -> None:
    from outpace.models.torch import gguf_others

    file = GGUFFile.open(export(made(family), family, tmp_path / "m.gguf", tokenizer=True))
    own = dict(file.metadata)
    shapes = {"feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length"}
    left = [key for key in specification() if f"{family}.{key}" not in own and key not in UNCHANGED | shapes]
    for key in left:
        values = {"attention.causal": [False], "rope.scaling.type": ["yarn"], "context_length": [7]}.get(key, [2, 0.37])
        for value in values:
            file.metadata = own | {f"{family}.{key}": value}
            with pytest.raises(ModelError, match=re.escape(key)):
                gguf_others.build(file, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", ["bert", "t5", "starcoder"])
def test_a_family_that_nobody_reads_is_named(family: str, tmp_path: Path) -> None:
    path = bare(tmp_path, family)
    for ask in (load, estimate):
        with pytest.raises(ModelError, match=f"architecture '{family}' is not supported .*original Hugging Face model"):
            ask(str(path), LoadOptions(device="cpu"))


def bare(folder: Path, family: str) -> Path:
    out = gguf.GGUFWriter(folder / f"{family}.gguf", family)
    out.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return folder / f"{family}.gguf"


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.models import load as loading

    path = export(made("gpt2"), "gpt2", tmp_path / "gpt2.gguf", tokenizer=True)
    find = loading.find_spec
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(
        ModelError, match=rf"'gpt2' is not one of .* not installed: {re.escape(install('outpace[torch]'))}"
    ):
        load(str(path))


def test_architectures_are_listed_by_the_names_that_files_have(tmp_path: Path) -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    with pytest.raises(ModelError) as error:
        load(str(bare(tmp_path, "bert")), LoadOptions(device="cpu"))
    listed = re.search(r"transformers [^,]+, (.*) are\)", str(error.value))
    assert listed is not None
    names = set(listed[1].split(", "))
    assert {"llama", "qwen3moe", "gpt-oss", "gemma2"} <= names <= known
    assert not names & RECURRENT
