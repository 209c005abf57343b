"""Checkpoints of learned drafters: every published layout is read, what cannot be is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.drafters.learned.checkpoint import Checkpoint, fit, read, stranger
from outpace.drafters.learned.config import Decoder, EagleConfig, MedusaConfig, eagle_layers, tensor_shapes
from outpace.drafters.learned.load import located
from outpace.errors import DrafterError, ModelError
from outpace.models.base import ModelInfo
from outpace.models.weights import pickles, safetensors
from tests import learned
from tests.oracles.networks import eagle_steps

RECORDED = Path(__file__).parents[1] / "recorded"
EAGLE_LAYER = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
SPECULATORS = {
    "speculators_model_type": "eagle3", "draft_vocab_size": 12, "norm_before_residual": False, "norm_before_fc": False,
    "fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "transformer_layer_config": {**EAGLE_LAYER, **THETA},
}  # fmt: skip
FLAT = {**EAGLE_LAYER, "rope_theta": 5000.0, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 12}
OLD = {"architectures": ["LlamaForCausalLM"]}  # what EAGLE's authors say
INFO = ModelInfo("target", "native", 32, 8, 6, 64, (0,), "float32", "cpu", 0, 0)


def put(folder: Path, config: dict[str, Any], tensors: dict[str, Any], dtype: str = "BF16") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.write(folder / "model.safetensors", tensors, dtype)
    return folder


def flat(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("layers.0.", "midlayer."): values for name, values in tensors.items()}


def seen_of(name: str) -> tuple[Checkpoint, dict[str, Any]]:
    seen = json.loads((RECORDED / name / "seen.json").read_text())
    return read(RECORDED / name), {key: np.array(values) for key, values in seen.items()}


@pytest.mark.parametrize("name", ["eagle-3.1", "eagle-qwen3"])
def test_eagle_as_speculators_wrote_it_computes_what_it_computed(name: str) -> None:
    its, seen = seen_of(name)
    assert isinstance(its.config, EagleConfig)
    assert its.config.hidden_layers == (1, 3, 4)  # speculators: inputs of layers 2, 4, 5
    assert (its.config.fc_norm, its.config.norm_before_residual) == (
        (True, False) if name == "eagle-3.1" else (False, True)
    )
    first, second = eagle_steps(its.config, its.tensors, seen["hidden_states"], seen["tokens"])
    np.testing.assert_allclose(first, seen["logits"], atol=2e-5)
    np.testing.assert_allclose(second, seen["predicted"], atol=2e-5)


def test_a_flag_that_is_misread_shows() -> None:
    """The record tells the readings apart: otherwise the test above would prove nothing."""
    its, seen = seen_of("eagle-3.1")
    assert isinstance(its.config, EagleConfig)
    for flag in ("norm_before_residual", "norm_output", "fc_norm"):
        config = replace(its.config, **{flag: not getattr(its.config, flag)})
        found = eagle_steps(config, its.tensors, seen["hidden_states"], seen["tokens"])
        assert max(abs(found[0] - seen["logits"]).max(), abs(found[1] - seen["predicted"]).max()) > 1e-2, flag


def stored(config: EagleConfig) -> EagleConfig:
    """With the target's rows as they are stored for an embedding: of a file that has none."""
    return replace(config, decoder=replace(config.decoder, embedding_scale=1.0))


