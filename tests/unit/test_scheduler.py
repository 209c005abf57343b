"""The scheduler alone: owners in turn, first come first served; prompts in chunks, prefixes shared, memory by rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import Engine
from outpace.common.arrays import common_prefix
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.drafting import Drafting
from outpace.engine.prefixes import PIECE, PrefixCache
from outpace.engine.request import Request, StepRecord
from outpace.engine.scheduler import LEAST, Pace, Plan, Scheduler, shares
from outpace.engine.sequence import Sequence
from outpace.errors import ParameterError
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams
from outpace.text.answer import TextReader
from tests.toy import BYTES, ToyKV, ToyModel


def make(kv: ToyKV, *, rows: int = 4, chunk: int = 8, memory: int | None = None, prefix: int = 0) -> Scheduler:
    return Scheduler(
        kv,
        Drafting({}),
        max_rows=rows,
        pace=Pace(chunk, None),
        memory=None if memory is None else memory * BYTES,
        prefix_rows=prefix,
    )


def seq(request: int, prompt: SequenceOf[int], *, more: int = 4, priority: int = 0, share: bool = True) -> Sequence:
    return samples(request, prompt, 1, more=more, priority=priority, share=share)[0]


def samples(
    request: int,
    prompt: SequenceOf[int],
    n: int,
    *,
    more: int = 4,
    priority: int = 0,
    share: bool = True,
    size: int = 0,
) -> list[Sequence]:
    params, tokens = SamplingParams(), np.array(prompt, np.int32)
    asked = Request(request, tokens, params, 0, len(prompt) + more, size, False, "coupled", "none", share, priority)
    chooser = Chooser.start(params, Noise(0), (), tokens)
    return [Sequence(asked, sample, chooser, TextReader(None)) for sample in range(n)]


def prefill(kv: ToyKV, plan: Plan) -> None:
    """What the engine does with the chunks."""
    for chunk in plan.chunks:
        kv.write(chunk.sequence.row, chunk.tokens, np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int32))
        chunk.sequence.cached += chunk.count


def anywhere(row: int, n: int) -> int:
    """Where rows of attention alone can be cut."""
    return n


def running(scheduler: Scheduler) -> list[int]:
    return [s.request.id for s in scheduler.running]


def test_prompts_are_prefilled_in_chunks_within_one_budget() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=8)
    for request, n in enumerate((6, 1, 13)):
        scheduler.submit(seq(request, range(100 * request, 100 * request + n)))
    seen = []
    for _ in range(4):
        plan = scheduler.plan()
        prefill(kv, plan)
        chunks = [(c.sequence.request.id, c.start, c.count) for c in plan.chunks]
        seen.append(([s.request.id for s in plan.decoding], chunks))
        scheduler.check()
    # A prompt's last token is never prefilled: it is the first pending one. One of a single token decodes at once.
    assert seen == [([1], [(0, 0, 5), (2, 0, 3)]), ([0, 1], [(2, 3, 8)]), ([0, 1], [(2, 11, 1)]), ([0, 1, 2], [])]


def test_first_come_first_served_even_if_a_later_one_would_fit_and_priority_before_that() -> None:
    scheduler = make(ToyKV(), memory=30, chunk=99)
    a, b, c, d = seq(0, range(16)), seq(1, range(50, 66)), seq(2, [1]), seq(3, [2], priority=1)
    for s in (a, b, c):
        scheduler.submit(s)
    scheduler.plan()
    assert (running(scheduler), scheduler.waiting) == ([0], 2)
    scheduler.submit(d)
    scheduler.release(a)
    scheduler.plan()
    assert running(scheduler) == [3, 1, 2]
    scheduler.check()


def test_samples_wait_for_their_sibling_and_take_its_prompt_by_reference() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=12)
    prompt = list(range(20))
    for s in samples(0, prompt, 3, share=False):
        scheduler.submit(s)
    counts = []
    for _ in range(3):
        plan = scheduler.plan()
        prefill(kv, plan)
        counts.append((len(scheduler.running), sum(c.count for c in plan.chunks)))
        scheduler.check()
    assert counts == [(1, 12), (1, 7), (3, 0)]
    assert [kv.prefix(s.row, kv.length(s.row)) for s in scheduler.running] == [prompt[:-1]] * 3
    assert kv.bytes == kv.bytes_for(19)


def test_requests_that_begin_alike_wait_for_who_computes_the_beginning() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=24)
    common = list(range(40))
    for request in range(3):
        scheduler.submit(seq(request, [*common, 90 + request, 91]))
    scheduler.submit(seq(3, [*common, 99], share=False))
    rows, written = [], 0
    for _ in range(5):
        plan = scheduler.plan()
        prefill(kv, plan)
        rows.append(len(scheduler.running))
        written += sum(c.count for c in plan.chunks)
        scheduler.check()
    assert rows[0] == 1
    assert rows[-1] == 4
    assert written == 41 + 2 + 40  # the beginning once, what follows each, and all of who shares nothing


@pytest.mark.parametrize("size", [0, 7])
def test_rows_that_decode_for_long_never_take_more_memory_than_there_is(size: int) -> None:
    kv = ToyKV()
    scheduler = make(kv, memory=200, rows=3, chunk=20)
    sequences = [samples(request, [request] * (1 + 40 * request), 1, more=100, size=size)[0] for request in range(3)]
    waiting = list(sequences)
    while waiting or not scheduler.idle:
        if waiting and kv.bytes >= 30 * BYTES * (3 - len(waiting)):  # others come while the first ones decode
            scheduler.submit(waiting.pop(0))
        plan = scheduler.plan()
        prefill(kv, plan)
        for s in plan.decoding:
            gained = [7] * (1 if s.paused else min(size + 1, s.room))
            tokens = np.array([int(s.tokens[-1]), *gained], np.int32)[:-1]
            kv.write(s.row, tokens, np.arange(s.length - 1, s.length - 1 + len(tokens), dtype=np.int32))
            s.cached += len(gained)
            s.commit(s.extended(gained), ["target"] * len(gained))
        assert kv.bytes <= 200 * BYTES
        for s in plan.decoding:
            if s.finish_reason:
                scheduler.release(s)
    assert [s.length for s in sequences] == [101, 141, 181]
    assert scheduler.preemptions > 0


def test_kept_rows_go_only_where_that_makes_the_room() -> None:
    kv = ToyKV()
    scheduler = make(kv, memory=60, chunk=99, prefix=3)
    for request in range(2):
        s = seq(request, [request] * 20)
        scheduler.submit(s)
        prefill(kv, scheduler.plan())
        scheduler.release(s)
    assert len(kv.rows) == 2
    lasting = seq(7, [5] * 12, more=20)
    scheduler.submit(lasting)
    prefill(kv, scheduler.plan())
    scheduler.submit(seq(8, [6] * 52))  # cannot fit beside it, whoever goes: so nobody goes
    scheduler.plan()
    assert (running(scheduler), len(scheduler.prefixes)) == ([7], 2)
    scheduler.release(lasting)
    big = seq(2, [1] * 30, more=2)
    scheduler.submit(big)
    scheduler.check()
    scheduler.close()
    assert all(row in [s.row for s in scheduler.running] for row in kv.rows)


def test_what_is_shared_survives_its_first_owner() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=99, prefix=1)
    first = seq(0, range(24))
    scheduler.submit(first)
    prefill(kv, scheduler.plan())
    scheduler.release(first)
    second = seq(1, [*range(20), 77, 78])
    scheduler.submit(second)
    prefill(kv, scheduler.plan())
    assert second.stats.reused_tokens == 20
    scheduler.close()
    scheduler.check()
    assert kv.prefix(second.row, 21) == [*range(20), 77]


def test_the_youngest_gives_way_and_comes_back_before_those_who_came_later() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=99)
    old, young, late = seq(0, range(9)), seq(1, range(50, 59)), seq(2, [3])
    for s in (old, young, late):
        scheduler.submit(s)
    prefill(kv, scheduler.plan())
    scheduler.preempt(late)
    assert scheduler.youngest is young
    scheduler.preempt(young)
    scheduler.check()
    assert (running(scheduler), young.cached, young.stats.preemptions) == ([0], 0, 1)
    scheduler.plan()
    assert running(scheduler) == [0, 1, 2]
    scheduler.check()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 70)), max_size=12), st.integers(0, 70))
def test_the_index_finds_what_a_search_of_all_rows_would(ops: list[tuple[bool, int, int]], n: int) -> None:
    """Rows come and go; a kept row that shares a piece or more is found, if not always the longest."""
    text = np.arange(70, dtype=np.int32)
    cache, rows = PrefixCache(99), {}
    for number, (keep, other, length) in enumerate(ops):
        if keep:
            tokens = text[:length].copy()
            tokens[PIECE * (other + 1) :] += 100 * (other + 1)
            cache.keep(number, tokens)
            rows[number] = tokens
        elif rows:
            row = sorted(rows)[other % len(rows)]
            cache.forget(row)
            del rows[row]
        assert cache.fault(set(rows)) is None
    row, shared, common = cache.find(text[:n], anywhere)
    assert shared == common
    whole = [common_prefix(text[:n], tokens) // PIECE for tokens in rows.values()]
    assert shared // PIECE == max(whole, default=0)
    assert row < 0 or common_prefix(text[:n], rows[row]) == shared


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(np.array(a, np.int32), np.array(b, np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@pytest.mark.parametrize("each", [1e-5, 1e-3, 1e-1])
def test_prefill_keeps_its_pace_beside_rows_that_decode(each: float) -> None:
    """A machine on which a step takes 5 ms and a prompt's token ``each``: chunks soon fit into 20 ms, or are least."""
    pace = Pace(512, 0.02)
    assert pace.budget(decoding=False) == 512
    for _ in range(20):
        pace.learn(0, True, 0.005)
    for step in range(12):
        count = pace.budget(decoding=True)
        assert count == LEAST or (step and count * each <= 0.02 + 1e-9)
        pace.learn(count, True, 0.005 + count * each)
    assert pace.budget(decoding=True) == {1e-5: 512, 1e-3: 12, 1e-1: LEAST}[each]
    pace.learn(LEAST, True, 0.005 + LEAST * 0.01)  # slower at once
    assert pace.budget(decoding=True) == LEAST
    assert Pace(512, None).budget(decoding=True) == 512


