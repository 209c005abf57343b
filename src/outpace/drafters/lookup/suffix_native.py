"""The index of ``suffix`` in C++ (native/drafting/suffix.h), behind the interface of its reference, ``SuffixIndex``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from outpace._native import SuffixIndex as _Index
from outpace.drafters.lookup.suffix_index import DOUBT, FEW, NEAREST, WEIGHTS
from outpace.exact.tree import Tree


class NativeSuffixIndex:
    """As ``SuffixIndex``, number for number. Raises ValueError."""

    def __init__(self, capacity: int, most: int = 16) -> None:
        self.capacity, self.most = capacity, most
        self._index = _Index(capacity, most, NEAREST, FEW, WEIGHTS, DOUBT)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def tokens(self) -> list[int]:
        """A copy of what is kept, oldest first."""
        tokens: list[int] = self._index.tokens().tolist()
        return tokens

    def append(self, tokens: Iterable[int]) -> None:
        """Add committed tokens at the end."""
        self._index.append(np.fromiter(tokens, np.int32))

    def shrink(self, n: int) -> None:
        """Forget all but the newest ``n`` tokens."""
        self._index.shrink(n)

    def places(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """See ``SuffixIndex.places``."""
        return self._index.places(np.array(context, np.int32))

    def propose(
        self, context: Sequence[int], budget: int, others: Sequence[NativeSuffixIndex] = (), wide: bool = True
    ) -> Tree:
        """See ``SuffixIndex.propose``."""
        found = self._index.propose(np.array(context, np.int32), budget, [o._index for o in others], wide)
        return Tree(*found, [0] * len(found[0]))
