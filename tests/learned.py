"""Learned drafters for tests: tiny random ones, and random ones that draft as variedly as trained ones do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import (
    Config,
    Decoder,
    EagleConfig,
    MedusaConfig,
    ParallelConfig,
    embedding_shape,
    head_shapes,
    tensor_shapes,
)

DECODER = Decoder(8, 1, 2, 1, 4, 16, 1e-5, 5000.0, 64)
VOCAB, DRAFT = 32, 12


def eagle(**changes: Any) -> EagleConfig:
    flags = {"norm_before_residual": False, "fc_norm": True, "norm_output": True, "norm_before_fc": False}
    return EagleConfig(
        **{"decoder": DECODER, "vocab": VOCAB, "draft_vocab": DRAFT, "hidden_layers": (1, 3, 4), **flags, **changes}
    )


def parallel(**changes: Any) -> ParallelConfig:
    decoder = Decoder(8, 2, 2, 1, 4, 16, 1e-5, 5000.0, 64, qk_norm=True)
    given = {
        "decoder": decoder, "vocab": VOCAB, "draft_vocab": DRAFT, "hidden_layers": (0, 2, 4), "block": 4,
        "mask_token": 3,
    }  # fmt: skip
    return ParallelConfig(**{**given, "markov_rank": 4, "confidence": True, **changes})


def medusa(**changes: Any) -> MedusaConfig:
    given = {"hidden": 8, "vocab": VOCAB, "draft_vocab": DRAFT, "heads": 3, "layers": 1, "tree": ((0,), (1,), (0, 0))}
    return MedusaConfig(**{**given, **changes})


def random_tensors(config: Config, seed: int = 0, *, head: bool = False, embedding: bool = False) -> dict[str, Any]:
    """Canonical tensors, float32 that bfloat16 holds exactly; ``d2t`` and ``t2d`` of a random ascending choice."""
    rng = np.random.default_rng(seed)
    shapes = {**tensor_shapes(config), **(head_shapes(config) if head else {})}
    shapes |= embedding_shape(config) if embedding else {}
    tensors: dict[str, Any] = {name: exact(rng.normal(size=shape) * 0.5) for name, shape in sorted(shapes.items())}
    return tensors | maps(np.sort(rng.permutation(config.vocab)[: config.draft_vocab]), config.vocab)


def random_checkpoint(
    rng: Any, config: Config, *, head: bool = False, embedding: bool = False, sharp: float = 1.0,
    ids: Sequence[int] | None = None,
) -> Checkpoint:  # fmt: skip
    """Weights that mean nothing, of the size that trained ones have, times ``sharp``, so that drafts are not all alike.
    ``rng``: or a seed; ``ids``: the draft vocabulary."""
    rng = np.random.default_rng(rng)
    shapes = {**tensor_shapes(config), **(head_shapes(config) if head else {})}
    shapes |= embedding_shape(config) if embedding else {}
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        drawn = rng.normal(0, sharp / np.sqrt(shape[-1]), shape) if len(shape) > 1 else rng.normal(1, 0.2, shape)
        tensors[name] = drawn.astype(np.float32)
    if ids is None:
        ids = np.sort(rng.permutation(config.vocab)[: config.draft_vocab]).tolist()
    method = {EagleConfig: "eagle", ParallelConfig: "parallel", MedusaConfig: "medusa"}[type(config)]
    return Checkpoint(method, config, tensors | maps(ids, config.vocab))


def maps(ids: Sequence[int], vocab: int) -> dict[str, Any]:
    """The draft vocabulary ``ids`` as a checkpoint has it."""
    return {"d2t": np.asarray(ids, np.int64) - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}


def exact(values: Any) -> Any:
    """The nearest float32 below in size that bfloat16 holds."""
    return (np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
