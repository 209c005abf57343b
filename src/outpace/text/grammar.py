"""Grammars as logit rules: JSON schemas, regular expressions and Lark, through ``llguidance``.

A mask is the grammar's own language over bytes, so every split of an allowed text into tokens is allowed. Text that
must follow is drafted as the tokenizer writes it and never imposed (llguidance's ``no_forcing``): a token that also
holds what comes after it stays possible.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np

from outpace.common.arrays import F32, I32, U32
from outpace.common.installing import install
from outpace.errors import ComplexityError, GrammarError, MissingExtraError
from outpace.exact.masks import packed, unpacked, words
from outpace.models.base import Model
from outpace.text.expressed import expressed, loosened
from outpace.text.schemas import check, closed
from outpace.text.token_bytes import TokenBytes
from outpace.text.tokenizer import Tokenizer

# EBNF as llama.cpp and XGrammar write it (``root ::= "a" | b``), turned into Lark by llguidance's converter, which
# goes through all of the text once for every rule: at most two seconds at these bounds.
MOST_EBNF_RULES = 256
MOST_EBNF_TEXT = 1 << 14  # characters
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def is_ebnf(text: str) -> bool:
    return _EBNF_RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Raises GrammarError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MOST_EBNF_TEXT or text.count("::=") > MOST_EBNF_RULES:
        raise GrammarError(
            f"the EBNF grammar has {text.count('::=')} rules in {len(text)} characters: at most {MOST_EBNF_RULES} in "
            f"{MOST_EBNF_TEXT} are taken; write it in Lark"
        )
    try:
        lark: str = gbnf_to_lark(_ESCAPE.sub(_character, text))
    except Exception as error:  # the converter raises bare Exception, and IndexError at the end of a text
        raise GrammarError(f"the EBNF grammar cannot be used ({error}): mend it or write it in Lark") from error
    return lark.removeprefix("%llguidance {}")


def _character(found: re.Match[str]) -> str:
    """Escapes of code points, whose leading zeros the converter drops, as it can take them."""
    digits = found[1] or found[2]
    if digits is None or 0xD800 <= (code := int(digits, 16)) < 0xE000 or code > 0x10FFFF:
        return found[0]  # another escape, or no character's, which is refused later
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


MOST_SPELLINGS = 4096  # texts whose tokens are kept
MARK = "\x02"  # text before a text that is continued, which no token joins with what follows


class Vocabulary:
    """``vocab_size``: the model's; ``eos_ids``: what ends an answer. Takes 10 to 30 microseconds a token to make.

    Raises ModelError for a tokenizer whose tokens stand for no bytes of their own.
    """

    def __init__(self, llguidance: Any, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._code = tokenizer, TokenBytes(tokenizer, vocab_size)
        texts = [self._code.of(token) for token in range(vocab_size)]
        special = [token for token in range(min(vocab_size, tokenizer.vocab_size)) if not texts[token]]
        names = {tokenizer.token(token) or "": token for token in special}
        for name, token in names.items():  # named, so that a grammar may ask for one
            texts[token] = name.encode()
        self._ids = {name: token for name, token in names.items() if name}
        longest_first = sorted(map(re.escape, self._ids), key=len, reverse=True)
        self._named = re.compile(f"({'|'.join(longest_first) or '(?!)'})")
        wrapper = _Wrapper(texts, special, eos_ids[0], self._encoded)
        self.native = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(eos_ids))
        self.spell = lru_cache(MOST_SPELLINGS)(self._spelled)
        prefix = tokenizer.encode(MARK, add_special=False).tolist()
        self._mark: list[int] = prefix

    def literal(self, text: str) -> str:
        """``text`` in Lark, with the special tokens that it spells."""
        parts = self._named.split(text)
        spelled = [
            _quoted(part) if (token := self._ids.get(part)) is None else f"<[{token}]>" for part in parts if part
        ]
        return " ".join(spelled)

    def _encoded(self, text: str | bytes) -> list[int]:
        """Tokens of text that follows other text."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        ids: list[int] = self._tokenizer.encode(MARK + text, add_special=False).tolist()
        n = len(self._mark)
        return ids[n:] if ids[:n] == self._mark else []

    def _spelled(self, text: bytes) -> tuple[int, ...]:
        """Tokens of the longest beginning of ``text`` that is whole characters; none where its spelling is another."""
        try:
            whole = text.decode()
        except UnicodeDecodeError as error:
            whole = text[: error.start].decode()
        ids = self._encoded(whole) if whole else []
        return tuple(ids) if self._code.join(ids) == whole.encode() else ()


