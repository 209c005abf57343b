"""``model:ID`` with another tokenizer than the target's: what the draft model writes is re-encoded to the target's ids.

String-level exact match (SLEM, arXiv 2502.05202): the draft model reads the committed text in its own ids,
goes on, and the target's tokenizer encodes what it wrote. The draft model's probabilities are of other tokens, so each
node is one-hot; then the likeliest token is the best one to draft at any temperature, since a node's chance of being
accepted is the target's probability of it. How sure the draft model is of the text up to a node's end is the node's
confidence: by it a chain ends at its price.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outpace.common.arrays import I32
from outpace.drafters.base import DraftCost, DrafterNeeds, RowView
from outpace.drafters.forward.chain import ChainDrafter
from outpace.drafters.forward.own_cache import CATCH_UP, OwnCache
from outpace.errors import Argument, DrafterError, ModelError
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Model, Output
from outpace.params import Acceptance, SamplingParams
from outpace.text.token_bytes import TokenBytes
from outpace.text.tokenizer import Tokenizer

# -- synced text ------------------------------------------------------------------------------------------------------
# What a row has committed in one tokenizer, kept as text and as ids of another tokenizer.

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
        self._forgotten = 0  # ids
        self._first = True  # nothing stands before the open text
        self._longest = 2 * KEEP

    @property
    def count(self) -> int:
        """Tokens that were read."""
        return self._read

    @property
    def ids_each(self) -> float:
        """Ids for a token, on average, of those that were read."""
        return (len(self.ids) + self._forgotten) / self._read if self._read else 1.0

    def place(self, token: int) -> int:
        """About where among ``ids`` the text of the token of that number is; 0 where it is forgotten."""
        every = len(self.ids) + self._forgotten
        return max(len(self.ids) - math.ceil(every * (1 - token / self._read)), 0) if self._read else 0

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
        self._forgotten += forgotten
        return opening


CONTEXT = 4  # committed tokens that are encoded again with what was drafted, so that it is split as the target would
SLACK = 64  # positions of the draft model beyond 5/4 of the target's

_GREEDY = Chooser(SamplingParams(temperature=0.0), Noise(0), 0)


@dataclass(slots=True)
class _Row:
    request: int
    text: SyncedText
    size: int = 0  # nodes that are wanted now


_UNNAMED = -1  # the request of a row whose prompt is read before anything is drafted for it


class TranslatedDrafter(ChainDrafter):
    """Drafts of a ``model`` with a ``tokenizer`` of its own. Raises DrafterError.

    A row of the target's that takes more of the draft model's ids than it has positions is read from its middle on.
    """

    needs = DrafterNeeds()
    rates = True

    def __init__(self, model: Model, tokenizer: Tokenizer, name: str, target: Tokenizer, target_vocab: int) -> None:
        super().__init__(name, model.info.vocab_size, model.info.vocab_size)
        try:
            self._own = TokenBytes(tokenizer, model.info.vocab_size)
            self._target = TokenBytes(target, target_vocab)
        except ModelError as error:
            raise DrafterError(
                f"{name} has another tokenizer than the target, and {error}: use a draft model with the target's "
                "vocabulary"
            ) from error
        self.cost = DraftCost(levels=name, nodes=True, reads=True)
        self._cache = OwnCache(model)
        self._rows: dict[int, _Row] = {}

    def check_acceptance(self, acceptance: Acceptance) -> None:
        if acceptance == "rejection":
            raise DrafterError(
                f"{self.name} has another tokenizer than the target, so it has no probabilities of the target's tokens "
                "for rejection to compare: use ",
                Argument("acceptance", "coupled"),
                ", or a draft model with the target's vocabulary",
            )

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        for view, size in zip(rows, sizes.tolist(), strict=True):
            self._row(view).size = size
        own = super().propose([view._replace(chooser=_GREEDY) for view in rows], sizes)
        drafts = [Draft() for _ in rows]
        for i, (view, draft) in enumerate(zip(rows, drafts, strict=True)):
            self._translate(view, own.row(i), draft)
        return replace(Drafts.of(drafts, (self.name,)), levels=own.levels)

    def _translate(self, view: RowView, written: Draft, to: Draft) -> None:
        """The chain of ``written`` in the target's ids; and beside it the first id that differs where a second choice
        stands beside the chain's."""
        chain: list[int] = []
        for node, parent in enumerate(written.parents):  # what is chosen comes before what stands beside it
            if parent == (chain[-1] if chain else -1):
                chain.append(node)
        beside = [node for node in range(len(written)) if node not in chain]
        tokens = [written.tokens[node] for node in chain]
        ids, ends = self._translated(view, tokens)
        most = max(self._rows[view.row].size - len(beside), 1)
        for token, end in zip(ids[:most], ends[:most], strict=True):
            to.add(token, len(to) - 1, written.gains[chain[end]])
        for node in beside:
            level = chain.index(written.parents[node]) + 1 if written.parents[node] >= 0 else 0
            other = self._translated(view, [*tokens[:level], written.tokens[node]])[0]
            same = next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(other))
            if same < min(len(other), most) and other[same] not in (to.tokens[n] for n in to.children(same - 1)):
                to.add(other[same], same - 1, written.gains[node])

    def _row(self, view: RowView) -> _Row:
        row = self._rows.get(view.row)
        if row is None or row.request not in (view.request, _UNNAMED) or row.text.count > len(view.tokens):
            row = self._rows[view.row] = _Row(view.request, SyncedText(self._target, self._own))
        row.request = view.request
        return row

    def read_prompts(self, rows: Sequence[tuple[int, I32, int, int]]) -> dict[int, tuple[int, int]]:
        """A row that lacks more is read a piece further. Those for whose text from the start on the draft model has no
        room are left to drafts."""
        found: list[tuple[int, I32, int, int]] = []
        for number, tokens, new, start in rows:
            row = self._rows.setdefault(number, _Row(_UNNAMED, SyncedText(self._target, self._own)))
            if row.text.count > len(tokens):
                continue
            row.text.read(tokens)
            place = row.text.place(start)
            if 0 < len(row.text.ids) - place <= self._cache.model.info.max_length - SLACK:
                most = math.ceil((new + CATCH_UP) * row.text.ids_each)
                found.append((number, np.array(row.text.ids, np.int32), place, most))
        starts, counts = {row: start for row, _, _, start in rows}, dict[int, tuple[int, int]]()
        for number, (end, new) in self._cache.read_beside(found).items():  # in its own ids
            text = self._rows[number].text
            left = math.ceil((len(text.ids) - end) / text.ids_each)
            counts[number] = max(text.count - left, starts[number]), round(new / text.ids_each)
        return counts

    def _begin(self, view: RowView, asked: int) -> I32:
        row, room = self._rows[view.row], self._cache.model.info.max_length
        row.text.read(view.tokens)
        start = row.text.place(view.start)
        first = min(start, self._cache.start(view.row)) if self._cache.length(view.row) else start
        if len(row.text.ids) - first + row.size > room:
            row.text.shorten(room // 2)
            start = row.text.place(view.start)
        ids = np.array(row.text.ids, np.int32)
        if not len(ids):
            return ids
        unread = self._cache.begin(view.row, ids, start)
        return self._cache.catch_up(view, ids, unread, asked, row.text.ids_each)

    def _fits(self, view: RowView, n: int) -> bool:
        return 0 < n <= self._cache.model.info.max_length - self._cache.length(view.row)

    def _no_room(self, view: RowView) -> None:
        self._cache.release(view.row)

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[Output, I32]:
        return self._cache.feed(rows, tokens)

    def _enough(self, view: RowView, drafted: Sequence[int]) -> bool:
        return not self._own.of(drafted[-1]) or len(self._translated(view, drafted)[0]) >= self._rows[view.row].size

    def _may_stand(self, token: int) -> bool:
        return bool(self._own.of(token))

    def _translated(self, view: RowView, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        """The target's ids of the text that the draft model's ids ``drafted`` stand for; and which of these each ends
        with."""
        row = self._rows[view.row]
        spelled = [self._own.of(token) for token in drafted]
        silent = next((i for i, text in enumerate(spelled) if not text), len(spelled))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ids = self._encode(view.tokens, row.text.fragment, decoder.decode(b"".join(spelled[:silent])))
        written = np.cumsum([len(text) for text in spelled[:silent]])
        reached = np.cumsum([len(self._target.of(token)) for token in ids]) - len(row.text.fragment)
        ends = np.minimum(np.searchsorted(written, reached), silent - 1).tolist()
        if silent < len(spelled) and drafted[silent] in self._own.tokenizer.eos_ids and not decoder.getstate()[0]:
            ids, ends = [*ids, *self._target.tokenizer.eos_ids[:1]], [*ends, silent]
        return ids[: row.size], ends[: row.size]

    def _encode(self, tokens: I32, fragment: bytes, text: str) -> list[int]:
        """The target's ids of what ``text`` adds to ``tokens`` int32 [n], which end with the bytes ``fragment``."""
        before: list[int] = []
        for token in tokens[-CONTEXT:][::-1].tolist():
            if not self._target.of(token):
                break
            before.insert(0, token)
        while before:
            context = self._target.join(before)
            if not context.endswith(fragment):
                break
            known = _decoded(context.removesuffix(fragment))
            if known is not None:
                ids = self._target.encode(known + text, continued=True)
                if ids is not None and ids[: len(before)] == before:
                    return ids[len(before) :]
            del before[0]
        return [] if fragment else self._target.encode(text, continued=True) or []

    def fork(self, src: int, dst: int, n: int) -> None:
        self._rows.pop(dst, None)
        # dst finds what they share when it reads its own tokens
        self._cache.fork(src, dst, self._cache.start(src) + self._cache.length(src))

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._rows.pop(row, None)
        self._cache.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._cache.growth(row, positions + positions // 4 + SLACK)

    @property
    def bytes(self) -> int:
        return self._cache.bytes

    def check(self, rows: Sequence[int]) -> None:
        assert self._rows.keys() <= set(rows), f"rows {self._rows.keys() - set(rows)} were never released"
        self._cache.check(rows)

    def close(self) -> None:
        self._cache.model.close()


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
