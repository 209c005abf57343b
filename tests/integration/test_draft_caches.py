"""Draft models' caches in step with their rows: with hidden states beside tokens, interrupted, and without memory.

On tiny random models of both backends. What a cache holds is judged by what is said from it, against a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace.arrays import F32, I32
from outpace.drafters.base import Event, RowView
from outpace.drafters.forward.feature_cache import FeatureCache
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.forward.own_cache import CATCH_UP, OwnCache
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, Model
from outpace.models.formats.gguf import GGUFFile
from outpace.models.native import model as native
from tests.driving import finished
from tests.native.native_helpers import Tiny
from tests.tap_drafter import TapDrafter

VOCAB = 12  # small, so that drafts that mean nothing are accepted sometimes
SIZES = {"vocab": VOCAB, "hidden": 64, "context": 2048}
Load = Any  # (layers) -> Model


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    with Tiny() as made:
        yield made


@pytest.fixture(
    params=[
        "transformers",
        pytest.param(
            "native", marks=pytest.mark.skipif(not native.available(), reason="the native backend is not built")
        ),
    ]
)
def load(request: pytest.FixtureRequest, tiny: Tiny) -> Load:
    def make(layers: int, limit: int | None = None) -> Model:
        if request.param == "native":
            return tiny.load("F32", sizes=SIZES | {"layers": layers}, threads=1, kv_dtype="float32", kv_memory=limit)
        import torch

        from outpace.models.torch.gguf import build
        from outpace.models.torch.model import TransformersModel

        module = build(GGUFFile.open(tiny.path("F32", **SIZES, layers=layers)), torch.float32, torch.device("cpu"))
        return TransformersModel(module, name=f"tiny-{layers}", kv_memory=limit)

    return make


def view(row: int, tokens: list[int], request: int = 0) -> RowView:
    chooser = Chooser(SamplingParams(), Noise(0), 0)
    return RowView(row, request, np.array(tokens, np.int32), 2048, chooser, "coupled")


class Target:
    """The target's side of some rows, by hand: what is committed, and the taps of what became final."""

    LAYER = 1

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokens: dict[int, list[int]] = {}

    def start(self, prompt: list[int], drafter: Any, chunk: int = 7) -> int:
        row = self.model.kv.alloc()
        self.tokens[row] = prompt
        for at in range(0, len(prompt) - 1, chunk):
            drafter.observe([self.run(row, at, min(at + chunk, len(prompt) - 1))])
        return row

    def commit(self, row: int, tokens: list[int]) -> Event:
        length = len(self.tokens[row])
        self.tokens[row] = self.tokens[row] + tokens
        return self.run(row, length - 1, length - 1 + len(tokens))

    def run(self, row: int, start: int, end: int) -> Event:
        """KV of positions ``start .. end - 1``, and the event that says so."""
        its = np.array(self.tokens[row], np.int32)
        batch = Batch.pack([row], [its[start:end]], [start], [False], taps=(self.LAYER,))
        taps = self.model.forward(batch).taps(np.arange(end - start, dtype=np.int32))
        return Event(row, start + 1, its[start + 1 : end + 1], None, taps)

    def taps(self, row: int) -> Event:
        """All of the row's, in one go."""
        self.model.kv.truncate(row, 0)
        return self.run(row, 0, len(self.tokens[row]) - 1)


def propose(drafter: TapDrafter, target: Target, rows: list[int], size: int) -> tuple[list[list[int]], list[F32]]:
    drafter.said = []
    drafts = drafter.propose([view(row, target.tokens[row]) for row in rows], np.full(len(rows), size, np.int32))
    return [drafts.row(i).tokens.tolist() for i in range(len(rows))], drafter.said


class Careless(FeatureCache):
    """Believes its own predictions."""

    def _known(self, row: int, tokens: I32) -> int:
        self._states[row].final = self.length(row)
        return super()._known(row, tokens)