class _Wrapper:
    """What ``llguidance.LLTokenizer`` reads of a tokenizer that is not its own."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int, encoded: Any) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._encoded = encoded

    def __call__(self, text: str | bytes) -> list[int]:
        found: list[int] = self._encoded(text)
        return found


MOST_MASKS = 8  # of a row's last states
MOST_REASON = 300  # characters
_EXCERPT = re.compile(r"^ *(\d+ \|.*|\^+)$", re.MULTILINE)  # lines of the grammar, and what points into them


class State:
    """Where a grammar stands after some tokens: a place on a path from the answer's start. Immutable."""

    __slots__ = ("depth", "ended", "parent", "token", "track")

    def __init__(self, track: Track, parent: State | None, token: int, ended: bool = False) -> None:
        self.track, self.parent, self.token, self.ended = track, parent, token, ended
        self.depth: int = 0 if parent is None else parent.depth + 1


class Track:
    """A matcher that goes back and forth between the states of one sequence.

    Going back and forth costs the same everywhere; a copy for each state would grow with the text (0.2 ms after 1000
    tokens). ``matcher``: an ``llguidance.LLMatcher`` of its own; ``mask_words``: of a mask.
    """

    def __init__(self, matcher: Any, mask_words: int) -> None:
        self._matcher, self._words = matcher, mask_words
        self.root = self._at = State(self, None, -1)  # where the matcher stands
        self._masks: OrderedDict[State, U32] = OrderedDict()

    def reach(self, state: State) -> Any:
        """The matcher, moved to ``state``. Raises ValueError."""
        here, there = self._at, state
        back: list[int] = []  # from here up to where both paths part, and from there
        ahead: list[int] = []
        while here is not there:
            if here.depth >= there.depth:
                assert here.parent is not None
                back.append(here.token)
                here = here.parent
            else:
                assert there.parent is not None
                ahead.append(there.token)
                there = there.parent
        common = 0  # the same path may be made of other objects
        while common < min(len(back), len(ahead)) and back[-1 - common] == ahead[-1 - common]:
            common += 1
        if len(back) > common:
            self._matcher.rollback(len(back) - common)
        if len(ahead) > common:
            rest = ahead[::-1][common:]
            if self._matcher.try_consume_tokens(rest) < len(rest):
                raise ValueError(reason(self._matcher) or "its matcher could not go back to where it was")
        self._at = state
        return self._matcher

    def takes(self, state: State, token: int) -> bool:
        """Whether ``token`` may follow; if so, the matcher stands behind it then."""
        matcher = self.reach(state)
        if matcher.is_stopped():
            return False
        if matcher.try_consume_tokens([token]) == 1:
            self._at = State(self, state, token)
            return True
        self._check()
        return False

    def stopped(self, state: State) -> bool:
        """Whether nothing but the end may follow a special token that ends the grammar."""
        matcher = self.reach(state)
        return bool(matcher.is_stopped() and matcher.is_accepting())

    def mask(self, state: State) -> U32:
        """uint32 [words]."""
        bits = self._masks.get(state)
        if bits is None:
            bits = np.frombuffer(self.reach(state).compute_bitmask(), np.uint32, self._words)
            self._check()  # a matcher that failed allows the end
            self._masks[state] = bits
            if len(self._masks) > MOST_MASKS:
                self._masks.popitem(last=False)
        return bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ComplexityError(f"the grammar became too complex ({reason(self._matcher)}): simplify it")


