"""What a row has committed in one tokenizer, kept as text and as ids of another tokenizer."""

from __future__ import annotations

import codecs
import re

from outpace.common.arrays import I32
from outpace.models.text.token_bytes import TokenBytes

KEEP = 64  # characters at the end whose ids may still change
_CUTS = 8  # places that are tried for a cut

_WORD = re.compile(r"(?<=\S) (?=\S)")  # where nearly every tokenizer begins anew


class SyncedText:
    """Ids, in the code ``own``, of the text that tokens of the code ``source`` spell.

    ``ids``: what ``own`` begins a text with, then the text's; ``fragment``: bytes of a character whose rest is not
    there yet, which ``ids`` do not have. Bytes that are no UTF-8 are read as U+FFFD. The text is kept only as far back
    as its ids may change, and is cut where its parts' ids are those of the whole; so reading n tokens costs O(n).
    """

    def __init__(self, source: TokenBytes, own: TokenBytes) -> None:
        self._source, self._own = source, own
        self.ids = list(own.opening)
        self.fragment = b""
        self._read = 0  # tokens
        self._open = ""  # the text that ``ids[self._settled:]`` stand for
        self._settled = len(self.ids)
        self._first = True  # nothing stands before the open text
        self._longest = 2 * KEEP

    @property
    def count(self) -> int:
        """Tokens that were read."""
        return self._read

    def read(self, tokens: I32) -> int:
        """Take in what is new in ``tokens`` int32 [n], the whole sequence; how many of the ids are as before."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self.fragment + self._source.join(tokens[self._read :]))
        fragment, whole = decoder.getstate()[0], self._open + text
        ids = self._encode(whole, self._first) if text else self.ids[self._settled :]
        # All of it is known before any of it is noted: a call that fails may be made again.
        same = self._settled
        for old, new in zip(self.ids[same:], ids, strict=False):
            if old != new:
                break
            same += 1
        self.fragment, self._read, self._open = fragment, len(tokens), whole
        self.ids[self._settled :] = ids
        if text and len(self._open) >= self._longest:
            self._settle(ids)
        return same

    def _encode(self, text: str, first: bool) -> list[int]:
        ids = self._own.encode(text, continued=not first)
        assert ids is not None, "text was cut where its tokenizer would add a space"
        return ids

    def _settle(self, ids: list[int]) -> None:
        """Cut the open text, of which ``ids`` are the ids, where it encodes to the same in two parts."""
        end = len(self._open) - KEEP
        cuts = [match.start() for match in _WORD.finditer(self._open, max(end - 4 * KEEP, 1))]
        cuts = [cut for cut in cuts if cut <= end][::-1][:_CUTS]
        if not self._own.prefixes:
            cuts += range(end, max(end - _CUTS, 0), -1)
        for cut in cuts:
            head, rest = self._encode(self._open[:cut], self._first), self._encode(self._open[cut:], False)
            if head + rest == ids:
                self._open, self._first = self._open[cut:], False
                self._settled += len(head)
                self._longest = 2 * KEEP
                return
        self._longest = 2 * len(self._open)

    def shorten(self, most: int) -> int | None:
        """Forget the oldest ids, so that at most ``most`` are left; how many of them are as before.

        None, and nothing is forgotten, when there are no more, or those that may still change are too many.
        """
        opening = len(self._own.opening)
        forgotten = len(self.ids) - most
        if forgotten <= 0 or self._settled - forgotten < opening:
            return None
        del self.ids[opening : opening + forgotten]
        self._settled -= forgotten
        return opening
