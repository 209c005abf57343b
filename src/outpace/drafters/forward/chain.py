"""What drafters that run a forward a level have in common: a chain a row, drawn as the target would draw it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.common.arrays import F32, F64, I32
from outpace.drafters.base import DraftCost, Drafter, DrafterNeeds, RowView, levels
from outpace.errors import MemoryLimitError, NoTokenAllowedError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Stream
from outpace.exact.sampling import Chooser
from outpace.models.base import Output


class ChainDrafter(Drafter):
    """Chains of what some model chooses itself, under the request's own parameters, rules and noise.

    Under ``coupled`` it draws with the noise that the target will draw with; under ``rejection`` from ``Stream.DRAFT``,
    and hands over q. A subclass says where the logits come from. ``own_vocab``: their width; ``vocab``: the target's.
    """

    needs = DrafterNeeds(draws=True)

    def __init__(self, name: str, vocab: int, own_vocab: int) -> None:
        self.name = name
        self.cost = DraftCost(levels=name)
        self._vocab, self._own_vocab = vocab, own_vocab

    def _begin(self, view: RowView) -> I32:
        """Committed tokens int32 [n >= 1] that the row's cache lacks, the pending one last."""
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

    def _enough(self, view: RowView, drafted: I32) -> bool:
        """Whether the row's draft int32 [n >= 1] ends here, whatever its size."""
        return False

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        sizes = levels(rows, sizes)
        b, w = len(rows), int(sizes.max(initial=0))
        sampled = any(view.acceptance == "rejection" and not view.chooser.params.greedy for view in rows)
        tokens = np.zeros((b, w), np.int32)
        q = np.zeros((b, w, self._vocab)) if sampled else None
        widths = np.zeros(b, np.int32)
        choosers = [view.chooser for view in rows]
        feed = [self._begin(view) for view in rows]
        active = list(range(b))
        for depth in range(w):
            active = [i for i in active if sizes[i] > depth == widths[i] and self._fits(rows[i], len(feed[i]))]
            if depth:
                active = [i for i in active if not self._enough(rows[i], tokens[i, :depth])]
            if not active:
                break
            found = self._fed(rows, active, feed)
            if found is None:
                break
            output, last, active = found
            for i, token in zip(active, self._choose(output, last, active, rows, choosers, q, depth), strict=True):
                if token is None:
                    continue
                tokens[i, depth] = token
                widths[i] += 1
                choosers[i] = choosers[i].advance(token)
                feed[i] = tokens[i, depth : depth + 1]
        return Drafts(tokens, widths, q=q, sources=(self.name,))

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