@pytest.mark.parametrize(("delay", "beside"), [(None, [99]), (1e-12, [LEAST] * 24 + [3])])
def test_an_engine_holds_prompts_to_their_pace_beside_rows_that_decode(delay: float | None, beside: list[int]) -> None:
    counts: list[int] = []

    def count(step: StepRecord) -> None:
        counts.extend(chunk.count for chunk in step.chunks)

    prompt, params = [i % 6 for i in range(100)], SamplingParams(max_tokens=30, ignore_eos=True)
    with Engine(ToyModel(6, max_length=400), prefix_rows=0, prefill_delay=delay, on_step=count) as engine:
        engine.generate(prompt, params)
        assert counts == [99]  # alone, all at once
        counts.clear()
        engine.add([1], params)
        engine.step()
        engine.generate(prompt, params)
        assert counts == beside


def test_kept_prefixes_are_found_within_their_scope() -> None:
    cache = PrefixCache(4)
    tokens = np.arange(40, dtype=np.int32)
    cache.keep(1, tokens, "one")
    assert cache.find(tokens, anywhere, "two") == (-1, 0, 0)
    assert cache.find(tokens, anywhere) == (-1, 0, 0)
    assert cache.find(tokens, anywhere, "one") == (1, 40, 40)
    cache.keep(2, tokens, "two")
    assert cache.fault({1, 2}) is None
    cache.forget(1)
    assert cache.fault({1, 2}) is None
    assert cache.find(tokens, anywhere, "one") == (-1, 0, 0)
    assert cache.find(tokens, anywhere, "two") == (2, 40, 40)