def play(load: Load, careless: bool) -> float:
    """Commits that follow the drafts now and then; the largest difference from what a fresh cache says."""
    target, rng = Target(load(3)), np.random.default_rng(1)
    drafter, fresh = (TapDrafter(target.model, load(2), Target.LAYER) for _ in range(2))
    if careless:
        drafter.cache = Careless(drafter.cache.model, 1)
    rows = [target.start(rng.integers(0, VOCAB, n).tolist(), drafter) for n in (3, 30, 12)]
    worst = 0.0
    for step in range(10):
        asked = rows if step % 3 else rows[:2]  # one does not draft in every step
        found, said = propose(drafter, target, asked, 4)
        for i, row in enumerate(asked):
            fresh.observe([target.taps(row)])
            alone, said_alone = propose(fresh, target, [row], 4)
            fresh.release(row)
            worst = max(worst, *(float(np.abs(a[i] - b[0]).max()) for a, b in zip(said, said_alone, strict=True)))
            assert careless or found[i] == alone[0]
        for row, draft in zip(rows, [*found, []], strict=False):
            accepted = int(rng.integers(0, len(draft) + 1))
            drafter.observe([target.commit(row, [*draft[:accepted], int(rng.integers(0, VOCAB))])])
        drafter.check(rows)
    for row in rows:
        drafter.release(row)
    drafter.check([])
    assert drafter.bytes == 0
    return worst


def test_entries_made_from_predicted_states_are_replaced(load: Load) -> None:
    assert play(load, careless=False) < 1e-4
    assert play(load, careless=True) > 1e-2


def test_a_fork_takes_real_states_along(load: Load) -> None:
    target = Target(load(3))
    drafter, fresh = (TapDrafter(target.model, load(2), Target.LAYER) for _ in range(2))
    row = target.start([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], drafter)
    propose(drafter, target, [row], 3)
    drafter.observe([target.commit(row, [1, 2])])
    other = target.model.kv.alloc()
    target.model.kv.fork(row, other, 10)
    target.tokens[other] = [*target.tokens[row][:11], 7]
    drafter.fork(row, other, 11)
    drafter.observe([target.run(other, 10, 11)])
    found = propose(drafter, target, [row, other], 4)
    for i, its in enumerate((row, other)):
        fresh.observe([target.taps(its)])
        alone = propose(fresh, target, [its], 4)
        fresh.release(its)
        assert found[0][i] == alone[0][0]
        np.testing.assert_allclose(np.stack(found[1])[:, i], np.stack(alone[1])[:, 0], atol=1e-4)


def test_states_that_never_came_cost_nothing_but_acceptance(load: Load) -> None:
    """A reused prefix has none; a row that waits for long keeps what came, not whole forwards."""
    target = Target(load(3))
    drafter, fresh = (TapDrafter(target.model, load(2), Target.LAYER) for _ in range(2))
    tokens = np.random.default_rng(2).integers(0, VOCAB, 2 * CATCH_UP + 40).tolist()
    row = target.model.kv.alloc()
    target.tokens[row] = tokens
    target.run(row, 0, 20)  # nobody saw these
    for at in range(20, len(tokens) - 1, 100):
        drafter.observe([target.run(row, at, min(at + 100, len(tokens) - 1))])
    assert sum(piece.count for piece in drafter.cache._states[row].pieces if piece.taps is not None) <= CATCH_UP
    found, _ = propose(drafter, target, [row], 3)
    whole = target.taps(row)
    assert whole.taps is not None
    late = np.arange(20, len(tokens) - 1, dtype=np.int32)
    fresh.observe([Event(row, 21, whole.tokens[20:], None, whole.taps.at(late))])
    assert found == propose(fresh, target, [row], 3)[0]
    unseen = TapDrafter(target.model, load(2), Target.LAYER)
    assert len(propose(unseen, target, [row], 3)[0][0]) == 3
    target.tokens[row] = [5]
    assert propose(unseen, target, [row], 3)[0] == [[]]  # no state comes before a first token


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=1.0, seed=3)]
)
def test_a_drafter_that_reads_taps_says_what_plain_decoding_says(load: Load, params: SamplingParams) -> None:
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    with Engine(load(3)) as plain:
        expected = [r.token_ids for r in plain.generate_many(prompts, params)]
    target = load(3)
    with Engine(target, drafter=TapDrafter(target, load(2), 1), size=4, prefill_chunk=8) as engine:
        requests = [engine.add(prompt, params) for prompt in prompts]
        found = finished(engine)
    assert [found[request, 0].token_ids for request in requests] == expected
    assert sum(result.stats.accepted for result in found.values()) > 0


