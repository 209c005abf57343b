"""A model's layers with fewer numbers a position: a narrower student begins as them.

States are projected to the directions in which the embedding has most of its energy; every matrix that reads or writes
them is projected, too (SliceGPT, arXiv 2401.15024, with one rotation for all layers, since a Llama has no place for
others). Of the feed-forward the neurons with the largest weights are kept, of attention every head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_FLAT = 0.25  # of the final norm: a cut model is sure of what is wrong, and learns from there slowly


@dataclass(frozen=True, slots=True)
class Narrowing:
    """``basis`` [h, m], orthonormal columns: states x [n, h] become x @ basis. ``scale``: what a norm's output is
    multiplied with, so that a projected state is the projection of the normed one."""

    basis: Tensor
    scale: float

    @staticmethod
    def of(embedding: Tensor, counts: Tensor, hidden: int) -> Narrowing:
        """Of rows [V, h] that occur ``counts`` [V] times, each weighted with the root of one more."""
        weighted = embedding * (counts.to(embedding) + 1).pow(0.25)[:, None]
        energy, directions = torch.linalg.eigh(weighted.T @ weighted)
        kept = float(energy[-hidden:].sum() / energy.sum())
        return Narrowing(directions[:, -hidden:].contiguous(), (kept * embedding.shape[1] / hidden) ** 0.5)

    def final_norm(self, weight: Tensor) -> Tensor:
        """[m]: ``weight`` [h] as nearly as a norm of projected states has it, for logits that are less sure."""
        return self.basis.square().T @ weight * (self.scale * _FLAT)

    def layer(self, given: Mapping[str, Tensor], ffn: int) -> dict[str, Tensor]:
        """A layer (names as ``Student.take`` has them) with ``ffn`` neurons. Norms' weights go into the matrices."""
        found = dict(given)
        for norm, readers in (("attn_norm", ("q", "k", "v")), ("ffn_norm", ("gate", "up"))):
            for name in readers:
                found[name] = (given[name] * given[norm]) @ self.basis
            found[norm] = torch.full((self.basis.shape[1],), self.scale)
        for name in ("o", "down"):
            found[name] = self.basis.T @ given[name]
        size = found["gate"].norm(dim=1) * found["up"].norm(dim=1) * found["down"].norm(dim=0)
        kept = torch.argsort(size, descending=True, stable=True)[:ffn].sort().values
        return {**found, "gate": found["gate"][kept], "up": found["up"][kept], "down": found["down"][:, kept]}
