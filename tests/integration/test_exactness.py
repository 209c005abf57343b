"""The demo model: drafting gives the tokens of plain decoding. A slice; ``scripts/prove`` runs the full matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outpace.common.files import cache_dir
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.engine.engine import Engine
from outpace.engine.intake import load_engines
from outpace.exact.noise import Noise
from outpace.measure.same import compare
from outpace.models import demo
from outpace.models.base import Model
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams
from tests.truncate import truncated

PROMPTS = [
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a short poem about rivers and the sea.",
    "def fibonacci(n):",
    "Translate to French: the cat sat on the mat. The cat sat on the hat.",
    "Hi",
    "List the planets of the solar system, then list them again in reverse order.",
    "What is 12 times 12? Explain step by step, and check the result.",
]
BACKENDS = ["transformers", "native"]


def first_layers(layers: int) -> Path:
    return truncated(demo.smollm2(), layers, cache_dir())


@pytest.fixture(scope="module", params=BACKENDS)
def engines(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    """ngram and an imperfect draft model (the target's first layers) over one target: the demo model, of which the
    float32 reference has ten layers, since it takes 40 ms a token with all of them."""
    target, layers = ("demo", 22) if request.param == "native" else (str(first_layers(10)), 8)
    drafters = ["ngram", f"model:{first_layers(layers)}"]
    loaded = load_engines(Engine, target, drafters, {"backend": request.param, "size": 8, "threads": 1})
    yield loaded
    for engine in loaded:
        engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_tokens_whatever_drafts(engines: list[Engine], temperature: float) -> None:
    exact = engines[0].model.info.backend == "native"
    prompts = [engines[0].encode(text) for text in (PROMPTS if exact else PROMPTS[:4])]
    length = 24 if exact else 10
    params = [SamplingParams(temperature=temperature, max_tokens=length, seed=50 + i) for i in range(len(prompts))]
    plain = [engines[0].generate(p.tolist(), its, drafter=False) for p, its in zip(prompts, params, strict=True)]
    identical = ties = 0
    for engine in engines:
        for size, batch in ((1, 7), (4, 1), (8, 7)) if exact else ((4, 1), (8, 7)):
            some = range(len(prompts)) if batch > 1 else range(2)
            groups = [some] if batch > 1 else [[i] for i in some]
            results = [
                result
                for group in groups
                for result in engine.generate_many(
                    [prompts[i].tolist() for i in group], [params[i] for i in group], size=size
                )
            ]
            engine.check()
            for i, result in zip(some, results, strict=True):
                noise, answers = Noise(plain[i].seed), (plain[i].token_ids, result.token_ids)
                difference = compare(engine, prompts[i], params[i], noise, *answers)
                assert difference is None or (difference.near_tie and not exact), f"{PROMPTS[i]!r}: {difference}"
                identical, ties = identical + (difference is None), ties + (difference is not None)
    assert all(engine.stats.accepted for engine in engines), "nothing was accepted, so nothing was tested"
    print(f"{engines[0].model.info.backend}, T={temperature}: identical {identical}, near-ties {ties}")


def test_rejection_runs_on_the_real_model(engines: list[Engine]) -> None:
    length = 16 if engines[0].model.info.backend == "native" else 8
    for engine in engines:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=length)
        assert engine.generate(PROMPTS[5], params, acceptance="rejection").completion_tokens
        greedy = SamplingParams(max_tokens=length)
        exact = engine.generate(PROMPTS[5], greedy, acceptance="rejection")  # greedy is exact under every rule
        assert exact.token_ids == engine.generate(PROMPTS[5], greedy, drafter=False).token_ids


def test_greedy_is_what_transformers_generate_gives() -> None:
    import torch

    from outpace.models.torch import gguf as gguf_transformers
    from outpace.models.weights.gguf import GGUFFile

    module = gguf_transformers.build(GGUFFile.open(demo.smollm2()), torch.float32, torch.device("cpu")).eval()
    with Engine.load("demo", drafter="ngram", backend="transformers", threads=1) as engine:
        for text in PROMPTS[:2]:
            prompt = engine.encode(text)
            params = SamplingParams(max_tokens=20)
            mine = engine.generate(prompt.tolist(), params).token_ids
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            with torch.inference_mode():
                out = module.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=20,
                    do_sample=False,
                    eos_token_id=list(engine.model.info.eos_ids),
                    pad_token_id=engine.model.info.eos_ids[0],
                )
            theirs = out[0, len(prompt) :].tolist()
            difference = compare(engine, prompt, params, Noise(0), mine, theirs)
            assert difference is None or difference.near_tie, f"{text!r}: {difference}"


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
