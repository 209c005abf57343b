"""The files of a datastore, as they are found: its manifest, and the arrays of its segments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace import _fast
from outpace.common.arrays import I32
from outpace.errors import DrafterError

I64 = npt.NDArray[np.int64]
Arrays = tuple[I32, I32, I64]  # tokens, order and keys of a segment

MANIFEST = "datastore.json"

# What numpy.save writes for one axis, and nothing else that a .npy file may have.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '(<i[48])', 'fortran_order': False, 'shape': \((\d{1,10}),\), \} *\n", re.DOTALL
)
_LONGEST = 256  # bytes of a header
_SEGMENT = re.compile(r"\d{5,10}")


def read_manifest(path: Path, form: int) -> dict[str, Any]:
    """``datastore.json``: format, vocabulary, model, segments, tokens. Raises DrafterError."""
    folder = path.parent
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DrafterError(f"{folder} is no datastore: make one with outpace datastore build") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DrafterError(f"{folder} cannot be read as a datastore ({error}): build it anew") from error
    kinds = {"format": int, "vocabulary": str, "model": str, "segments": list, "tokens": int}
    if not isinstance(found, dict) or any(type(found.get(name)) is not kind for name, kind in kinds.items()):
        raise DrafterError(f"{folder} cannot be read as a datastore ({path.name} is damaged): build it anew")
    if found["format"] != form:
        raise DrafterError(f"{folder} cannot be read as a datastore (format {found['format']}): build it anew")
    names = found["segments"]
    if not all(isinstance(name, str) and _SEGMENT.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise DrafterError(f"{folder} cannot be read as a datastore (its segments are misnamed): build it anew")
    return found


def open_arrays(path: Path) -> tuple[Arrays, list[_fast.native.Mapped]]:
    """The arrays of a segment and the files that they lie in. Raises DrafterError."""
    (tokens, a), (order, b), (keys, c) = (
        _array(f"{path}.{name}.npy", kind) for name, kind in (("tokens", "<i4"), ("order", "<i4"), ("keys", "<i8"))
    )
    if not len(order) == len(keys) <= len(tokens):
        raise DrafterError(f"{path} is damaged (its arrays differ in length): build the datastore anew")
    return (tokens, order, keys), [a, b, c]


def _array(path: str, kind: str) -> tuple[Any, _fast.native.Mapped]:
    try:
        file = _fast.native.Mapped(path)
    except OSError as error:
        raise DrafterError(f"{path} is damaged or missing ({error.strerror}): build the datastore anew") from error
    header = _HEADER.match(file.bytes[:_LONGEST].tobytes())
    dtype = np.dtype(kind)
    if header is not None and header[2] == kind.encode() and header.end() == 10 + int.from_bytes(header[1], "little"):
        values = file.bytes[header.end() :]
        # Rows of a mapping start on a page, so what comes after a header of whole cache lines is aligned.
        if header.end() % 64 == 0 and len(values) == int(header[3]) * dtype.itemsize:
            return values.view(dtype), file
    raise DrafterError(f"{path} is damaged (it is not the array that was written): build the datastore anew")
