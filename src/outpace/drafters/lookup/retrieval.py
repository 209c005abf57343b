"""``retrieval:PATH``: what followed in a datastore, wherever it ends like the sequence (REST, arXiv 2311.08252).

Places vote for what comes next with weights that grow with the length of their match; the tree has the nodes of
highest estimated path probability. Stateless: the datastore is shared, and a row leaves nothing behind.
"""

from __future__ import annotations

from outpace import _fast
from outpace.drafters.base import DraftContext, LookupDrafter
from outpace.drafters.lookup.datastore import DEPTH, MOST_TOKENS, Datastore, fingerprint
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError

# Odds that one place with a match of 0, 1, 2, ... tokens is right; DOUBT is "something else" (docs/notebook.md).
WEIGHTS = (0.0, 0.03, 0.06, 0.12, 0.25, 0.4, 0.6, 0.9, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
DOUBT = 0.4


class RetrievalDrafter(LookupDrafter):
    """``places``: how many places of the datastore vote, those with the longest matches; ``least``: tokens that a match
    has at least; ``vocab``: tokens of the target are below. Raises DrafterError."""

    name = "retrieval"

    def __init__(self, datastore: Datastore, places: int = 24, least: int = 2, vocab: int = MOST_TOKENS) -> None:
        if not 1 <= places <= 1024:
            raise DrafterError(f"retrieval: places={places} is out of range: give 1 to 1024")
        if not 1 <= least <= DEPTH:
            raise DrafterError(f"retrieval: min={least} is out of range: give 1 to {DEPTH} tokens")
        search = _fast.native.Datastore(datastore.arrays, WEIGHTS, DOUBT, vocab, datastore.files)
        super().__init__(_fast.native.RetrievalLookup(search, places, least))


def build(spec: DrafterSpec, context: DraftContext) -> RetrievalDrafter:
    assert spec.argument is not None
    datastore = Datastore(spec.argument, fingerprint(context.tokenizer) if context.tokenizer is not None else None)
    return RetrievalDrafter(datastore, vocab=context.target.info.vocab_size, **spec.given(places="places", least="min"))
