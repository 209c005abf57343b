"""Draft models with another tokenizer, under accidents: plain decoding's tokens, and a cache that is always in step.

Toy models over two small byte-level tokenizers say nonsense, so most of their text is broken characters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import Engine, SamplingParams
from outpace.control.cost import Cost
from outpace.drafters.base import RowView
from outpace.drafters.forward.translated import SyncedText, TranslatedDrafter
from outpace.errors import DrafterError
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.text.token_bytes import TokenBytes
from outpace.text.tokenizer import Tokenizer
from tests.toy import ToyModel

EOS, MERGES = 259, {"a": ["t h", "th e", "Ġ the"], "b": ["h e", "Ġ t", "Ġt he"]}


def bpe(kind: str) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    merges = [tuple(line.split()) for line in MERGES[kind]]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    fast = Fast(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return Tokenizer(fast, name=kind, eos_ids=[EOS])


class Speller(ToyModel):
    """Says ``said`` over and over in a tokenizer's ids, but for every ``slip``-th token, which is a hash's."""

    def __init__(
        self, tokenizer: Tokenizer, said: str, slip: int = 5, sure: float = 20, vocab: int = EOS + 1, **options: Any
    ) -> None:
        super().__init__(vocab, **options)
        self._cycle = tokenizer.encode(said).tolist()
        self._slip, self._sure = slip, sure

    def logits_after(self, prefix: list[int], layers: int | None = None) -> np.ndarray[Any, Any]:
        logits = super().logits_after(prefix, layers).copy()
        if len(prefix) % self._slip:
            at = self._cycle.index(prefix[-1]) + 1 if prefix and prefix[-1] in self._cycle else 0
            logits[self._cycle[at % len(self._cycle)]] += self._sure
        return logits


SAID = " the thé 👍 x"


def drafter(model: ToyModel, own: str = "b", target: str = "a") -> TranslatedDrafter:
    return TranslatedDrafter(model, bpe(own), "model:toy", bpe(target), EOS + 1)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_plain_decodings_tokens_whatever_happens(data: st.DataObject) -> None:
    slips = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    longest = data.draw(st.sampled_from([16, 40, 512]))
    tokenizer = bpe("a")
    target = Speller(tokenizer, SAID, slips[0], max_length=512, eos=(EOS,))
    draft = Speller(bpe("b"), SAID, slips[1], max_length=longest, eos=(EOS,))
    engine = Engine(
        target,
        tokenizer,
        drafter=drafter(draft),
        size=data.draw(st.sampled_from([1, 2, 3, 5, 8, "auto"])),
        max_rows=3,
        prefill_chunk=8,
        prefix_rows=data.draw(st.integers(0, 1)),
        cost=Cost((1, 64), (1.0, 1.1)),
    )
    prompt = st.lists(st.integers(0, EOS), min_size=1, max_size=40)
    temperature = st.sampled_from([0.0, 0.8])
    with engine:
        expected, requests = {}, {}
        for prompt_ids in data.draw(st.lists(prompt, min_size=1, max_size=4)):
            params = SamplingParams(
                max_tokens=data.draw(st.integers(1, 60)),
                temperature=data.draw(temperature),
                n=data.draw(st.integers(1, 2)),
                seed=7,
                ignore_eos=True,
            )
            plain = engine.generate_many([prompt_ids], params, drafter=False)
            expected[engine.add(prompt_ids, params)] = plain
        cancelled = data.draw(st.sampled_from([None, *expected]))
        steps = 0
        while not engine.idle:
            for delta in engine.step():
                if delta.result is not None:
                    requests[delta.request, delta.sample] = delta.result
            engine.check()
            steps += 1
            if steps == 3 and cancelled is not None:
                for delta in engine.cancel(cancelled):
                    requests[delta.request, delta.sample] = delta.result
                engine.check()
        for (request, sample), result in requests.items():
            whole = expected[request][sample].token_ids
            assert result is not None
            assert result.token_ids == (
                whole[: len(result.token_ids)] if result.finish_reason == "cancelled" else whole
            )
    assert not draft.kv.rows


def test_drafts_are_accepted_across_other_splits_of_the_text() -> None:
    tokenizer = bpe("a")
    target = Speller(tokenizer, SAID, 10**9, max_length=512)
    for own in ("a", "b"):
        draft = Speller(bpe(own), SAID, 10**9, max_length=512)
        engine = Engine(target, tokenizer, drafter=drafter(draft, own), size=5)
        found = engine.generate(tokenizer.encode(SAID), SamplingParams(max_tokens=100))
        assert found.stats.accepted >= 0.8 * found.stats.drafted > 0


def view(tokens: list[int], limit: int = 400) -> RowView:
    chooser = Chooser(SamplingParams(temperature=0.0), Noise(0), 0)
    return RowView(0, 0, np.array(tokens, np.int32), limit, chooser, "coupled")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_cache_holds_the_text_that_is_committed(data: st.DataObject) -> None:
    """Random commits, some of them what was drafted. The toy's cache keeps ids, which have to spell the text."""
    draft = Speller(bpe("b"), SAID, data.draw(st.integers(2, 9)), max_length=512)
    translated = drafter(draft)
    own, target = bpe("b"), bpe("a")
    pieces = st.sampled_from([" ", "t", "h", "e", "he", " t", " th", "é", "👍", "\n"])
    texts = st.lists(pieces, min_size=1, max_size=4).map("".join)
    tokens = target.encode(data.draw(texts)).tolist()
    for _ in range(data.draw(st.integers(1, 8))):
        size = data.draw(st.integers(1, 6))
        drafts = translated.propose([view(tokens)], np.array([size], np.int32))
        drafted = drafts.row(0).tokens
        assert len(drafted) <= size
        ids = own.encode(target.decode(tokens).rstrip("\ufffd")).tolist()
        assert draft.kv.prefix(0, draft.kv.length(0))[: len(ids)] == ids
        translated.check([0])
        accepted = data.draw(st.integers(0, len(drafted)))
        tokens += drafted[:accepted] + target.encode(data.draw(texts)).tolist()
    translated.release(0)
    translated.check([])


