"""What a drafter's card is made of: figures that can be gone on with, of these weights and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ship
from benchmarks.__main__ import call
from outpace.drafters.learned.checkpoint import read
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.errors import ParameterError
from outpace.models.native import model as native
from tests import eagles
from tests.integration.conftest import SIZES
from tests.native.native_helpers import Tiny

VOCAB = 190  # tokens of a byte-level tokenizer


@pytest.fixture(scope="module")
def gguf(tiny: Tiny) -> Path:
    return tiny.path("F32", **SIZES | {"layers": 4, "vocab": VOCAB, "tokenizer": 1})


@pytest.fixture
def run(gguf: Path, tmp_path: Path) -> Path:
    """What a training would have written."""
    folder = tmp_path / "run"
    model = native.load_native(gguf, threads=1)
    made = eagles.random(model, range(VOCAB), (0, 1, 2))
    target = {"name": "tiny", "dtype": "float32", "fingerprint": "0" * 16, "vocab_size": VOCAB}
    recipe = {"data": "1" * 16, "seed": 7, "tokens": 64, "steps_taken": 3, "tokens_seen": 9_876}
    write_checkpoint(folder, "eagle", made.config, made.tensors, target, recipe)
    model.close()
    last = {"step": 4, "tokens": 12_345, "seconds": 360.0, "tokens_per_step": 1.5, "acceptance": [0.3, 0.2]}
    (folder / "curve.json").write_text(json.dumps([last]))
    (folder / "curve.png").write_bytes(b"a picture")
    return folder


@pytest.fixture
def measure(gguf: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))  # of what forwards cost
    prompts = [
        json.dumps({"id": i, "category": "ab"[i % 2], "token_ids": [1 + (i * j) % 9 for j in range(4, 12)]})
        for i in range(6)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))

    def measured(*more: str) -> int:
        return call(
            "acceptance", [str(run), str(tmp_path / "out.json"), "--model", str(gguf), "--prompts",
             str(tmp_path / "prompts.jsonl"),
             "--max-tokens", "12", "--rows", "2", "--threads", "1", *more]
        )  # fmt: skip

    return measured


def test_what_ships_is_what_was_measured(measure: Any, run: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "out.json", tmp_path / "demo-eagle"
    assert measure("--limit", "1") == 0
    ship.ship(run, folder, out, default=True)
    assert read(folder).recipe == read(run).recipe
    assert json.loads((folder / "config.json").read_text())["outpace"]["default"] is True
    card = (folder / "README.md").read_text()
    assert "4 steps over 12,345 tokens in 0.1 hours" in card
    assert "Kept is the best of it, after 3 steps and 9,876 tokens." in card
    assert "`--drafter auto` uses it" in card
    for its in json.loads(out.read_text())["figures"]:
        assert f"| {its['configuration']} | {its['temperature']:g} | 1 | {its['tokens_per_step']:.2f} (" in card
    assert "runs" not in json.loads((folder / "evaluation.json").read_text())

    measured = json.loads(out.read_text())
    for change, says in (
        ({"drafter": "00000000"}, "measured with other weights"),
        ({"figures": [{**measured["figures"][0], "identical": 0}]}, "did not give plain decoding's answers"),
    ):
        out.write_text(json.dumps(measured | change))
        with pytest.raises(ParameterError, match=says):
            ship.ship(run, tmp_path / "other", out, default=False)
    assert not (tmp_path / "other").exists()
