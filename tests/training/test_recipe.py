"""``benchmarks.recipe``: one command from prompts to a measured drafter, on a tiny target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import recipe
from benchmarks.__main__ import call
from outpace.errors import ParameterError
from tests.training.commands import outpace

FEW = ("--tokens", "100", "--longest", "100", "--held-out", "0.3", "--draft-vocab", "64")
SIZES = recipe.Sizes(limit=None, max_tokens=6, measured=1, train=("--steps", "2", "--warm-up", "1", *FEW))


def here(command: Sequence[str]) -> None:
    """A command of the recipe, in this process."""
    if command[1] == "outpace":
        outpace(*command[2:])
    else:
        assert call("acceptance", command[3:]) == 0


def test_one_command_and_what_was_ended_goes_on(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": f"{i} ab"}) + "\n" for i in range(8)))

    ended = []

    def until_training(command: Sequence[str]) -> None:
        if command[3] == "eagle":
            ended.append(command)
            raise ParameterError("somebody ended it")
        here(command)

    with pytest.raises(ParameterError, match="somebody ended it"):
        recipe.make(str(model), out, prompts, prompts, SIZES, 1, until_training)
    assert len(ended) == 1
    assert not (out / recipe.DONE).exists()
    recipe.make(str(model), out, prompts, prompts, SIZES, 1, here)
    measured = json.loads((out / recipe.ACCEPTANCE).read_text())
    assert all(its["identical"] == its["prompts"] == 1 for its in measured["figures"])
    again = [command[3] for command in recipe.commands(str(model), out, prompts, prompts, SIZES, 1)]
    assert "eagle" not in again
