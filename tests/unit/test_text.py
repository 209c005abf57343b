"""Text out: what answers read as, and where stop strings end them, by the tokenizers' own libraries."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from outpace import Engine
from outpace.drafters.base import Drafter
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.errors import ParameterError
from outpace.models.weights.gguf import GGUFFile
from outpace.server.api.completions import _widths
from outpace.text.answer import TextReader
from outpace.text.tokenizer import Tokenizer
from tests.exported import vocabulary
from tests.small_tokenizers import END, MARK, byte_level, of_pieces
from tests.toy import ToyModel

MARKS = ("<|a|>", "<|bc|>")  # special tokens
WORDS = [
    "the", "river", "goes", "on", "and", "valley", "waits;", "a", "stone,", "12", "or", "345", "of", "them:", "said",
    "owl", "(twice)",
]  # fmt: skip
SEEDS = range(60)


@dataclass(frozen=True)
class Case:
    """``text``: what a library reads in ids, without special tokens; ``spelled``: with them. ``plain``: ids that are
    whole characters; ``special``: ids that leave no text."""

    tokenizer: Tokenizer
    text: Callable[[Sequence[int]], str]
    spelled: Callable[[Sequence[int]], str]
    plain: list[int]
    special: list[int]

    def prompt(self, chance: random.Random) -> list[int]:
        return [
            *chance.choices(self.special, k=chance.randrange(3)),
            *chance.choices(self.plain, k=chance.randint(1, 9)),
        ]


def of_library(fast: Any) -> Case:
    tokenizer = Tokenizer(fast)
    special = sorted(tokenizer.special_ids)
    plain = [i for i in range(tokenizer.vocab_size) if i not in special and "\ufffd" not in fast.decode([i])]
    return Case(tokenizer, lambda ids: fast.decode(list(ids), skip_special_tokens=True),
                lambda ids: fast.decode(list(ids), skip_special_tokens=False), plain, special)  # fmt: skip


@cache
def pieces_of(model: str, decoder: str) -> Case:
    """A vocabulary of words and their parts, as ``tokenizers`` decodes it."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models

    ends = {"WordPiece": ("##{}", "{}"), "Metaspace": ("{}", "\u2581{}"), "BPEDecoder": ("{}", "{}</w>")}[decoder]
    words = {form.format(word) for word in (*WORDS, *"aeiou") for form in ends} | ({"\u2581"} & {ends[1].format("")})
    vocabulary = ["<unk>", *sorted(words)]
    made = {
        "Unigram": lambda: models.Unigram([(word, -1.0) for word in vocabulary], 0, False),
        "WordPiece": lambda: models.WordPiece({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"),
        "BPE": lambda: models.BPE({w: i for i, w in enumerate(vocabulary)}, []),
    }[model]()
    fast = Fast(made)
    fast.decoder = getattr(decoders, decoder)()
    fast.add_special_tokens(["<unk>", *MARKS])
    return of_library(fast)


@cache
def sentencepiece() -> Any:
    """A small processor made as Llama's: a space before each text, bytes for what no piece has."""
    import sentencepiece as library

    made = io.BytesIO()
    chance = random.Random(1)
    lines = [" ".join(chance.choices(WORDS, k=8)) for _ in range(200)] + ["  def f(x):", "    return  x"] * 20
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=made, model_type="bpe", vocab_size=420, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, control_symbols=list(MARKS),
        allow_whitespace_only_pieces=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return library.SentencePieceProcessor(model_proto=made.getvalue())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same in a GGUF file; its text is what ``sentencepiece`` reads."""
    own, n = sentencepiece(), sentencepiece().get_piece_size()
    kinds = ((own.is_unknown, 2), (own.is_control, 3), (own.is_byte, 6))
    path = vocabulary(
        tmp_path_factory.mktemp("sentencepiece") / "llama.gguf", "llama", [own.id_to_piece(i) for i in range(n)],
        types=[next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in range(n)],
        scores=[own.get_score(i) for i in range(n)],
        ids={"bos": own.bos_id(), "eos": own.eos_id(), "unknown": own.unk_id()},
    )  # fmt: skip
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(path))
    special = [own.bos_id(), *(own.piece_to_id(mark) for mark in MARKS)]
    plain = [i for i in range(n) if not (own.is_unknown(i) or own.is_control(i) or own.is_byte(i))]
    spelled = tokenizer._fast
    return Case(tokenizer, own.decode, lambda ids: spelled.decode(list(ids), skip_special_tokens=False), plain, special)


KINDS = ["sentencepiece", "byte-level", "WordPiece", "Metaspace"]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, llama: Case) -> Case:
    return {
        "sentencepiece": lambda: llama,
        "byte-level": lambda: of_library(byte_level()._fast),
        "WordPiece": lambda: pieces_of("WordPiece", "WordPiece"),
        "Metaspace": lambda: pieces_of("Unigram", "Metaspace"),
        "suffixes": lambda: pieces_of("BPE", "BPEDecoder"),
    }[request.param]()


def read(reader: TextReader, ids: Sequence[int]) -> str:
    """All that is shown of an answer, token by token."""
    state, shown = reader.start, ""
    for token in ids:
        state, text = reader.add(state, token)
        shown += text
        if state.stopped_by is not None:
            break
    return shown + reader.finish(state)[1]


@pytest.mark.parametrize("case", [*KINDS, "suffixes"], indirect=True)
def test_an_answer_is_what_follows_the_prompt(case: Case) -> None:
    """Spaces at the seam are there, whatever the prompt ends with: text, special tokens, or nothing but those."""
    spaces = 0
    for seed in SEEDS:
        chance = random.Random(seed)
        prompt = case.prompt(chance) if seed % 6 else case.special * (seed // 3)
        prompt += chance.choices(case.special, k=chance.choice((0, 0, 1, 3, 30)))
        answer = (
            chance.choices(case.plain, k=12)
            + case.tokenizer.encode(
                chance.choice(("", "é 日本", "  x", "na\u00efve \u2581")), add_special=False
            ).tolist()
        )
        for at in sorted(chance.sample(range(12), 3), reverse=True):
            answer.insert(at, chance.choice(case.special))
        whole, before = case.text(prompt + answer), case.text(prompt)
        assert whole.startswith(before)
        assert read(TextReader(case.tokenizer, after=prompt), answer) == whole[len(before) :], (prompt, answer)
        spaces += whole[len(before) :].startswith(" ")
        cut = chance.randrange(len(answer))  # an answer that goes on is one that begins later
        rest = read(TextReader(case.tokenizer, after=prompt + answer[:cut]), answer[cut:])
        if "\ufffd" not in case.text(prompt + answer[:cut]):
            assert read(TextReader(case.tokenizer, after=prompt), answer[:cut]) + rest == whole[len(before) :]
    assert spaces


def test_a_character_that_the_prompt_begins_is_the_answers(llama: Case) -> None:
    for tokenizer in (byte_level(), llama.tokenizer):
        for text in ("the 日本", "日", "😀😀"):
            ids = tokenizer.encode(text, add_special=False).tolist()
            for cut in range(1, 3):
                shown = read(TextReader(tokenizer, after=ids[:-cut]), ids[-cut:])
                assert shown == text[-1]
                assert read(TextReader(tokenizer, after=ids[:-cut]), []) == ""
    broken = byte_level().encode("x\ufffd", add_special=False).tolist()
    answer = byte_level().encode("\ufffd y", add_special=False).tolist()
    assert read(TextReader(byte_level(), after=broken), answer) == "\ufffd y"


def test_offsets_in_a_repeated_prompt_are_those_of_its_text(case: Case) -> None:
    """Where each token's text begins: no character too late for a space or a start token that the text has not."""
    for seed in range(20):
        prompt = case.prompt(random.Random(seed))
        for text in (case.text(prompt), case.spelled(prompt)):
            widths = _widths(case.tokenizer, np.array(prompt, np.int32), text)
            reads = case.text if text == case.text(prompt) else case.spelled
            begins = [len(text) - len(reads(prompt)) + len(reads(prompt[:n])) for n in range(1, len(prompt) + 1)]
            assert [sum(widths[: n + 1]) for n in range(len(prompt))] == begins


def stopped(case: Case, prompt: list[int], answer: list[int], stops: list[str]) -> tuple[int, str, str | None]:
    """How many tokens are taken, what is shown, and which of ``stops`` ended it, from whole decodes alone."""
    shown, spelled = [""], [""]
    for n in range(1, len(answer) + 1):
        shown.append(case.text(prompt + answer[:n])[len(case.text(prompt)) :])
        spelled.append(case.spelled(prompt + answer[:n])[len(case.spelled(prompt)) :])
        found = []
        for order, stop in enumerate(stops):
            for texts in (shown, spelled):
                at = texts[-1].find(stop, max(0, len(texts[-2]) - len(stop) + 1))
                if at >= 0:
                    token = next(t for t in range(n) if len(texts[t]) <= at < len(texts[t + 1]))
                    into = at - len(texts[token])
                    visible = into if len(shown[token + 1]) > len(shown[token]) else 0
                    found.append((len(spelled[token]) + into, order, shown[-1][: len(shown[token]) + visible]))
        if found:
            _, order, text = min(found)
            return n, text, stops[order]
    return len(answer), shown[-1], None


def test_stop_strings_are_found_in_all_that_a_model_writes(case: Case) -> None:
    """A special token's spelling stops as any text does, alone or with what stands beside it, though it is not shown;
    so does what is shown."""
    ended = hidden = 0
    for seed in SEEDS:
        chance = random.Random(seed)
        prompt = [*case.prompt(chance), chance.choice(case.plain)]
        answer = chance.choices([*case.plain, *case.special * (len(case.plain) // 6)], k=14)
        stops = []
        for view in (case.spelled, case.spelled, case.text):
            text = view(prompt + answer)[len(view(prompt)) :]
            at, size = chance.randrange(len(text)), chance.choice((1, 3, 6, 9, 14))
            stops.append(text[at : at + size])
        stops = stops[: 1 + seed % 3]
        n, text, by = stopped(case, prompt, answer, stops)
        for include in (False, True):
            reader = TextReader(case.tokenizer, stops, include_stop=include, after=prompt)
            assert read(reader, answer) == text + (by or "") * include, (prompt, answer, stops)
            state = reader.start
            for token in answer[: n - 1]:
                state, _ = reader.add(state, token)
            assert state.stopped_by is None
            assert reader.add(state, answer[n - 1])[0].stopped_by == by
        ended += by is not None
        hidden += answer[n - 1] in case.special
    assert ended > 40
    assert hidden > 5


def test_what_is_held_back_stays_short() -> None:
    tokenizer = byte_level()
    reader, mark = TextReader(tokenizer, ["ab" + END]), tokenizer.encode(MARK, parse_special=True).tolist()[0]
    state, shown = reader.add(reader.start, tokenizer.encode("a").tolist()[0])
    for _ in range(500):
        state, more = reader.add(state, mark)
        shown += more
    assert len(state.held) < 20
    assert (shown, reader.finish(state)[1]) == ("", "a")


def test_an_unfinished_character_before_a_special_token_is_shown_if_that_stops() -> None:
    tokenizer = byte_level()
    half = tokenizer.encode("é", add_special=False).tolist()[:1]
    mark = tokenizer.encode(MARK, parse_special=True).tolist()
    assert read(TextReader(tokenizer, [MARK]), half + mark) == "\ufffd"
    assert read(TextReader(tokenizer, [END]), [*half, *mark, *tokenizer.encode("é").tolist()[1:]]) == "é"


TOY = of_pieces(("a", "b", "c", "ab", "Ġ", "bc"), (END, MARK))
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(),
    "suffix": lambda: SuffixDrafter(memory=1 << 20),
    "model": lambda: ModelDrafter(ToyModel(8, seed=1, blur=0.2, memory=1), "model", 8),
}


@pytest.mark.parametrize("options", [{}, {"include_stop": True}, {"skip_special_tokens": False}, {"min_tokens": 4}])
def test_drafted_answers_stop_where_plain_ones_do(options: dict[str, Any]) -> None:
    """At a special token's spelling, the end token's too, and at texts that contain one."""
    stops = [[MARK], [f"a{MARK}"], [f"{MARK}b", f"c{END}"], [f"b{END}"], ["ark|>"], [f"{MARK}{MARK}", "ca"], ["bb"]]
    prompts = [[2], [3, 1, 4], [5, 6], [7, 2, 2, 3]]
    asked = [(prompt, stop, seed) for seed, prompt in enumerate(prompts) for stop in stops]
    answers: dict[str, list[Any]] = {}
    for name, made in DRAFTERS.items():
        target = ToyModel(8, seed=1, eos=(0,), memory=1)
        with Engine(target, TOY, drafter=made(), size=4, max_rows=8) as engine:
            for prompt, stop, seed in asked:
                engine.add(prompt, stop=stop, seed=seed, temperature=0.9, max_tokens=12, **options)
            found = []
            while not engine.idle:
                found += [delta.result for delta in engine.step() if delta.result is not None]
            found.sort(key=lambda result: result.request)
            answers[name] = [(r.token_ids, r.text, r.finish_reason, r.stopped_by) for r in found]
    assert answers["ngram"] == answers["suffix"] == answers["model"] == answers["none"]
    ended = 0
    for (_, stop, _), (ids, text, _, by) in zip(asked, answers["none"], strict=True):
        whole = TOY._fast.decode(list(ids), skip_special_tokens=False)
        assert (by in stop) == any(each in whole for each in stop) or options.get("min_tokens")
        if by in stop:
            ended += 1
            if not options.get("min_tokens"):
                assert text.endswith(by) if options.get("include_stop") else by not in text
    assert ended > 4


def test_an_engines_streams_are_the_text(llama: Case) -> None:
    """Samples, resumed answers, pieces by drafter: all begin where the prompt ends."""
    n = llama.tokenizer.vocab_size
    model = ToyModel(n, seed=3, memory=2)
    chance = random.Random(0)
    prompt = llama.prompt(chance)
    bias = {i: -1e9 for i in range(n) if i not in llama.plain}
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "logit_bias": bias, "seed": 5}
    with Engine(model, llama.tokenizer, drafter=NgramDrafter(), size=3) as engine:
        request = engine.add(prompt, n=3, **options)
        shown, results = {0: "", 1: "", 2: ""}, []
        while not engine.idle:
            for delta in engine.step():
                shown[delta.sample] += delta.text
                results += [delta.result] if delta.result else []
        assert request == 0
        for result in results:
            answer = llama.text([*prompt, *result.token_ids])[len(llama.text(prompt)) :]
            assert answer == result.text == shown[result.sample] == "".join(text for text, _ in result.pieces)
        first = min(results, key=lambda result: result.sample)
        for cut in (1, 3, 7):
            again = list(engine.stream(prompt, resume=list(first.token_ids[:cut]), **options))
            rest = llama.text([*prompt, *first.token_ids])[len(llama.text([*prompt, *first.token_ids[:cut]])) :]
            assert "".join(delta.text for delta in again) == rest
            assert again[-1].result is not None
            assert again[-1].result.text == first.text


def test_an_empty_raw_prompt_is_the_start_token() -> None:
    from tokenizers import Tokenizer as Fast

    def made(**options: Any) -> Tokenizer:
        return Tokenizer(Fast.from_str(byte_level()._fast.to_str()), **options)

    with Engine(ToyModel(450), made(bos_id=1)) as engine:
        assert engine.encode("").tolist() == [1]
        assert engine.encode(MARK + END, raw=True).tolist() == [1, 0]
        with pytest.raises(ParameterError, match="the prompt is empty: give some text"):
            engine.encode("", add_special_tokens=False)
        with pytest.raises(ParameterError, match=r"add_special_tokens=False is of raw texts alone.*raw=True"):
            engine.encode([2, 3], add_special_tokens=False)
    with (
        Engine(ToyModel(450), made(add_bos=True, bos_id=1)) as engine,
        Engine(ToyModel(450), made()) as other,
    ):
        assert engine.encode("a").tolist() == [1, *other.encode("a").tolist()]
        assert engine.encode(MARK + "a").tolist() == engine.encode("a").tolist()
        assert engine.encode("a", add_special_tokens=False).tolist() == other.encode("a").tolist()
        with pytest.raises(ParameterError, match="the prompt is empty: give some text"):
            other.encode("")


def test_bad_words_forbid_the_special_tokens_that_they_spell() -> None:
    with Engine(ToyModel(8, seed=1, memory=1), TOY) as engine:
        options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.5, "seed": 0}
        assert 1 in engine.generate([2], **options).token_ids
        assert 1 not in engine.generate([2], bad_words=[MARK], **options).token_ids


def test_every_end_is_ignored_or_put_off() -> None:
    ends = (0, 1, 5)
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.5, "seed": 0}
    with Engine(ToyModel(8, seed=1, eos=ends, memory=1), TOY, drafter=NgramDrafter(), size=3) as engine:
        ignoring = engine.generate([2], ignore_eos=True, **options)
        assert ignoring.finish_reason == "length"
        assert set(ignoring.token_ids) >= set(ends)
        last = {engine.generate([2], **{**options, "seed": seed}).token_ids[-1] for seed in range(12)}
        assert last >= set(ends)
        later = engine.generate([2], min_tokens=9, **options)
        assert not set(later.token_ids[:9]) & set(ends)
        assert later.finish_reason == "length" or later.stopped_by in ends
