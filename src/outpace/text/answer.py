"""Text from tokens that arrive one at a time: whole characters only, and nothing that may yet be a stop string.

An answer's text is what follows the prompt's: all tokens decoded, without what the prompt alone decodes to. A token is
decoded with the few before it, the prompt's last ones too, since a tokenizer may join or strip at the seam (alone, a
SentencePiece answer loses its first space, as ``transformers``' streamers show it). Text is fed token by token however
many a step commits, so it cannot depend on the steps. ``TextState`` is a value: a step computes the next one and takes
it up only when everything else went well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from outpace.common.arrays import I32
from outpace.errors import OutpaceError

BROKEN = "\ufffd"  # what stands for bytes that are no whole character
UNFINISHED = 3  # tokens that may be the beginning of one character: UTF-8 has at most four bytes
LONGEST_RUN = 16  # tokens without a whole character, after which what cannot become one is let go
CONTEXT = 8  # tokens of a prompt that are decoded with an answer's first; more where they leave no text
_SHOWN, _HIDDEN = b"\1", b"\0"


class Decoder(Protocol):
    """The part of a tokenizer that turns ids back into text.

    ``texts``: what single tokens decode to, by whether special ones are skipped, kept where a token's bytes do not
    depend on its neighbours, so that whole characters can be read token by token (None: they do). ``special_ids``:
    those that are skipped.
    """

    texts: dict[bool, dict[int, str]] | None = None
    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int] | I32, *, skip_special: bool = True) -> str: ...


class TextError(OutpaceError):
    """The tokenizer could not turn tokens into text."""


class TextState(NamedTuple):
    """Where the text stands after some tokens."""

    context: tuple[int, ...] = ()  # the last ids that became text, where they bear on what the next ones become
    before: str = ""  # what ``context`` alone decodes to
    unread: tuple[int, ...] = ()  # ids whose text is not a whole character yet
    held: str = ""  # text that may begin a stop string, with tokens that are not shown as they are spelled
    shown: bytes = b""  # for each of its characters, whether it is part of the answer's text
    stopped_by: str | None = None

    @property
    def pending(self) -> str:
        """What is held back of the answer's text."""
        return _visible(self.held, self.shown)


