"""A strict reader of safetensors files, for the native runtime: numpy has no bfloat16.

Layout (huggingface.co/docs/safetensors): the header's length as a little-endian 64-bit number, a JSON header, the data.
A file is untrusted input: every offset is checked against the file's size before it is used. It may shrink while it is
open: see ``FileBytes``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from outpace.errors import ModelError
from outpace.models.formats.file_bytes import FileBytes, StoredTensor

MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
MAX_DIMS = 16
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def read(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name. Raises ModelError that names the file and what is wrong with it."""

    def fail(problem: str) -> NoReturn:
        raise ModelError(f"{path} is not a usable safetensors file: {problem}; download it again")

    file = FileBytes(path)
    size = file.size
    if size < 8:
        fail("it is too short")
    length = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if length > min(MAX_HEADER, size - 8):
        fail(f"its header of {length} bytes does not fit")
    try:
        header = json.loads(file.read(8, length).tobytes())
    except (ValueError, RecursionError):
        fail("its header is not JSON")
    if not isinstance(header, dict):
        fail("its header is not an object")
    start = 8 + length
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, begin, end = _entry(entry)
        if len(shape) > MAX_DIMS:
            fail(f"tensor {name!r} has {len(shape)} dimensions, more than {MAX_DIMS}")
        if kind not in _BYTES or begin < 0 or not begin <= end <= size - start:
            fail(f"tensor {name!r} has type {kind!r} and bytes {begin} to {end} of {size - start}")
        if math.prod(shape) * _BYTES[kind] != end - begin:
            fail(f"tensor {name!r} of shape {list(shape)} does not take {end - begin} bytes")
        tensors[name] = StoredTensor(kind, shape, file, start + begin, end - begin)
    return tensors


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, begin and end of a header entry; values that cannot be right for a malformed one."""
    wrong = ("", (), -1, -1)
    if not isinstance(entry, dict):
        return wrong
    shape, offsets = _numbers(entry.get("shape")), _numbers(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        return wrong
    return str(entry.get("dtype")), tuple(shape), offsets[0], offsets[1]


def _numbers(value: Any) -> list[int] | None:
    """``value`` if it is a list of whole numbers from 0."""
    if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value):
        return None
    return value
