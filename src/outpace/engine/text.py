"""Text from tokens that arrive one at a time: whole characters only, and nothing that may yet be a stop string.

A token is decoded with the few before it, since a tokenizer may join or strip at the seam. Text is fed token by token
however many a step commits, so it cannot depend on the steps. ``TextState`` is a value: a step computes the next one
and takes it up only when everything else went well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outpace.common.arrays import I32
from outpace.errors import OutpaceError

UNFINISHED = 3  # tokens that may be the beginning of one character: UTF-8 has at most four bytes
BROKEN = "\ufffd"  # what stands for bytes that are no whole character
LONGEST_RUN = 16  # tokens without a whole character, after which what cannot become one is let go


class Decoder(Protocol):
    """The part of a tokenizer that turns ids back into text.

    It may have an attribute ``texts``, where a token's bytes do not depend on its neighbours, so that whole characters
    can be read token by token: what single tokens decode to is kept there, by whether special ones are skipped.
    """

    def decode(self, ids: Sequence[int] | I32, *, skip_special: bool = True) -> str: ...


class TextError(OutpaceError):
    """The tokenizer could not turn tokens into text."""


class TextState(NamedTuple):
    """Where the text stands after some tokens."""

    context: tuple[int, ...] = ()  # the last ids that became text: they give the next ones their context
    before: str = ""  # what ``context`` alone decodes to
    unread: tuple[int, ...] = ()  # ids whose text is not a whole character yet
    held: str = ""  # text that may begin a stop string
    stopped_by: str | None = None


class TextReader:
    """How one request's tokens become text. ``stops``: stop strings; with ``include_stop`` they stay in the text."""

    def __init__(
        self,
        decoder: Decoder | None,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._decoder, self._stops = decoder, tuple(stops)
        self._include_stop, self._skip_special = include_stop, skip_special
        texts: dict[bool, dict[int, str]] | None = getattr(decoder, "texts", None)
        self._independent = texts is not None
        self._texts = texts[skip_special] if texts is not None else {}
        self._longest = max((len(stop) for stop in stops), default=1)

    def without_stops(self) -> TextReader:
        """One that holds back and cuts nothing."""
        return TextReader(self._decoder, skip_special=self._skip_special)

    def add(self, state: TextState, token: int, *, may_stop: bool = True) -> tuple[TextState, str]:
        """The state one token further, and the text that may be shown now. Raises TextError.

        ``may_stop=False``: stop strings that end here do not count.
        """
        if self._decoder is None:
            return state, ""
        unread = (*state.unread, token)
        text = self._after(state, unread)
        if text and not text.endswith(BROKEN):
            settled = unread
        elif len(unread) <= LONGEST_RUN:
            return TextState(state.context, state.before, unread, state.held, state.stopped_by), ""
        elif not text:  # nothing but special tokens: they leave no trace
            return state._replace(unread=()), ""
        else:  # bytes that can be no character
            settled = unread[:-UNFINISHED]
            text = self._after(state, settled)
        state = TextState(settled, self._alone(settled), unread[len(settled) :], state.held, state.stopped_by)
        return self._extend(state, text, may_stop)

    def add_all(self, state: TextState, tokens: Sequence[int]) -> tuple[TextState, str] | None:
        """``add`` over tokens that are known, whole characters and can stop nothing; None: it takes ``add``."""
        if self._stops or not self._independent or state.unread or state.before.endswith(BROKEN):
            return None
        known, text, shown = self._texts, "", ""
        for token in tokens:
            text = known.get(token, "")
            if not text or text.endswith(BROKEN):
                return None
            shown += text
        return TextState((tokens[-1],), text), shown

    def finish(self, state: TextState) -> tuple[TextState, str]:
        """The last state, and all text that was held back until now."""
        if state.stopped_by is not None or self._decoder is None:
            return state._replace(held="", unread=()), state.held
        text = self._after(state, state.unread) if state.unread else ""
        state, shown = self._extend(state._replace(unread=()), text, True) if text else (state, "")
        return state._replace(held=""), shown + state.held

    def _after(self, state: TextState, ids: tuple[int, ...]) -> str:
        if self._independent and not state.before.endswith(BROKEN):
            return self._alone(ids)
        return self._decode((*state.context, *ids))[len(state.before) :]

    def _alone(self, ids: tuple[int, ...]) -> str:
        if len(ids) > 1:
            return self._decode(ids)
        known = self._texts.get(ids[0])
        if known is None:
            known = self._texts[ids[0]] = self._decode(ids)
        return known

    def _decode(self, ids: tuple[int, ...]) -> str:
        assert self._decoder is not None
        try:
            return self._decoder.decode(ids, skip_special=self._skip_special)
        except Exception as error:
            raise TextError(f"the tokenizer could not decode tokens {list(ids)}: {error!r}") from error

    def _extend(self, state: TextState, text: str, may_stop: bool) -> tuple[TextState, str]:
        if not self._stops:
            return state, text
        whole = state.held + text
        found = [(whole.find(stop, max(0, len(state.held) - len(stop) + 1)), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in found if at >= 0] if may_stop else []
        if found:  # the one that begins first, and of those the one given first
            at, stop = min(found, key=lambda hit: hit[0])
            return state._replace(held="", stopped_by=stop), whole[: at + len(stop) * self._include_stop]
        kept = len(whole) - self._beginning(whole)
        return state._replace(held=whole[kept:]), whole[:kept]

    def _beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
