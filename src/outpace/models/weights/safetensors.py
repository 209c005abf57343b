"""A strict reader of safetensors files, and a writer, without torch: numpy has no bfloat16.

Layout (huggingface.co/docs/safetensors): the header's length as a little-endian 64-bit number, a JSON header, the data.
A file is untrusted input: every offset is checked against the file's size before it is used. It may shrink while it is
open: see ``FileBytes``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import F32
from outpace.common.files import replacing
from outpace.errors import ModelError
from outpace.models.weights.facts import brief
from outpace.models.weights.file_bytes import FileBytes, StoredTensor

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
MAX_DIMS = 16
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS = ("F32", "F16", "BF16")  # that ``plain`` reads
_WHOLE = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1"}


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


def read_folder(folder: Path) -> tuple[list[Path], dict[str, StoredTensor]]:
    """A folder's safetensors files and their tensors: ``model.safetensors``, or the shards its index names, or all.

    Raises ModelError for a shard that is missing, and for a tensor that stands in two files without an index.
    """
    tensors: dict[str, StoredTensor] = {}
    shards = _shards(folder)
    for path, names in shards.items():
        found = read(path)
        missing = [name for name in names or () if name not in found]
        if missing:
            raise ModelError(f"{path} has no tensor {missing[0]!r}, which its index promises: download it again")
        chosen = found if names is None else {name: found[name] for name in names}
        if twice := sorted(tensors.keys() & chosen.keys()):
            raise ModelError(
                f"{folder.name} has the tensor {twice[0]!r} in two files and no index that says which counts: "
                "keep the files of one download"
            )
        tensors |= chosen
    return list(shards), tensors


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """The files that make up a folder's weights, with the tensors that each has to give (None: all that it has)."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return {whole: None}
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        numbered = [match for file in files if (match := _SHARD.fullmatch(file.name))]
        present = {file.name for file in files}
        for stem, count in sorted({(match["stem"], match["count"]) for match in numbered}):
            for i in range(1, int(count) + 1):
                if (name := f"{stem}-{i:05d}-of-{count}.safetensors") not in present:
                    raise ModelError(
                        f"{folder / name} is missing, one of the {int(count)} shards of this model: get it"
                    )
        return dict.fromkeys(files)
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in where.items()]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read ({error!r}): download it again") from error
    found: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        path = folder / Path(file).name
        try:
            there = path.is_file()
        except (OSError, ValueError) as error:  # no name that a file can have
            raise ModelError(f"{index} wants {name!r} from {brief(file)} ({error}): download it again") from error
        if not there:
            raise ModelError(f"{path} is missing, and {index.name} wants {name!r} from it: download it")
        names = found.setdefault(path, [])
        assert names is not None
        names.append(name)
    return found


def plain(tensor: StoredTensor, name: str) -> F32:
    """A float tensor's values as float32, in its shape. Raises ModelError for another type."""
    if tensor.type == "BF16":
        values = (tensor.data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif tensor.type in ("F32", "F16"):
        values = tensor.data.view("<f4" if tensor.type == "F32" else "<f2").astype(np.float32)
    else:
        raise ModelError(f"tensor {name!r} is of type {tensor.type}: use float32, float16 or bfloat16")
    return values.reshape(tensor.shape)


def whole(tensor: StoredTensor, name: str) -> npt.NDArray[np.int64]:
    """An integer or boolean tensor's values as int64, in its shape. Raises ModelError for another type."""
    if tensor.type not in _WHOLE:
        raise ModelError(f"tensor {name!r} is of type {tensor.type}: use int64, int32 or bool")
    return tensor.data.view(_WHOLE[tensor.type]).astype(np.int64).reshape(tensor.shape)


def write(path: Path, tensors: Mapping[str, npt.NDArray[Any]], dtype: str = "F32") -> None:
    """Write a file, whole or not at all. Float arrays become ``dtype`` (F32, F16, BF16: to the nearest, ties to even).

    Raises ModelError for a number that ``dtype`` cannot hold, OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say so
    pieces, at = [], 0
    for name, values in sorted(tensors.items()):
        kind, data = _stored(name, values, dtype)
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        pieces.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers start at a multiple of their size
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in pieces:
            file.write(data)


def _stored(name: str, values: npt.NDArray[Any], dtype: str) -> tuple[str, bytes]:
    if values.dtype == np.bool_:
        return "BOOL", values.tobytes()
    if values.dtype == np.uint8:
        return "U8", values.tobytes()
    if values.dtype.kind == "i":
        return "I64", values.astype("<i8").tobytes()
    numbers = np.ascontiguousarray(values, "<f4")
    with np.errstate(over="ignore"):
        if dtype == "BF16":
            bits = numbers.view(np.uint32)
            rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
                "<u2"
            )
            fits = np.isfinite(numbers).all() and bool(((rounded & 0x7F80) != 0x7F80).all())
            data = rounded.tobytes()
        else:
            stored = numbers.astype({"F32": "<f4", "F16": "<f2"}[dtype])
            fits = bool(np.isfinite(stored).all())
            data = stored.tobytes()
    if not fits:
        raise ModelError(f"tensor {name!r} has numbers that {dtype} cannot hold: train again, or write float32")
    return dtype, data