@given(
    st.lists(st.tuples(st.integers(0, 70), st.lists(st.integers(0, 70), max_size=3)), max_size=6), st.integers(0, 70)
)
def test_the_row_is_found_from_which_most_can_be_had(rows: list[tuple[int, list[int]]], n: int) -> None:
    """Rows that share so many tokens with a text, and can be cut at some positions alone."""
    text, cache = np.arange(70, dtype=np.int32), PrefixCache(99)
    for row, (length, _) in enumerate(rows):
        cache.keep(row, np.concatenate([text[:length], np.full(5, 100 + row, np.int32)]))

    def reachable(row: int, n: int) -> int:
        return max([0, *(at for at in rows[row][1] if at <= n)])

    row, shared, common = cache.find(text[:n], reachable)
    longest = max([0, *(min(n, length) for length, _ in rows)])
    had = [reachable(i, min(n, length)) for i, (length, _) in enumerate(rows)]
    assert common // PIECE == longest // PIECE
    if row < 0:
        assert (shared, common, longest // PIECE) == (0, 0, 0)
    else:
        assert shared == had[row]
        assert shared == max(had) or shared == common > max(had) - PIECE


def test_rows_of_different_scopes_share_nothing() -> None:
    prompt = [i % 6 for i in range(40)]
    with Engine(ToyModel(6, max_length=200), drafter=NgramDrafter(), size=2, prefix_rows=4) as engine:
        first = engine.generate(prompt, SamplingParams(max_tokens=4), cache_scope="a")
        other = engine.generate(prompt, SamplingParams(max_tokens=4), cache_scope="b")
        again = engine.generate(prompt, SamplingParams(max_tokens=4), cache_scope="a")
        assert (other.stats.reused_tokens, again.stats.reused_tokens > 0) == (0, True)
        assert first.token_ids == other.token_ids == again.token_ids
        together = [engine.add(prompt, SamplingParams(max_tokens=8), cache_scope=scope) for scope in "cdc"]
        reused = {}
        while not engine.idle:
            reused |= {d.request: d.result.stats.reused_tokens for d in engine.step() if d.result is not None}
        assert [reused[i] > 0 for i in together] == [False, False, True]
        engine.check()


def owned(request: int, owner: str, priority: int = 0, prompt: SequenceOf[int] = ()) -> Sequence:
    tokens = np.array([*prompt] or [request, 1], np.int32)
    its = seq(request, tokens.tolist(), priority=priority)
    params = its.request.params
    return Sequence(replace(its.request, owner=owner), 0, Chooser.start(params, None, (), tokens), TextReader(None))


def begun(scheduler: Scheduler, rounds: int) -> list[int]:
    """Ids in the order in which they begin, in a scheduler of one row whose oldest always ends."""
    order = []
    for _ in range(rounds):
        scheduler.plan()
        scheduler.check()
        order += running(scheduler)
        for sequence in list(scheduler.running):
            scheduler.release(sequence)
    return order


def test_a_flood_of_one_holds_up_another_by_one_turn() -> None:
    scheduler = make(ToyKV(), rows=1)
    for request in range(200):
        scheduler.submit(owned(request, "flood"))
    assert begun(scheduler, 5) == [0, 1, 2, 3, 4]
    scheduler.submit(owned(900, "one"))
    assert begun(scheduler, 3) == [900, 5, 6]
    for request in (901, 902):
        scheduler.submit(owned(request, "one"))
    scheduler.submit(owned(950, "third"))
    assert begun(scheduler, 6) == [901, 950, 7, 902, 8, 9]
    for request, priority in ((960, 0), (961, 1), (962, 1)):  # first among its owner's, never before another's
        scheduler.submit(owned(request, "third", priority))
    assert begun(scheduler, 5) == [961, 10, 962, 11, 960]


def test_who_asks_again_at_once_does_not_pass_those_who_wait() -> None:
    scheduler = make(ToyKV(), rows=1)
    for request in range(4):
        scheduler.submit(owned(request, "waits"))
    order = []
    for request in range(100, 104):
        scheduler.submit(owned(request, "again"))
        order += begun(scheduler, 2)
    assert order == [0, 100, 1, 101, 2, 102, 3, 103]


def test_one_that_gave_way_comes_back_before_later_rounds() -> None:
    scheduler = make(ToyKV(), rows=2)
    for request, owner in enumerate("aaab"):
        scheduler.submit(owned(request, owner))
    scheduler.plan()
    assert running(scheduler) == [0, 3]
    assert scheduler.youngest.request.id == 3
    scheduler.preempt(scheduler.youngest)
    scheduler.submit(owned(4, "c"))
    scheduler.plan()
    assert running(scheduler) == [0, 3]
    scheduler.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=30), st.integers(1, 3))
