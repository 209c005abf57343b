"""From a file to the native runtime's weights, or to what they would take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32
from outpace.errors import Argument, ModelError, ParameterError
from outpace.models import decoder as decoders
from outpace.models import recurrent
from outpace.models.architecture import BIASES, NORMS
from outpace.models.decoder import Decoder
from outpace.models.native import weight_cache
from outpace.models.native.packed import Make, Packer, Source, UnusableError
from outpace.models.weights import tensors
from outpace.models.weights.file_bytes import JoinedTensor, StoredTensor
from outpace.models.weights.gguf import TYPES, GGUFFile
from outpace.models.weights.tensors import Weights

_native = _fast.native

_TYPE_IDS = {name: number for number, (name, _, _) in TYPES.items()}
READ = tuple(name for name, _, _ in _native.source_types().values())  # types of matrices
_PLAIN = ("F32", "F16", "BF16")
_TARGETS = {"auto": "keep", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_VECTORS = (*NORMS, *(f"{name}_bias" for name in BIASES))
_NET_PARTS = ("qkv", "z", "b", "a")  # of a recurrent layer
_LATENT_PARTS = ("q_down", "k_up", "v_up")
_VERDICT = "cannot be served by the native backend"
MAX_HEAD = 576  # native/kernels/table.h


def estimate(
    path: str | os.PathLike[str] | GGUFFile,
    *,
    quantize: str | None = None,
    dtype: str = "auto",
    kv_dtype: str = "auto",
) -> tuple[int, int, int, int]:
    """Bytes that ``load_native`` would take for the weights, and for one position of keys and values; of these, what
    layers with a window have, which a row keeps for so many positions alone: the longest window (0, 0: no such layer).

    From shapes and types alone; no weight is read. Raises ModelError.
    """
    model, weights, target = open_weights(path, quantize, dtype)
    matrices: list[tuple[StoredTensor | JoinedTensor, str]] = []
    for i in range(model.layers):
        matrices += [(weights.matrix(i, name), target) for name in model.shapes(i)]
        if model.mixture(i) is not None:
            matrices += [(weights.experts(i, name), target) for name in weights.expert_parts]
            matrices.append((weights.router(i), "f32"))
    inputs = ("inputs_table", "inputs_project") if model.input_width else ()
    outer = ("embedding", *(() if model.tied else ("head",)), *inputs)
    matrices += [(weights.matrix(None, name), target) for name in outer]
    total = 0
    for stored, to in matrices:
        kept = to == "keep" or stored.type not in _PLAIN
        if stored.type not in READ:
            raise ModelError(f"{weights.name} {_VERDICT}: {_unkept(stored.type)}")
        if len(stored.shape) != 2:
            raise ModelError(f"{weights.name} {_VERDICT}: a matrix of it has {len(stored.shape)} dimensions")
        try:
            total += _native.packed_bytes(_TYPE_IDS[stored.type], *stored.shape, "keep" if kept else to)
        except ValueError as error:
            raise ModelError(f"{weights.name} has a matrix that this backend cannot read: {error}") from error
    cached = kv_type(weights, target, kv_dtype)
    layers = [i for i in range(model.layers) if 0 < model.windows[i] < model.max_length]
    window = max((model.windows[i] for i in layers), default=0)
    return total, kv_bytes(model, cached), kv_bytes(model, cached, layers), window


def kv_type(weights: Weights, target: str, asked: str) -> str:
    """What ``kv_dtype`` means: auto is bfloat16, and float16 beside float16 weights, whose error bfloat16 triples."""
    if asked != "auto":
        return asked
    return "float16" if (weights.kind.lower() if target == "keep" else target) == "f16" else "bfloat16"


def _unkept(kind: str) -> str:
    """Why a matrix of that type is not read, and what to do."""
    why = "which is not read"
    if kind.startswith(("Q2_K", "IQ1", "IQ2", "IQ3")):
        why = "whose values none of the formats in memory has but float16 and float32, at several times the file's size"
    kinds = ", ".join(READ)
    return (
        f"it has a matrix of type {kind}, {why} ({kinds} are read): get the model in one of these, or make it "
        "(llama-quantize --allow-requantize FILE NEW-FILE Q4_K_M)"
    )


def kv_bytes(model: Decoder, kv_dtype: str, layers: Sequence[int] | None = None) -> int:
    """Of one position, in ``layers`` (None: all): heads are padded to 16; int8 has a float32 scale for each head's key,
    and value; int4 a float16 one for every 32 numbers."""

    def row(n: int) -> int:
        n += -n % 16
        return {"int8": n + 4, "int4": -(-n // 32) * 18, "float32": 4 * n}.get(kv_dtype, 2 * n)

    total = 0
    for shape in (model.shape(i) for i in (range(model.layers) if layers is None else layers) if model.stores(i)):
        values = shape.head_dim if model.latent is None else model.latent.rank
        total += shape.kv_heads * (row(shape.head_dim) + row(values))
    return total


def open_weights(
    path: str | os.PathLike[str] | GGUFFile, quantize: str | None, dtype: str
) -> tuple[Decoder, Weights, str]:
    """The model, its weights, and what plain ones become: ``quantize``, ``dtype``, or "keep", which changes no value.

    Raises ModelError where a tensor would be left out or ``dtype`` does not fit, ParameterError for both options.
    """
    if quantize is not None and dtype != "auto":
        rounded = Argument("quantize", quantize)
        raise ParameterError(
            Argument("dtype", dtype), " keeps weights, and ", rounded, " rounds them: give one of the two"
        )
    if isinstance(path, GGUFFile) or Path(path).is_file():
        gguf = path if isinstance(path, GGUFFile) else GGUFFile.open(path)
        model = decoders.from_gguf(gguf, _VERDICT)
        weights = tensors.of_gguf(gguf, model)
        quantised = sorted({tensor.type for tensor in gguf.tensors.values()} - {*_PLAIN})
        if quantised and dtype != "auto":
            kept = f": its {quantised[0]} weights stay as they are"
            raise ModelError(f"the native backend does not load {weights.name} as ", Argument("dtype", dtype), kept)
    else:
        model = decoders.from_folder(Path(path), _VERDICT)
        weights = tensors.of_folder(Path(path), model)
    require_served(model, weights)
    return model, weights, quantize or _TARGETS[dtype]


def require_served(model: Decoder, weights: Weights) -> None:
    """Raise ModelError for shapes that the kernels do not have, and where a tensor would be left out."""
    if (widest := max(shape.head_dim for shape in model.by_layer)) > MAX_HEAD:
        raise ModelError(f"{weights.name} {_VERDICT}: its heads are {widest} wide, and {MAX_HEAD} is the most")
    if (a := model.latent) is not None and (a.rank % 16 or a.value % 16):
        sizes = f"latent vectors of {a.rank} numbers and values of {a.value}"
        raise ModelError(f"{weights.name} {_VERDICT}: it has {sizes}, where multiples of 16 are supported")
    if unused := weights.unused():
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ModelError(
            f"{weights.name} {_VERDICT}: it has the tensor {unused[0]!r}{more}, "
            "which this backend does not know, so its output would be another model's"
        )


def build_weights(model: Decoder, weights: Weights, target: str, longest: int, threads: int) -> _native.Weights:
    """The runtime's own ``Weights``: every matrix packed, plain ones as ``target``; ``longest``: positions of a row.

    Packed matrices are kept, and mapped the next time: see weight_cache.py. Raises ModelError for what is missing or of
    another shape, ValueError for what the runtime refuses.
    """
    place = weight_cache.place(weights.name, weights.files, target)
    kept = None if place is None else weight_cache.find(place, threads)
    if place is not None and kept is not None:
        try:
            return _assemble(model, weights, target, longest, kept)
        except UnusableError as error:
            weight_cache.refuse(place, error)
    packer = Packer(threads)
    built = _assemble(model, weights, target, longest, packer)
    if place is not None:
        weight_cache.keep(place, packer)
    return built


def build_head(
    model: Decoder, weights: Weights, target: str, longest: int, threads: int, of: _native.Model
) -> tuple[_native.Weights, F32]:
    """Of a decoder whose files have one (``weights.drafts``), the layer that drafts, as weights of its own beside the
    embedding and head of the model ``of``; and the norm of ``of`` under whose output it reads. Errors: as above."""
    parts = _Parts(model, weights, target, Packer(threads))
    at, hidden = model.layers, model.hidden
    norms = weights.head_norms(at)
    last = norms.pop("norm") / np.float32(model.logit_divisor)
    join = parts.matrix(weights.join(at), hidden, 2 * hidden, "the matrix that joins")
    layer = {**parts.layer(at), **norms, "join": join}
    built = _native.Weights(parts.config(longest), [layer], of.embedding, of.head, last, parts.ropes)
    final = weights.vector(None, "final_norm")
    assert final is not None
    return built, final * np.float32(model.logit_divisor)


def build_beside(
    alone: Decoder, weights: Weights, stored: Mapping[bool, int], longest: int, threads: int
) -> _native.Weights:
    """Of a decoder of Gemma 4's kind without keys and values: its layers read those of another model's layers
    ``stored``, of one that sees a window and of one that sees all. Raises ModelError, ValueError as above."""
    if any(bool(window) not in stored for window in alone.windows):
        problem = "the target has no layers of a kind whose keys and values it reads"
        raise ModelError(f"{weights.name} cannot draft: {problem}")
    shapes = [
        replace(shape, shares=stored[bool(window)]) for shape, window in zip(alone.by_layer, alone.windows, strict=True)
    ]
    model = replace(alone, by_layer=tuple(shapes))
    weights = weights.read_as(model)
    parts = _Parts(model, weights, "keep", Packer(threads))
    # A token reads its window's positions before its own, which has no keys yet, and one more (transformers' masks).
    layers = [parts.layer(i) | ({"window": window + 1} if window else {}) for i, window in enumerate(model.windows)]
    embedding = parts.matrix(weights.matrix(None, "embedding"), model.vocab, model.hidden, "the embedding")
    norm = weights.vector(None, "final_norm")
    assert norm is not None
    return _native.Weights({**parts.config(longest), "beside": True}, layers, embedding, embedding, norm, parts.ropes)


def unpacked(stored: StoredTensor, shape: tuple[int, int], what: str) -> F32:
    """A matrix's values, of any type that is read here. Raises ModelError, ValueError as above."""
    if stored.shape != shape or stored.type not in _TYPE_IDS:
        found = f"{list(stored.shape)} in {stored.type}"
        raise ModelError(f"{what} is {found}, but must be {list(shape)} in a type that is read: get the file again")
    return Packer(1)(what, Source(stored, _TYPE_IDS[stored.type], *shape, 0, "keep")).unpack()


