"""Rows of the head that a batch is trained against, in place of its whole draft vocabulary."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.training.vocabulary import DraftVocabulary


class Candidates:
    """``count`` draft ids a batch (0: all): what it says, what is said most, and others drawn evenly.

    ``counts`` int64 [V]: how often tokens are said (None: not known).
    """

    def __init__(self, vocabulary: DraftVocabulary, counts: npt.NDArray[np.int64] | None, count: int) -> None:
        self._count, self._size = count, len(vocabulary)
        self._place = torch.from_numpy(vocabulary.place)
        frequency = np.zeros(self._size, np.int64) if counts is None else counts[vocabulary.ids]
        self._frequent = torch.from_numpy(np.argsort(-frequency, kind="stable").copy())

    def draw(self, tokens: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """Draft ids int64 [m], ascending, for ``tokens`` int64 [N], and what is added to their logits [m]; None: all.

        Those that were drawn stand for all that were not, so the logarithm of how many each stands for is added, for
        p and q alike: then sums over candidates are near sums over all.
        """
        size, count = self._size, self._count
        if not count or count >= size:
            return None
        chosen = torch.zeros(size, dtype=torch.bool)
        said = self._place[tokens]
        chosen[said[said >= 0]] = True
        chosen[self._frequent[: count // 4]] = True
        rest = torch.nonzero(~chosen).flatten()
        wanted = max(count - (size - len(rest)), count // 8)
        drawn = rest[torch.randperm(len(rest), generator=draw)[:wanted]]
        offset = torch.zeros(size)
        offset[drawn] = math.log(len(rest) / max(len(drawn), 1))
        chosen[drawn] = True
        found = torch.nonzero(chosen).flatten()
        return found, offset[found]
