"""Drafts of rows that have rules, such as a grammar: what a rule forbids is no draft, what it forces is one."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.drafters.base import RowView
from outpace.drafters.composed import tree_of
from outpace.errors import RuleError
from outpace.exact.drafts import UNNAMED, Drafts
from outpace.exact.rules import forced, pruned
from outpace.exact.tree import Tree, merge, pack

GRAMMAR = "grammar"  # the source of tokens that a rule says must follow


def under_rules(views: Sequence[RowView], most: Sequence[int], drafts: Drafts) -> Drafts:
    """Nodes that a rule forbids are dropped, tokens that must follow are added, up to ``most`` nodes a row; not where
    nodes were drawn under ``rejection``, whose existence may not depend on what was drawn.

    Tokens that must follow need no drafter, so they are proposed also where it was not asked.
    """
    parts: list[tuple[list[int], Drafts]] = []
    for i, (view, limit) in enumerate(zip(views, most, strict=True)):
        its = drafts if len(views) == 1 else drafts.take([i])
        drawn = view.acceptance == "rejection" and its.q is not None
        if view.chooser.rules and not drawn and limit:
            try:
                must = forced(view.chooser, limit)
                if must:
                    gains = [0.99 - 0.09 * n / len(must) for n in range(len(must))]
                    own = tree_of(its, 0)
                    own.sources = [source + 1 for source in own.sources]
                    whole = merge([Tree.chain(must, gains), own], limit)
                    its = pack([whole], (GRAMMAR, *(drafts.sources or (UNNAMED,))))
                keep = pruned(its.row(0), view.chooser)
                if len(keep) < int(its.widths[0]):
                    its = its.only([keep])
            except RuleError:  # verification meets it again, and ends the request
                its = Drafts.empty(1)
        parts.append(([i], its))
    return Drafts.join(parts, len(views))
