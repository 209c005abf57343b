"""KV in blocks with a real model: a common beginning is held and computed once, memory is taken as rows grow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace.common.arrays import I32
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.models.base import Model
from outpace.models.load import load
from outpace.models.options import LoadOptions

LONG = 1000


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    loaded, _ = load("demo", LoadOptions(threads=1, max_length=2048))
    yield loaded
    loaded.close()


def text(n: int, seed: int = 0) -> I32:
    """Tokens that repeat themselves, so that lookups have something to draft."""
    return np.resize(np.random.default_rng(seed).integers(1000, 20_000, 60), n).astype(np.int32)


def run(engine: Engine, requests: list[int]) -> tuple[dict[tuple[int, int], tuple[int, ...]], int]:
    """Every request's tokens, and the most bytes of KV that were in use."""
    found, most = {}, 0
    while not engine.idle:
        for delta in engine.step():
            if delta.result is not None:
                assert delta.result.error is None, delta.result.error
                found[delta.request, delta.sample] = delta.result.token_ids
        engine.check()
        most = max(most, engine.model.kv.bytes)
    assert {request for request, _ in found} == set(requests)
    return found, most


def test_sixteen_requests_hold_a_common_beginning_once(model: Model) -> None:
    engine = Engine(model, drafter=NgramDrafter(), size=3, max_rows=16, prefix_rows=0)
    prefix = text(LONG)
    prompts = [np.append(prefix, [500 + i, 7]).astype(np.int32) for i in range(16)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    together, most = run(engine, [engine.add(prompt.tolist(), params) for prompt in prompts])
    block = model.kv.bytes_for(1)
    assert most <= model.kv.bytes_for(LONG) + 16 * 2 * block
    assert engine.stats.reused_tokens >= 15 * LONG // 64 * 64
    alone = [
        engine.generate(prompt.tolist(), params, drafter=False, reuse_prefix=False).token_ids for prompt in prompts[::5]
    ]
    assert [together[i, 0] for i in range(0, 16, 5)] == alone
    assert model.kv.rows == []


def test_eight_samples_cost_one_prefill(model: Model) -> None:
    engine = Engine(model, drafter=NgramDrafter(), size=3, prefix_rows=0)
    params = SamplingParams(max_tokens=4, n=8, temperature=1.0, seed=1, ignore_eos=True)
    results = engine.generate_many([text(300).tolist()], params)
    assert [r.stats.reused_tokens for r in results] == [0, *[299] * 7]
    assert len({r.token_ids for r in results}) > 1


def test_a_third_of_the_worst_case_finishes_32_mixed_requests_as_unbounded_memory_does(model: Model) -> None:
    asked = []
    for i in range(32):
        prompt = text(20 + 13 * (i % 7), seed=i % 3).tolist()
        asked.append(
            (prompt, SamplingParams(max_tokens=60 + 5 * (i % 5), temperature=0.8 * (i % 2), seed=i, ignore_eos=True))
        )
    worst = sum(sorted(model.kv.bytes_for(len(prompt) + (params.max_tokens or 0)) for prompt, params in asked)[-16:])
    found = []
    for memory in (None, worst // 3):
        engine = Engine(model, drafter=SuffixDrafter(), size=5, max_rows=16, prefix_rows=0, kv_memory=memory)
        requests = [engine.add(prompt, params, reuse_prefix=False) for prompt, params in asked]
        tokens, most = run(engine, requests)
        assert memory is None or most <= memory
        found.append((tokens, engine.stats.preemptions))
    assert found[0][0] == found[1][0]
    assert found[1][1] > 0 == found[0][1]


def test_each_request_may_choose_its_drafter(model: Model) -> None:
    ngram, suffix = NgramDrafter(), SuffixDrafter()
    engine = Engine(model, drafter=ngram, drafters={"suffix": suffix}, size=4, prefix_rows=0)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = text(120).tolist()
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
