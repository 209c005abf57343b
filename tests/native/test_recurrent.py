"""Recurrent layers: the same bits whatever the width, the batch, what was taken back, and who computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_helpers import feed
from safetensors.numpy import load_file, save_file
from test_architectures import saved

from outpace.control.cost import Cost
from outpace.drafters.forward.layers import LayersDrafter
from outpace.drafters.forward.model import ModelDrafter
from outpace.engine.engine import Engine
from outpace.errors import DrafterError, MemoryLimitError, ModelError
from outpace.models.base import Batch
from outpace.models.native.model import NativeModel, load_native
from outpace.params import SamplingParams
from tests.driving import finished
from tests.exact.test_tree_drafters import make

TREE = [-1, 0, 0, 1, 1, 2, 3, 6, -1]
PATHS = ([0, 2, 5], [0, 1, 3, 6], [8], [])
KEPT = 64  # kPending in native/runtime/states.h


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2", "nemotron_h-experts", "falcon_h1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated delta nets; short convolutions; state spaces, in the place of attention and beside it."""
    path = tmp_path_factory.mktemp("hybrid")
    saved(request.param, path)
    return path


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net")
    saved("qwen3_5", path)
    return path


@pytest.fixture
def model(folder: Path, isa: str) -> NativeModel:
    return load_native(folder, isa=isa, threads=2)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """Logits of a text, token by token on one thread."""
    model = load_native(folder, isa="portable", threads=1)
    return lambda tokens: feed(model, model.kv.alloc(), tokens, 1)


def run(model: NativeModel, rows: list[int], tokens: list[Any], wanted: bool = True, parents: Any = None) -> Any:
    starts = [model.kv.length(row) for row in rows]
    batch = Batch.pack(rows, [np.asarray(t, np.int32) for t in tokens], starts, [wanted] * len(rows), parents)
    logits = model.forward(batch).logits(batch.wanted)
    model.kv.check()
    return logits


def test_widths_and_what_is_taken_back(model: NativeModel, plain: Any, rng: np.random.Generator) -> None:
    """Chunks of 1 to 17 tokens and wrong ones that are taken back, in a batch whose rows go at their own pace."""
    texts = [rng.integers(0, 120, n) for n in (120, 90, 60)]
    expected = [plain(text) for text in texts]
    rows, done = [model.kv.alloc() for _ in texts], [0, 0, 0]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        now = [i for i in range(3) if done[i] < len(texts[i]) and rng.random() < 0.8]
        right = [min(int(rng.integers(1, 18)), len(texts[i]) - done[i]) for i in now]
        wrong = [rng.integers(0, 120, int(rng.integers(0, 9))) for _ in now]
        if not now:
            continue
        chunks = [
            np.concatenate([texts[i][done[i] : done[i] + n], w]) for i, n, w in zip(now, right, wrong, strict=True)
        ]
        logits = run(model, [rows[i] for i in now], chunks)
        at = 0
        for i, n, chunk in zip(now, right, chunks, strict=True):
            assert np.array_equal(logits[at : at + n], expected[i][done[i] : done[i] + n])
            at, done[i] = at + len(chunk), done[i] + n
            model.kv.truncate(rows[i], done[i])
        model.kv.check()


def test_prompts_in_any_chunks(model: NativeModel, plain: Any, rng: np.random.Generator) -> None:
    """Only the last token's logits are wanted, so that states settle; more than a pass of the layers takes."""
    text = rng.integers(0, 120, 300)
    expected = plain(text)
    for chunks in ([300], [128, 172], [1, 129, 170], [297, 2, 1]):
        row = model.kv.alloc()
        for begin, n in zip(np.cumsum([0, *chunks[:-1]]), chunks, strict=True):
            batch = Batch.pack([row], [text[begin : begin + n].astype(np.int32)], [int(begin)], [True], last_only=True)
            assert np.array_equal(model.forward(batch).logits(batch.wanted)[0], expected[begin + n - 1])
            model.kv.check()
        model.kv.truncate(row, 299)
        assert np.array_equal(run(model, [row], [text[299:]]), expected[299:])
    assert np.array_equal(feed(model, model.kv.alloc(), text), expected)  # all logits, though they cannot be taken back


def test_trees_equal_their_chains(model: NativeModel, plain: Any, rng: np.random.Generator) -> None:
    text, nodes, more = rng.integers(0, 120, 40), rng.integers(0, 120, len(TREE)), rng.integers(0, 120, 12)
    other, parents = rng.integers(0, 120, 5), np.array(TREE, np.int32)
    for path in PATHS:
        rows = [model.kv.alloc(), model.kv.alloc()]
        run(model, rows, [text, text[:30]], wanted=False)
        logits = run(model, rows, [nodes, other], parents=[parents, None])
        for node in range(len(TREE)):
            chain = [node]
            while TREE[chain[0]] >= 0:
                chain.insert(0, TREE[chain[0]])
            assert np.array_equal(logits[node], plain(np.concatenate([text, nodes[chain]]))[-1])
        model.kv.compact(rows[0], 40, np.array(path, np.int32))
        after = run(model, rows[:1], [more])
        assert np.array_equal(after, plain(np.concatenate([text, nodes[path], more]))[-len(more) :])


