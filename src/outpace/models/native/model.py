"""The native CPU backend: a decoder in C++ (``outpace._native``) behind the ``Model`` seam.

Imports neither torch nor transformers. Logits stay where they were computed: greedy and sampled choices are made there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.common.fair_lock import FairLock
from outpace.errors import Argument, MemoryLimitError, ModelError, ParameterError
from outpace.models.base import Batch, KVCache, KVLayout, Model, ModelInfo
from outpace.models.decoder import Decoder
from outpace.models.host import usable_cores
from outpace.models.native.build import build_head, build_weights, kv_bytes, kv_type, open_weights
from outpace.models.native.output import NativeOutput, NativeParts, features_of
from outpace.models.weights.gguf import GGUFFile
from outpace.models.weights.tensors import Weights


class NativeKV(KVCache):
    """The rows' keys and values; see ``KVCache``. Calls wait for a forward that another thread runs.

    ValueError for a position or count that a row does not have, IndexError for a row that is not in use. ``compact``
    and, where layers are recurrent, ``fork`` raise MemoryLimitError, and change nothing, where they would have to copy
    something shared beyond the limit.
    """

    def __init__(self, handle: _fast.native.Model, limit: int | None) -> None:
        self._handle: _fast.native.Model | None = handle
        self._limit = limit

    @property
    def block(self) -> int:
        return _fast.native.KV_BLOCK

    def alloc(self) -> int:
        return self._live().kv_alloc()

    def free(self, row: int) -> None:
        self._live().kv_free(row)

    def length(self, row: int) -> int:
        return self._live().kv_length(row)

    @property
    def recurrent(self) -> bool:
        return self._live().recurrent

    @property
    def windowed(self) -> bool:
        return self._live().windowed

    def reachable(self, row: int, n: int) -> int:
        return self._live().kv_reachable(row, n)

    def keep(self, row: int) -> None:
        self._live().kv_keep(row)

    def truncate(self, row: int, n: int) -> None:
        self._live().kv_truncate(row, n)

    def compact(self, row: int, start: int, keep: I32) -> None:
        try:
            self._live().kv_compact(row, start, np.ascontiguousarray(keep, np.int32))
        except _fast.native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error

    def settle(self, rows: _fast.native.Rows) -> list[tuple[int, str]]:
        return rows.settle(self._live())

    def fork(self, src: int, dst: int, n: int) -> None:
        try:
            self._live().kv_fork(src, dst, n)
        except _fast.native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error

    @property
    def layout(self) -> KVLayout:
        handle = self._live()
        kind, block, windowed, window, state = handle.kv_layout
        arithmetic = f"{_fast.native.ARITHMETIC}.{_fast.INTERFACE}"
        made = (kind, block, windowed, state, handle.isa)  # vectors of values go by the path
        return KVLayout(block, windowed, window, state if handle.recurrent else 0, (arithmetic, *map(str, made)))

    def export_block(self, row: int, block: int, windowed: bool = False) -> bytes | None:
        return self._live().kv_export(row, block, windowed)

    def import_block(self, row: int, data: memoryview, positions: int, window: memoryview | None = None) -> None:
        try:
            seen = None if window is None else np.asarray(window)
            self._live().kv_import(row, np.asarray(data), seen, positions)
        except _fast.native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error

    def state_ends(self, row: int) -> list[int]:
        return self._live().kv_states(row)

    def export_state(self, row: int, positions: int) -> bytes:
        return self._live().kv_export_state(row, positions)

    def import_state(self, row: int, data: memoryview) -> None:
        try:
            self._live().kv_import_state(row, np.frombuffer(data, np.uint8))
        except _fast.native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error

    def growth(self, row: int, n: int, settled: int = 0) -> int:
        """See ``KVCache.growth``. Rows that share their last block and grow together may take less than the sum."""
        return self._live().kv_growth(row, n, settled)

    def bytes_for(self, positions: int) -> int:
        return self._live().kv_bytes_for(positions)

    def exclusive(self, rows: Sequence[int]) -> int:
        return self._live().kv_exclusive(list(rows))

    @property
    def bytes(self) -> int:
        return self._live().kv_bytes

    @property
    def limit(self) -> int | None:
        return self._limit

    @property
    def rows(self) -> list[int]:
        return self._live().kv_rows

    def check(self) -> None:
        try:
            self._live().kv_check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        self._handle = None

    def _live(self) -> _fast.native.Model:
        if self._handle is None:
            raise ValueError("this model is closed: load it again")
        return self._handle


_native = _fast.native

log = logging.getLogger(__name__)

MOST_THREADS = 256
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("bfloat16", "float16", "float32", "int8", "int4")
QUANTIZE = ("int8", "int4")


def load_native(
    path: str | os.PathLike[str] | GGUFFile,
    *,
    name: str | None = None,
    eos_ids: Sequence[int] = (),
    threads: int | None = None,
    kv_memory: int | None = None,
    kv_dtype: str = "auto",
    max_length: int | None = None,
    quantize: str | None = None,
    dtype: str = "auto",
    isa: str | None = None,
    runtime: _native.Runtime | None = None,
) -> NativeModel:
    """A model from a GGUF file (or an open one) or a folder with config.json and safetensors files.

    ``threads``: None takes the physical cores this process may use, within its CPU quota; where the system does not
    give that many, those that it gives, with a warning. ``kv_memory``: hard bound in bytes. ``kv_dtype``: bfloat16,
    float16 (greater numbers become 65504), float32, int8 (a float32 scale for each position and head; half the
    memory of bfloat16, less exact) or int4 (a float16 scale for every 32 numbers; 0.28 of it, far less exact); auto:
    float16 for a model in float16, else bfloat16.
    ``quantize``: int8 or int4 in groups of 32, for weights that are not quantised yet; a different model, and
    ``info.dtype`` says so. ``dtype``: auto keeps every value as the file has it; float32, bfloat16 and float16 convert
    weights that are not quantised. ``isa``: an instruction-set path (None: OUTPACE_ISA, else the best one).
    ``runtime``: another model's ``NativeModel.runtime``, for models that compute in turn: one set of threads and
    working memory serves both; they may be closed in any order. ``threads`` then is None or that runtime's.
    Raises ModelError for what cannot be read or served, ParameterError for options.
    """
    _option("kv_dtype", kv_dtype, ("auto", *KV_DTYPES))
    _option("dtype", dtype, DTYPES)
    if quantize is not None:
        _option("quantize", quantize, QUANTIZE)
    decoder, weights, target = open_weights(path, quantize, dtype)
    made = serve(
        decoder, weights, target, name=name, eos_ids=eos_ids, threads=threads, kv_memory=kv_memory, kv_dtype=kv_dtype,
        max_length=max_length, isa=isa, runtime=runtime,
    )  # fmt: skip
    made.path = path.path if isinstance(path, GGUFFile) else Path(path)
    return made


def serve(
    model: Decoder,
    weights: Weights,
    target: str,
    *,
    name: str | None = None,
    eos_ids: Sequence[int] = (),
    threads: int | None = None,
    kv_memory: int | None = None,
    kv_dtype: str = "auto",
    max_length: int | None = None,
    isa: str | None = None,
    runtime: _native.Runtime | None = None,
) -> NativeModel:
    """``load_native``'s second half: of a decoder that is described, and its weights as ``target``."""
    if runtime is not None and threads not in (None, runtime.threads):
        raise ParameterError(
            Argument("threads", threads), f", but the runtime to share has {runtime.threads}: leave ",
            Argument("threads"), " out",
        )  # fmt: skip
    threads = min(usable_cores(), MOST_THREADS) if threads is None else threads
    if not 1 <= threads <= MOST_THREADS:
        raise ParameterError(Argument("threads", threads), f" is out of range: give 1 to {MOST_THREADS}")
    try:
        chosen = _native.kernels(isa or os.environ.get("OUTPACE_ISA", ""))
    except ValueError as error:
        raise ParameterError(f"OUTPACE_ISA: {error}") from error
    longest = min(model.limit, max_length or model.limit)
    if model.limit < min(model.max_length, max_length or model.max_length):
        log.warning(
            "%s: rotations of longer contexts would not fit keys that are already cached: contexts are limited to %d",
            name or weights.name, model.limit,
        )  # fmt: skip
    if runtime is None:
        runtime = _native.Runtime(threads)
        if runtime.threads < threads:
            log.warning(
                "%d of %d threads could be started: raise the limit on processes or memory, or give fewer threads",
                runtime.threads, threads,
            )  # fmt: skip
    try:
        built = build_weights(model, weights, target, longest, runtime.threads)
        kv_dtype = kv_type(weights, target, kv_dtype)
        handle = _native.Model(built, runtime, chosen, kv_dtype, -1 if kv_memory is None else kv_memory)
    except (ValueError, MemoryError) as error:
        raise ModelError(
            f"{weights.name} cannot be served by the native backend: {error or 'out of memory'}"
        ) from error
    stored = target if target != "keep" else weights.kind.lower()
    info = ModelInfo(
        name=name or weights.name,
        backend="native",
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        layers=model.layers,
        max_length=longest,
        eos_ids=tuple(eos_ids),
        dtype={"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(stored, stored),
        device="cpu",
        weight_bytes=handle.weight_bytes,
        kv_bytes_per_position=kv_bytes(model, kv_dtype),
        kv_dtype=kv_dtype,
        experts=0 if model.experts is None else model.experts.count,
        used_experts=0 if model.experts is None else model.experts.used,
        expert_bytes=handle.expert_bytes,
    )
    made = NativeModel(handle, runtime, info, kv_memory)
    made.lost = weights.lost
    made.stored = {bool(window): i for i, window in enumerate(model.windows) if model.stores(i)}
    if weights.drafts:
        made.drafts, made.head = True, lambda: build_head(model, weights, target, longest, runtime.threads, handle)
    return made


def _option(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ParameterError(Argument(name, value), f" is not known: use one of {', '.join(known)}")


class NativeModel(Model):
    """A decoder that runs in C++. One thread at a time computes; others wait.

    ``head``: reads the layer that drafts, where its files have one; see ``build_head``. ``stored``: of layers that see
    a window (True), and of those that see all, the last one with keys and values of its own.
    """

    head: Callable[[], tuple[_native.Weights, F32]] | None = None
    lost: bool = False  # its family has one, and the GGUF file came without it
    stored: Mapping[bool, int] = MappingProxyType({})

    def __init__(self, handle: _native.Model, runtime: _native.Runtime, info: ModelInfo, kv_memory: int | None) -> None:
        self._handle: _native.Model | None = handle
        self._runtime: _native.Runtime | None = runtime
        self.info = info
        self.kv = NativeKV(handle, kv_memory)
        self.lock = FairLock()

    @property
    def runtime(self) -> _native.Runtime:
        """What ``load_native(runtime=...)`` takes, for a model that computes in turn."""
        self._live()
        assert self._runtime is not None
        return self._runtime

    @property
    def native(self) -> _native.Model:
        """See ``Model.native``."""
        return self._live()

    @property
    def isa(self) -> str:
        """The instruction-set path in use: all give the same bits."""
        return self._live().isa

    @property
    def threads(self) -> int:
        return self._live().threads

    def run(self, rows: _native.Rows) -> NativeOutput:
        """See ``Model.run``: nothing is copied."""
        try:
            return NativeOutput(rows.forward(self._live()))
        except _native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error

    def forward(self, batch: Batch) -> NativeOutput:
        """Run the batch; see ``Model.forward``. A malformed one raises ValueError and changes nothing."""
        layers = self.info.layers if batch.layers is None else batch.layers
        features = None if batch.features is None else features_of(batch.features)
        try:
            result = self._live().forward(
                batch.token, batch.row, batch.position, batch.parent, batch.starts, batch.wanted,
                batch.hidden_layers, layers, batch.hidden_rows, features,
            )  # fmt: skip
        except _native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error
        return NativeOutput(result)

    @property
    def parts(self) -> NativeParts:
        """See ``Parts``. float32 in numpy."""
        return NativeParts(self._live)

    def time_phases(self, on: bool = True) -> None:
        """Measure how long each phase of a forward takes; see ``take_timings``."""
        self._live().time_phases(on)

    def take_timings(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        return self._live().take_timings()

    def close(self) -> None:
        """Give back memory and threads, the latter once no other model uses them. Calling twice is allowed."""
        self._handle = self._runtime = self.head = None
        self.kv.close()

    def _live(self) -> _native.Model:
        if self._handle is None:
            raise ValueError("this model is closed: load it again")
        return self._handle
