"""The native CPU backend: a decoder in C++ (``outpace._native``) behind the ``Model`` seam.

Imports neither torch nor transformers. Logits stay where they were computed: greedy and sampled choices are made there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from outpace.arrays import F32, I32
from outpace.errors import MemoryLimitError, ModelError, NoTokenAllowedError, ParameterError
from outpace.exact.drafts import Draft, Verdict
from outpace.exact.noise import Stream
from outpace.exact.rules import AllowedTokens, Bias, Penalties
from outpace.exact.sampling import Chooser, TokenLogprob
from outpace.models.base import Batch, ModelInfo, choose_on_host, logprobs_on_host
from outpace.models.formats.gguf import TYPES, GGUFFile
from outpace.models.native import decoder as decoders
from outpace.models.native.decoder import Decoder, FolderWeights, GGUFWeights, Stored, Weights

try:
    from outpace import _native
except ImportError:  # built only where there is a compiler; available() says so
    _native = None  # type: ignore[assignment]

KV_DTYPES = ("bfloat16", "float32")
QUANTIZE = ("int8", "int4")
_TYPE_IDS = {name: number for number, (name, _, _) in TYPES.items()}
_PLAIN = ("F32", "F16", "BF16")
# Inputs and bytes of a superblock, 16 rows high, by a type that is kept or by what plain weights become: the layouts of
# native/weights/matrix.h. Rows are padded to 64.
_SUPERBLOCKS = {
    "Q4_0": (64, 576), "Q4_1": (64, 640), "Q5_0": (64, 1088), "Q5_1": (64, 1152), "Q8_0": (64, 1088),
    "Q4_K": (256, 2368), "Q5_K": (256, 4416), "Q6_K": (256, 4416), "BF16": (64, 2048), "F16": (64, 2048),
    "F32": (64, 4096), "bf16": (64, 2048), "f32": (64, 4096), "int8": (64, 1088), "int4": (64, 640),
}  # fmt: skip
_VECTORS = (
    "attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm", "q_norm", "k_norm",
    "q_bias", "k_bias", "v_bias", "o_bias",
)  # fmt: skip


def available() -> bool:
    """Whether the extension was built, so that this backend can be used."""
    return _native is not None


def load_native(
    path: str | os.PathLike[str] | GGUFFile,
    *,
    name: str | None = None,
    eos_ids: Sequence[int] = (),
    threads: int | None = None,
    kv_memory: int | None = None,
    kv_dtype: str = "bfloat16",
    max_length: int | None = None,
    quantize: str | None = None,
    dtype: str = "auto",
    isa: str | None = None,
) -> NativeModel:
    """A model from a GGUF file (or an open one) or a folder with config.json and safetensors files.

    ``threads``: None takes the physical cores this process may use. ``kv_memory``: hard bound in bytes. ``kv_dtype``:
    bfloat16 or float32. ``quantize``: int8 or int4 in groups of 32, for weights that are not quantised yet; a
    different model, and ``info.dtype`` says so. ``dtype``: auto keeps what GGUF has and makes bfloat16 of safetensors;
    float32 keeps safetensors exact. ``isa``: an instruction-set path (None: OUTPACE_ISA, else the best one).
    Raises ModelError for what cannot be read or served, ParameterError for options.
    """
    if _native is None:
        raise ModelError(
            "the native backend was not built (no C++ compiler at installation): use --backend transformers"
        )
    _option("kv_dtype", kv_dtype, KV_DTYPES)
    _option("dtype", dtype, ("auto", "bfloat16", "float32"))
    if quantize is not None:
        _option("quantize", quantize, QUANTIZE)
    threads = physical_cores() if threads is None else threads
    if not 1 <= threads <= 256:
        raise ParameterError(f"threads={threads} is out of range: give 1 to 256")
    model, weights, target = _open(path, quantize, dtype)
    try:
        chosen = _native.kernels(isa or os.environ.get("OUTPACE_ISA", ""))
    except ValueError as error:
        raise ParameterError(f"OUTPACE_ISA: {error}") from error
    longest = min(model.max_length, max_length or model.max_length)
    try:
        handle = _build(model, weights, target, longest, chosen, threads, kv_dtype == "float32", kv_memory)
    except (ValueError, MemoryError) as error:
        raise ModelError(
            f"{weights.name} cannot be served by the native backend: {error or 'out of memory'}"
        ) from error
    stored = target if target != "keep" else weights.matrix(0, "up").type.lower()
    info = ModelInfo(
        name=name or weights.name,
        backend="native",
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        layers=model.layers,
        max_length=longest,
        eos_ids=tuple(eos_ids),
        dtype={"bf16": "bfloat16", "f32": "float32"}.get(stored, stored),
        device="cpu",
        weight_bytes=handle.weight_bytes,
        kv_bytes_per_position=_kv_bytes(model, kv_dtype),
    )
    return NativeModel(handle, info, kv_memory)


def estimate(
    path: str | os.PathLike[str] | GGUFFile,
    *,
    quantize: str | None = None,
    dtype: str = "auto",
    kv_dtype: str = "bfloat16",
) -> tuple[int, int]:
    """Bytes that ``load_native`` would take for the weights, and for one position of keys and values.

    From shapes and types alone; no weight is read. Raises ModelError.
    """
    model, weights, target = _open(path, quantize, dtype)
    matrices = [weights.matrix(i, name) for i in range(model.layers) for name in decoders.MATRICES]
    matrices += [weights.matrix(None, name) for name in ("embedding", *(() if model.tied else ("head",)))]
    total = 0
    for stored in matrices:
        kept = target == "keep" or stored.type not in _PLAIN
        layout = _SUPERBLOCKS.get(stored.type if kept else target)
        if layout is None or len(stored.shape) != 2:
            raise ModelError(f"{weights.name} has a matrix of type {stored.type}, which this backend cannot read")
        rows, cols = stored.shape
        total += -(-rows // 64) * 4 * -(-cols // layout[0]) * layout[1]
    return total, _kv_bytes(model, kv_dtype)


def _kv_bytes(model: Decoder, kv_dtype: str) -> int:
    return 2 * model.layers * model.kv_heads * model.head_dim * (4 if kv_dtype == "float32" else 2)


def _open(path: str | os.PathLike[str] | GGUFFile, quantize: str | None, dtype: str) -> tuple[Decoder, Weights, str]:
    """The model, its weights, and what plain ones become."""
    if isinstance(path, GGUFFile) or Path(path).suffix.lower() == ".gguf":
        gguf = path if isinstance(path, GGUFFile) else GGUFFile.open(path)
        return decoders.from_gguf(gguf), GGUFWeights(gguf), quantize or "keep"
    folder = Path(path)
    model = decoders.from_folder(folder)
    weights = FolderWeights(folder, model.architecture)
    return model, weights, quantize or ("f32" if dtype == "float32" else "bf16")


def physical_cores() -> int:
    """Physical cores among the processors this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return max(1, len(cores))


