"""A compiled grammar as a logit rule: masks, forced text, and states along the branches of a draft."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outpace.common.arrays import F32, I32, U32
from outpace.errors import ComplexityError
from outpace.exact.masks import packed, unpacked, words

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
        if matcher.try_consume_tokens([token]) == 1:
            self._at = State(self, state, token)
            return True
        self._check()
        return False

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

    ``matcher``: a fresh ``llguidance.LLMatcher``; ``spell``: tokens of forced bytes, or of the first of them.
    """

    def __init__(
        self, matcher: Any, vocab_size: int, eos_ids: Sequence[int], spell: Callable[[bytes], Sequence[int]]
    ) -> None:
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
        return self._after_end if state.ended else state.track.mask(state)

    def apply(self, state: State, logits: F32) -> None:
        logits[~unpacked(self.mask(state), len(logits))] = -np.inf

    def forced(self, state: State) -> Sequence[int]:
        """The text that must follow, as the tokenizer writes it; the end's usual token, where nothing else may."""
        if state.ended:
            return ()
        matcher = state.track.reach(state)
        if matcher.is_stopped():
            return self._eos[:1] if matcher.is_accepting() else ()
        return self._spell(matcher.compute_ff_bytes())


def reason(matcher: Any) -> str:
    """Why a matcher failed, in one line without excerpts of the grammar; empty where it did not."""
    message = str(matcher.get_error()).partition("\n<")[0]
    return " ".join(_EXCERPT.sub("", message).split())[:MOST_REASON]
