"""A strict reader of GGUF files, versions 2 and 3, little-endian.

Layout (ggml/docs/gguf.md): magic, version, tensor count, metadata count; typed metadata; tensor infos; padding to the
alignment; tensor data. A file is untrusted input: every count, length and offset is checked against the file's size
before anything of that size is made. It may shrink while it is open: see ``FileBytes``.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from outpace import _fast
from outpace.common.arrays import F32
from outpace.common.files import StrPath
from outpace.common.installing import install
from outpace.errors import ModelError
from outpace.models.weights.file_bytes import FileBytes, StoredTensor

MAGIC = b"GGUF"
MAX_NAME = 1 << 16  # bytes of a key or tensor name, as the format says
MAX_DIMS = 4
MAX_NESTING = 4  # arrays in arrays
_PIECE = 1 << 20  # bytes of the header that are read at once
_SMALLEST_ENTRY = 8 + 4 + 1  # key length, value type, one byte of value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, dimension count, one dimension, type, offset

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_FIRST = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)

# ggml type -> (name, elements in a block, bytes of a block)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    41: ("Q1_0", 128, 18),
}
# Types that have a name and cannot be read at all: llama.cpp has dropped some, uses others in between, or is newer.
UNREAD = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is in numpy's order, rows first; ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str  # "F32", "Q4_1", ...
    offset: int
    n_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name, their bytes read when asked for.

    Strings are ``str``, numbers ``int``, ``float`` or ``bool``, arrays of numbers numpy arrays and other arrays lists.
    """

    def __init__(self, file: FileBytes) -> None:
        self.path = file.path
        reader = _Reader(file)
        self.version = reader.version
        self.metadata: dict[str, Any] = reader.metadata
        self.tensors: dict[str, TensorInfo] = reader.tensors
        self._files = [file]
        self._elsewhere: dict[str, FileBytes] = {}  # tensors that lie in other shards
        if self.metadata.get("split.count", 1) != 1:
            self._add_shards(self.metadata["split.count"])

    @property
    def files(self) -> list[Path]:
        """The file, or all shards."""
        return [file.path for file in self._files]

    def _add_shards(self, count: Any) -> None:
        """Take in the tensors of the shards that follow this one. Raises ModelError."""
        paths = shards(self.path)
        named = _FIRST.fullmatch(self.path.name)
        if named is not None and int(named["count"]) == count and len(paths) < count:
            every = {path.name for path in paths}
            missing = next(name for name in _shard_names(named) if name not in every)
            raise ModelError(
                f"{self.path.parent / missing} is missing, one of the {count} shards of this model: get it"
            )
        if self.metadata.get("split.no", 0) != 0 or len(paths) != count:
            raise ModelError(
                f"{self.path.name} is one of {count} shards of a model: keep them in one folder under the names that "
                f"they had, and give the first, which ends in -00001-of-{str(count).zfill(5)}.gguf"
            )
        for path in paths[1:]:
            file = FileBytes(path)
            shard = _Reader(file)
            if shard.metadata.get("split.count") != count or shard.metadata.get("split.no") != len(self._files):
                raise ModelError(f"{path} is not shard {len(self._files) + 1} of {self.path.name}: get it again")
            self._files.append(file)
            for name, info in shard.tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{path.name} has the tensor {name!r} of another shard: get all of them again")
                self.tensors[name] = info
                self._elsewhere[name] = file
        whole = self.metadata.get("split.tensors.count", len(self.tensors))
        if whole != len(self.tensors):
            raise ModelError(
                f"{self.path.name}: the shards have {len(self.tensors)} tensors, not {whole}: get them again"
            )

    @classmethod
    def open(cls, path: StrPath) -> GGUFFile:
        """Open a file and read its header. Raises ModelError that names the file and what is wrong with it."""
        return cls(FileBytes(Path(path)))

    @property
    def architecture(self) -> str:
        """``general.architecture``. Raises ModelError when it is missing."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{self.path.name} does not name its architecture (general.architecture)")
        return name

    @property
    def type(self) -> str:
        """The type that most bytes of its tensors have."""
        bytes_of = Counter[str]()
        for info in self.tensors.values():
            bytes_of[info.type] += info.n_bytes
        return bytes_of.most_common(1)[0][0] if bytes_of else "GGUF"

    def text(self, key: str, default: str) -> str:
        """A metadata entry that must be text. Raises ModelError when it is something else."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.path.name}: {key} must be text, not {type(value).__name__}: get the file again")
        return value

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, uint8 [n_bytes], read now. Raises ModelError for an unknown name and a file cut short."""
        return self.stored(name).data

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor lies. Raises ModelError when the file has no such tensor."""
        info = self.info(name)
        file = self._elsewhere.get(name, self._files[0])
        return StoredTensor(info.type, info.shape, file, info.offset, info.n_bytes)

    def info(self, name: str) -> TensorInfo:
        """Raises ModelError when the file has no such tensor."""
        if name not in self.tensors:
            raise ModelError(f"{self.path.name} has no tensor {name!r}, so the model is incomplete: get the whole file")
        return self.tensors[name]

    def dequantize(self, name: str) -> F32:
        """A tensor as float32 in its ``shape``; a copy, writable. Raises ModelError for a type that cannot be read."""
        info, raw = self.info(name), self.raw(name)
        plain = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
        if info.type in plain:
            values: F32 = raw.view(plain[info.type]).astype(np.float32)
            return values.reshape(info.shape)
        if info.type == "BF16":
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise ModelError(
                f"{self.path.name}: tensor {name!r} is quantised ({info.type}), and the package that unpacks it is not "
                f"installed: {install('outpace[torch]')}"
            ) from error

        rows = raw.reshape(-1, info.n_bytes // max(1, info.elements // info.shape[-1]))
        try:
            unpacked = dequantize(rows, GGMLQuantizationType[info.type])
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path.name}: tensor {name!r} is of type {info.type}, which cannot be read yet; "
                f"use a file with another quantisation, Q8_0 or Q4_K say"
            ) from error
        quantised: F32 = np.ascontiguousarray(unpacked, np.float32)
        return quantised.reshape(info.shape)


