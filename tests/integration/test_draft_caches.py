"""Draft models' caches in step with their rows: interrupted, and without memory.

On tiny random models of both backends. What a cache holds is judged by what is said from it, against a fresh one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace.common.arrays import I32
from outpace.control.cost import Cost
from outpace.drafters.base import DraftCost, Drafter, RowView
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.forward import own_cache
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.forward.own_cache import PIECE, OwnCache
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.none import NoDrafter
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import Acceptance
from tests.by_hand import PROMPTS, answers
from tests.integration.conftest import SIZES, VOCAB, Load
from tests.native.native_helpers import Tiny
from tests.toy import ToyModel, ToyTokenizer


def view(row: int, tokens: list[int], request: int = 0) -> RowView:
    chooser = Chooser(SamplingParams(), Noise(0), 0)
    return RowView(row, request, np.array(tokens, np.int32), 2048, chooser, "coupled")


def chain(drafter: ModelDrafter, views: list[RowView], size: int = 4) -> list[list[int]]:
    drafts = drafter.propose(views, np.full(len(views), size, np.int32))
    return [drafts.row(i).tokens for i in range(len(views))]


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


@pytest.mark.parametrize("n", [500, 850])
def test_a_fork_of_a_row_from_the_middle_on_takes_what_growth_says(load: Load, n: int) -> None:
    """The fork may hold none of what its source holds."""
    text = np.random.default_rng(0).integers(0, 8, 900).tolist()
    own = ModelDrafter(load(2), "model", VOCAB)
    chain(own, [view(0, text)._replace(start=800)])
    own.fork(0, 1, n)
    growth, before = own.growth(1, n + 5), own.bytes
    chain(own, [view(1, text[: n + 1])])
    assert own.bytes - before == growth > 0
    own.check([0, 1])


def test_a_row_is_caught_up_with_in_chunks_and_shares_a_fork(load: Load) -> None:
    tokens = np.random.default_rng(3).integers(0, VOCAB, PIECE + 100).tolist()
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


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 2, VOCAB + 4])
def test_native_chains_are_those_of_python(tiny: Tiny, vocab: int) -> None:
    """Token for token, of rows that are behind by any number of tokens, at other sizes; and from the same cache."""

    def draft_model() -> ModelDrafter:
        return ModelDrafter(tiny.load("F32", sizes=SIZES | {"layers": 2, "vocab": vocab}), "model", VOCAB)

    rng, native, python = np.random.default_rng(4), draft_model(), draft_model()
    rows = [rng.integers(0, 10, n).tolist() for n in (1, 7, 2 * PIECE + 3)]
    for step in range(4):
        sizes = [5, 1 + step, 3 * (step > 0)]  # two calls read the long row
        drafts = python.propose(
            [view(i, tokens) for i, tokens in enumerate(rows)], np.array([5, 1 + step, 3], np.int32)
        )
        expected = [drafts.row(i) for i in range(3)]
        asked = [(i, 0, len(rows[i]), np.array(rows[i], np.int32), size) for i, size in enumerate((5, 1 + step, 3))]
        found = native.native.trees(asked)
        assert [tokens for tokens, *_ in found] == [its.tokens for its in expected]
        assert [parents for _, parents, *_ in found] == [list(range(-1, size - 1)) for size in sizes]
        for (_, _, gains, _), its in zip(found, expected, strict=True):
            np.testing.assert_allclose(gains, its.gains, rtol=1e-6)
            assert gains == sorted(gains, reverse=True)
        views = [view(i, tokens) for i, tokens in enumerate(rows)]
        assert chain(native, views, 2) == chain(python, views, 2)
        for i, tokens in enumerate(rows):
            tokens += [*expected[i].tokens[:step], int(rng.integers(10))]
    native.check([0, 1, 2])
    assert native.bytes == python.bytes
    native.close()
    assert native.native is None


@pytest.mark.parametrize("floor", [0.0, 0.02, 0.3])
def test_a_chain_ends_at_the_price_and_a_near_second_choice_stands_beside_the_first(tiny: Tiny, floor: float) -> None:
    """The chances of paths are the model's own, and C++ and Python draft the same trees."""
    models = [tiny.load("F32", sizes=SIZES | {"layers": 2}) for _ in range(3)]
    native, python, cache = (
        ModelDrafter(models[0], "model", VOCAB),
        ModelDrafter(models[1], "model", VOCAB),
        OwnCache(models[2]),
    )
    python.native = None
    rng, size, ranks = np.random.default_rng(1), np.array([12], np.int32), set()
    for row in range(12):
        tokens = rng.integers(0, 10, 9).tolist()
        one = view(row, tokens)._replace(adaptive=True, depth=3, floor=floor)
        found = python.propose([one], size)
        draft = found.row(0)
        either = [ComposedDrafter([NgramDrafter(), its]).propose([one], size) for its in (native, python)]
        assert [(its.row(0).tokens, its.row(0).parents) for its in either[:1]] == [
            (its.row(0).tokens, its.row(0).parents) for its in either[1:]
        ]
        last = -1  # of the chain
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            text = np.array([*tokens, *(draft.tokens[n] for n in draft.path(parent))], np.int32)
            output, at = cache.feed([row], [cache.begin(row, text)])
            p = np.exp(output.logits(at)[0].astype(np.float64))
            before = draft.gains[parent] if parent >= 0 else 1.0
            assert draft.gains[node] == pytest.approx(before * p[token] / p.sum(), rel=1e-4)
            rank = int((p > p[token]).sum())
            assert rank == 0 or draft.gains[node] >= max(floor, 0.15) * 0.999
            last = last if rank else node
            ranks.add(rank)
        deepest = len(draft.path(last))
        assert found.levels is not None
        assert found.levels.tolist() == [deepest]
        assert deepest == 3 if not floor else deepest == 8 or draft.gains[last] < floor or len(draft) == 12
    assert ranks == ({0} if floor == 0.3 else {0, 1})


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB + 4])
@pytest.mark.parametrize(
    ("sampling", "acceptance"),
    [
        ({"temperature": 0.0, "presence_penalty": 0.7}, "coupled"),
        ({"temperature": 0.8}, "coupled"),
        ({"temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.2}, "coupled"),
        ({"temperature": 0.0}, "rejection"),
        ({"temperature": 0.8}, "rejection"),
        ({"temperature": 0.8, "logit_bias": {3: 1.5}}, "coupled"),
    ],
)
def test_native_steps_draft_what_python_drafts(
    tiny: Tiny, sampling: dict[str, Any], acceptance: Acceptance, vocab: int
) -> None:
    """Alone and beside ngram, in rows that come, go and share what they begin with."""
    params = SamplingParams(max_tokens=25, ignore_eos=True).with_(**sampling)
    for composed in (False, True):
        found = []
        for native in (True, False):
            draft = tiny.load("F32", sizes=SIZES | {"layers": 2, "vocab": vocab})
            drafter: Any = ModelDrafter(draft, "model", VOCAB)
            if not native:
                drafter.native = None
            assert (drafter.native is not None) == native
            if composed:
                drafter = ComposedDrafter([NgramDrafter(), drafter])
            target = tiny.load("F32", sizes=SIZES | {"layers": 3})
            results = answers(target, drafter, params, prefix_rows=2, acceptance=acceptance)
            found.append([(r.token_ids, r.stats.steps, r.stats.drafted, r.stats.accepted) for r in results])
        assert found[0] == found[1]
        assert sum(drafted for _, _, drafted, _ in found[0]) > len(PROMPTS)


def test_a_row_that_has_said_what_the_draft_model_lacks_is_not_drafted_for(tiny: Tiny) -> None:
    model = tiny.load("F32", sizes=SIZES | {"layers": 2, "vocab": VOCAB - 2})
    drafter = ModelDrafter(model, "model", VOCAB)
    rows = [[2, 3, 4], [4, VOCAB - 1], [VOCAB - 2, 5]]
    for said in ([3, 0, 0], [0, 0, 0]):
        asked = [(i, 0, 1, np.array(tokens, np.int32), 3) for i, tokens in enumerate(rows)]
        assert [len(tokens) for tokens, *_ in drafter.native.trees(asked)] == said
        views = [view(i, tokens) for i, tokens in enumerate(rows)]
        assert drafter.propose(views, np.full(3, 3, np.int32)).widths.tolist() == said
        rows[0].append(VOCAB - 1)
    drafter.check([0, 1, 2])
    drafter.close()


def test_native_chains_without_memory_give_the_last_row_back(tiny: Tiny) -> None:
    def draft_model(limit: int | None) -> ModelDrafter:
        model = tiny.load("F32", sizes=SIZES | {"layers": 2}, kv_dtype="float32", kv_memory=limit)
        return ModelDrafter(model, "model", VOCAB)

    roomy = draft_model(None)
    one, block = roomy.model.kv.bytes_for(1), roomy.model.kv.block
    rows = [[2, 3], [4, 5], [1] * (block + 5)]
    asked = [(i, 0, len(tokens), np.array(tokens, np.int32), 4) for i, tokens in enumerate(rows)]
    expected = [tokens for tokens, *_ in roomy.native.trees(asked)]
    tight = draft_model(2 * one)
    assert [tokens for tokens, *_ in tight.native.trees(asked)] == [*expected[:2], []]
    assert tight.bytes == 2 * one
    tight.check([0, 1])
    tight.release(0)
    tight.release(1)
    assert [tokens for tokens, *_ in tight.native.trees(asked[2:])] == expected[2:]


def test_a_row_of_a_fixed_size_catches_up_at_once_and_an_adaptive_one_in_pieces(tiny: Tiny) -> None:
    """Natively and in Python, until both draft."""
    text = np.random.default_rng(1).integers(0, 10, 400).tolist()
    for native in (True, False):
        found = {}
        for adaptive in (True, False):
            own = ModelDrafter(tiny.load("F32", sizes=SIZES | {"layers": 2}), "model", VOCAB)
            if not native:
                own.native = None
            drafter = ComposedDrafter([NgramDrafter(60, 61), own])
            asked, calls = view(0, text)._replace(adaptive=adaptive), 0
            while not (tokens := drafter.propose([asked], np.array([4], np.int32)).row(0).tokens):
                calls += 1
            found[adaptive] = calls, tokens
        assert found[False][0] == 0
        assert found[True][0] == 400 // own_cache.CATCH_UP
        assert found[True][1][0] == found[False][1][0]


@pytest.mark.parametrize("composed", [False, True])
def test_prompts_are_read_beside_the_target_s_as_far_back_as_the_answer_pays_for(tiny: Tiny, composed: bool) -> None:
    """No step reads more than the target's own chunk or one piece, the longer an answer is the further back, a short
    prompt whole, for a very short answer nothing; the answers are plain decoding's."""
    rng, read = np.random.default_rng(3), {}
    prompts = {n: rng.integers(0, 10, n).tolist() for n in (1400, 90)}
    for length, most in ((1400, 3), (1400, 24), (1400, 40), (1400, 150), (90, 150)):
        said, lengths, starts = [], [0], [0]
        for drafts in (False, True):
            target, model = tiny.load("F32", sizes=SIZES | {"layers": 3}), tiny.load("F32", sizes=SIZES | {"layers": 2})
            own = ModelDrafter(model, "model", VOCAB)
            drafter = ComposedDrafter([NgramDrafter(), own]) if composed else own

            def note(_: Any, own: Any = own, lengths: list[int] = lengths, starts: list[int] = starts) -> None:
                lengths.append(own._cache.length(0))
                starts.append(own._cache.start(0))

            with Engine(
                target, ToyTokenizer(), drafter=drafter if drafts else NoDrafter(), cost=Cost.guess(),
                prefill_chunk=200, on_step=note if drafts else None,
            ) as engine:  # fmt: skip
                result = engine.generate(prompts[length], SamplingParams(max_tokens=most, ignore_eos=True))
            said.append(list(result.token_ids))
        assert said[0] == said[1]
        assert max(np.diff(lengths)) <= 200 + 8
        chunks = -(-(length - 1) // 200)
        read[length, most] = lengths[chunks]
        if most == 3:
            assert max(lengths) == 0
        else:
            assert starts[chunks] + lengths[chunks] == length - 1
    assert 60 < read[1400, 24] < read[1400, 40] < read[1400, 150] < 700
    assert read[90, 150] == 89


@pytest.mark.parametrize("draws", [0.0, 0.9])
def test_rows_that_are_read_from_the_middle_on_say_what_they_say_plainly(
    tiny: Tiny, draws: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several samples of a prompt, prompts that begin alike, answers that are taken up again, more rows than there is
    room for: whoever drafts, and with either driver."""
    rng = np.random.default_rng(5)
    common = rng.integers(0, 10, 260).tolist()
    prompts = [common, [*common, 1, 2, 3], rng.integers(0, 10, 300).tolist(), [4, 5, 6]]
    params = SamplingParams(max_tokens=28, temperature=draws, ignore_eos=True, allowed_tokens=tuple(range(8)))

    def said(drafter: Any, resume: list[list[int]] | None = None) -> list[list[int]]:
        target = tiny.load("F32", sizes=SIZES | {"layers": 3})
        with Engine(
            target, ToyTokenizer(), drafter=drafter, cost=Cost.guess(), max_rows=3, prefill_chunk=50, prefix_rows=2
        ) as engine:
            for i, prompt in enumerate(prompts):
                engine.add(prompt, params.with_(seed=i, n=1 if resume else 2), resume=resume[2 * i] if resume else None)
            found = {}
            while not engine.idle:
                for delta in engine.step():
                    if delta.result is not None:
                        found[delta.request, delta.sample] = list(delta.result.token_ids)
            engine.check()
        return [found[key] for key in sorted(found)]

    plain = said(NoDrafter())
    for native in (True, False):
        drafter = ModelDrafter(tiny.load("F32", sizes=SIZES | {"layers": 2}), "model", VOCAB)
        if not native:
            drafter.native = None
        starts: set[int] = set()

        def read(rows: Any, read: Any = drafter._cache.read, starts: set[int] = starts) -> Any:
            starts.update(start for _, start, _ in rows.values())
            return read(rows)

        monkeypatch.setattr(drafter._cache, "read", read)
        assert said(drafter) == plain
        assert max(starts) > 50
        again = ModelDrafter(tiny.load("F32", sizes=SIZES | {"layers": 2}), "model", VOCAB)
        assert said(again, [tokens[:5] for tokens in plain]) == plain[::2]


@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("context", [200, 1100])
def test_a_row_that_the_draft_model_has_no_room_for_is_read_from_its_middle_on(
    tiny: Tiny, size: Any, context: int
) -> None:
    """A prompt, and its answer. Natively and in Python, in pieces where half of the context is more than one."""
    prompt, found = np.random.default_rng(3).integers(0, 10, context + 600).tolist(), []
    params = SamplingParams(max_tokens=250, ignore_eos=True)
    for native in (True, False):
        model = tiny.load("F32", sizes=SIZES | {"layers": 2, "context": context})
        own = ModelDrafter(model, "model", VOCAB)
        if not native:
            own.native = None
        starts: set[int] = set()
        faults: list[str] = []

        def note(record: Any, own: Any = own, starts: set[int] = starts, faults: list[str] = faults) -> None:
            starts.add(own._cache.start(0))
            faults.extend(record.faults)

        with Engine(
            tiny.load("F32", sizes=SIZES | {"layers": 3}), ToyTokenizer(), drafter=own, cost=Cost.guess(), size=size,
            prefill_chunk=100, on_step=note,
        ) as engine:  # fmt: skip
            result = engine.generate(prompt, params)
            assert result.token_ids == engine.generate(prompt, params, drafter=False).token_ids
        assert not faults
        found.append((result.stats.steps, result.stats.drafted, starts))
    if size == 4:
        assert found[0] == found[1]
        assert found[0][1] > 2 * found[0][0]
        assert len(found[0][2]) >= (4 if context == 200 else 2)


def test_a_row_from_the_middle_on_is_one_that_begins_there(tiny: Tiny) -> None:
    """Natively and in Python: rolled back, forked, read anew from elsewhere where its tokens have changed, and never
    where it lacks nothing; it may be longer than the draft model's positions."""
    sizes = SIZES | {"layers": 2}

    def models() -> list[ModelDrafter]:
        made = [ModelDrafter(tiny.load("F32", sizes=sizes), "model", VOCAB) for _ in range(2)]
        made[1].native = None
        return made

    def drafted(own: ModelDrafter, row: int, tokens: list[int], start: int) -> list[int]:
        drafter = ComposedDrafter([NgramDrafter(60, 61), own])  # which asks C++
        return drafter.propose([view(row, tokens)._replace(start=start)], np.array([4], np.int32)).row(0).tokens

    rng = np.random.default_rng(8)
    text = rng.integers(0, 10, 400).tolist()
    other = [*text[:350], *rng.integers(0, 10, 50).tolist()]
    for own, fresh in zip(models(), models(), strict=True):
        cache = own._cache
        for number, (tokens, start, begins) in enumerate((
            (text[:380], 300, 300),  # a tail
            (text[:390], 300, 300),  # goes on
            (text[:390], 0, 300),  # it lacks nothing but what was before it
            (text[:370], 300, 300),  # rolled back
            (other, 300, 300),  # and again, where the text has changed
            (text[:200], 0, 0),  # nothing is left of it: all
            (text[:210], 150, 0),  # goes on, since it has what is before that, too
            (text, 350, 350),  # which it does not here
        )):  # fmt: skip
            assert drafted(own, 0, tokens, start) == drafted(fresh, number + 1, tokens, begins)
            assert (cache.start(0), cache.length(0) >= len(tokens) - begins) == (begins, True)
        own.fork(0, 100, 380)
        assert (cache.start(100), cache.length(100)) == (350, 30)
        own.fork(0, 101, 340)
        assert cache.length(101) == 0
        for row in (100, 101):
            assert drafted(own, row, other, 320) == drafted(fresh, 50 + row, other, 350 if row == 100 else 320)
        own.check([0, 100, 101])


@pytest.mark.parametrize("returned", [[0], {0: 5}, {0: (1, 2, 3)}, {0: (10**6, 1)}, {7: (1, 1)}, 5])
def test_a_drafter_that_says_wrongly_what_it_has_read_loses_its_rows_alone(returned: Any) -> None:
    class Reader(Drafter):
        name, cost = "reader", DraftCost(levels="reader", nodes=True, reads=True)

        def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
            return Drafts.of([Draft() for _ in rows], ("reader",))

        def read_prompts(self, rows: Sequence[tuple[int, I32, int, int]]) -> Any:
            return returned

    with Engine(ToyModel(6, max_length=100), drafter=Reader(), size=4) as engine:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        plain = engine.generate([1, 2, 3] * 4, params, drafter=False)
        result = engine.generate([1, 2, 3] * 4, params)
        assert result.token_ids == plain.token_ids
        assert any("the drafter reader failed" in note for note in result.notes)
