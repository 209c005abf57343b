"""An answer replayed is the same under other drafters and another batch; one altered token is always caught. What else
is compared, or refused: test_replay_route.py."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest

from outpace import Engine, Result, SamplingParams
from outpace._fast import native
from outpace.engine.aio import AsyncEngine
from outpace.measure.same import Difference, Output, difference
from outpace.server.api.replay import prepared, watching
from outpace.server.engines.models import system_fingerprint
from tests.native.native_helpers import Tiny

PROMPTS = [[5 + i, 9, 30, 5 + i, 9, 77] for i in range(10)]
PARAMS = [
    SamplingParams(max_tokens=8, logprobs=True),
    SamplingParams(max_tokens=8, logprobs=True, temperature=0.9, seed=3),
    SamplingParams(max_tokens=10, temperature=1.3, top_p=0.9, top_k=40, seed=4, presence_penalty=0.5, min_tokens=9),
    SamplingParams(max_tokens=8, logprobs=True, temperature=0.7, seed=5, n=2, logit_bias={7: 2.0}, min_p=0.02),
    SamplingParams(max_tokens=10, temperature=1.0, seed=6, stop_ids=(3, 11, 19), repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with Tiny() as tiny:
        yield str(tiny.path("Q8_0", tokenizer=1, vocab=180))


@pytest.fixture(scope="module")
def answers(path: str) -> list[tuple[list[int], SamplingParams, list[Result]]]:
    """50 answers and more, one at a time, decoded plainly."""
    with Engine.load(path, drafter="none") as engine:
        return [(prompt, params, engine.generate_many([prompt], params)) for prompt in PROMPTS for params in PARAMS]


async def replay(
    serving: AsyncEngine,
    prompt: list[int],
    params: SamplingParams,
    recorded: list[Output],
    acceptance: str = "coupled",
) -> list[Difference | None]:
    """What ``POST /v1/replay`` does, on an engine."""
    prompts = [np.array(prompt, np.int32)]
    again, options = prepared(serving.engine, prompts, params, recorded, acceptance)
    results = await serving.generate_many([prompt], again, errors="return", **options)
    found = [difference(answer, Output.of(result)) for answer, result in zip(recorded, results, strict=True)]
    second = watching(serving.engine, prompts, params, recorded, found)
    if second is None:
        return found
    closer, drafted = second
    await serving.generate_many([prompt], closer, errors="return", **options)
    return drafted.measured(found, params, results)


@pytest.mark.parametrize("drafter", ["ngram:size=8", "none"])
def test_all_are_identical_and_each_altered_token_is_caught(
    path: str, answers: list[tuple[list[int], SamplingParams, list[Result]]], drafter: str
) -> None:
    rng = random.Random(drafter)

    async def scenario() -> None:
        async with AsyncEngine(Engine.load(path, drafter=drafter, max_rows=7, prefill_chunk=3)) as engine:
            recorded = [[Output.of(result) for result in results] for _, _, results in answers]
            for its, (_, params, _) in zip(recorded, answers, strict=True):
                if not params.wants_logprobs:
                    its[:] = [dataclasses.replace(said, logprobs=None) for said in its]
            found = await asyncio.gather(
                *(
                    replay(engine, prompt, params, its)
                    for (prompt, params, _), its in zip(answers, recorded, strict=True)
                )
            )
            assert [d for its in found for d in its] == [None] * sum(params.n for _, params, _ in answers)
            assert ((await engine.stats()).tokens_per_step > 3) == (drafter != "none"), "what was said was not drafted"
            if drafter == "none":
                return
            altered, where = [], []
            for its in recorded:
                sample = rng.randrange(len(its))
                ids = list(its[sample].tokens or ())
                at = rng.randrange(len(ids))
                ids[at] = (ids[at] + rng.randrange(1, 170)) % 179
                where.append((sample, at))
                altered.append(
                    [dataclasses.replace(s, tokens=tuple(ids)) if i == sample else s for i, s in enumerate(its)]
                )
            found = await asyncio.gather(
                *(
                    replay(engine, prompt, params, its)
                    for (prompt, params, _), its in zip(answers, altered, strict=True)
                )
            )
            gaps = []
            for its, (sample, at), (_, _, results) in zip(found, where, answers, strict=True):
                assert [i for i, d in enumerate(its) if d is not None] == [sample]
                caught = its[sample]
                assert caught is not None
                assert (caught.what, caught.index) == ("token", at)
                assert caught.values[1] == results[sample].token_ids[at]
                gaps.append(caught.gap)
            assert all(gap is not None and gap > 0 for gap in gaps)

    asyncio.run(scenario())


def test_the_fingerprint_names_what_the_bits_depend_on(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**options: str) -> str:
        engine = AsyncEngine(Engine.load(path, drafter="none", **options))
        try:
            return system_fingerprint(engine)
        finally:
            engine.close()

    plain = of()
    assert f"-a{native.ARITHMETIC}-" in plain
    assert len({plain, *(of(kv_dtype=kind) for kind in ("float16", "float32", "int8"))}) == 4
    monkeypatch.setenv("OUTPACE_ISA", native.usable_isas()[-1])
    assert of() == plain
    with Tiny() as tiny:
        path = str(tiny.path("Q8_0", tokenizer=1, vocab=180, layers=1))
        assert of() != plain
