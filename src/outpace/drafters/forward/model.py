"""``model:ID``: a smaller model drafts, in its own KV cache. Here: one with the target's vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outpace.common.arrays import I32
from outpace.drafters.base import DraftContext, DraftCost, RowView
from outpace.drafters.forward.chain import ChainDrafter
from outpace.drafters.forward.own_cache import CATCH_UP, OwnCache
from outpace.drafters.spec import DrafterSpec, draft_models
from outpace.models.base import Model, Output

if TYPE_CHECKING:
    from outpace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class ModelDrafter(ChainDrafter):
    """Chains from a draft model: the choices it makes itself under the request's own parameters, rules and noise."""

    rates = True

    def __init__(self, model: Model, name: str, target_vocab: int) -> None:
        super().__init__(name, target_vocab, model.info.vocab_size)
        self.cost = DraftCost(levels=name, nodes=True, reads=True)
        self._cache = OwnCache(model)
        self.native, self.names = self._cache.native(target_vocab), (name,)

    @property
    def model(self) -> Model:
        return self._cache.model

    def _begin(self, view: RowView, asked: int) -> I32:
        """Roll the row back to what is committed, and return the committed tokens it has not seen, at least one; none
        where they are more than the row may catch up with in a step, of which it has read the first now."""
        unread = self._cache.begin(view.row, view.tokens, view.start)
        return unread if unread.max() >= self._own_vocab else self._cache.catch_up(view, view.tokens, unread, asked)

    def _fits(self, view: RowView, n: int) -> bool:
        if not 0 < n <= self.model.info.max_length - self._cache.length(view.row):
            return False
        return int(view.tokens[-n:].max()) < self._own_vocab  # else the target said what this model cannot read

    def read_prompts(self, rows: Sequence[tuple[int, I32, int, int]]) -> dict[int, tuple[int, int]]:
        """A row that lacks more is read a piece further. Those that there is no room or memory for, or with tokens that
        the model lacks, are left to drafts."""
        fit = [
            (row, tokens, start, new + CATCH_UP)
            for row, tokens, new, start in rows
            if len(tokens) - start < self.model.info.max_length and tokens[start:].max() < self._own_vocab
        ]
        return self._cache.read_beside(fit)

    def _no_room(self, view: RowView) -> None:
        self._cache.release(view.row)

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[Output, I32]:
        return self._cache.feed(rows, tokens)

    def fork(self, src: int, dst: int, n: int) -> None:
        self._cache.fork(src, dst, n)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._cache.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._cache.growth(row, positions)

    @property
    def bytes(self) -> int:
        return self._cache.bytes

    def check(self, rows: Sequence[int]) -> None:
        self._cache.check(rows)

    def close(self) -> None:
        self.native = None  # which keeps the model
        self.model.close()


def build(spec: DrafterSpec, context: DraftContext) -> ChainDrafter:
    """The drafter for the draft model that ``spec`` names: by token ids if they mean what the target's mean, else
    through text.

    Raises ModelError or DrafterError; then nothing stays loaded.
    """
    from outpace.models import load as loader

    ((source, options),) = draft_models(spec, context.options)
    model, tokenizer = loader.load(source, options, beside=context.target)
    return drafting_with(model, tokenizer, f"model:{source}", context)


def drafting_with(model: Model, tokenizer: Tokenizer | None, name: str, context: DraftContext) -> ChainDrafter:
    """The drafter that owns ``model``, as ``build``; without a tokenizer its token ids are the target's."""
    from outpace.drafters.forward.translated import TranslatedDrafter
    from outpace.text.tokenizer import differences

    try:
        if context.tokenizer is None or tokenizer is None or not differences(context.tokenizer, tokenizer, 1):
            return ModelDrafter(model, name, context.target.info.vocab_size)
        translated = TranslatedDrafter(model, tokenizer, name, context.tokenizer, context.target.info.vocab_size)
        translated.check_acceptance(context.acceptance)
        log.info("%s has another tokenizer than the target: its text is re-encoded", name)
    except BaseException:
        model.close()
        raise
    return translated
