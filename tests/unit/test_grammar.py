"""Grammars: what a mask forbids is never drafted, nothing else is dropped, and no token of the output depends on it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.common.arrays import F32, I32
from outpace.errors import NoTokenAllowedError, RuleError
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.masks import allows, everything, packed, unpacked, words
from outpace.exact.noise import Noise
from outpace.exact.rules import AllowedTokens, allowed_mask, forced, pruned
from outpace.exact.sampling import Chooser
from outpace.exact.verify import walk
from outpace.params import LogitRule, SamplingParams
from tests.grammar import EOS, Automaton, lists_of_ones

PROMPT = np.array([1, 2], np.int32)
LANGUAGE = re.compile(r"\[(1(,1)*)?\]")
COMPLETIONS = ["".join(c) for n in range(4) for c in itertools.product("[]1,", repeat=n)]


def start(*rules: Any, seed: int = 0, **params: Any) -> Chooser:
    return Chooser.start(SamplingParams(**params), Noise(seed), rules, PROMPT)


@cache
def viable(text: str) -> bool:
    """Whether some text of the language begins so."""
    return any(LANGUAGE.fullmatch(text + rest) for rest in COMPLETIONS)


@cache
def logits_after(prefix: tuple[int, ...], vocab: int) -> F32:
    return np.random.default_rng([5, *prefix]).normal(0, 2, vocab).astype(np.float32)


def every_small_draft(vocab: int) -> list[Draft]:
    """All chains of up to 2 tokens, and all shapes of trees of 4 nodes (a chain among them) with some tokens."""
    chains = [Draft.chain(c) for n in range(3) for c in itertools.product(range(vocab), repeat=n)]
    rng = np.random.default_rng(0)
    shapes = itertools.product(*(range(-1, i) for i in range(4)))
    trees = [Draft(rng.integers(0, vocab, 4).tolist(), list(shape)) for shape in shapes for _ in range(8)]
    return [*chains, *trees]


def only(draft: Draft, keep: list[int]) -> Drafts:
    new = {-1: -1, **{node: i for i, node in enumerate(keep)}}
    parents = np.array([[new[draft.parents[node]] for node in keep]], np.int32)
    tokens = np.array([[draft.tokens[node] for node in keep]], np.int32)
    return Drafts(tokens, np.array([len(keep)], np.int32), parents)


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (1.0, 1), (1.0, 2), (0.5, 3)])
def test_drafting_under_a_grammar_changes_no_token(temperature: float, seed: int) -> None:
    """By enumeration: after every prefix of a plain answer, every small draft gains that answer's next tokens."""
    grammar = lists_of_ones()
    vocab = len(grammar.pieces)
    plain: list[int] = []
    chooser = root = start(grammar, seed=seed, temperature=temperature)
    while not plain or (grammar.pieces[plain[-1]] != EOS and len(plain) < 8):
        plain.append(chooser.choose(logits_after(tuple(plain), vocab)))
        chooser = chooser.advance(plain[-1])
    assert viable("".join(grammar.pieces[t] for t in plain))
    accepted = 0
    ends = grammar.pieces.index(EOS)
    for at in range(len(plain)):
        here = root.after(plain[:at])
        for draft in every_small_draft(vocab):
            drafts = only(draft, pruned(draft, here))

            def choose(rows: I32, nodes: I32, drafts: Drafts = drafts, at: int = at, here: Chooser = here) -> I32:
                row = drafts.row(0)
                path = [row.tokens[n] for n in row.path(int(nodes[0]))]
                logits = logits_after((*plain[:at], *path), vocab)
                return np.array([here.after(path).choose(logits)], np.int32)

            verdict = walk(choose, drafts).row(0)
            after = plain[at:] if plain[-1] != ends else [*plain[at:], *[ends] * 4]  # the engine stops at the first
            gained = verdict.tokens.tolist()[: len(after)]
            assert gained == after[: len(gained)]
            accepted += verdict.accepted
    assert accepted > 100, "nothing was accepted, so nothing was tested"