# Layouts: config.json, tensors by the file's names, and what they are read as.
def _eagle_layouts() -> list[Any]:
    config = learned.eagle()
    plain = learned.eagle(fc_norm=False, norm_output=False)
    over_all = learned.eagle(fc_norm=False, norm_before_fc=True)
    own = learned.random_tensors(config, head=True, embedding=True)
    old = learned.random_tensors(plain, head=True)
    qwen = replace(config.decoder, qk_norm=True)
    with_qk = learned.random_tensors(replace(config, decoder=qwen), head=True)
    gate = learned.random_tensors(over_all, head=True)
    every = learned.random_tensors(learned.eagle(draft_vocab=32), head=True)
    without_map = {name: values for name, values in every.items() if name not in ("d2t", "t2d")}
    layer = SPECULATORS["transformer_layer_config"]
    ids = [2, 4, 5]
    extra = {"verifier_norm.weight": np.ones(8), "rotary_emb.inv_freq": np.ones(2)}
    return [
        ("speculators", SPECULATORS, own, config),
        ("and the embedding left out", SPECULATORS, learned.random_tensors(config, head=True), stored(config)),
        ("and layers left out", {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": None}, own,
         replace(config, hidden_layers=())),
        ("Qwen3's layer", {**SPECULATORS, "transformer_layer_config": {**layer, "model_type": "qwen3"}}, with_qk,
         stored(replace(config, decoder=qwen))),
        ("norm_before_fc", {**SPECULATORS, "fc_norm": False, "norm_before_fc": True}, gate, stored(over_all)),
        ("the whole vocabulary", {**SPECULATORS, "draft_vocab_size": 32}, without_map,
         stored(learned.eagle(draft_vocab=32))),
        ("what training leaves behind", SPECULATORS, {**own, **extra}, config),
        ("EAGLE-3, flat", FLAT, flat(old), stored(replace(plain, hidden_layers=()))),
        ("its authors'", {**FLAT, **OLD, "num_hidden_layers": 40}, flat(old), stored(replace(plain, hidden_layers=()))),
        ("layers.0", {**FLAT, "eagle_aux_hidden_state_layer_ids": ids}, old, stored(plain)),
        ("flat with 3.1's norms", {**FLAT, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
         flat(own), learned.eagle(hidden_layers=(), norm_before_residual=True)),
        ("with an eagle_config",
         {**FLAT, "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": ids}}, flat(gate),
         stored(learned.eagle(fc_norm=False, norm_output=False, norm_before_fc=True))),
    ]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "wanted"), [pytest.param(*c[1:], id=c[0]) for c in _eagle_layouts()])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_eagle_layouts(tmp_path: Path, config: Any, tensors: Any, wanted: EagleConfig, dtype: str) -> None:
    its = read(put(tmp_path / "it", config, tensors, dtype))
    assert (its.method, its.config, its.target, its.recipe) == ("eagle", wanted, {}, {})
    for name in tensor_shapes(wanted):
        given = tensors.get(name, tensors.get(name.replace("layers.0.", "midlayer.")))
        np.testing.assert_array_equal(its.tensors[name], given.astype(np.float16) if dtype == "F16" else given)
        assert its.tensors[name].dtype == np.float32
    assert ("embed_tokens.weight" in its.tensors) == ("embed_tokens.weight" in tensors)
    ids = np.flatnonzero(its.tensors["t2d"])
    np.testing.assert_array_equal(its.tensors["d2t"], ids - np.arange(wanted.draft_vocab))


