"""``outpace train parallel|medusa|distil`` from the command line: a few steps on a tiny target; what is left loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outpace.cli import app as cli
from outpace.drafters.learned import checkpoint as checkpoints
from outpace.models.base import Batch
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer

LAYERS, VOCAB = 8, 320


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 8 layers with random weights, and a tokenizer of bytes."""
    import transformers
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE(vocab={"<end>": 0, **{c: i + 1 for i, c in enumerate(letters)}}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    fast.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    facts = {"eos_token": "<end>", "add_bos_token": False, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 answers that count; it does not matter that the target would say something else."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for i in range(24):
        tokens = [(i + k) % 40 + 1 for k in range(24)]
        facts = {"id": str(i), "source": "test", "finish": "stop"}
        lines.append(json.dumps({**facts, "prompt": tokens[:6], "answer": tokens[6:]}))
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    run("train", "import", folder / "answers.jsonl", "--model", model, "--backend", "native", "--out", folder / "data")
    return folder / "data"


def run(*arguments: object) -> None:
    assert cli.app([str(a) for a in arguments], standalone_mode=False) == 0


def train(method: str, answers: Path, out: Path, *more: object) -> None:
    basics = ("--steps", 3, "--tokens", 200, "--longest", 100, "--held-out", 0.2, "--warm-up", 1, "--draft-vocab", 48)
    run("train", method, "--data", answers, "--out", out, "--threads", 1, *basics, *more, "--json")


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_parallel(answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("parallel", answers, tmp_path / "out", "--layers", 1, "--block", 3, "--markov-rank", 4)
    found = said(capsys)
    assert found["steps"] == 3
    assert 1 <= found["cut_tokens_per_step"] <= 4
    made = checkpoints.read(tmp_path / "out")
    assert (made.method, made.config.draft_vocab) == ("parallel", 48)
    assert made.recipe["block"] == 3
    counted = set(range(1, 41))
    assert made.config.mask_token not in counted  # type: ignore[union-attr]
    assert np.isfinite(made.tensors["fc.weight"]).all()


def test_medusa_keeps_the_tree_it_found(answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("medusa", answers, tmp_path / "out", "--heads", 2, "--nodes", 5, "--ranks", 48, "--lr", 0.01)
    found = said(capsys)
    made = checkpoints.read(tmp_path / "out")
    assert made.method == "medusa"
    tree = made.config.tree  # type: ignore[union-attr]
    assert 1 <= len(tree) <= 5
    assert all(len(path) == 1 or path[:-1] in tree for path in tree)
    assert 1 <= found["tree_tokens_per_step"] <= 3


@pytest.mark.parametrize("more", [(), ("--init", "scratch", "--free", "--all-tokens")], ids=["layers", "scratch"])
def test_a_student_is_a_model(
    answers: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    train("distil", answers, out, "--layers", 2, "--on-policy", 0.5, "--on-policy-tokens", 4, *more)
    assert said(capsys)["steps"] == 3
    own, target = Tokenizer.from_folder(out), Tokenizer.from_folder(model)
    assert own.eos_ids == target.eos_ids == (0,)
    assert own.encode("Hello, wörld").tolist() == target.encode("Hello, wörld").tolist()
    assert own.render_chat([{"role": "user", "content": "x"}]) == "x"
    served, _ = load(str(out), LoadOptions(backend="native", threads=1))
    reference, _ = load(str(out), LoadOptions(backend="transformers"))
    tokens = np.arange(1, 12, dtype=np.int32)
    try:
        found = []
        for each in (served, reference):
            batch = Batch.pack([each.kv.alloc()], [tokens], [0], [True])
            found.append(each.forward(batch).logits(np.arange(len(tokens), dtype=np.int32)))
        np.testing.assert_allclose(*found, atol=0.02, rtol=0.02)
    finally:
        served.close()
        reference.close()
