"""Learned drafters exported: whole, in the layouts that other programs read. Needs neither torch nor safetensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.arrays import F32
from outpace.common.files import StrPath
from outpace.drafters.learned import checkpoint as checkpoints
from outpace.drafters.learned import layouts
from outpace.drafters.learned.checkpoint import Checkpoint, arrays_of, put_files
from outpace.drafters.learned.config import EagleConfig, MedusaConfig, ParallelConfig, embedding_shape, head_shapes
from outpace.drafters.learned.layouts import Verifier
from outpace.errors import ParameterError
from outpace.models.load import Source
from outpace.models.native.build import open_weights
from outpace.models.weights.facts import read_config


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What a drafter shares with its target: float32 ``embedding`` [V, h] and ``head`` [V, h].

    ``layers``: how many the target has; ``scale``: of the embedding's rows as they enter it.
    """

    embedding: F32
    head: F32
    layers: int
    scale: float = 1.0

    @classmethod
    def of(cls, source: Source) -> TargetRows:
        """Of a model's files, dequantised. Raises ModelError for one that the native backend does not serve."""
        model, weights, _ = open_weights(source.gguf or source.path, None, "auto")
        embedding = weights.values(None, "embedding")
        head = embedding if model.tied else weights.values(None, "head")
        return cls(embedding, head, model.layers, model.embedding_scale)


def verifier_of(source: Source, name: str | None) -> Verifier:
    """``name``, else the model itself where others can read it: they do not read GGUF. Raises ModelError."""
    if source.kind == "gguf":
        return Verifier(name)
    return Verifier(name or source.name, tuple(read_config(source.path).get("architectures") or ()))


def to_speculators(
    path: StrPath,
    checkpoint: Checkpoint,
    rows: TargetRows,
    verifier: Verifier | None = None,
    *,
    tokens: int = 4,
    dtype: str = "bfloat16",
) -> None:
    """Write ``eagle`` and ``parallel`` as speculators 0.9 and vLLM read them: nothing is left to the target.

    ``tokens``: drafted a step unless somebody says otherwise. Raises as ``write`` does.
    """
    if isinstance(checkpoint.config, MedusaConfig):
        raise ParameterError("speculators has no Medusa: export it to vLLM, which has")
    checkpoints.put(Path(path), whole(checkpoint, rows), "own", verifier or Verifier(), dtype, tokens)


def to_eagle3(
    path: StrPath, checkpoint: Checkpoint, rows: TargetRows, *, dtype: str = "bfloat16", sglang: bool = False
) -> None:
    """Write ``eagle`` in the flat layout of EAGLE-3's authors (``midlayer.*``), or as SGLang 0.5.23 reads that. Raises
    as ``write`` does."""
    config = checkpoint.config
    if not isinstance(config, EagleConfig):
        raise ParameterError(f"the layout of EAGLE-3 is for the method eagle, and this is {checkpoint.method}")
    if config.mask_token is not None:
        raise ParameterError("the layout of EAGLE-3 has no masks, as P-EAGLE does: export to speculators")
    full = whole(checkpoint, rows)
    arrays = {layouts.flat_name(name): values for name, values in arrays_of(Path(path), full, True).items()}
    if config.decoder.qk_norm:
        raise ParameterError("the layout of EAGLE-3 has no norms of query and key heads: export to speculators")
    if sglang and config.norm_before_residual:
        raise ParameterError("SGLang has no norm_before_residual: export to vLLM, which has")
    described = layouts.to_sglang if sglang else layouts.to_flat_eagle
    assert isinstance(full.config, EagleConfig)
    put_files(Path(path), arrays, described(full.config, dtype), None, dtype)


def to_medusa(path: StrPath, checkpoint: Checkpoint, rows: TargetRows, *, dtype: str = "bfloat16") -> None:
    """Write ``medusa`` as vLLM reads it, the head included. Raises as ``write`` does."""
    if not isinstance(checkpoint.config, MedusaConfig):
        raise ParameterError(f"the layout of Medusa is for the method medusa, and this is {checkpoint.method}")
    checkpoints.put(Path(path), whole(checkpoint, rows), "own", Verifier(), dtype)


def to_vllm(
    path: StrPath, checkpoint: Checkpoint, rows: TargetRows, verifier: Verifier | None = None, *, tokens: int = 4,
    dtype: str = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Write a folder that vLLM serves with, and say its ``--speculative-config``. Raises as ``write`` does.

    The method is named in it: otherwise vLLM guesses from the path.
    """
    config = checkpoint.config
    if isinstance(config, MedusaConfig):
        to_medusa(path, checkpoint, rows, dtype=dtype)
        return {"method": "medusa", "model": str(path), "num_speculative_tokens": config.heads}
    if isinstance(config, ParallelConfig):
        tokens = config.block - (not config.sample_from_anchor)
    to_speculators(path, checkpoint, rows, verifier, tokens=tokens, dtype=dtype)
    if isinstance(config, EagleConfig) and config.mask_token is not None:
        named: dict[str, Any] = {"method": "eagle3", "parallel_drafting": True}
        return {**named, "model": str(path), "num_speculative_tokens": config.depths}
    return {"method": layouts.NAMES[type(config)], "model": str(path), "num_speculative_tokens": tokens}


def whole(checkpoint: Checkpoint, rows: TargetRows) -> Checkpoint:
    """With output rows and embedding of its own. Raises DrafterError for a drafter of another target."""
    checkpoint = checkpoints.fit_shape(checkpoint, "the target", rows.head.shape, rows.layers)
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    ids = np.asarray(tensors["d2t"]) + np.arange(config.draft_vocab)
    for name in head_shapes(config).keys() - tensors.keys():
        tensors[name] = rows.head[ids]
    if isinstance(config, MedusaConfig):
        return replace(checkpoint, tensors=tensors)
    for name in embedding_shape(config):
        own, scale = tensors.get(name), config.decoder.embedding_scale
        entering = (rows.scale if own is None else 1.0) if scale is None else scale
        tensors[name] = (rows.embedding if own is None else own) * np.float32(entering)
    config = replace(config, decoder=replace(config.decoder, embedding_scale=None))
    return replace(checkpoint, config=config, tensors=tensors)
