"""What drafters that run a forward a level have in common: a chain a row, drawn as the target would draw it.

One that knows how likely its tokens are ends a chain at the price, and drafts a second choice beside one that is near.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from outpace.common.arrays import F32, F64, I32
from outpace.drafters.base import DraftCost, Drafter, DrafterNeeds, RowView, draws_now
from outpace.errors import MemoryLimitError, NoTokenAllowedError
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.noise import Stream
from outpace.exact.sampling import Chooser
from outpace.models.base import Output

DEEPEST = 15  # levels of a draft that stops at a floor
NEAR = 0.15  # the chance of a path to a second choice that is drafted beside the first; native/drafting/draft_model.cpp


class Rated(NamedTuple):
    """How likely a drafted token is to be the target's (NaN: unknown), and which other one may be, how likely."""

    chance: float
    rival: int | None = None
    near: float = 0.0


UNRATED = Rated(math.nan)


class ChainDrafter(Drafter):
    """Chains of what some model chooses itself, under the request's own parameters, rules and noise.

    Under ``coupled`` it draws with the noise that the target will draw with; under ``rejection`` from ``Stream.DRAFT``,
    and hands over q. A subclass says where the logits come from. ``own_vocab``: their width; ``vocab``: the target's.
    """

    needs = DrafterNeeds(draws=True)
    rates = False  # whether it says how likely its tokens are

    def __init__(self, name: str, vocab: int, own_vocab: int) -> None:
        self.name = name
        self.cost = DraftCost(levels=name)
        self._vocab, self._own_vocab = vocab, own_vocab

    def _begin(self, view: RowView, asked: int) -> I32:
        """Committed tokens int32 [n >= 1] that the row's cache lacks, the pending one last. ``asked``: rows that
        draft."""
        raise NotImplementedError

    def _fits(self, view: RowView, n: int) -> bool:
        """Whether ``n`` more tokens fit in the row."""
        raise NotImplementedError

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[Output, I32]:
        """Run new tokens of some rows; the output, and the packed index of each row's last token.

        Raises MemoryLimitError when there is no room for them; then every row is as it was.
        """
        raise NotImplementedError

    def _no_room(self, view: RowView) -> None:
        """The row drafts no further in this step, since memory is short: give back what it has, if it is ours."""

    def _enough(self, view: RowView, drafted: Sequence[int]) -> bool:
        """Whether the row's chain, of at least one token, ends here, whatever its size."""
        return False

    def _deepest(self, view: RowView, size: int) -> int:
        """Most levels of the row's draft of ``size`` nodes."""
        most = size if view.depth is None else min(size, view.depth)
        return min(size, DEEPEST) if self.rates and most and view.floor else most

    def _may_stand(self, token: int) -> bool:
        """Whether ``token`` may be drafted beside a first choice."""
        return token < self._vocab

    def _rated(
        self,
        output: Output,
        last: I32,
        rows: Sequence[RowView],
        choosers: Sequence[Chooser],
        tokens: Sequence[int | None],
    ) -> list[Rated]:
        """Of each row's choice among ``tokens`` [n], from the logits after ``last`` [n]: what is known of it. Under
        noise, which the target shares, the choice itself may be unlikely: how sure the model is of anything says
        more."""
        if not self.rates:
            return [UNRATED] * len(tokens)
        chosen = np.array([0 if token is None else token for token in tokens], np.int32)
        found = output.logprobs(last, chosen, [2] * len(rows))
        rated = []
        for view, chooser, token, its in zip(rows, choosers, tokens, found, strict=True):
            if token is None or draws_now(view):
                rated.append(UNRATED)
                continue
            greedy = chooser.params.greedy
            sure = Rated(math.exp(its.logprob if greedy else its.top[0].logprob))
            if view.adaptive and greedy and not chooser.rules:
                other = its.top[its.top[0].token == token] if len(its.top) > 1 else None
                if other is not None and self._may_stand(other.token):
                    sure = sure._replace(rival=other.token, near=math.exp(other.logprob))
            rated.append(sure)
        return rated

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        deepest = [self._deepest(view, size) for view, size in zip(rows, sizes.tolist(), strict=True)]
        b, w = len(rows), max(deepest, default=0)
        sampled = any(draws_now(view) for view in rows)
        q = np.zeros((b, w, self._vocab)) if sampled else None
        drafts, ends, paths = [Draft() for _ in rows], [-1] * b, [1.0] * b
        grown, forwards = [0] * b, np.zeros(b, np.int32)
        choosers = [view.chooser for view in rows]
        asked = sum(most > 0 for most in deepest)
        feed = [
            self._begin(view, asked) if most else np.zeros(0, np.int32)
            for view, most in zip(rows, deepest, strict=True)
        ]
        active = list(range(b))
        for depth in range(w):
            active = [i for i in active if deepest[i] > depth == grown[i] and self._fits(rows[i], len(feed[i]))]
            if depth:
                active = [i for i in active if not self._enough(rows[i], chain(drafts[i], ends[i]))]
            if not active:
                break
            found = self._fed(rows, active, feed)
            if found is None:
                break
            output, last, active = found
            forwards[active] += 1
            tokens = self._choose(output, last, active, rows, choosers, q, depth)
            rated = self._rated(output, last, [rows[i] for i in active], [choosers[i] for i in active], tokens)
            for i, token, its in zip(active, tokens, rated, strict=True):
                if token is None:
                    continue
                draft, parent, before = drafts[i], ends[i], paths[i]
                paths[i] = before * its.chance
                ends[i] = draft.add(token, parent, paths[i])
                grown[i] += 1
                room = int(sizes[i]) - len(draft)
                if its.rival is not None and before * its.near >= max(rows[i].floor, NEAR) and room > 0:
                    draft.add(its.rival, parent, before * its.near)
                    deepest[i] = min(deepest[i], grown[i] + room - 1)  # a node less for the chain
                if rows[i].floor > 0 and paths[i] < rows[i].floor:
                    deepest[i] = grown[i]
                choosers[i] = choosers[i].advance(token)
                feed[i] = np.array([token], np.int32)
        made = Drafts.of(drafts, (self.name,))
        if q is not None:
            q = q[:, : made.tokens.shape[1]]
        if not self.rates:
            return replace(made, q=q, confidence=None)
        return replace(made, q=q, levels=forwards)

    def _fed(self, rows: Sequence[RowView], active: list[int], feed: list[I32]) -> tuple[Output, I32, list[int]] | None:
        """``_feed`` for those of the ``active`` rows that there is memory for, from the first on; None: for none."""
        while active:
            try:
                return *self._feed([rows[i].row for i in active], [feed[i] for i in active]), active
            except MemoryLimitError:
                *active, last = active
                self._no_room(rows[last])
        return None

    def _choose(
        self,
        output: Output,
        last: I32,
        active: list[int],
        rows: Sequence[RowView],
        choosers: list[Chooser],
        q: F64 | None,
        depth: int,
    ) -> list[int | None]:
        """One drafted token for each active row, from the logits after packed indices ``last`` [n].

        None where the row's rules forbid every token: its draft ends there, and the target will see for itself.
        """
        if q is None and self._own_vocab == self._vocab:
            try:
                return [int(t) for t in output.choose(last, [choosers[i] for i in active])]
            except (NoTokenAllowedError, FloatingPointError):
                pass  # one row's dead end spares the others: go through them one by one
        drawn: list[int | None] = []
        for i, row in zip(active, self._target_logits(output.logits(last)), strict=True):
            rejection = rows[i].acceptance == "rejection"
            try:
                token = choosers[i].choose(row, Stream.DRAFT if rejection else Stream.CHOICE)
            except (NoTokenAllowedError, FloatingPointError):
                drawn.append(None)
                continue
            drawn.append(token)
            if q is not None:
                q[i, depth] = choosers[i].probabilities(row) if rejection else np.eye(1, self._vocab, token)[0]
        return drawn

    def _target_logits(self, logits: F32) -> F32:
        """float32 [n, own V] as [n, V of the target]: a padded tail is cut, or can never be chosen."""
        n, own = logits.shape
        if own >= self._vocab:
            return logits[:, : self._vocab]
        padded = np.full((n, self._vocab), -np.inf, np.float32)
        padded[:, :own] = logits
        return padded


def chain(draft: Draft, end: int) -> list[int]:
    """Tokens down to the node ``end``."""
    return [draft.tokens[node] for node in draft.path(end)]
