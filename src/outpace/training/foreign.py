"""Answers that something else had the target give, as JSON lines of token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.files import StrPath
from outpace.errors import DataError
from outpace.training.data import Answer
from outpace.training.writer import Writer

OPTIONS = {"made by": "import"}


def import_answers(
    files: Sequence[StrPath],
    writer: Writer,
    *,
    temperature: float = 0.0,
    max_length: int | None = None,
    done: Callable[[int], None] = lambda size: None,
    say: Callable[[str], None] = lambda what: None,
) -> tuple[int, int]:
    """Append what ``files`` have and the folder has not; how many were new, and how many were there already.

    A line is {"id", "prompt": [ids], "answer": [ids]}, and perhaps "source", "finish", "temperature" (else
    ``temperature``), "sample", "seed". A last line that has no end is being written, and left for the next time.
    ``max_length``: most tokens of prompt and answer. Raises DataError that names the line.
    """
    new = known = 0
    vocabulary = int(writer.meta["target"]["vocab_size"])
    with writer:
        for path in map(Path, files):
            for where, line in _lines(path, say):
                answer = _answer(where, line, vocabulary, temperature)
                if max_length is not None and len(answer.tokens) > max_length:
                    raise DataError(
                        f"{where}: {len(answer.tokens)} tokens, but the target's context holds {max_length}"
                    )
                if answer.key in writer.known:
                    known += 1
                else:
                    writer.add(answer)
                    new += 1
                done(len(line))
    return new, known


def _lines(path: Path, say: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    say(f"{path}, line {number}: it has no end yet and is left out")
                elif line.strip():
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): give a file of JSON lines") from error


def _answer(where: str, line: bytes, vocabulary: int, temperature: float) -> Answer:
    try:
        value = json.loads(line)
        id_, source, finish = str(value["id"]), str(value.get("source", "all")), str(value.get("finish", "stop"))
        prompt, answer = _ids(value, "prompt", vocabulary), _ids(value, "answer", vocabulary)
        own = (
            float(value.get("temperature", temperature)),
            int(value.get("sample", 0)),
            finish,
            int(value.get("seed", 0)),
        )
    except KeyError as error:
        raise DataError(
            f"{where}: no {error.args[0]}: a line has id, prompt and answer (lists of token ids)"
        ) from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{where}: {error}: write one JSON object a line, with lists of token ids") from error
    return Answer(id_, source, np.concatenate([prompt, answer]), len(prompt), *own)


def _ids(value: dict[str, Any], name: str, vocabulary: int) -> np.ndarray[Any, Any]:
    """int32 [n]. Raises ValueError."""
    ids = value[name]
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{name} is no list of token ids")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = max(ids) if max(ids) >= vocabulary else min(ids)
        raise ValueError(f"{name} has token {wrong}, and the target has {vocabulary}")
    return np.array(ids, np.int32)
