"""Who wrote which part of an answer's text: a drafter whose token was accepted, or the target."""

from __future__ import annotations

from collections import deque

from outpace.engine.results import TARGET, Delta
from outpace.engine.text import TextReader, TextState


class Colours:
    """``reader``: of tokens into text, without stop strings."""

    def __init__(self, reader: TextReader) -> None:
        self._reader, self._state = reader, TextState()
        self._unshown: deque[tuple[str, str]] = deque()  # of tokens whose text may yet be cut off

    def of(self, delta: Delta) -> list[tuple[str, str]]:
        """``(text, source)``: the texts together are the delta's. A token that shows nothing by itself has an empty
        one: a character is credited to the token that ends it."""
        for token, source in zip(delta.token_ids, delta.sources, strict=True):
            self._state, text = self._reader.add(self._state, token)
            self._unshown.append((text, source))
        left, shown = delta.text, []
        while self._unshown and (left or not self._unshown[0][0]):
            text, source = self._unshown.popleft()
            piece, left = left[: len(text)], left[len(text) :]
            shown.append((piece, source))
            if len(piece) < len(text):
                self._unshown.appendleft((text[len(piece) :], source))
        if left:
            shown.append((left, shown[-1][1] if shown else TARGET))
        return shown
