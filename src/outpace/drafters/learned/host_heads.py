"""Medusa's heads beside a native target: products by its kernels; see ``medusa.Heads``. Torch is not imported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint, MedusaConfig
from outpace.drafters.learned.products import Products
from outpace.drafters.learned.shared import draft_ids, silu
from outpace.models.native.model import NativeModel


class HostHeads:
    """All rows together: the kernels' products do not depend on what stands beside. The checkpoint fits the target."""

    def __init__(self, target: NativeModel, checkpoint: Checkpoint) -> None:
        config, tensors = checkpoint.config, dict(checkpoint.tensors)  # each is read once
        assert isinstance(config, MedusaConfig)
        self._parts, products = target.parts, Products(target)
        self.ids: I32 = draft_ids(config.draft_vocab, tensors)
        names = [[f"blocks.{k}.layers.{i}" for i in range(config.layers)] for k in range(config.heads)]
        self._blocks = [
            [
                (products.of(tensors[f"{at}.weight"]), tensors[f"{at}.bias"] if config.bias else np.float32(0))
                for at in block
            ]
            for block in names
        ]
        own = config.own_heads and "lm_heads.0.weight" in tensors
        rows = [f"lm_heads.{k}.weight" for k in range(config.heads)] if own else ["lm_head.weight"]
        self._heads = [products.head(tensors, self.ids, name) for name in rows]  # of each head, or one for all

    def logits(self, states: Sequence[F32]) -> F32:
        normed = self._parts.norm(np.stack(states))
        found = []
        for k, block in enumerate(self._blocks):
            x = normed
            for product, bias in block:
                x = x + silu(product(x) + bias)
            found.append(self._heads[k % len(self._heads)](x))
        return np.stack(found, 1)