# -- without features --------------------------------------------------------------------------------------------------


def chain(drafter: ModelDrafter, views: list[RowView], size: int = 4) -> list[list[int]]:
    drafts = drafter.propose(views, np.full(len(views), size, np.int32))
    return [drafts.row(i).tokens.tolist() for i in range(len(views))]


def test_what_an_interrupted_call_left_is_not_believed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after each call that the cache makes of its model, in turn: then it drafts what a fresh one drafts."""
    views = [view(0, [1, 2, 3, 4, 5]), view(1, [6, 7])]
    later = [view(0, [1, 2, 3, 4, 5, 0, 1]), view(1, [6, 7, 7, 7])]
    fresh = ModelDrafter(load(2), "fresh", VOCAB)
    expected, expected_later = chain(fresh, views), chain(fresh, later)
    interrupted = 0
    for after in range(60):
        drafter = ModelDrafter(load(2), "model", VOCAB)
        calls = [0]

        def stop(inner: Any, calls: list[int] = calls, after: int = after) -> Any:
            def call(*args: Any, **kw: Any) -> Any:
                result = inner(*args, **kw)
                calls[0] += 1
                if calls[0] == after + 1:
                    raise KeyboardInterrupt
                return result

            return call

        model = drafter.model
        for owner, name in (
            (model, "forward"),
            (model.kv, "alloc"),
            (model.kv, "truncate"),
            (model.kv, "fork"),
            (model.kv, "free"),
        ):
            monkeypatch.setattr(owner, name, stop(getattr(owner, name)))
        try:
            chain(drafter, views)
            drafter.fork(0, 2, 3)
            chain(drafter, later)
            drafter.release(2)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        assert chain(drafter, later) == expected_later
        drafter.release(2)
        drafter.check([0, 1])
        assert chain(drafter, views) == expected
        for row in (0, 1):
            drafter.release(row)
        drafter.check([])
        assert (drafter.bytes, model.kv.rows) == (0, [])
    assert interrupted > 8


def test_without_memory_nothing_is_drafted_and_the_row_is_given_back(load: Load) -> None:
    one = load(2).kv.bytes_for(1)
    drafter = ModelDrafter(load(2, 2 * one), "model", VOCAB)
    block = drafter.model.kv.block
    long, short, third = [1] * (block + 5), [2, 3], [4, 5]
    roomy = ModelDrafter(load(2), "model", VOCAB)
    expected = chain(roomy, [view(0, short), view(1, third), view(2, long)])
    assert drafter.growth(0, block + 1) == 2 * one
    assert chain(drafter, [view(0, short), view(1, third), view(2, long)]) == [*expected[:2], []]
    assert drafter.bytes == 2 * one
    assert drafter.growth(0, block) == 0
    assert drafter.growth(0, block + 1) == one
    drafter.check([0, 1])
    drafter.release(0)
    drafter.release(1)
    assert chain(drafter, [view(2, long)]) == expected[2:]
    drafter.release(2)
    assert drafter.bytes == 0
    drafter.check([])


def test_a_row_is_caught_up_with_in_chunks_and_shares_a_fork(load: Load) -> None:
    tokens = np.random.default_rng(3).integers(0, VOCAB, CATCH_UP + 100).tolist()
    cache = OwnCache(load(2))
    new = cache.begin(0, np.array(tokens, np.int32))
    assert len(new) == len(tokens)
    output, last = cache.feed([0], [new])
    cache.fork(0, 1, 300)
    assert (cache.length(0), cache.length(1)) == (len(tokens), 300)
    assert cache.bytes == cache.model.kv.bytes_for(len(tokens))
    again = cache.begin(1, np.array([*tokens[:299], *tokens[299:]], np.int32))
    assert len(again) == len(tokens) - 300
    other, at = cache.feed([1], [again])
    np.testing.assert_allclose(output.logits(last), other.logits(at), atol=1e-4)
    cache.fork(7, 1, 5)  # of a row that is not known: nothing
    assert 1 not in cache
    cache.check([0])