class _Parts:
    """What the runtime's ``Weights`` are made of."""

    def __init__(self, model: Decoder, weights: Weights, target: str, make: Make) -> None:
        self._model, self._weights, self._target, self._make = model, weights, target, make

    def matrix(
        self, stored: StoredTensor | JoinedTensor, rows: int, cols: int, what: str, heads: int = 0, target: str = ""
    ) -> _native.Matrix:
        name = self._weights.name
        if stored.shape != (rows, cols):
            raise ModelError(f"{name}: {what} is {list(stored.shape)}, but must be {[rows, cols]}")
        if stored.type not in _TYPE_IDS:
            raise ModelError(f"{name}: {what} is of type {stored.type}, which this backend cannot read")
        to = (target or self._target) if stored.type in _PLAIN else "keep"
        return self._make(what, Source(stored, _TYPE_IDS[stored.type], rows, cols, heads, to))

    def layer(self, i: int) -> dict[str, Any]:
        model, weights = self._model, self._weights
        reordered = {"q": model.heads, "k": model.kv_heads} if weights.interleaved else {}
        shape, scale = model.shape(i), model.multipliers
        layer: dict[str, Any] = {"window": 0, "rope": 0, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        if i < model.layers:
            layer |= {"window": model.windows[i], "rope": model.layer_rope[i], "shares": shape.shares}
            layer["output_scale"] = weights.output_scale(i)
            layer["fed_scale"] = scale.fed / scale.gate  # the norm before its products has the gate's
        for name, (rows, cols) in model.shapes(i).items():
            stored = weights.matrix(i, name)
            layer[name] = self.matrix(stored, rows, cols, f"layer {i}'s {name}", reordered.get(name, 0))
        if isinstance(net := model.state(i), recurrent.ShortConv):
            layer["conv"] = {"taps": net.taps, "in": layer.pop("in"), **weights.recurrent_vectors(i)}
        elif net is not None:
            layer["delta"] = {
                "key_heads": net.key_heads, "value_heads": net.value_heads, "key_dim": net.key_dim,
                "value_dim": net.value_dim, "taps": net.taps, "tiled": net.tiled,
                **{name: layer.pop(name) for name in _NET_PARTS if name in layer}, **weights.recurrent_vectors(i),
            }  # fmt: skip
            if "state_o" in layer:
                layer["delta"] |= {
                    "o": layer.pop("state_o"), "gate_scale": scale.scanned[0], "step_scale": scale.scanned[-1],
                    "output_scale": scale.scan, "attended_scale": scale.attended,
                }  # fmt: skip
        elif (a := model.latent) is not None:
            layer["latent"] = {
                "rank": a.rank, "plain": a.plain, "rotated": a.rotated, "neighbours": a.neighbours, "eps": a.eps,
                **{name: layer.pop(name) for name in _LATENT_PARTS if name in layer},
            }  # fmt: skip
        elif model.family.gated:
            layer["gated"] = True
        if model.input_width:
            layer["input"] = {
                "gate": layer.pop("input_gate"), "project": layer.pop("input_project"),
                "norm": weights.vector(i, "input_norm"),
            }  # fmt: skip
        if (experts := model.mixture(i)) is not None:
            joined = {name: weights.experts(i, name) for name in weights.expert_parts}
            router = weights.router(i)
            layer["experts"] = {
                "count": experts.count, "used": experts.used, "inner": experts.inner, "shared": experts.shared,
                "score": experts.score, "renormalise": experts.renormalise, "least_total": experts.least_total,
                "scale": experts.scale, "groups": experts.groups, "used_groups": experts.used_groups,
                "best_two": model.family.mixture is not None and model.family.mixture.best_two,
                **{n: self.matrix(each, *each.shape, f"layer {i}'s experts' {n}") for n, each in joined.items()},
                "router": self.matrix(router, *router.shape, f"layer {i}'s router", target="f32"),
                **weights.mixture_vectors(i),
            }  # fmt: skip
        vectors = {name: weights.vector(i, name) for name in _VECTORS} | {"sinks": weights.sinks(i)}
        if model.family.value_norm and shape.shares < 0:
            vectors["v_norm"] = np.ones(shape.head_dim, np.float32)
            if not shape.values:
                vectors["v_bias"] = vectors["k_bias"]
        return layer | {name: values for name, values in vectors.items() if values is not None}

    def inputs(self) -> dict[str, Any] | None:
        """Tokens' inputs for each layer; None: there are none."""
        model, weights = self._model, self._weights
        if not model.input_width:
            return None
        wide = model.layers * model.input_width
        table, project = (weights.matrix(None, name) for name in ("inputs_table", "inputs_project"))
        return {
            "width": model.input_width, "norm": weights.vector(None, "inputs_norm"),
            "table": self.matrix(table, model.input_vocab, wide, "the table of layers' inputs"),
            "project": self.matrix(project, wide, model.hidden, "the projection to layers' inputs"),
        }  # fmt: skip

    def config(self, longest: int) -> dict[str, Any]:
        model = self._model
        return {
            "vocab": model.vocab,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "ffn": model.inner,
            "eps": model.eps,
            "attention_scale": model.attention_scale,
            "embedding_scale": model.embedding_scale,
            "residual_scale": model.residual_scale,
            "score_cap": model.score_cap,
            "logit_cap": model.logit_cap,
            "activation": model.family.activation,
            "max_length": longest,
        }

    @property
    def ropes(self) -> list[tuple[F32, float, float, int]]:
        return [
            (np.ascontiguousarray(table.frequencies, np.float32), table.scale, table.growth, table.period)
            for table in self._model.ropes
        ]


def _assemble(model: Decoder, weights: Weights, target: str, longest: int, make: Make) -> _native.Weights:
    parts = _Parts(model, weights, target, make)
    layers = [parts.layer(i) for i in range(model.layers)]
    head = embedding = parts.matrix(weights.matrix(None, "embedding"), model.vocab, model.hidden, "the embedding")
    if not model.tied:
        head = parts.matrix(weights.matrix(None, "head"), model.vocab, model.hidden, "the output head")
    norm = weights.vector(None, "final_norm")
    assert norm is not None
    return _native.Weights(parts.config(longest), layers, embedding, head, norm, parts.ropes, parts.inputs())
