"""What several learned drafters compute alike in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.arrays import F32, I32


def draft_ids(count: int, tensors: Mapping[str, Any]) -> I32:
    """The target's token ids int32 [D] of a checkpoint's draft vocabulary, ascending."""
    ids: I32 = (np.arange(count) + tensors.get("d2t", 0)).astype(np.int32)
    return ids


def silu(x: F32) -> F32:
    """x / (1 + exp(-x)), in float32 and without overflow."""
    small = np.exp(-np.abs(x))
    found: F32 = x * np.where(x >= 0, np.float32(1), small) / (1 + small)
    return found