def test_trees_of_many_nodes(model: NativeModel, rng: np.random.Generator) -> None:
    """Three trees, more than a pass takes; each node as if it alone were there."""
    text, rows = rng.integers(0, 120, 20), [model.kv.alloc() for _ in range(3)]
    run(model, rows, [text] * 3, wanted=False)
    parents = [np.array([rng.integers(-1, i) if i else -1 for i in range(KEPT)], np.int32) for _ in rows]
    nodes = [rng.integers(0, 120, KEPT) for _ in rows]
    together = run(model, rows, nodes, parents=parents)
    for i in range(3):
        row = model.kv.alloc()
        run(model, [row], [text], wanted=False)
        assert np.array_equal(
            run(model, [row], nodes[i : i + 1], parents=parents[i : i + 1]), together[i * KEPT : (i + 1) * KEPT]
        )
    with pytest.raises(ValueError, match="a tree of 65 tokens is more than the 64"):
        run(model, rows[:1], [np.zeros(65)], parents=[np.full(65, -1, np.int32)])
    assert model.kv.length(rows[0]) == 20 + KEPT


def test_rows_that_share_a_beginning(model: NativeModel, plain: Any, rng: np.random.Generator) -> None:
    text = rng.integers(0, 120, 70)
    source, late, early = (model.kv.alloc() for _ in range(3))
    run(model, [source], [text[:50]], wanted=False)
    run(model, [source], [text[50:60]])
    # All from its base on, and where the prompt but its last token ended.
    assert [model.kv.reachable(source, n) for n in (0, 20, 49, 50, 55, 99)] == [0, 0, 49, 50, 55, 60]
    model.kv.fork(source, late, 55)
    for n in (48, 20):
        for call in (lambda n=n: model.kv.fork(source, early, n), lambda n=n: model.kv.truncate(source, n)):
            with pytest.raises(ValueError, match=f"{n} of 60 positions of KV row {source}: its recurrent layers"):
                call()
    model.kv.fork(source, early, 49)
    assert np.array_equal(run(model, [early], [text[49:]]), plain(text)[49:])
    model.kv.truncate(early, 49)
    ours = rng.integers(0, 120, 15)
    assert np.array_equal(run(model, [early], [ours]), plain(np.concatenate([text[:49], ours]))[49:])
    expected = plain(np.concatenate([text[:55], ours]))[55:]
    assert np.array_equal(run(model, [late], [ours]), expected)
    assert np.array_equal(run(model, [source], [text[60:]]), plain(text)[60:])
    before = model.kv.bytes
    taken = model.kv.exclusive([late])
    model.kv.free(late)
    assert model.kv.bytes == before - taken
    model.kv.truncate(source, 0)
    assert np.array_equal(run(model, [source], [text[:9]]), plain(text[:9]))
    model.kv.free(source), model.kv.free(early)
    assert model.kv.bytes == 0


def test_memory_is_bounded_and_known_beforehand(folder: Path, rng: np.random.Generator) -> None:
    model = load_native(folder, threads=1)
    row, other = model.kv.alloc(), model.kv.alloc()
    limited = load_native(folder, threads=1, kv_memory=model.kv.growth(row, 40) + 1)
    one, two = limited.kv.alloc(), limited.kv.alloc()
    text = rng.integers(0, 120, 40)
    run(limited, [one], [text])
    with pytest.raises(Exception, match="of KV memory") as error:
        run(limited, [two], [text])
    assert type(error.value).__name__ == "MemoryLimitError"
    assert limited.kv.length(two) == 0
    for chunk in (text[:1], text[1:30], text[30:], text):
        growth = model.kv.growth(row, len(chunk))
        before = model.kv.bytes
        run(model, [row], [chunk])
        assert model.kv.bytes - before <= growth
        model.kv.truncate(row, model.kv.length(row) - 1)
    model.kv.fork(row, other, model.kv.length(row))
    assert model.kv.growth(other, 1) > model.kv.growth(other, 0) == 0


