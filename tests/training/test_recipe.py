"""``python -m benchmarks recipe``: from prompts to a drafter that was measured, each part once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import recipe
from benchmarks.__main__ import call
from tests.training.commands import outpace

TRAIN = ("--steps", "2", "--warm-up", "1", "--tokens", "64", "--longest", "64", "--held-out", "0.2", "--depth", "2",
         "--draft-vocab", "48")  # fmt: skip


def test_a_recipe_trains_and_measures_what_is_not_done(
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
    recipe.make(*given, do=do)
    assert done == ["data", "cache", "eagle", "acceptance"]
    assert {row["prompts"] for row in json.loads((out / recipe.ACCEPTANCE).read_text())["figures"]} == {1}
    before = (out / recipe.DRAFTER / "model.safetensors").read_bytes()
    done.clear()
    recipe.make(*given, do=do)
    assert done == ["data", "cache", "acceptance"]
    assert (out / recipe.DRAFTER / "model.safetensors").read_bytes() == before
    (out / recipe.DONE).unlink()  # as if the training had been ended
    left = [command for command in recipe.commands(*given) if "eagle" in command]
    assert ["--resume" in command for command in left] == [(out / recipe.DRAFTER / recipe.SNAPSHOT).is_file()]
