"""What networks in torch share with a target, and rows' keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.common.arrays import I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import MedusaConfig, draft_ids, head_shapes
from outpace.drafters.learned.drafter import KV
from outpace.errors import MemoryLimitError
from outpace.models.base import Model

BLOCK = 64  # positions that memory is counted in

N = TypeVar("N", bound=nn.Module)


def spans(starts: Sequence[int], counts: Sequence[int]) -> I32:
    """``starts[b] .. starts[b] + counts[b] - 1`` of each, one after the other."""
    return np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])


class Shared:
    """Embedding and output rows: the checkpoint's own, or the target's.

    Tensors take the type and device of what the target embeds; beside a native target float32 on the CPU.
    """

    def __init__(self, target: Model, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        self.parts: Any = target.parts
        self._head: Any = None  # the target's, by the rows of the draft vocabulary
        sample = self.parts.embed(np.zeros(1, np.int32))
        self._in_torch = isinstance(sample, Tensor)
        self.device, self.dtype = (
            (sample.device, sample.dtype) if self._in_torch else (torch.device("cpu"), torch.float32)
        )
        tensors = checkpoint.tensors
        decoder = None if isinstance(config, MedusaConfig) else config.decoder
        self._scale, self._cap = (decoder.embedding_scale, decoder.logit_cap) if decoder else (None, 0.0)
        self.ids: I32 = draft_ids(config, tensors)
        self._rows = {name: self.tensor(tensors[name]) for name in head_shapes(config) if name in tensors}
        own = "embed_tokens.weight"
        self._embedding = self.tensor(tensors[own]) if own in tensors else None

    def tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values if isinstance(values, Tensor) else np.ascontiguousarray(values)).to(
            self.device, self.dtype
        )

    def filled(self, network: N, checkpoint: Checkpoint) -> N:
        """The network with the checkpoint's weights, not to be trained."""
        own = {name: torch.tensor(np.asarray(checkpoint.tensors[name])) for name in network.state_dict()}
        network.load_state_dict(own)
        network.to(self.device, self.dtype).eval().requires_grad_(False)
        return network

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., h] of target ids int64 [...]."""
        if self._embedding is not None:
            own = self._embedding[tokens]
            return own if self._scale in (None, 1.0) else own * self._scale
        if self._in_torch and self._scale is not None:
            rows = self.parts.embedding.weight[tokens]
            return rows if self._scale == 1.0 else rows * self._scale
        if self._in_torch:
            found: Tensor = self.parts.embed(tokens)
            return found
        return self.tensor(self.parts.embed(tokens.flatten().numpy().astype(np.int32))).unflatten(0, tokens.shape)

    def logits(self, normed: Tensor, name: str = "lm_head.weight") -> Tensor:
        """[..., D] of normed states [..., h], by the rows called ``name``."""
        if name in self._rows:
            found = F.linear(normed, self._rows[name])
            return found if not self._cap else torch.tanh(found / self._cap) * self._cap
        if self._in_torch:  # the target caps its own
            self._head = self._head or self.parts.head_of(self.ids)
            return self._head(normed)
        logits = self.parts.logits(normed.reshape(-1, normed.shape[-1]).numpy(), self.ids)
        return torch.as_tensor(logits).reshape(*normed.shape[:-1], -1)


class Slab(KV):
    """Rows of keys and values [n, parts, heads, head_dim] in one tensor, made when they are first lengthened.

    ``parts``: 2 a layer, its keys and its values. ``limit``: bound in bytes.
    """

    def __init__(self, shape: tuple[int, int, int], shared: Shared, limit: int | None = None) -> None:
        self._shape, self._device, self._limit = shape, shared.device, limit
        self._values = torch.empty(0, 0, *shape, device=shared.device, dtype=shared.dtype)
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._block: int = BLOCK * int(np.prod(shape)) * shared.dtype.itemsize  # bytes

    @property
    def rows(self) -> list[int]:
        return list(self._lengths)

    @property
    def longest(self) -> int:
        """Positions that there is memory for in each row."""
        return int(self._values.shape[1])

    @property
    def place(self) -> tuple[int, ...]:
        """Where the values lie, and their shape: it changes as they grow."""
        return int(self._values.data_ptr()), *self._values.shape

    def length(self, row: int) -> int:
        return self._lengths.get(row, 0)

    def lengthen(self, rows: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Room for ``counts[b]`` more positions of each row; where they begin. Raises MemoryLimitError; then nothing
        has changed."""
        starts = [self.length(row) for row in rows]
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        need = self.bytes + sum(self.growth(row, end) for row, end in zip(rows, ends, strict=True))
        if self._limit is not None and need > self._limit:
            raise MemoryLimitError(f"the drafter's rows need {need:,} bytes of KV, and have {self._limit:,}")
        self._hold(len(set(self._slots) | set(rows)), max(ends, default=0))
        for row, end in zip(rows, ends, strict=True):
            if row not in self._slots:
                used = set(self._slots.values())
                self._slots[row] = next(slot for slot in range(len(self._values)) if slot not in used)
            self._lengths[row] = end
        return starts

    def _hold(self, slots: int, positions: int) -> None:
        """Room for so many rows of so many positions."""
        have, longest = self._values.shape[:2]
        if slots <= have and positions <= longest:
            return
        slots = have if slots <= have else max(slots, 2 * have)
        if positions > longest:
            positions = max(positions, 2 * longest)
        positions = -(-max(positions, longest) // (4 * BLOCK)) * 4 * BLOCK
        new = torch.zeros(slots, positions, *self._shape, device=self._device, dtype=self._values.dtype)
        new[:have, :longest] = self._values
        self._values = new

    def slots(self, rows: Sequence[int]) -> list[int]:
        """Where the rows' values lie."""
        return [self._slots[row] for row in rows]

    def write(self, slots: Tensor, at: Tensor, values: Tensor) -> None:
        """``values`` [N, parts, heads, head_dim] at positions ``at`` int64 [N] of ``slots`` int64 [N]."""
        self._values[slots, at] = values

    def read(self, slots: Tensor, longest: int) -> Tensor:
        """Values [B, longest, parts, heads, head_dim] of rows at ``slots`` int64 [B]."""
        return self._values[:, :longest].index_select(0, slots)

    def row(self, row: int) -> Tensor:
        """A row's values [n, parts, heads, head_dim], a view."""
        return self._values[self._slots[row], : self._lengths[row]]

    def truncate(self, row: int, n: int) -> None:
        """Keep the first n positions; a row without any is gone."""
        if n == 0:
            self.release(row)
        else:
            assert n <= self._lengths[row], f"{n} positions of a row that has {self._lengths[row]}"
            self._lengths[row] = n

    def fork(self, src: int, dst: int, n: int) -> None:
        """``dst``, which is not there, begins with the first n positions of ``src``. Raises MemoryLimitError."""
        assert dst not in self._slots, f"row {dst} is there already"
        assert n <= self.length(src), f"{n} positions of a row that has {self.length(src)}"
        if n:
            self.lengthen([dst], [n])
            self._values[self._slots[dst], :n] = self._values[self._slots[src], :n]

    def release(self, row: int) -> None:
        self._slots.pop(row, None)
        self._lengths.pop(row, None)

    def growth(self, row: int, positions: int) -> int:
        """Bytes more that the row takes once it has so many positions."""
        blocks = -(-self.length(row) // BLOCK)
        return max(-(-positions // BLOCK) - blocks, 0) * self._block

    @property
    def bytes(self) -> int:
        return sum(-(-n // BLOCK) for n in self._lengths.values()) * self._block

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._slots) == set(self._lengths)
        assert set(self._slots) <= set(rows), f"rows {set(self._slots) - set(rows)} were never released"
        assert len(set(self._slots.values())) == len(self._slots), "two rows share a slot"
        assert self._limit is None or self.bytes <= self._limit

    def close(self) -> None:
        self._slots.clear()
        self._lengths.clear()
        self._values = self._values.new_empty(0, 0, *self._shape)
