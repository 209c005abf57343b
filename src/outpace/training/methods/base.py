"""What the objectives of learned drafters share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from outpace.drafters.learned import checkpoint
from outpace.training.loop import Loop
from outpace.training.objective import Write
from outpace.training.options import EagleOptions, MedusaOptions, Options, ParallelOptions
from outpace.training.target import TargetParts
from outpace.training.vocabulary import DraftHead, DraftVocabulary

NetworkT = TypeVar("NetworkT", bound=nn.Module)
OptionsT = TypeVar("OptionsT", bound=Options)
HeadOptionsT = TypeVar("HeadOptionsT", bound=EagleOptions | MedusaOptions | ParallelOptions)


class Method(Generic[NetworkT, OptionsT]):
    """A kind of drafter in training: an objective (see ``Objective``), how it begins, and what follows the training.

    Subclasses add ``begin(setup, options)``, which makes the objective with a network at its beginning.
    """

    network: NetworkT
    options: OptionsT
    write: Write = staticmethod(checkpoint.write)  # of the best checkpoint

    @classmethod
    def layers(cls, options: OptionsT, count: int) -> tuple[int, ...]:
        """The layers, of ``count``, whose outputs the network reads, beside the last one's."""
        return ()

    @classmethod
    def vocabulary(cls, options: OptionsT) -> DraftVocabulary | None:
        """The draft vocabulary where the options give one; None: the most frequent tokens."""
        return None

    def finish(self, loop: Loop) -> dict[str, float]:
        """Complete the best checkpoint when the training is over; figures to print."""
        return {}

    def close(self) -> None:
        """Close what ``begin`` opened."""


class HeadMethod(Method[NetworkT, HeadOptionsT]):
    """A drafter whose output layer is the target's, frozen, over a draft vocabulary."""

    def __init__(
        self,
        network: NetworkT,
        target: TargetParts,
        vocabulary: DraftVocabulary,
        options: HeadOptionsT,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """``target``: embedding, head and norm, all frozen. ``counts`` int64 [V]: how often each token occurs in the
        training data; with them, the most frequent tokens are always candidates. Raises ParameterError."""
        options.check()
        self.network, self.target, self.options = network, target, options
        self.draft_head = DraftHead(target, vocabulary, counts, options.candidates)

    def export(self) -> tuple[str, Any, Mapping[str, Any]]:
        """See ``Objective``."""
        return self.options.method, self.network.config, self.draft_head.tensors(self.network)
