"""EAGLE-3 natively: the network is the reference's, drafts are its trees, and no bit depends on company."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import BLOCKS, Tiny, check_rows, dequantized, feed, packed, random_bytes, release_all

from outpace import _native
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import Decoder, EagleConfig
from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.native import NativeEagle
from outpace.errors import DrafterError, MemoryLimitError, NotFiniteError, ParameterError
from outpace.exact.noise import Noise, Stream
from outpace.exact.sampling import Chooser
from outpace.models.native.model import NativeModel
from outpace.params import SamplingParams
from tests.learned import random_checkpoint
from tests.oracles.networks import Eagle, grown

VOCAB, DRAFT, LAYERS, HIDDEN = 1000, 600, 3, 64
SIZES = {"vocab": VOCAB}


def config(**options: Any) -> EagleConfig:
    shape = {
        "hidden": 64, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "eps": 1e-5,
        "rope_theta": 10000.0, "max_length": 512,
    }  # fmt: skip
    return EagleConfig(
        Decoder(**{**shape, **options.pop("decoder", {})}), VOCAB, DRAFT, **{"hidden_layers": (0, 1, 2), **options}
    )


def entries(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    return rng.integers(0, VOCAB, n).astype(np.int32), rng.normal(0, 1, (n, LAYERS, HIDDEN)).astype(np.float32)


def chooser(temperature: float, seed: int = 7, index: int = 5) -> Chooser:
    return Chooser(SamplingParams(temperature=temperature), Noise(seed, 1), index)


def paths_of(drafts: Any, i: int) -> dict[tuple[int, ...], float]:
    draft = drafts.row(i)
    paths: list[tuple[int, ...]] = []
    for n in range(len(draft)):
        parent = draft.parents[n]
        assert parent < n
        paths.append((*(paths[parent] if parent >= 0 else ()), draft.tokens[n]))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, drafts.confidence[i].tolist(), strict=False))


def same(a: Any, b: Any) -> bool:
    """Whether drafts of one row are the same, bit for bit."""
    return (
        all(np.array_equal(x, y) for x, y in ((a.tokens, b.tokens), (a.widths, b.widths), (a.confidence, b.confidence)))
        and (a.parents is None) == (b.parents is None)
        and (a.parents is None or np.array_equal(a.parents, b.parents))
    )


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Iterator[NativeModel]:
    model = tiny.load("Q8_0", "llama", SIZES, threads=2)
    yield model
    model.close()


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_gathered_rows_are_the_matrix_s_own(kind: str, rng: np.random.Generator) -> None:
    raw = random_bytes(rng, kind, 50, 512)
    ids = np.sort(rng.choice(50, 37, replace=False)).astype(np.int32)
    its = _native.gather(_native.Arena(), packed(raw, kind, 50, 512), ids)
    again = packed(np.ascontiguousarray(raw[ids]), kind, 37, 512)
    assert its.format == again.format
    assert np.array_equal(its.packed, again.packed)
    assert np.array_equal(its.unpack(), dequantized(raw, kind)[ids])
    with pytest.raises(ValueError, match="row 50 is not one"):
        _native.gather(_native.Arena(), its, np.array([50], np.int32))


OPTIONS: list[dict[str, Any]] = [
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "decoder": {"qk_norm": True, "rope_theta": 500.0}},
    {"fc_norm": True, "norm_before_residual": True, "norm_output": True, "decoder": {"heads": 6}},
]


@pytest.mark.parametrize(("options", "own"), [*((its, False) for its in OPTIONS), (OPTIONS[0], True)])
def test_network(options: dict[str, Any], own: bool, tiny: Tiny, isa: str, rng: np.random.Generator) -> None:
    """Logits along a chain, and the trees, are the reference's: float32 weights beside a float32 target."""
    model = tiny.load("F32", "llama", SIZES, threads=2, isa=isa)
    its = config(**options)
    checkpoint = random_checkpoint(rng, its, head=own, embedding=own, sharp=1.5)
    head = NativeEagle(model, checkpoint, dtype="float32", kv_dtype="float32")
    embedding = model.native.embedding.unpack()
    reference = Eagle(checkpoint, embedding, embedding[head.ids])
    tokens, hidden_states = entries(rng, 20)
    head.feed([4], [tokens[:16]], [hidden_states[:16]])
    real = tokens[16:], hidden_states[16:]
    expected = reference.logits(tokens, hidden_states, [])
    (got,), given_ = head.extend([4], [real[0]], [real[1]])
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())
    path: list[int] = []
    for _ in range(3):
        path.append(int(head.ids[np.argmax(got)]))
        expected = reference.logits(tokens, hidden_states, path)
        (got,), given_ = head.extend([4], [np.array(path[-1:], np.int32)], given_)
        np.testing.assert_allclose(got, expected, atol=5e-4 * np.abs(expected).max())
    head.kv.truncate(4, 16)
    known: dict[tuple[int, ...], Any] = {}

    def logits_after(path: tuple[int, ...]) -> Any:
        if path not in known:
            known[path] = reference.logits(tokens, hidden_states, list(path))
        return known[path]

    for choice in (None, chooser(0.8)):
        for nodes, levels, branch in ((4, 4, 1), (16, 4, 4), (3, 2, 2)):
            drafts = head.draft([Ask(4, *real, nodes, levels, branch, choice)])
            assert head.kv.length(4) == 20
            paths = paths_of(drafts, 0)
            wanted = grown(logits_after, reference.ids, nodes, levels, branch, choice)
            # What is nearly as likely as the last one that fits may take its place.
            least = min(wanted.values())
            assert len(paths) == len(wanted)
            for path_, chance in {**wanted, **paths}.items():
                assert (path_ in paths and path_ in wanted) or abs(chance - least) < 1e-3 * least, path_
            for path_ in paths.keys() & wanted.keys():
                assert abs(paths[path_] - wanted[path_]) < 2e-3 * wanted[path_]
            head.kv.truncate(4, 16)
    head.close()
    model.close()


