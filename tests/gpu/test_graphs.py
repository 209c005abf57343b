"""Forwards in fixed shapes, as a card replays them, against forwards as they are: where there is no card, called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from outpace.common.arrays import I32
from outpace.models.base import Batch
from outpace.models.torch.graphs import SLOTS, Graphs
from outpace.models.torch.model import TransformersModel
from tests.gpu.conftest import llama
from tests.integration.test_architectures import tiny
from tests.waits import Waits

CLOSE = 2e-4


def gemma() -> Any:
    torch.manual_seed(3)
    return tiny("gemma3_text", max_position_embeddings=2048)


@pytest.fixture(scope="module", params=[llama, gemma], ids=["llama", "windows of gemma"])
def pair(request: pytest.FixtureRequest, device: str) -> Iterator[tuple[TransformersModel, TransformersModel]]:
    models = [TransformersModel(request.param().to(device), name="m", graphs=on) for on in (True, False)]
    yield models[0], models[1]
    for model in models:
        model.close()


def text(n: int, seed: int) -> I32:
    return np.random.default_rng(seed).integers(5, 60, n).astype(np.int32)


def run(model: TransformersModel, chunks: dict[int, I32], parents: list[Any] | None = None, **options: Any) -> Any:
    rows = list(chunks)
    starts = [model.kv.length(row) for row in rows]
    batch = Batch.pack(rows, list(chunks.values()), starts, [True] * len(rows), parents, **options)
    out = model.forward(batch)
    return out.logits(batch.wanted), out.hidden_states(batch.wanted[::2]).numpy(), out


def test_graphs_give_what_forwards_give(pair: tuple[TransformersModel, TransformersModel]) -> None:
    graphs, plain = pair
    tree = np.array([-1, 0, 0, 1, -1], np.int32)
    rows = [[model.kv.alloc() for _ in range(3)] for model in pair]
    first: list[tuple[list[int], Any]] = [([40], None), ([1, 1, 200], None), ([5, 5, 3], [tree, None, None])]
    seed = 0
    for _ in range(2):  # the second time every bucket is known
        for sizes, parents in [*first, ([1], None), ([3, 4], None), ([7, 7, 7], None)]:
            seed += 1
            chunks = [text(n, 10 * seed + i) for i, n in enumerate(sizes)]
            found, expected = (
                run(model, dict(zip(own, chunks, strict=False)), parents, hidden_layers=(1,))
                for model, own in zip(pair, rows, strict=True)
            )
            np.testing.assert_allclose(found[0], expected[0], atol=CLOSE)
            np.testing.assert_allclose(found[1], expected[1], atol=CLOSE)
    held = graphs.graphs
    assert held is not None
    assert len(held._graphs) >= 5
    assert {bucket.slots for bucket in held._graphs} >= {SLOTS, 2 * SLOTS}
    for model, own in zip(pair, rows, strict=True):
        for row in own:
            model.kv.check()
            model.kv.free(row)
    assert plain.graphs is None


def test_a_replay_asks_nothing_and_stays_where_it_is(pair: tuple[TransformersModel, TransformersModel]) -> None:
    """What a capture on a card would refuse is refused here: values on the host, shapes that follow from them."""
    model = pair[0]
    row = model.kv.alloc()
    run(model, {row: text(9, 1)}, hidden_layers=(1,))
    run(model, {row: text(4, 2)}, hidden_layers=(1,))
    held = model.graphs
    assert held is not None
    graph = held._graphs[next(b for b in held._graphs if (b.rows, b.width) == (1, 4))]
    inputs = graph._indices.data_ptr(), graph._sees.data_ptr()
    with Waits() as waits:
        batch = Batch.pack([row], [text(4, 3)], [13], [True])
        model.forward(batch)
        model.forward(Batch.pack([row], [text(4, 4)], [17], [True], hidden_layers=(1,)))
    assert waits.seen == []
    assert inputs == (graph._indices.data_ptr(), graph._sees.data_ptr())
    model.kv.free(row)


def test_what_fits_no_bucket_runs_as_it_is(pair: tuple[TransformersModel, TransformersModel]) -> None:
    model = pair[0]
    rows = [model.kv.alloc() for _ in range(2)]
    held = model.graphs
    assert isinstance(held, Graphs)
    before = len(held._graphs)
    run(model, {rows[0]: text(100, 1)}, hidden_layers=(1,))  # wider than any
    run(model, {rows[0]: text(1, 1), rows[1]: text(40, 2)}, hidden_layers=(1,))  # one beside many
    assert len(held._graphs) == before
    for row in rows:
        model.kv.free(row)
