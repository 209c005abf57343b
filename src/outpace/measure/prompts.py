"""Files of prompts, of texts, and of a model's own answers.

Prompts: JSON lines with ``turns`` (texts), ``prompt`` (one text), ``messages`` (a conversation so far) or
``token_ids``, perhaps an ``id`` and a ``category``; a .csv file with columns ``prompt``, perhaps ``system``, ``id`` and
``category``; or, in a .txt file, a prompt a line."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.common.files import StrPath
from outpace.errors import Argument, ParameterError
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.common.arrays import I32
    from outpace.engine.engine import Engine
    from outpace.params import Message
    from outpace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

EXAMPLES = Path(__file__).with_name("prompts.jsonl")  # 24 in 6 categories, whose answers end by themselves
PIECE = 1 << 16  # characters of a text file that are encoded at once
TEXTS = ("text", "answer", "completion", "prompt")  # fields of a JSON line that hold text
_BEGINS = b'{"id": '  # every line that ``write_answers`` writes


@dataclass(frozen=True, slots=True)
class PromptRow:
    id: str
    category: str
    turns: tuple[str, ...]
    token_ids: tuple[int, ...] = ()  # instead of turns: what the model reads, as it is
    messages: tuple[Message, ...] = ()  # what is to be answered, if more than a first turn; ``turns`` has the last one


def read_prompts(path: StrPath | None, limit: int | None = None) -> list[PromptRow]:
    """The rows of ``path`` (None: EXAMPLES); with ``limit``, so many of them, spread evenly. Raises ParameterError
    with the line."""
    path = EXAMPLES if path is None else Path(path)
    if limit is not None and limit < 1:
        raise ParameterError(Argument("limit", limit), " is out of range: give at least 1")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"{path} cannot be read ({error}): give a file of prompts: JSON lines, CSV or text"
        ) from error
    if path.suffix.lower() == ".csv":
        rows = _table(path, text)
    else:
        read = _text if path.suffix.lower() == ".txt" else _row
        lines = enumerate(text.split("\n"), 1)  # splitlines would break at U+2028 inside a string
        rows = [read(path, number, line) for number, line in lines if line.strip()]
    if not rows:
        raise ParameterError(f"{path} has no prompts: write one JSON object a line, with turns or prompt")
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    return rows


def _text(path: Path, number: int, line: str) -> PromptRow:
    return PromptRow(str(number), "all", (line.strip(),))


def _table(path: Path, text: str) -> list[PromptRow]:
    """Rows of a CSV file, whose first line names the columns."""
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if "prompt" not in (table.fieldnames or ()):
            there = ", ".join(table.fieldnames or ["nothing"])
            raise ParameterError(f"{path}: the first line has no column prompt, but {there}: name the columns there")
        return [_checked(f"{path}, line {table.line_num}", number, _filled(row)) for number, row in enumerate(table, 1)]
    except csv.Error as error:
        where = f"{path}, line {table.line_num}"
        raise ParameterError(f"{where}: {error}: this is no CSV file, or a text with commas is not quoted") from error


def _filled(row: dict[str, str]) -> dict[str, Any]:
    """A row of a table without its empty cells, as a line of JSON says it."""
    if None in row:
        raise csv.Error("more cells than columns")
    value: dict[str, Any] = {name: cell for name, cell in row.items() if cell}
    system = value.pop("system", None)
    if system is not None and "prompt" in value:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": value.pop("prompt")}]
        return {**value, "messages": messages}
    return value


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
    return _checked(where, number, value)


def _checked(where: str, number: int, value: dict[str, Any]) -> PromptRow:
    own = str(value.get("id", number)), str(value.get("category", value.get("source", "all")))
    if "token_ids" in value:
        ids = value["token_ids"]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids) or "turns" in value:
            raise ParameterError(f"{where}: token_ids is a list of ids, not empty, and stands instead of turns")
        return PromptRow(*own, ("",), tuple(ids))
    if "messages" in value:
        messages = value["messages"]
        if "turns" in value or not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ParameterError(f"{where}: messages is a list of objects with role and content, and stands alone")
        if messages[-1]["role"] == "assistant":
            raise ParameterError(f"{where}: the last message is the assistant's: end with what is to be answered")
        return PromptRow(*own, (messages[-1]["content"],), messages=tuple(messages))
    turns = value.get("turns", [value["prompt"]] if "prompt" in value else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ParameterError(f"{where}: needs turns (a list of texts) or prompt (a text), not empty")
    return PromptRow(*own, tuple(turns))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def encode_turns(engine: Engine, row: PromptRow, history: Sequence[Message] = ()) -> I32:
    """Token ids int32 [n] of a conversation; without a chat template, of its texts.

    ``history``: by default the row's messages, or its first turn. Raises ParameterError that names the row,
    also when no room for an answer is left.
    """
    messages = list(history) or list(row.messages) or [{"role": "user", "content": row.turns[0]}]
    try:
        if row.token_ids:
            tokens = engine.encode(row.token_ids)
        elif engine.tokenizer is not None and not engine.tokenizer.has_chat_template:
            tokens = engine.encode("\n\n".join(message["content"] for message in messages), raw=True)
        else:
            tokens = engine.encode(messages)
    except ParameterError as error:
        raise ParameterError(f"prompt {row.id}: ", error) from error
    longest = engine.model.info.max_length
    if len(tokens) >= longest:
        raise ParameterError(
            f"prompt {row.id} has {len(tokens)} tokens, but the context holds {longest}, the answer included: "
            "shorten it, or leave it out"
        )
    return tokens


# -- texts, and answers as they grow ----------------------------------------------------------------------------------


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
