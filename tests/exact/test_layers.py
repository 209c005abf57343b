"""``layers:N`` says what plain decoding says, on a toy that notices slots some layers did not write and on the demo."""

from __future__ import annotations

import pytest

from outpace.common.files import cache_dir
from outpace.drafters.forward.layers import LayersDrafter
from outpace.engine.engine import Engine
from outpace.errors import DrafterError
from outpace.models import demo
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams
from tests.toy import ToyModel
from tests.truncate import truncated


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
