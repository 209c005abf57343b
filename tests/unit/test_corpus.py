"""Answers for a datastore: a run that was killed anywhere goes on as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outpace.errors import ParameterError
from outpace.measure.corpus import resume, write_answers
from outpace.measure.prompts import PromptRow
from outpace.params import SamplingParams

ROWS = [
    PromptRow(str(i), "all", (text,)) for i, text in enumerate(("one", "zwei £ \u2028 ünd", "drei \U0001f600", "x\ny"))
]


class Answering:
    """An engine, as far as answers are concerned: it repeats the prompt."""

    tokenizer = SimpleNamespace(has_chat_template=False)
    model = SimpleNamespace(info=SimpleNamespace(max_length=20))

    def __init__(self) -> None:
        self.asked = 0

    def encode(self, text: str, *, raw: bool = False) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int32)

    def generate_many(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        self.asked += len(prompts)
        return [SimpleNamespace(text="".join(map(chr, p)), token_ids=tuple(p)) for p in prompts]


def write(out: Path, rows: list[PromptRow] = ROWS, together: int = 2) -> tuple[int, int, list[str]]:
    """How many answers the file has, how many were asked for, and what was said."""
    engine, said = Answering(), list[str]()
    count = write_answers(engine, rows, out, SamplingParams(), together, lambda n: None, said.append)  # type: ignore[arg-type]
    return count, engine.asked, said


def test_a_run_that_was_killed_at_any_byte_goes_on(tmp_path: Path) -> None:
    """Cut after every byte of the last two lines, as a kill in the middle of a write does."""
    whole = tmp_path / "whole.jsonl"
    assert write(whole) == (4, 4, [])
    content = whole.read_bytes()
    assert [json.loads(line)["prompt"] for line in content.decode().split("\n")[:-1]] == [row.turns[0] for row in ROWS]
    lines = content.splitlines(keepends=True)
    kept = len(b"".join(lines[:2]))
    ends = {kept: 2, kept + len(lines[2]): 1, len(content): 0}
    for end in range(kept, len(content) + 1):
        out = tmp_path / "out.jsonl"
        out.write_bytes(content[:end])
        count, asked, said = write(out)
        assert out.read_bytes() == content
        assert count == 4
        assert asked == (1 if end >= kept + len(lines[2]) else 2) - (end == len(content))
        assert bool(said) == (end not in ends)
        assert all("cut short" in line and str(out) in line for line in said)


def test_prompts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert write(out, [*ROWS, PromptRow("long", "all", ("x" * 40,))])[:2] == (4, 4)
    assert write(out, [*ROWS, PromptRow("5", "all", ("new",))]) == (5, 1, [])
    assert len(out.read_text().split("\n")[:-1]) == 5


@pytest.mark.parametrize(
    "content",
    ["my notes", "my notes\n", '{"id": "1"}\n', "[1]\n", '{"id": "1", "token_ids": []}\nnotes', "\n", '{"idea": 1'],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(ParameterError, match="name another file"):
        resume(out, pytest.fail)
    assert out.read_text() == content
