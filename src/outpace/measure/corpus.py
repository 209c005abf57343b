"""Texts for a datastore or for training: files as token sequences, and a model's own answers to prompts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.common.files import StrPath
from outpace.errors import ParameterError
from outpace.measure.prompts import PromptRow, encode_turns
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.models.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PIECE = 1 << 16  # characters of a text file that are encoded at once
TEXTS = ("text", "answer", "completion", "prompt")  # fields of a JSON line that hold text
_BEGINS = b'{"id": '  # every line that ``write_answers`` writes


def sequences(files: Sequence[StrPath], tokenizer: Tokenizer, vocab_size: int) -> Iterator[list[int]]:
    """Token ids of what ``files`` hold: of a JSON line its ``token_ids``, or else its texts and turns; of other files
    pieces of their text. Raises ParameterError that names the file and line."""
    for path in map(Path, files):
        try:
            with path.open(encoding="utf-8") as file:
                if path.suffix in (".jsonl", ".ndjson"):
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield from _line(f"{path}, line {number}", line, tokenizer, vocab_size)
                else:
                    while lines := file.readlines(PIECE):
                        yield tokenizer.encode("".join(lines)).tolist()
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"{path} cannot be read ({error}): give text in UTF-8, or JSON lines") from error


def _line(where: str, line: str, tokenizer: Tokenizer, vocab_size: int) -> Iterator[list[int]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ParameterError(f"{where}: not JSON ({error.msg}): write one object a line") from error
    if not isinstance(value, dict):
        raise ParameterError(f'{where}: not an object: write {{"text": ...}} or {{"token_ids": [...]}}')
    if "token_ids" in value:
        ids = value["token_ids"]
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise ParameterError(f"{where}: token_ids is no list of ids from 0 to {vocab_size - 1}")
        yield ids
        return
    texts = [value[name] for name in TEXTS if name in value] + list(value.get("turns", ()))
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ParameterError(f"{where}: has no text: give one of token_ids, turns, {', '.join(TEXTS)}")
    for text in texts:
        yield tokenizer.encode(text).tolist()


def write_answers(
    engine: Engine,
    rows: Sequence[PromptRow],
    out: StrPath,
    params: SamplingParams,
    together: int,
    done: Callable[[int], None],
    say: Callable[[str], None] = log.warning,
) -> int:
    """Append the model's answers to ``out``, a JSON line each: id, prompt, text, token_ids. Returns how many it has.

    What is there already is not answered again, so an interrupted run goes on, also one that was killed in the middle
    of a line: that line is cut off, and ``say`` is called. Prompts that do not fit are left out. Raises ParameterError
    for a file of something else, which stays as it is.
    """
    out = Path(out)
    known = resume(out, say)
    done(len(known))
    todo: list[tuple[PromptRow, list[int]]] = []
    for row in rows:
        if row.id not in known:
            try:
                todo.append((row, encode_turns(engine, row).tolist()))
            except ParameterError:
                done(1)
    with out.open("ab") as file:
        for start in range(0, len(todo), together):
            group = todo[start : start + together]
            results = engine.generate_many([tokens for _, tokens in group], params)
            for (row, _), result in zip(group, results, strict=True):
                found = {"id": row.id, "prompt": row.turns[0], "text": result.text, "token_ids": list(result.token_ids)}
                file.write(json.dumps(found, ensure_ascii=False).encode() + b"\n")
                known.add(row.id)
            file.flush()
            done(len(group))
    return len(known)


def resume(out: Path, say: Callable[[str], None]) -> set[str]:
    """The ids in a file that ``write_answers`` began. What a kill left of a last line is cut off.

    Raises ParameterError, and changes nothing, when the file holds anything but answers.
    """
    if not out.exists():
        return set()
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    known: set[str] = set()
    for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
        try:
            answer = json.loads(line)
            known.add(answer["id"])
            answer["token_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise ParameterError(
                f"{out}, line {number}: no answer, so there is nothing to go on with: remove it, or name another file"
            ) from error
    rest = content[whole:]
    if rest and not (rest.startswith(_BEGINS) or _BEGINS.startswith(rest)):
        raise ParameterError(f"{out} ends in something else than answers: name another file")
    if rest:
        os.truncate(out, whole)
        say(f"{out}: the last line was cut short ({len(rest)} bytes without an end); it is answered again")
    return known
