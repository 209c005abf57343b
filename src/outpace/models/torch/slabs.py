"""Slabs: the memory that blocks of keys and values lie in, and where a row's slots are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's cache: key and value heads, and the widths of a key and of a value."""

    heads: int
    key: int
    value: int

    @property
    def width(self) -> int:
        return self.heads * (self.key + self.value)


class Slab:
    """``keys[i]`` and ``values[i]`` [heads, positions, width] are views into ``tensors`` [..., positions, width].

    ``pairs[i]`` [2, heads, positions, width] has both, where all layers are alike. Its blocks are numbered
    ``first .. first + blocks - 1`` in the pool.
    """

    __slots__ = ("blocks", "first", "keys", "pairs", "tensors", "values")

    def __init__(
        self, shapes: Sequence[LayerShape], first: int, blocks: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.first, self.blocks = first, blocks
        positions = blocks * size
        one = shapes[0]
        self.keys: list[torch.Tensor]
        self.values: list[torch.Tensor]
        if one.key == one.value and all(shape == one for shape in shapes):
            whole = torch.empty((len(shapes), 2, one.heads, positions, one.key), dtype=dtype, device=device)
            self.tensors = [whole]
            self.pairs = list(whole)
            self.keys, self.values = [layer[0] for layer in whole], [layer[1] for layer in whole]
        else:
            self.keys = [torch.empty((s.heads, positions, s.key), dtype=dtype, device=device) for s in shapes]
            self.values = [torch.empty((s.heads, positions, s.value), dtype=dtype, device=device) for s in shapes]
            self.tensors = [*self.keys, *self.values]
            self.pairs = []


@dataclass(frozen=True, slots=True)
class Run:
    """Slots ``slot .. slot + count - 1`` of a row: positions ``at`` and on of a slab."""

    slab: Slab
    slot: int
    at: int
    count: int


def run_of(runs: list[Run], slot: int) -> Run:
    """The run of one slot that ``slot`` is."""
    run = next(run for run in runs if slot < run.slot + run.count)
    return Run(run.slab, slot, run.at + slot - run.slot, 1)
