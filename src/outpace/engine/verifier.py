"""Between the engine and ``verify``: asks a forward's output what a rule needs, and turns the answers into verdicts."""

from __future__ import annotations

import numpy as np

from outpace.arrays import F64, I32
from outpace.engine.sequence import Sequence
from outpace.errors import NoTokenAllowedError
from outpace.exact.chance import NoiseChance
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts
from outpace.exact.sampling import Chooser
from outpace.exact.verify import reject, typical, walk, walk_row
from outpace.models.base import Batch, Output

_FORBIDDEN = -1  # the choice of a row whose rules forbid every token: agrees with no draft


class Verifier:
    """Asks the target's output what verification needs, node by node, and turns the answers into verdicts."""

    def __init__(
        self, sequences: list[Sequence], drafts: Drafts, batch: Batch, output: Output, failures: dict[int, str]
    ) -> None:
        self._sequences, self._drafts, self._starts = sequences, drafts, batch.starts
        self._output, self._failures = output, failures
        self._choosers: dict[tuple[int, int], Chooser] = {}  # after a node, as they are asked for

    def verdicts(self) -> Verdicts:
        if len(self._sequences) > 1 and all(s.acceptance == "coupled" for s in self._sequences):
            return walk(self._choose, self._drafts)
        return Verdicts.of([self._one(i) for i in range(len(self._sequences))])

    def every(self, i: int) -> I32:
        """The target's choices int32 [k + 1] after row i's pending token and its k nodes; -1 where it has none."""
        nodes = range(-1, int(self._drafts.widths[i]))
        at = (self._starts[i] + np.arange(len(nodes))).astype(np.int32)
        choosers = [self._chooser(i, node) for node in nodes]
        try:
            return self._output.choose(at, choosers)
        except (NoTokenAllowedError, FloatingPointError):
            return np.array([self._if_any(at[n : n + 1], chooser) for n, chooser in enumerate(choosers)], np.int32)

    def _if_any(self, at: I32, chooser: Chooser) -> int:
        try:
            return int(self._output.choose(at, [chooser])[0])
        except (NoTokenAllowedError, FloatingPointError):
            return _FORBIDDEN  # a dead end that nobody need reach

    def _one(self, i: int) -> Verdict:
        sequence, draft = self._sequences[i], self._drafts.row(i)
        if sequence.acceptance == "coupled":
            return self._walk(i, draft)
        rule = reject if sequence.acceptance == "rejection" else typical
        chance = NoiseChance(sequence.chooser.noise, sequence.chooser.index)
        asked = -1

        def p(node: int) -> F64:
            nonlocal asked
            asked = node
            return self._p(i, node)

        try:
            return rule(p, draft, chance)
        except (NoTokenAllowedError, FloatingPointError) as error:
            self._failures[i] = str(error)
            path = draft.path(asked)  # its tokens were accepted before the dead end was met
            return Verdict(np.append(draft.tokens[path], np.int32(_FORBIDDEN)), path)

    def _walk(self, i: int, draft: Draft) -> Verdict:
        """``walk_row``, in one go where the logits lie if that is possible."""
        found = self._output.walk(int(self._starts[i]), draft, self._sequences[i].chooser)
        return walk_row(lambda node: self._choose_one(i, node), draft) if found is None else found

    def _choose(self, rows: I32, nodes: I32) -> I32:
        """The target's choices int32 [n] after ``nodes`` of batch rows ``rows``."""
        pairs = list(zip(rows.tolist(), nodes.tolist(), strict=True))
        at = self._starts[rows] + nodes + 1
        choosers = [self._chooser(i, node) for i, node in pairs]
        try:
            return self._output.choose(at, choosers)
        except (NoTokenAllowedError, FloatingPointError):
            return np.array([self._choose_one(*pair) for pair in pairs], np.int32)  # one bad row spares the others

    def _choose_one(self, i: int, node: int) -> int:
        at = self._starts[i : i + 1] + (node + 1)
        try:
            return int(self._output.choose(at, (self._chooser(i, node),))[0])
        except (NoTokenAllowedError, FloatingPointError) as error:
            self._failures[i] = str(error)
            return _FORBIDDEN

    def _p(self, i: int, node: int) -> F64:
        at = np.array([self._starts[i] + node + 1], np.int32)
        return self._chooser(i, node).probabilities(self._output.logits(at)[0])

    def _chooser(self, i: int, node: int) -> Chooser:
        """The chooser after a node: its parent's, one token further."""
        if node < 0:
            return self._sequences[i].chooser
        found = self._choosers.get((i, node))
        if found is None:
            draft = self._drafts.row(i)
            found = self._chooser(i, draft.parent(node)).advance(int(draft.tokens[node]))
            self._choosers[i, node] = found
        return found
