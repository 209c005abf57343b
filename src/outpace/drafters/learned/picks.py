"""What a draft's tokens are picked by, on the host: logits, and the request's noise where it is shared."""

from __future__ import annotations

import numpy as np

from outpace.common.arrays import F32, F64, I32
from outpace.exact.noise import Stream
from outpace.exact.sampling import Chooser, filtered

RIVALS = 8  # tokens that a chance is shared among, at least, where noise decides


def likeliest(logits: F32, k: int) -> tuple[list[int], list[float]]:
    """The ``k`` tokens of the largest logits float32 [D], best first, the lower on ties, and the logarithms of their
    probabilities."""
    best = _largest(logits, k)
    peak = logits[best[0]]
    total = np.log(np.exp(logits.astype(np.float64) - peak).sum())
    return best.tolist(), (logits[best].astype(np.float64) - peak - total).tolist()


def chosen(logits: F32, ids: I32, chooser: Chooser, level: int, k: int) -> tuple[list[int], list[float]]:
    """The ``k`` tokens of the largest log q + g, best first, of logits float32 [D], and the logarithms of the chances.

    g is the noise that the target will choose with at that output index; q has the request's temperature and filters.
    A token's chance is its share of exp(log q + g) among the best: the noise is known, so what can still part drafter
    and target is how far their logits differ, against the distance between scores. q itself says little of it: where
    the noise has chosen an unlikely token, the target chooses it, too (docs/notebook.md).
    """
    kept = filtered(logits, chooser.params)
    scaled: F64 = logits[kept].astype(np.float64) / chooser.params.temperature
    # numpy's logarithm, not the noise's own: its last bits decide nothing that can show in the output.
    scores = scaled - np.log(-np.log(chooser.noise.uniform(chooser.index + level, ids[kept], Stream.CHOICE)))
    best = _largest(scores, max(k, RIVALS))
    gains = scores[best] - scores[best[0]]
    gains -= np.log(np.exp(gains).sum())
    return kept[best[:k]].tolist(), gains[:k].tolist()


def _largest(values: F32 | F64, k: int) -> I32:
    """Indices int32 of the ``k`` largest of [n], in order, the lower on ties."""
    n = len(values)
    some = np.flatnonzero(values >= np.partition(values, n - k)[n - k]) if k < n else np.arange(n)
    best: I32 = some[np.lexsort((some, -values[some]))][:k].astype(np.int32)
    return best