def _option(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ParameterError(f"{name}={value!r} is not known: use one of {', '.join(known)}")


def _build(
    model: Decoder,
    weights: Weights,
    target: str,
    longest: int,
    isa: str,
    threads: int,
    kv_f32: bool,
    kv_memory: int | None,
) -> Any:
    arena = _native.Arena()

    def pack(stored: Stored, rows: int, cols: int, what: str, heads: int = 0) -> Any:
        if stored.shape != (rows, cols):
            raise ModelError(f"{weights.name}: {what} is {list(stored.shape)}, but must be {[rows, cols]}")
        if stored.type not in _TYPE_IDS:
            raise ModelError(f"{weights.name}: {what} is of type {stored.type}, which this backend cannot read")
        to = target if stored.type in _PLAIN else "keep"
        return _native.pack(arena, stored.data, _TYPE_IDS[stored.type], rows, cols, heads, to, threads)

    heads, kv_heads = model.heads, model.kv_heads
    q, kv = heads * model.head_dim, kv_heads * model.head_dim
    sizes = {
        "q": (q, model.hidden), "k": (kv, model.hidden), "v": (kv, model.hidden), "o": (model.hidden, q),
        "gate": (model.inner, model.hidden), "up": (model.inner, model.hidden), "down": (model.hidden, model.inner),
    }  # fmt: skip
    reordered = {"q": heads, "k": kv_heads} if weights.interleaved else {}
    layers = []
    for i in range(model.layers):
        layer: dict[str, Any] = {"window": model.windows[i], "rope": model.layer_rope[i]}
        for name, (rows, cols) in sizes.items():
            layer[name] = pack(weights.matrix(i, name), rows, cols, f"layer {i}'s {name}", reordered.get(name, 0))
        for name in _VECTORS:
            values = weights.vector(i, name)
            if values is not None:
                layer[name] = values
        for name in ("attn_norm", "ffn_norm"):
            if name not in layer:
                raise ModelError(f"{weights.name}: layer {i} has no {name}, so the model is incomplete")
        layers.append(layer)
    head = embedding = pack(weights.matrix(None, "embedding"), model.vocab, model.hidden, "the embedding")
    if not model.tied:
        head = pack(weights.matrix(None, "head"), model.vocab, model.hidden, "the output head")
    final_norm = weights.vector(None, "final_norm")
    if final_norm is None:
        raise ModelError(f"{weights.name} has no final norm, so the model is incomplete")
    config = {
        "vocab": model.vocab,
        "hidden": model.hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": model.head_dim,
        "ffn": model.inner,
        "eps": model.eps,
        "attention_scale": model.attention_scale,
        "embedding_scale": model.embedding_scale,
        "activation": model.activation,
        "max_length": longest,
    }
    limit = -1 if kv_memory is None else kv_memory
    ropes = [np.ascontiguousarray(table, np.float32) for table in model.ropes]
    return _native.Model.build(config, layers, embedding, head, final_norm, ropes, isa, threads, kv_f32, limit)


class NativeModel:
    """A decoder that runs in C++. One thread at a time computes; others wait."""

    def __init__(self, handle: Any, info: ModelInfo, kv_memory: int | None) -> None:
        self._handle = handle
        self.info = info
        self.kv = NativeKV(handle, kv_memory)

    @property
    def isa(self) -> str:
        """The instruction-set path in use: exactness is promised within one."""
        name: str = self._live().isa
        return name

    @property
    def threads(self) -> int:
        count: int = self._live().threads
        return count

    def forward(self, batch: Batch) -> NativeOutput:
        """Run the batch; see ``Model.forward``. A malformed one raises ValueError and changes nothing."""
        layers = self.info.layers if batch.layers is None else batch.layers
        result = self._live().forward(
            batch.token, batch.row, batch.position, batch.parent, batch.starts, batch.wanted, batch.taps, layers
        )
        return NativeOutput(result)

    def time_phases(self, on: bool = True) -> None:
        """Measure how long each phase of a forward takes; see ``take_timings``."""
        self._live().time_phases(on)

    def take_timings(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        timings: dict[str, float] = self._live().take_timings()
        return timings

    def close(self) -> None:
        """Give back memory and threads. Calling twice is allowed."""
        self._handle = None
        self.kv.close()

    def _live(self) -> Any:
        if self._handle is None:
            raise ValueError("this model is closed: load it again")
        return self._handle


class NativeKV:
    """The rows' keys and values; see ``KVCache``. Memory goes in blocks of 64 positions."""

    def __init__(self, handle: Any, limit: int | None) -> None:
        self._handle = handle
        self._limit = limit

    def alloc(self, capacity: int) -> int:
        if capacity < 1:
            raise ValueError(f"a row of {capacity} positions cannot be made: capacity must be at least 1")
        try:
            row: int = self._handle.kv_alloc(capacity)
        except _native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error
        return row

    def free(self, row: int) -> None:
        self._handle.kv_free(row)

    def length(self, row: int) -> int:
        n: int = self._handle.kv_length(row)
        return n

    def capacity(self, row: int) -> int:
        n: int = self._handle.kv_capacity(row)
        return n

    def truncate(self, row: int, n: int) -> None:
        self._handle.kv_truncate(row, n)

    def compact(self, row: int, start: int, keep: I32) -> None:
        self._handle.kv_compact(row, start, np.ascontiguousarray(keep, np.int32))

    def fork(self, src: int, dst: int, n: int) -> None:
        self._handle.kv_fork(src, dst, n)

    def bytes_for(self, capacity: int) -> int:
        n: int = self._handle.kv_bytes_for(capacity)
        return n

    @property
    def bytes(self) -> int:
        n: int = self._handle.kv_bytes
        return n

    @property
    def limit(self) -> int | None:
        return self._limit

    @property
    def rows(self) -> list[int]:
        used: list[int] = self._handle.kv_rows
        return used

    def check(self) -> None:
        try:
            self._handle.kv_check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        self._handle = None


class NativeOutput:
    """A forward's result in the runtime's own memory."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        """See ``Output.choose``. Logits move to Python only for rules that this runtime does not know."""
        if len(choosers) == 1 and choosers[0].plain_greedy:  # between two forwards of one request every call shows
            best: I32 = self._result.best(at)
            if best[0] < 0:
                _complain(int(best[0]))
            return best
        if all(chooser.plain_greedy for chooser in choosers):
            best = self._result.best(np.ascontiguousarray(at, np.int32))
            if len(best) and best.min() < 0:
                _complain(int(best.min()))
            return best
        chosen = np.empty(len(at), np.int32)
        for i, (node, chooser) in enumerate(zip(at.tolist(), choosers, strict=True)):
            edits = describe_rules(chooser)
            token = _UNDECIDED if edits is None else self._result.choose(node, edits, *describe_sampling(chooser))
            if token == _UNDECIDED:
                token = int(choose_on_host(self.logits(at[i : i + 1]), [chooser])[0])
            elif token < 0:
                _complain(token)
            chosen[i] = token
        return chosen

    def walk(self, start: int, draft: Draft, chooser: Chooser) -> Verdict | None:
        if chooser.rules:  # their states change along the path
            return None
        found = self._result.walk(start, draft.tokens, draft.parents, *describe_sampling(chooser))
        return None if found is None else Verdict(*found)

    def logits(self, at: I32) -> F32:
        values: F32 = self._result.logits(np.ascontiguousarray(at, np.int32))
        return values

    def logprobs(self, at: I32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
        return logprobs_on_host(self.logits(at), tokens, top)

    def taps(self, at: I32) -> F32:
        values: F32 = self._result.taps(np.ascontiguousarray(at, np.int32))
        return values


# What the runtime returns in place of a token.
_NONE_ALLOWED, _NAN, _UNDECIDED = -1, -2, -3


def describe_sampling(chooser: Chooser) -> tuple[float, int, float, float, int, int, int, int]:
    """temperature, top_k, top_p, log min_p, seed, sample, index and stream, as the runtime takes them."""
    p = chooser.params
    log_min_p = float(np.log(p.min_p)) if p.min_p > 0 else -math.inf
    return (
        float(p.temperature), p.top_k, float(p.top_p), log_min_p,
        chooser.noise.seed, chooser.noise.sample, chooser.index, int(Stream.CHOICE),
    )  # fmt: skip


def describe_rules(chooser: Chooser) -> list[tuple[Any, ...]] | None:
    """The chooser's rules with their states, as the runtime takes them; None when one is foreign to it."""
    described: list[tuple[Any, ...]] = []
    for rule, state in zip(chooser.rules, chooser.states, strict=True):
        if type(rule) is Penalties:
            ids = np.fromiter(state.output.keys(), np.int32, len(state.output))
            counts = np.fromiter(state.output.values(), np.float32, len(state.output))
            described.append(("penalties", state.seen, ids, counts, rule.repetition, rule.presence, rule.frequency))
        elif type(rule) is Bias:
            described.append(("bias", rule.ids, rule.values))
        elif type(rule) is AllowedTokens:
            described.append(("allowed", rule.ids))
        else:
            return None
    return described


def _complain(code: int) -> NoReturn:
    if code == _NONE_ALLOWED:
        raise NoTokenAllowedError("every token is forbidden: loosen allowed_tokens, logit_bias or the grammar")
    raise FloatingPointError("the model produced NaN logits: try --dtype float32, or check the weights")
