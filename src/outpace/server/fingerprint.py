"""``system_fingerprint``: answers with the same one, request and seed are the same, as docs/exactness.md promises."""

from __future__ import annotations

from outpace import __version__, _fast
from outpace.engine.aio import AsyncEngine
from outpace.measure.machine import path_of
from outpace.models.fingerprint import fingerprint_of
from outpace.models.options import BACKENDS, LoadOptions


def system_fingerprint(serving: AsyncEngine, load: LoadOptions | None = None) -> str:
    """What an answer's bits depend on beside its request: the model's files, what computes with them, and in what.

    ``load``: how the model was loaded, where a revision matters. As in
    ``fp_5f2a...-avx512_vnni-0.1.0.6-bfloat16-kv23040``: 16 digits of the model ("none": it has no files), the
    instruction-set path (elsewhere the device), the version of Outpace and of its kernels' interface, the weights' type
    and the bytes of a position's keys and values. Reads pieces of the model's files: not for the event loop. Raises
    OSError.
    """
    model = serving.engine.model
    info = model.info
    files = fingerprint_of(info.name, load or LoadOptions()) if info.backend in BACKENDS else None
    path = path_of(model) or info.device
    version = f"{__version__}.{_fast.INTERFACE}"
    return f"fp_{files or 'none'}-{path}-{version}-{info.dtype}-kv{info.kv_bytes_per_position}"