def test_turns_are_even_and_each_owners_are_in_order(asked: list[tuple[str, int]], rows: int) -> None:
    scheduler = make(ToyKV(), rows=rows)
    for request, (owner, priority) in enumerate(asked):
        scheduler.submit(owned(request, owner, priority))
    order = begun(scheduler, len(asked))
    assert sorted(order) == list(range(len(asked)))
    assert scheduler.idle
    of = dict(enumerate(asked))
    for owner in "abc":
        own = [request for request in order if of[request][0] == owner]
        assert own == sorted(own, key=lambda request: (-of[request][1], request))
    for n in range(len(order)):  # who still waits has had as many turns as any other, or one less
        turns, waiting = Counter(of[request][0] for request in order[:n]), {of[request][0] for request in order[n:]}
        assert all(turns[owner] >= max(turns.values(), default=0) - 1 for owner in waiting)


def test_one_without_a_row_gets_one_of_who_has_several_at_once() -> None:
    """Whoever lost it comes before what its owner asked later, and after nobody else's flood."""
    scheduler = make(ToyKV(), rows=3)
    for request in range(20):
        scheduler.submit(owned(request, "flood"))
    scheduler.plan()
    for request in (900, 901):
        scheduler.submit(owned(request, "one"))
    scheduler.plan()
    assert running(scheduler) == [0, 1, 900]
    scheduler.check()
    scheduler.plan()
    assert running(scheduler) == [0, 1, 900]  # 901 waits for its turn
    for last in (901, 2):
        scheduler.release(scheduler.running[2])
        for _ in range(2):
            scheduler.plan()
            scheduler.check()
        assert running(scheduler) == [0, 1, last]