def test_exactly_what_the_grammar_forbids_is_dropped() -> None:
    """Against the language itself: a node stays if and only if some text of the language goes on through it."""
    grammar = lists_of_ones()
    pieces = grammar.pieces

    def possible(before: str, path: list[int]) -> bool:
        for i, token in enumerate(path):
            if pieces[token] == EOS:  # nothing but more of it may follow
                return bool(LANGUAGE.fullmatch(before)) and all(pieces[t] == EOS for t in path[i:])
            before += pieces[token]
            if not viable(before):
                return False
        return True

    dropped = kept = 0
    for output in ([], [0], [0, 2], [0, 4], [0, 1]):
        before = "".join(pieces[t] for t in output)
        chooser = start(grammar).after(output)
        for draft in every_small_draft(len(pieces)):
            paths = [[draft.tokens[n] for n in draft.path(node)] for node in range(len(draft))]
            if any(pieces[t] == EOS and len(path) > i + 1 for path in paths for i, t in enumerate(path)):
                continue  # drafts end with EOS
            expected = [node for node, path in enumerate(paths) if possible(before, path)]
            assert pruned(draft, chooser) == expected
            kept, dropped = kept + len(expected), dropped + len(draft) - len(expected)
    assert min(kept, dropped) > 100


def test_masks_are_asked_once_a_parent_and_only_where_somebody_follows() -> None:
    grammar = lists_of_ones()
    draft = Draft([0, 2, 1, 1, 6], [-1, 0, 0, 1, 2])
    assert pruned(draft, start(grammar)) == [0, 1, 2, 3]
    assert grammar.asked == 4  # of the pending token, and of nodes 0, 1 and 2


def test_what_nobody_forbids_stays() -> None:
    draft = Draft.chain([6, 6, 6])
    everywhere = [0, 1, 2]
    assert pruned(draft, start()) == everywhere
    assert pruned(replace(draft, q=np.full((3, 8), 0.125)), start(lists_of_ones())) == everywhere  # drawn

    class Silent(Automaton):
        def mask(self, state: int) -> Any:
            return None

        def apply(self, state: int, logits: F32) -> None:
            logits[0] = -np.inf

    silent = Silent(["a", "b"], [{"a": 0, "b": 0}], set())
    assert pruned(Draft.chain([0, 1, 0]), start(silent)) == everywhere
    assert start(silent).choose(np.array([5, 1], np.float32)) == 1  # so ``apply`` is what counts


def test_forced_tokens_are_those_that_stand_alone() -> None:
    grammar = lists_of_ones()
    eos = grammar.pieces.index(EOS)
    assert forced(start(grammar)) == [0]  # every list begins alike
    assert forced(start(grammar).after([0])) == []
    assert forced(start(grammar).after([0, 1])) == [eos]
    assert forced(start()) == []

    class Forever(Automaton):
        """Says one token at a time, without end."""

        def forced(self, state: int) -> list[int]:
            return [state % 2]

    forever = Forever(["a", "b"], [{"a": 1}, {"b": 0}], set())
    assert forced(start(forever), 5) == [0, 1, 0, 1, 0]
    assert len(forced(start(forever))) == 64


def test_rules_without_the_two_methods_are_rules_still() -> None:
    class Plain:
        def start(self, prompt: Any) -> None: ...
        def advance(self, state: None, token: int) -> None: ...
        def apply(self, state: None, logits: Any) -> None: ...

    assert isinstance(Plain(), LogitRule)
    assert isinstance(lists_of_ones(), LogitRule)
    assert not isinstance(object(), LogitRule)
    assert start(Plain()).mask() is None
    assert pruned(Draft.chain([1]), start(Plain())) == [0]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.booleans(), min_size=1, max_size=100), st.data())
