"""Every keyword of transformers' ``generate``, with values of every kind, plain and patched: the same answer, or the
same kind of error. The keywords are those of the release that is installed; scripts/transformers tries several."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMixin
from transformers.utils.generic import TransformersKwargs

import outpace

from .test_architectures import COMMON, tiny

PROMPT = torch.tensor([[3, 5, 9, 4, 5, 9, 4]])
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
SAMPLED: dict[str, Any] = {
    "max_new_tokens": 3, "do_sample": True, "return_dict_in_generate": True, "output_scores": True
}  # fmt: skip
ASSISTED = GREEDY | {"prompt_lookup_num_tokens": 2}


class Words(list[int]):
    """A streamer."""

    def put(self, tokens: torch.Tensor) -> None:
        self.extend(tokens.flatten().tolist())

    def end(self) -> None:
        self.append(-1)


def shifted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that depends on the last token."""
    scores = scores.clone()
    scores[torch.arange(len(ids)), (ids[:, -1] + 1) % scores.shape[1]] += 1.5
    return scores


def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > PROMPT.shape[1] + 1:
        raise ZeroDivisionError
    return scores


def ended(ids: torch.Tensor, _: Any) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] > PROMPT.shape[1] + 2)


def cache_of(model: Any, tokens: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    if tokens:
        name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(model.forward).parameters)
        with torch.no_grad():
            model(PROMPT[:, :tokens], **{name: cache})
    return cache


def plain() -> list[Any]:
    """Values of every kind that fields of GenerationConfig take."""
    return [
        None, False, True, 0, 2, 0.5, 1.5, "static", "quantized", [], [5, 6], [[5, 6], [9]], [[[5], 2.0]], (6, 1.2),
        {}, {"greenlist_ratio": 0.5},
    ]  # fmt: skip


def objects(model: Any, assistant: Any) -> list[Callable[[], Any]]:
    """What makes a value of every kind that other keywords take; anew for every call, since a call may change it."""
    return [
        lambda: LogitsProcessorList([shifted]),
        lambda: LogitsProcessorList([broken]),
        lambda: StoppingCriteriaList([ended]),
        Words,
        lambda: assistant,
        lambda: shifted,
        lambda: lambda row, ids: [3 + row, 8, 11, int(ids[-1]) % 40],
        lambda: GenerationConfig(max_new_tokens=4, no_repeat_ngram_size=2),
        lambda: GenerationConfig(max_new_tokens=4, num_beams=2),
        partial(cache_of, model, 0),
        partial(cache_of, model, 4),
        PROMPT.clone,
        lambda: torch.ones_like(PROMPT),
        lambda: torch.tensor([[0, 0, 1, 1, 1, 1, 1]]),
        lambda: torch.tensor([[1, 1, 0, 1, 1, 1, 1]]),
        lambda: torch.zeros_like(PROMPT),
        lambda: torch.arange(PROMPT.shape[1])[None],
        lambda: torch.linspace(-1, 1, 7 * 32).reshape(1, 7, 32),
    ]


def fields() -> set[str]:
    """Of GenerationConfig."""
    return {name for name in vars(GenerationConfig()) if name[0] != "_"} - {"transformers_version"}


def arguments(model: Any) -> set[str]:
    """Of ``generate``, of its loop, and of the model's forward."""
    functions = (GenerationMixin.generate, GenerationMixin._sample, model.forward)
    named = {name for function in functions for name in inspect.signature(function).parameters}
    named |= {*TransformersKwargs.__optional_keys__, "not_a_keyword"}
    return named - fields() - {"self", "kwargs", "model_kwargs"}


