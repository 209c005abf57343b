"""A student that is narrower than its target: where it begins, and the commands that train it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from outpace import Engine, SamplingParams
from outpace.drafters.learned.config import Decoder
from outpace.errors import ParameterError
from outpace.training.objectives.distil import Student
from outpace.training.objectives.narrow import Narrowing
from tests.training.commands import outpace

HIDDEN, NARROW = 32, 12
OPTIONS = (
    "--hidden", 32, "--layers", 2, "--init", "first", "--free", "--all-tokens", "--candidates", 64, "--tokens", 64,
    "--longest", 64, "--held-out", 0.2, "--judged", 40, "--warm-up", 2, "--depth", 2, "--threads", 1,
)  # fmt: skip


@torch.no_grad()
def test_where_states_need_no_more_numbers_it_says_what_transformers_says() -> None:
    """Every matrix that writes into states keeps to ``NARROW`` of their directions, so nothing is lost by cutting."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, initializer_range=0.3, rms_norm_eps=1e-9,
        )
    ).eval()  # fmt: skip
    inside = torch.linalg.qr(torch.randn(HIDDEN, NARROW))[0]
    kept = inside @ inside.T
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ kept)
    layers = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for matrix in (attention.o_proj.weight, mlp.down_proj.weight):
            matrix.copy_(kept @ matrix)
        for norm in (layer.input_layernorm.weight, layer.post_attention_layernorm.weight):
            norm.uniform_(0.5, 2.0)
        layers.append({
            **{name: getattr(attention, f"{name}_proj").weight for name in "qkvo"},
            **{name: getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")},
            "attn_norm": layer.input_layernorm.weight, "ffn_norm": layer.post_attention_layernorm.weight,
        })  # fmt: skip
    embedding = model.model.embed_tokens.weight
    narrowing = Narrowing.of(embedding, torch.arange(50), NARROW)
    rows = embedding @ narrowing.basis
    shape = Decoder(NARROW, 2, 4, 2, 8, 24, 1e-9, 1e4, 256)
    student = Student(shape, rows, rows, frozen=True)
    student.take([narrowing.layer(layer, 24) for layer in layers], narrowing.final_norm(model.model.norm.weight))
    tokens = torch.randint(50, (20,))
    logits = student(tokens, torch.arange(20), (0, 20)) @ rows.T
    expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(logits * (expected.std() / logits.std()), expected, atol=1e-4, rtol=1e-4)


def test_it_learns_the_answers_and_then_the_target(answers: Path, model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begun = ("train", "distil", "--data", answers, "--json", *OPTIONS)
    said = json.loads(outpace(*begun, "--out", first, "--loss", "answer", "--steps", 60, "--lr", 0.01))
    assert said["tokens_per_step"] > 2
    config = transformers.AutoConfig.from_pretrained(first)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 64, 16)  # of 96: to whole blocks
    more = json.loads(outpace(*begun, "--out", second, "--start", first, "--steps", 1, "--lr", 1e-6))
    assert more["tokens_per_step"] == pytest.approx(said["tokens_per_step"], abs=0.3)
    prompt, params = list(range(1, 9)), SamplingParams(max_tokens=12)
    found = []
    for drafter in ("none", f"model:{second},size=2"):
        with Engine.load(str(model), backend="native", drafter=drafter, threads=1) as engine:
            found.append(engine.generate(prompt, params))
    assert found[0].token_ids == found[1].token_ids
    assert found[1].stats.drafted > 0
    other = shutil.copytree(first, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ParameterError, match=r"another tokenizer: its token \d+ is 'B', the target's 'A': give a model"
    ):
        outpace(*begun, "--start", other, "--out", tmp_path / "third", "--steps", 1)
    config_file = first / "config.json"
    config_file.write_text(config_file.read_text().replace("Llama", "Granite").replace("llama", "granite"))
    with pytest.raises(ParameterError, match=r"start=.* is no Llama, as a student is: give another model"):
        outpace(*begun, "--start", first, "--out", tmp_path / "third", "--steps", 1)
    with pytest.raises(ParameterError, match="hidden=65 is out of range: the target has 64"):
        outpace(*begun, "--hidden", 65, "--out", tmp_path / "third", "--steps", 1)