def test_a_draft_goes_on_where_a_character_was_left() -> None:
    target = bpe("a")
    tokens = target.encode("x 👍").tolist()
    for said, drafted in (("👍", 2), ("👎", 1), ("the", 0)):
        translated = drafter(Speller(bpe("b"), said, 10**9, max_length=64))
        found = translated.propose([view(tokens[:-2])], np.array([5], np.int32)).row(0).tokens
        expected = target.encode(said).tolist()[2:]
        assert found[: len(expected)] == expected if drafted else not found


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.8])
def test_a_token_is_as_sure_as_the_text_up_to_its_end(floor: float) -> None:
    """By the draft model's own logits, token for token of its own; a chain ends at its price."""
    said = " the he th x"
    draft, own, target = Speller(bpe("b"), said, 10**9, 8, max_length=256), bpe("b"), bpe("a")
    committed = target.encode(said[:7])
    asked = view(committed.tolist())._replace(floor=floor)
    drafts = drafter(draft).propose([asked], np.array([9], np.int32))
    assert drafts.levels is not None
    found, forwards = drafts.row(0), int(drafts.levels[0])
    ids, chance, sure = own.encode(said[:7]).tolist(), 1.0, []
    while len(sure) < forwards:
        logits = draft.logits_after(ids)
        ids.append(int(logits.argmax()))
        chance *= float(1 / np.exp(logits.astype(np.float64) - logits.max()).sum())
        sure.append((own.decode(ids), chance))
    assert 0 < len(found) <= 9
    for n, gain in enumerate(found.gains, 1):
        text = target.decode([*committed, *found.tokens[:n]])
        assert gain == pytest.approx(next(p for written, p in sure if written.startswith(text)), rel=1e-5)
    assert all(p >= floor for _, p in sure[:-1]), "no forward after the price is reached"
    assert floor == 0 or forwards < 8


class Waverer(ToyModel):
    """After "x" it says "he" or " the", after "he" then "x" or "y", and else "z"."""

    def logits_after(self, prefix: list[int], layers: int | None = None) -> np.ndarray[Any, Any]:
        own = bpe("b")
        the, he, x, y, z = (int(own.encode(text)[0]) for text in (" the", "he", "x", "y", "z"))
        said = {x: {he: 0.65, the: 0.35}, he: {x: 0.55, y: 0.45}}.get(prefix[-1], {}) if len(prefix) < 3 else {}
        logits = np.full(EOS + 1, -20.0, np.float32)
        for token, chance in (said or {z: 0.97}).items():
            logits[token] = np.log(chance)
        return logits


