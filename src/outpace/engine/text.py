"""Text from tokens that arrive one at a time."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from outpace.arrays import I32


class Decoder(Protocol):
    """The part of a tokenizer that turns ids back into text."""

    def decode(self, ids: SequenceOf[int] | I32, *, skip_special: bool = True) -> str: ...


class TextSoFar:
    """Text from tokens that arrive one at a time: whole characters only, and nothing that may yet be a stop string.

    A token is decoded with the few before it, since a tokenizer may join or strip at the seam. Text is fed token by
    token however many a step commits, so it cannot depend on the steps.
    """

    def __init__(self, decoder: Decoder | None, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=1)
        self._alone: dict[int, str] = {}  # texts of tokens decoded by themselves
        self._ids: list[int] = []
        self._context = 0  # ids before here are settled; those from here to ``_read`` give the next ones their context
        self._read = 0
        self._taken = 0
        self.whole = ""
        self.stopped_by: str | None = None

    def add(self, ids: I32) -> None:
        """One more token int32 [1] (or none)."""
        if self._decoder is None or not len(ids):
            return
        self._ids.append(int(ids[0]))
        text = self._unread()
        if text and not text.endswith("�"):
            self._extend(text)
            self._context, self._read = self._read, len(self._ids)

    def take(self, *, final: bool) -> str:
        """The text that may be shown since the last call; ``final`` releases what was held back."""
        if final and self.stopped_by is None and self._decoder is not None and self._read < len(self._ids):
            self._extend(self._unread())
            self._context = self._read = len(self._ids)
        end = len(self.whole) if final else len(self.whole) - self._held()
        text, self._taken = self.whole[self._taken : end], max(self._taken, end)
        return text

    def _unread(self) -> str:
        assert self._decoder is not None
        after = self._decoder.decode(self._ids[self._context :])
        return after[len(self._before(self._decoder)) :]

    def _before(self, decoder: Decoder) -> str:
        context = self._ids[self._context : self._read]
        if len(context) != 1:
            return decoder.decode(context) if context else ""
        token = context[0]
        if token not in self._alone:
            self._alone[token] = decoder.decode(context)
        return self._alone[token]

    def _extend(self, text: str) -> None:
        searched = len(self.whole)
        self.whole += text
        found = [(self.whole.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if found:  # the one that begins first, and of those the one given first
            at, self.stopped_by = min(found, key=lambda hit: hit[0])
            self.whole = self.whole[:at]

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for n in range(min(self._longest - 1, len(self.whole)), 0, -1):
            if any(stop.startswith(self.whole[-n:]) for stop in self._stops):
                return n
        return 0
