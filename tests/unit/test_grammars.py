"""Grammars from schemas, expressions and Lark: masks by enumeration, forced text, reasoning first, refusals."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from outpace import GrammarError, Grammars, SamplingParams
from outpace.common.arrays import F32
from outpace.common.installing import install
from outpace.errors import ComplexityError, MissingExtraError
from outpace.exact.masks import unpacked
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.text import grammar as its_module
from outpace.text.grammar import Grammar, Thoughts
from outpace.text.token_bytes import TokenBytes
from outpace.text.tokenizer import Tokenizer
from tests.random_schemas import schema
from tests.small_tokenizers import byte_level, of_pieces
from tests.unit.test_token_bytes import llama

jsonschema = pytest.importorskip("jsonschema")
PROMPT = np.array([5, 6], np.int32)
PAD = 3  # ids that the model has and the tokenizer lacks
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def made() -> Grammars:
    return Grammars(byte_level(), 450 + PAD, [0])


def allowed(grammar: Grammar, path: Sequence[int], vocab: int) -> list[int]:
    """Tokens of the mask after ``path``."""
    state = grammar.start(PROMPT)
    for token in path:
        state = grammar.advance(state, token)
    return np.flatnonzero(unpacked(grammar.mask(state), vocab)).tolist()


def walk(grammar: Grammar, vocab: int, rng: Random, most: int = 60) -> list[int]:
    """A random text of the grammar; every mask on its way against ``allows``, asked in another order."""
    state, path = grammar.start(PROMPT), list[int]()
    while len(path) < most:
        bits = unpacked(grammar.mask(state), vocab)
        asked = rng.sample(range(vocab), 40) + np.flatnonzero(bits).tolist()[:20]
        assert [grammar.allows(state, token) for token in asked] == bits[asked].tolist()
        path.append(rng.choice(np.flatnonzero(bits).tolist()))
        before, state = state, grammar.advance(state, path[-1])
        if path[-1] == 0:
            return path
        if rng.random() < 0.2:  # a state is a value: others may be visited between
            grammar.mask(rng.choice([before, grammar.start(PROMPT)]))
    return path


LANGUAGE = re.compile(r"\[(1(,1)*)?\]")
COMPLETIONS = ["".join(c) for n in range(4) for c in itertools.product("[]1,", repeat=n)]


@pytest.mark.parametrize(
    "compiled",
    [
        lambda g: g.regex(r"\[(1(,1)*)?\]"),
        lambda g: g.lark('start: "[" list? "]"\nlist: "1" | "1" "," list'),
        lambda g: g.lark('root ::= "[" a-list? "]"  # either\na-list ::= "\\u0031" | [\\u0031] "," a-list'),
        lambda g: g.regex(r"\[(1(,1)*)?\]", after="x"),
    ],
    ids=["regex", "lark", "ebnf", "after"],
)
def test_masks_are_the_language_itself(compiled: Any) -> None:
    """By enumeration: a token is allowed after a text if and only if some text of the language goes on so."""
    pieces = ("[", "]", "1", ",", "1,", ",1", "x", "[]", "x[", "]x")
    grammar = compiled(Grammars(of_pieces(pieces), 1 + len(pieces), [0]))
    free = allowed(grammar, [], 11) != [1, 8]  # it begins with free text

    def viable(path: tuple[int, ...]) -> bool:
        text = "".join(pieces[token - 1] for token in path if token)
        if free:
            _, mark, text = text.partition("x")
            if not mark:
                return 0 not in path
        if 0 in path:
            return path.index(0) == len(path) - 1 and bool(LANGUAGE.fullmatch(text))
        return any(LANGUAGE.fullmatch(text + rest) for rest in COMPLETIONS)

    seen, left = 0, [()]
    while left:
        path = left.pop()
        found = [t for t in range(11) if viable((*path, t))]
        assert allowed(grammar, path, 11) == found, path
        seen += 1
        left += [(*path, t) for t in found if t and len(path) < (3 if free else 7)]
    assert seen > 30


@pytest.mark.parametrize("number", range(12))
def test_random_texts_of_random_schemas_are_valid(made: Grammars, number: int) -> None:
    rng, its = Random(number), schema(Random(number))
    grammar = made.json_schema(json.dumps(its) if number % 2 else its, whitespace=number % 3 == 0)
    path = walk(grammar, 450 + PAD, rng, 400)
    if path[-1] == 0:
        text = byte_level().decode(path)
        jsonschema.Draft202012Validator(its).validate(json.loads(text))


def test_a_grammar_with_a_part_of_another_kind(made: Grammars) -> None:
    tokenizer = byte_level()
    grammar = made.lark('start: "no" | "yes: " @part', part=("json", {"enum": [1, 20]}))
    for text, ends in (("no", True), ("yes: 1", True), ("yes: 20", True), ("yes: 2", False), ("yes: ", False)):
        assert (0 in allowed(grammar, tokenizer.encode(text).tolist(), 450 + PAD)) == ends


def test_pieces_and_bytes_of_sentencepiece() -> None:
    for prefix in (False, True):
        tokenizer = llama(prefix)
        made = Grammars(tokenizer, tokenizer.vocab_size, [2])
        grammar = made.json_schema({"enum": ["a b", "ä"]})
        code = TokenBytes(tokenizer)
        texts, left = set(), [[]]
        while left:
            path = left.pop()
            for token in allowed(grammar, path, tokenizer.vocab_size):
                if token == 2:
                    texts.add(code.join(path).decode())
                else:
                    left.append([*path, token])
        assert texts == {'"a b"', '"ä"'}
        assert code.join(made.regex("a a a").forced(made.regex("a a a").start(PROMPT))) in (b"a a a", b"")


def test_forced_text_is_spelled_as_the_tokenizer_does_and_nothing_is_imposed(made: Grammars) -> None:
    grammar, tokenizer = made.json_schema(PERSON), byte_level()
    state = grammar.start(PROMPT)
    first = tokenizer.encode('{"name": "').tolist()
    assert list(grammar.forced(state)) == first
    assert {tokenizer.token(t) for t in allowed(grammar, [], 450)} >= {"{", '{"'}  # other spellings stay possible
    for token in tokenizer.encode('{"name": "Ada", "age": 36}').tolist():
        state = grammar.advance(state, token)
    assert list(grammar.forced(state)) == [0]
    assert list(grammar.forced(grammar.advance(state, 0))) == []
    assert allowed(grammar, [*tokenizer.encode('{"name": "Ada", "age": 36}').tolist(), 0], 450) == [0]
    assert list(made.regex("é+").forced(made.regex("é+").start(PROMPT))) == tokenizer.encode("é").tolist()


def test_the_end_comes_only_where_the_grammar_may_end(made: Grammars) -> None:
    grammar = made.regex("[0-9]{2,3}")
    digits = {d: byte_level().encode(d).tolist()[0] for d in "0123456789"}
    for path, ends in (("", False), ("1", False), ("12", True), ("123", True)):
        its = allowed(grammar, [digits[d] for d in path], 450 + PAD)
        assert (0 in its) == ends
        assert (len(its) > 1) == (path != "123")
    with pytest.raises(ValueError, match="token 0 cannot follow"):
        grammar.advance(grammar.start(PROMPT), 0)


def test_thoughts_may_come_first_or_not(made: Grammars) -> None:
    tokenizer = byte_level()
    for begin in ("<think>", "<|mark|>"):
        grammar = made.json_schema(PERSON, after=Thoughts(begin, "</think>"))
        for before in ([], [begin, "hm { </thi", "</think>\n"]):
            state = grammar.start(PROMPT)
            for text in [*before, "{"]:
                for token in [1] if text == "<|mark|>" else tokenizer.encode(text).tolist():
                    assert not grammar.allows(state, 0)
                    state = grammar.advance(state, token)
            assert TokenBytes(tokenizer).join(grammar.forced(state)) == b'"name": "'
        assert not grammar.allows(grammar.start(PROMPT), tokenizer.encode("I").tolist()[0])


def test_the_switch_lies_wherever_the_text_ends(made: Grammars) -> None:
    """Inside a token, across tokens, at a special token, and inside a draft that was made across it."""
    tokenizer, grammar = byte_level(), made.json_schema(PERSON, after="</think>")
    for text in ("I think </think>{", "</think> {", "hm </think>\n\n{", '<</think>{"name'):
        for ids in (tokenizer.encode(text).tolist(), [tokenizer.encode(c).tolist()[0] for c in text]):
            state = grammar.start(PROMPT)
            for token in ids:
                assert not grammar.allows(state, 0)
                assert not grammar.allows(state, 1)  # special tokens are no text
                state = grammar.advance(state, token)
            assert TokenBytes(tokenizer).join(grammar.forced(state)) in (b'"name": "', b'": "')
            assert not grammar.allows(state, tokenizer.encode("I").tolist()[0])
    state = grammar.start(PROMPT)
    for token in tokenizer.encode("</thin> </think").tolist():
        state = grammar.advance(state, token)
    assert grammar.allows(state, tokenizer.encode("I").tolist()[0])
    special = made.regex("[0-9]+", after="<|mark|>")
    state = special.start(PROMPT)
    for token in tokenizer.encode("I think").tolist():
        state = special.advance(state, token)
    assert not special.allows(state, 0)
    state = special.advance(state, 1)
    assert set(allowed(special, [1], 450 + PAD)) == {tokenizer.encode(d).tolist()[0] for d in "0123456789"} | {
        t for t in range(450) if re.fullmatch("[0-9]+", tokenizer.decode([t]))
    }


@pytest.mark.parametrize(
    ("compile_", "says"),
    [
        (lambda g: g.json_schema("{"), "the JSON schema is not JSON"),
        (lambda g: g.json_schema("[1]"), "give an object"),
        (lambda g: g.json_schema(False), "give an object"),
        (lambda g: g.json_schema({"type": "strang"}), "strang"),
        (lambda g: g.json_schema({"not": {"type": "string"}}), '"not"'),
        (lambda g: g.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda g: g.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (lambda g: g.json_schema({"type": "string", "format": "tune"}), "tune"),
        (lambda g: g.json_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (lambda g: g.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (lambda g: g.json_schema({"$ref": "#/$defs/gone"}), "gone"),
        (lambda g: g.json_schema({"$ref": "http://127.0.0.1:9/x.json"}), "127.0.0.1"),
        (lambda g: g.json_schema({"$ref": "#"}), "leads back to itself"),
        (lambda g: g.json_schema({"properties": {"a": {"$ref": "#/$defs/b"}}}), "leads to nothing"),
        (lambda g: g.json_schema({"items": {"$ref": "b.json#/$defs/b"}}), "$ref b.json#/$defs/b leads to another"),
        (lambda g: g.json_schema({"$id": "https://a.b/c", "$ref": "https://a.b/d"}), "https://a.b/d leads to another"),
        (lambda g: g.json_schema({"$ref": "b", "$defs": {"b": {"$id": "https://a.b/b"}}}), "$ref b leads to another"),
        (lambda g: g.json_schema({"enum": {1, 2}}), "cannot be written as JSON"),
        (lambda g: g.json_schema({"type": "object", "x-guidance": 3}), "give an object"),
        (lambda g: g.json_schema({"properties": {str(i): {} for i in range(241)}}), "241 optional"),
        (lambda g: g.regex("(?=a)b"), "look-around"),
        (lambda g: g.regex("("), "unclosed group"),
        (lambda g: g.regex("a" * 300_000), "at most 262144"),
        (lambda g: g.regex("a\udce9"), "the regular expression is not valid Unicode at character 1"),
        (lambda g: g.lark('root ::= "\udce9"'), "is not valid Unicode at character 10"),
        (lambda g: g.json_schema({"const": "\udce9"}), "JSON schema cannot be used"),
        (lambda g: g.json_object(after="\udce9"), "is not valid Unicode at character 0"),
        (lambda g: g.regex(b"a"), "is a bytes"),
        (lambda g: g.lark("start: nothing"), "nothing"),
        (lambda g: g.lark('begin: "a"'), "start"),
        (lambda g: g.lark("root ::= gone"), "Rule 'gone' not found"),
        (lambda g: g.lark('root ::= "a" )'), "Expected name at line 1"),
        (lambda g: g.lark('root ::= "\\'), "EBNF grammar cannot be used"),
        (lambda g: g.lark("root ::= " + "(" * 3000), "EBNF grammar cannot be used"),
        (lambda g: g.lark("root ::= [\\ud800]"), "grammar cannot be used"),
        (lambda g: g.lark('root ::= "a"\n' * 257), "has 257 rules"),
        (lambda g: g.lark('root ::= "' + "a" * 20_000), "in 20010 characters"),
        (lambda g: g.json_object(after=""), "after=''"),
    ],
)
def test_what_cannot_be_used_says_why(made: Grammars, compile_: Any, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_(made)
    assert says in str(caught.value)
    assert "<state>" not in str(caught.value)


def deep(n: int) -> dict[str, Any]:
    its: dict[str, Any] = {"type": "object"}
    for _ in range(n):
        its = {"type": "object", "properties": {"a": its}}
    return its


HOSTILE = {
    "properties": lambda g: g.json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(9000)}}),
    "nested": lambda g: g.json_schema(deep(400)),
    "far too nested": lambda g: g.json_schema(deep(100_000)),
    "choices of choices": lambda g: g.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(2)]} for i in range(24)]}
    ),
    "intersection": lambda g: g.json_schema(
        {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}b.*)$"} for i in range(5, 20)]}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_an_error(made: Grammars, name: str) -> None:
    with pytest.raises(GrammarError):
        HOSTILE[name](made)


def test_a_grammar_that_becomes_too_complex_ends_its_request_and_no_other(made: Grammars) -> None:
    grammar = made.lark('start: e\ne: e e e | e e | "a"')
    a = byte_level().encode("a").tolist()[0]

    def long(n: int) -> Chooser:
        chooser = Chooser.start(SamplingParams(), Noise(0), [grammar], PROMPT)
        for _ in range(n):
            chooser = chooser.advance(a)
        return chooser

    with pytest.raises(ComplexityError, match="items"):
        long(300)
    assert long(3).allows(a)


def test_as_many_properties_as_are_taken_can_be_written(made: Grammars) -> None:
    names = [f"p{i}" for i in range(its_module.MOST_PROPERTIES)]
    for needed in (names, names[:: its_module.MOST_OPTIONAL + 1], names[240::241]):
        grammar = made.json_schema({"properties": {name: {"type": "integer"} for name in names}, "required": needed})
        state = grammar.start(PROMPT)
        for token in byte_level().encode('{"p0": 12, "').tolist():
            grammar.mask(state)
            state = grammar.advance(state, token)


def test_grammars_are_kept_and_shared_between_threads(made: Grammars) -> None:
    assert made.json_schema(PERSON) is made.json_schema(json.dumps(PERSON))
    assert made.json_schema(PERSON) is not made.json_schema(PERSON, after="x")
    fresh, walks = Grammars(byte_level(), 450, [0]), list[list[int]]()
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for _ in range(3):
                walks.append(walk(fresh.json_schema(PERSON), 450, Random(seed), 80))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    alone = [walk(fresh.json_schema(PERSON), 450, Random(seed), 80) for seed in range(4)]
    assert sorted(walks) == sorted(path for path in alone for _ in range(3))


def test_free_choices_are_the_masked_ones(made: Grammars) -> None:
    """The choice without the mask, where the grammar allows it, is the choice under the mask, bit for bit."""
    grammar, taken = made.json_schema(PERSON), 0
    rng = np.random.default_rng(3)
    likely = byte_level().encode('{"name": "Ada", "age": 36}').tolist()
    hot: dict[str, Any] = {"temperature": 1.0}
    for options in ({}, {"temperature": 0.9}, {**hot, "top_k": 9}, {**hot, "min_p": 0.1}):
        chooser = Chooser.start(SamplingParams(seed=1, **options), Noise(1), [grammar], PROMPT)
        assert (chooser.free is chooser) == ("top_k" in options or "min_p" in options)
        for token in likely:
            logits: F32 = rng.normal(0, 2, 450 + PAD).astype(np.float32)
            logits[token] += 6
            free = chooser.free.choose(logits)
            if chooser.free is not chooser and chooser.allows(free):
                assert free == chooser.choose(logits)
                taken += 1
            chooser = chooser.advance(token)
    assert taken >= 8


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=re.escape(install("outpace[serve]"))):
        its_module.Grammars(byte_level(), 450, [0])


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(GrammarError, match="eos_ids"):
        Grammars(Tokenizer(byte_level()._fast), 450, [])
