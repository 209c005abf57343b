"""What a learned drafter's rows know of text that another row computed: samples, running rows and kept ones."""

from __future__ import annotations

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace.drafters.learned.drafter import LearnedDrafter
from tests.toy import ToyModel
from tests.toy_head import ToyHead

VOCAB = 6
TEXT = np.random.default_rng(3).integers(0, VOCAB, 60).tolist()
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True)


def engine(prefix_rows: int = 2) -> tuple[Engine, ToyHead]:
    target = ToyModel(VOCAB, seed=1, max_length=96)
    head = ToyHead(ToyModel(VOCAB, seed=1), range(VOCAB))
    drafter = LearnedDrafter(head, (0, 2), "eagle", VOCAB)
    return Engine(target, drafter=drafter, size=4, prefix_rows=prefix_rows, prefill_chunk=16), head


def positions(head: ToyHead) -> list[list[int]]:
    return [[position for _, position, _ in head.rows[row]] for row in sorted(head.rows)]


@pytest.mark.parametrize("second", [[*TEXT[:40], *[5, 1, 4, 4]], TEXT[:40], [*TEXT[:33], (TEXT[33] + 1) % VOCAB, 2, 3]])
def test_a_kept_row_spares_a_drafter_the_prompt_too(second: list[int]) -> None:
    """Also where texts part in its middle: the token where they do is the new text's own."""
    served, head = engine()
    served.generate(TEXT[:40], PARAMS)
    assert len(positions(head)[0]) >= 39
    head.calls.clear()
    served.add(second, PARAMS)
    for _ in range(8):
        served.step()
        served.check()
        if not served.idle and any(kind == "draft" for kind, _ in head.calls[-1:]):
            break
    new = positions(head)[-1]
    assert new == list(range(len(new)))
    assert len(new) >= len(second) - 1
    while not served.idle:
        served.step()
        served.check()
    served.close()
    assert head.rows == {}


def test_samples_draft_from_one_reading_of_the_prompt() -> None:
    served, head = engine(prefix_rows=0)
    served.add(TEXT, PARAMS.with_(n=3))
    while not served.idle:
        served.step()
        served.check()
        assert all(its == list(range(len(its))) for its in positions(head))
    assert served.stats.accepted > 0
    served.close()


def test_a_kept_row_without_memory_goes() -> None:
    served, head = engine(prefix_rows=1)
    for stem in (TEXT[:30], TEXT[30:], TEXT[10:40]):
        served.generate(stem, PARAMS)
        served.check()
        assert len(head.rows) == 1
    served.close()
    assert head.rows == {}
