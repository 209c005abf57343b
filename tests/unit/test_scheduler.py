"""The scheduler on its own: first come first served, memory promised whole, prompts in chunks, prefixes shared."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.arrays import common_prefix
from outpace.drafters.base import Drafter
from outpace.drafters.none import NoDrafter
from outpace.engine.scheduler import MIN_SHARED, Plan, Scheduler
from outpace.engine.sequence import Sequence
from outpace.errors import MemoryLimitError
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams
from tests.toy import BYTES, ToyKV


def make(
    kv: ToyKV,
    drafter: Drafter | None = None,
    *,
    rows: int = 4,
    chunk: int = 8,
    memory: int | None = None,
    prefix: int = 0,
) -> Scheduler:
    return Scheduler(
        kv,
        drafter or NoDrafter(),
        max_rows=rows,
        prefill_chunk=chunk,
        kv_memory=None if memory is None else memory * BYTES,
        prefix_rows=prefix,
    )


def seq(request: int, prompt: SequenceOf[int], *, more: int = 4, size: int = 0, sample: int = 0) -> Sequence:
    params, tokens = SamplingParams(), np.array(prompt, np.int32)
    return Sequence(
        request,
        sample,
        tokens,
        params,
        Chooser.start(params, Noise(0), (), tokens),
        limit=len(prompt) + more,
        eos_ids=(),
        decoder=None,
        acceptance="coupled",
        size=size,
        drafter="none",
    )


def prefill(kv: ToyKV, plan: Plan) -> None:
    """What the engine does with the chunks."""
    for chunk in plan.chunks:
        kv.write(chunk.sequence.row, chunk.tokens, np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int32))
        chunk.sequence.prefilled += chunk.count


def test_prompts_are_prefilled_in_chunks_within_one_budget() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=8)
    for request, n in enumerate((6, 1, 13)):
        scheduler.submit(seq(request, range(n)))
    seen = []
    for _ in range(4):
        plan = scheduler.plan()
        prefill(kv, plan)
        seen.append(([s.request for s in plan.decoding], [(c.sequence.request, c.start, c.count) for c in plan.chunks]))
        scheduler.check()
    # A prompt's last token is never prefilled: it is the first pending one. One of a single token decodes at once.
    assert seen == [
        ([1], [(0, 0, 5), (2, 0, 3)]),
        ([0, 1], [(2, 3, 8)]),
        ([0, 1], [(2, 11, 1)]),
        ([0, 1, 2], []),
    ]


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    kv = ToyKV()
    scheduler = make(kv, memory=30)
    a, b, c = seq(0, range(16)), seq(1, range(16)), seq(2, [1])
    for s in (a, b, c):
        scheduler.submit(s)
    scheduler.plan()
    assert ([s.request for s in scheduler.running], scheduler.waiting) == ([0], 2)
    scheduler.release(a)
    scheduler.plan()
    assert [s.request for s in scheduler.running] == [1, 2]
    scheduler.check()


def test_what_never_fits_is_refused_and_counts_the_draft() -> None:
    scheduler = make(ToyKV(), memory=20)
    scheduler.submit(seq(0, range(10), more=4, size=6))
    with pytest.raises(MemoryLimitError, match="raise kv_memory"):
        scheduler.submit(seq(1, range(10), more=4, size=7))


def test_samples_wait_for_their_sibling_and_take_its_prompt() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=12)
    prompt = list(range(20))
    for sample in range(3):
        scheduler.submit(seq(0, prompt, sample=sample))
    counts = []
    for _ in range(3):
        plan = scheduler.plan()
        prefill(kv, plan)
        counts.append((len(scheduler.running), sum(c.count for c in plan.chunks)))
        scheduler.check()
    assert counts == [(1, 12), (1, 7), (3, 0)]
    assert [kv.prefix(s.row, kv.length(s.row)) for s in scheduler.running] == [prompt[:-1]] * 3


def test_kept_rows_make_room_when_memory_is_needed() -> None:
    kv = ToyKV()
    scheduler = make(kv, memory=60, chunk=99, prefix=3)
    for request in range(2):
        s = seq(request, [request] * 20)
        scheduler.submit(s)
        prefill(kv, scheduler.plan())
        scheduler.release(s)
    assert len(kv.rows) == 2
    big = seq(2, [1] * 30)  # begins like the second, which must survive; the first makes room
    scheduler.submit(big)
    scheduler.plan()
    assert big.stats.reused_tokens == 19
    scheduler.check()
    scheduler.release(big)
    scheduler.close()
    assert kv.rows == []
    assert scheduler.reserved == 0


def test_a_donor_that_must_go_itself_is_not_copied_from() -> None:
    kv = ToyKV()
    scheduler = make(kv, memory=40, chunk=99, prefix=1)
    first = seq(0, [1] * 20)
    scheduler.submit(first)
    prefill(kv, scheduler.plan())
    scheduler.release(first)
    second = seq(1, [1] * 20)
    scheduler.submit(second)
    scheduler.plan()
    assert (second.stats.reused_tokens, len(kv.rows)) == (0, 1)
    scheduler.check()


def test_short_prefixes_are_not_worth_a_copy() -> None:
    kv = ToyKV()
    scheduler = make(kv, chunk=99, prefix=2)
    for request, n in enumerate((MIN_SHARED, MIN_SHARED, MIN_SHARED + 1, MIN_SHARED + 1)):
        s = seq(request, [1] * n)
        scheduler.submit(s)
        prefill(kv, scheduler.plan())
        assert s.stats.reused_tokens == (MIN_SHARED if request == 3 else 0)
        scheduler.release(s)
        scheduler.check()


def test_cancelling_takes_waiting_and_running_samples() -> None:
    kv = ToyKV()
    scheduler = make(kv, rows=1)
    for request in (0, 1):
        for sample in range(2):
            scheduler.submit(seq(request, [1, 2, 3], sample=sample))
    scheduler.plan()
    assert scheduler.requests == [0, 1]
    gone = scheduler.cancel(0)
    assert sorted(s.sample for s in gone) == [0, 1]
    for s in gone:
        scheduler.release(s)
    assert (scheduler.requests, kv.rows, scheduler.waiting) == ([1], [], 2)
    scheduler.check()


def test_a_drafter_without_memory_leaves_no_row_behind() -> None:
    class Full(Drafter):
        def admit(self, row: int, capacity: int) -> None:
            raise MemoryLimitError("no room for the draft model")

    kv = ToyKV()
    scheduler = make(kv, Full())
    scheduler.submit(seq(0, [1, 2], size=3))
    with pytest.raises(MemoryLimitError):
        scheduler.plan()
    assert kv.rows == []
    assert scheduler.waiting == 1


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(np.array(a, np.int32), np.array(b, np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
