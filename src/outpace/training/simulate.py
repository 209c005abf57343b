"""What a chain would have brought on a recorded greedy answer, without running the target again.

A greedy answer is what the target says after each of its own prefixes, so a draft is right where it equals the answer;
and since nothing after a wrong token counts, feeding the answer's own tokens is the same as feeding the draft's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from outpace.training.objective import Simulated, TrainBatch

Flags = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]


def walk(batch: TrainBatch, right: Flags, tried: Flags) -> Simulated:
    """``right`` bool [N, k]: whether the chain drafted after entry i has its token s right; ``tried``: it exists.

    A row begins with the prompt and one token, whose entry is the first in ``loss_mask``, and goes on by what was
    accepted and one more, as serving does.
    """
    depth = right.shape[1]
    accepted = np.logical_and.accumulate(right, 1).sum(1)
    steps = tokens = 0
    starting = np.zeros(len(batch), bool)
    for begin, end in _spans(batch):
        starting[begin : end - 2] = True
        at = begin
        while at + 2 < end:
            gained = min(int(accepted[at]) + 1, end - at - 2)
            steps, tokens, at = steps + 1, tokens + gained, at + gained
    before = np.arange(depth)[None, :] <= accepted[:, None]
    asked = before & tried & starting[:, None]
    return Simulated(steps, tokens, asked.sum(0), (asked & right).sum(0))


def expected_steps(batch: TrainBatch, overlap: F64) -> tuple[float, int]:
    """Steps that sampling at temperature 1 is expected to take for what ``walk`` takes ``steps`` for, and the tokens.

    ``overlap`` [N, k]: sum min(p, q) of the chain's token s after entry i, 0 where the answer has none. A draft is kept
    up to its token s with the product of what is before (rejection, arXiv 2211.17192, section 3.3), and every place of
    the answer is begun at as often as the places before lead there, so this is exact for a target and a drafter whose
    probabilities after a prefix do not depend on its last words. Where they do, it is an estimate: the answer's own
    words stand for those that would have been drawn.
    """
    reached = np.cumprod(overlap, 1)
    # Of a draft of k: the chance that exactly 0 .. k are accepted.
    exactly = np.concatenate([np.ones((len(batch), 1)), reached], 1)
    exactly[:, :-1] -= reached
    steps, tokens = 0.0, 0
    for begin, end in _spans(batch):
        last = max(end - 2, begin)  # where the walk is over
        visits = np.zeros(last + 1 - begin)
        visits[0] = 1
        for at in range(begin, last):
            here = visits[at - begin] * exactly[at]
            room = last - at  # tokens that are left
            visits[at + 1 - begin : at + len(here) - begin + 1] += here[:room]
            visits[-1] += here[room:].sum()
        steps, tokens = steps + float(visits[:-1].sum()), tokens + last - begin
    return steps, tokens


def _spans(batch: TrainBatch) -> Iterator[tuple[int, int]]:
    """Of each sequence: the entry that a walk begins at, and the sequence's end."""
    for first, end in pairwise(batch.starts):
        yield first + int(np.argmax(batch.loss_mask[first:end].cpu().numpy())), end