def outcome(generate: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The tokens or outputs, or the error; and what a streamer got, and a cache holds."""
    torch.manual_seed(3)
    ids = {} if {"inputs", "input_ids"} & given.keys() else {"inputs": PROMPT.clone()}
    try:
        answer = generate(**ids, **given)
    except Exception as error:
        return type(error), None
    seen = [list(value) for value in given.values() if isinstance(value, Words)]
    seen += [int(value.get_seq_length()) for value in given.values() if isinstance(value, DynamicCache)]
    return answer, seen


def require_same(found: Any, expected: Any, noise: bool) -> None:
    """``noise``: tokens were drawn by another noise, so that the first token's scores must do."""
    if isinstance(expected[0], type):
        assert found[0] is expected[0], f"{found[0]} rather than {expected[0]}"
        return
    assert type(found[0]) is type(expected[0]), f"{found[0]} rather than {expected[0]}"
    assert noise or found[1] == expected[1], f"{found[1]} rather than {expected[1]}"
    if isinstance(expected[0], torch.Tensor):
        assert noise or torch.equal(found[0], expected[0]), f"{found[0]} rather than {expected[0]}"
        return
    if not noise:
        assert torch.equal(found[0].sequences, expected[0].sequences)
    for name in ("scores", "logits", "attentions", "hidden_states"):
        one, other = (flat(getattr(output[0], name, None))[: 1 if noise else None] for output in (found, expected))
        assert len(one) == len(other), name
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


def flat(value: Any) -> list[torch.Tensor]:
    if value is None or isinstance(value, torch.Tensor):
        return [] if value is None else [value]
    return [tensor for part in value for tensor in flat(part)]


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny("llama", num_hidden_layers=2)
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = 0, 2
    return made


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No ``max_time`` is over, and nothing but the first words about it is logged."""
    monkeypatch.setattr("time.time", lambda: 1e9)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")  # transformers warns of most values
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    ("base", "of"),
    [(GREEDY, "fields"), (GREEDY, "arguments"), (SAMPLED, "fields"), (ASSISTED, "fields")],
    ids=["greedy", "greedy-arguments", "sampled", "assisted"],
)
def test_every_keyword_means_what_it_means_unpatched(model: Any, base: dict[str, Any], of: str) -> None:
    own, assistant = partial(type(model).generate, model), tiny("llama", num_hidden_layers=1)
    makers = [partial(copy.copy, value) for value in plain()]
    names = fields()
    if of == "arguments":
        makers, names = [*makers, *objects(model, assistant)], arguments(model)
    drafted: set[str] = set()
    wrong = []
    with outpace.patch(model, size=4) as patched:
        for name, make in product(sorted(names), makers):
            undrafted = sum(patched.stats.own.values())
            expected = outcome(own, base | {name: make()})
            found = outcome(model.generate, base | {name: make()})
            if base is ASSISTED and isinstance(expected[0], type) and found[0] is not expected[0]:
                expected = outcome(own, GREEDY | {name: make()})  # own assistance refuses what is drafted here
            was_drafted = sum(patched.stats.own.values()) == undrafted
            if was_drafted and not isinstance(expected[0], type):
                drafted.add(name)
            sampled = (base | {name: make()})["do_sample"] not in (False, None)
            try:
                require_same(found, expected, sampled and was_drafted)
            except AssertionError as error:
                wrong.append(f"{name}={make()!r:.60}: {error!s:.200}")
    assert not wrong, "\n".join(wrong)
    assert len(drafted) > (40 if of == "fields" else 10)


def test_images_and_text_alone() -> None:
    """A class for images: text alone is drafted, and images go to the model's own generate."""
    text = {**COMMON, "num_hidden_layers": 2, "model_type": "llama"}
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32,
    }  # fmt: skip
    torch.manual_seed(3)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=90)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    image = torch.tensor([[3, 90, 90, 90, 90, 9, 4]])
    asked: list[dict[str, Any]] = [
        {"input_ids": PROMPT},
        {"input_ids": image, "pixel_values": torch.linspace(0, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)},
    ]
    with outpace.patch(model, size=4) as patched:
        for number, given in enumerate(asked):
            expected = type(model).generate(model, **given, **GREEDY)
            assert torch.equal(model.generate(**given, **GREEDY), expected)
            assert patched.stats.own == ({"pixel_values": 1} if number == 1 else {})
