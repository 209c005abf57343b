"""What a transformers module is at a moment, so that a change of it is seen before its copied weights are used.

Compared before every call of a patched ``generate``, so it must cost little beside a forward: versions and addresses of
all tensors, a sample of their numbers, and the modules' classes and plain attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str)
_SEVERAL = (list, tuple, set, frozenset, dict)
_MOST = 64  # values of one attribute that are compared
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Hooks that transformers installs on all layers once somebody asks for hidden states: idle unless somebody does.
_IDLE_HOOKS = "transformers.utils.output_capturing"


class ModuleState:
    """``module`` as it is now; keeps none of it alive."""

    def __init__(self, module: Any) -> None:
        self._parts, self._tensors, self._facts = _described(module)
        self._samples = _samples(module)

    def same(self, module: Any) -> bool:
        """Whether ``module`` computes what it did, as far as can be seen: unseen are changes through ``.data`` that
        leave every row and column of a weight mostly as it was, and attributes that are neither tensors, nor plain, nor
        a few plain ones together."""
        parts, tensors, facts = _described(module)
        before, now = (*self._parts, *self._tensors), (*parts, *tensors)
        if facts != self._facts or len(before) != len(now):
            return False
        if any(a() is not b() for a, b in zip(before, now, strict=True)):
            return False
        samples = _samples(module)
        return all(torch.equal(own, samples[kind]) for kind, own in self._samples.items())


def hooked(module: Any) -> bool:
    """Whether something watches or changes what goes into or comes out of a part of ``module``."""
    return any(
        getattr(hook, "__module__", None) != _IDLE_HOOKS
        for part in module.modules()
        for hooks in (part._forward_hooks, part._forward_pre_hooks)
        for hook in hooks.values()
    )


def own_generate_only(module: Any) -> str | None:
    """What only ``module``'s own generate does, as things stand; None: ours gives the same tokens."""
    from transformers.generation import GenerationMixin

    every = torch.nn.modules.module
    if any(part.training for part in module.modules()):
        return "a model in training mode, where dropout is on"
    if hooked(module) or every._global_forward_hooks or every._global_forward_pre_hooks:
        return "forward hooks on the model, which would see drafts"
    if any(part._compiled_call_impl is not None for part in module.modules()):
        return "a compiled model"
    if torch.is_autocast_enabled(module.device.type):
        return "torch.autocast"
    replaced = [name for name in vars(module) if name != "generate" and hasattr(GenerationMixin, name)]
    return f"a {replaced[0]} of the model's own" if replaced else None


def _held(module: Any) -> Iterator[Tensor]:
    """Its parameters and buffers, shared ones once a holder."""
    for part in module.modules():
        for holder in (part._parameters, part._buffers):
            yield from (tensor for tensor in holder.values() if tensor is not None)


def _described(module: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Weak references to its modules and to its tensors, and what can be compared of both."""
    parts, facts = [], list[Any]()
    for part in module.modules():
        parts.append(weakref.ref(part))
        facts.append(type(part))
        facts += _plain_values(part)
        facts += [id(vars(part).get("forward")), id(getattr(type(part), "forward", None))]
    facts += _plain_values(module.config)
    tensors = []
    for tensor in _held(module):
        tensors.append(weakref.ref(tensor))
        version = _version(tensor)
        address = tensor.data_ptr() if _plain(tensor) else None
        facts.append((version, address, tensor.dtype, tensor.device, tensor.shape))
    return parts, tensors, facts


def _version(tensor: Any) -> int | None:
    """How often torch saw it change; None where torch does not count, as of tensors made in inference mode."""
    try:
        return None if tensor.is_inference() else int(tensor._version)
    except RuntimeError:
        return None


def _plain_values(holder: Any) -> list[Any]:
    """Plain attributes, and lists, sets and dicts of such, which may name the adapter at work and its scale."""
    found: list[Any] = []
    for name, value in vars(holder).items():
        if type(value) in _PLAIN:
            found.append(value)
        elif type(value) in _SEVERAL and 0 < len(value) <= _MOST:
            every = [*value, *value.values()] if isinstance(value, dict) else value
            if all(type(each) in _PLAIN for each in every):
                found.append((name, repr(value)))
    return found


def _plain(tensor: Tensor) -> bool:
    """Whether it holds its numbers itself, unlike one of a subclass or of the device "meta"."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _samples(module: Any) -> dict[tuple[torch.device, int], Tensor]:
    """Bits of some numbers of every tensor, by device and size: at least one of each row and one of each column, since
    a change through ``.data`` raises no version."""
    found: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in _held(module):
        bits = _BITS.get(tensor.dtype.itemsize)
        if bits is None or not tensor.numel() or not _plain(tensor):
            continue
        flat, width = tensor.detach().reshape(-1), tensor.shape[-1] if tensor.dim() > 1 else 1
        step = max(1, min(len(flat) // width, width))
        while gcd(step, width) > 1:
            step -= 1
        found.setdefault((tensor.device, tensor.dtype.itemsize), []).append(flat[::step].view(bits))
    return {kind: torch.cat(each) for kind, each in found.items()}
