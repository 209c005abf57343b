"""Learned drafters written for ourselves and for others, and read again."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from outpace.cli.app import parse
from outpace.drafters.learned.checkpoint import Checkpoint, read
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.config import Config, EagleConfig, MedusaConfig, head_shapes
from outpace.errors import DrafterError, ModelError, ParameterError
from outpace.models.load import resolve
from outpace.models.weights import safetensors
from outpace.training import export
from outpace.training.export import TargetRows, Verifier
from tests import learned

TARGET = {"name": "demo", "fingerprint": "abcd"}
RECIPE = {"seed": 7, "steps": 3}
CONFIGS: list[Any] = [
    pytest.param("eagle", learned.eagle(), id="eagle"),
    pytest.param("eagle", learned.eagle(norm_before_residual=True, fc_norm=False, norm_before_fc=True), id="flags"),
    pytest.param("eagle", learned.eagle(draft_vocab=learned.VOCAB), id="whole"),
    pytest.param("parallel", learned.parallel(), id="parallel"),
    pytest.param("parallel", learned.parallel(markov_rank=0, confidence=False, sample_from_anchor=False), id="bare"),
    pytest.param("medusa", learned.medusa(), id="medusa"),
    pytest.param("medusa", learned.medusa(draft_vocab=learned.VOCAB, bias=True, own_heads=True), id="own heads"),
]


def rows(layers: int = 6) -> TargetRows:
    rng = np.random.default_rng(5)
    return TargetRows(
        learned.exact(rng.normal(size=(learned.VOCAB, 8))), learned.exact(rng.normal(size=(learned.VOCAB, 8))), layers
    )


def same(a: Any, b: Any, names: Any) -> None:
    for name in names:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(("method", "config"), CONFIGS)
def test_what_is_written_is_read(tmp_path: Path, method: str, config: Config) -> None:
    tensors = learned.random_tensors(config, head=isinstance(config, MedusaConfig) and config.own_heads)
    write_checkpoint(tmp_path / "it", method, config, tensors, TARGET, RECIPE)
    its = read(tmp_path / "it")
    assert (its.method, its.config, its.target, its.recipe) == (method, config, TARGET, RECIPE)
    same(its.tensors, tensors, tensors)
    assert set(its.tensors) == set(tensors)  # neither head nor embedding: they are the target's


@pytest.mark.parametrize(("method", "config"), CONFIGS)
def test_what_is_written_for_others_has_everything(tmp_path: Path, method: str, config: Config) -> None:
    tensors = learned.random_tensors(config, head=isinstance(config, MedusaConfig) and config.own_heads)
    write_checkpoint(tmp_path / "ours", method, config, tensors, TARGET, RECIPE)
    target = rows()
    said = export.to_vllm(
        tmp_path / "theirs", read(tmp_path / "ours"), target, Verifier("some/model", ("Llama",)), tokens=3
    )
    its = read(tmp_path / "theirs")
    assert (its.method, its.config, its.target, its.recipe) == (method, config, TARGET, RECIPE)
    same(its.tensors, tensors, tensors)
    if not (isinstance(config, MedusaConfig) and config.own_heads):
        for name in head_shapes(config):
            np.testing.assert_array_equal(its.tensors[name], target.head[np.flatnonzero(tensors["t2d"])])
    if method != "medusa":
        np.testing.assert_array_equal(its.tensors["embed_tokens.weight"], target.embedding)
    steps = {"eagle": 3, "parallel": 4 if getattr(config, "sample_from_anchor", True) else 3, "medusa": 3}[method]
    named = {"eagle": "eagle3", "parallel": "dspark", "medusa": "medusa"}[method]
    assert said == {"method": named, "model": str(tmp_path / "theirs"), "num_speculative_tokens": steps}
    stored = safetensors.read(tmp_path / "theirs" / "model.safetensors")
    assert ("d2t" in stored or "token_map" in stored) == (config.draft_vocab < config.vocab)
    if method != "medusa":
        described = json.loads((tmp_path / "theirs" / "config.json").read_text())
        assert described["speculators_config"]["verifier"] == {"name_or_path": "some/model", "architectures": ["Llama"]}
        assert described["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == steps


def test_layers_are_counted_as_others_count_them(tmp_path: Path) -> None:
    """Ours: outputs, from 0. Theirs: inputs, so that EAGLE's layers 2, N // 2 and N - 3 stand as they are."""
    config = learned.eagle(hidden_layers=())
    its = Checkpoint("eagle", config, learned.random_tensors(config))
    export.to_speculators(tmp_path / "it", its, rows(30))
    described = json.loads((tmp_path / "it" / "config.json").read_text())
    assert described["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert {name: described[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")} == {
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": True,
    }  # fmt: skip
    found = read(tmp_path / "it").config
    assert isinstance(found, EagleConfig)
    assert found.hidden_layers == (1, 14, 26)


def test_flat_eagle(tmp_path: Path) -> None:
    config = learned.eagle()
    tensors = learned.random_tensors(config)
    export.to_eagle3(tmp_path / "it", Checkpoint("eagle", config, tensors), rows())
    assert "midlayer.self_attn.q_proj.weight" in safetensors.read(tmp_path / "it" / "model.safetensors")
    its = read(tmp_path / "it")
    assert its.config == config
    same(its.tensors, tensors, tensors)
    with pytest.raises(ParameterError, match="is for the method eagle"):
        export.to_eagle3(tmp_path / "no", Checkpoint("medusa", learned.medusa(), {}), rows())


