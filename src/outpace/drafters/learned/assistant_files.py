"""Gemma 4's assistant as it is stored: transformers' folder, or a GGUF file of llama.cpp's (``gemma4-assistant``)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outpace.common.arrays import I32
from outpace.errors import DrafterError
from outpace.models import decoder as decoders
from outpace.models.decoder import Decoder
from outpace.models.weights import safetensors, tensors
from outpace.models.weights.facts import Facts, read_config
from outpace.models.weights.file_bytes import StoredTensor
from outpace.models.weights.gguf import GGUFFile, is_gguf
from outpace.models.weights.tensors import Weights

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")  # of config.json
ARCHITECTURE = "gemma4-assistant"  # of GGUF files
_VERDICT = "is no assistant that can be read"
_OF_HEADS = ("embedding_length_out", "nextn_predict_layers", "attention.shared_kv_layers")  # no decoder has these


@dataclass(frozen=True, slots=True)
class Assistant:
    """``model``, ``weights``: its decoder, as if layers had keys and values of their own. ``hidden``: the size of the
    target's hidden states, which ``before`` [h, 2 hidden] reads and ``after`` [hidden, h] gives.

    ``centroids``: groups of tokens of which the best are drafted from: the groups' vectors [groups, h], their tokens
    [groups, n], how many are taken. GGUF files leave them out, and all tokens are drafted from.
    """

    model: Decoder
    weights: Weights
    hidden: int
    before: StoredTensor
    after: StoredTensor
    centroids: tuple[StoredTensor, I32, int] | None = None


def is_assistant(path: Path) -> bool:
    """Whether a folder or a file is of Gemma 4's assistant. Raises ModelError for one that cannot be read."""
    if path.is_file() and is_gguf(path):
        return GGUFFile.open(path).architecture == ARCHITECTURE
    return (path / "config.json").is_file() and read_config(path).get("model_type") in TYPES


def read(path: Path) -> Assistant:
    """Raises DrafterError for a tensor that is missing, ModelError for what cannot be read."""
    return _of_gguf(path) if path.is_file() else _of_folder(path)


def _of_folder(folder: Path) -> Assistant:
    facts = Facts(str(folder / "config.json"), read_config(folder), verdict=_VERDICT)
    text = {**facts.part("text_config").all, "architectures": ["Gemma4ForCausalLM"], "num_kv_shared_layers": 0}
    model = decoders.from_config(folder, text, _VERDICT)
    _, stored = safetensors.read_folder(folder)
    before, after = (_found(folder, stored, f"{part}_projection.weight") for part in ("pre", "post"))
    centroids = None
    if facts.flag("use_ordered_embeddings", False):
        vectors = _found(folder, stored, "masked_embedding.centroids.weight")
        ordering = _found(folder, stored, "masked_embedding.token_ordering")
        order = safetensors.whole(ordering, "masked_embedding.token_ordering").astype(np.int32)
        count = vectors.shape[0]
        centroids = vectors, order.reshape(count, -1), facts.whole("centroid_intermediate_top_k", 32, count)
    hidden = facts.whole("backbone_hidden_size", 1536)
    return Assistant(model, tensors.of_folder(folder, model), hidden, before, after, centroids)


def _of_gguf(path: Path) -> Assistant:
    own = GGUFFile.open(path)
    hidden = Facts(path.name, own.metadata, f"{ARCHITECTURE}.", _VERDICT).whole("embedding_length_out")
    as_gemma = copy.copy(own)
    as_gemma.metadata = {
        key.replace(f"{ARCHITECTURE}.", "gemma4.", 1): value
        for key, value in own.metadata.items()
        if key not in [f"{ARCHITECTURE}.{name}" for name in _OF_HEADS]
    } | {"general.architecture": "gemma4"}
    model = decoders.from_gguf(as_gemma, _VERDICT)
    before, after = (own.stored(f"nextn.{part}_projection.weight") for part in ("pre", "post"))
    return Assistant(model, tensors.of_gguf(as_gemma, model), hidden, before, after)


def _found(folder: Path, stored: dict[str, StoredTensor], name: str) -> StoredTensor:
    if name not in stored:
        raise DrafterError(f"{folder} has no tensor {name!r}: get all of its files")
    return stored[name]
