"""Drafters as others publish them: read, they compute what their makers' code computes, on both backends.

``tests/recorded`` has what speculators 0.9.0 wrote and computed; for other layouts their formulas stand here anew
(z-lab/dflash 44947fb, deepseek-ai/DeepSpec afdfa7c, sgl-project/SpecForge a6b6b02).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outpace import Engine, SamplingParams
from outpace.drafters.base import DraftContext
from outpace.drafters.learned import layouts
from outpace.drafters.learned.checkpoint import Checkpoint, fit, read
from outpace.drafters.learned.config import EagleConfig, ParallelConfig
from outpace.drafters.learned.drafter import Ask, Network
from outpace.drafters.learned.load import network_for
from outpace.drafters.learned.native import NativeEagle
from outpace.drafters.registry import build, parse
from outpace.errors import ModelError
from outpace.models.base import Model
from outpace.models.native.model import NativeModel
from outpace.models.options import LoadOptions
from outpace.models.weights import hub, safetensors
from tests import eagles, learned
from tests.fake_hub import FakeHub, serving
from tests.integration.conftest import Load
from tests.oracles.networks import eagle_steps, gelu, rms, rotate, silu
from tests.toy import ToyTokenizer

RECORDED = Path(__file__).parents[1] / "recorded"
SMALL = {"vocab": 32, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "inner": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 5000.0, "rope_scaling": None, "num_target_layers": 6,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
HEADS = {"markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": True,
         "confidence_head_with_markov": True}  # fmt: skip
Z = {**QWEN3, "architectures": ["DFlashDraftModel"], "block_size": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DFlash, z-lab": {**Z, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 4]}},
    "DFlash, layers as by default": {**Z, "dflash_config": {"mask_token_id": 3}},
    "DFlash, windows": {**Z, **WINDOWS, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 4]}},
    "DSpark, SpecForge": {
        **Z, **WINDOWS, "architectures": ["DSparkDraftModel"],
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 4], "projector_type": "dspark", **HEADS,
                          "attention_mode": "gqa", "confidence_head_alpha": 1.0},
    },
    "DSpark, DeepSpec": {
        **QWEN3, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 3,
        "target_layer_ids": [0, 2, 4], "num_anchors": 512, **HEADS,
    },
}  # fmt: skip
# Two KV heads of 2 in windowed layers, which a drafter has none of; the first half of the angles is turned.
GEMMA = {
    **QWEN3, "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None, "head_dim": 2,
    "global_head_dim": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "final_logit_softcapping": 2.0, "enable_moe_block": False, "hidden_size_per_layer_input": 0, "rope_theta": None,
    "layer_types": ["full_attention"] * 2, "sliding_window": 4, "use_double_wide_mlp": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
    },
}  # fmt: skip
LAYOUTS["DSpark, DeepSpec, Gemma"] = {
    **GEMMA, "architectures": ["Gemma4DSparkModel"], "block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2, 4],
    "num_anchors": 512, **HEADS,
}  # fmt: skip
LAYOUTS["DFlash2, z-lab"] = {
    **Z, **WINDOWS, "architectures": ["DFlash2DraftModel"], "is_causal": False, "block_size": None,
    "dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2, 4], "conv_kernel_size": 2,
                      "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5, "input_embedding_scale": 2.0},
}  # fmt: skip
S, D = LAYOUTS["DSpark, SpecForge"], LAYOUTS["DFlash2, z-lab"]
# RadixArk's: keys at two places, none of the confidence head.
LAYOUTS["DSpark, flat"] = {
    **Z, "architectures": ["DSparkDraftModel"], "mask_token_id": 3, "target_layer_ids": [0, 2, 4], "markov_rank": 4,
    "dspark_config": {"markov_rank": 4, "mask_token_id": 3},
}  # fmt: skip
for kind in ("gated", "rnn"):
    LAYOUTS[f"DSpark, SpecForge, {kind}"] = {**S, "dflash_config": {**S["dflash_config"], "markov_head_type": kind}}
    LAYOUTS[f"DSpark, DeepSpec, {kind}"] = {**LAYOUTS["DSpark, DeepSpec"], "markov_head_type": kind}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["dflash", "dflash-both-ways"])
def test_windowed_blocks_are_those_of_speculators(load: Load, name: str) -> None:
    seen = {key: np.array(values) for key, values in json.loads((RECORDED / name / "seen.json").read_text()).items()}
    its = read(RECORDED / name)
    embedding = seen["embed_tokens.weight"].astype(np.float32)
    its = Checkpoint(its.method, its.config, {**its.tensors, "embed_tokens.weight": embedding})
    network: Any = network_for(its, load(6, **SMALL))
    states = seen["hidden_states"].astype(np.float32)
    for row, anchor in enumerate(seen["anchors"].tolist()):
        at = np.arange(anchor, dtype=np.int32)
        network.feed([row], [at], [states[:anchor]], [at])
    _, found = network.block([0, 1, 2], seen["tokens"][seen["anchors"]].tolist(), seen["anchors"].tolist())
    np.testing.assert_allclose(found, seen["logits"], atol=2e-4)


def test_dflash2_is_that_of_speculators(load: Load) -> None:
    """What its selector chooses among, how it scores them behind the token before, and the chain that follows."""
    seen = {key: np.array(v) for key, v in json.loads((RECORDED / "dflash2" / "seen.json").read_text()).items()}
    its = read(RECORDED / "dflash2")
    assert isinstance(its.config, ParallelConfig)
    assert (its.config.decoder.conv, its.config.candidates, its.config.causal) == ((3, 4), 6, False)
    rows = {name: seen[name].astype(np.float32) for name in ("embed_tokens.weight", "lm_head.weight")}
    network: Any = network_for(Checkpoint(its.method, its.config, {**its.tensors, **rows}), load(6, **SMALL))
    states, anchors = seen["hidden_states"].astype(np.float32), seen["anchors"].tolist()
    tokens = seen["tokens"][anchors].tolist()
    for row, anchor in enumerate(anchors):
        at = np.arange(anchor, dtype=np.int32)
        network.feed([row], [at], [states[:anchor]], [at])
    normed, found = network.block([0, 1, 2], tokens, anchors)
    for row in range(3):
        before = tokens[row]
        for slot, best in enumerate(seen["candidates"][row]):
            assert sorted(np.flatnonzero(found[row, slot] > -1e29)) == sorted(best)
            np.testing.assert_allclose(found[row, slot, best], seen["logits"][row, slot, best], atol=2e-4)
            bias, _ = network.bias([before], normed[row, slot][None], np.zeros((1, 4), np.float32))
            np.testing.assert_allclose((found[row, slot] + bias[0])[best], seen["scores"][row, slot], atol=2e-4)
            before = seen["chosen"][row, slot]
        ask = Ask(row, np.zeros(1, np.int32), None, 3, 3, 1, pending=tokens[row], position=anchors[row])
        assert network.draft([ask]).tokens[0].tolist() == seen["chosen"][row].tolist()


def in_float32(its: Checkpoint, model: Model) -> Network:
    if isinstance(model, NativeModel):
        return NativeEagle(model, its, dtype="float32", kv_dtype="float32")
    return network_for(its, model)


def test_depths_of_p_eagle_are_those_of_speculators(load: Load) -> None:
    """Two layers, of which one has a window; the likeliest first tokens of each depth are drafted in one call."""
    seen = {
        key: np.array(values) for key, values in json.loads((RECORDED / "peagle" / "seen.json").read_text()).items()
    }
    its, model = read(RECORDED / "peagle"), load(6, **SMALL)
    assert isinstance(its.config, EagleConfig)
    assert (its.config.mask_token, its.config.depths, its.config.decoder.windows) == (3, 5, (0, 6))
    network: Any = in_float32(its, model)
    tokens, states = seen["tokens"].astype(np.int32), seen["hidden_states"].astype(np.float32)
    for row, (anchor, logits) in enumerate(zip(seen["anchors"].tolist(), seen["logits"], strict=True)):
        for keeps in (1, anchor + 1):  # the last entry is fed after the others, or all at once
            if keeps <= anchor:
                network.feed([row], [tokens[: anchor + 1 - keeps]], [states[: anchor + 1 - keeps]])
            entries, given = tokens[anchor + 1 - keeps : anchor + 1], states[anchor + 1 - keeps : anchor + 1]
            drafted = network.draft([Ask(row, entries, given, 5, 5, 1)])
            assert drafted.tokens[0].tolist() == network.ids[logits.argmax(-1)].tolist()
            shares = np.exp(logits - logits.max(-1, keepdims=True))
            chances = (shares / shares.sum(-1, keepdims=True)).max(-1).cumprod()
            np.testing.assert_allclose(drafted.confidence[0], chances, rtol=1e-3)
            network.kv.truncate(row, anchor + 1 - keeps)
            found, rest = network.extend([row], [entries], [given])
            for depth in range(5):
                np.testing.assert_allclose(found[0], logits[depth], atol=2e-4)
                found, rest = network.extend([row], [entries[-1:]], rest) if depth < 4 else (found, rest)
            assert network.kv.length(row) == anchor + 1
            network.kv.release(row)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_p_eagle_in_the_flat_layout(tmp_path: Path, key: str) -> None:
    """As AWS and SpecForge publish it: a Llama's keys, midlayer, a mask's states in two dimensions."""
    told = json.loads((RECORDED / "peagle" / "config.json").read_text())
    flags = {name: told[name] for name in ("draft_vocab_size", "norm_before_residual", "fc_norm")}
    flat = {**told["transformer_layer_config"], **flags, "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}  # fmt: skip
    stored = safetensors.read(RECORDED / "peagle" / "model.safetensors")
    tensors = {
        name.replace("layers.0.", "midlayer."): safetensors.plain(each, name)
        if each.type in safetensors.FLOATS
        else safetensors.whole(each, name)
        for name, each in stored.items()
    }
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    safetensors.write(tmp_path / "model.safetensors", tensors, "F32")
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with pytest.raises(ModelError, match="does not say its mask token"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**flat, key: 3}))
    found, its = read(tmp_path), read(RECORDED / "peagle")
    assert found.config == replace(its.config, depths=8)
    for name, values in its.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], values)


def test_a_windowed_eagle_with_llama3_is_that_of_speculators(load: Load) -> None:
    seen = {key: np.array(v) for key, v in json.loads((RECORDED / "eagle-window" / "seen.json").read_text()).items()}
    its, model = read(RECORDED / "eagle-window"), load(6, **SMALL)
    assert isinstance(its.config, EagleConfig)
    assert (its.config.decoder.windows, its.config.decoder.scaling["factor"]) == ((5,), 8.0)
    network: Any = in_float32(its, model)
    tokens, states = seen["tokens"].astype(np.int32), seen["hidden_states"].astype(np.float32)
    for i in range(len(tokens)):
        (found,), _ = network.extend([0], [tokens[i : i + 1]], [states[i : i + 1]])
        np.testing.assert_allclose(found, seen["logits"][i], atol=2e-4)


def blocks(config: dict[str, Any], w: dict[str, Any], states: Any, anchor: int, embedding: Any) -> Any:
    """Normed states [block, h] behind context ``states`` [n, T, h]: DFlash's decoder, slot by slot."""
    n, size, d, gemma = len(states), 4, 4, "hidden_activation" in config
    windowed = [kind == "sliding_attention" for kind in config.get("layer_types", ["full_attention"] * 2)]
    context = rms(states.reshape(n, -1) @ w["fc.weight"].T, w["hidden_norm.weight"], 1e-5)
    x = embedding[[anchor] + [3] * (size - 1)]
    at = np.arange(n + size)
    for i in range(2):
        layer = {name.removeprefix(f"layers.{i}."): values for name, values in w.items()}
        normed, kernels = convolved(rms(x, layer["input_layernorm.weight"], 1e-5), layer, "attention_conv")
        every = np.concatenate([context, normed])
        q, k, v = (
            (source @ layer[f"self_attn.{name}_proj.weight"].T).reshape(len(source), -1, d)
            for name, source in (("q", normed), ("k", every), ("k" if gemma else "v", every))
        )
        q, k = rms(q, layer["self_attn.q_norm.weight"], 1e-5), rms(k, layer["self_attn.k_norm.weight"], 1e-5)
        q, k, v = turned(q, at[n:], gemma), turned(k, at, gemma), rms(v, 1.0, 1e-5) if gemma else v
        scores = np.einsum("ihd,jd->hij", q, k[:, 0]) / (1.0 if gemma else np.sqrt(d))
        if windowed[i]:  # SpecForge trains causally; DFlash2 sees both ways. Its own place is one of the window's
            ahead = at[n:, None] - at[None]
            near = (ahead >= 0) | (config.get("is_causal") is False)
            scores = np.where(near & (ahead < config["sliding_window"]), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jd->ihd", weights / weights.sum(-1, keepdims=True), v[:, 0]).reshape(size, -1)
        added = taps(mixed @ layer["self_attn.o_proj.weight"].T, kernels)
        x = x + (rms(added, layer["post_attention_layernorm.weight"], 1e-5) if gemma else added)
        before = "pre_feedforward" if gemma else "post_attention"
        inner, kernels = convolved(rms(x, layer[f"{before}_layernorm.weight"], 1e-5), layer, "mlp_conv")
        gate, up = (inner @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        added = taps(((gelu if gemma else silu)(gate) * up) @ layer["mlp.down_proj.weight"].T, kernels)
        x = x + (rms(added, layer["post_feedforward_layernorm.weight"], 1e-5) if gemma else added)
        x = x * layer.get("layer_scalar", 1.0)
    return rms(x, w["norm.weight"], 1e-5)


def turned(x: Any, at: Any, gemma: bool) -> Any:
    found = rotate(x, at, 5000.0)
    if gemma:  # the second angle stands still
        found[..., 1::2] = x[..., 1::2]
    return found


def convolved(x: Any, layer: dict[str, Any], name: str) -> tuple[Any, Any]:
    """DFlash2: states [n, h] convolved by one half of the kernels that they make [n, taps, h], and the other half."""
    if f"{name}.base_kernel" not in layer:
        return x, None
    own = (x @ layer[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, 2, -1).repeat(4, -1)
    kernels = own + layer[f"{name}.base_kernel"]
    return taps(x, kernels[:, 0]), kernels[:, 1]


def taps(x: Any, kernels: Any) -> Any:
    if kernels is None:
        return x
    return kernels[:, 0] * x + kernels[:, 1] * np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def markov(kind: str, w: dict[str, Any], token: int, state: Any, left: Any) -> tuple[Any, Any]:
    """What DeepSpec's heads add to a slot's logits, and what they keep (its markov_head.py)."""
    w = {name.removeprefix("markov_head."): values for name, values in w.items()}
    before = w["markov_w1.weight"][token]
    if kind == "gated":
        mixed = w["gate_proj.weight"] @ np.concatenate([state, before]) + w["gate_proj.bias"]
        return w["markov_w2.weight"] @ (before / (1 + np.exp(-mixed))), left
    if kind == "selector":
        return w["markov_w2.weight"] @ (before * (w["hidden_projection.weight"] @ state)), left
    if kind == "rnn":
        mixed = w["joint_proj.weight"] @ np.concatenate([left, before, state]) + w["joint_proj.bias"]
        gate, candidate, out = np.split(mixed, 3)
        gate = 1 / (1 + np.exp(-gate))
        return w["markov_w2.weight"] @ np.tanh(out), gate * left + (1 - gate) * np.tanh(candidate)
    return w["markov_w2.weight"] @ before, left


def host(values: Any) -> Any:
    return np.asarray(values.detach() if isinstance(values, torch.Tensor) else values, np.float64)


def put(folder: Path, config: dict[str, Any], seed: int = 0) -> tuple[Path, dict[str, Any]]:
    """A random checkpoint of the layout ``config``, with its own head and embedding where that layout has them."""
    own, heads = "num_anchors" in config, "DFlashDraftModel" not in config["architectures"]
    count = len(config.get("target_layer_ids", config.get("dflash_config", {}).get("target_layer_ids", [1, 3])))
    rank = HEADS["markov_rank"] if heads else 0
    decoder, second = learned.parallel().decoder, "DFlash2DraftModel" in config["architectures"]
    if "hidden_activation" in config:
        decoder = replace(decoder, gemma=True, values=False)
    decoder = replace(decoder, conv=(2, 4) if second else (0, 0))
    kind = {**config, **config.get("dflash_config", {})}.get("markov_head_type", "selector" if second else "vanilla")
    shape = ParallelConfig(decoder, 32, 32, tuple(range(count)), 4, 3, int(rank), heads and not second, markov=kind)
    tensors = learned.random_tensors(shape, seed, head=own, embedding=own)
    tensors = {name: values for name, values in tensors.items() if name not in ("d2t", "t2d")}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = tensors
    if second:
        stored = {{canonical: file for file, canonical in layouts._SELECTOR.items()}.get(name, name): values
                  for name, values in tensors.items()}  # fmt: skip
    early = {"logit_head." * (kind == "gated" and "head" in name) + name: values for name, values in stored.items()}
    safetensors.write(folder / "model.safetensors", early if "dflash_config" in config else stored)
    return folder, {name: values.astype(np.float64) for name, values in tensors.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_blocks(load: Load, tmp_path: Path, layout: str) -> None:
    config, model = LAYOUTS[layout], load(6, **SMALL)
    folder, w = put(tmp_path / "it", config)
    rng = np.random.default_rng(2)
    its = fit(read(folder), model.info, None)
    assert isinstance(its.config, ParallelConfig)
    assert its.config.sample_from_anchor == ("DSpark" in layout)
    network: Any = network_for(its, model)
    embedding = w.get("embed_tokens.weight", host(model.parts.embed(np.arange(32, dtype=np.int32))))
    embedding = embedding * (2.0 if "DFlash2" in layout else np.sqrt(8) if "Gemma" in layout else 1.0)
    n, anchor, layers = 12, 7, len(its.config.hidden_layers)
    states = rng.normal(size=(n, layers, 8)).astype(np.float32)
    at = np.arange(n, dtype=np.int32)
    network.feed([0], [at], [states], [at])
    hidden = blocks(config, w, states.astype(np.float64), anchor, embedding)
    hidden = hidden if its.config.sample_from_anchor else hidden[1:]
    head = w.get("lm_head.weight")
    wanted = hidden @ (host(eagles._rows(model, np.arange(32, dtype=np.int32))) if head is None else head).T
    normed, logits = network.block([0], [anchor], [n])
    if "Gemma" in layout:
        wanted = 2.0 * np.tanh(wanted / 2.0)
    if most := its.config.candidates:
        least = np.sort(wanted, -1)[:, -most:].min(-1, keepdims=True)
        wanted = np.where(wanted >= least, wanted, -1e30)
    np.testing.assert_allclose(logits[0], wanted, atol=3e-4 * np.abs(hidden).max(), rtol=1e-6)
    if "markov_head.markov_w1.weight" in w:
        left = np.zeros(its.config.markov_rank)
        token, leaves = anchor, np.zeros((1, its.config.markov_rank), np.float32)
        for slot in range(network.most_levels):
            bias, left = markov(its.config.markov, w, token, hidden[slot], left)
            found, leaves = network.bias([token], normed[:, slot], leaves)
            np.testing.assert_allclose(found[0], bias, atol=3e-3 * np.abs(bias).max())
            token = int((wanted[slot] + bias).argmax())


@pytest.mark.parametrize("gemma", [False, True])
def test_eagle_3_as_deepspec_writes_it(load: Load, tmp_path: Path, gemma: bool) -> None:
    """A Qwen3's or Gemma 4's layer over five of the target's, whose residual and feedback are not normed; own head and
    embedding."""
    model, folder = load(6, **SMALL), tmp_path / "it"
    told = {**(GEMMA if gemma else QWEN3), "architectures": ["Gemma4Eagle3Model" if gemma else "Qwen3Eagle3Model"],
            "num_hidden_layers": 1, "layer_types": ["full_attention"], "attention_k_eq_v": False, "ttt_length": 7,
            "num_key_value_heads": 1, "target_layer_ids": [0, 1, 2, 4, 5], "step_loss_decay": 1.0}  # fmt: skip
    decoder = replace(learned.parallel().decoder, layers=1, gemma=gemma)
    if gemma:
        decoder = replace(decoder, embedding_scale=np.sqrt(8), logit_cap=2.0)
    config = EagleConfig(decoder, 32, 32, (0, 1, 2, 4, 5), norm_before_residual=False, norm_output=False)
    tensors = learned.random_tensors(config, 4, head=True, embedding=True)
    tensors = {name: values for name, values in tensors.items() if name not in ("d2t", "t2d")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(told))
    safetensors.write(folder / "model.safetensors", tensors)
    network: Any = in_float32(fit(read(folder), model.info, None), model)
    rng = np.random.default_rng(6)
    tokens, states = rng.integers(0, 32, 9).astype(np.int32), rng.normal(size=(9, 5, 8)).astype(np.float32)
    first, then = eagle_steps(config, {**tensors, "d2t": np.zeros(32, np.int64)}, states.astype(np.float64), tokens)
    for i in range(len(tokens)):
        (found,), given = network.extend([0], [tokens[i : i + 1]], [states[i : i + 1]])
        np.testing.assert_allclose(found, first[i], atol=3e-4 * np.abs(first).max())
        if i + 1 < len(tokens):
            (found,), _ = network.extend([0], [tokens[i + 1 : i + 2]], given)
            np.testing.assert_allclose(found, then[i], atol=3e-4 * np.abs(then).max())
            network.kv.truncate(0, i + 1)


@pytest.mark.parametrize(
    ("layout", "changes", "says"),
    [
        ("DFlash, z-lab", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ("DFlash, z-lab", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("DFlash, z-lab", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("DSpark, DeepSpec", {"target_layer_ids": [-1, 2, 4]}, "embeddings"),
        ("DSpark, DeepSpec", {"markov_head_type": "gru"}, "'gru': vanilla, gated, rnn are read"),
        ("DSpark, DeepSpec", {"architectures": ["Gemma4DSparkModel"]}, "activation is None: gelu_pytorch_tanh is read"),
        ("DSpark, DeepSpec, Gemma", {"enable_moe_block": True}, "enable_moe_block"),
        ("DFlash2, z-lab", {"dflash_config": {**D["dflash_config"], "conv_group_size": 3}}, "does not divide"),
        ("DSpark, SpecForge", {"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino'"),
        ("DFlash, z-lab", {"dflash_config": {"output_multiplier": 0.5}}, "its output_multiplier is 0.5"),
        ("DSpark, flat", {"sample_from_anchor": False}, "its sample_from_anchor is False"),
        ("DSpark, DeepSpec", {"sample_from_anchor": False}, "its sample_from_anchor is False"),
    ],
)
def test_what_would_be_misread_is_refused(tmp_path: Path, layout: str, changes: dict[str, Any], says: str) -> None:
    folder, _ = put(tmp_path / "it", LAYOUTS[layout])
    (folder / "config.json").write_text(json.dumps({**LAYOUTS[layout], **changes}))
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert says in str(caught.value)


def test_one_from_a_hub_in_a_pickle(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded by its name, converted, and plain tokens are said; what a pickle would run is refused."""
    folder, _ = put(tmp_path / "it", D)
    stored = safetensors.read(folder / "model.safetensors")
    tensors = {name: torch.from_numpy(np.array(safetensors.plain(each, name))).half() for name, each in stored.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    torch.save({"fc.weight": Path("x")}, tmp_path / "evil.bin")
    its = FakeHub()
    for repo, file in (("lab/Tiny-DFlash", "pytorch_model.bin"), ("lab/Evil", "evil.bin")):
        content = (tmp_path / file).read_bytes()
        its.files[repo] = {"config.json": (folder / "config.json").read_bytes(), "pytorch_model.bin": content}
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=1)
    with serving(its.answer) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        said = []
        for name in ("none", "drafter:lab/Tiny-DFlash", "dflash:lab/Tiny-DFlash,size=3"):
            model = load(6, **SMALL)
            drafter = build(parse(name), DraftContext(model, None, LoadOptions(), 8))
            with Engine(model, ToyTokenizer(), drafter=drafter, size=3) as engine:
                said.append(list(engine.generate([1, 2, 3, 4, 5], params).token_ids))
                assert name == "none" or engine.stats.drafted > 0
        assert said[0] == said[1] == said[2]
        with pytest.raises(ModelError, match="more than tensors"):
            read(hub.from_hub("lab/Evil", revision=None, allow_pickle=True, offline=False))