def test_a_flood_of_long_prompts_holds_up_anothers_short_one_by_no_step() -> None:
    """It is read at once, in its half of the budget, and its own flood does not take the rest from others."""
    kv = ToyKV()
    scheduler = make(kv, rows=8, chunk=16)
    for request in range(6):
        scheduler.submit(owned(request, "flood", prompt=range(100 * request, 100 * request + 90)))
    prefill(kv, scheduler.plan())
    scheduler.submit(owned(900, "one", prompt=range(900, 909)))
    plan = scheduler.plan()
    assert [(c.sequence.request.id, c.count) for c in plan.chunks] == [(0, 8), (900, 8)]
    prefill(kv, plan)
    plan = scheduler.plan()
    assert [s.request.id for s in plan.decoding] == [900]
    assert [(c.sequence.request.id, c.count) for c in plan.chunks] == [(0, 8)]  # so that its step is short
    scheduler.release(plan.decoding[0])
    assert [(c.sequence.request.id, c.count) for c in scheduler.plan().chunks] == [(0, 16)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=9), st.integers(3, 5), st.integers(0, 60)
)
def test_owners_have_even_shares_of_a_steps_prompt_tokens(
    wanted: list[tuple[str, int]], owners: int, budget: int
) -> None:
    counts, even = shares(wanted, owners, budget), max(budget // owners, 1)
    assert all(0 <= count <= tokens for count, (_, tokens) in zip(counts, wanted, strict=True))
    assert sum(counts) <= budget
    found, asked = Counter[str](), Counter[str]()
    for count, (owner, tokens) in zip(counts, wanted, strict=True):
        found[owner] += count
        asked[owner] += tokens
    if budget >= owners:
        assert all(found[owner] == min(asked[owner], even) for owner in asked)
    assert shares([("a", 40), ("a", 9)], 1, budget) == [min(budget, 40), min(max(budget - 40, 0), 9)]


def test_memory_that_one_has_filled_is_given_to_another_without_a_row() -> None:
    kv = ToyKV()
    scheduler = make(kv, rows=8, memory=48, chunk=99)
    for request in range(4):
        scheduler.submit(owned(request, "flood", prompt=range(100 * request, 100 * request + 16)))
    for _ in range(2):
        prefill(kv, scheduler.plan())
    assert (running(scheduler), scheduler.waiting) == ([0, 1, 2], 1)
    scheduler.submit(owned(900, "one", prompt=range(900, 917)))
    for _ in range(2):  # one that gives way may not be enough
        prefill(kv, scheduler.plan())
    assert running(scheduler)[:2] == [0, 900]
    scheduler.check()


def test_who_waits_for_a_common_beginning_holds_up_nobody_else() -> None:
    scheduler = make(ToyKV(), rows=8, chunk=8)
    common = list(range(60))
    for request in range(2):
        scheduler.submit(owned(request, "flood", prompt=[*common, 100 + request]))
    scheduler.submit(owned(2, "flood"))
    scheduler.submit(owned(900, "one"))
    scheduler.plan()
    assert running(scheduler) == [0, 900]
    scheduler.check()


def test_an_owner_has_to_be_a_name() -> None:
    with Engine(ToyModel(6, max_length=50)) as engine, pytest.raises(ParameterError, match="owner"):
        engine.add([1, 2], owner=7)
