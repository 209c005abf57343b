"""``python -m benchmarks recipe``: from prompts to a drafter that was measured, each part once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import recipe
from benchmarks.__main__ import call
from tests.training.commands import outpace

TRAIN = ("--steps", "2", "--warm-up", "1", "--tokens", "64", "--longest", "64", "--held-out", "0.2",
         "--draft-vocab", "48")  # fmt: skip


def test_a_recipe_trains_and_measures_what_is_not_done_of_both_methods(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))  # of what forwards cost
    prompts, measure, out = (tmp_path / name for name in ("prompts.jsonl", "measure.jsonl", "out"))
    prompts.write_text("".join(json.dumps({"id": i, "turns": [f"Count from {i}."]}) + "\n" for i in range(12)))
    measure.write_text('{"turns": ["Say hello."]}\n')
    done: list[str] = []

    def do(command: Sequence[str]) -> None:
        """In this process."""
        module, name, *more = command[1:]
        if module == "outpace":
            done.append(more[0])
            outpace(name, *more)
        else:
            done.append(name)
            assert call(name, more) == 0

    given = (str(model), out, prompts, measure, recipe.Sizes(None, 8, 1, TRAIN), 1)
    recipe.make(*given, do=do, methods=recipe.METHODS)
    assert done == ["data", "cache", "eagle", "parallel", "acceptance", "acceptance"]
    lines = list(recipe.compared(out, recipe.METHODS))
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{method}: 2 steps, {seen} tokens" for method, seen in zip(recipe.METHODS, tokens_seen(out), strict=True)
    ]
    assert len(set(tokens_seen(out))) == 1, "both learned from the same batches"
    for method in recipe.METHODS:
        figures = json.loads((out / f"{method}.json").read_text())["figures"]
        assert all(row["prompts"] == row["identical"] == 1 for row in figures)
    before = (out / "eagle" / "model.safetensors").read_bytes()
    done.clear()
    recipe.make(*given, do=do)
    assert done == ["data", "cache", "acceptance"]
    assert (out / "eagle" / "model.safetensors").read_bytes() == before
    (out / "eagle" / recipe.DONE).unlink()  # as if the training had been ended
    left = [command for command in recipe.commands(*given) if command[:4] == ["-m", "outpace", "train", "eagle"]]
    assert ["--resume" in command for command in left] == [(out / "eagle" / recipe.SNAPSHOT).is_file()]


def tokens_seen(out: Path) -> list[int]:
    configs = [json.loads((out / method / "config.json").read_text()) for method in recipe.METHODS]
    return [config["outpace"]["recipe"]["tokens_seen"] for config in configs]
