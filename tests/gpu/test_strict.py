"""``strict``: a token's logits have the same bits whatever runs beside it; here on the CPU where there is no card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.card import shapes
from outpace import Engine, SamplingParams
from outpace.common.arrays import F32, I32
from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.errors import ModelError
from outpace.models.base import Batch
from outpace.models.options import LoadOptions
from outpace.models.torch.graphs import Graphs
from outpace.models.torch.model import TransformersModel
from tests.gpu.conftest import llama
from tests.integration.test_architectures import tiny

CONTEXT = 250  # the next tokens lie in two blocks of slots
MODULES = {
    "llama": llama,
    "windows of gemma": lambda: tiny("gemma3_text", max_position_embeddings=2048),
    "transformers' gemma2": lambda: tiny("gemma2", max_position_embeddings=2048),
}


@pytest.fixture(scope="module", params=MODULES)
def module(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return MODULES[request.param]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, module: Any, device: str) -> Iterator[TransformersModel]:
    model = TransformersModel(module().to(device, request.param), name="m", strict=True, kv_block=16)
    yield model
    model.close()


def text(n: int, seed: int = 0) -> I32:
    return np.random.default_rng(seed).integers(5, 60, n).astype(np.int32)


def run(model: TransformersModel, chunks: dict[int, I32], parents: list[Any] | None = None) -> list[F32]:
    """Logits [n, V] of each row's new tokens."""
    rows = list(chunks)
    starts = [model.kv.length(row) for row in rows]
    batch = Batch.pack(rows, list(chunks.values()), starts, [True] * len(rows), parents)
    found = model.forward(batch).logits(batch.wanted)
    return np.split(found, batch.starts[1:-1])


def bits(values: F32) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def test_bits_do_not_depend_on_width_batch_or_slots(model: TransformersModel) -> None:
    kv, tokens = model.kv, text(CONTEXT + 17)
    row = kv.alloc()
    run(model, {row: tokens[:CONTEXT]})
    alone = np.concatenate([run(model, {row: tokens[i : i + 1]})[0] for i in range(CONTEXT, CONTEXT + 17)])
    assert len(np.unique(alone.argmax(-1))) > 1
    kv.truncate(row, CONTEXT)
    for width in range(1, 18):
        (found,) = run(model, {row: tokens[CONTEXT : CONTEXT + width]})
        assert bits(found) == bits(alone[:width]), width
        kv.truncate(row, CONTEXT)
    for n, begin in ((1, 3), (2, 40), (4, 255)):  # other rows before and behind it, its own in other blocks
        others = [kv.alloc() for _ in range(n)]
        again = kv.alloc()
        for at in range(0, CONTEXT, 71):
            run(model, {again: tokens[at : min(at + 71, CONTEXT)], **{other: text(begin, at) for other in others}})
        for width in (1, 2, 5, 16, 17):
            chunks = {other: text(1 + (width + i) % 9, i) for i, other in enumerate(others)}
            first = dict(list(chunks.items())[: n // 2])
            found = run(model, {**first, again: tokens[CONTEXT : CONTEXT + width], **chunks})
            assert bits(found[n // 2]) == bits(alone[:width]), (n, width)
            for each in (again, *others):
                kv.truncate(each, CONTEXT if each == again else begin)
        for each in (again, *others):
            kv.free(each)
    parents = np.array([-1, -1, 0, 2, 1, 3, 5, 4], np.int32)  # the chain's tokens are nodes 0, 2, 3, 5, 6
    chain = [0, 2, 3, 5, 6]
    nodes = text(8, 9)
    nodes[chain] = tokens[CONTEXT : CONTEXT + 5]
    (found,) = run(model, {row: nodes}, [parents])
    assert bits(found[chain]) == bits(alone[:5])
    kv.compact(row, CONTEXT, np.array(chain, np.int32))
    (after,) = run(model, {row: tokens[CONTEXT + 5 :]})
    assert bits(after) == bits(alone[5:])
    kv.free(row)
    kv.check()


@pytest.mark.parametrize("graphs", [False, True])
def test_speculative_answers_are_plain_decoding_s(module: Any, device: str, graphs: bool) -> None:
    """In bfloat16, greedy and sampled, alone and together, by chains and trees."""
    model = TransformersModel(module().to(device, torch.bfloat16), name="m", strict=True, graphs=graphs)
    whole = shapes.text(5, 60, 60)
    prompts = [whole[:40] + whole[at : at + 8] for at in (0, 3, 11)]
    params = [SamplingParams(max_tokens=24), *(SamplingParams(max_tokens=24, temperature=0.8, seed=i) for i in (1, 2))]
    plain = Engine(model, prefix_rows=0)
    expected = [plain.generate(prompt, each).token_ids for prompt, each in zip(prompts, params, strict=True)]
    accepted = 0
    for drafter, size in (("ngram", 4), ("ngram+suffix", 9), ("layers:1", 3)):
        built = build(parse(drafter), DraftContext(model, None, LoadOptions(), 12))
        engine = Engine(model, drafter=built, size=size, prefix_rows=0)
        found = engine.generate_many(prompts, params)
        assert [result.token_ids for result in found] == expected
        accepted += sum(result.stats.accepted for result in found)
    assert accepted > 0
    model.close()


def test_a_forward_that_is_not_strict_fails_the_proof_at_load(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Graphs.run

    def other(graphs: Graphs, bucket: Any, indices: torch.Tensor, *given: Any) -> Any:
        logits, *rest = run(graphs, bucket, indices, *given)
        return logits + 1e-5 * (indices[: bucket.rows] > 0).sum(), *rest  # a little, by how many tokens there are

    monkeypatch.setattr(Graphs, "run", other)
    with pytest.raises(ModelError, match="cannot be served strictly: one by one, its tokens' logits have other bits"):
        TransformersModel(llama().to(device), name="m", strict=True, graphs=False)
    TransformersModel(llama().to(device), name="m", graphs=True).close()


def test_what_cannot_be_strict_is_refused(device: str) -> None:
    with pytest.raises(ModelError, match="strict: an expert's products have as many rows as tokens that chose it"):
        TransformersModel(tiny("mixtral").to(device), name="m", strict=True)
