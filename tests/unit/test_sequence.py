"""Sequences and their text: when they stop, and what may be shown, however many tokens a step commits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.engine.request import Request
from outpace.engine.results import Delta
from outpace.engine.sequence import Sequence
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.load import resolve
from outpace.models.weights.gguf import GGUFFile
from outpace.params import SamplingParams
from outpace.text.answer import LONGEST_RUN, Decoder, TextReader, TextState
from outpace.text.tokenizer import Tokenizer
from tests.toy import ToyTokenizer

PROMPT = [1, 2]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(resolve("demo").path))


class Bytes(Decoder):
    """A byte a token: as hard as tokens can be on characters. 256 and above are special and stand for no text."""

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


def sequence(
    params: SamplingParams, decoder: Decoder | None, *, limit: int = 999, eos: tuple[int, ...] = ()
) -> Sequence:
    prompt = np.array(PROMPT, np.int32)
    request = Request(0, prompt, params, 0, limit, 0, False, "coupled", "none", added=time.perf_counter())
    reader = TextReader(decoder, params.stop_strings, include_stop=params.include_stop, after=PROMPT)
    return Sequence(request, 0, Chooser.start(params, Noise(0), (), prompt), reader, eos_ids=eos)


def append(seq: Sequence, tokens: list[int], sources: list[str]) -> int:
    """Commit ``tokens`` as a step does; how many were kept."""
    extension = seq.extended(tokens)
    seq.commit(extension, sources)
    return len(extension.tokens)


def feed(seq: Sequence, tokens: list[int], steps: list[int]) -> list[Delta]:
    """Commit ``tokens`` in steps of those sizes (the rest one by one) until the sequence ends."""
    deltas, sizes = [], iter(steps)
    while tokens and seq.finish_reason is None:
        n = next(sizes, 1)
        append(seq, tokens[:n], ["x"] * len(tokens[:n]))
        tokens = tokens[n:]
        deltas.append(seq.delta())
    if seq.finish_reason is None:
        seq.commit(seq.ended("cancelled"))
        deltas.append(seq.delta())
    return deltas


def outcome(deltas: list[Delta]) -> tuple[Any, ...]:
    """What must not depend on the steps; checks the deltas against the result on the way."""
    result = deltas[-1].result
    assert result is not None
    assert all(d.result is None and d.finish_reason is None for d in deltas[:-1])
    assert "".join(d.text for d in deltas) == result.text
    assert [t for d in deltas for t in d.token_ids] == list(result.token_ids)
    assert [s for d in deltas for s in d.sources] == list(result.sources)
    return result.token_ids, result.text, result.finish_reason, result.stopped_by


partitions = st.lists(st.integers(1, 8), max_size=40)
texts = st.text(st.sampled_from("ab\nc é日👩‍👧�<|>"), max_size=40)
stops = st.lists(st.text(st.sampled_from("ab\né日👩"), min_size=1, max_size=4), max_size=3)


@settings(deadline=None, max_examples=300)
@given(texts, stops, partitions, st.integers(1, 60))
def test_text_does_not_depend_on_the_steps(text: str, stop: list[str], steps: list[int], limit: int) -> None:
    tokens = list(text.encode())
    params = SamplingParams(stop=stop)
    found = [outcome(feed(sequence(params, Bytes(), limit=2 + limit), tokens, each)) for each in ([], steps, [999])]
    assert found[0] == found[1] == found[2]
    ids, shown, reason, by = found[0]
    said = bytes(ids).decode(errors="replace")
    hits = [(said.find(s), s) for s in stop if s in said]
    if reason == "stop":
        assert by in stop
        assert shown == said[: min(hits)[0]]
    elif "�" not in text:
        assert shown == said
        assert not hits
        assert reason == ("length" if len(ids) == limit else "cancelled")


@settings(deadline=None, max_examples=100)
@given(texts, stops.filter(len), partitions)
def test_nothing_is_shown_that_may_become_a_stop_string(text: str, stop: list[str], steps: list[int]) -> None:
    """At every moment, what was shown is a prefix of the final text whatever comes next."""
    tokens = list(text.encode())
    deltas = feed(sequence(SamplingParams(stop=stop), Bytes()), tokens, steps)
    shown, committed = "", list[int]()
    for delta in deltas[:-1]:
        shown += delta.text
        committed += delta.token_ids
        said = bytes(committed).decode(errors="ignore")
        open_ends = [n for s in stop for n in range(1, len(s)) if said.endswith(s[:n])]
        assert len(shown) <= len(said) - max(open_ends, default=0)
        assert said.startswith(shown)
    result = deltas[-1].result
    assert result is not None
    assert result.text.startswith(shown)


def test_the_stop_string_that_begins_first_wins_in_any_order() -> None:
    for order in (["b", "ab"], ["ab", "b"]):
        (_, text, reason, by) = outcome(feed(sequence(SamplingParams(stop=order), ToyTokenizer()), [25, 0, 1, 2], [4]))
        assert (text, reason, by) == ("z", "stop", "ab")


@settings(deadline=None, max_examples=100)
@given(
    before=st.lists(st.integers(0, 49151), max_size=4), tokens=st.lists(st.integers(0, 49151), min_size=1, max_size=6)
)
def test_tokens_added_at_once_are_tokens_added_one_by_one(
    demo: Tokenizer, before: list[int], tokens: list[int]
) -> None:
    reader, state = TextReader(demo), TextState()
    for token in before:
        state, _ = reader.add(state, token)
    for token in tokens:
        reader.add(TextState(), token)  # its text is known from now on
    after, shown = state, ""
    for token in tokens:
        after, more = reader.add(after, token)
        shown += more
    at_once = reader.add_all(state, tokens)
    assert at_once in (None, (after, shown))
    if all(text and "\ufffd" not in text for text in map(demo.decode, ([t] for t in [*before, *tokens]))):
        assert at_once is not None
    assert TextReader(demo, ["stop"]).add_all(state, tokens) is None


@settings(deadline=None, max_examples=60)
@given(data=st.data(), steps=partitions)
def test_any_real_tokens_give_one_text(demo: Tokenizer, data: st.DataObject, steps: list[int]) -> None:
    tokens = data.draw(st.lists(st.integers(0, demo.vocab_size - 1), max_size=30))
    params = SamplingParams(stop=["e", "\n\n"] if data.draw(st.booleans()) else [])
    one, other = (outcome(feed(sequence(params, demo), tokens, each)) for each in ([], steps))
    assert one == other
    if not params.stop_strings:
        assert one[1] == demo.decode(tokens)


class Words(Decoder):
    """A word a token, with a space between words but not before the first of all: as tokenizers that strip decode."""

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return " ".join(f"w{int(i)}" for i in ids)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 99), max_size=12), partitions)
def test_the_seam_between_tokens_is_decoded_with_its_context(tokens: list[int], steps: list[int]) -> None:
    after = Words().decode([*PROMPT, *tokens]).removeprefix(Words().decode(PROMPT))
    assert outcome(feed(sequence(SamplingParams(), Words()), tokens, steps))[1] == after


def test_an_unfinished_character_is_released_at_the_end() -> None:
    tokens = list("é".encode())[:1]
    deltas = feed(sequence(SamplingParams(), Bytes()), [97, *tokens], [])
    assert [d.text for d in deltas] == ["a", "", "\ufffd"]


EOS = 7


@pytest.mark.parametrize(
    ("options", "limit", "tokens", "kept", "reason", "by"),
    [
        ({}, 99, [3, EOS, 4], 2, "stop", EOS),
        ({"ignore_eos": True}, 99, [3, EOS, 4], 3, "cancelled", None),
        ({"stop_ids": [4]}, 99, [3, 4, EOS], 2, "stop", 4),
        ({"stop_ids": [4], "ignore_eos": True}, 99, [EOS, 4, 4], 2, "stop", 4),
        ({"stop_ids": [EOS], "ignore_eos": True}, 99, [3, EOS], 2, "stop", EOS),
        ({}, 5, [3, 4, 5, 6], 3, "length", None),
        ({}, 4, [3, EOS, 6], 2, "stop", EOS),  # an end at the limit is an end
        ({"stop": "d"}, 4, [4, 3, 6], 2, "stop", "d"),
        ({"stop": "ed"}, 4, [4, 3, 6], 2, "stop", "ed"),
    ],
)
@pytest.mark.parametrize("steps", [[], [2], [9]])
def test_what_ends_a_sequence(
    options: dict[str, Any], limit: int, tokens: list[int], kept: int, reason: str, by: Any, steps: list[int]
) -> None:
    seq = sequence(SamplingParams(**options), ToyTokenizer(), limit=limit, eos=(EOS,))
    ids, text, found, found_by = outcome(feed(seq, tokens, steps))
    assert (list(ids), found, found_by) == (tokens[:kept], reason, by)
    assert chr(97 + EOS) not in text or "ignore_eos" in options, "a stop token was shown"
    assert kept == seq.length - len(PROMPT)


def test_time_to_first_token_starts_the_clock_of_decoding() -> None:
    seq = sequence(SamplingParams(), None)
    append(seq, [1, 2], ["a", "b"])
    seq.delta()
    append(seq, [3], ["c"])
    seq.delta()
    s = seq.stats
    assert s.first_delta_tokens == 2
    assert 0 < s.time_to_first_token < s.total_seconds
    assert s.decode_seconds == pytest.approx(s.total_seconds - s.time_to_first_token)


def test_runs_without_a_character_are_decoded_once_and_not_from_their_start() -> None:
    """Bytes that are no character, special tokens: the tokenizer is never given more than a bounded run of them."""

    class Counting(Bytes):
        longest = 0

        def decode(self, ids: Any, *, skip_special: bool = True) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids, skip_special=skip_special)

    for token, text in ((0x80, "�" * 500), (300, "")):
        counting = Counting()
        seq = sequence(SamplingParams(), counting)
        assert outcome(feed(seq, [97, *[token] * 500, *"é".encode()], [3] * 9))[1] == f"a{text}é"
        assert counting.longest <= 2 * LONGEST_RUN + 2


def test_a_step_that_is_computed_changes_nothing() -> None:
    seq = sequence(SamplingParams(stop=["ab"]), ToyTokenizer())
    append(seq, [25], ["x"])
    before = (seq.tokens.tolist(), seq.chooser, seq.delta().text)
    assert seq.extended([0, 1, 2]).finish_reason == "stop"
    assert (seq.tokens.tolist(), seq.chooser, "z") == before
    assert seq.delta().token_ids == ()
    assert append(seq, [0, 2], ["x", "y"]) == 2