class Grammar:
    """A ``GrammarRule``; ``Grammars`` makes it. One serves any number of requests, in several threads.

    ``matcher``: a fresh ``llguidance.LLMatcher``; ``spell``: tokens of forced bytes, or of the first of them;
    ``special``: the grammar asks for special tokens, and a matcher that was asked for forced bytes forbids those;
    ``left_out``: what of a schema is not enforced.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        eos_ids: Sequence[int],
        spell: Callable[[bytes], Sequence[int]],
        *,
        special: bool = False,
        left_out: tuple[str, ...] = (),
    ) -> None:
        self._special, self.left_out = special, left_out
        self._matcher, self._words, self._spell = matcher, words(vocab_size), spell
        self._lock = threading.Lock()
        self._eos = tuple(eos_ids)
        self._after_end = packed(np.isin(np.arange(vocab_size), self._eos))

    def start(self, prompt: I32) -> State:
        with self._lock:
            matcher = self._matcher.deep_copy()
        return Track(matcher, self._words).root

    def advance(self, state: State, token: int) -> State:
        """Raises ValueError where the grammar forbids ``token``, ComplexityError where it became too complex."""
        if not self.allows(state, token):
            raise ValueError(f"token {token} cannot follow there")
        return State(state.track, state, token, token in self._eos)

    def allows(self, state: State, token: int) -> bool:
        """Whether the mask has ``token``: at a fraction of the mask's price."""
        if token in self._eos:
            return state.ended or bool(state.track.reach(state).is_accepting())
        return not state.ended and state.track.takes(state, token)

    def mask(self, state: State) -> U32:
        return self._after_end if state.ended or state.track.stopped(state) else state.track.mask(state)

    def apply(self, state: State, logits: F32) -> None:
        logits[~unpacked(self.mask(state), len(logits))] = -np.inf

    def forced(self, state: State) -> Sequence[int]:
        """The text that must follow, as the tokenizer writes it; the end's usual token, where nothing else may."""
        if state.ended:
            return ()
        matcher = state.track.reach(state)
        if matcher.is_stopped():
            return self._eos[:1] if matcher.is_accepting() else ()
        return self._spell((matcher.deep_copy() if self._special else matcher).compute_ff_bytes())


def reason(matcher: Any) -> str:
    """Why a matcher failed, in one line without excerpts of the grammar; empty where it did not."""
    message = str(matcher.get_error()).partition("\n<")[0]
    return " ".join(_EXCERPT.sub("", message).split())[:MOST_REASON]


log = logging.getLogger(__name__)

MOST_KEPT = 64  # compiled grammars
MOST_TEXT = 1 << 18  # characters of a schema, an expression or a grammar
MOST_RULES = 2000  # of a grammar: beyond some 5,000 in a chain compiling takes minutes
MOST_PROPERTIES = 1000  # of an object: compiling takes time with their square
MOST_OPTIONAL = 240  # of them, in a row: each may come next, four items of a parse each
MOST_ITEMS = 300  # of the parses that go on at once in somebody's grammar: a token's time grows with their square

# A hostile grammar ends in an error, not in a hang: after a second or two of compiling, or within a token's mask.
LIMITS = {
    "max_grammar_size": 20_000,  # symbols
    "max_items_in_row": 1_000,  # of the parses that go on at once
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,
}
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREELY = {"whitespace_flexible": True}
_RULE = re.compile(r"^[ \t]*[?!_A-Za-z]", re.MULTILINE)
_GAP = r"/[ \t\r\n]{0,8}/"  # between reasoning and JSON
_WHAT = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar"}


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Free text between two marks, which may stand before an answer or not."""

    begin: str
    end: str


After = str | Sequence[str] | Thoughts | None  # what ends the free text before an answer
Source = tuple[Literal["json", "regex", "lark"], Any]  # a grammar's kind, and its text; a schema may be its JSON value


class HasTarget(Protocol):
    """What a grammar needs of an ``Engine``."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def model(self) -> Model: ...