def test_trees_are_the_union_of_their_chains(target: NativeModel, rng: np.random.Generator) -> None:
    """Every node has the probability, to the bit of float32, that it has where its path is extended entry by entry."""
    head = NativeEagle(target, random_checkpoint(rng, config(fc_norm=True, norm_output=True), sharp=2.0))
    tokens, hidden_states = entries(rng, 63)
    head.feed([0], [tokens], [hidden_states])
    last = entries(rng, 1)
    drafts = head.draft([Ask(0, *last, 24, 5, 4)])
    paths = paths_of(drafts, 0)
    assert max(map(len, paths)) > 2
    for path, chance in paths.items():
        head.kv.truncate(0, 63)
        (logits,), given_ = head.extend([0], [last[0]], [last[1]])
        expected = 1.0
        for depth, token in enumerate(path):
            if depth:
                (logits,), given_ = head.extend([0], [np.array([path[depth - 1]], np.int32)], given_)
            scaled = np.exp(logits.astype(np.float64) - np.float64(logits.max()))
            expected *= scaled[np.searchsorted(head.ids, token)] / scaled.sum()
        assert abs(chance - expected) <= 1e-7 * expected


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_bit_depends_on_company(
    quantize: str | None, temperature: float, tiny: Tiny, isa: str, rng: np.random.Generator
) -> None:
    """Alone or among others, fed at once or in pieces, with 1 or more threads: the same drafts."""
    checkpoint = random_checkpoint(rng, config(norm_output=True), sharp=2.0)
    rows = [
        (*entries(rng, n), plan) for n, plan in ((1, (4, 4, 1)), (64, (16, 4, 4)), (131, (9, 3, 3)), (5, (7, 5, 2)))
    ]
    before = None
    for threads in (1, 2, 3):
        model = tiny.load("Q4_1", "llama", SIZES, threads=threads, isa=isa)
        model.runtime.claims = threads == 3
        head = NativeEagle(model, checkpoint, quantize)
        alone = [
            head.draft([Ask(i, tokens, hidden_states, *plan, chooser(temperature, i))])
            for i, (tokens, hidden_states, plan) in enumerate(rows)
        ]
        for i, (tokens, hidden_states, _) in enumerate(rows):  # in pieces
            head.kv.truncate(i, 0)
            for start in range(0, len(tokens) - 1, 3 + 17 * i):
                end = min(start + 3 + 17 * i, len(tokens) - 1)
                head.feed([i], [tokens[start:end]], [hidden_states[start:end]])
        together = head.draft(
            [
                Ask(i, tokens[-1:], hidden_states[-1:], *plan, chooser(temperature, i))
                for i, (tokens, hidden_states, plan) in enumerate(rows)
            ]
        )
        for i, its in enumerate(alone):
            assert paths_of(its, 0) == paths_of(together, i), i
        assert before is None or all(same(a, b) for a, b in zip(before, alone, strict=True))
        before = alone
        head.kv.check(range(4))
        head.close()
        model.close()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_ragged_calls(target: NativeModel, data: st.DataObject) -> None:
    """Feeds, drafts, forks, cuts and releases in any order leave each row what its entries alone would make it."""
    rng = np.random.default_rng(5)
    head = NativeEagle(target, random_checkpoint(rng, config(), sharp=2.0))
    alone = NativeEagle(target, random_checkpoint(np.random.default_rng(5), config(), sharp=2.0))
    kept: dict[int, list[tuple[int, Any]]] = {}
    for _ in range(data.draw(st.integers(3, 10))):
        what = data.draw(st.sampled_from(["draft", "draft", "fork", "cut", "release"]))
        if what == "draft":
            rows = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
            asks = []
            for row in rows:
                tokens, hidden_states = entries(rng, data.draw(st.integers(1, 70)))
                kept.setdefault(row, []).extend(zip(tokens, hidden_states, strict=True))
                plan = data.draw(st.sampled_from([(0, 1, 1), (3, 3, 1), (6, 3, 2), (1, 1, 4)]))
                asks.append(Ask(row, tokens, hidden_states, *plan))
            drafts = head.draft(asks)
            for i, ask in enumerate(asks):
                assert head.kv.length(ask.row) == len(kept[ask.row])
                tokens_, states_ = (np.array(column) for column in zip(*kept[ask.row], strict=True))
                expected = alone.draft([ask._replace(row=0, tokens=tokens_, hidden_states=states_)])
                assert paths_of(drafts, i) == paths_of(expected, 0)
                alone.kv.release(0)
        elif what == "fork" and kept:
            src = data.draw(st.sampled_from(sorted(kept)))
            n, dst = data.draw(st.integers(0, len(kept[src]))), 6 + max(kept)
            head.kv.fork(src, dst, n)
            kept[dst] = kept[src][:n]
        elif what == "cut" and kept:
            row = data.draw(st.sampled_from(sorted(kept)))
            kept[row] = kept[row][: data.draw(st.integers(0, len(kept[row])))]
            head.kv.truncate(row, len(kept[row]))
        elif what == "release" and kept:
            row = data.draw(st.sampled_from(sorted(kept)))
            del kept[row]
            head.kv.release(row)
            assert head.kv.length(row) == 0
        check_rows(head, kept)
    release_all(head, kept)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 4.0])
