"""P-EAGLE: EAGLE-3 whose depths all come from one forward, by mask tokens and a mask's hidden states behind the last
entry. Names and arithmetic are those of speculators 0.9's ``peagle``: the first layer is EAGLE-3's, further ones are
plain; a mask sees every entry and the masks before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import EagleConfig
from outpace.drafters.learned.drafter import Ask, Network
from outpace.drafters.learned.networks.beside import Shared, Slab
from outpace.drafters.learned.networks.eagle import EagleNetwork, attend
from outpace.drafters.learned.networks.layers import Layer
from outpace.drafters.learned.networks.trees import grown
from outpace.drafters.learned.parallel import Block, next_slots
from outpace.exact.drafts import Drafts
from outpace.models.base import Model
from outpace.models.torch.upload import uploaded


class PeagleNetwork(EagleNetwork):
    """EAGLE-3's parts, and what stands in place of states that are not known yet."""

    def __init__(self, config: EagleConfig) -> None:
        shape = config.decoder
        super().__init__(replace(config, decoder=replace(shape, layers=1)))
        self.config = config
        self.layers.extend(Layer(shape) for _ in range(shape.layers - 1))
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.hidden_layers) * shape.hidden))

    def masks(self, n: int) -> Tensor:
        """Features [n, h] of n masks."""
        return self.fuse(self.mask_hidden.view(1, -1, self.config.decoder.hidden)).expand(n, -1)

    def run(self, embedded: Tensor, g: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [n, h] after ``norm`` of entries that embed [n, h] and read features [n, h], in turn behind those
        whose keys and values are ``context`` [L, 2 layers, kv_heads, head_dim]; and their own keys and values."""
        n, before = len(g), len(context)
        at = torch.arange(before + n, device=g.device)
        place = at[before:, None]
        cos, sin = self.rope(at[before:])
        found = []
        x, residual = self.enter(embedded, g)
        for i, layer in enumerate(self.layers):
            if i:
                x = layer.input_layernorm(residual)
            attention = layer.self_attn
            for part, new in enumerate(attention.keys_values(x, cos, sin)):
                found.append(torch.cat([context[:, 2 * i + part], new]))
            window = self.config.decoder.window(i) or len(at)
            sees = (at <= place) & (at > place - window)
            q = attention.queries(x, cos, sin)
            mixed = attend(q[None], found[-2][None], found[-1][None], sees[None])[0]
            residual = layer.leave(residual, mixed.flatten(-2))
        normed: Tensor = self.norm(residual)
        return normed, torch.stack(found, 1)[before:]


class TorchPeagle(Network):
    """P-EAGLE, row by row. The checkpoint fits the target."""

    stepwise = False
    kv: Slab

    def __init__(self, target: Model, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        assert isinstance(config, EagleConfig)
        assert config.mask_token is not None
        self._shared, shape = Shared(target, checkpoint), config.decoder
        self._network = self._shared.filled(PeagleNetwork(config), checkpoint)
        self.ids, self.max_length, self.most_levels = self._shared.ids, shape.max_length, config.depths
        (self._ids,) = uploaded(self._shared.device, self.ids)
        self._mask = config.mask_token
        self.kv = Slab((2 * shape.layers, shape.kv_heads, shape.head_dim), self._shared)

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        self._append(rows, tokens, hidden_states, [0] * len(rows))

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        depths = [min(ask.levels, ask.nodes) for ask in asks]
        each = zip(*((ask.row, ask.tokens, ask.hidden_states) for ask in asks), strict=True)
        logits = torch.nn.utils.rnn.pad_sequence(self._append(*each, depths), batch_first=True)
        return grown(asks, self._ids, lambda level, tokens, parents: (logits[:, level : level + 1], None))

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        def first(new: list[int]) -> list[Block]:
            ends = [self.kv.length(rows[b]) + len(tokens[b]) for b in new]
            depths = [min(self.most_levels or 1, self.max_length - end + 1) for end in ends]
            found = self._append(*([of[b] for b in new] for of in (rows, tokens, given)), depths)
            return [Block(each.float().cpu().numpy()) for each in found]

        return next_slots(given, first)

    @torch.no_grad()
    def _append(
        self, rows: Sequence[int], tokens: Sequence[I32], states: Sequence[Any], depths: Sequence[int]
    ) -> list[Tensor]:
        """Logits [depths[b], D] after each row's new entries, which are kept, and masks, which are not."""
        counts, found = [len(each) for each in tokens], []
        starts = self.kv.lengthen(rows, counts)
        try:
            for row, ids, read, depth, start, n in zip(rows, tokens, states, depths, starts, counts, strict=True):
                masks = max(depth - 1, 0)
                every, slots, at = uploaded(
                    self._shared.device, np.concatenate([ids, np.full(masks, self._mask)]),
                    np.repeat(self.kv.slots([row]), n), np.arange(start, start + n),
                )  # fmt: skip
                features = [self._network.fuse(self._shared.tensor(read)), self._network.masks(masks)]
                context = self.kv.row(row)[:start]
                normed, own = self._network.run(self._shared.embed(every), torch.cat(features), context)
                self.kv.write(slots, at, own[:n])
                found.append(self._shared.logits(normed[n - 1 :] if depth else normed[:0]))
        except BaseException:
            for row, start in zip(rows, starts, strict=True):
                self.kv.truncate(row, start)
            raise
        return found
