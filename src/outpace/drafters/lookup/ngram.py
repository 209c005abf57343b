"""``ngram``: what followed the last time the same few tokens appeared, in the prompt or the output (prompt lookup).

Stateless: the row's tokens are the index, so nothing has to be rolled back, forked or freed.
"""

from __future__ import annotations

from outpace import _fast
from outpace.drafters.base import DraftContext, LookupDrafter
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError

# How often the token after a match of 0, 1, 2, ... tokens was right on outputs of the demo model (docs/notebook.md).
HIT = (0.0, 0.21, 0.52, 0.6, 0.7, 0.71, 0.74, 0.78, 0.8, 0.84, 0.84, 0.85, 0.95)
OLDER = 0.4  # the share of what the newer matches leave that the next older one gets


class NgramDrafter(LookupDrafter):
    """Longest match of the sequence's end, ``least`` to ``most`` tokens long; among equally long ones the newest.

    With ``candidates`` > 1 that many matches are looked at, longer before shorter and newer before older, and merged
    into one tree. Raises DrafterError.
    """

    name = "ngram"

    def __init__(self, least: int = 1, most: int = 8, candidates: int = 1) -> None:
        if not 1 <= least <= most <= 64:
            raise DrafterError(f"ngram: min={least},max={most} is out of range: give 1 <= min <= max <= 64")
        if not 1 <= candidates <= 64:
            raise DrafterError(f"ngram: candidates={candidates} is out of range: give 1 (a chain) to 64")
        super().__init__(_fast.native.NgramLookup(least, most, candidates, HIT, OLDER))


def build(spec: DrafterSpec, context: DraftContext) -> NgramDrafter:
    return NgramDrafter(**spec.given(least="min", most="max", candidates="candidates"))
