"""Forwards and drafts in fixed shapes, as a card replays them, against the same as they are: without a card, called."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from outpace.common.arrays import I32
from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.networks import eagle as torch_eagle
from outpace.drafters.learned.networks.eagle import TorchEagle
from outpace.errors import MemoryLimitError
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch
from outpace.models.torch import graphs as fixed_shapes
from outpace.models.torch.between import Norm
from outpace.models.torch.decoder import OwnDecoder
from outpace.models.torch.graphs import AFTER, SLOTS, Graphs, Waits, _Graph
from outpace.models.torch.kv import TorchKV
from outpace.models.torch.model import TransformersModel
from outpace.params import SamplingParams
from tests import eagles
from tests.gpu.conftest import llama
from tests.integration.test_architectures import tiny

CLOSE = 2e-4


@pytest.fixture(autouse=True)
def at_first_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_shapes, "AFTER", 1)


def gemma() -> Any:
    torch.manual_seed(3)
    return tiny("gemma3_text", max_position_embeddings=2048)


def modules() -> Any:
    """What no description has: transformers' own modules run."""
    torch.manual_seed(3)
    return tiny("gemma2", max_position_embeddings=2048)


@pytest.fixture(scope="module", params=[llama, gemma, modules], ids=["llama", "windows of gemma", "transformers"])
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
    first: list[tuple[list[int], Any]] = [([40], None), ([1, 1, 300], None), ([5, 5, 3], [tree, None, None])]
    first.append(([1, 5, 1], [None, tree, None]))  # too unlike for a shape of rows
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
    assert len(held.captures.graphs) >= 6
    assert (8, 1) in {(bucket.rows, bucket.width) for bucket in held.captures.graphs}
    assert {bucket.slots for bucket in held.captures.graphs} >= {2 * SLOTS, 4 * SLOTS}
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
    graph = held.captures.graphs[next(b for b in held.captures.graphs if (b.rows, b.width) == (1, 4))]
    inputs = [each.data_ptr() for each in graph.inputs]
    with Waits() as waits:
        batch = Batch.pack([row], [text(4, 3)], [13], [True])
        model.forward(batch)
        model.forward(Batch.pack([row], [text(4, 4)], [17], [True], hidden_layers=(1,)))
    assert waits.seen == []
    assert inputs == [each.data_ptr() for each in graph.inputs]
    model.kv.free(row)


@pytest.mark.parametrize("make", [llama, modules], ids=["llama", "transformers"])
def test_a_closed_model_s_graphs_hold_nothing(make: Any, device: str) -> None:
    """Not even until a collection of cycles: the next model wants the card's memory."""

    def graphs() -> int:
        return sum(type(each) is _Graph for each in gc.get_objects())

    before = graphs()
    gc.disable()
    try:
        model = TransformersModel(make().to(device), name="m", graphs=True)
        run(model, {model.kv.alloc(): text(3, 1)}, hidden_layers=(1,))
        assert graphs() == before + 1
        model.close()
        assert graphs() == before
    finally:
        gc.enable()


