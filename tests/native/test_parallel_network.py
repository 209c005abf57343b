"""Block-parallel drafters natively: their noise and choices are the reference's, and no bit depends on company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Tiny, check_rows, release_all

from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import Decoder, ParallelConfig
from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.native import NativeParallel, described
from outpace.drafters.learned.picks import RIVALS, chosen
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.native.model import NativeModel
from outpace.params import SamplingParams
from tests import learned

VOCAB, DRAFT, LAYERS, HIDDEN, BLOCK = 1000, 600, 3, 64, 7
SIZES = {"vocab": VOCAB}
DECODER = Decoder(HIDDEN, 2, 4, 2, 16, 96, 1e-5, 1e4, 512, qk_norm=True)


def checkpoint(seed: int = 0, **options: Any) -> Checkpoint:
    given = {"decoder": DECODER, "vocab": VOCAB, "draft_vocab": DRAFT, "hidden_layers": (0, 1, 2), "block": BLOCK,
             "mask_token": 6, "markov_rank": 32, "confidence": True}  # fmt: skip
    config = ParallelConfig(**{**given, **options})
    return learned.random_checkpoint(seed, config)


def chooser(temperature: float, seed: int) -> Chooser:
    return Chooser(SamplingParams(temperature=temperature), Noise(seed, 1), 5)


class Row(NamedTuple):
    hidden_states: Any  # [n, T, H]
    positions: Any  # [n]
    anchor: int
    slots: int
    temperature: float


def some(rng: np.random.Generator, n: int, slots: int = BLOCK, temperature: float = 0.0, gaps: bool = False) -> Row:
    positions = np.sort(rng.choice(2 * n, n, replace=False)) if gaps else np.arange(n)
    hidden_states = rng.normal(0, 1, (n, LAYERS, HIDDEN)).astype(np.float32)
    return Row(hidden_states, positions.astype(np.int32), int(rng.integers(0, VOCAB)), slots, temperature)


def said(blocks: NativeParallel, rows: dict[int, Row], branch: int = 1) -> dict[int, tuple[list[int], list[float]]]:
    """What one call drafts for rows that were read for: tokens, and path probabilities to the bit."""
    none, asks = np.zeros(0, np.int32), []
    for n, row in rows.items():
        choice, at = chooser(row.temperature, n), int(row.positions[-1]) + 1
        asks.append(Ask(n, none, None, row.slots, row.slots, branch, choice, 0.0, row.anchor, at))
    found = blocks.draft(asks)
    assert found.confidence is not None
    return {
        n: (found.tokens[i, : row.slots].tolist(), found.confidence[i, : row.slots].tolist())
        for i, (n, row) in enumerate(rows.items())
    }


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Iterator[NativeModel]:
    model = tiny.load("Q8_0", "llama", SIZES, threads=2)
    yield model
    model.close()


@pytest.mark.parametrize("kind", ["Q4_1", "F32"])
def test_no_bit_depends_on_company(kind: str, tiny: Tiny, isa: str, rng: np.random.Generator) -> None:
    """Alone or among others, more than pass at once, read at once or in pieces, with 1 or more threads."""
    second = {"decoder": replace(DECODER, conv=(2, 16)), "markov": "selector", "candidates": 9}  # DFlash2
    its = checkpoint(**({"markov": "rnn"} if kind == "Q4_1" else second))
    lengths = [1, 64, 131, 5, *rng.integers(1, 20, 16).tolist()]
    rows = {i: some(rng, n, 1 + (i + 6) % BLOCK, (0.0, 0.9)[i % 2], gaps=i % 3 == 0) for i, n in enumerate(lengths)}
    before = None
    for threads in (1, 2, 3):
        model = tiny.load(kind, "llama", SIZES, threads=threads, isa=isa)
        model.runtime.claims = threads == 3
        blocks, again = NativeParallel(model, its), NativeParallel(model, its)
        for i, row in rows.items():
            blocks.feed([i], [row.positions], [row.hidden_states], [row.positions])
            for at in range(0, len(row.positions), 3 + 17 * i):
                end = at + 3 + 17 * i
                part = row.positions[at:end]
                again.feed([i], [part], [row.hidden_states[at:end]], [part])
        trees = {i: said(blocks, {i: row}, 4)[i] for i, row in rows.items()}
        assert said(again, rows, 4) == trees
        alone = {i: said(blocks, {i: row})[i] for i, row in rows.items()}
        assert said(again, rows) == alone == said(blocks, dict(reversed(rows.items())))
        alone |= {-1 - i: tree for i, tree in trees.items()}
        assert before is None or before == alone
        before = alone
        for each in (blocks, again):
            each.kv.check(list(rows))
            each.close()
        model.close()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_ragged_calls(target: NativeModel, data: st.DataObject) -> None:
    """Reads, drafts, forks and releases in any order leave each row what its contexts alone would make it."""
    rng = np.random.default_rng(5)
    blocks, fresh = (NativeParallel(target, checkpoint(sample_from_anchor=False)) for _ in range(2))
    kept: dict[int, Row] = {}
    for _ in range(data.draw(st.integers(3, 9))):
        what = data.draw(st.sampled_from(["read", "read", "draft", "fork", "release"]))
        if what == "read":
            row, new = data.draw(st.integers(0, 3)), some(rng, data.draw(st.integers(1, 70)), BLOCK - 1)
            if (old := kept.get(row)) is not None:
                at = old.positions[-1] + 1 + data.draw(st.integers(0, 2)) + new.positions
                new = new._replace(
                    hidden_states=np.concatenate([old.hidden_states, new.hidden_states]),
                    positions=np.concatenate([old.positions, at]),
                )
            if new.positions[-1] + BLOCK >= 512:
                continue
            n = 0 if old is None else len(old.positions)
            at = new.positions[n:].astype(np.int32)
            blocks.feed([row], [at], [new.hidden_states[n:]], [at])
            kept[row] = new
        elif what == "draft" and kept:
            for row, its in said(blocks, kept).items():
                at = kept[row].positions.astype(np.int32)
                fresh.feed([0], [at], [kept[row].hidden_states], [at])
                assert said(fresh, {0: kept[row]})[0] == its
                fresh.kv.release(0)
        elif what == "fork" and kept:
            src, dst = data.draw(st.sampled_from(sorted(kept))), 4 + max(kept)
            end = data.draw(st.integers(1, int(kept[src].positions[-1]) + 1))
            n = int(np.searchsorted(kept[src].positions, end))
            if n:
                blocks.kv.fork(src, dst, n)
                kept[dst] = kept[src]._replace(
                    hidden_states=kept[src].hidden_states[:n], positions=kept[src].positions[:n]
                )
        elif what == "release" and kept:
            row = data.draw(st.sampled_from(sorted(kept)))
            del kept[row]
            blocks.kv.release(row)
            assert blocks.kv.length(row) == 0
        check_rows(blocks, kept)
    release_all(blocks, kept)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("confidence", [False, True])
def test_tokens_are_those_of_the_largest_scores(
    temperature: float, confidence: bool, target: NativeModel, rng: np.random.Generator
) -> None:
    """Slot by slot: what the reference picks of the network's logits, and the chance that it tells."""
    its = checkpoint(confidence=confidence)
    blocks = NativeParallel(target, its)
    for seed in range(4):
        row = some(rng, 20, temperature=temperature)
        blocks.feed([seed], [row.positions], [row.hidden_states], [row.positions])
        tokens, confidence_ = said(blocks, {seed: row})[seed]
        chances = np.array(confidence_) / np.array([1.0, *confidence_[:-1]])
        ask = seed, row.anchor, 20, BLOCK, None
        normed, logits = blocks.kv.network.states([ask])
        token = row.anchor
        for slot, found in enumerate(logits):
            none = np.zeros((1, blocks.rank), np.float32)
            before, bias, _ = blocks.kv.network.bias(np.array([token], np.int32), normed[slot : slot + 1], none)
            found = found + bias[0]
            if temperature:
                (place,), (gain,) = chosen(found, blocks.ids, chooser(temperature, seed), slot, 1)
                chance = float(np.exp(gain))
            elif confidence:
                place = int(found.argmax())
                weight, its_bias = (its.tensors[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
                chance = float(1 / (1 + np.exp(-(weight[0] @ np.concatenate([normed[slot], before[0]]) + its_bias[0]))))
            else:
                place = int(found.argmax())
                chance = float(1 / np.exp(found.astype(np.float64) - found.max()).sum())
            assert tokens[slot] == blocks.ids[place]
            np.testing.assert_allclose(chances[slot], chance, rtol=1e-4)
            token = int(blocks.ids[place])
    assert RIVALS == 8  # kShared of native/model/parallel.cpp
    blocks.close()


@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn", "selector"])
def test_a_tree_is_the_likeliest_of_all_paths(kind: str, target: NativeModel, rng: np.random.Generator) -> None:
    """All paths of 3 tokens among 12, enumerated with what the heads say after each; no other tree of as many nodes has
    a larger sum of path probabilities (DDTree, arXiv 2604.12989)."""
    size, slots, nodes = 12, 3, 20
    shape: dict[str, Any] = {"markov_rank": 0} if kind == "none" else {"markov": kind}
    shape["candidates"] = 9 if kind == "selector" else 0
    config = ParallelConfig(DECODER, VOCAB, size, (0, 1, 2), **{"block": 3, "mask_token": 6, "markov_rank": 32,
                            "confidence": False, **shape})  # fmt: skip
    blocks, row = NativeParallel(target, learned.random_checkpoint(3, config, sharp=2.0)), some(rng, 20)
    blocks.feed([0], [row.positions], [row.hidden_states], [row.positions])
    network, none = blocks.kv.network, np.zeros((1, blocks.rank), np.float32)
    normed, logits = network.states([(0, row.anchor, 20, slots, None)])

    def paths(token: int, left: Any, path: tuple[int, ...], chance: float) -> Iterator[tuple[float, tuple[int, ...]]]:
        if (slot := len(path)) == slots:
            return
        found = logits[slot].astype(np.float64)
        if kind != "none":
            _, bias, left = network.bias(np.array([token], np.int32), normed[slot : slot + 1], left)
            found = found + bias[0]
        shares = np.exp(found - found.max())
        for place, share in enumerate(shares / shares.sum()):
            longer = *path, int(blocks.ids[place])
            yield chance * share, longer
            yield from paths(longer[-1], left, longer, chance * share)

    every = sorted(paths(row.anchor, none, (), 1.0), reverse=True)[:nodes]
    unread = np.zeros(0, np.int32)
    found = blocks.draft([Ask(0, unread, None, nodes, slots, 4, None, 0.0, row.anchor, 20)])
    assert found.parents is not None
    assert found.confidence is not None
    tree: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens[0].tolist(), found.parents[0].tolist(), strict=True):
        tree.append((*(tree[parent] if parent >= 0 else ()), token))
    assert sorted(tree) == sorted(path for _, path in every)
    np.testing.assert_allclose(np.sort(found.confidence[0])[::-1], [chance for chance, _ in every], rtol=1e-4)
    blocks.close()


def test_faults_leave_everything_as_it_was(target: NativeModel, rng: np.random.Generator) -> None:
    blocks, row = NativeParallel(target, checkpoint()), some(rng, 60)
    blocks.feed([1], [row.positions], [row.hidden_states], [row.positions])
    expected, size = said(blocks, {1: row}), blocks.kv.bytes
    native, its = blocks.kv.network, 1
    broken = row.hidden_states.copy()
    broken[3, 1, 3] = np.nan
    blocks.feed([2], [row.positions], [broken], [row.positions])
    with pytest.raises(NotFiniteError, match="check its weights"):
        said(blocks, {1: row, 2: row})
    blocks.kv.release(2)
    for asks, wrong in (
        ([(its, VOCAB, 60, 1, None, 1, 1)], "token 1000 is not"),
        ([(its, 1, 60, 8, None, 1, 1)], "8 slots of 7"),
        ([(its, 1, 512, 1, None, 1, 1)], "position 512"),
        ([(its, 1, 60, 1, {**(described(chooser(1.0, 0)) or {}), "temperature": np.inf}, 1, 1)], "temperature"),
        ([(its, 1, 60, 1, None, 0, 1)], "0 nodes"),
        ([(its, 1, 60, 1, None, 1, 1)] * 2, "appears twice"),
        ([], "nothing"),
    ):
        with pytest.raises(ValueError, match=wrong):
            native.draft(asks)
    with pytest.raises(ValueError, match="differ in length"):
        native.read([(its, row.hidden_states, row.positions[:5])])
    with pytest.raises(ValueError, match="must be"):
        native.read([(its, row.hidden_states[:, :2].copy(), row.positions)])
    with pytest.raises(ValueError, match="more than 512"):
        native.read([(its, rng.normal(size=(453, LAYERS, HIDDEN)).astype(np.float32), np.arange(453, dtype=np.int32))])
    assert said(blocks, {1: row}) == expected
    assert blocks.kv.bytes == size
    blocks.kv.check([1])
    blocks.close()
    blocks.close()
    with pytest.raises(ValueError, match="closed"):
        blocks.kv.growth(1, 3)


def test_checkpoints_that_do_not_fit(target: NativeModel) -> None:
    for options, change, wrong in (
        ({}, {"fc.weight": None}, "no tensor 'fc.weight'"),
        ({}, {"fc.weight": np.zeros((64, 100), np.float32)}, "fc is 64 x 100"),
        ({}, {"hidden_norm.weight": np.ones(3, np.float32)}, "norm of its contexts has 3"),
        ({}, {"markov_head.markov_w2.weight": np.zeros((5, 32), np.float32)}, "Markov"),
        ({"block": 129}, {}, "block of 129"),
        ({"mask_token": VOCAB}, {}, "mask token is 1000"),
    ):
        its = checkpoint(**options)
        tensors = {name: values for name, values in {**its.tensors, **change}.items() if values is not None}
        with pytest.raises(DrafterError, match=wrong):
            NativeParallel(target, Checkpoint("parallel", its.config, tensors))
