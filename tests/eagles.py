"""EAGLE checkpoints for tests: of random weights, and of a table of what follows a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.config import Decoder, EagleConfig, tensor_shapes
from outpace.models.base import Model
from tests.learned import maps, random_checkpoint


def config_of(model: Model, ids: Sequence[int], hidden_layers: tuple[int, ...], **options: Any) -> EagleConfig:
    h = model.info.hidden_size
    decoder = {"kv_heads": 2, "ffn": 96, "qk_norm": False} | {
        k: options.pop(k) for k in ("kv_heads", "ffn", "qk_norm") if k in options
    }
    its = Decoder(h, 1, h // 16, head_dim=16, eps=1e-5, rope_theta=1e4, max_length=model.info.max_length, **decoder)
    return EagleConfig(its, model.info.vocab_size, len(ids), hidden_layers, **options)


def random(
    model: Model, ids: Sequence[int], hidden_layers: tuple[int, ...], *, seed: int = 0, **options: Any
) -> Checkpoint:
    """See ``random_checkpoint``."""
    return random_checkpoint(seed, config_of(model, ids, hidden_layers, **options), ids=ids)


def table(model: Model, ids: Sequence[int], hidden_layers: tuple[int, ...], follows: Sequence[int]) -> Checkpoint:
    """Says that ``follows[t]`` follows token t, whatever the hidden states are.

    Its attention finds entries of the same token, by the embedding, and takes a value from there that leads to the one
    row of the head.
    """
    h, index = model.info.hidden_size, {token: i for i, token in enumerate(ids)}
    config = config_of(model, ids, hidden_layers, kv_heads=h // 16)
    tensors: dict[str, Any] = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else np.zeros(shape, np.float32)
        for name, shape in tensor_shapes(config).items()
    }
    embedded = _host(model, model.parts.embed(np.arange(config.vocab, dtype=np.int32)))
    x = embedded / np.sqrt((embedded**2).mean(1, keepdims=True) + 1e-5)
    rows = _rows(model, np.array(ids, np.int32))
    wanted = np.zeros((config.vocab, len(ids)))
    wanted[np.arange(config.vocab), [index.get(int(token), 0) for token in follows]] = 1.0
    outputs = wanted @ np.linalg.pinv(rows.astype(np.float64)).T  # [V, h]: rows @ output = wanted
    both, same = slice(0, h), np.eye(h, dtype=np.float32)
    for which, scale in (("q", 3.0), ("k", 3.0), ("v", 1.0)):
        tensors[f"layers.0.self_attn.{which}_proj.weight"][:, both] = scale * same
    tensors["layers.0.self_attn.o_proj.weight"][:] = (np.linalg.pinv(x.astype(np.float64)) @ outputs).T
    return Checkpoint("eagle", config, tensors | maps(ids, config.vocab))


def write(folder: Path, checkpoint: Checkpoint, fingerprint: str | None = None) -> str:
    """The checkpoint as a folder in our layout; its path."""
    target = {"name": "another", "fingerprint": fingerprint} if fingerprint else {}
    write_checkpoint(folder, "eagle", checkpoint.config, checkpoint.tensors, target, {}, dtype="float32")
    return str(folder)


def _host(model: Model, states: Any) -> F32:
    found: F32 = states if isinstance(states, np.ndarray) else states.detach().float().cpu().numpy()
    return found


def _rows(model: Model, ids: I32) -> F32:
    """The head's rows float32 [D, h]."""
    eye = np.eye(model.info.hidden_size, dtype=np.float32)
    if not isinstance(model.parts.embed(ids), np.ndarray):
        import torch

        return _host(model, model.parts.logits(torch.from_numpy(eye), ids)).T
    return _host(model, model.parts.logits(eye, ids)).T
