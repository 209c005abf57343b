"""Draft models' caches in step with their rows: interrupted, and without memory.

On tiny random models of both backends. What a cache holds is judged by what is said from it, against a fresh one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outpace import SamplingParams
from outpace.drafters.base import RowView
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.forward.own_cache import CATCH_UP, OwnCache
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from tests.integration.conftest import VOCAB, Load


def view(row: int, tokens: list[int], request: int = 0) -> RowView:
    chooser = Chooser(SamplingParams(), Noise(0), 0)
    return RowView(row, request, np.array(tokens, np.int32), 2048, chooser, "coupled")


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