def test_graphs_are_made_anew_where_any_layer_s_pool_has_moved(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends while the pool grows, layer by layer: the first and the last one's keep their places."""
    model = TransformersModel(llama().to(device), name="m", graphs=True, kv_block=16)
    row, made, left = model.kv.alloc(), TorchKV._larger, 0

    def larger(kv: TorchKV, *given: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return made(kv, *given)

    run(model, {row: text(3, 1)}, hidden_layers=(1,))
    assert model.graphs is not None
    assert model.graphs.captures is not None
    graphs = []
    monkeypatch.setattr(TorchKV, "_larger", larger)
    for moved in (1, 2, 0):
        left = moved
        with pytest.raises(MemoryLimitError):
            run(model, {row: text(1100, 2)}, hidden_layers=(1,))
        run(model, {row: text(1, moved)}, hidden_layers=(1,))
        graphs.append(next(iter(model.graphs.captures.graphs.values())))
    assert graphs[0] is not graphs[1]
    assert graphs[1] is graphs[2]
    model.close()


def test_shapes_that_come_often_are_captured_and_the_oldest_make_way(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where one cannot be, while serving, forwards run as they are from then on."""
    monkeypatch.setattr(fixed_shapes, "AFTER", AFTER)
    monkeypatch.setattr(fixed_shapes, "MOST", 2)
    said: list[str] = []
    with closing(TransformersModel(llama().to(device), name="m", graphs=True, warn=said.append)) as model:
        assert model.graphs is not None
        assert model.graphs.captures is not None
        graphs, row = model.graphs.captures.graphs, model.kv.alloc()

        def widths(width: int, times: int) -> list[int]:
            for i in range(times):
                assert run(model, {row: text(width, i)}, hidden_layers=(1,))[0].shape[0] == width
            return [bucket.width for bucket in graphs]

        assert widths(1, AFTER - 1) == []
        assert widths(1, 1) == [1]
        monkeypatch.setattr(fixed_shapes, "APART", 0)
        assert widths(2, AFTER) == [1, 2]
        assert widths(1, 1) == [2, 1]
        assert widths(3, AFTER) == [1, 3]
        assert widths(2, AFTER - 1) == [1, 3]

        errors = [torch.OutOfMemoryError("full"), RuntimeError("no capture")]

        def failing(run: Any) -> None:
            raise errors.pop(0)

        monkeypatch.setattr(fixed_shapes, "_watched", failing)
        assert widths(2, AFTER) == [3], "without memory for more, there are fewer, and no try in each step"
        assert said == []
        assert widths(2, 3) == widths(1, 1) == []
        assert said == ["m: CUDA graphs are off, which costs speed: no capture"]


@pytest.mark.parametrize("error", [MemoryLimitError, RuntimeError])
def test_any_failure_of_the_trial_turns_graphs_off(
    device: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(graphs: Graphs, *given: Any) -> Any:
        raise error("no room")

    monkeypatch.setattr(Graphs, "run", failing)
    said: list[str] = []
    model = TransformersModel(llama().to(device), name="m", graphs=True, warn=said.append)
    assert model.graphs is None
    assert said == ["m: CUDA graphs are off, which costs speed: no room"]
    model.close()


def test_a_forward_that_fails_at_load_leaves_the_model_to_its_modules(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(decoder: OwnDecoder, *given: Any) -> Any:
        raise RuntimeError("mat1 and mat2 must have the same dtype")

    monkeypatch.setattr(OwnDecoder, "__call__", failing)
    warned: list[str] = []
    with closing(TransformersModel(llama().to(device), name="m", warn=warned.append)):
        (why,) = warned
    assert "m: transformers' modules run it" in why
    assert "mat1 and mat2 must have the same dtype" in why


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_takes_states_of_another_type_than_its_weight(device: str, kind: torch.dtype, own: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(5, 64, generator=generator).to(kind), torch.randn(64, generator=generator).to(own)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight.to(device))
    expected = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    found = Norm(module, 0.0, 1e-6)(x.to(device))
    assert found.dtype == kind
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5 if kind == torch.float32 else 1e-2, atol=1e-5)


def test_what_fits_no_bucket_runs_as_it_is(
    pair: tuple[TransformersModel, TransformersModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair[0]
    rows = [model.kv.alloc() for _ in range(2)]
    held = model.graphs
    assert isinstance(held, Graphs)
    before = len(held.captures.graphs)
    run(model, {rows[0]: text(257, 1)}, hidden_layers=(1,))  # wider than any
    monkeypatch.setattr(fixed_shapes, "APART", 0)
    run(model, {rows[0]: text(1, 1), rows[1]: text(40, 2)}, hidden_layers=(1,))  # one beside many
    assert len(held.captures.graphs) == before
    for row in rows:
        model.kv.free(row)


def test_a_module_that_a_capture_would_refuse_runs_as_it_is(device: str) -> None:
    """Its experts are looked up by values on the host."""
    module = tiny("mixtral", experts_implementation="eager").to(device)
    said: list[str] = []
    model = TransformersModel(module, name="m", graphs=True, warn=said.append)
    assert model.graphs is None
    assert len(said) == 1
    assert "m: CUDA graphs are off, which costs speed: it brings values to the host (nonzero" in said[0]
    row = model.kv.alloc()
    assert run(model, {row: text(9, 1)}, hidden_layers=(1,))[0].shape == (9, model.info.vocab_size)
    model.close()


# -- EAGLE's draft: all levels and the ranking of nodes are one graph -------------------------------------------------


LAYERS = (1, 2, 4)
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9),
}


def asks(model: TransformersModel, sizes: dict[int, int], kinds: list[str], seed: int, branch: int = 3) -> list[Ask]:
    draw = np.random.default_rng(seed)
    found = []
    for i, (row, n) in enumerate(sizes.items()):
        states = draw.normal(0, 1, (n, len(LAYERS), model.info.hidden_size)).astype(np.float32)
        chooser = Chooser(PARAMS[kinds[i % len(kinds)]], Noise(7 + row), 5)
        found.append(Ask(row, text(n, seed + i), states, 6 + i, 2 + i % 3, branch, chooser))
    return found


@pytest.fixture(scope="module")
def runtimes(target: TransformersModel) -> list[TorchEagle]:
    checkpoint = eagles.random(target, range(0, target.info.vocab_size, 16), LAYERS, fc_norm=True)
    return [TorchEagle(target, checkpoint, graphs=on) for on in (True, False)]


@pytest.mark.parametrize("kinds", [[kind] for kind in PARAMS] + [list(PARAMS)], ids=[*PARAMS, "all"])
def test_a_graph_drafts_what_is_drafted_without(
    target: TransformersModel, runtimes: list[TorchEagle], kinds: list[str]
) -> None:
    fixed, plain = runtimes
    assert fixed.captures is not None
    for seed, sizes in enumerate([{0: 40}, {0: 1, 1: 7, 2: 300}, {2: 3, 0: 2, 1: 1}, {1: 1}]):  # 300: no graph's
        for branch in (1, 3):
            given = asks(target, sizes, kinds, 10 * seed + branch, branch)
            found, expected = (runtime.draft(given) for runtime in runtimes)
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert found.widths.tolist() == expected.widths.tolist()
            assert (found.parents is None) == (expected.parents is None)
            assert found.parents is None or found.parents.tolist() == expected.parents.tolist()
            np.testing.assert_allclose(found.confidence, expected.confidence, rtol=1e-3)
    assert [fixed.kv.length(row) for row in range(3)] == [plain.kv.length(row) for row in range(3)]
    for row in range(3):
        for runtime in runtimes:
            runtime.kv.release(row)


def test_a_draft_s_replay_waits_once_and_stays_where_it_is(
    target: TransformersModel, runtimes: list[TorchEagle]
) -> None:
    fixed = runtimes[0]
    fixed.draft(asks(target, {0: 40, 1: 20}, list(PARAMS), 1))
    fixed.draft(asks(target, {0: 2, 1: 1}, list(PARAMS), 2))
    assert fixed.captures is not None
    before = {shape: [each.data_ptr() for each in graph.inputs] for shape, graph in fixed.captures.graphs.items()}
    with Waits() as waits:
        fixed.draft(asks(target, {0: 1, 1: 2}, list(PARAMS), 3))
    assert waits.seen == ["Tensor.cpu"]
    after = {shape: [each.data_ptr() for each in graph.inputs] for shape, graph in fixed.captures.graphs.items()}
    assert before == after
    for row in range(2):
        fixed.kv.release(row)


def test_a_drafter_that_a_capture_would_refuse_drafts_without(
    target: TransformersModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attended = torch_eagle.attend

    def asking(*given: Any) -> Any:
        assert bool((given[0] == given[0]).all())
        return attended(*given)

    monkeypatch.setattr(torch_eagle, "attend", asking)
    checkpoint = eagles.random(target, range(0, target.info.vocab_size, 16), LAYERS, fc_norm=True)
    runtime = TorchEagle(target, checkpoint, graphs=True)
    assert runtime.captures is None
    assert "the drafter's CUDA graphs are off, which costs speed: it brings values to the host" in caplog.text
    assert runtime.draft(asks(target, {0: 4}, ["greedy"], 1)).widths.tolist() == [6]
