"""Layers of the target's files that draft (multi-token prediction): transformers' numbers, plain decoding's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_architectures import reference, saved
from transformers.modeling_layers import MtpLayer

from outpace.drafters.base import DraftContext
from outpace.drafters.learned.load import build_mtp
from outpace.drafters.learned.native import NativeMtp
from outpace.drafters.registry import build, parse
from outpace.drafters.spec import DrafterSpec
from outpace.engine.engine import Engine
from outpace.errors import DrafterError, ModelError
from outpace.models.base import Batch
from outpace.models.native.model import NativeModel, load_native
from outpace.models.options import LoadOptions
from outpace.models.weights.gguf import GGUFFile
from outpace.params import SamplingParams
from tests.driving import finished
from tests.exported import export

QWEN = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
}  # fmt: skip
FOLDERS = ("deepseek_v3",)  # of whose layers llama.cpp's converter leaves this one out
FAMILIES = {
    "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "qwen3_next": "qwen3next", "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
}  # fmt: skip


def headed(name: str, folder: Path) -> tuple[Any, Any]:
    """A tiny model, and the layer behind its last one, both perturbed; in ``folder``, as they are published."""
    model = saved(name, folder)
    last = model.model.layers[-1]
    attends = [
        i
        for i, kind in enumerate(
            getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
        )
        if kind == "full_attention"
    ]
    torch.manual_seed(3)
    layer = MtpLayer(model.config, type(last), type(last.input_layernorm), attends[-1]).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            spread, around = (0.3, 1.0) if parameter.dim() == 1 else (0.15, 0.0)
            parameter.copy_(around + torch.randn_like(parameter) * spread)
        for buffer in layer.buffers():
            buffer.copy_(torch.randn_like(buffer) * 0.3)
    layers = model.config.num_hidden_layers
    tensors = {}
    for full, values in layer.state_dict().items():
        part, _, rest = full.partition(".")
        if name.startswith("qwen"):
            place = f"mtp.layers.0.{rest}" if part == "mtp_block" else f"{QWEN[part]}.{rest}"
        elif part == "mtp_block":
            place = f"model.layers.{layers}.{rest}"
        else:
            place = f"model.layers.{layers}.{'shared_head.norm' if part == 'post_norm' else part}.{rest}"
        tensors[place] = values.contiguous()
    save_file(tensors, folder / "heads.safetensors")
    (folder / "model.safetensors").rename(folder / "main.safetensors")  # so that both count
    config = json.loads((folder / "config.json").read_text())
    if name != "qwen3_next":  # whose configuration does not say it
        config["mtp_num_hidden_layers" if name.startswith("qwen") else "num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return model, layer


@torch.inference_mode()
def theirs(model: Any, layer: Any, tokens: Any, states: Any) -> tuple[Any, Any]:
    """Logits after each entry, and what the next one of a draft reads."""
    n = len(tokens)
    ids, positions = torch.from_numpy(np.asarray(tokens, np.int64))[None], torch.arange(n)[None]
    embedded = model.model.embed_tokens(ids)
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    out = layer(
        embedded, torch.from_numpy(states)[None], model.model.rotary_emb(embedded, position_ids=positions), mask,
        positions, None,
    )  # fmt: skip
    return model.lm_head(out)[0].numpy(), out[0].numpy()


def entries(model: NativeModel, text: Any) -> Any:
    """The last layer's outputs of all tokens but the last, [n - 1, 1, hidden]."""
    row = model.kv.alloc()
    batch = Batch.pack([row], [text[:-1]], [0], [False], hidden_layers=(model.info.layers - 1,))
    states = model.forward(batch).hidden_states(np.arange(len(text) - 1, dtype=np.int32)).numpy()
    model.kv.free(row)
    return states


