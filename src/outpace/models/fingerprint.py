"""Which target this is: what traces, training data and learned drafters say of the model they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace._fast import native
from outpace.errors import ModelError
from outpace.models.load import resolve
from outpace.models.options import BACKENDS, LoadOptions
from outpace.models.weights.gguf import shards

if TYPE_CHECKING:
    from outpace.models.base import Model

_WHOLE = 1 << 20  # bytes: a file up to this size is hashed whole
_PIECE, _PIECES = 1 << 12, 512  # of a larger one, so many pieces of so many bytes, evenly spread
_NAMES = ("*.gguf", "*.safetensors", "*.bin", "config.json", "generation_config.json", "tokenizer.json")

SHAPE = ("vocab_size", "hidden_size", "layers")
FILES = ("fingerprint", *SHAPE)  # what makes it the same model
ARITHMETIC = (*FILES, "backend", "dtype", "kv_dtype")  # what makes its hidden states the same, up to the last bits


def identity(model: Model, load: LoadOptions | None = None) -> dict[str, Any]:
    """Plain values for JSON. ``load``: how the model was loaded. ``fingerprint`` is None for a model without files."""
    info = model.info
    options = load or LoadOptions(backend=info.backend if info.backend in BACKENDS else "auto")
    return {
        "name": info.name,
        "fingerprint": fingerprint_of(info.name, options) if info.backend in BACKENDS else None,
        **{name: getattr(info, name) for name in SHAPE},
        "backend": info.backend,
        "arithmetic": arithmetic(info.backend),
        "dtype": info.dtype,
        "kv_dtype": options.kv_dtype,
    }


def arithmetic(backend: str) -> int | None:
    """The version of the native backend's arithmetic, whose bits are the same on every processor. None elsewhere."""
    return native.ARITHMETIC if backend == "native" else None


def difference(recorded: Mapping[str, Any], target: Mapping[str, Any], names: tuple[str, ...] = FILES) -> str | None:
    """In which of ``names`` two identities differ first, as the end of a sentence about ``recorded``; None: in none."""
    for name in names:
        if recorded.get(name) != target.get(name):
            label = name.replace("_", " ")
            return f"its target's {label} is {recorded.get(name)}, that of {target.get('name')} is {target.get(name)}"
    return None


def fingerprint_of(name: str, options: LoadOptions) -> str | None:
    """The fingerprint of the files behind a model's name; None where none are on this machine."""
    try:
        return fingerprint(resolve(name, LoadOptions(revision=options.revision, offline=True)).path)
    except ModelError:
        return None


def fingerprint(path: Path) -> str:
    """16 hexadecimal digits that change with a model's weights, configuration or tokenizer.

    ``path``: a .gguf file (of a model in shards the first) or a Hugging Face folder. Of large files only the size and
    512 pieces are read, so it takes milliseconds; it tells models apart, it does not guard against forgery. Raises
    OSError.
    """
    files = _files(path)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if file == path else file.name}:{size};".encode())
        with file.open("rb", buffering=0) as stream:
            if size <= _WHOLE:
                digest.update(stream.readall())
                continue
            for i in range(_PIECES):
                stream.seek((size - _PIECE) * i // (_PIECES - 1))
                digest.update(stream.read(_PIECE))
    return digest.hexdigest()[:16]


def written(path: Path) -> list[int]:
    """When those files were written, in nanoseconds, of which ``fingerprint`` reads pieces alone: an edit may lie
    between them. Raises OSError."""
    stats = [file.stat() for file in _files(path)]
    return [stat.st_mtime_ns for stat in stats if stat.st_size > _WHOLE]


def _files(path: Path) -> list[Path]:
    return shards(path) if path.is_file() else sorted({found for name in _NAMES for found in path.glob(name)})
