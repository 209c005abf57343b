"""Finds out at load how a transformers model attends, and refuses what could not be served exactly.

One pass with a watching attention function shows every call: which module, which widths, which mask, which extras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from outpace.errors import ModelError
from outpace.models.torch.attention import NAME, Forward, Site, attend
from outpace.models.torch.kv import LayerShape

# What models pass to attention besides what is handled, and what none of it means while no cache is kept.
_HARMLESS = frozenset(
    ("position_ids", "position_embeddings", "use_cache", "past_key_values", "past_key_value", "cache_position")
)
_ROPE_LIMITED = ("dynamic", "longrope")
UNSTATED = 4096  # positions, for models that name no limit


@dataclass(slots=True)
class _Call:
    module: torch.nn.Module
    shape: LayerShape
    dtype: torch.dtype
    mask: torch.Tensor | None
    window: int | None
    scale: float
    extras: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What was found: an attention call of each layer that attends, where all layers hang, and what is cached."""

    shapes: tuple[LayerShape, ...]
    dtype: torch.dtype
    holder: torch.nn.Module  # the module that owns the list of decoder layers ...
    attribute: str  # ... under this name
    layers: torch.nn.ModuleList
    scales: tuple[float, ...]
    forward: Forward
    sites: tuple[tuple[torch.nn.Module, Site], ...]  # of the attention modules

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(site.window for _, site in self.sites)


@contextmanager
def attending(configs: Sequence[Any], name: str, sites: Sequence[tuple[torch.nn.Module, Site]] = ()) -> Iterator[None]:
    """Models with these ``configs`` attend by the function registered as ``name``, and as before afterwards: between
    forwards a module carries nothing of ours, so that two can serve it, and whoever copies or changes it meets none."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = name
        for module, site in sites:
            module.__dict__["_outpace"] = site
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
        for module, _ in sites:
            module.__dict__.pop("_outpace", None)


class Watch:
    """Notes attention calls and masks while a model runs once."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.calls: list[_Call] = []
        self.masks: list[tuple[torch.Tensor, Callable[..., Any]]] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **extras: Any,
    ) -> tuple[torch.Tensor, None]:
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.calls.append(_Call(module, shape, key.dtype, attention_mask, sliding_window, scale, extras))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None

    def mask(
        self, *_: Any, q_length: int, kv_length: int, mask_function: Callable[..., Any], **__: Any
    ) -> torch.Tensor:
        stand_in = torch.zeros((1, 1, q_length, kv_length))
        self.masks.append((stand_in, mask_function))  # judged where a layer uses it
        return stand_in

    def window(self, call: _Call) -> int | None:
        """How far back the call's tokens see; the mask's word counts, the model's own argument where it has none."""
        for mask, function in self.masks:
            if mask is call.mask:
                return window_of(function, self.longest)
        return call.window if call.window is None or call.window < self.longest else None


