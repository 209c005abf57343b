"""``layers:N`` says what plain decoding says, on a toy that notices slots some layers did not write and on the demo."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.common.files import cache_dir
from outpace.control.cost import Cost
from outpace.drafters.base import Drafter
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.forward.layers import LayersDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.engine import Engine
from outpace.engine.results import Result
from outpace.errors import DrafterError
from outpace.models import demo
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams
from tests.driving import finished
from tests.toy import ToyModel
from tests.truncate import truncated

PROMPTS = [[1, 2, 3, 1, 2], [0], [4, 4, 4, 4], [0, 1, 0, 2, 0, 3, 0], [2, 3] * 8]


def run(kind: str, params: SamplingParams, rows: int, **options: Any) -> list[Result]:
    target = ToyModel(5, layers=4, max_length=40)
    layers = LayersDrafter(target, 2)
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "layers": layers,
        "ngram+layers": ComposedDrafter([NgramDrafter(), layers]),
    }
    with Engine(
        target, drafter=drafters[kind], **{"size": 6, "max_rows": rows, "prefill_chunk": 5, **options}
    ) as engine:
        for i, prompt in enumerate(PROMPTS):  # the last of them runs into the end of the context
            engine.add(prompt, params.with_(seed=i, max_tokens=8 + 7 * i))
        return list(finished(engine).values())


@pytest.mark.parametrize("kind", ["layers", "ngram+layers"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [{}, {"prefix_rows": 2}, {"size": "auto", "cost": Cost((1, 64), (1.0, 2.0))}])
def test_equal_to_plain_decoding(kind: str, temperature: float, rows: int, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature)
    drafted = run(kind, params, rows, **options)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in run("none", params, rows)]
    if options.get("size") != "auto":  # which goes by the clock
        assert sum(r.stats.accepted for r in drafted) > 0


def test_greedy_rejection_is_plain_decoding_and_sampled_rejection_carries_q() -> None:
    drafted = run("layers", SamplingParams(), 3, acceptance="rejection")
    assert [r.token_ids for r in drafted] == [r.token_ids for r in run("none", SamplingParams(), 3)]
    sampled = run("layers", SamplingParams(temperature=1.0), 3, acceptance="rejection")
    assert sum(r.stats.accepted for r in sampled) > 0


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
