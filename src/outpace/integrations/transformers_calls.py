"""Which calls of a model's ``generate`` are drafted: those that ask for nothing but tokens that follow from tokens.

What a keyword asks for is judged by its value. One that nobody here knows asks for nothing while it is None, and what
transformers itself adds while it is empty, such as a new cache; so a new name in transformers refuses no call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, QuantizedCache
from transformers.generation.configuration_utils import GenerationMode

from outpace.errors import ParameterError
from outpace.models.torch.state import own_generate_only

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
# Read here, or by transformers before it calls the decoding loop. Fields of GenerationConfig come to it as objects.
_SERVED = {
    "inputs", "input_ids", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "assistant_model", "assistant_tokenizer", "tokenizer", "streamer", "attention_mask", "position_ids",
    "use_cache",
}  # fmt: skip
_MARKS = ("mm_token_type_ids", "moe_mm_token_type_ids")  # 0 where a token is text; token_type_ids are only Gemma's
_OFF = ("synced_gpus", "trust_remote_code")
# Fields of GenerationConfig that neither become an object nor are read here: outputs, and lossy or foreign drafting.
_LOOPS_OWN = (
    "output_attentions", "output_hidden_states", "token_healing", "assistant_ensemble_weight", "speculation_type",
    "use_mtp",
)  # fmt: skip


class NotDraftedError(ParameterError):
    """A call, or its model's state, asks for what the engine does not give. ``reason``: a phrase that names it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"outpace.generate does not draft with {reason}: leave custom_generate out of this call")
        self.reason = reason


def require_known(model: Any, given: Mapping[str, Any]) -> None:
    """Raise NotDraftedError for the first of ``generate``'s arguments ``given`` that asks for more than tokens."""
    for name, value in given.items():
        if not (name in _SERVED or hasattr(_DEFAULTS, name) or _neutral(model, name, value)):
            raise NotDraftedError(name)


def require_drafted(model: Any, config: GenerationConfig, given: Mapping[str, Any]) -> None:
    """Raise NotDraftedError where the decoding loop of ``model`` is asked for more than tokens.

    ``config`` and ``given``, the keywords of the model's forward, are as transformers prepares them.
    """
    mode = config.get_generation_mode(None)
    if mode not in _MODES:
        raise NotDraftedError(f"the generation mode {mode.value}")
    if config.prefill_chunk_size is not None:
        raise NotDraftedError("prefill_chunk_size")
    if not isinstance(config.use_cache, bool):  # transformers 5.17 reads the wrong tokens then
        raise NotDraftedError(f"use_cache={config.use_cache}")
    for name in _LOOPS_OWN:
        if getattr(config, name, False):
            raise NotDraftedError(name)
    for name, value in given.items():
        if name not in _SERVED and not _asks_nothing(model, name, value):
            raise NotDraftedError(name)
    if (reason := own_generate_only(model)) is not None:
        raise NotDraftedError(reason)


_DEFAULTS = GenerationConfig()


def _asks_nothing(model: Any, name: str, value: Any) -> bool:
    """Whether a ``value`` that transformers prepared leaves the tokens to the model and the prompt alone."""
    if isinstance(value, Cache):
        made_for_this_call = not getattr(value, "_is_user_defined", False) and int(value.get_seq_length()) == 0
        return made_for_this_call and not isinstance(value, QuantizedCache)  # whose rounding changes tokens
    if isinstance(value, Mapping):
        return not value
    return _neutral(model, name, value)


def _neutral(model: Any, name: str, value: Any) -> bool:
    if name in _MARKS or (name == "token_type_ids" and model.config.model_type.startswith("gemma")):
        return value is None or (isinstance(value, torch.Tensor) and not value.any())
    if name == "logits_to_keep":  # transformers adds 1
        return type(value) is int and value == 1
    return value is None or (name in _OFF and value is False)


def padding_of(input_ids: torch.Tensor, given: Mapping[str, Any]) -> list[int]:
    """How many of each row's first tokens are padding, by the ``attention_mask`` [B, S] among ``given``.

    ``input_ids`` int64 or int32 [B, S]. Raises NotDraftedError for other masks and types, and for ``position_ids``
    ([B, S], or [n, B, S] in models of images) that do not count a row's tokens.
    """
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise NotDraftedError("input_ids that are not rows of tokens")
    batch, width = input_ids.shape
    mask = given.get("attention_mask")
    mask = torch.ones((batch, width), dtype=torch.bool) if mask is None else mask.bool().cpu()
    if mask.shape != (batch, width):
        raise NotDraftedError("an attention_mask that is not one of the prompt's tokens")
    lengths = mask.sum(1)
    if not torch.equal(mask, torch.arange(width)[None] >= width - lengths[:, None]):
        raise NotDraftedError("an attention_mask that is not left padding")
    if not batch or not int(lengths.min()):
        raise NotDraftedError("an empty prompt")
    positions = given.get("position_ids")
    if positions is not None:
        usual = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)
        if positions.shape[-1] != width or not (positions.cpu().masked_fill(~mask, 0) == usual).all():
            raise NotDraftedError("position_ids that do not count a row's tokens")
    return [width - int(n) for n in lengths]


def caches(model: Any, sequences: torch.Tensor, given: Mapping[str, Any]) -> dict[str, Cache]:
    """The cache among ``given``, the keywords of ``model``'s forward, by its name there and in outputs. It has all but
    the last of ``sequences`` [B, S], as transformers' own loop leaves it. None where the call uses none."""
    found = {name: value for name, value in given.items() if isinstance(value, Cache)}
    if not found:
        return {}
    named: dict[str, Any] = {**found, "use_cache": True}
    mask, positions, length = given.get("attention_mask"), given.get("position_ids"), sequences.shape[1] - 1
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones((len(mask), length - mask.shape[1]))], dim=1)
        named["attention_mask"] = mask
        if positions is not None:
            counted = (mask.long().cumsum(-1) - 1).clamp(min=0)
            named["position_ids"] = counted.expand(*positions.shape[:-1], length)
    if "logits_to_keep" in given:
        named["logits_to_keep"] = 1
    model(input_ids=sequences[:, :-1].to(model.device), **named)
    return found