def test_a_prompt_takes_no_records_of_tokens_that_settle(folder: Path) -> None:
    """A chunk whose last output alone is wanted fits where one token of it does."""
    roomy = load_native(folder, threads=1)
    row, text = roomy.kv.alloc(), np.arange(60, dtype=np.int32)
    need = roomy.kv.growth(row, 60, settled=59)
    assert need == roomy.kv.growth(row, 1) < roomy.kv.growth(row, 60)
    tight = load_native(folder, threads=1, kv_memory=need)
    row = tight.kv.alloc()
    with pytest.raises(MemoryLimitError, match=f"takes {roomy.kv.growth(0, 60)} bytes .* only {need} of {need} are"):
        run(tight, [row], [text])
    tight.forward(Batch.pack([row], [text], [0], [True], last_only=True))
    assert tight.kv.bytes <= need
    tight.close()
    prompt, limit = list(range(60)), roomy.kv.bytes_for(63)
    answers = []
    for memory in (None, limit):
        with Engine(load_native(folder, threads=1, kv_memory=memory), max_rows=1, prefill_chunk=64) as engine:
            answers.append(engine.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True)).token_ids)
    assert answers[0] == answers[1]


def test_some_layers_alone_are_refused(folder: Path) -> None:
    model = load_native(folder, threads=1)
    batch = Batch.pack([model.kv.alloc()], [np.zeros(3, np.int32)], [0], [True], layers=2)
    with pytest.raises(ValueError, match="recurrent layers"):
        model.forward(batch)


PROMPTS = [[1, 2, 3, 1, 2], [7], [4, 4, 4, 4], [5, 1, 5, 2, 5, 3, 5] * 12, [2, 3] * 40, [9, 8, 7, 6] * 20]
FEW = tuple(range(6))  # tokens of answers, so that guesses hit
KINDS = ("ngram", "suffix", "recycle", "lookahead", "suffix+recycle", "ngram+suffix")


def answers(model: Any, drafter: str | None, **options: Any) -> list[Any]:
    given = {} if drafter is None else {"drafter": make(drafter, model), "size": 6}
    with Engine(model, **{"max_rows": 4, "prefill_chunk": 37, **given, **options}) as engine:
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(
                max_tokens=20 + 9 * i, n=1 + 2 * (i % 2), temperature=0.8 * (i % 3 > 0), seed=i, allowed_tokens=FEW
            )
            engine.add(prompt, params)
        found = [finished(engine)]
        # The first ones again, and one that goes on where another ended: beginnings that the cache has.
        for prompt in (*PROMPTS[3:], [*PROMPTS[3], *found[0][3, 0].token_ids, 1, 2]):
            engine.add(prompt, SamplingParams(max_tokens=25, allowed_tokens=FEW))
        found.append(finished(engine))
        model.kv.check()
        return [[result.token_ids for result in each.values()] for each in found] + [found]


@pytest.mark.parametrize("kind", KINDS)
def test_drafted_answers_are_plain_decodings(folder: Path, kind: str) -> None:
    plain = answers(load_native(folder, threads=1), None, prefix_rows=0)
    for options in ({"prefix_rows": 4}, {"size": "auto", "cost": Cost((1, 64), (1.0, 2.0)), "max_rows": 2}):
        drafted = answers(load_native(folder, threads=2), kind, **options)
        assert drafted[:2] == plain[:2]
        results = [result for each in drafted[2] for result in each.values()]
        if options.get("size") != "auto":
            assert sum(result.stats.accepted for result in results) > 0
            assert sum(result.stats.reused_tokens for result in drafted[2][1].values()) > 100


