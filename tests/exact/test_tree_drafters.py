"""Drafters of trees and compositions, and the target's own layers: the tokens of plain decoding, whatever happens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.common.files import cache_dir
from outpace.control.cost import Cost
from outpace.drafters.base import Drafter
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.forward.layers import LayersDrafter
from outpace.drafters.forward.lookahead import LookaheadDrafter
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.lookup.datastore import Datastore, build
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.recycling import RecyclingDrafter
from outpace.drafters.lookup.retrieval import RetrievalDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.engine.engine import Engine, Size
from outpace.engine.results import Result
from outpace.errors import DrafterError
from outpace.models import demo
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams
from tests.driving import finished
from tests.toy import ToyModel
from tests.truncate import truncated

VOCAB = 5


def target() -> ToyModel:
    return ToyModel(VOCAB, layers=4, max_length=56)


def datastore() -> Datastore:
    """Random tokens; its arrays outlive its folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(1).integers(0, VOCAB, 2000).tolist()
        return build(Path(folder) / "store", [tokens], vocabulary="v", model="toy")


def make(kind: str, target: ToyModel) -> Drafter:
    """``?``: a fallback of what stands before it."""
    each: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        "ngrams": lambda: NgramDrafter(candidates=4),
        "suffix": lambda: SuffixDrafter(memory=1 << 20),
        "chain": lambda: SuffixDrafter(tree=False),
        "history": lambda: SuffixDrafter(history=True),
        "recycle": RecyclingDrafter,
        "shared": lambda: RecyclingDrafter(history=True),
        "retrieval": lambda: RetrievalDrafter(datastore()),
        "lookahead": lambda: LookaheadDrafter(window=3, ngram=3, guesses=2),
        "bigrams": lambda: LookaheadDrafter(window=2, ngram=2),
        "layers": lambda: LayersDrafter(target, 2),
        "model": lambda: ModelDrafter(ToyModel(VOCAB, blur=0.3), "model", VOCAB),
    }
    names = kind.split("+")
    parts = [each[name.rstrip("?")]() for name in names]
    return parts[0] if len(parts) == 1 else ComposedDrafter(parts, [name.endswith("?") for name in names])


KINDS = [
    "ngrams", "suffix", "chain", "history", "recycle", "shared", "ngram+suffix", "suffix+recycle", "recycle+model",
    "ngrams+history+model", "suffix+model", "ngram+model?", "lookahead", "bigrams", "layers", "ngram+layers",
    "retrieval",
]  # fmt: skip
PROMPTS = [[1, 2, 3, 1, 2], [0], [4, 4, 4, 4], [0, 1, 0, 2, 0, 3, 0], [2, 3] * 8]


def run(kind: str | None, params: SamplingParams, size: Size = 6, **options: Any) -> list[Result]:
    """The last of them runs into the end of the context."""
    model = target()
    drafter = None if kind is None else make(kind, model)
    with Engine(model, drafter=drafter, size=size, **{"max_rows": 3, "prefill_chunk": 5, **options}) as engine:
        for i, p in enumerate(PROMPTS):
            engine.add(p, params.with_(seed=i, max_tokens=8 + 9 * i, n=1 + i % 2))
        return list(finished(engine).values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options", [{}, {"prefix_rows": 2, "max_rows": 1}, {"size": "auto", "cost": Cost((1, 64), (1.0, 2.0))}]
)
def test_equal_to_plain_decoding(kind: str, temperature: float, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature)
    plain = run(None, params)
    drafted = run(kind, params, **options)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    if options.get("size") != "auto":  # which goes by the clock
        assert sum(r.stats.accepted for r in drafted) > 0
    for result in drafted:
        assert sum(result.stats.accepted_by.values()) == result.stats.accepted
        assert set(result.stats.drafted_by) <= set(result.drafter.split("+"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("lookahead", "bigrams")])
def test_greedy_rejection_is_plain_decoding_too(kind: str) -> None:
    plain = run(None, SamplingParams())
    assert [r.token_ids for r in run(kind, SamplingParams(), acceptance="rejection")] == [r.token_ids for r in plain]


@pytest.mark.parametrize("kind", ["suffix", "recycle", "ngram+suffix", "suffix+model", "layers"])
def test_sampled_rejection_runs_beside_coupled_rows(kind: str) -> None:
    model = target()
    with Engine(model, drafter=make(kind, model), size=5, max_rows=4) as engine:
        params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
        plain = engine.generate(PROMPTS[0], params, drafter=False)
        engine.add(PROMPTS[1], params, acceptance="rejection")
        coupled = engine.add(PROMPTS[0], params)
        found = finished(engine)
        assert found[coupled, 0].token_ids == plain.token_ids
        assert sum(result.stats.drafted for result in found.values()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_rows_leave_nothing(kind: str) -> None:
    model = target()
    drafter = make(kind, model)
    params = SamplingParams(temperature=1.0, max_tokens=50)
    rng = np.random.default_rng(0)
    with Engine(model, drafter=drafter, size=6, max_rows=3) as engine:
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
    with Engine(target()) as engine:
        params = SamplingParams(temperature=1.0, max_tokens=50, seed=seed)
        return engine.generate([seed % VOCAB, 1, 2], params).token_ids


def test_a_drafting_forward_that_fails_costs_nothing_but_the_draft() -> None:
    params = SamplingParams(max_tokens=20)
    with Engine(ToyModel(5, layers=4)) as plain:
        expected = plain.generate([1, 2, 3], params).token_ids
    target = ToyModel(5, layers=4)
    with Engine(target, drafter=LayersDrafter(target, 1), size=4) as engine:
        engine.add([1, 2, 3], params)
        found = None
        for step in range(60):
            if step == 3:
                target.fail = "output"  # of the first drafting forward: its KV is written already
            for delta in engine.step():
                found = delta.result or found
            engine.check()
            if engine.idle:
                break
        assert found is not None
        assert found.token_ids == expected


@pytest.mark.parametrize("layers", [0, -1, 4, 99])
def test_a_number_of_layers_that_cannot_draft_is_refused(layers: int) -> None:
    with pytest.raises(DrafterError, match=rf"layers:{layers} is out of range for toy: draft with 1 to 3 of its 4"):
        LayersDrafter(ToyModel(layers=4), layers)


@pytest.mark.parametrize("backend", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_the_demo_model(backend: str) -> None:
    """The float32 reference has ten of its layers, since it takes 40 ms a token with all of them."""
    exact = backend == "native"
    options = LoadOptions(backend=backend, device="cpu", dtype="auto" if exact else "float32", threads=1)  # type: ignore[arg-type]
    model, tokenizer = load("demo" if exact else str(truncated(demo.smollm2(), 10, cache_dir())), options)
    prompts = ["Count from one to ten.", "Why is the sky blue?", "Repeat: to be or not to be."]
    with Engine(model, tokenizer, prefix_rows=0) as plain:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=12 if exact else 8, temperature=temperature, seed=5)
            expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
            for layers in (10, 22) if exact else (8,):
                engine = Engine(model, tokenizer, drafter=LayersDrafter(model, layers), size=4, prefix_rows=0)
                assert [engine.generate(prompts[0], params).token_ids] == expected[:1], layers
                together = engine.generate_many(prompts, params)
                engine.check()
                assert [r.token_ids for r in together] == expected, layers
                assert engine.stats.drafted > 0
