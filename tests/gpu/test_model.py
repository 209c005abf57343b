"""The seams of the Transformers backend with tensors on a card: cache, verify, hidden states, features, parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outpace.common.arrays import F32, I32
from outpace.errors import MemoryLimitError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.exact.verify import walk
from outpace.models.base import Batch, Model
from outpace.models.host import free_memory, spare_memory
from outpace.models.torch.model import TransformersModel
from outpace.models.torch.output import TorchOutput
from outpace.params import SamplingParams
from tests.gpu.conftest import llama

CLOSE = 2e-3  # of logits of some tens: kernels for other widths add in another order


@pytest.fixture
def model(target: Model) -> Any:
    yield target
    for row in target.kv.rows:
        target.kv.free(row)
    target.kv.check()


def text(n: int, seed: int = 0) -> I32:
    return np.random.default_rng(seed).integers(10, 2000, n).astype(np.int32)


def run(model: Model, chunks: dict[int, I32], **options: Any) -> Any:
    rows = list(chunks)
    starts = [model.kv.length(row) for row in rows]
    batch = Batch.pack(rows, [chunks[row] for row in rows], starts, [True] * len(rows), **options)
    return batch, model.forward(batch)


def logits(model: Model, row: int, tokens: I32) -> F32:
    batch, output = run(model, {row: tokens})
    found: F32 = output.logits(batch.wanted)
    return found


def test_rows_chunks_forks_and_trees_agree(model: Model) -> None:
    t, parents = text(150), np.array([-1, 0, 0, 1, -1], np.int32)
    whole = logits(model, model.kv.alloc(), t)
    a, b = model.kv.alloc(), model.kv.alloc()
    pieces = [logits(model, a, t[at : at + 37]) for at in range(0, 150, 37)]
    assert float(np.abs(np.concatenate(pieces) - whole).max()) < CLOSE
    model.kv.fork(a, b, 100)
    _, output = run(model, {b: t[100:], a: text(3, 5)})
    assert float(np.abs(output.logits(np.arange(50, dtype=np.int32)) - whole[100:]).max()) < CLOSE
    nodes = text(5, 6)
    tree = run(model, {b: nodes}, parents=[parents])[1].logits(np.arange(5, dtype=np.int32))
    chain = logits(model, model.kv.alloc(), np.concatenate([t, nodes[[0, 1, 3]]]))[-3:]
    assert float(np.abs(tree[[0, 1, 3]] - chain).max()) < CLOSE
    model.kv.compact(b, 150, np.array([0, 1, 3], np.int32))
    after = logits(model, b, text(1, 7))
    again = logits(model, model.kv.alloc(), np.concatenate([t, nodes[[0, 1, 3]], text(1, 7)]))[-1:]
    assert float(np.abs(after - again).max()) < CLOSE


def test_the_pool_is_bounded_and_stays_on_the_card(device: str) -> None:
    module = llama().to(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    model = TransformersModel(module, name="random", kv_memory=1 << 20)
    kv = model.kv
    row, other = kv.alloc(), kv.alloc()
    logits(model, row, text(300))
    kv.fork(row, other, 300)
    assert kv.bytes == kv.bytes_for(300)
    if device == "cuda":
        assert kv.keys[0].is_cuda
        assert torch.cuda.memory_allocated() - before < kv.reserved + (64 << 20)
    room = kv.limit // kv.bytes_for(1) * kv.block - 300  # positions that are left
    with pytest.raises(MemoryLimitError, match="KV memory are in use"):
        logits(model, row, text(room + 1))
    assert (kv.length(row), kv.bytes) == (300, kv.bytes_for(300))
    logits(model, row, text(200))
    kv.check()
    assert kv.bytes <= kv.reserved <= 1 << 20
    kv.free(row)
    assert kv.bytes == kv.bytes_for(300)
    assert logits(model, other, text(60)).shape[0] == 60
    model.close()


def test_the_budget_is_the_cards(device: str) -> None:
    free = free_memory(device)
    assert free is not None
    if device == "cuda":
        assert free <= torch.cuda.get_device_properties(0).total_memory
    spare = spare_memory(device, 1 << 20)
    assert spare is not None
    assert abs(spare - (free - (1 << 20)) // 2) < 256 << 20  # others use the machine, too
    with pytest.raises(MemoryLimitError, match="the weights need"):
        spare_memory(device, 1 << 50)


def test_a_batch_is_verified_in_one_copy(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, kinds = (
        text(20),
        [SamplingParams(), SamplingParams(temperature=0.9, top_k=40), SamplingParams(temperature=0.5, top_p=0.5)],
    )
    rows = [model.kv.alloc() for _ in kinds]
    for row in rows:
        logits(model, row, prompt)
        model.kv.truncate(row, 19)
    choosers = [Chooser(params, Noise(7, i), 0) for i, params in enumerate(kinds)]
    # What each would say, so that some of the drafts are right.
    said = []
    for row, chooser in zip(rows, choosers, strict=True):
        tokens = [int(prompt[-1])]
        for depth in range(3):
            found = logits(model, row, np.array(tokens[-1:], np.int32))[0]
            tokens.append(chooser.after(tokens[1 : 1 + depth]).choose(found))
        said.append(tokens[1:])
        model.kv.truncate(row, 19)
    drafts = Drafts.chains([said[0], [said[1][0], 5, 6], [9, 9, 9]], "test")
    chunks = {row: np.concatenate([prompt[-1:], drafts.row(i).tokens]) for i, row in enumerate(rows)}
    batch, output = run(model, chunks)
    assert isinstance(output, TorchOutput)
    output._on_device = True  # where there is no card, the same way
    copies: list[int] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (copies.append(self.numel()), cpu(self))[1])
    verdicts = output.verify(drafts, batch.starts[:-1], [*choosers[:2], choosers[2]])
    monkeypatch.undo()
    assert len(copies) == 1

    def choose(rows: I32, nodes: I32) -> I32:
        at = (batch.starts[rows] + nodes + 1).astype(np.int32)
        after = [choosers[i].after(drafts.tokens[i, : n + 1].tolist()) for i, n in zip(rows, nodes, strict=True)]
        return np.array([c.choose(its) for c, its in zip(after, output.logits(at), strict=True)], np.int32)

    expected = walk(choose, drafts)
    assert [v.tokens.tolist() for v in verdicts] == [v.tokens.tolist() for v in expected]
    assert verdicts.accepted.tolist()[1:] == [1, 0]
    assert verdicts.accepted[0] >= 2  # a near-tie may cost the last


def test_hidden_states_features_and_parts_stay_where_they_are(model: Any, device: str) -> None:
    t, last = text(12), model.info.layers - 1
    row = model.kv.alloc()
    batch, output = run(model, {row: t}, hidden_layers=(2, last))
    hidden_states = output.hidden_states(batch.wanted)
    assert hidden_states.native.device.type == device
    assert hidden_states.native.shape == (12, 2, model.info.hidden_size)
    parts = model.parts
    ended = parts.logits(parts.norm(hidden_states.native[:, 1])).detach()
    assert float((ended.cpu() - torch.from_numpy(output.logits(batch.wanted))).abs().max()) < CLOSE
    plain = output.logits(batch.wanted)
    nothing = run(model, {model.kv.alloc(): t}, features=torch.zeros(12, model.info.hidden_size, device=device))
    np.testing.assert_array_equal(nothing[1].logits(batch.wanted), plain)
    beside = run(model, {model.kv.alloc(): t}, features=hidden_states.layers((0,)).native[:, 0].flip(0))
    hosted = run(model, {model.kv.alloc(): t}, features=np.ascontiguousarray(hidden_states.numpy()[::-1, 0]))
    np.testing.assert_allclose(beside[1].logits(batch.wanted), hosted[1].logits(batch.wanted), atol=CLOSE)
    assert float(np.abs(beside[1].logits(batch.wanted) - plain).max()) > 1
    assert parts.embed(t).device.type == device