def shards(path: StrPath) -> list[Path]:
    """The files of a model of which ``path`` is the first: itself, and those beside it that its name announces."""
    path = Path(path)
    match = _FIRST.fullmatch(path.name)
    if match is None:
        return [path]
    return [shard for name in _shard_names(match) if (shard := path.with_name(name)).is_file()]


def _shard_names(first: re.Match[str]) -> list[str]:
    """Of all shards, by ``_FIRST`` of the first one's."""
    count = first["count"]
    return [f"{first['stem']}-{i:05d}-of-{count}{first['ending']}" for i in range(1, int(count) + 1)]


def is_gguf(path: Path) -> bool:
    """Whether a file is one, by its name or, as Ollama's blobs have none, by its beginning."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


class _Reader:
    """Walks the header once, front to back."""

    def __init__(self, file: FileBytes) -> None:
        self._file = file
        self._data = bytearray()  # the file's beginning, as far as it was needed
        self._size = file.size
        self._at = 0
        try:
            self._read()
        except UnicodeDecodeError as error:
            self._fail(f"the text before byte {self._at} is not UTF-8 ({error.reason})")

    def _fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self._file.path} is not a usable GGUF file: {problem}; download or convert it again")

    def _read(self) -> None:
        if self._size == 0:
            raise ModelError(f"{self._file.path} is empty: download or copy it again")
        self._load(min(4, self._size))
        magic = bytes(self._data[:4])
        if magic != MAGIC:
            self._fail(f"it starts with {magic!r}, not b'GGUF'")
        self._at = 4
        self.version = self._number("<I")
        if self.version not in (2, 3):
            hint = " (big-endian files are not supported)" if self.version & 0xFFFF == 0 else ""
            self._fail(f"version {self.version} is neither 2 nor 3{hint}")
        tensors, entries = self._number("<Q"), self._number("<Q")
        self._room(tensors, _SMALLEST_TENSOR, "tensors")
        self._room(entries, _SMALLEST_ENTRY, "metadata entries")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name("a metadata key")
            if key in self.metadata:
                self._fail(f"metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._number("<I"), key, 0)
        infos = [self._tensor() for _ in range(tensors)]
        self.tensors = self._place(infos)

    def _load(self, end: int) -> None:
        """Have the file up to byte ``end``, which it has."""
        have = len(self._data)
        if end > have:
            self._data += self._file.read(have, min(max(end - have, _PIECE), self._size - have)).data

    def _take(self, n: int) -> int:
        """Advance by n bytes that must exist; returns where they start."""
        start = self._at
        if n > self._size - start:
            self._fail(f"it ends at byte {self._size}, where {n} bytes from {start} on were announced")
        self._at = start + n
        self._load(self._at)
        return start

    def _room(self, count: int, smallest: int, what: str) -> None:
        if count > (self._size - self._at) // smallest:
            self._fail(f"{count} {what} cannot fit into the {self._size - self._at} bytes that are left")

    def _number(self, form: str) -> Any:
        return struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))[0]

    def _name(self, what: str) -> str:
        n = self._number("<Q")
        if n > MAX_NAME:
            self._fail(f"{what} is {n} bytes long, more than {MAX_NAME}")
        start = self._take(n)
        return self._data[start : start + n].decode()

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array(key, depth)
        return self._scalars(kind, 1, key)[0].item()

    def _array(self, key: str, depth: int) -> Any:
        if depth >= MAX_NESTING:
            self._fail(f"arrays in {key!r} are nested more than {MAX_NESTING} deep")
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            self._room(count, 8, f"strings of {key!r}")
            return self._strings(count)
        if kind == _ARRAY:
            self._room(count, 12, f"arrays of {key!r}")
            return [self._array(key, depth + 1) for _ in range(count)]
        return self._scalars(kind, count, key)

    def _scalars(self, kind: int, count: int, key: str) -> npt.NDArray[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            self._fail(f"{key!r} has the unknown value type {kind}")
        self._room(count, dtype.itemsize, f"values of {key!r}")
        start = self._take(count * dtype.itemsize)
        if kind == 7:  # any byte but 0 is true; numpy must not see others
            return np.frombuffer(self._data, np.uint8, count, start).astype(np.bool_)
        return np.frombuffer(self._data, dtype, count, start).copy()

    def _strings(self, count: int) -> list[str]:
        out: list[str] = []
        at = self._at
        while True:
            found, at = _fast.native.gguf_strings(self._data, at, count - len(out))
            out += found
            if len(out) == count:
                self._at = at
                return out
            start = at + 8
            if start > self._size:
                self._fail(f"it ends at byte {self._size}, inside a list of strings")
            self._load(start)
            end = start + _LENGTH.unpack_from(self._data, at)[0]
            if end > self._size:
                self._fail(f"a string at byte {start} runs past the end of the file at {self._size}")
            self._load(end)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a tensor name")
        dims = self._number("<I")
        if not 1 <= dims <= MAX_DIMS:
            self._fail(f"tensor {name!r} has {dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(self._number("<Q") for _ in range(dims))
        return name, shape, self._number("<I"), self._number("<Q")

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self._fail(f"general.alignment={alignment!r} is not a power of two up to 1048576")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                self._fail(f"tensor {name!r} appears twice")
            if kind in UNREAD:
                raise ModelError(
                    f"{self._file.path}: tensor {name!r} is of type {UNREAD[kind]}, which is not supported: use a file "
                    "with another quantisation, Q4_K_M or Q8_0 say"
                )
            if kind not in TYPES:
                self._fail(f"tensor {name!r} has the unknown type {kind}")
            type_name, block, block_bytes = TYPES[kind]
            if min(shape) < 1 or shape[0] % block:
                self._fail(f"tensor {name!r} of shape {list(shape)} does not divide into {type_name} blocks of {block}")
            n_bytes = math.prod(shape) // block * block_bytes
            if offset % alignment:
                self._fail(f"tensor {name!r} is at offset {offset}, which is no multiple of {alignment}")
            if base + offset + n_bytes > self._size:
                self._fail(f"tensor {name!r} ends at byte {base + offset + n_bytes}, the file at {self._size}")
            tensors[name] = TensorInfo(name, shape[::-1], type_name, base + offset, n_bytes)
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda t: t.offset):
            if info.offset < end:
                self._fail(f"tensors {before!r} and {info.name!r} overlap")
            end, before = info.offset + info.n_bytes, info.name
        return tensors
