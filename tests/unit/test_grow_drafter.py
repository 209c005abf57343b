"""A padded drafter beside a padded target drafts what the small one does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.grow_drafter import grow
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import Config
from outpace.errors import DrafterError
from tests import learned

HIDDEN, FFN, HEADS = 24, 40, 6


def padded(values: Any) -> Any:
    return np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, HIDDEN - values.shape[-1])])


def pair(config: Config) -> tuple[tuple[Any, Any], tuple[Any, Any], Any]:
    """Config and tensors of a drafter and the padded one, with the target's rows; and the random numbers."""
    rng = np.random.default_rng(3)
    small = Checkpoint("eagle", config, learned.random_tensors(config))
    large = grow(small, HIDDEN, FFN, HEADS)
    hidden = config.decoder.hidden  # type: ignore[union-attr]
    rows = {
        "embed_tokens.weight": rng.normal(size=(config.vocab, hidden)),
        "lm_head.weight": rng.normal(size=(config.draft_vocab, hidden)),
    }
    wide = {name: padded(values) for name, values in rows.items()}
    return (config, {**small.tensors, **rows}), (large.config, {**large.tensors, **wide}), rng


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": False, "norm_before_fc": True}, {"norm_before_residual": True, "norm_output": False}]
)
def test_eagle(flags: dict[str, bool]) -> None:
    small, large, rng = pair(learned.eagle(**flags))
    taps, tokens = rng.normal(size=(5, 3, 8)), rng.integers(0, learned.VOCAB, 5)
    for one, other in zip(
        learned.eagle_steps(*small, taps, tokens), learned.eagle_steps(*large, padded(taps), tokens), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_parallel() -> None:
    small, large, rng = pair(learned.parallel())
    taps = rng.normal(size=(5, 3, 8))
    ours, theirs = learned.parallel_block(*small, taps, 4), learned.parallel_block(*large, padded(taps), 4)
    np.testing.assert_allclose(
        ours[1], theirs[1], rtol=1e-4, atol=1e-4
    )  # the norms of query and key heads share the epsilon
    before = rng.integers(0, learned.VOCAB, 4)
    for one, other in zip(
        learned.parallel_heads(*small, ours[0], before), learned.parallel_heads(*large, theirs[0], before), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_refused() -> None:
    config = learned.eagle()
    with pytest.raises(DrafterError, match="can only grow"):
        grow(Checkpoint("eagle", config, learned.random_tensors(config)), 4, FFN, HEADS)
    with pytest.raises(DrafterError, match="output rows of its own"):
        grow(Checkpoint("eagle", config, learned.random_tensors(config, head=True)), HIDDEN, FFN, HEADS)
    with pytest.raises(DrafterError, match="Medusa"):
        grow(Checkpoint("medusa", learned.medusa(), {}), HIDDEN, FFN, HEADS)
