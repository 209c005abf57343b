"""Drafters of trees and compositions, through the engine: the tokens of plain decoding, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.control.cost import Cost
from outpace.drafters.base import Drafter
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.forward.lookahead import LookaheadDrafter
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.recycling import RecyclingDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.engine.engine import Engine, Size
from outpace.engine.results import Result
from outpace.params import SamplingParams
from tests.driving import finished
from tests.toy import ToyModel

VOCAB = 5


def make(kind: str) -> Drafter:
    model = ModelDrafter(ToyModel(VOCAB, blur=0.3), "model", VOCAB) if "model" in kind else None
    each: dict[str, Drafter | None] = {
        "ngram": NgramDrafter(),
        "ngrams": NgramDrafter(candidates=4),
        "suffix": SuffixDrafter(memory=1 << 20),
        "chain": SuffixDrafter(tree=False),
        "history": SuffixDrafter(history=True),
        "recycle": RecyclingDrafter(),
        "shared": RecyclingDrafter(history=True),
        "lookahead": LookaheadDrafter(window=3, ngram=3, guesses=2),
        "bigrams": LookaheadDrafter(window=2, ngram=2),
        "model": model,
    }
    names = kind.split("+")
    parts = [part for name in names if (part := each[name.rstrip("?")]) is not None]
    return parts[0] if len(parts) == 1 else ComposedDrafter(parts, [name.endswith("?") for name in names])


KINDS = [
    "ngrams",
    "suffix",
    "chain",
    "history",
    "recycle",
    "shared",
    "ngram+suffix",
    "suffix+recycle",
    "recycle+model",
    "ngrams+history+model",
    "suffix+model",
    "ngram+model?",
    "lookahead",
    "bigrams",
]
PROMPTS = [[1, 2, 3, 1, 2], [0], [4, 4, 4, 4], [0, 1, 0, 2, 0, 3, 0], [2, 3] * 8]


def run(drafter: Drafter | None, params: SamplingParams, size: Size = 6, **options: object) -> list[Result]:
    with Engine(ToyModel(VOCAB), drafter=drafter, size=size, max_rows=3, prefill_chunk=5, **options) as engine:  # type: ignore[arg-type]
        requests = [
            engine.add(p, params.with_(seed=i, max_tokens=8 + 9 * i, n=1 + i % 2)) for i, p in enumerate(PROMPTS)
        ]
        results = finished(engine)
        assert {request for request, _ in results} == set(requests)
        return list(results.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"prefix_rows": 2}, {"size": "auto", "cost": Cost((1, 64), (1.0, 2.0))}])
def test_equal_to_plain_decoding(kind: str, temperature: float, options: dict[str, object]) -> None:
    params = SamplingParams(temperature=temperature)
    plain = run(None, params)
    drafted = run(make(kind), params, **options)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    if options.get("size") != "auto":  # which goes by the clock
        assert sum(r.stats.accepted for r in drafted) > 0
    for result in drafted:
        assert sum(result.stats.accepted_by.values()) == result.stats.accepted
        assert set(result.stats.drafted_by) <= set(result.drafter.split("+"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("lookahead", "bigrams")])
def test_greedy_rejection_is_plain_decoding_too(kind: str) -> None:
    plain = run(None, SamplingParams())
    assert [r.token_ids for r in run(make(kind), SamplingParams(), acceptance="rejection")] == [
        r.token_ids for r in plain
    ]


@pytest.mark.parametrize("kind", ["suffix", "recycle", "ngram+suffix", "suffix+model"])
def test_sampled_rejection_runs_beside_coupled_rows(kind: str) -> None:
    with Engine(ToyModel(VOCAB), drafter=make(kind), size=5, max_rows=4) as engine:
        params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
        plain = engine.generate(PROMPTS[0], params, drafter=False)
        engine.add(PROMPTS[1], params, acceptance="rejection")
        coupled = engine.add(PROMPTS[0], params)
        assert finished(engine)[coupled, 0].token_ids == plain.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_rows_leave_nothing(kind: str) -> None:
    drafter = make(kind)
    params = SamplingParams(temperature=1.0, max_tokens=60)
    rng = np.random.default_rng(0)
    with Engine(ToyModel(VOCAB), drafter=drafter, size=6, max_rows=3) as engine:
        alive: dict[int, int] = {}
        expected = {s: run_one(s) for s in range(6)}
        for seed in range(6):
            alive[engine.add([seed % VOCAB, 1, 2], params.with_(seed=seed))] = seed
            for delta in (d for _ in range(3) for d in engine.step()):
                if delta.result is not None:
                    assert delta.result.token_ids == expected[alive.pop(delta.request)]
            engine.check()
            if rng.random() < 0.5 and alive:
                victim = int(rng.choice(list(alive)))
                seed_of = alive.pop(victim)
                (last,) = engine.cancel(victim)
                assert last.result is not None
                assert last.result.token_ids == expected[seed_of][: len(last.result.token_ids)]
                engine.check()
        while not engine.idle:
            for delta in engine.step():
                if delta.result is not None:
                    assert delta.result.token_ids == expected[alive.pop(delta.request)]
            engine.check()
        drafter.check([])
    if kind == "suffix":
        assert isinstance(drafter, SuffixDrafter)
        assert drafter.places == 0


def run_one(seed: int) -> tuple[int, ...]:
    with Engine(ToyModel(VOCAB)) as engine:
        return engine.generate(
            [seed % VOCAB, 1, 2], SamplingParams(temperature=1.0, max_tokens=60, seed=seed)
        ).token_ids
