"""DSpark's network in torch, as it is trained: see ``contexts.Network``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.arrays import I32
from outpace.drafters.learned.checkpoint import Checkpoint, ParallelConfig
from outpace.drafters.learned.contexts import Contexts
from outpace.drafters.learned.networks.layers import Rope
from outpace.drafters.learned.networks.parallel import ParallelNetwork
from outpace.drafters.learned.parallel import Picker, Said
from outpace.drafters.learned.shared import draft_ids
from outpace.drafters.learned.torch_weights import filled, place_of
from outpace.models.base import Model


class TorchBlocks:
    """Weights take the type and device of what the target embeds. The checkpoint fits the target.

    Logits come to the host, slot by slot, where noise or rules decide.
    """

    def __init__(self, target: Model, checkpoint: Checkpoint) -> None:
        config, tensors = checkpoint.config, checkpoint.tensors
        assert isinstance(config, ParallelConfig)
        self._parts = target.parts
        self._device, self._dtype = place_of(target)
        self.ids: I32 = draft_ids(config.draft_vocab, tensors)
        self._on_device = torch.from_numpy(self.ids.astype(np.int64)).to(self._device)
        self._network = filled(ParallelNetwork(config), checkpoint, self._device, self._dtype)
        # Angles need more than half precision has: filling has rounded their frequencies.
        self._network.rope = Rope(config.decoder.head_dim, config.decoder.rope_theta).to(self._device)
        self.slots, self.max_length = self._network.slots, config.decoder.max_length
        self._head, self._embedding = (
            torch.as_tensor(np.ascontiguousarray(tensors[name])).to(self._device, self._dtype)
            if name in tensors
            else None
            for name in ("lm_head.weight", "embed_tokens.weight")
        )

    def contexts(self) -> Contexts:
        its = self._network.config.decoder

        def zeros(shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape, device=self._device, dtype=self._dtype)

        return Contexts(its.layers, its.kv_heads, its.head_dim, zeros, self._dtype.itemsize)

    def context(self, taps: Sequence[Any], positions: Sequence[I32]) -> list[Tensor]:
        with torch.no_grad():
            states = torch.cat([torch.as_tensor(its).to(self._device, self._dtype) for its in taps])
            position = torch.from_numpy(np.concatenate(positions).astype(np.int64)).to(self._device)
            layers = self._network.context(states, position)
            every = torch.stack([torch.stack([k, v]) for k, v in layers])
            return list(every.split([len(its) for its in positions], 2))

    def draft(
        self, anchors: I32, positions: I32, contexts: Sequence[Tensor], pickers: Sequence[Picker | None], most: int
    ) -> Said:
        with torch.no_grad():

            def pick(logits: Tensor, slot: int) -> Tensor:
                best = logits.argmax(-1)
                if slot < most:
                    for b, its in enumerate(pickers):
                        if its is not None:
                            best[b] = its(logits[b].float().cpu().numpy())
                return best

            ids = self._on_device
            drafted = self._network.draft(
                torch.from_numpy(anchors.astype(np.int64)).to(self._device),
                torch.from_numpy(positions.astype(np.int64)).to(self._device),
                [[(layer[0], layer[1]) for layer in context] for context in contexts],
                self._embed, self._logits, ids, pick,
            )  # fmt: skip
            index = torch.searchsorted(ids, drafted.tokens[:, :most].contiguous())
            chance = drafted.confidence[:, :most].float()
            return Said(index.to(torch.int32).cpu().numpy(), chance.cpu().numpy())

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return self._embedding[tokens]
        found: Tensor = self._parts.embed(tokens.cpu().numpy().astype(np.int32))
        return found

    def _logits(self, normed: Tensor) -> Tensor:
        if self._head is not None:
            return normed @ self._head.T
        found: Tensor = self._parts.logits(normed, self.ids)
        return found
