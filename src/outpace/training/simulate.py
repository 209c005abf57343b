"""What a chain would have brought on a recorded greedy answer, without running the target again.

A greedy answer is what the target says after each of its own prefixes, so a draft is right where it equals the answer;
and since nothing after a wrong token counts, feeding the answer's own tokens is the same as feeding the draft's.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from outpace.training.objective import Simulated, TrainBatch

Flags = npt.NDArray[np.bool_]


def walk(batch: TrainBatch, right: Flags, tried: Flags) -> Simulated:
    """``right`` bool [N, k]: whether the chain drafted after entry i has its token s right; ``tried``: it exists.

    A row begins with the prompt and one token, whose entry is the first in ``loss_mask``, and goes on by what was
    accepted and one more, as serving does.
    """
    depth = right.shape[1]
    accepted = np.logical_and.accumulate(right, 1).sum(1)
    steps = tokens = 0
    starting = np.zeros(len(batch), bool)
    for first, end in pairwise(batch.starts):
        begin = first + int(np.argmax(batch.loss_mask[first:end].numpy()))
        starting[begin : end - 2] = True
        at = begin
        while at + 2 < end:
            gained = min(int(accepted[at]) + 1, end - at - 2)
            steps, tokens, at = steps + 1, tokens + gained, at + gained
    before = np.arange(depth)[None, :] <= accepted[:, None]
    asked = before & tried & starting[:, None]
    return Simulated(steps, tokens, asked.sum(0), (asked & right).sum(0))
