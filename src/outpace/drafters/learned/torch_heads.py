"""Medusa's heads in torch, as they are trained: see ``medusa.Heads``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint, MedusaConfig
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.drafters.learned.shared import draft_ids
from outpace.drafters.learned.torch_weights import filled, place_of
from outpace.models.base import Model


class TorchHeads:
    """Weights take the type and device of what the target embeds. The checkpoint fits the target."""

    def __init__(self, target: Model, checkpoint: Checkpoint) -> None:
        config, tensors = checkpoint.config, checkpoint.tensors
        assert isinstance(config, MedusaConfig)
        self._parts = target.parts
        device, dtype = place_of(target)
        self.ids: I32 = draft_ids(config.draft_vocab, tensors)
        self._network = filled(MedusaNetwork(config), checkpoint, device, dtype)
        own = [f"lm_heads.{k}.weight" if config.own_heads else "lm_head.weight" for k in range(config.heads)]
        shared = {
            name: torch.as_tensor(np.ascontiguousarray(tensors[name])).to(device, dtype)
            for name in set(own)
            if name in tensors
        }
        self._rows = [shared[name] for name in own] if shared else None  # None: the target's

    def logits(self, states: Sequence[Tensor]) -> F32:
        with torch.no_grad():
            out: Tensor = self._network(self._parts.norm(torch.stack(list(states))))
            if self._rows is None:
                logits = self._parts.logits(out.flatten(0, 1), self.ids).unflatten(0, out.shape[:2])
            else:
                logits = torch.stack([out[:, k] @ rows.T for k, rows in enumerate(self._rows)], 1)
            found: F32 = logits.float().cpu().numpy()
            return found