def test_children_are_those_of_the_largest_scores(
    temperature: float, tiny: Tiny, isa: str, rng: np.random.Generator
) -> None:
    """To the last bit: the likeliest, or those of the largest logit / T + g, best first."""
    model = tiny.load("Q8_0", "llama", SIZES, threads=2, isa=isa)
    head = NativeEagle(model, random_checkpoint(rng, config(), sharp=3.0))
    for seed in range(6):
        its = entries(rng, 1)
        logits = head.extend([0], *([part] for part in its))[0][0].astype(np.float64)
        head.kv.release(0)
        its_chooser = chooser(temperature, seed)
        scaled = logits / (temperature or 1.0)
        noise = its_chooser.noise.gumbel(its_chooser.index, head.ids, Stream.CHOICE) if temperature else 0.0
        order = np.lexsort((head.ids, -(scaled + noise)))[:40]
        drafts = head.draft([Ask(0, *its, 40, 1, 40, its_chooser)])
        assert drafts.tokens[0].tolist() == head.ids[order].tolist()
        weights = np.exp(scaled + noise - (scaled + noise).max())
        rest = order if temperature else slice(None)
        np.testing.assert_allclose(drafts.confidence[0], (weights / weights[rest].sum())[order], rtol=1e-6)
        head.kv.release(0)
    head.close()
    model.close()


def test_ties_go_to_the_lower_token(target: NativeModel, rng: np.random.Generator) -> None:
    checkpoint = random_checkpoint(rng, config(), head=True)
    checkpoint.tensors["lm_head.weight"][:] = checkpoint.tensors["lm_head.weight"][0]
    head = NativeEagle(target, checkpoint)
    drafts = head.draft([Ask(0, *entries(rng, 2), 5, 1, 5)])
    assert drafts.row(0).tokens == head.ids[:5].tolist()
    np.testing.assert_allclose(drafts.confidence, 1 / DRAFT)


