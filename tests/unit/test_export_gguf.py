"""Learned drafters as GGUF files: read back with the gguf package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.cli.app import parse
from outpace.drafters.learned.checkpoint import Checkpoint, read
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.config import Config, EagleConfig
from outpace.errors import DrafterError, ParameterError
from outpace.models.load import resolve
from outpace.training.export import TargetRows, to_eagle3
from outpace.training.export_gguf import to_gguf, writing
from tests import learned
from tests.unit.test_export import rows

gguf = pytest.importorskip("gguf")
OLD = {"fc_norm": False, "norm_output": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tokenizer and nothing else."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    with writing(path, "llama") as writer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([f"t{i}" for i in range(learned.VOCAB)])
        writer.add_token_merges(["t 0", "t 1"])
        writer.add_eos_token_id(2)
    return path


def values_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys, and tensors as float32."""
    found = gguf.GGUFReader(path)
    tensors = {
        each.name: each.data if each.data.dtype == np.int64 else gguf.dequantize(each.data, each.tensor_type)
        for each in found.tensors
    }
    return {key: field.contents() for key, field in found.fields.items()}, tensors


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param(learned.eagle(**OLD), "draft-eagle3", id="eagle"),
        pytest.param(learned.eagle(**OLD, norm_before_fc=True, norm_before_residual=True), "draft-eagle3", id="norms"),
        pytest.param(learned.eagle(**OLD, draft_vocab=learned.VOCAB), "draft-eagle3", id="whole"),
        pytest.param(learned.parallel(), "draft-dspark", id="dspark"),
        pytest.param(learned.parallel(confidence=False, sample_from_anchor=False), "draft-dspark", id="no confidence"),
        pytest.param(
            learned.parallel(markov_rank=0, confidence=False, sample_from_anchor=False), "draft-dflash", id="dflash"
        ),
    ],
)
def test_what_llamacpp_reads(config: Any, kind: str, target: Path, tmp_path: Path) -> None:
    tensors = learned.random_tensors(config)
    method = "eagle" if isinstance(config, EagleConfig) else "parallel"
    its = rows()
    assert to_gguf(tmp_path / "it.gguf", Checkpoint(method, config, tensors), its, target) == kind
    keys, found = values_of(tmp_path / "it.gguf")
    name = "eagle3" if method == "eagle" else "dflash"
    assert keys["general.architecture"] == name
    assert keys[f"{name}.target_layers"] == [layer + 1 for layer in config.hidden_layers]  # what enters a layer
    shape = config.decoder
    for key, value in {
        "block_count": shape.layers, "embedding_length": shape.hidden, "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads, "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim, "rope.freq_base": shape.rope_theta,
    }.items():  # fmt: skip
        assert keys[f"{name}.{key}"] == value
    theirs = values_of(target)[0]
    for key in ("tokens", "merges", "model", "pre", "eos_token_id"):  # as the target's
        assert keys[f"tokenizer.ggml.{key}"] == theirs[f"tokenizer.ggml.{key}"]

    assert ("d2t" in found) == (config.draft_vocab < config.vocab)
    ids = np.flatnonzero(tensors["t2d"])
    if "d2t" in found:
        np.testing.assert_array_equal(found["d2t"], ids)
    np.testing.assert_array_equal(found["output.weight"], its.head[ids])
    if name == "eagle3":
        assert keys["eagle3.norm_before_residual"] is config.norm_before_residual
        assert keys["eagle3.norm_before_fc"] is config.norm_before_fc
        assert ("enc.output_norm.weight" in found) == config.norm_before_fc
        # A Llama's rows of q and k: number i and i + half are turned together, and stand side by side in llama.cpp's.
        q = tensors["layers.0.self_attn.q_proj.weight"].reshape(shape.heads, shape.head_dim, -1)
        side = found["blk.0.attn_q.weight"].reshape(shape.heads, shape.head_dim, -1)
        np.testing.assert_array_equal(side[:, 0::2], q[:, : shape.head_dim // 2])
        np.testing.assert_array_equal(side[:, 1::2], q[:, shape.head_dim // 2 :])
        return
    assert keys["dflash.block_size"] == config.block
    assert keys["dflash.sample_from_anchor"] is config.sample_from_anchor
    assert keys["dflash.has_confidence_head"] is config.confidence
    assert keys["tokenizer.ggml.mask_token_id"] == config.mask_token
    for i in range(shape.layers):
        for their, our in {"attn_q": "self_attn.q_proj", "attn_k_norm": "self_attn.k_norm"}.items():
            np.testing.assert_array_equal(found[f"blk.{i}.{their}.weight"], tensors[f"layers.{i}.{our}.weight"])
    assert ("markov_w1.weight" in found, "conf_proj.bias" in found) == (config.markov_rank > 0, config.confidence)
    np.testing.assert_array_equal(found["enc.output_norm.weight"], tensors["hidden_norm.weight"])


def test_what_llamacpp_does_not_run(target: Path, tmp_path: Path) -> None:
    shape = learned.parallel().decoder
    wrong: list[tuple[str, Config, str]] = [
        ("eagle", learned.eagle(), r"it is an EAGLE-3\.1"),
        ("medusa", learned.medusa(), "of the method medusa"),
        ("eagle", learned.eagle(**OLD, hidden_layers=(1, 3, 5)), "reads the target's last layer"),
        ("parallel", learned.parallel(markov_rank=0, confidence=False), "it predicts at the pending token"),
        ("parallel", learned.parallel(decoder=replace(shape, gemma=True)), "its layers are Gemma 4's"),
        ("parallel", learned.parallel(decoder=replace(shape, logit_cap=2.0)), "its logits are capped"),
    ]
    for method, config, said in wrong:
        with pytest.raises(ParameterError, match=said):
            to_gguf(tmp_path / "no.gguf", Checkpoint(method, config, learned.random_tensors(config)), rows(), target)
    config = learned.eagle(**OLD)
    its = Checkpoint("eagle", config, learned.random_tensors(config))
    with pytest.raises(ParameterError, match="q4_0 takes rows of whole blocks of 32"):
        to_gguf(tmp_path / "no.gguf", its, rows(), target, dtype="q4_0")
    with pytest.raises(DrafterError, match="layers 0 to 3"):
        to_gguf(tmp_path / "no.gguf", its, rows(4), target)
    assert not list(tmp_path.iterdir())


def test_what_sglang_reads(tmp_path: Path) -> None:
    """Layers in both counts: in its object the outputs, from 0, outside of it what enters a layer."""
    config = learned.eagle()
    its = Checkpoint("eagle", config, learned.random_tensors(config))
    to_eagle3(tmp_path / "it", its, rows(), sglang=True)
    described = json.loads((tmp_path / "it" / "config.json").read_text())
    assert described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert described["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (described["fc_norm"], described["norm_output"], described["draft_vocab_size"]) == (True, True, 12)
    assert read(tmp_path / "it").config == config
    residual = learned.eagle(norm_before_residual=True)
    with pytest.raises(ParameterError, match="SGLang has no norm_before_residual"):
        to_eagle3(tmp_path / "no", Checkpoint("eagle", residual, its.tensors), rows(), sglang=True)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab, hidden = TargetRows.of(resolve("demo")).head.shape
    decoder = learned.Decoder(hidden, 1, 2, 1, 32, 32, 1e-5, 1e4, 64)
    config = learned.eagle(decoder=decoder, vocab=vocab, draft_vocab=100, hidden_layers=(1, 14, 26), **OLD)
    write_checkpoint(tmp_path / "ours", "eagle", config, learned.random_tensors(config), {}, {})
    assert parse(["export", "gguf", str(tmp_path / "ours"), "--dtype", "q8_0"])() == 0
    said = capsys.readouterr().out
    assert f"--spec-draft-model {tmp_path / 'ours.gguf'} --spec-type draft-eagle3" in said
    assert (tmp_path / "ours.gguf").read_bytes()[:4] == b"GGUF"


def test_a_target_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may well have the name that the export would have."""
    source = resolve("demo").path
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours.gguf").symlink_to(source)
    size = source.stat().st_size
    monkeypatch.chdir(tmp_path / "ours")
    for kind, path in (("gguf", tmp_path / "ours"), ("gguf", Path()), ("vllm", Path())):
        given = ["--out", str(tmp_path / "ours.gguf")] if kind == "vllm" else []
        with pytest.raises(ParameterError, match=r"ours\.gguf is the target itself: give another name"):
            parse(["export", kind, str(path), "-m", str(tmp_path / "ours.gguf"), *given])()
    assert (source.stat().st_size, (tmp_path / "ours.gguf").is_symlink()) == (size, True)
