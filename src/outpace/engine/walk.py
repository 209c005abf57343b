"""One row's verdict, walked in Python: where its rules, its acceptance or a choice near a filter's edge need that."""

from __future__ import annotations

import numpy as np

from outpace.common.arrays import F64, I32
from outpace.errors import NoTokenAllowedError, RuleError
from outpace.exact.chance import NoiseChance
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.sampling import Chooser
from outpace.exact.verify import reject, walk
from outpace.models.base import Output
from outpace.params import Acceptance

FORBIDDEN = -1  # the choice of a row whose rules forbid every token: agrees with no draft
OWN_FAULTS = (NoTokenAllowedError, FloatingPointError, RuleError)  # end a row's request; anything else is the model's


class Walk:
    """The row whose pending token is packed at ``start``; ``chooser``: of the token after it.

    ``failure``: why its rules left no token, or what they raised; its verdict ends before that token, with
    ``FORBIDDEN`` in its place.
    """

    def __init__(self, chooser: Chooser, acceptance: Acceptance, draft: Draft, start: int, output: Output) -> None:
        self.draft = draft
        self._acceptance, self._start, self._output = acceptance, start, output
        self._choosers = {-1: chooser}  # after a node, as they are asked for
        self._known: dict[int, int] = {}  # choices after a node
        self.failure: Exception | None = None

    def stands(self, tokens: list[int], path: list[int]) -> bool:
        """Whether a verdict that was found without the rules that can test a single token is the row's."""
        chooser, node = self._choosers[-1], -1
        if chooser.free is chooser:
            return True
        try:
            for token, after in zip(tokens, [*path, -1], strict=True):
                chooser = self._chooser(node)
                allowed = chooser.allows(token)
                self._known[node] = token if allowed else self._asked(node, chooser)
                if not allowed:
                    return False
                node = after
        except OWN_FAULTS:  # the walk meets it again
            return False
        return True

    def verdict(self) -> tuple[list[int], list[int]]:
        """The tokens that the row gains, and the path of nodes that it accepts."""
        if self._acceptance != "coupled":
            return self._by_probability()
        alone = Drafts.of([self.draft])
        return walk(lambda _, nodes: np.array([self._choice(int(nodes[0]))], np.int32), alone).lists()[0]

    def every(self) -> I32:
        """The target's choices int32 [k + 1] after the pending token and its k nodes; -1 where it has none."""
        return np.array([self._choice(node, fatal=False) for node in range(-1, len(self.draft))], np.int32)

    def _by_probability(self) -> tuple[list[int], list[int]]:
        root = self._choosers[-1]
        asked = -1

        def p(node: int) -> F64:
            nonlocal asked
            asked = node
            return self._chooser(node).probabilities(self._output.logits(self._at(node))[0])

        try:
            found = reject(p, self.draft, NoiseChance(root.noise, root.index))
            return found.tokens.tolist(), found.path.tolist()
        except OWN_FAULTS as error:
            self.failure = error
            path = self.draft.path(asked)  # its tokens were accepted before the dead end was met
            return [*(self.draft.tokens[node] for node in path), FORBIDDEN], path

    def _choice(self, node: int, fatal: bool = True) -> int:
        """The target's choice after a node; one that is chosen without masks stands where it is allowed."""
        if node not in self._known:
            try:
                chooser = self._chooser(node)
                self._known[node] = self._freely(node, chooser)
            except OWN_FAULTS as error:
                if fatal:
                    self.failure = error
                return FORBIDDEN
        return self._known[node]

    def _freely(self, node: int, chooser: Chooser) -> int:
        if (free := chooser.free) is not chooser:
            try:
                token = self._asked(node, free)
            except (NoTokenAllowedError, FloatingPointError):  # of logits that a mask may forbid
                return self._asked(node, chooser)
            if chooser.allows(token):
                return token
        return self._asked(node, chooser)

    def _asked(self, node: int, chooser: Chooser) -> int:
        return int(self._output.choose(self._at(node), (chooser,))[0])

    def _at(self, node: int) -> I32:
        return np.array([self._start + node + 1], np.int32)

    def _chooser(self, node: int) -> Chooser:
        """The chooser after a node: its parent's, one token further."""
        found = self._choosers.get(node)
        if found is None:
            found = self._chooser(self.draft.parents[node]).advance(self.draft.tokens[node])
            self._choosers[node] = found
        return found