def test_faults_leave_everything_as_it_was(target: NativeModel, rng: np.random.Generator) -> None:
    checkpoint = random_checkpoint(rng, config(), sharp=2.0)
    block = 2 * 2 * 16 * 2 * 64
    head = NativeEagle(target, checkpoint, limit=3 * block)
    one, two = entries(rng, 60), entries(rng, 64)
    head.feed([1], [one[0]], [one[1]])
    head.feed([2], [two[0]], [two[1]])
    assert head.kv.bytes == 2 * block
    assert head.kv.growth(1, 64) == 0
    assert head.kv.growth(1, 65) == block == head.kv.growth(9, 3)
    more = entries(rng, 5)
    asks = [Ask(1, *more, 4, 4, 1), Ask(2, *more, 4, 4, 1), Ask(3, *more, 4, 4, 1)]
    with pytest.raises(MemoryLimitError, match="kv_memory"):
        head.draft(asks)
    assert [head.kv.length(row) for row in (1, 2, 3)] == [60, 64, 0]
    assert head.kv.bytes == 2 * block
    head.kv.check([1, 2])
    broken = more[1].copy()
    broken[-1, 1, 3] = np.nan
    with pytest.raises(NotFiniteError, match="check its weights"):
        head.draft([Ask(1, more[0], broken, 4, 4, 1)])
    for wrong, said in (
        (Ask(1, more[0][:4], more[1], 1, 1, 1), "differ in length"),
        (Ask(1, more[0][:0], more[1][:0], 1, 1, 1), "no new entry"),
        (Ask(1, np.array([VOCAB], np.int32), more[1][:1], 1, 1, 1), "token 1000 is not"),
        (Ask(1, more[0], more[1][:, :2], 1, 1, 1), "must be"),
        (Ask(1, more[0], more[1], 2, 2, 65), "branches of 65"),
        (Ask(1, *entries(rng, 453), 1, 1, 1), "more than 512 entries"),
    ):
        with pytest.raises(ValueError, match=said):
            head.draft([wrong])
    with pytest.raises(ValueError, match="appears twice"):
        head.draft([asks[0], asks[0]])
    assert head.kv.length(1) == 60
    plain = NativeEagle(target, checkpoint)
    plain.feed([0], [one[0]], [one[1]])
    assert same(head.draft([asks[0]]), plain.draft([asks[0]._replace(row=0)]))
    with pytest.raises(ValueError, match="must not be there"):
        head.kv.fork(1, 2, 3)
    for row in (1, 2):
        head.kv.release(row)
    head.kv.check([])
    assert head.kv.bytes == 0
    head.close()
    head.close()
    with pytest.raises(ValueError, match="closed"):
        head.draft([asks[0]])


def test_checkpoints_that_do_not_fit(target: NativeModel, rng: np.random.Generator) -> None:
    its = random_checkpoint(rng, config())
    for change, said in (
        ({"fc.weight": None}, "no tensor 'fc.weight'"),
        ({"fc.weight": np.zeros((64, 100), np.float32)}, "fc is 64 x 100"),
        ({"layers.0.mlp.up_proj.weight": np.zeros((64, 64), np.float32)}, "a gate matrix is 96 x 64"),
        ({"d2t": np.arange(DRAFT)[::-1].copy()}, "must ascend"),
        ({"d2t": np.full(DRAFT, VOCAB)}, "row 1000 is not one"),
    ):
        tensors = {k: v for k, v in {**its.tensors, **change}.items() if v is not None}
        with pytest.raises(DrafterError, match=said):
            NativeEagle(target, Checkpoint("eagle", its.config, tensors))
    with pytest.raises(ParameterError, match="quantize='int3'"):
        NativeEagle(target, its, "int3")
    with pytest.raises(ParameterError, match="give one"):
        NativeEagle(target, its, "int8", dtype="float32")


def test_it_lives_beside_its_target(tiny: Tiny, rng: np.random.Generator) -> None:
    """Target and drafter compute in turn in the same working memory, and neither sees what the other left there."""
    model, other = (tiny.load("Q8_0", "llama", SIZES, threads=2) for _ in range(2))
    head = NativeEagle(model, random_checkpoint(rng, config(), sharp=2.0))
    lone = NativeEagle(other, random_checkpoint(np.random.default_rng(1), config(), sharp=2.0))
    text, more = rng.integers(0, VOCAB, 40), entries(rng, 30)
    row, its_row = model.kv.alloc(), other.kv.alloc()
    expected = feed(other, its_row, text)
    got = []
    for i in range(0, 40, 8):
        got.append(feed(model, row, text[i : i + 8]))
        head.draft([Ask(0, more[0][i // 2 : i // 2 + 4], more[1][i // 2 : i // 2 + 4], 8, 4, 3)])
    assert np.array_equal(np.concatenate(got), expected)
    lone.close()
    model.close()  # the drafter goes on: it has its own hold on the runtime
    assert len(head.draft([Ask(0, *more, 4, 4, 1)]).row(0)) == 4
    head.close()
    other.close()


def test_drafters_and_their_target_compute_for_threads_of_python_at_once(
    target: NativeModel, rng: np.random.Generator
) -> None:
    checkpoint = random_checkpoint(rng, config(norm_output=True), sharp=2.0)
    heads = [NativeEagle(target, checkpoint) for _ in range(3)]
    ask, text = Ask(0, *entries(rng, 70), 12, 4, 3, chooser(0.8)), rng.integers(0, VOCAB, 40)
    said = feed(target, target.kv.alloc(), text)
    drafted = heads[0].draft([ask])
    heads[0].kv.release(0)

    def work(i: int) -> None:
        for _ in range(5):
            if i < len(heads):
                assert same(heads[i].draft([ask]), drafted)
                heads[i].kv.check([0])
                heads[i].kv.release(0)
            else:
                row = target.kv.alloc()
                assert np.array_equal(feed(target, row, text, 9), said)
                target.kv.free(row)

    with ThreadPoolExecutor(len(heads) + 1) as threads:
        list(threads.map(work, range(len(heads) + 1)))
    for head in heads:
        head.close()