class Grammars:
    """Compiles grammars for one tokenizer and model. Its methods may be called from several threads.

    ``tokenizer``, ``vocab_size``: the model's; ``eos_ids``: allowed where a text may end, and nowhere else; the usual
    one first. Methods give a rule for ``SamplingParams(rules=[...])``, which any number of requests may share; the last
    64 are kept. Compiling takes milliseconds, at most a second or two; the first also reads the vocabulary, 10 to 30
    microseconds a token.

    ``after``: free text comes first, until this text (or special token) has been written: the end of a model's
    reasoning, say; of several texts one after another, with anything between. The answer cannot end before. JSON may
    then begin on a new line. ``Thoughts``: such text comes first where its beginning does, and else there is none.
    ``whitespace``: JSON stands on one line as Python's ``json.dumps`` writes it, so that a model cannot go on with
    white space, and more of the text must follow; True allows any.
    ``close``: objects of schemas have only the properties that are named, where a schema does not say otherwise
    (``additionalProperties``). ``loose``: what no grammar can express of a schema (``uniqueItems``, say) is left out,
    and the rule's ``left_out`` names it.

    Raises GrammarError with the reason, MissingExtraError without ``llguidance``, and ModelError for a tokenizer whose
    tokens stand for no bytes of their own.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], *, close: bool = False, loose: bool = False
    ) -> None:
        self._eos = tuple(dict.fromkeys(int(token) for token in eos_ids if 0 <= token < vocab_size))
        if not self._eos:
            raise GrammarError("this model has no token that ends an answer, so no grammar could end: name its eos_ids")
        self._tokenizer, self._vocab_size, self._close, self._loose = tokenizer, vocab_size, close, loose
        self._native = _llguidance()
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._read: Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, int | None, tuple[str, ...]], Grammar] = OrderedDict()

    @staticmethod
    def of(engine: HasTarget) -> Grammars:
        """For the target of ``engine``, an ``Engine``. Raises GrammarError for one without a tokenizer."""
        if engine.tokenizer is None:
            raise GrammarError("a grammar is about text, and the engine has no tokenizer: give it one")
        return Grammars(engine.tokenizer, engine.model.info.vocab_size, engine.model.info.eos_ids)

    def json_object(self, *, after: After = None, whitespace: bool = False) -> Grammar:
        """Any JSON object. ``after``, ``whitespace``: see the class."""
        return self.json_schema({"type": "object"}, after=after, whitespace=whitespace)

    def json_schema(
        self, schema: str | dict[str, Any] | bool, *, after: After = None, whitespace: bool = False
    ) -> Grammar:
        """JSON that ``schema`` describes, with properties in its order. A keyword that is not supported is named."""
        return self._compiled(("json", schema), after, whitespace=whitespace)

    def regex(self, pattern: str, *, after: After = None) -> Grammar:
        """Text that all of ``pattern`` matches: the syntax of Rust's regex, without look-around."""
        return self._compiled(("regex", pattern), after)

    def lark(self, text: str, *, after: After = None, items: int = MOST_ITEMS, part: Source | None = None) -> Grammar:
        """Texts of ``text``, a context-free grammar in Lark's syntax, with llguidance's extensions, or in EBNF
        (``root ::= "a" | b``). ``items``: most of the parses that may go on at once, after which a request ends with an
        error; an ambiguous grammar has many. ``part``: what ``@part`` in the text stands for."""
        return self._compiled(("lark", text), after, items=items, part=part)

    def _compiled(
        self,
        source: Source,
        after: After,
        *,
        whitespace: bool = False,
        items: int | None = None,
        part: Source | None = None,
    ) -> Grammar:
        what, gap = _WHAT[source[0]], "json" in (source[0], part and part[0])
        left_out: list[str] = []
        answer = self._native_grammar(source, whitespace, left_out)
        parts = [] if part is None else [{"name": "part", **self._native_grammar(part, whitespace, left_out)}]
        vocabulary = self._vocabulary()
        start = "start: @answer\n" if after is None else _switch(vocabulary, after, gap)
        grammars = [{"name": "main", "lark_grammar": start + _OPTIONS}, {"name": "answer", **answer}, *parts]
        text = json.dumps({"grammars": grammars})
        own = {} if items is None else {"max_items_in_row": items}
        key = text, items, tuple(left_out)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        limits = self._native.LLParserLimits(**LIMITS | own)

        def made_of() -> Any:
            matcher = self._native.LLMatcher(vocabulary.native, text, log_level=0, limits=limits)
            if matcher.is_error():
                raise GrammarError(f"the {what} cannot be used ({reason(matcher)}): mend or simplify it")
            first = matcher.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                why = reason(first) or "it allows no first token"
                raise GrammarError(f"no text fits the {what} ({why}): loosen it")
            return matcher

        matcher = _deeply(made_of)
        for warning in matcher.get_grammar_warnings():
            log.warning("%s: %s", what, warning)
            left_out += _of_warning(warning)
        made = Grammar(
            matcher, self._vocab_size, self._eos, vocabulary.spell, special="<[" in text,
            left_out=tuple(dict.fromkeys(left_out)),
        )  # fmt: skip
        with self._lock:
            made = self._kept.setdefault(key, made)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def _native_grammar(self, source: Source, whitespace: bool, left_out: list[str]) -> dict[str, Any]:
        """As llguidance takes it. Raises GrammarError for what cannot be one."""
        kind, text = source
        what = _WHAT[kind]
        if kind == "json":
            schema = _schema(what, text, whitespace, self._close)
            if self._loose:
                schema = loosened(schema, left_out)
                schema["x-guidance"] = {"lenient": True, **schema["x-guidance"]}
            return {"json_schema": schema}
        if kind == "regex":
            return {"lark_grammar": f"start: /{self._native.regex_to_lark(_checked(what, text))}/\n{_OPTIONS}"}
        if is_ebnf(_checked(what, text)):
            text = to_lark(text)
        if (rules := len(_RULE.findall(text))) > MOST_RULES:
            raise GrammarError(f"the grammar has {rules} rules: at most {MOST_RULES} are taken")
        return {"lark_grammar": text + "\n" + _OPTIONS}  # errors name the text's own lines

    def literal(self, text: str) -> str:
        """``text`` in a grammar of ``lark``, with the special tokens that it spells."""
        return self._vocabulary().literal(text)

    def _vocabulary(self) -> Vocabulary:
        with self._reading:
            if self._read is None:
                self._read = Vocabulary(self._native, self._tokenizer, self._vocab_size, self._eos)
            return self._read