def window_of(mask_function: Callable[..., Any], longest: int) -> int | None:
    """The sliding window that a transformers mask function draws (None: it is plainly causal). Raises ModelError."""
    last = min(longest, 1 << 20) - 1
    zero = torch.zeros((), dtype=torch.long)
    seen: list[int] = []
    for q in (last, last - last // 3 - 1):
        k = torch.arange(q + 2)
        sees = mask_function(zero, zero, torch.tensor(q), k).expand(k.shape)
        count = int(sees.sum())
        if count < 1 or not torch.equal(sees, (k <= q) & (k > q - count)):
            raise ModelError("its attention is neither causal nor a sliding window")
        seen.append(count)
    if seen[1] != min(seen[0], last - last // 3):
        raise ModelError("its attention runs in chunks rather than in a sliding window")
    return None if seen[0] == last + 1 else seen[0]


def weight_bytes(module: Any) -> int:
    """What its parameters take, those that share memory once."""
    return sum({p.data_ptr(): p.nbytes for p in module.parameters()}.values())


def max_length(config: Any) -> tuple[int, str | None]:
    """The most positions a row may have, and the reason when it is less than the model claims."""
    claimed = getattr(config, "max_position_embeddings", None)
    if not isinstance(claimed, int) or claimed < 1:
        return UNSTATED, f"its configuration does not say how long a context may be: it is limited to {UNSTATED}"
    rope, key = getattr(config, "rope_parameters", None) or {}, "original_max_position_embeddings"
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        kind, original = parameters.get("rope_type"), parameters.get(key) or getattr(config, key, None)
        limit = int(original or claimed)
        if kind in _ROPE_LIMITED and (limit < claimed or (kind == "dynamic" and original is None)):
            return min(limit, claimed), (
                f"its {kind} rope changes every position's rotation beyond {limit} positions, which would couple "
                f"tokens to what comes after them: contexts are limited to {min(limit, claimed)}"
            )
    return claimed, None


def dissect(
    model: Any,
    configs: Sequence[Any],
    longest: int,
    tokens: torch.Tensor,
    others: Sequence[torch.nn.Module] = (),
) -> Anatomy:
    """Run ``model``, which has these ``configs``, once on ``tokens`` [1, n] with a watching attention, and judge what
    it does. ``others``: modules that layers have in the place of attention. Raises ModelError."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)  # without a mask function: models then build no masks for it
    watch = Watch(longest)
    watching = f"{NAME}-watch-{id(watch)}"  # its own name, so that two models can be loaded at a time
    ALL_ATTENTION_FUNCTIONS.register(watching, watch.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(watching, watch.mask)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    try:
        with attending(configs, watching):
            model(input_ids=tokens, position_ids=positions, use_cache=False)
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(watching, None)  # there is no public way to unregister
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(watching, None)
    return _judge(model, watch, others)


def _judge(model: Any, watch: Watch, others: Sequence[torch.nn.Module]) -> Anatomy:
    calls = watch.calls
    if not calls:
        raise ModelError(
            "it does not use transformers' attention interface (recurrent state, or an attention of its own)"
        )
    if len({id(call.module) for call in calls}) < len(calls):
        raise ModelError("some of its layers share one attention module")
    holder, attribute, layers = _layers(model, [call.module for call in calls], others)
    shared, sites = Forward(), list[tuple[torch.nn.Module, Site]]()
    for i, call in enumerate(calls):
        for name, value in call.extras.items():
            unset = value is None or value is False or (name == "dropout" and value == 0.0)
            unset = unset or (name == "is_causal" and value is True)
            if name not in _HARMLESS and not unset:
                raise ModelError(f"its attention has an extra that is not supported: {name}")
        if not getattr(call.module, "is_causal", True):
            raise ModelError("its attention is not causal")
        sites.append((call.module, Site(shared, i, watch.window(call))))
    shapes, scales = tuple(call.shape for call in calls), tuple(call.scale for call in calls)
    return Anatomy(shapes, calls[0].dtype, holder, attribute, layers, scales, shared, tuple(sites))


def _layers(
    model: torch.nn.Module, attention: list[torch.nn.Module], others: Sequence[torch.nn.Module]
) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """The list of decoder layers: the ModuleList whose children hold one of the attention modules each, in order, or
    one of the ``others``."""
    first = attention[0]
    for holder in model.modules():
        for attribute, child in holder.named_children():
            if not isinstance(child, torch.nn.ModuleList) or not any(first is m for m in child.modules()):
                continue
            attends = 0
            for i, layer in enumerate(child):
                inside = {id(m) for m in layer.modules()}
                inner = [j for j, module in enumerate(attention) if id(module) in inside]
                if inner == [attends]:
                    attends += 1
                elif inner or not any(id(module) in inside for module in others):
                    raise ModelError(
                        f"layer {i} ({type(layer).__name__}) has no attention of its own (recurrent state or linear "
                        f"attention), which cannot be rolled back"
                    )
            return holder, attribute, child
    raise ModelError("its decoder layers could not be found")