@pytest.mark.parametrize("scale", [None, 1.0, 2.0])
@pytest.mark.parametrize("embedding", [False, True])
def test_the_embedding_enters_as_it_did(tmp_path: Path, scale: float | None, embedding: bool) -> None:
    """Beside a target that scales its own rows by 4; whatever is written."""
    config = learned.eagle(decoder=replace(learned.DECODER, embedding_scale=scale))
    its = Checkpoint("eagle", config, learned.random_tensors(config, embedding=embedding))
    target, own = replace(rows(), scale=4.0), its.tensors.get("embed_tokens.weight")
    enters = target.embedding * (scale or 4.0) if own is None else own * (scale or 1.0)
    export.to_speculators(tmp_path / "theirs", its, target)
    export.to_eagle3(tmp_path / "flat", its, target)
    for name in ("theirs", "flat"):
        found = read(tmp_path / name)
        assert found.config == learned.eagle()  # its own rows, which nothing scales
        np.testing.assert_array_equal(found.tensors["embed_tokens.weight"], enters)
    write_checkpoint(tmp_path / "ours", "eagle", config, its.tensors, TARGET, RECIPE)
    assert read(tmp_path / "ours").config == config


def test_an_interrupted_write_is_noticed(tmp_path: Path) -> None:
    config = learned.eagle()
    for seed in (1, 2):
        write_checkpoint(tmp_path / str(seed), "eagle", config, learned.random_tensors(config, seed), TARGET, RECIPE)
    weights = tmp_path / "1" / "model.safetensors"
    weights.write_bytes((tmp_path / "2" / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"is not the file that config\.json was written for"):
        read(tmp_path / "1")
    described = json.loads((tmp_path / "2" / "config.json").read_text())
    described["outpace"]["format"] = 2
    (tmp_path / "2" / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="its format is 2, and 1 is read"):
        read(tmp_path / "2")


def test_refused(tmp_path: Path) -> None:
    config = learned.eagle()
    tensors = learned.random_tensors(config)
    one: dict[str, Any] = {"config": config, "tensors": tensors}
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tensors": {**tensors, "fc.weight": np.zeros((8, 8), np.float32)}}, ModelError, r"fc.weight is \[8, 8\]"),
        ({"tensors": {k: v for k, v in tensors.items() if k != "norm.weight"}}, ModelError, "no tensor 'norm.weight'"),
        ({"tensors": {**tensors, "norm.weight": np.full(8, np.nan)}}, ModelError, "numbers that BF16 cannot hold"),
        ({"config": learned.eagle(hidden_layers=(3, 1, 4))}, ModelError, "are not ascending"),
        ({"config": learned.eagle(decoder=replace(learned.DECODER, logit_cap=2.0))}, ModelError, "capped logits"),
    ]
    for change, kind, message in wrong:
        given = {**one, **change}
        with pytest.raises(kind, match=message):
            write_checkpoint(tmp_path / "no", "eagle", given["config"], given["tensors"], TARGET, RECIPE)
        assert not (tmp_path / "no" / "config.json").exists()
    with pytest.raises(ParameterError, match="not 'int8'"):
        write_checkpoint(tmp_path / "no", "eagle", config, tensors, TARGET, RECIPE, dtype="int8")
    with pytest.raises(DrafterError, match="layers 0 to 3"):
        export.to_speculators(tmp_path / "no", Checkpoint("eagle", config, tensors), rows(4))


@settings(deadline=None)  # the first example imports torch
@given(
    arrays.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
)
def test_rounding(values: Any) -> None:
    """Written numbers are the nearest, ties to even: as torch rounds, or refused."""
    torch = pytest.importorskip("torch")
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)):
        wanted = torch.from_numpy(values).to(kind)
        try:
            found = safetensors._stored("x", values, dtype)[1]
        except ModelError:
            assert not torch.isfinite(wanted).all()
            continue
        assert found == wanted.view(torch.uint8).numpy().tobytes() if len(values) else found == b""


def test_a_torch_tensor_and_the_safetensors_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    config = learned.eagle()
    tensors = learned.random_tensors(config)
    given = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}
    given["fc.weight"] = given["fc.weight"].bfloat16().requires_grad_()
    write_checkpoint(tmp_path / "it", "eagle", config, given, TARGET, RECIPE)
    found = load(str(tmp_path / "it" / "model.safetensors"))
    assert found["d2t"].dtype == torch.int64
    assert found["t2d"].dtype == torch.bool
    same({name: its.float().numpy() for name, its in found.items()}, tensors, tensors)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's rows, as the file has them, and a command that a shell takes apart rightly."""
    source = resolve("demo")
    target = TargetRows.of(source)
    vocab, hidden = target.head.shape
    decoder = learned.Decoder(hidden, 1, 2, 1, 4, 16, 1e-5, 1e4, 64)
    config = learned.eagle(decoder=decoder, vocab=vocab, draft_vocab=100, hidden_layers=(1, 14, 26))
    write_checkpoint(tmp_path / "ours", "eagle", config, learned.random_tensors(config), {}, {})
    arguments = [
        "export", "vllm", str(tmp_path / "ours"), "--out", str(tmp_path / "its own"), "--verifier", "some/model",
    ]  # fmt: skip
    assert parse([*arguments, "--dtype", "float32"])() == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:4] == ["vllm", "serve", "some/model", "--speculative-config"]
    said = {"method": "eagle3", "model": str(tmp_path / "its own"), "num_speculative_tokens": 4}
    assert json.loads(command[4]) == said
    its = read(tmp_path / "its own")
    np.testing.assert_array_equal(its.tensors["lm_head.weight"], target.head[np.flatnonzero(its.tensors["t2d"])])
    with pytest.raises(ParameterError, match="is the drafter itself"):
        parse(["export", "vllm", str(tmp_path / "ours"), "--out", str(tmp_path / "ours")])()
