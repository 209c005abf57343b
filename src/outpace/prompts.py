"""Files of prompts: JSON lines with ``turns`` (texts) or ``prompt`` (one text), perhaps ``id`` and ``category``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import ParameterError


@dataclass(frozen=True, slots=True)
class PromptRow:
    id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: Path, limit: int | None = None) -> list[PromptRow]:
    """The rows of ``path``; with ``limit``, so many of them, spread evenly. Raises ParameterError with the line."""
    if limit is not None and limit < 1:
        raise ParameterError(f"--limit {limit} is out of range: give at least 1")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read ({error}): give a JSON lines file of prompts") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ParameterError(f"{path} has no prompts: write one JSON object a line, with turns or prompt")
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    return rows


def _row(path: Path, number: int, line: str) -> PromptRow:
    where = f"{path}, line {number}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ParameterError(
            f"{where}: not JSON ({error.msg} at column {error.colno}): write one object a line"
        ) from error
    if not isinstance(value, dict):
        raise ParameterError(f'{where}: not an object: write {{"prompt": ...}} or {{"turns": [...]}}')
    turns = value.get("turns", [value["prompt"]] if "prompt" in value else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ParameterError(f"{where}: needs turns (a list of texts) or prompt (a text), not empty")
    return PromptRow(str(value.get("id", number)), str(value.get("category", "all")), tuple(turns))