def _medusa_layouts() -> list[Any]:
    shared = learned.medusa(tree=())
    tensors = learned.random_tensors(shared, head=True)
    token_map = np.flatnonzero(tensors.pop("t2d"))
    del tensors["d2t"]
    ours = {"model_type": "medusa", "hidden_size": 8, "vocab_size": 32, "num_heads": 3, "num_hidden_layers": 1}
    small = {**ours, "truncated_vocab_size": 12}
    one = {**small, "original_lm_head": True}
    heads = {f"lm_heads.{i}.weight": tensors["lm_head.weight"] * (i + 1) for i in range(3)}
    blocks = {name: values for name, values in tensors.items() if name.startswith("blocks")}
    mixed = np.random.default_rng(1).permutation(12)
    by_frequency = {**blocks, **{k: v[mixed] for k, v in heads.items()}, "token_map": token_map[mixed]}
    every = {f"lm_heads.{i}.weight": learned.exact(np.random.default_rng(i).normal(size=(32, 8))) for i in range(3)}
    old = {f"{i}.0.linear.weight": blocks[f"blocks.{i}.layers.0.weight"] for i in range(3)}
    old |= {f"{i}.0.linear.bias": np.full(8, i, np.float32) for i in range(3)}
    old |= {f"{i}.1.weight": every[f"lm_heads.{i}.weight"] for i in range(3)}
    named = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "somebody/model"}
    own = replace(shared, own_heads=True)
    full = replace(own, draft_vocab=32, bias=True)
    shared_head = {"lm_heads.0.weight": tensors["lm_head.weight"]}
    listed = {"token_map": token_map}
    prefixed = {f"medusa_heads.{name}": values for name, values in old.items()}
    return [
        ("vLLM's, one head", one, {**tensors, **listed}, shared, token_map),
        ("named as the first's", one, {**blocks, **listed, **shared_head}, shared, token_map),
        ("vLLM's, own heads", small, {**blocks, **listed, **heads}, own, token_map),
        ("by frequency", small, by_frequency, own, token_map),
        ("heads of the whole vocabulary", small, {**blocks, **every, **listed}, own, token_map),
        ("older keys", named, old, full, np.arange(32)),
        ("with a prefix", named, prefixed, full, np.arange(32)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tensors", "wanted", "ids"), [pytest.param(*c[1:], id=c[0]) for c in _medusa_layouts()]
)
def test_medusa_layouts(tmp_path: Path, config: Any, tensors: Any, wanted: MedusaConfig, ids: Any) -> None:
    its = read(put(tmp_path / "it", config, tensors))
    assert (its.method, its.config) == ("medusa", wanted)
    np.testing.assert_array_equal(its.tensors["d2t"], ids - np.arange(len(ids)))
    blocks = [tensors.get(f"blocks.{i}.layers.0.weight") for i in range(3)]
    for i, block in enumerate(blocks):
        old = f"{i}.0.linear.weight"
        given = block if block is not None else tensors.get(old, tensors.get(f"medusa_heads.{old}"))
        np.testing.assert_array_equal(its.tensors[f"blocks.{i}.layers.0.weight"], given)
    if wanted.own_heads and wanted.draft_vocab < wanted.vocab:
        rows = {int(token): row for token, row in zip(tensors["token_map"], tensors["lm_heads.1.weight"], strict=False)}
        if len(tensors["lm_heads.1.weight"]) == wanted.vocab:
            rows = dict(enumerate(tensors["lm_heads.1.weight"]))
        np.testing.assert_array_equal(its.tensors["lm_heads.1.weight"], [rows[int(token)] for token in ids])


def test_shards(tmp_path: Path) -> None:
    tensors = learned.random_tensors(learned.eagle(), head=True)
    folder = put(tmp_path / "it", SPECULATORS, {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, its in parts.items():
        safetensors.write(folder / file, {name: tensors[name] for name in its})
    where = {name: file for file, its in parts.items() for name in its}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    its = read(folder)
    assert all((its.tensors[name] == tensors[name]).all() for name in names)


LAYER = SPECULATORS["transformer_layer_config"]
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("missing tensor", {}, {"layers.0.mlp.up_proj.weight": None}, "has no tensor 'layers.0.mlp.up_proj.weight'"),
    ("missing head", {}, {"lm_head.weight": None}, "has no tensor 'lm_head.weight'"),
    ("missing map", {}, {"d2t": None}, "has no tensor 'd2t'"),
    ("wrong shape", {}, {"fc.weight": np.zeros((8, 16))}, r"fc.weight is \[8, 16\], but must be \[8, 24\]"),
    ("unknown tensor", {}, {"mask_hidden": np.zeros((1, 24))}, "has the tensor 'mask_hidden'"),
    ("unknown method", {"speculators_model_type": "mtp"}, {}, "speculators_model_type is 'mtp': eagle3, peagle"),
    ("two layers", {"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, r"fc.weight is \[8, 24\], but must be \[8, 16\]"),
    ("unsorted", {"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, {}, "ascending, since vLLM sorts them"),
    ("embeddings read", {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, {}, "whole numbers from 1"),
    ("residual unsaid", {"norm_before_residual": None}, {}, "does not say norm_before_residual, and readers differ"),
    ("both norms", {"norm_before_fc": True}, {}, "fc_norm and norm_before_fc exclude each other"),
    ("another hidden size", {"target_hidden_size": 16}, {}, "target_hidden_size is not its own hidden_size, 8"),
    ("no flag", {"norm_output": "yes"}, {}, "norm_output is 'yes', neither true nor false"),
    ("too many draft tokens", {"draft_vocab_size": 33}, {}, "draft_vocab_size is 33, not a whole number from 1 to 32"),
    ("layers", {"transformer_layer_config": {**LAYER, "num_hidden_layers": 2}}, {}, "it has 2 layers: 1 is read"),
    ("bias", {"transformer_layer_config": {**LAYER, "attention_bias": True}}, {}, "it has attention_bias"),
    ("rope", {"transformer_layer_config": {**LAYER, "rope_parameters": {"rope_type": "dynamic"}}}, {}, "'dynamic'"),
    ("family", {"transformer_layer_config": {**LAYER, "model_type": "gemma"}}, {}, "layers are those of 'gemma'"),
    ("twice", {}, {"d2t": np.array([0] * 11 + [-1])}, "lead to 0 to 10, not each to a token of its own"),
    ("outside", {}, {"d2t": np.array([0] * 11 + [40])}, "not each to a token of its own of the target's 32"),
    ("maps differ", {}, {"t2d": np.arange(32) < 12}, "t2d does not mark the tokens that d2t leads to"),
    ("no numbers", {}, {"norm.weight": np.zeros(8, np.int64)}, "is of type I64"),
    ("foreign", {"speculators_model_type": ..., "architectures": ["GPT2"]}, {}, "describes .'GPT2'"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "message"), [pytest.param(*c[1:], id=c[0]) for c in WRONG])
def test_refused(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str) -> None:
    whole = {**learned.random_tensors(learned.eagle(), head=True), **tensors}
    described = {name: value for name, value in {**SPECULATORS, **config}.items() if value is not ...}
    folder = put(tmp_path / "it", described, {name: values for name, values in whole.items() if values is not None})
    with pytest.raises(ModelError, match=message) as caught:
        read(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "it", SPECULATORS, {})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights: get its model\.safetensors"):
        read(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle that holds more than tensors, or is damaged"):
        read(folder)
    with pytest.raises(ModelError, match="is not a folder"):
        read(tmp_path / "nowhere")


def test_pickles_of_other_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.nn.Parameter(torch.ones(2, 2))}, path)
    assert pickles.converted([path]).is_file()
    for odd in (torch.ones(2, 2).to_sparse(), torch.empty(2, 2, device="meta")):
        torch.save({"w": odd}, path)
        with pytest.raises(ModelError, match="safetensors"):
            pickles.converted([path])
    with pytest.raises(ModelError, match="no such user"):
        located("~nobody-of-this-name/x")


def test_fit() -> None:
    its = Checkpoint("eagle", learned.eagle(hidden_layers=()), {}, {"fingerprint": "aa", "name": "demo"})
    big = replace(INFO, layers=30)
    assert fit(its, big, "aa").config == learned.eagle(hidden_layers=(1, 14, 26))  # inputs of layers 2, 15, 27
    assert fit(its, big, "aa", training=True).config == learned.eagle(hidden_layers=(1, 14, 26))
    assert fit(its, big, "bb").config == learned.eagle(hidden_layers=(1, 14, 26))  # runs, with a word
    assert stranger(its, big, "bb") == "the drafter was trained beside demo (aa), and this is target (bb)"
    assert stranger(its, big, None) is None
    assert stranger(Checkpoint("eagle", its.config, {}), big, "bb") is None
    with pytest.raises(DrafterError, match=r"trained beside demo \(aa\).*start a new one"):
        fit(its, big, "bb", training=True)
    wrong: list[tuple[ModelInfo, str]] = [
        (replace(INFO, hidden_size=16), "hidden states of 8 numbers, and target has 16"),
        (replace(INFO, vocab_size=31), "vocabulary has 32 tokens, and target's 31"),
        (replace(INFO, layers=3), r"outputs of layers \[1, 0, -1\], and target has layers 0 to 2"),
    ]
    for info, message in wrong:
        with pytest.raises(DrafterError, match=message):
            fit(its, info, None)
    with pytest.raises(DrafterError, match=r"layers \[0, 2, 4\], and target has layers 0 to 3"):
        fit(Checkpoint("parallel", learned.parallel(), {}), replace(INFO, layers=4), None)


def test_a_decoder_is_what_it_says(tmp_path: Path) -> None:
    tensors = learned.random_tensors(learned.eagle(), head=True)
    its = read(put(tmp_path / "it", SPECULATORS, tensors)).config
    assert isinstance(its, EagleConfig)
    assert its.decoder == Decoder(8, 1, 2, 1, 4, 16, 1e-5, 5000.0, 64, embedding_scale=1.0)
    assert eagle_layers(30) == (1, 14, 26)
