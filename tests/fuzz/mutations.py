"""Mutations of a seed: a list of edits, each reproducible by itself."""

from __future__ import annotations

import random
import re
import struct
from typing import NamedTuple

from tests.fuzz.seeds import Files


class Edit(NamedTuple):
    """In ``file``, bytes ``at`` to ``at + removed`` give way to ``put``, in hex."""

    file: str
    at: int
    removed: int
    put: str


_EXTREMES = (
    0, 1, 2, 3, 5, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1,
    (1 << 64) - 1,
)  # fmt: skip
_WORDS = (
    b"-1", b"0", b"1e999", b"9" * 30, b"true", b"null", b'"x"', b"[]", b"{}", b"NaN", b"0.5", b"1048577", b"[" * 3000,
)  # fmt: skip
_HEADER = 2048  # most damage goes into a file's first bytes, where its structure is


def applied(files: Files, edits: list[Edit]) -> Files:
    """The files after the edits, one after another."""
    changed = dict(files)
    for edit in edits:
        data = changed[edit.file]
        changed[edit.file] = data[: edit.at] + bytes.fromhex(edit.put) + data[edit.at + edit.removed :]
    return changed


def mutation(files: Files, rng: random.Random) -> list[Edit]:
    """One to four edits of one seed."""
    edits: list[Edit] = []
    changed = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        edit = _edit(changed, rng)
        edits.append(edit)
        changed = applied(changed, [edit])
    return edits


def _edit(files: Files, rng: random.Random) -> Edit:
    name = rng.choice(sorted(files))
    data = files[name]
    if not data:
        return Edit(name, 0, 0, bytes([rng.randrange(256)]).hex())
    at = rng.randrange(min(len(data), _HEADER) if rng.random() < 0.8 else len(data))
    kind = rng.randrange(9)
    if kind == 0:
        return Edit(name, at, 1, bytes([rng.randrange(256)]).hex())
    if kind == 1:
        return Edit(name, at, 1, bytes([data[at] ^ 1 << rng.randrange(8)]).hex())
    if kind == 2:  # a number of 1, 2, 4 or 8 bytes
        size, form = rng.choice(((1, "B"), (2, "<H"), (4, "<I"), (8, "<Q")))
        number = rng.choice(_EXTREMES) & ((1 << 8 * size) - 1)
        return Edit(name, at, size, struct.pack(form, number).hex())
    if kind == 3:  # a number a little off
        size, form = rng.choice(((1, "B"), (4, "<I"), (8, "<Q")))
        piece = data[at : at + size]
        if len(piece) == size:
            number = (struct.unpack(form, piece)[0] + rng.choice((-32, -2, -1, 1, 2, 32))) & ((1 << 8 * size) - 1)
            return Edit(name, at, size, struct.pack(form, number).hex())
        return Edit(name, at, len(piece), "")
    if kind == 4:  # the end is missing
        return Edit(name, at, len(data) - at, "")
    if kind == 5:  # a piece is missing
        return Edit(name, at, rng.choice((1, 4, 8, 64)), "")
    if kind == 6:  # a piece of another place, over what is there or between
        start = rng.randrange(len(data))
        piece = data[start : start + rng.choice((1, 4, 8, 24, 100))]
        return Edit(name, at, rng.choice((0, len(piece))), piece.hex())
    if kind == 7 and name.endswith(("json", "safetensors")) and (numbers := _numbers(data[:_HEADER])):
        begin, end = rng.choice(numbers)
        return Edit(name, begin, end - begin, rng.choice(_WORDS).hex())
    return Edit(name, at, rng.choice((0, 1, 2)), rng.randbytes(rng.choice((1, 2, 8))).hex())


def _numbers(text: bytes) -> list[tuple[int, int]]:
    """Where numbers stand in a text."""
    return [match.span() for match in re.finditer(rb"\d+(\.\d+)?", text)]
