"""What a run's tokens and times depend on beside its requests: model, arithmetic, engine, machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from outpace.measure import machine
from outpace.models.fingerprint import arithmetic, fingerprint_of
from outpace.models.options import BACKENDS, LoadOptions

if TYPE_CHECKING:
    from outpace.drafters.base import Drafter
    from outpace.engine.intake import EngineOptions
    from outpace.models.base import Model


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
    from outpace.common.version import __version__

    model = engine.model
    info = model.info
    served = info.backend in BACKENDS  # a toy is not: it has no files
    options = load or LoadOptions(backend=info.backend if info.backend in BACKENDS else "auto")
    return {
        "outpace": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": {
            "name": info.name,
            "fingerprint": fingerprint_of(info.name, options) if served else None,
            "backend": info.backend,
            "arithmetic": arithmetic(info.backend),
            "path": model.isa,
            "dtype": info.dtype,
            "kv_dtype": None if load is None or load.kv_dtype == "auto" else load.kv_dtype,
            "kv_bytes_per_position": info.kv_bytes_per_position,
            "device": info.device,
            "threads": model.threads,
            "layers": info.layers,
            "vocab_size": info.vocab_size,
            "max_length": info.max_length,
        },
        "load": {name: value for name, value in asdict(options).items() if value != getattr(LoadOptions(), name)},
        "engine": {"drafters": list(engine.drafters), **asdict(engine.options)},
        "machine": machine.cpu(),
    }
