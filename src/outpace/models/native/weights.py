"""Where a native model's weights lie: tensors of GGUF and safetensors files by what they are for."""

from __future__ import annotations

import json
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

    def vector(self, layer: int | None, name: str) -> F32 | None:
        """A norm or bias, float32 [n], as it is multiplied or added; None when the model has none."""


class GGUFWeights:
    """Weights of a GGUF file."""

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self.name = gguf.path.name
        self.files = [gguf.path]
        self.interleaved = gguf.architecture == "llama"

    def unused(self, layers: int) -> list[str]:
        read = _names(0, layers, "gemma3" in self._gguf.architecture, "blk.") | {"rope_freqs.weight"}
        return sorted(self._gguf.tensors.keys() - read)

    def matrix(self, layer: int | None, name: str) -> StoredTensor:
        full = _full(layer, (MATRICES[name] if layer is not None else _OUTER[name])[0], "blk.", "weight")
        return self._gguf.stored(full)

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
        self._tensors: dict[str, StoredTensor] = {}
        shards = _shards(folder)
        self.files = list(shards)
        for path, names in shards.items():
            found = safetensors_file.read(path)
            missing = [name for name in names or () if name not in found]
            if missing:
                raise ModelError(f"{path} has no tensor {missing[0]!r}, which its index promises: download it again")
            chosen = found if names is None else {name: found[name] for name in names}
            if twice := sorted(self._tensors.keys() & chosen.keys()):
                raise ModelError(
                    f"{self.name} has the tensor {twice[0]!r} in two files and no index that says which counts: "
                    "keep the files of one download"
                )
            self._tensors |= chosen

    def unused(self, layers: int) -> list[str]:
        read = _names(1, layers, self._gemma, "model.layers.")
        return sorted(name for name in self._tensors.keys() - read if not name.endswith(_DERIVED))

    def matrix(self, layer: int | None, name: str) -> StoredTensor:
        full = _full(layer, (MATRICES[name] if layer is not None else _OUTER[name])[1], "model.layers.", "weight")
        tensor = self._tensors.get(full)
        if tensor is None:
            raise ModelError(f"{self.name} has no tensor {full!r}, so the model is incomplete: get all of its files")
        return tensor

    def vector(self, layer: int | None, name: str) -> F32 | None:
        full = _full(layer, _vector_names(self._gemma, layer, name)[1], "model.layers.", _kind(name))
        tensor = self._tensors.get(full)
        if tensor is None:
            return None
        values = _plain(tensor, full)
        return values + np.float32(1) if self._gemma and name.endswith("norm") else values

    @property
    def has_head(self) -> bool:
        return "lm_head.weight" in self._tensors


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """The files that make up a folder's weights, with the tensors that each has to give (None: all that it has)."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return {whole: None}
    if not index.is_file():
        return dict.fromkeys(sorted(folder.glob("*.safetensors")))
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in where.items()]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read ({error!r}): download it again") from error
    found: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        path = folder / Path(file).name
        try:
            there = path.is_file()
        except (OSError, ValueError) as error:  # no name that a file can have
            raise ModelError(f"{index} wants {name!r} from {file[:80]!r} ({error}): download it again") from error
        if not there:
            raise ModelError(f"{path} is missing, and {index.name} wants {name!r} from it: download it")
        names = found.setdefault(path, [])
        assert names is not None
        names.append(name)
    return found


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


def _plain(tensor: StoredTensor, name: str) -> F32:
    if tensor.type == "BF16":
        return (tensor.data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if tensor.type in ("F32", "F16"):
        return tensor.data.view("<f4" if tensor.type == "F32" else "<f2").astype(np.float32)
    raise ModelError(f"tensor {name!r} is of type {tensor.type}: use float32, float16 or bfloat16")