@pytest.mark.parametrize(("size", "said"), [(9, "hexzzzz"), (5, "hex"), (3, "he")])
def test_second_choices_stand_beside_the_chain_where_the_target_s_ids_part(size: int, said: str) -> None:
    target = bpe("a")
    asked = view(target.encode("x").tolist())._replace(floor=0.2, adaptive=True)
    found = drafter(Waverer(EOS + 1, max_length=64)).propose([asked], np.array([size], np.int32)).row(0)
    main, (the,), (y,) = target.encode(said).tolist(), target.encode(" the").tolist(), target.encode("y").tolist()
    assert found.tokens[: len(main)] == main
    assert found.parents[: len(main)] == list(range(-1, len(main) - 1))
    rest = zip(found.tokens[len(main) :], found.parents[len(main) :], found.gains[len(main) :], strict=True)
    beside = {(token, parent): gain for token, parent, gain in rest}
    assert beside.pop((the, -1)) == pytest.approx(0.35, rel=0.01)
    if size > 3:
        assert beside.pop((y, 1)) == pytest.approx(0.65 * 0.45, rel=0.01)
    assert not beside


def test_a_prompt_is_read_beside_the_target_s_as_far_back_as_the_answer_pays_for() -> None:
    tokenizer = bpe("a")
    prompt = tokenizer.encode(SAID * 40).tolist()
    lengths: dict[int, list[int]] = {}
    for most in (2, 40, 200):
        target, draft = (Speller(bpe(kind), SAID, 10**9, max_length=2048) for kind in "ab")
        own, seen = drafter(draft), lengths.setdefault(most, [0])
        with Engine(
            target, tokenizer, drafter=own, prefill_chunk=64, cost=Cost.guess(),
            on_step=lambda _, own=own, seen=seen: seen.append(own._cache.length(0)),
        ) as engine:  # fmt: skip
            result = engine.generate(prompt, SamplingParams(max_tokens=most))
            assert result.token_ids == engine.generate(prompt, SamplingParams(max_tokens=most), drafter=False).token_ids
    chunks = -(-len(prompt) // 64)
    assert max(np.diff(lengths[200])) < 2 * 64, "never more than a chunk's text in a step"
    assert max(lengths[2]) == 0, "nothing pays for so short an answer"
    assert 30 < lengths[40][chunks] < lengths[200][chunks] <= len(bpe("b").encode(SAID * 40))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_model_whose_ids_are_short_reads_as_much_text_as_the_target(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has six ids for each of the target's: beside a chunk it reads all of the chunk's text."""
    said, merges = " theklmno", ["Ġ t", "h e", "Ġt he", "Ġthe k", "Ġthek l", "Ġthekl m", "Ġtheklm n", "Ġtheklmn o"]
    monkeypatch.setitem(MERGES, "long", merges)
    tokenizer, lengths = bpe("long"), list[tuple[int, int]]()
    target, draft = (Speller(bpe(kind), said, 10**9, vocab=300, max_length=4096) for kind in ("long", "b"))
    own = TranslatedDrafter(draft, bpe("b"), "model:toy", tokenizer, 300)
    assert len(tokenizer.encode(said * 200)) == 200
    with Engine(
        target, tokenizer, drafter=own, size=16, prefill_chunk=64, prefix_rows=0,
        on_step=lambda _: lengths.append((own._cache.length(0), len(own._rows[0].text.ids) if 0 in own._rows else 0)),
    ) as engine:  # fmt: skip
        prompt, params = tokenizer.encode(said * 200).tolist(), SamplingParams(max_tokens=40, ignore_eos=True)
        results = engine.generate_many([prompt[row:] for row in range(rows)], params)
    assert lengths[0] == (lengths[0][1], lengths[0][1])
    for result in results:
        assert sum(source != "target" for source in result.sources) > 15


@pytest.mark.parametrize("beside", [True, False])
def test_the_end_of_a_text_that_the_draft_model_has_no_room_for_is_read_as_with_room(beside: bool) -> None:
    """Beside the target or by a draft, and until there is no room left for the answer."""
    tokens = bpe("a").encode(SAID * 160).tolist()
    start, seen, late = len(tokens) - 100, [], 0
    for longest, most in ((512, 600), (8192, 450)):
        own = drafter(Speller(bpe("b"), SAID, 10**9, max_length=longest))
        if beside:
            given = [(0, np.array(tokens[:-1], np.int32), len(tokens) - 1, start)]
            assert list(own.read_prompts(given)) == [0]
            assert 90 < own._cache.length(0) < 115
        text, states = list(tokens), []
        while len(text) - start < most:
            asked = view(text, 8192)._replace(start=start)
            found = own.propose([asked], np.array([8], np.int32)).row(0).tokens
            assert own._cache.length(0) <= longest
            if len(text) - start < 450:
                states.append((found, own._cache.start(0), own._cache.length(0)))
            elif own._cache.start(0) == 0:
                late += len(found)  # once it was read anew, from its middle on
            text += found or [0]
        seen.append(states)
    assert seen[0] == seen[1]
    assert late > 20


@pytest.mark.parametrize("start", [0, 400, 1900])
def test_places_are_those_of_the_whole_text_when_its_beginning_is_forgotten(start: int) -> None:
    tokens = np.array(bpe("a").encode(SAID * 160).tolist(), np.int32)
    text = SyncedText(TokenBytes(bpe("a"), EOS + 1), TokenBytes(bpe("b"), EOS + 1))
    text.read(tokens)
    behind, whole = len(text.ids) - text.place(start), len(text.ids)
    for most in (256, 200):
        assert text.shorten(most) == 0
        assert len(text.ids) - text.place(start) == min(behind, most)
    assert 0 <= whole * (1 - start / len(tokens)) - behind + 1 <= 2


@pytest.mark.parametrize("last", [None, 200])
def test_a_fork_begins_with_all_that_its_source_has_read(last: int | None) -> None:
    tokens = bpe("a").encode(SAID * 40).tolist()
    own = drafter(Speller(bpe("b"), SAID, 10**9, max_length=2048))
    start = 0 if last is None else len(tokens) - last
    own.propose([view(tokens)._replace(start=start)], np.array([4], np.int32))
    own.fork(0, 1, len(tokens) - 1)
    cache = own._cache
    assert (cache.start(1), cache.length(1)) == (cache.start(0), cache.length(0))
    assert (cache.start(1) > 0) == (last is not None)
    own.check([0, 1])


def test_the_end_is_proposed_when_the_draft_model_ends() -> None:
    draft = Speller(bpe("b"), " the", 10**9, max_length=64)
    draft._cycle.append(EOS)
    translated = drafter(draft)
    drafts = translated.propose([view(bpe("a").encode("x").tolist())], np.array([5], np.int32))
    assert drafts.row(0).tokens == [*bpe("a").encode(" the").tolist(), EOS]


def test_a_row_that_outgrows_the_draft_model_is_read_from_its_middle_on() -> None:
    tokenizer = bpe("a")
    target = Speller(tokenizer, SAID, 10**9, max_length=1024)
    draft = Speller(bpe("b"), SAID, 10**9, max_length=300)
    engine = Engine(target, tokenizer, drafter=drafter(draft), size=5)
    request = engine.add(tokenizer.encode(SAID), SamplingParams(max_tokens=700))
    drafted_late = 0
    while not engine.idle:
        for delta in engine.step():
            assert delta.request == request
            if delta.result is not None:
                sources = delta.result.sources
                drafted_late = sum(source != "target" for source in sources[-200:])
        engine.check()
    assert drafted_late > 100


def test_rejection_is_refused_by_name() -> None:
    tokenizer = bpe("a")
    with pytest.raises(DrafterError, match=r"model:toy has another tokenizer .* use acceptance='coupled', or"):
        Engine(ToyModel(EOS + 1), tokenizer, drafter=drafter(ToyModel(EOS + 1)), size=4, acceptance="rejection")
    engine = Engine(ToyModel(EOS + 1), tokenizer, drafter=drafter(ToyModel(EOS + 1)), size=4)
    with pytest.raises(DrafterError, match="another tokenizer"):
        engine.add([1], acceptance="rejection")
