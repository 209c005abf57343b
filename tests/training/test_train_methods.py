"""``outpace train parallel|medusa|distil`` from the command line: a few steps on a tiny target; what is left loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.drafters.learned import checkpoint as checkpoints
from outpace.drafters.learned.configs import MedusaConfig, ParallelConfig
from outpace.models.base import Batch
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer
from tests.training.commands import outpace


def train(method: str, answers: Path, out: Path, *more: object) -> dict[str, Any]:
    basics = ("--steps", 3, "--tokens", 200, "--longest", 100, "--held-out", 0.2, "--warm-up", 1, "--draft-vocab", 48)
    said = outpace("train", method, "--data", answers, "--out", out, "--threads", 1, *basics, *more, "--json")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_parallel(answers: Path, tmp_path: Path) -> None:
    found = train("parallel", answers, tmp_path / "out", "--layers", 1, "--block", 3, "--markov-rank", 4)
    assert found["steps"] == 3
    assert 1 <= found["cut_tokens_per_step"] <= 4
    made = checkpoints.read(tmp_path / "out")
    assert (made.method, made.config.draft_vocab) == ("parallel", 48)
    assert made.recipe["block"] == 3
    counted = set(range(1, 41))
    assert isinstance(made.config, ParallelConfig)
    assert made.config.mask_token not in counted
    assert np.isfinite(made.tensors["fc.weight"]).all()


def test_medusa_keeps_the_tree_it_found(answers: Path, tmp_path: Path) -> None:
    found = train("medusa", answers, tmp_path / "out", "--heads", 2, "--nodes", 5, "--ranks", 48, "--lr", 0.01)
    made = checkpoints.read(tmp_path / "out")
    assert made.method == "medusa"
    assert isinstance(made.config, MedusaConfig)
    tree = made.config.tree
    assert 1 <= len(tree) <= 5
    assert all(len(path) == 1 or path[:-1] in tree for path in tree)
    assert 1 <= found["tree_tokens_per_step"] <= 3


@pytest.mark.parametrize("more", [(), ("--init", "scratch", "--free", "--all-tokens")], ids=["layers", "scratch"])
def test_a_student_is_a_model(answers: Path, model: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    found = train("distil", answers, out, "--layers", 2, "--on-policy", 0.5, "--on-policy-tokens", 4, *more)
    assert found["steps"] == 3
    own, target = Tokenizer.from_folder(out), Tokenizer.from_folder(model)
    assert own.eos_ids == target.eos_ids == (0,)
    assert own.encode("Hello, wörld").tolist() == target.encode("Hello, wörld").tolist()
    assert own.render_chat([{"role": "user", "content": "x"}]) == "x"
    served, _ = load(str(out), LoadOptions(backend="native", threads=1))
    reference, _ = load(str(out), LoadOptions(backend="transformers"))
    tokens = np.arange(1, 12, dtype=np.int32)
    try:
        logits = []
        for each in (served, reference):
            batch = Batch.pack([each.kv.alloc()], [tokens], [0], [True])
            logits.append(each.forward(batch).logits(np.arange(len(tokens), dtype=np.int32)))
        np.testing.assert_allclose(*logits, atol=0.02, rtol=0.02)
    finally:
        served.close()
        reference.close()
