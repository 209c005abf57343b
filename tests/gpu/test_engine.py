"""Speculative against plain decoding on a card: identical in float32 up to near-ties, and counted in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.card import shapes
from outpace import Engine, SamplingParams
from outpace.drafters.base import DraftContext
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.learned.networks.eagle import TorchEagle
from outpace.drafters.registry import build, parse
from outpace.engine.request import StepRecord
from outpace.engine.results import Result
from outpace.exact.noise import Noise
from outpace.measure.same import compare
from outpace.models.base import Model
from outpace.models.options import LoadOptions
from outpace.models.torch.model import TransformersModel
from outpace.models.torch.output import TorchOutput
from tests import eagles

TEXT = shapes.text(5, 60, shapes.TINY.vocab)
PROMPTS = [TEXT[:40] + TEXT[at : at + 8] for at in (0, 3, 11, 20, 31)]  # what follows stands in the prompt
KINDS = {
    "greedy": SamplingParams(max_tokens=48),
    "sampled": SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=11),
}


def differences(
    engine: Engine, prompts: list[Any], params: SamplingParams, plain: list[Result], other: list[Result]
) -> list[Any]:
    assert all(result.finish_reason in ("stop", "length") for result in (*plain, *other))
    return [
        compare(engine, prompt, params, Noise(params.seed or 0), list(a.token_ids), list(b.token_ids))
        for prompt, a, b in zip(prompts, plain, other, strict=True)
    ]


@pytest.fixture(scope="module", params=KINDS)
def plain(request: pytest.FixtureRequest, target: Model) -> tuple[SamplingParams, list[Any], list[Result]]:
    engine = Engine(target, prefix_rows=0)  # several engines share the model, so none keeps rows of it
    prompts = [np.array(prompt, np.int32) for prompt in PROMPTS]
    params = KINDS[request.param]
    return params, prompts, [engine.generate(prompt, params) for prompt in prompts]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "batch"])
@pytest.mark.parametrize(
    ("drafter", "size"), [("ngram", 4), ("suffix", 12), ("ngram+suffix", 8), ("layers:3", 3), ("ngram", "auto")]
)
def test_float32_is_identical_up_to_near_ties(
    target: Model,
    plain: tuple[SamplingParams, list[Any], list[Result]],
    drafter: str,
    size: Any,
    together: bool,
    record_property: Any,
) -> None:
    params, prompts, expected = plain
    built = build(parse(drafter), DraftContext(target, None, LoadOptions(), 12))
    engine = Engine(target, drafter=built, size=size, prefix_rows=0)
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    found = [result for group in groups for result in engine.generate_many(group, params)]
    engine.check()
    parted = [d for d in differences(engine, prompts, params, expected, found) if d is not None]
    record_property("near_ties", len(parted))
    assert not [str(d) for d in parted if not d.near_tie]
    assert size == "auto" or sum(result.stats.accepted for result in found) > 0


@pytest.mark.parametrize("there", [False, True], ids=["chosen on the host", "chosen where the logits are"])
def test_near_ties_are_counted_while_decoding(device: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer that is known, one token has a rival with the same weights."""
    made = TorchOutput.__init__
    if there:

        def on_device(output: TorchOutput, *given: Any) -> None:
            made(output, *given)
            output._on_device = True

        monkeypatch.setattr(TorchOutput, "__init__", on_device)
    answer = shapes.text(5 + 40 * shapes.STRIDE, 24, shapes.TINY.vocab)
    prompt = shapes.text(5, 40, shapes.TINY.vocab)
    rival = max(set(range(shapes.TINY.vocab)) - {*prompt, *answer})
    found = []
    for strict in (False, True):
        module = shapes.llama(shapes.TINY, torch.device(device), torch.float32)
        module.lm_head.weight.data[rival] = module.lm_head.weight.data[answer[9]]
        model = TransformersModel(module, name="m", strict=strict)
        for drafter in (None, shapes.Oracle(shapes.TINY.vocab, 0.7)):
            records: list[StepRecord] = []
            engine = Engine(model, drafter=drafter, size=5, prefix_rows=0, on_step=records.append)
            result = engine.generate(prompt, SamplingParams(max_tokens=24))
            assert list(result.token_ids) == answer
            traced = [row for record in records for row in record.rows]
            rival_there = [row.start <= len(prompt) + 9 < row.start + row.gained for row in traced]
            assert [row.near_ties for row in traced] == [int(hit and not strict) for hit in rival_there]
            assert engine.stats.near_ties == result.stats.to_dict()["near_ties"] == result.stats.near_ties
            assert ("; 1 near-tie" in repr(result)) == (result.stats.near_ties == 1)
            found.append(result.stats.near_ties)
        model.close()
    assert found == [1, 1, 0, 0]


def test_a_drafter_that_reads_hidden_states_on_the_card(target: Model) -> None:
    """Of random weights: what it drafts means little, what is said is the target's."""
    params = SamplingParams(max_tokens=16)
    plain = Engine(target, prefix_rows=0)
    checkpoint = eagles.random(target, range(0, target.info.vocab_size, 16), (1, 2, 4), fc_norm=True)
    drafter = LearnedDrafter(TorchEagle(target, checkpoint), (1, 2, 4), "eagle", target.info.vocab_size)
    engine = Engine(target, drafter=drafter, size=3, prefix_rows=0)
    for prompt in PROMPTS[:2]:
        expected, found = plain.generate(prompt, params), engine.generate(prompt, params)
        engine.check()
        its = [differences(plain, [np.array(prompt, np.int32)], params, [expected], [found])[0]]
        assert all(d is None or d.near_tie for d in its)
        assert found.stats.drafted > 0
    drafter.close()
