"""What a run's tokens and times depend on beside its requests: model, arithmetic, engine, machine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outpace.errors import ModelError
from outpace.measure import machine
from outpace.models.load import resolve
from outpace.models.options import BACKENDS, LoadOptions

if TYPE_CHECKING:
    from outpace.drafters.base import Drafter
    from outpace.engine.intake import EngineOptions
    from outpace.models.base import Model

_WHOLE = 1 << 20  # bytes: a file up to this size is hashed whole
_PIECE, _PIECES = 1 << 16, 32  # of a larger one, so many pieces of so many bytes, evenly spread
_NAMES = ("*.gguf", "*.safetensors", "*.bin", "config.json", "generation_config.json", "tokenizer.json")


class Described(Protocol):
    """An engine, as far as its facts go."""

    @property
    def model(self) -> Model: ...

    @property
    def options(self) -> EngineOptions: ...

    @property
    def drafters(self) -> Mapping[str, Drafter]: ...


def facts(engine: Described, load: LoadOptions | None = None) -> dict[str, Any]:
    """Plain values for JSON. ``load``: how the model was loaded, so that a replay can load it the same way."""
    from outpace import __version__

    model = engine.model
    info = model.info
    served = info.backend in BACKENDS  # a toy is not: it has no files
    options = load or LoadOptions(backend=info.backend if served else "auto")
    return {
        "outpace": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": {
            "name": info.name,
            "fingerprint": fingerprint_of(info.name, options) if served else None,
            "backend": info.backend,
            "path": machine.path_of(model),
            "dtype": info.dtype,
            "kv_dtype": None if load is None or load.kv_dtype == "auto" else load.kv_dtype,
            "kv_bytes_per_position": info.kv_bytes_per_position,
            "device": info.device,
            "threads": machine.threads_of(model),
            "layers": info.layers,
            "vocab_size": info.vocab_size,
            "max_length": info.max_length,
        },
        "load": {name: value for name, value in asdict(options).items() if value != getattr(LoadOptions(), name)},
        "engine": {"drafters": list(engine.drafters), **asdict(engine.options)},
        "machine": machine.cpu(),
    }


def fingerprint_of(name: str, options: LoadOptions) -> str | None:
    """The fingerprint of the files behind a model's name; None where none are on this machine."""
    try:
        return fingerprint(resolve(name, LoadOptions(revision=options.revision, offline=True)).path)
    except ModelError:
        return None


def fingerprint(path: Path) -> str:
    """16 hexadecimal digits that change with a model's weights, configuration or tokenizer.

    ``path``: a .gguf file or a Hugging Face folder. Of large files only the size and 32 pieces are read, so it takes
    milliseconds; it tells models apart, it does not guard against forgery. Raises OSError.
    """
    files = [path] if path.is_file() else sorted({found for pattern in _NAMES for found in path.glob(pattern)})
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if file == path else file.name}:{size};".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE:
                digest.update(stream.read())
                continue
            for i in range(_PIECES):
                stream.seek((size - _PIECE) * i // (_PIECES - 1))
                digest.update(stream.read(_PIECE))
    return digest.hexdigest()[:16]