@pytest.mark.parametrize("name", [*FAMILIES, *FOLDERS])
def test_a_folders_layer_predicts_what_transformers_does(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    module, layer = headed(name, tmp_path)
    model = load_native(tmp_path, dtype="float32", kv_dtype="float32", threads=2)
    text = rng.integers(0, 120, 40).astype(np.int32)
    assert model.info.layers == module.config.num_hidden_layers
    states, network = entries(model, text), NativeMtp(model)
    with torch.inference_mode():
        normed = module.model.norm(torch.from_numpy(states[:, 0])).numpy()
    logits, out = theirs(module, layer, text[1:], normed)
    tokens, given, close = [text[1:]], [states], 2e-3 * np.abs(logits).max()
    fed, read = list(text[1:]), normed
    for _ in range(4):  # a chain, each token from the one before
        ours, given = network.extend([0], tokens, given)
        assert np.abs(ours[0] - logits[-1]).max() < close
        fed, read = [*fed, int(logits[-1].argmax())], np.concatenate([read, out[-1:]])
        tokens = [np.array(fed[-1:], np.int32)]
        logits, out = theirs(module, layer, fed, read)
    network.close()
    expected = reference(module, text)
    row = model.kv.alloc()
    found = model.forward(Batch.pack([row], [text], [0], [True])).logits(np.arange(40, dtype=np.int32))
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_files_layer_is_the_folders(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    module, layer = headed(name, tmp_path)
    path = export(module, FAMILIES[name], tmp_path / "m.gguf", head=layer)
    assert GGUFFile.open(path).metadata[f"{FAMILIES[name]}.nextn_predict_layers"] == 1
    text = rng.integers(0, 120, 30).astype(np.int32)
    models = [load_native(at, dtype="float32", kv_dtype="float32", threads=1) for at in (tmp_path, path)]
    states = entries(models[0], text)
    first, second = (NativeMtp(model).extend([0], [text[1:]], [states])[0] for model in models)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("options", [{}, {"branch": "1"}, {"levels": "2"}])
def test_drafted_answers_are_plain_decodings(name: str, options: dict[str, str], tmp_path: Path) -> None:
    headed(name, tmp_path)
    found = []
    for size in (0, 1, 5, 12):
        spec = DrafterSpec("mtp", "mtp", None, options)
        model = load_native(tmp_path, threads=2)
        drafter = build_mtp(spec, DraftContext(model, None, LoadOptions(), 12))
        with Engine(model, drafter=drafter, size=size, max_rows=3, prefill_chunk=17) as engine:
            for i, prompt in enumerate(([1, 2, 3], [7], [5, 1, 5, 2] * 9, [9, 8] * 30)):
                params = SamplingParams(max_tokens=30, temperature=0.8 * (i % 2), seed=i, n=1 + i // 2)
                engine.add(prompt, params.with_(allowed_tokens=tuple(range(4)) if i == 2 else None))
            results = finished(engine)
        found.append([result.token_ids for result in results.values()])
        assert size == 0 or sum(result.stats.drafted for result in results.values()) > 0
    assert all(each == found[0] for each in found)


def test_without_such_a_layer_it_is_refused(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path)
    model = load_native(tmp_path, threads=1)
    with pytest.raises(DrafterError, match="have no layer that drafts: use suffix"):
        NativeMtp(model)


def test_a_file_that_came_without_it_is_refused_as_such(tmp_path: Path) -> None:
    model = load_native(export(saved("deepseek_v3", tmp_path), "deepseek2", tmp_path / "m.gguf"), threads=1)
    with pytest.raises(DrafterError, match=r"converter leaves out that of DeepSeek V3.*give the model's folder"):
        NativeMtp(model)


def test_a_file_of_that_layer_alone_is_refused_as_such(tmp_path: Path) -> None:
    module, layer = headed("glm4_moe_lite", tmp_path)
    path = export(module, "deepseek2", tmp_path / "m.gguf", head=layer, leave_out="blk.2.attn_norm.weight")
    with pytest.raises(ModelError, match=r"the layer that drafts alone.*: give a file of the whole model"):
        load_native(path, threads=1)


@pytest.mark.parametrize("name", [*FAMILIES, *FOLDERS])
def test_auto_drafts_with_it_from_folders_and_files(name: str, tmp_path: Path) -> None:
    """Plain decoding's tokens at sizes that the policy chooses, in chains, and in small trees."""
    module, layer = headed(name, tmp_path)
    paths = [tmp_path]
    if name in FAMILIES:
        paths.append(export(module, FAMILIES[name], tmp_path / "m.gguf", head=layer))
    for path in paths:
        found = []
        for spec, size in (("none", 0), ("auto", "auto"), ("auto", 3), ("suffix+mtp:branch=2", 6)):
            model = load_native(path, threads=2)
            assert model.drafts
            drafter = build(parse(spec), DraftContext(model, None, LoadOptions(), 12))
            assert spec != "auto" or drafter.name == "suffix+mtp"
            with Engine(model, drafter=drafter, size=size, max_rows=2) as engine:
                for i, prompt in enumerate(([1, 2, 3], [5, 1, 5, 2] * 5)):
                    engine.add(prompt, SamplingParams(max_tokens=16, temperature=0.8 * i, seed=i, ignore_eos=True))
                results = finished(engine)
                found.append([result.token_ids for result in results.values()])
                if size not in (0, "auto"):
                    assert engine.stats.drafted > 0
        assert all(each == found[0] for each in found), path


def test_auto_takes_it_where_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    headed("qwen3_5", tmp_path)
    context = DraftContext(load_native(tmp_path, threads=1), None, LoadOptions(), 12)
    assert build(parse("auto"), context).name == "suffix+mtp"
    (tmp_path / "heads.safetensors").unlink()
    save_file({"mtp.fc.weight": torch.zeros(64, 128)}, tmp_path / "heads.safetensors")  # and nothing else of it
    context = DraftContext(load_native(tmp_path, threads=1), None, LoadOptions(), 12)
    assert build(parse("auto:size=3"), context).name == "suffix"
    assert "auto does not stand for suffix+mtp, which cannot be used" in caplog.text
