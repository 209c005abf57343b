"""What a trainer needs of its target, in torch: embedding, head, final norm, and layers to begin from.

Values are the serving weights', dequantised: a drafter trained beside another precision's is accepted far less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.models.decoder import Decoder
from outpace.models.families import MATRICES
from outpace.models.load import Source
from outpace.models.native.build import open_weights
from outpace.models.weights.tensors import Weights


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Embedding [V, h], unscaled; head rows [V, h]; final norm's weight [h] and eps. float32, frozen."""

    embedding: Tensor
    embedding_scale: float
    head: Tensor
    final_norm: Tensor
    eps: float

    def to(self, device: torch.device) -> TargetParts:
        """The same on ``device``; a tied head stays tied."""
        embedding = self.embedding.to(device)
        head = embedding if self.head is self.embedding else self.head.to(device)
        return replace(self, embedding=embedding, head=head, final_norm=self.final_norm.to(device))

    @property
    def vocab(self) -> int:
        return len(self.head)

    @property
    def hidden(self) -> int:
        return int(self.head.shape[1])

    def embed(self, tokens: Tensor) -> Tensor:
        """What enters the first layer for int64 [n]: [n, h]."""
        found = F.embedding(tokens, self.embedding)
        return found if self.embedding_scale == 1 else found * self.embedding_scale

    def norm(self, state: Tensor) -> Tensor:
        """The final norm of states [n, h]."""
        return F.rms_norm(state.float(), (self.hidden,), self.final_norm, self.eps)

    def logits(self, state: Tensor, ids: Tensor | None = None) -> Tensor:
        """[n, V] of states before the final norm [n, h]; of ``ids`` int64 [m] only: [n, m]."""
        return F.linear(self.norm(state), self.head if ids is None else self.head[ids])

    @torch.no_grad()
    def probabilities(self, state: Tensor, ids: Tensor | None = None, block: int = 256) -> Tensor:
        """p [n, V] at temperature 1 after states [n, h]; of ``ids`` int64 [m] only, not renormalised: [n, m].

        ``block``: rows of logits that exist at once.
        """
        parts = (torch.softmax(self.logits(part), -1) for part in state.split(block))
        return torch.cat([p if ids is None else p[:, ids] for p in parts])


class TargetWeights:
    """A target's files, opened for reading values. Raises ModelError for what the native backend does not serve."""

    def __init__(self, source: Source) -> None:
        self.decoder: Decoder
        self._weights: Weights
        self.decoder, self._weights, _ = open_weights(source.gguf or source.path, None, "auto")

    def parts(self) -> TargetParts:
        embedding = self._values(None, "embedding")
        final_norm = self._weights.vector(None, "final_norm")
        assert final_norm is not None, "the native backend serves no model without a final norm"
        return TargetParts(
            embedding=embedding,
            embedding_scale=self.decoder.embedding_scale,
            head=embedding if self.decoder.tied else self._values(None, "head"),
            final_norm=torch.from_numpy(final_norm),
            eps=self.decoder.eps,
        )

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's matrices (``q`` .. ``down``, rows in Hugging Face's order) and ``attn_norm``, ``ffn_norm``.

        These are ones where the target has no norm before a branch.
        """
        found = {name: self._values(index, name) for name in MATRICES}
        for name in ("attn_norm", "ffn_norm"):
            values = self._weights.vector(index, name)
            found[name] = torch.ones(self.decoder.hidden) if values is None else torch.from_numpy(values)
        return found

    def vector(self, layer: int, name: str) -> Tensor | None:
        """A norm or bias of a layer, by the native backend's name; None where the target has none."""
        values = self._weights.vector(layer, name)
        return None if values is None else torch.from_numpy(values)

    def _values(self, layer: int | None, name: str) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._weights.values(layer, name)))