def _of_warning(warning: str) -> list[str]:
    """The keywords that llguidance says it left out."""
    if warning.startswith("Unimplemented keys"):
        return re.findall(r'"([^"]+)"', warning)
    if found := re.match(r"Unknown format: (.*)", warning):
        return [f"format {found[1]}"]
    return ["oneOf (any of them fits)"] if warning.startswith("oneOf") else [warning]


def _deeply(function: Callable[[], Any]) -> Any:
    """What ``function`` gives, called where recursion has room: llguidance follows references by recursion, some
    kilobytes of stack each, and a stack that overflows ends the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _STARTING:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="outpace-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()


_STACK = 512 << 20  # bytes of addresses; only what is used takes memory
_STARTING = threading.Lock()  # the stack size is the process's


def _switch(vocabulary: Vocabulary, after: str | Sequence[str] | Thoughts, gap: bool) -> str:
    """Free text up to ``after``, then the answer."""
    texts: Any = [after.end] if isinstance(after, Thoughts) else [after] if isinstance(after, str) else after
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise GrammarError(f"after={after!r} is no text: give what ends the free text, such as '</think>'")
    rules = []
    for i, text in enumerate(texts):
        ends = vocabulary.literal(_checked("end of the free text", text))
        free = f"free_{i}[suffix={ends}]: /(?s:.*)/" if ends == _quoted(text) else f"free_{i}: /(?s:.*)/ {ends}"
        rules.append(free + "\n")
    free = " ".join(f"free_{i}" for i in range(len(texts)))
    begin, other = "", ""
    if isinstance(after, Thoughts):
        begin, other = vocabulary.literal(_checked("beginning of the free text", after.begin)), " | @answer"
    start = (
        f"start: {begin} {free} gap @answer{other}\ngap: {_GAP}\n" if gap else f"start: {begin} {free} @answer{other}\n"
    )
    return start + "".join(rules)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(what: str, schema: Any, whitespace: bool, close: bool) -> dict[str, Any]:
    value = schema
    if isinstance(schema, str):
        try:
            value = json.loads(_checked(what, schema))
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the {what} is not JSON ({error}): mend it") from error
    if value is True:
        value = {}
    own = value.get("x-guidance", {}) if isinstance(value, dict) else None
    if not isinstance(own, dict):
        raise GrammarError(f"the {what} is {str(value)[:80]}: give an object, such as {{'type': 'object'}}")
    value = {**value, "x-guidance": {**(_FREELY if whitespace else _ONE_LINE), **own}}
    try:
        _checked(what, json.dumps(value))
        check(value)
        _check_properties(value)
        value = dict(expressed(value))
        return closed(value) if close else value
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"the {what} cannot be written as JSON ({error}): mend it") from error


def _check_properties(schema: Any) -> None:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if isinstance(properties, dict) and len(properties) > MOST_PROPERTIES:
        raise GrammarError(
            f"an object of the JSON schema has {len(properties)} properties: at most {MOST_PROPERTIES} are taken"
        )
    if isinstance(properties, dict) and (most := _optional(properties, schema.get("required"))) > MOST_OPTIONAL:
        raise GrammarError(
            f"an object of the JSON schema has {most} optional properties in a row: at most {MOST_OPTIONAL} are taken; "
            "make some of them required"
        )
    for value in inner:
        _check_properties(value)


def _optional(properties: dict[str, Any], required: Any) -> int:
    """The most properties that follow one another and are all optional."""
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    return max((len(list(run)) for kept, run in groupby(properties, needed.__contains__) if not kept), default=0)


def _checked(what: str, text: str) -> str:
    if not isinstance(text, str):
        raise GrammarError(f"the {what} is a {type(text).__name__}: give a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GrammarError(f"the {what} is not valid Unicode at character {error.start}: write it in UTF-8") from error
    if len(text) > MOST_TEXT:
        raise GrammarError(f"the {what} has {len(text)} characters: at most {MOST_TEXT} are taken")
    return text


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError(f"grammars need llguidance: {install('outpace[serve]')}") from error
    return llguidance
