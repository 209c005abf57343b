"""GGUF's Q4_1: blocks of 32 values in 20 bytes, which are float16 d, float16 m and 32 nibbles; a value is d q + m.

Nibbles lie as in GGUF files (ggml's ``block_q4_1``): byte i has value i in its low half and value i + 16 in its high
one. ``encode`` chooses d, m and q as the native runtime's int4 does, and gives the same blocks for what ``decode``
gives: a drafter that is stored so drafts beside a target of 4 bits what the original does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import F32

BLOCK, BYTES = 32, 20

_Bytes = npt.NDArray[np.uint8]


def encode(values: F32) -> _Bytes:
    """float32 [rows, cols], cols a multiple of 32 -> uint8 [rows, cols / 32 * 20]."""
    rows, cols = values.shape
    blocks = values.reshape(rows, cols // BLOCK, BLOCK).astype(np.float32)
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    m, d = low.astype("<f2"), ((high - low) / np.float32(15)).astype("<f2")
    scale = d.astype(np.float32)
    steps = np.divide(blocks - m.astype(np.float32), scale, out=np.zeros_like(blocks), where=scale > 0)
    q = np.clip(np.rint(steps), 0, 15).astype(np.uint8)
    nibbles = q[..., : BLOCK // 2] | q[..., BLOCK // 2 :] << 4
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), nibbles], axis=-1).reshape(rows, -1)


def decode(blocks: _Bytes) -> F32:
    """uint8 [rows, n x 20] -> float32 [rows, n x 32]."""
    rows = len(blocks)
    each = np.ascontiguousarray(blocks).reshape(rows, -1, BYTES)
    d, m = (each[..., i : i + 2].copy().view("<f2").astype(np.float32) for i in (0, 2))
    q = np.concatenate([each[..., 4:] & 15, each[..., 4:] >> 4], axis=-1).astype(np.float32)
    found: F32 = (d * q + m).reshape(rows, -1)
    return found