class TextReader:
    """How one request's tokens become text. ``stops``: stop strings; with ``include_stop`` they stay in the text. They
    are looked for in the text, and in the text with special tokens as they are spelled, whether those are shown or not.
    ``shown``: special tokens that are part of the text though others are skipped. ``after``: the prompt's token ids.
    Raises TextError.
    """

    def __init__(
        self,
        decoder: Decoder | None,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        shown: Collection[int] = (),
        after: Sequence[int] | I32 = (),
    ) -> None:
        self._decoder, self._stops = decoder, tuple(stops)
        skipped = decoder.special_ids if skip_special and decoder is not None else frozenset()
        self._skipped = frozenset(skipped).difference(shown) if shown else skipped
        self._include_stop, self._skip_special = include_stop, skip_special and not shown
        texts = None if decoder is None else decoder.texts
        self._independent = texts is not None
        self._texts = texts[self._skip_special] if texts is not None else {}
        self._longest = max((len(stop) for stop in stops), default=1)
        self.start = self._start(after)  # the state before the answer's first token

    def without_stops(self) -> TextReader:
        """One that holds back and cuts nothing."""
        plain = copy(self)
        plain._stops = ()
        return plain

    def _start(self, prompt: Sequence[int] | I32) -> TextState:
        if self._decoder is None or not len(prompt):
            return TextState()
        n = CONTEXT
        while True:
            ids = tuple(np.asarray(prompt[-n:]).tolist())
            if self._skipped and not self._skip_special:  # the decoder does not skip them
                ids = tuple(token for token in ids if token not in self._skipped)
            text = self._decode(ids)
            if text or n >= len(prompt):
                break
            n *= 2
        start = self._settled(TextState(), ids, text)
        # Of a character that the prompt only begins, nothing is text yet; the bytes before it may be decoded with it.
        for cut in range(1, UNFINISHED + 1) if text.endswith(BROKEN) else ():
            head = self._decode(ids[:-cut])
            if not head.endswith(BROKEN):
                return start._replace(before=head + BROKEN)
        return start

    def add(self, state: TextState, token: int, *, may_stop: bool = True, hide: bool = False) -> tuple[TextState, str]:
        """The state one token further, and the text that may be shown now. Raises TextError.

        ``may_stop=False``: stop strings that end here do not count. ``hide``: the token is no part of the text, though
        a stop string may end in its spelling.
        """
        if self._decoder is None:
            return state, ""
        if hide or token in self._skipped:
            return self._add_hidden(state, token, may_stop) if self._stops else (state, "")
        unread = (*state.unread, token)
        text = self._after(state, unread)
        if text and not text.endswith(BROKEN):
            settled = unread
        elif len(unread) <= LONGEST_RUN:
            return state._replace(unread=unread), ""
        elif not text:  # tokens that leave no trace
            return state._replace(unread=()), ""
        else:  # bytes that can be no character
            settled = unread[:-UNFINISHED]
            text = self._after(state, settled)
        state = self._settled(state, settled, text)._replace(unread=unread[len(settled) :])
        return self._extend(state, text, "", may_stop)

    def _settled(self, state: TextState, ids: tuple[int, ...], text: str) -> TextState:
        """``state`` with ``ids``, which became ``text``, as the context of what comes next."""
        if self._independent and not text.endswith(BROKEN):
            return state._replace(context=(), before="", unread=())
        return state._replace(context=ids, before=self._alone(ids), unread=())

    def add_all(self, state: TextState, tokens: Sequence[int]) -> tuple[TextState, str] | None:
        """``add`` over tokens that are known, whole characters and can stop nothing; None: it takes ``add``."""
        if self._stops or not self._independent or state.unread or state.context:
            return None
        known, shown = self._texts, ""
        for token in tokens:
            text = known.get(token, "")
            if not text or text.endswith(BROKEN):
                return None
            shown += text
        return state, shown

    def finish(self, state: TextState) -> tuple[TextState, str]:
        """The last state, and all text that was held back until now."""
        if state.stopped_by is not None or self._decoder is None:
            return state._replace(held="", shown=b"", unread=()), state.pending
        text = self._after(state, state.unread) if state.unread else ""
        state, shown = self._extend(state._replace(unread=()), text, "", True) if text else (state, "")
        return state._replace(held="", shown=b""), shown + state.pending

    def _add_hidden(self, state: TextState, token: int, may_stop: bool) -> tuple[TextState, str]:
        unread = self._after(state, state.unread) if state.unread else ""
        if token in self._skipped:
            before = self._decode(state.context, skip_special=False) if state.context else ""
            spelled = self._decode((*state.context, token), skip_special=False)[len(before) :]
        else:
            spelled = self._after(state, (*state.unread, token))[len(unread) :]
        stopped, shown = self._extend(state, unread, spelled, may_stop)
        if not unread or stopped.stopped_by is not None:
            return stopped, shown
        return self._extend(state, "", spelled, may_stop)  # what is unread may yet become a character

    def _after(self, state: TextState, ids: tuple[int, ...]) -> str:
        if not state.context:
            return self._alone(ids)
        text, known = self._decode((*state.context, *ids)), len(state.before)
        if state.before.endswith(BROKEN):  # a character that the context began comes with the token that ends it
            whole = state.before.rstrip(BROKEN)
            if text.startswith(whole):
                rest = text[len(whole) :]
                known = min(known, len(whole) + len(rest) - len(rest.lstrip(BROKEN)))
            else:
                pairs = zip(state.before, text, strict=False)
                known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return text[known:]

    def _alone(self, ids: tuple[int, ...]) -> str:
        if len(ids) > 1:
            return self._decode(ids)
        known = self._texts.get(ids[0])
        if known is None:
            known = self._texts[ids[0]] = self._decode(ids)
        return known

    def _decode(self, ids: tuple[int, ...], *, skip_special: bool | None = None) -> str:
        assert self._decoder is not None
        try:
            return self._decoder.decode(ids, skip_special=self._skip_special if skip_special is None else skip_special)
        except Exception as error:
            raise TextError(f"the tokenizer could not decode tokens {list(ids)}: {error!r}") from error

    def _extend(self, state: TextState, text: str, spelled: str, may_stop: bool) -> tuple[TextState, str]:
        """``state`` after ``text``, and after ``spelled``, which is not shown; and what may be shown now."""
        if not self._stops:
            return state, text
        whole = state.held + text + spelled
        shown = state.shown + _SHOWN * len(text) + _HIDDEN * len(spelled)
        # What stop strings are looked for in: the text, where its characters stand in ``whole``, how many are old.
        views: list[tuple[str, Sequence[int], int]] = [(whole, range(len(whole)), len(state.held))]
        if 0 in shown:
            places = [i for i, is_shown in enumerate(shown) if is_shown]
            views.append((_visible(whole, shown), places, sum(state.shown)))
        found = [
            (where[at], order, stop)
            for view, where, old in views
            for order, stop in enumerate(self._stops)
            if may_stop and (at := view.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if found:  # the one that begins first, and of those the one given first
            at, _, stop = min(found)
            ended = state._replace(held="", shown=b"", stopped_by=stop)
            return ended, _visible(whole[:at], shown[:at]) + stop * self._include_stop
        kept = len(whole)
        for view, where, _ in views:
            if n := self._beginning(view):
                kept = min(kept, where[len(view) - n])
        # Between characters that are held, what is not shown and too far back for a stop string is dropped.
        held = [i for i in range(kept, len(whole)) if shown[i] or i > len(whole) - self._longest]
        state = state._replace(held="".join(whole[i] for i in held), shown=bytes(shown[i] for i in held))
        return state, _visible(whole[:kept], shown[:kept])

    def _beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0


def pieces(reader: TextReader, ids: Sequence[int] | I32) -> list[str]:
    """The text of each token, whole characters only, credited to the token that ended them; together the whole text.

    ``reader``: one without stop strings. Raises TextError.
    """
    state = reader.start
    found: list[str] = []
    for token in ids:
        state, text = reader.add(state, int(token))
        found.append(text)
    if found:
        found[-1] += reader.finish(state)[1]
    return found


def _visible(text: str, shown: bytes) -> str:
    """The characters of ``text`` that are shown."""
    return "".join(c for c, is_shown in zip(text, shown, strict=True) if is_shown) if 0 in shown else text
