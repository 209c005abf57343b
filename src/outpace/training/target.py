"""What a trainer needs of its target, in torch: embedding, head, final norm, layers to begin from, and which of its
tokens can be drafted.

Values are the serving weights', dequantised: a drafter trained beside another precision's is accepted far less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.errors import ParameterError
from outpace.models.architecture import MATRICES
from outpace.models.decoder import Decoder
from outpace.models.load import Source
from outpace.models.native.build import open_weights
from outpace.models.weights.tensors import Weights

I64 = npt.NDArray[np.int64]


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

        These are ones where the target has no norm before a branch. Raises ParameterError for a mixture of experts.
        """
        if self.decoder.mixture(index) is not None:
            raise ParameterError(
                f"layer {index} of {self._weights.name} is a mixture of experts, and no drafter can begin as one: "
                "initialise it fresh"
            )
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


# -- draft vocabulary -------------------------------------------------------------------------------------------------
# Which of the target's tokens can be drafted, the most frequent ones (FR-Spec, arXiv 2502.14856); and the rows of the
# target's head for them: all, or those that a batch is trained against.


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """``ids`` int64 [D]: target ids, ascending. ``place`` int64 [V]: where an id stands among them, or -1."""

    ids: I64
    place: I64

    @staticmethod
    def of(ids: I64, vocab: int) -> DraftVocabulary:
        place = np.full(vocab, -1, np.int64)
        place[ids] = np.arange(len(ids))
        return DraftVocabulary(ids, place)

    @staticmethod
    def by_frequency(counts: I64, size: int) -> DraftVocabulary:
        """The ``size`` tokens that ``counts`` int64 [V] has most of; lower ids on ties. Raises ParameterError."""
        if not 1 <= size <= len(counts):
            raise ParameterError(f"a draft vocabulary of {size} does not fit: the target has {len(counts)} tokens")
        chosen = np.argsort(-counts, kind="stable")[:size]
        return DraftVocabulary.of(np.sort(chosen).astype(np.int64), len(counts))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def d2t(self) -> I64:
        """int64 [D]: target id less draft id, as checkpoints have it."""
        return self.ids - np.arange(len(self.ids))

    @property
    def t2d(self) -> npt.NDArray[np.bool_]:
        """bool [V]."""
        return self.place >= 0

    def coverage(self, counts: I64) -> float:
        """The share of ``counts`` int64 [V] that it has."""
        return float(counts[self.ids].sum() / max(int(counts.sum()), 1))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows ``head`` [m, h] of the draft ids ``chosen`` int64 [m], ascending (None: of all); ``offset`` [m] is added to
    their logits (None: nothing)."""

    head: Tensor
    chosen: Tensor | None = None
    offset: Tensor | None = None


class DraftHead:
    """``head`` [D, h]: the target's rows, frozen; ``ids`` int64 [D], ``place`` int64 [V]: see ``DraftVocabulary``."""

    def __init__(
        self, target: TargetParts, vocabulary: DraftVocabulary, counts: npt.NDArray[np.int64] | None, candidates: int
    ) -> None:
        """``candidates``: rows a batch (0: all); ``counts`` int64 [V]: how often tokens occur (None: not known)."""
        self.vocabulary = vocabulary
        device = target.head.device
        self.ids = torch.from_numpy(vocabulary.ids).to(device)
        self.place = torch.from_numpy(vocabulary.place).to(device)
        self.head = target.head[self.ids].contiguous()
        self._count = candidates
        frequency = np.zeros(len(vocabulary), np.int64) if counts is None else counts[vocabulary.ids]
        self._frequent = torch.from_numpy(np.argsort(-frequency, kind="stable").copy()).to(device)

    def draw(self, tokens: Tensor, draw: torch.Generator) -> Candidates:
        """The rows of ``tokens`` int64 [N], of the most frequent tokens, and of others drawn evenly.

        Those that were drawn stand for all that were not, so the logarithm of how many each stands for is added, for
        p and q alike: then sums over candidates are near sums over all.
        """
        size, count = len(self.ids), self._count
        if not count or count >= size:
            return Candidates(self.head)
        chosen = torch.zeros(size, dtype=torch.bool, device=tokens.device)
        present = self.place[tokens]
        chosen[present[present >= 0]] = True
        chosen[self._frequent[: count // 4]] = True
        rest = torch.nonzero(~chosen).flatten()
        wanted = max(count - (size - len(rest)), count // 8)
        drawn = rest[torch.randperm(len(rest), generator=draw)[:wanted].to(tokens.device)]
        offset = torch.zeros(size, device=tokens.device)
        offset[drawn] = math.log(len(rest) / max(len(drawn), 1))
        chosen[drawn] = True
        found = torch.nonzero(chosen).flatten()
        return Candidates(self.head[found], found, offset[found])

    def tensors(self, network: nn.Module) -> Mapping[str, Any]:
        """A checkpoint's: the network's, copied to numpy, and the maps of the vocabulary."""
        own = {name: value.detach().cpu().numpy().copy() for name, value in network.state_dict().items()}
        return {**own, "d2t": self.vocabulary.d2t, "t2d": self.vocabulary.t2d}