def test_masks_are_bits(allowed: list[bool], data: st.DataObject) -> None:
    mask = packed(np.array(allowed))
    assert mask.dtype == np.uint32
    assert len(mask) == words(len(allowed))
    assert unpacked(mask, len(allowed)).tolist() == allowed
    for token, ok in enumerate(allowed):
        assert (int(mask[token // 32]) >> (token % 32) & 1) == ok == allows(mask, token)
    assert not allows(mask, 32 * len(mask))
    assert unpacked(everything(len(allowed)), len(allowed)).all()
    other = packed(np.array(data.draw(st.lists(st.booleans(), min_size=len(allowed), max_size=len(allowed)))))
    both = allowed_mask([AllowedTokens(np.zeros(0, np.int32), m) for m in (mask, other)], [None, None])
    assert both is not None
    assert (both == mask & other).all()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=70), st.integers(0, 5))
def test_choices_honour_masks(allowed: list[bool], seed: int) -> None:
    rule = AllowedTokens(np.flatnonzero(allowed).astype(np.int32), packed(np.array(allowed)))
    logits = logits_after((seed,), len(allowed))
    for temperature in (0.0, 1.0):
        masked = start(rule, seed=seed, temperature=temperature)
        applied = start(AllowedTokens(rule.ids), seed=seed, temperature=temperature)
        if not any(allowed):
            with pytest.raises(NoTokenAllowedError):
                masked.choose(logits)
            continue
        assert masked.choose(logits) == applied.choose(logits)
        assert allowed[masked.choose(logits)]
        assert (masked.probabilities(logits) == applied.probabilities(logits)).all()
        assert (masked.scores(logits) == applied.scores(logits)).all()


class Faulty(Automaton):
    """Fails, or answers nonsense, in one method."""

    def __init__(self, method: str, answer: Any) -> None:
        super().__init__(["a", "b"], [{"a": 0, "b": 0}], set())

        def wrong(*_: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        setattr(self, method, wrong)
        if method == "apply":
            self.mask = lambda state: None  # type: ignore[method-assign, assignment, return-value]


CALLS = {
    "start": lambda rule: start(rule),
    "advance": lambda rule: start(rule).advance(0),
    "apply": lambda rule: start(rule).choose(np.zeros(2, np.float32)),
    "mask": lambda rule: start(rule).choose(np.zeros(2, np.float32)),
    "forced": lambda rule: forced(start(rule)),
}


@pytest.mark.parametrize("method", CALLS)
def test_whatever_a_rule_raises_is_named(method: str) -> None:
    for error in (ZeroDivisionError("oops"), KeyError("x"), AssertionError(), MemoryError("no"), StopIteration()):
        with pytest.raises(RuleError) as caught:
            CALLS[method](Faulty(method, error))
        assert f"Faulty.{method} raised {type(error).__name__}" in str(caught.value)
        assert str(error) in str(caught.value)
        assert caught.value.__cause__ is error
    for passing in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(passing)):
            CALLS[method](Faulty(method, passing))


def test_pruning_names_a_rule_that_fails() -> None:
    draft = Draft.chain([0, 1])
    for method in ("mask", "advance"):
        with pytest.raises(RuleError, match=rf"Faulty\.{method} raised"):
            pruned(draft, start(Faulty(method, ValueError("x"))))


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("mask", [True, False], "mask gave list"),
        ("mask", np.ones(1, np.int64), r"mask gave int64 \[1\]"),
        ("mask", np.ones((1, 1), np.uint32), r"mask gave uint32 \[1, 1\]"),
        ("mask", np.ones(2, np.uint32), "mask gave 2 words, but 2 tokens take 1"),
        ("forced", 5, "forced gave 5"),
        ("forced", ["a"], "forced gave"),
    ],
)
def test_nonsense_from_a_rule_is_named(method: str, answer: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        CALLS[method](Faulty(method, answer))


def test_masks_of_different_vocabularies_do_not_mix() -> None:
    with pytest.raises(RuleError, match="gave 1 words where another rule gave 3"):
        start(Faulty("mask", np.ones(3, np.uint32)), lists_of_ones()).mask()
