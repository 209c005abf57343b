"""Between the engine and ``exact.verify``: asks a forward's output what a rule needs, and turns it into verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.arrays import F64, I32
from outpace.errors import NoTokenAllowedError, RuleError
from outpace.exact.chance import NoiseChance
from outpace.exact.drafts import Drafts, Verdict, Verdicts
from outpace.exact.sampling import Chooser
from outpace.exact.verify import reject, typical, walk
from outpace.models.base import Output
from outpace.params import Acceptance

FORBIDDEN = -1  # the choice of a row whose rules forbid every token: agrees with no draft
OWN_FAULTS = (NoTokenAllowedError, FloatingPointError, RuleError)  # end a row's request; anything else is the model's


class Verifier:
    """Verdicts for B rows. ``starts`` int32 [>= B]: where each row's pending token is packed.

    ``failures``: rows whose rules left no token, or raised, with the reason; their verdicts end before that token, with
    ``FORBIDDEN`` in its place.
    """

    def __init__(
        self,
        choosers: Sequence[Chooser],
        acceptances: Sequence[Acceptance],
        drafts: Drafts,
        starts: I32,
        output: Output,
    ) -> None:
        self._roots, self._acceptances = choosers, acceptances
        self._drafts, self._starts, self._output = drafts, starts, output
        self._choosers: dict[tuple[int, int], Chooser] = {}  # after a node, as they are asked for
        self._known: dict[tuple[int, int], int] = {}  # choices after a node, of rows whose free verdict does not stand
        self.failures: dict[int, Exception] = {}

    def verdicts(self) -> Verdicts:
        coupled = [acceptance == "coupled" for acceptance in self._acceptances]
        there = [chooser.free if its else None for chooser, its in zip(self._roots, coupled, strict=True)]
        found = self._output.verify(self._drafts, self._starts[: len(there)], there) if any(coupled) else None
        left = (
            range(len(there)) if found is None else [i for i in range(len(there)) if not self._decided(found, i, there)]
        )
        if found is not None and not left:
            return found
        verdicts = {} if found is None else {i: found.row(i) for i in range(len(found)) if i not in left}
        walked = [i for i in left if coupled[i]]
        if walked:
            at = np.array(walked, np.int32)
            whole = walk(lambda rows, nodes: self._choose(at[rows], nodes), self._drafts.take(walked))
            verdicts.update((i, whole.row(n)) for n, i in enumerate(walked))
        verdicts.update((i, self._by_probability(i)) for i in left if not coupled[i])
        return Verdicts.of([verdicts[i] for i in range(len(there))])

    def every(self, i: int) -> I32:
        """The target's choices int32 [k + 1] after row i's pending token and its k nodes; -1 where it has none."""
        nodes = range(-1, int(self._drafts.widths[i]))
        try:
            at = (self._starts[i] + np.arange(len(nodes))).astype(np.int32)
            return self._said(at, [self._chooser(i, node) for node in nodes])
        except OWN_FAULTS:  # a dead end that nobody need reach
            return np.array([self._choose_one(i, node, fatal=False) for node in nodes], np.int32)

    def _by_probability(self, i: int) -> Verdict:
        draft, root = self._drafts.row(i), self._roots[i]
        rule = reject if self._acceptances[i] == "rejection" else typical
        chance = NoiseChance(root.noise, root.index)
        asked = -1

        def p(node: int) -> F64:
            nonlocal asked
            asked = node
            at = np.array([self._starts[i] + node + 1], np.int32)
            chooser = self._chooser(i, node)
            return chooser.probabilities(self._output.logits(at)[0])

        try:
            return rule(p, draft, chance)
        except OWN_FAULTS as error:
            self.failures[i] = error
            path = draft.path(asked)  # its tokens were accepted before the dead end was met
            return Verdict(np.append(draft.tokens[path], np.int32(FORBIDDEN)), path)

    def _decided(self, found: Verdicts, i: int, there: Sequence[Chooser | None]) -> bool:
        """Whether row i's verdict stands: it was found, and what was chosen freely on its way is allowed."""
        if found.accepted[i] < 0:
            return False
        if there[i] is self._roots[i]:
            return True
        verdict, node = found.row(i), -1
        try:
            for token, after in zip(verdict.tokens.tolist(), [*verdict.path.tolist(), -1], strict=True):
                chooser = self._chooser(i, node)
                if not chooser.allows(token):
                    self._known[i, node] = int(self._output.choose(self._starts[i : i + 1] + (node + 1), (chooser,))[0])
                    return False
                self._known[i, node] = token
                node = after
        except OWN_FAULTS:  # the walk meets it again
            return False
        return True

    def _choose(self, rows: I32, nodes: I32) -> I32:
        """The target's choices int32 [n] after ``nodes`` of batch rows ``rows``."""
        pairs = list(zip(rows.tolist(), nodes.tolist(), strict=True))
        if all(pair in self._known for pair in pairs):
            return np.array([self._known[pair] for pair in pairs], np.int32)
        try:
            return self._said(self._starts[rows] + nodes + 1, [self._chooser(i, node) for i, node in pairs])
        except OWN_FAULTS:  # one row's fault spares the others
            return np.array([self._choose_one(*pair) for pair in pairs], np.int32)

    def _choose_one(self, i: int, node: int, fatal: bool = True) -> int:
        try:
            return int(self._said(self._starts[i : i + 1] + (node + 1), (self._chooser(i, node),))[0])
        except OWN_FAULTS as error:
            if fatal:
                self.failures[i] = error
            return FORBIDDEN

    def _said(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        """The choices int32 [n] after packed tokens ``at``; masks are asked for where a free choice is forbidden."""
        free = [chooser.free for chooser in choosers]
        if all(its is chooser for its, chooser in zip(free, choosers, strict=True)):
            return self._output.choose(at, choosers)
        try:
            tokens = self._output.choose(at, free)
        except (NoTokenAllowedError, FloatingPointError):  # of logits that a mask may forbid
            return self._output.choose(at, choosers)
        wrong = [i for i, token in enumerate(tokens.tolist()) if not choosers[i].allows(token)]
        if wrong:
            tokens[wrong] = self._output.choose(at[wrong], [choosers[i] for i in wrong])
        return tokens

    def _chooser(self, i: int, node: int) -> Chooser:
        """The chooser after a node: its parent's, one token further."""
        if node < 0:
            return self._roots[i]
        found = self._choosers.get((i, node))
        if found is None:
            draft = self._drafts.row(i)
            found = self._chooser(i, draft.parent(node)).advance(int(draft.tokens[node]))
            self._choosers[i, node] = found
        return found
