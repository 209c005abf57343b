"""A grammar as a logit rule: an automaton over characters, asked about tokens that may be several characters long."""

from __future__ import annotations

import numpy as np

from outpace.common.arrays import F32, I32, U32
from outpace.exact.masks import packed

EOS = ""  # the piece of the token that ends a text
END = -2  # the state after it


class Automaton:
    """Allows texts that an automaton accepts. ``moves[state][character]`` is the next state; ``final`` states may end.

    Its mask stands for ``apply``, and it cannot be advanced over a token that it forbids.
    """

    def __init__(self, pieces: list[str], moves: list[dict[str, int]], final: set[int]) -> None:
        self.pieces, self._moves, self._final = pieces, moves, final
        self._next = [[self._after(state, piece) for piece in pieces] for state in range(len(moves))]
        self._masks = [packed(np.array([after is not None for after in row])) for row in self._next]
        self._masks.append(packed(np.array([piece == EOS for piece in pieces])))
        self.asked = 0  # masks

    def _after(self, state: int, piece: str) -> int | None:
        if piece == EOS:
            return END if state in self._final else None
        for character in piece:
            if character not in self._moves[state]:
                return None
            state = self._moves[state][character]
        return state

    def start(self, prompt: I32) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        if state == END:
            after = END if self.pieces[token] == EOS else None
        else:
            after = self._next[state][token]
        if after is None:
            raise ValueError(f"{self.pieces[token]!r} cannot follow in state {state}")
        return after

    def apply(self, state: int, logits: F32) -> None:
        raise AssertionError("the mask stands for it")

    def mask(self, state: int) -> U32:
        self.asked += 1
        return self._masks[state if state != END else -1]

    def forced(self, state: int) -> list[int]:
        tokens: list[int] = []
        while state != END:
            possible = [token for token, after in enumerate(self._next[state]) if after is not None]
            if len(possible) != 1:
                break
            tokens += possible
            state = self.advance(state, possible[0])
        return tokens


def lists_of_ones() -> Automaton:
    """``[]``, ``[1]``, ``[1,1]``, ... with tokens that overlap one another."""
    moves: list[dict[str, int]] = [{"[": 1}, {"1": 2, "]": 4}, {",": 3, "]": 4}, {"1": 2}, {}]
    return Automaton(["[", "]", "1", ",", "1,", ",1", "x", EOS], moves, {4})
