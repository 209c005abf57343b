"""Who is let in: a flood of some keys always leaves places for the others, and no row is kept empty for anybody."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.server.admission import Admission, Places
from outpace.server.errors import APIError


def lets_in(admission: Admission, key: str, samples: int = 1) -> bool:
    before = admission.inside
    with suppress(APIError):
        admission.take(key, samples)
    return admission.inside > before


def flooded(admission: Admission, keys: int) -> Counter[str]:
    """What each has when all ask on and on, in turn, until nobody is let in."""
    held: Counter[str] = Counter()
    while more := [key for key in map(str, range(keys)) if lets_in(admission, key)]:
        held.update(more)
    return held


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("queue", [0, 1, 7, 64, 256])
def test_keys_that_flood_have_as_much_as_each_other_and_as_is_free(rows: int, queue: int) -> None:
    places = rows + queue
    for keys in range(1, 12):
        shared = Admission(rows, queue, shared=True)
        held = flooded(shared, keys)
        assert held.total() == shared.inside >= rows  # no row is empty
        assert shared.largest == max(held.values())
        free = places - held.total()
        assert max(held.values()) - min(held.values(), default=0) <= 1
        if held.total() > rows:
            assert free <= min(held.values()) <= max(held.values()) <= free + 1
        with nullcontext() if free else pytest.raises(APIError, match="the queue is full") as told:
            shared.take("another", 1)
        assert told is None or told.value.code == "queue_full"
        alone = Admission(rows, queue, shared=False)
        assert flooded(alone, keys).total() == places  # without keys, or with one, all of it


def test_one_floods_after_the_other() -> None:
    """Worst for who comes last: each finds half of what the one before it found. Still, what becomes free is theirs
    who have none."""
    admission = Admission(16, 256, shared=True)
    held = []
    for key in range(9):
        held.append(0)
        while lets_in(admission, str(key)):
            held[-1] += 1
    assert held == [136, 68, 34, 17, 9, 4, 2, 1, 1]
    with pytest.raises(APIError, match=r"the queue is full \(272 samples\)") as told:
        admission.take("last", 1)
    assert (told.value.status, told.value.code) == (429, "queue_full")
    admission.give("0", 1)
    for key in range(9):
        with pytest.raises(
            APIError, match=rf"its share of the queue \({held[key] - (not key)} samples; 1 of 272"
        ) as told:
            admission.take(str(key), 1)
        assert (told.value.status, told.value.code) == (429, "queue_share")
        assert 1 <= int(told.value.headers["retry-after"]) <= 60
    assert lets_in(admission, "last")


@given(
    rows=st.integers(1, 5),
    queue=st.integers(0, 20),
    shared=st.booleans(),
    moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.booleans()), max_size=60),
)
def test_what_is_counted_is_what_is_there(
    rows: int, queue: int, shared: bool, moves: list[tuple[str, int, bool]]
) -> None:
    """Requests of several samples, which come and go: all or none of a request is let in, as if its samples came one
    after the other."""
    admission = Admission(rows, queue, shared=shared)
    there: list[tuple[str, Places, int]] = []
    held: Counter[str] = Counter()
    for key, samples, come in moves:
        if not come and there:
            key, places, samples = there.pop(0)
            places.close()
            places.close()  # calling twice is allowed
            held[key] -= samples
        elif come:
            twin = Admission(rows, queue, shared=shared)
            for other, its in held.items():
                twin.inside, twin._held[other] = twin.inside + its, its
            places, before = Places(admission, key), admission.inside
            with suppress(APIError):
                places.hold(1)
                places.hold(samples)
            if admission.inside - before == samples:
                held[key] += samples
                there.append((key, places, samples))
            else:
                places.close()
            fits = samples <= admission.most and all(lets_in(twin, key) for _ in range(samples))
            assert fits is (places in [its[1] for its in there])
        assert admission.inside == held.total() <= admission.capacity
        assert admission.largest == max(held.values(), default=0)
    for _, places, _ in there:
        places.close()
    assert admission.inside == admission.largest == 0
    assert lets_in(admission, "a", admission.most)  # the most that a request may have fits an empty house


def test_what_never_fits_is_said_at_once() -> None:
    for shared, most in ((False, 20), (True, 16)):
        admission = Admission(16, 4, shared=shared)
        with pytest.raises(APIError, match=rf"{most + 1} samples are more than .* \({most}\)") as told:
            Places(admission, "a").hold(most + 1)
        assert (told.value.status, told.value.param) == (400, "n")
        assert admission.inside == 0
