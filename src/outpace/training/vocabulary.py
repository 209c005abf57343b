"""Which of the target's tokens a drafter may say: the most frequent ones (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outpace.errors import ParameterError

I64 = npt.NDArray[np.int64]


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
