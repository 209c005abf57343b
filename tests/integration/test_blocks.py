"""Requests of one engine that each choose their drafter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.models.base import Model
from outpace.models.load import load
from outpace.models.options import LoadOptions


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    loaded, _ = load("demo", LoadOptions(threads=1, max_length=2048))
    yield loaded
    loaded.close()


def test_each_request_may_choose_its_drafter(model: Model) -> None:
    ngram, suffix = NgramDrafter(), SuffixDrafter()
    engine = Engine(model, drafter=ngram, drafters={"suffix": suffix}, size=4, prefix_rows=0)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = np.random.default_rng(0).integers(1000, 20_000, 60).tolist() * 2  # so that lookups have something to draft
    chosen = {engine.add(prompt, params, drafter=name): name for name in ("suffix", "ngram", False, None)}
    sources = {}
    while not engine.idle:
        for delta in engine.step():
            if delta.result is not None:
                sources[chosen[delta.request]] = (delta.result.token_ids, set(delta.result.sources) - {"target"})
        engine.check()
    assert len({tokens for tokens, _ in sources.values()}) == 1
    assert {name: who for name, (_, who) in sources.items()} == {
        "suffix": {"suffix"}, "ngram": {"ngram"}, False: set(), None: {"ngram"},
    }  # fmt: skip
    with pytest.raises(ValueError, match="is not loaded: this engine has ngram, suffix, none"):
        engine.add(prompt, drafter="eagle")
