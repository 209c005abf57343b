"""The target's head over a draft vocabulary: all of its rows, and those that a batch is trained against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outpace.training.target import TargetParts
from outpace.training.vocabulary import DraftVocabulary


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
