"""Where a native model's weights lie: tensors of GGUF and safetensors files by what they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from outpace.arrays import F32
from outpace.errors import ModelError
from outpace.models.formats import safetensors as safetensors_file
from outpace.models.formats.file_bytes import StoredTensor
from outpace.models.formats.gguf import GGUFFile

# The matrices and vectors of a layer: our name -> (GGUF's name, Hugging Face's name).
MATRICES = {
    "q": ("attn_q", "self_attn.q_proj"),
    "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"),
    "o": ("attn_output", "self_attn.o_proj"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
}
_NORMS = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm"),
    "q_norm": ("attn_q_norm", "self_attn.q_norm"),
    "k_norm": ("attn_k_norm", "self_attn.k_norm"),
}
_GEMMA_NORMS = {
    **_NORMS,
    "post_attn_norm": ("post_attention_norm", "post_attention_layernorm"),
    "ffn_norm": ("ffn_norm", "pre_feedforward_layernorm"),
    "post_ffn_norm": ("post_ffw_norm", "post_feedforward_layernorm"),
}
_BIASES = {f"{name}_bias": MATRICES[name] for name in ("q", "k", "v", "o")}
_OUTER = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
_DERIVED = (".rotary_emb.inv_freq",)  # what old checkpoints keep although it follows from the description


class Weights(Protocol):
    """Where weights come from."""

    name: str
    files: list[Path]  # that they are read from
    interleaved: bool  # query and key rows are stored in GGUF's order for Llama

    def unused(self, layers: int) -> list[str]:
        """Tensors of the file that a decoder of so many layers would not read: it would compute something else."""

    def matrix(self, layer: int | None, name: str) -> StoredTensor:
        """Raises ModelError when it is missing."""

    def values(self, layer: int | None, name: str, heads: int = 0) -> F32:
        """A matrix dequantised, float32 [rows, cols]; of queries and keys, ``heads`` of them, in Hugging Face's order.

        Raises ModelError when it is missing or of a type that cannot be unpacked.
        """

    def vector(self, layer: int | None, name: str) -> F32 | None:
        """A norm or bias, float32 [n], as it is multiplied or added; None when the model has none."""


class GGUFWeights:
    """Weights of a GGUF file."""

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self.name = gguf.path.name
        self.files = gguf.files
        self.interleaved = gguf.architecture == "llama"

    def unused(self, layers: int) -> list[str]:
        read = _names(0, layers, "gemma3" in self._gguf.architecture, "blk.") | {"rope_freqs.weight"}
        return sorted(self._gguf.tensors.keys() - read)

    def matrix(self, layer: int | None, name: str) -> StoredTensor:
        return self._gguf.stored(self._matrix_name(layer, name))

    def values(self, layer: int | None, name: str, heads: int = 0) -> F32:
        found = self._gguf.dequantize(self._matrix_name(layer, name))
        if name in ("q", "k") and self.interleaved:
            found = found.reshape(heads, -1, 2, found.shape[-1]).swapaxes(1, 2).reshape(found.shape)
        return found

    def _matrix_name(self, layer: int | None, name: str) -> str:
        return _full(layer, (MATRICES[name] if layer is not None else _OUTER[name])[0], "blk.", "weight")

    def vector(self, layer: int | None, name: str) -> F32 | None:
        full = _full(layer, _vector_names("gemma3" in self._gguf.architecture, layer, name)[0], "blk.", _kind(name))
        if full not in self._gguf.tensors:
            return None
        values = self._gguf.dequantize(full)
        if name in ("q_bias", "k_bias") and self.interleaved:
            heads = self._gguf.metadata.get("llama.attention.head_count" + ("_kv" if name == "k_bias" else ""))
            values = values.reshape(int(heads or 1), -1, 2).swapaxes(1, 2).reshape(-1)
        return np.ascontiguousarray(values.reshape(-1), np.float32)


class FolderWeights:
    """Weights of a folder of safetensors files: ``model.safetensors``, or the shards that its index names, or all.

    Raises ModelError for a shard that is missing, and for a tensor that stands in two files without an index.
    """

    def __init__(self, folder: Path, architecture: str) -> None:
        self.name = folder.name
        self.interleaved = False
        self._gemma = architecture == "gemma3"
        self.files, self._tensors = safetensors_file.read_folder(folder)

    def unused(self, layers: int) -> list[str]:
        read = _names(1, layers, self._gemma, "model.layers.")
        return sorted(name for name in self._tensors.keys() - read if not name.endswith(_DERIVED))

    def matrix(self, layer: int | None, name: str) -> StoredTensor:
        full = _full(layer, (MATRICES[name] if layer is not None else _OUTER[name])[1], "model.layers.", "weight")
        tensor = self._tensors.get(full)
        if tensor is None:
            raise ModelError(f"{self.name} has no tensor {full!r}, so the model is incomplete: get all of its files")
        return tensor

    def values(self, layer: int | None, name: str, heads: int = 0) -> F32:
        tensor = self.matrix(layer, name)
        return safetensors_file.plain(tensor, name).reshape(tensor.shape)

    def vector(self, layer: int | None, name: str) -> F32 | None:
        full = _full(layer, _vector_names(self._gemma, layer, name)[1], "model.layers.", _kind(name))
        tensor = self._tensors.get(full)
        if tensor is None:
            return None
        values = safetensors_file.plain(tensor, full).reshape(-1)
        return values + np.float32(1) if self._gemma and name.endswith("norm") else values

    @property
    def has_head(self) -> bool:
        return "lm_head.weight" in self._tensors


def _names(spelling: int, layers: int, gemma: bool, prefix: str) -> set[str]:
    """Every tensor that a decoder may read, in GGUF's spelling (0) or Hugging Face's (1)."""
    vectors = {**(_GEMMA_NORMS if gemma else _NORMS), **_BIASES}
    return (
        {_full(None, part[spelling], prefix, "weight") for part in _OUTER.values()}
        | {_full(i, part[spelling], prefix, "weight") for i in range(layers) for part in MATRICES.values()}
        | {_full(i, part[spelling], prefix, _kind(name)) for i in range(layers) for name, part in vectors.items()}
    )


def _vector_names(gemma: bool, layer: int | None, name: str) -> tuple[str, str]:
    if layer is None:
        return _OUTER[name]
    return {**(_GEMMA_NORMS if gemma else _NORMS), **_BIASES}.get(name, ("-", "-"))


def _kind(name: str) -> str:
    return "bias" if name.endswith("bias") else "weight"


def _full(layer: int | None, part: str, prefix: str, kind: str) -> str:
    return f"{part}.{kind}" if layer is None else f"{prefix}{layer}.{part}.{kind}"
