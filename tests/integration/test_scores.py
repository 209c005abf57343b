"""``python -m benchmarks scores``: the same scores from a plain and a drafted server."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import scores
from benchmarks.__main__ import call
from outpace.measure.report import read

OBJECT = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}


def test_schemas_are_scored_plain_and_drafted(tmp_path: Path) -> None:
    folder, out = tmp_path / "schemas", tmp_path / "scores.json"
    folder.mkdir()
    for name, schema in (("kept", {**OBJECT, "additionalProperties": False}), ("refused", {"type": "tune"})):
        (folder / f"{name}.json").write_text(json.dumps(schema))
    asked = ["--schemas", folder, "--tokens", "32", "--drafter", "suffix", "--log", tmp_path / "log", "--json", out]
    assert call("scores", [*map(str, asked), "--options", "-t 1"]) == 0
    found = json.loads(out.read_text())["tasks"]["JSON schemas"]
    assert found["same"]
    assert found["scores"] == {"valid": 1.0, "cut short": 0.0, "refused": 1.0, "whole": 1.0}
    assert "the same (2)" in read(out).figures["JSON schemas"]
    assert call("scores", []) == 2


def test_questions_are_the_same_every_time() -> None:
    asked = scores.questions(5)
    assert asked == scores.questions(5)
    assert [len(rows) for rows in asked.values()] == [5, 5]
    assert all(row["answer"] in row["question"] for row in asked["copies"])


def test_a_schema_accepts_only_what_it_describes() -> None:
    assert scores.valid('{"name": "a"}', OBJECT)
    assert not scores.valid('{"name": "c"}', OBJECT)
    assert not scores.valid('{"name"', OBJECT)
    assert scores.valid("10000.89", {"type": "number", "multipleOf": 0.01, "minimum": 0.5})
    assert not scores.valid("10000.895", {"type": "number", "multipleOf": 0.01})