def test_rows_that_lose_their_place_are_computed_again(folder: Path, rng: np.random.Generator) -> None:
    """With a bound on memory, and rows that are taken away between any two steps."""
    model = load_native(folder, threads=1)
    tight = load_native(folder, threads=1, kv_memory=2 * model.kv.bytes_for(200))
    plain = answers(model, None, prefix_rows=0)
    engine = Engine(tight, drafter=make("suffix", tight), size=5, max_rows=3, prefill_chunk=37)
    params = [SamplingParams(max_tokens=20 + 9 * i, seed=i, allowed_tokens=FEW) for i in range(len(PROMPTS))]
    keys = [
        engine.add(prompt, each.with_(temperature=0.8 * (i % 3 > 0)))
        for i, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    found: dict[int, Any] = {}
    while not engine.idle:
        found |= {delta.request: delta.result for delta in engine.step() if delta.result is not None}
        scheduler = engine._core.scheduler
        if scheduler.running and rng.random() < 0.2:
            scheduler.preempt(scheduler.running[int(rng.integers(len(scheduler.running)))])
        engine.check()
    assert sum(result.stats.preemptions for result in found.values()) > 3
    expected = {key[0]: result.token_ids for key, result in plain[2][0].items() if key[1] == 0}
    assert [found[key].token_ids for key in keys] == [expected[i] for i in sorted(expected)]


@pytest.mark.parametrize("drafter", ["layers", "model"])
def test_drafters_that_would_have_to_go_back_are_refused(folder: Path, drafter: str) -> None:
    model = load_native(folder, threads=1)
    with pytest.raises(DrafterError, match="recurrent layers"):
        LayersDrafter(model, 2) if drafter == "layers" else ModelDrafter(model, "model", 120)


@pytest.mark.parametrize("n", [1, 4])
def test_rows_that_share_a_state_get_on_in_little_memory(folder: Path, n: int) -> None:
    model = load_native(folder, threads=1)
    memory = 2 * model.kv.bytes_for(65)
    expected: list[Any] = []
    for limit in (None, memory):
        with Engine(load_native(folder, threads=1, kv_memory=limit), max_rows=8) as engine:
            for i in range(8):
                engine.add([*range(1, 31)], SamplingParams(max_tokens=20, n=n, temperature=0.9, seed=i))
            steps, found = 0, []
            while not engine.idle and (steps := steps + 1) < 2000:
                found += [delta.result for delta in engine.step() if delta.result is not None]
                engine.check()
        expected.append(sorted(result.token_ids for result in found))
    assert len(expected[0]) == 8 * n
    assert expected[0] == expected[1]


def test_a_prompt_is_reused_each_time_it_comes(folder: Path, rng: np.random.Generator) -> None:
    prompt = rng.integers(0, 120, 100).tolist()
    with Engine(load_native(folder, threads=1), max_rows=2, prefix_rows=4) as engine:
        reused = []
        for _ in range(5):
            engine.add(prompt, SamplingParams(max_tokens=12))
            reused += [result.stats.reused_tokens for result in finished(engine).values()]
    assert reused[0] == 0 < 90 < min(reused[1:])


def test_a_row_that_can_be_cut_further_on_is_taken_before_one_that_is_more_alike(
    net: Path, rng: np.random.Generator
) -> None:
    plain = Engine(load_native(net, threads=1), prefix_rows=0)
    with Engine(load_native(net, threads=1), max_rows=2, prefix_rows=4) as engine:
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        prompt = rng.integers(0, 120, 20).tolist()
        text = [*prompt, *engine.generate(prompt, long).token_ids]  # whose row can be cut at 20, and near its end
        engine.generate(text[:100], SamplingParams(max_tokens=1))
        result = engine.generate(text[:120], SamplingParams(max_tokens=9))
        assert result.stats.reused_tokens >= 99
        assert result.token_ids == plain.generate(text[:120], SamplingParams(max_tokens=9)).token_ids


def test_what_was_settled_is_not_taken_apart(folder: Path, rng: np.random.Generator) -> None:
    model = load_native(folder, threads=1)
    row = model.kv.alloc()
    run(model, [row], [rng.integers(0, 120, 300)], wanted=False)
    for start, keep in ((0, range(100, 200)), (250, [0, 2])):
        with pytest.raises(ValueError, match=f"starts at {start}, and .* layers have passed 299"):
            model.kv.compact(row, start, np.array(list(keep), np.int32))
    model.kv.check()
    assert model.kv.length(row) == 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [["a"]] * 5}, "layer_types must name"),
        ({"layer_types": ["linear_attention"] * 5}, "none of its 5 layers has attention"),
        ({"linear_num_value_heads": 3}, "heads share evenly"),
        ({"linear_key_head_dim": 1 << 13}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 3}, "conv1d.weight is"),
        ({"architectures": 5}, "is not one of"),
    ],
)
def test_other_descriptions_are_refused(change: dict[str, Any], message: str, net: Path, tmp_path: Path) -> None:
    shutil.copytree(net, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        load_native(tmp_path / "m")


def test_a_convolution_the_other_way_round_is_refused(net: Path, tmp_path: Path) -> None:
    shutil.copytree(net, tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    name = "model.layers.0.linear_attn.conv1d.weight"
    save_file({**tensors, name: np.ascontiguousarray(tensors[name].T)}, tmp_path / "m/model.safetensors")
    with pytest.raises(ModelError, match=r"conv1d.weight is \[4, 1, 192\], but must be \[192, 4\]"):
        load_native(tmp_path / "m")


def test_prompts_that_part_share_what_they_have_in_common_from_the_third_on(
    folder: Path, rng: np.random.Generator
) -> None:
    system = rng.integers(0, 120, 150).tolist()
    prompts = [system + rng.integers(0, 120, 40).tolist() for _ in range(5)]
    plain = Engine(load_native(folder, threads=1), prefix_rows=0)
    with Engine(load_native(folder, threads=1), max_rows=2, prefix_rows=8, prefill_chunk=64) as engine:
        reused = []
        for prompt in prompts:
            params = SamplingParams(max_tokens=6)
            engine.add(prompt, params)
            (result,) = finished(engine).values()
            reused.append(result.stats.reused_tokens)
            assert result.token_ids == plain.generate(prompt, params).token_ids
    assert reused[:2] == [0, 0]
    assert all(each >= 149 for each in reused[2:])
