"""A token's logits are the same bits at any width, batch, chunking, thread count, through a tree or a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_helpers import Tiny, feed

from outpace.models.base import Batch
from outpace.models.families import FAMILIES

KINDS = ["Q4_1", "Q8_0", "BF16"]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_width_and_chunking(kind: str, kv_dtype: str, isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load(kind, isa=isa, threads=2, kv_dtype=kv_dtype)
    tokens = rng.integers(0, 100, 150)
    row = model.kv.alloc()
    alone = feed(model, row, tokens, 1)
    for chunk in (2, 3, 5, 7, 8, 13, 16, 33, 64, 150):
        model.kv.truncate(row, 0)
        assert np.array_equal(feed(model, row, tokens, chunk), alone), chunk


def test_every_width_after_a_context(isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("Q4_1", isa=isa, threads=2)
    context, more = rng.integers(0, 100, 100), rng.integers(0, 100, 64)
    row = model.kv.alloc()
    feed(model, row, context)
    alone = feed(model, row, more, 1)
    for width in range(1, 65):
        model.kv.truncate(row, 100)
        assert np.array_equal(feed(model, row, more[:width]), alone[:width]), width


def test_threads(isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 100, 140)
    results = []
    for threads in (1, 2, 3, 9, 64):  # more than this machine has cores, so that runs lose some on the way
        model = tiny.load("Q4_1", isa=isa, threads=threads)
        row = model.kv.alloc()
        results.append(np.concatenate([feed(model, row, tokens[:129]), feed(model, row, tokens[129:], 1)]))
        model.close()
    assert all(np.array_equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("architecture", [family.gguf for family in FAMILIES if family.gguf])
def test_families(architecture: str, isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    """Width, chunking, threads and batches, in layers that see a window and in those that see all."""
    sizes = {"layers": 7, "window": 9} if architecture in ("gemma2", "gemma3", "gemma4", "phi3", "gpt-oss") else {}
    tokens, other = rng.integers(0, 100, 90).astype(np.int32), rng.integers(0, 100, 30).astype(np.int32)
    results = []
    for threads in (1, 2):
        model = tiny.load("Q4_1", architecture, sizes, isa=isa, threads=threads)
        row, beside = model.kv.alloc(), model.kv.alloc()
        results.append(feed(model, row, tokens, 1))
        for chunk in (2, 7, 33, 90):
            model.kv.truncate(row, 0)
            results.append(feed(model, row, tokens, chunk))
        model.kv.truncate(row, 0)
        output = model.forward(Batch.pack([beside, row], [other, tokens], [0, 0], [True] * 2))
        results.append(output.logits(np.arange(30, 120, dtype=np.int32)))
        model.close()
    assert all(np.array_equal(results[0], result) for result in results[1:])


def tree_paths(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return paths


@pytest.mark.parametrize("context", [0, 5, 60, 62, 63, 64, 127, 130])
@pytest.mark.parametrize(
    ("architecture", "window"),
    [
        ("llama", 0),
        ("gemma3", 7),
        ("olmo2", 0),
        ("phi3", 9),
        ("qwen2moe", 0),
        ("gpt-oss", 9),
        ("deepseek2", 0),
        ("gemma4", 7),
    ],
)
def test_trees(context: int, architecture: str, window: int, isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    """Each node of a tree has the logits that it has at the end of its own chain."""
    sizes: dict[str, int] = {"layers": 6, "window": window} if window else {}
    model = tiny.load("Q4_1", architecture, sizes, isa=isa, threads=2)
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 6, 0, 9, 10, 11, 5, -1, 14]
    nodes = rng.integers(0, 100, len(parents))
    row = model.kv.alloc()
    if context:
        feed(model, row, rng.integers(0, 100, context))
    tree = feed(model, row, nodes, parents=parents)
    for i, path in enumerate(tree_paths(parents)):
        model.kv.truncate(row, context)
        assert np.array_equal(feed(model, row, nodes[path])[-1], tree[i]), (i, path)


@pytest.mark.parametrize("keep", [[], [0], [0, 1, 3], [0, 2, 5], [1], [0, 9, 10, 11]])
def test_a_compacted_tree_is_its_chain(keep: list[int], isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    cases = (
        ("llama", "bfloat16"),
        ("llama", "float16"),
        ("llama", "float32"),
        ("llama", "int8"),
        ("deepseek2", "int8"),
    )
    for architecture, kv_dtype in cases:
        model = tiny.load("Q4_1", architecture, isa=isa, threads=2, kv_dtype=kv_dtype)
        parents = [-1, 0, 0, 1, 1, 2, 3, 6, 6, 0, 9, 10, 11, 5, -1, 14] if keep != [1] else [-1, -1]
        nodes, context = rng.integers(0, 100, len(parents)), rng.integers(0, 100, 59)
        tree, chain = model.kv.alloc(), model.kv.alloc()
        feed(model, tree, context)
        feed(model, tree, nodes, parents=parents)
        model.kv.compact(tree, 59, np.array(keep, np.int32))
        feed(model, chain, np.concatenate([context, nodes[keep]]))
        assert model.kv.length(tree) == model.kv.length(chain) == 59 + len(keep)
        following = rng.integers(0, 100, 20)
        assert np.array_equal(feed(model, tree, following), feed(model, chain, following))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32", "int8", "int4"])
def test_freed_and_stale_memory_never_leaks(kv_dtype: str, isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("Q4_1", isa=isa, threads=2, kv_dtype=kv_dtype)
    tokens = rng.integers(0, 100, 100)
    row = model.kv.alloc()
    expected = feed(model, row, tokens, 9)
    parents = [-1, 0, 0, 1, 2]
    tree = feed(model, row, [1, 2, 3, 4, 5], parents=parents)
    model.kv.free(row)
    model._handle.kv_poison()
    row = model.kv.alloc()
    pieces = []
    for at in range(0, 100, 9):
        pieces.append(feed(model, row, tokens[at : at + 9]))
        feed(model, row, [7, 8, 9])  # a draft that is taken back
        model.kv.truncate(row, min(at + 9, 100))
        model._handle.kv_poison()
    assert np.array_equal(np.concatenate(pieces), expected)
    assert np.array_equal(feed(model, row, [1, 2, 3, 4, 5], parents=parents), tree)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 4, "kv_heads": 1, "head_dim": 32},
        {"heads": 3, "kv_heads": 3, "head_dim": 8},
        {"heads": 14, "kv_heads": 2, "head_dim": 10},
        {"heads": 2, "kv_heads": 1, "head_dim": 128, "hidden": 160, "inner": 32},
    ],
)
def test_odd_shapes(sizes: dict[str, int], isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("F32", sizes=sizes, isa=isa, threads=2)
    tokens = rng.integers(0, 100, 90)
    row = model.kv.alloc()
    alone = feed(model, row, tokens, 1)
    model.kv.truncate(row, 0)
    assert np.array_equal(feed(model, row, tokens), alone)
    assert np.isfinite(alone).all()


def test_argmax_of_the_head_is_that_of_its_logits(isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    from outpace.exact.noise import Noise
    from outpace.exact.sampling import Chooser
    from outpace.params import SamplingParams

    model = tiny.load("Q4_1", isa=isa, threads=2, sizes={"vocab": 1500})
    row = model.kv.alloc()
    tokens: Any = rng.integers(0, 1500, 130).astype(np.int32)
    output = model.forward(Batch.pack([row], [tokens], [0], [True]))
    at = np.arange(130, dtype=np.int32)
    greedy = Chooser(SamplingParams(), Noise(0), 0)
    assert np.array_equal(output.choose(at, [greedy] * 130), output.logits(at).argmax(-1))
