"""A learned drafter's checkpoint as a decoder of the native runtime, beside its target: what it packs, what it shares.

The network shares the target's threads, working memory, embedding and, where the checkpoint has no head of its own, the
stored values of the head's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from outpace import _fast
from outpace.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint, Decoder
from outpace.drafters.learned.shared import draft_ids
from outpace.errors import DrafterError
from outpace.models.native.model import NativeModel
from outpace.models.rope import inverse_frequencies

_F32_TYPE = 0  # as GGUF counts types
_GROUP = 32  # inputs that share a scale where weights are quantised
_FOUR_BITS = ("I4S", "I4M", "I4C", "K4", "K4C")
PLAIN = {"float32": "f32", "bfloat16": "bf16"}
_MATRICES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def own_type(target: NativeModel) -> str:
    """Which type a drafter's weights take: int4 beside a target of 4 bits, int8 beside another quantised one, else the
    target's own (float16's: bf16)."""
    dtype = "bfloat16" if target.info.dtype == "float16" else target.info.dtype
    return PLAIN.get(dtype, "int4" if "4" in dtype else "int8")


@contextmanager
def fitting() -> Iterator[None]:
    """What the runtime refuses becomes a DrafterError."""
    try:
        yield
    except (KeyError, ValueError, TypeError, MemoryError) as error:
        problem = f"has no tensor {error}" if isinstance(error, KeyError) else f"does not fit: {error}"
        raise DrafterError(
            f"the drafter {problem}: export it again, or use one that was trained for this target"
        ) from error


class Packing:
    """The tensors of a checkpoint, packed as ``to`` says: f32, bf16, int8 or int4."""

    def __init__(self, target: NativeModel, checkpoint: Checkpoint, to: str) -> None:
        self.tensors: Mapping[str, Any] = dict(checkpoint.tensors)  # each is read once
        self.ids: I32 = draft_ids(checkpoint.config.draft_vocab, self.tensors)
        self._target, self._to, self._arena = target, to, _fast.native.Arena()

    def matrix(self, values: Any, kind: str | None = None) -> Any:
        raw = np.ascontiguousarray(values, np.float32)
        return _fast.native.pack(
            self._arena,
            raw.view(np.uint8).reshape(-1),
            _F32_TYPE,
            *raw.shape,
            0,
            kind or self._to,
            self._target.threads,
        )

    def narrow(self, name: str) -> Any:
        """A matrix whose inputs may be too few for groups: then its values stay as they are."""
        values = np.ascontiguousarray(self.tensors[name], np.float32)
        return self.matrix(values, "f32" if self._to.startswith("int") and values.shape[1] % _GROUP else None)

    def exact(self, name: str) -> Any:
        """A matrix whose rows are looked up: quantising it would save no time."""
        return self.matrix(self.tensors[name], "bf16" if self._to.startswith("int") else None)

    def vector(self, name: str) -> F32:
        return np.ascontiguousarray(self.tensors[name], np.float32)

    def layer(self, i: int, decoder: Decoder) -> dict[str, Any]:
        at = f"layers.{i}."
        layer: dict[str, Any] = {"window": 0, "rope": 0}
        layer |= {name: self.matrix(self.tensors[f"{at}{its}.weight"]) for name, its in _MATRICES.items()}
        layer["attn_norm"] = self.vector(at + "input_layernorm.weight")
        layer["ffn_norm"] = self.vector(at + "post_attention_layernorm.weight")
        if decoder.qk_norm:
            layer |= {name: self.vector(f"{at}self_attn.{name}.weight") for name in ("q_norm", "k_norm")}
        return layer

    def model(self, decoder: Decoder, layers: list[dict[str, Any]], kv_dtype: str, limit: int | None) -> Any:
        """An ``_native.Model`` of such layers, with a cache of its own."""
        handle, its = self._target.native, decoder
        embedding, scale = handle.embedding, handle.embedding_scale
        if "embed_tokens.weight" in self.tensors:
            embedding, scale = self.matrix(self.tensors["embed_tokens.weight"]), 1.0
        sizes = {
            "vocab": embedding.rows, "outputs": len(self.ids), "hidden": its.hidden, "heads": its.heads,
            "kv_heads": its.kv_heads, "head_dim": its.head_dim, "ffn": its.ffn, "eps": its.eps,
            "attention_scale": its.head_dim**-0.5, "embedding_scale": scale, "activation": "silu",
            "max_length": its.max_length,
        }  # fmt: skip
        ropes = [inverse_frequencies(its.rope_theta, its.head_dim)]
        weights = _fast.native.Weights(sizes, layers, embedding, self._head(), self.vector("norm.weight"), ropes)
        runtime, isa = self._target.runtime, self._target.isa
        return _fast.native.Model(weights, runtime, isa, kv_dtype, -1 if limit is None else limit)

    def _head(self) -> Any:
        """The checkpoint's own output rows, or the target's, which stay as they are stored but for int4."""
        if "lm_head.weight" in self.tensors:
            return self.matrix(self.tensors["lm_head.weight"])
        head = _fast.native.gather(self._arena, self._target.native.head, self.ids)
        return self.matrix(head.unpack()) if self._to == "int4" and head.format not in _FOUR_BITS else head
