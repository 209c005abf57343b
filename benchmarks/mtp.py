"""A tiny Qwen 3.5 and its layer that drafts, both trained here from nothing: what such a layer gets accepted.

    python -m benchmarks mtp OUT --minutes 4 --epochs 20

Text: modules of Python's standard library, of which every eighth is held out. OUT gets the tokenizer and the model
(OUT/target), its answers (OUT/answers) and the model with the layer (OUT/model); tokens a step are those of answers to
beginnings of held-out modules. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import add_json, emit

VOCAB, LENGTH, ROWS, WORDS = 2048, 192, 8, 120  # tokens; tokens of a training row, rows a step; bytes of a prompt


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="of the target's training (4)")
    parser.add_argument("--epochs", type=float, default=20.0, help="of the layer's (20)")
    parser.add_argument("--prompts", type=int, default=300, help="that the target answers (300)")
    parser.add_argument("--threads", type=int, default=1)
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    target, answers, model = out / "target", out / "answers", out / "model"
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    held, seen = texts[::8], [text for i, text in enumerate(texts) if i % 8]
    threads = ("--threads", str(given.threads))
    if not (target / "config.json").exists():
        train_target(target, seen, given.minutes, given.threads)
    draw = np.random.default_rng(0)
    beginnings(out / "train.jsonl", seen, given.prompts, draw)
    beginnings(out / "held.jsonl", held, 24, draw)
    limits = ("--max-tokens", "96", *threads)
    call("train", "data", "--model", target, "--backend", "native", "--prompts", out / "train.jsonl", "--out", answers,
         "-T", "0", "-T", "0.8", *limits)  # fmt: skip
    if not (model / "config.json").exists():
        call("train", "mtp", "--data", answers, "--out", model, "--epochs", f"{given.epochs:g}", "--evaluate", "100",
             *threads)  # fmt: skip
    drafters = [part for k in (1, 2, 3) for part in ("-d", f"mtp:size={k},branch=1")]
    found: dict[str, Any] = {}
    for temperature in ("0", "0.8"):
        path = out / f"bench-{temperature}.json"
        call("bench", "-m", model, "--backend", "native", "--prompts", out / "held.jsonl", "-d", "none", *drafters,
             "-T", temperature, "--json", path, *limits)  # fmt: skip
        found[temperature] = json.loads(path.read_text())
    emit(given, found)
    return 0


def call(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "outpace", *map(str, arguments)], check=True)


def beginnings(path: Path, texts: list[str], count: int, draw: np.random.Generator) -> None:
    """``count`` lines of prompts: places in ``texts`` where a line begins."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            text = texts[int(draw.integers(len(texts)))]
            at = text.rfind("\n", 0, int(draw.integers(len(text) // 2 + 1)) + 1) + 1
            file.write(json.dumps({"id": f"{path.stem}-{i}", "prompt": text[at : at + WORDS]}) + "\n")


def train_target(folder: Path, texts: list[str], minutes: float, threads: int) -> None:
    """A tokenizer and a hybrid of four layers, of which the last one attends."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<end>"], initial_alphabet=letters)
    )
    words.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<end>", "add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"chat_template": template}))
    tokens = torch.tensor([token for text in texts for token in words.encode(text).ids])
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=4,
        linear_num_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    start = time.monotonic()
    step = 0
    while (share := (time.monotonic() - start) / (60 * minutes)) < 1:
        rate = 2e-3 * min(1.0, (step + 1) / 30) * max(0.05, 1 - share)
        for group in optimiser.param_groups:
            group["lr"] = rate
        at = torch.randint(len(tokens) - LENGTH - 1, (ROWS,))
        rows = torch.stack([tokens[i : i + LENGTH + 1] for i in at.tolist()])
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=rows[:, :-1], use_cache=False).logits.flatten(0, 1), rows[:, 1:].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 0:
            print(f"target: step {step}, {share:.0%} of the time, loss {float(loss.detach()):.3f}", flush=True)
    model.save_pretrained(folder)
