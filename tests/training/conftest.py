"""Training tests share a target of 8 thin layers and its answers, and leave the process as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outpace.training import setup
from tests.training.commands import outpace

LAYERS, VOCAB = 8, 320


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 answers that count; it does not matter that the target would say something else."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for i in range(24):
        tokens = [(i + k) % 40 + 1 for k in range(24)]
        facts = {"id": str(i), "source": "test", "finish": "stop"}
        lines.append(json.dumps({**facts, "prompt": tokens[:6], "answer": tokens[6:]}))
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    outpace(
        "train", "import", folder / "answers.jsonl", "--model", model, "--backend", "native", "--out", folder / "data"
    )
    return folder / "data"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their tensors are too small for two, and memory that is kept would be kept for all tests behind them."""
    monkeypatch.setattr(setup, "keep_freed", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
