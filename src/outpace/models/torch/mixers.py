"""What recurrent layers compute in the place of attention or beside it, on the weights of a transformers module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.errors import ModelError
from outpace.models import architecture, families
from outpace.models.architecture import ATTENDING, FEEDING, SPELLINGS
from outpace.models.torch.kv import TorchKV
from outpace.models.torch.recurrent import StateShape, Step

Join = Callable[[Sequence[torch.nn.Linear]], Callable[[Tensor], Tensor]]  # their products, one behind the other


def beside(modules: Sequence[torch.nn.Linear]) -> Callable[[Tensor], Tensor]:
    """See ``Join``: by the modules as they are."""
    return modules[0] if len(modules) == 1 else lambda x: torch.cat([each(x) for each in modules], 1)


class _Mixer:
    """What transformers' recurrent ``module`` computes, number ``place`` of such. ``shape``: of one layer."""

    shape: StateShape

    def __init__(self, module: Any, place: int, inner: Sequence[torch.nn.Linear], conv: Any, join: Join) -> None:
        self.module, self._place, self._conv = module, place, conv
        self.products = join(inner), join([module.out_proj])

    def _convolved(self, step: Step, x: Tensor) -> Tensor:
        """float32 [N, channels] of ``x`` [N, channels]."""
        mixed = step.convolved(self._place, x.float(), self._conv.weight[:, 0].float().t())
        return mixed if self._conv.bias is None else mixed + self._conv.bias.float()

    def _activated(self, step: Step, x: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        mixed: Tensor = ACT2FN[self.module.activation](self._convolved(step, x).to(x.dtype))
        return mixed.float()  # rounded where transformers rounds


class DeltaNet(_Mixer):
    """A gated delta net (arXiv 2412.06464) with its projections."""

    def __init__(self, module: Any, place: int, join: Join) -> None:
        self._woven = hasattr(module, "in_proj_qkvz")  # rows stand by key head
        names = ("qkvz", "ba") if self._woven else ("qkv", "z", "b", "a")
        inner = [getattr(module, f"in_proj_{name}") for name in names]
        super().__init__(module, place, inner, module.conv1d, join)
        self._rows = [len(each.weight) for each in inner]
        self.shape = StateShape(
            1, module.conv_kernel_size, module.conv_dim, module.num_k_heads, module.num_v_heads, module.head_k_dim,
            module.head_v_dim,
        )  # fmt: skip

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """[N, H] of ``x`` [N, H]."""
        shape, dim = self.shape, self.shape.key_dim
        qkv, z, b, a = self._projected(x)
        query, key, value = self._activated(step, qkv).split([*(2 * [shape.key_heads * dim]), z.shape[1]], 1)
        query, key = (_unit(each.view(-1, shape.key_heads, dim)) for each in (query, key))
        value = value.view(-1, shape.value_heads, shape.value_dim)
        decay = _decay(self.module, F.softplus(a.float() + self.module.dt_bias.float()))
        out = step.gone_over(self._place, query * dim**-0.5, key, value, torch.sigmoid(b).float(), decay)
        normed = self.module.norm(out.to(x.dtype).reshape(-1, shape.value_dim), z.reshape(-1, shape.value_dim))
        return self.products[1](normed.view(len(x), -1))

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        found, shape = list(self.products[0](x).split(self._rows, 1)), self.shape
        if not self._woven:
            return found
        each = shape.value_heads // shape.key_heads  # by key head: its queries, keys, values, gates; b, a
        wide = each * shape.value_dim
        q, k, v, z = found[0].view(len(x), shape.key_heads, -1).split([shape.key_dim, shape.key_dim, wide, wide], 2)
        b, a = found[1].view(len(x), shape.key_heads, -1).split([each, each], 2)
        return torch.cat([part.flatten(1) for part in (q, k, v)], 1), z.flatten(1), b.flatten(1), a.flatten(1)


class ShortConv(_Mixer):
    """A short convolution between two gates."""

    def __init__(self, module: Any, place: int, join: Join) -> None:
        super().__init__(module, place, [module.in_proj], module.conv, join)
        self.shape = StateShape(1, module.conv_kernel_size, module.out_proj.in_features)

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """[N, H] of ``x`` [N, H]."""
        before, behind, inner = self.products[0](x).chunk(3, 1)
        return self.products[1](behind * self._convolved(step, before * inner).to(x.dtype))


class StateSpace(_Mixer):
    """A state space (Mamba-2, arXiv 2405.21060) with its projections."""

    def __init__(self, module: Any, place: int, join: Join) -> None:
        super().__init__(module, place, [module.in_proj], module.conv1d, join)
        self.shape = StateShape(
            1, module.conv_kernel_size, module.conv_dim, module.n_groups, module.num_heads, module.ssm_state_size,
            module.head_dim,
        )  # fmt: skip

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """[N, H] of ``x`` [N, H]."""
        shape, own = self.shape, self.module
        keys, inner = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        multiplied = hasattr(own, "mup_vector")  # Falcon-H1's
        projected = self.products[0](x * own.ssm_in_multiplier if multiplied else x)
        if multiplied:
            projected = projected * own.mup_vector[0]
        gate, mixed, dt = projected.split([inner, shape.channels, shape.value_heads], 1)
        value, key, query = self._activated(step, mixed).split([inner, keys, keys], 1)
        key, query = (each.view(-1, shape.key_heads, shape.key_dim) for each in (key, query))
        value = value.view(-1, shape.value_heads, shape.value_dim)
        dt = F.softplus(dt.float() + own.dt_bias.float())
        out = step.gone_over(self._place, query, key, value, dt, _decay(own, dt), corrects=False)
        out = (out + own.D.float()[:, None] * value).flatten(1).to(x.dtype)
        normed = not isinstance(getattr(own, "norm", None), torch.nn.Identity | None)
        return self.products[1]((own.norm(out, gate) if normed else out * F.silu(gate)).to(x.dtype))


Mixer = DeltaNet | ShortConv | StateSpace
_MAKE: dict[type, Any] = {
    architecture.DeltaNet: DeltaNet,
    architecture.ShortConv: ShortConv,
    architecture.StateSpace: StateSpace,
}


def _decay(module: Any, step: Tensor) -> Tensor:
    """What a state keeps [N, value_heads] over time steps [N, value_heads]."""
    return torch.exp(-torch.exp(module.A_log.float()) * step)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def mixers(module: Any, join: Join = beside) -> tuple[Mixer, ...]:
    """Those of ``module``'s layers that are recurrent, in their order; none where its family has none. Raises
    ModelError for the model around such a family that reads images, too."""
    name = type(module).__name__
    text = next((each for each in families.FAMILIES if each.transformers == families.WRAPPERS.get(name, "")), None)
    if text is not None and text.recurrent is not None:
        raise ModelError(
            f"it reads images, too, and its recurrent layers are served of its part for text alone: load that "
            f"({text.model}; AutoModelForCausalLM does)"
        )
    family = families.of_class(name)
    rule = None if family is None else family.recurrent
    if rule is None:
        return ()
    layers = [i for i, kind in enumerate(module.config.layer_types) if kind not in (*ATTENDING, *FEEDING)]
    limit = getattr(module.config, "time_step_limit", None)
    if layers and isinstance(rule, architecture.StateSpace) and limit is not None and tuple(limit) != (0.0, math.inf):
        raise ModelError(f"it limits time steps (time_step_limit {tuple(limit)})")
    holder = SPELLINGS[1].format("{}", rule.matrices["o"][1].rpartition(".")[0])
    modules = [module.get_submodule(holder.format(layer)) for layer in layers]
    return tuple(_MAKE[type(rule)](each, place, join) for place, each in enumerate(modules))


def in_attentions_place(module: Any, found: Sequence[Mixer]) -> list[Any]:
    """Modules that layers have in the place of attention: recurrent ones, and of layers that only feed forward all."""
    family = families.of_class(type(module).__name__)
    modules = [each.module for each in found]
    if family is not None and family.single:
        kinds = module.config.layer_types
        modules += [layer for kind, layer in zip(kinds, module.model.layers, strict=True) if kind in FEEDING]
    return modules


def attending_layers(module: Any) -> list[bool]:
    """Which layers of a module of a known family have attention."""
    family, count = families.of_class(type(module).__name__), len(module.model.layers)
    if family is None or family.recurrent is None:
        return [True] * count
    beside = family.scan is not None and family.scan.beside
    return [beside or kind in ATTENDING for kind in module.config.layer_types]


def state_shape(found: Sequence[Mixer]) -> StateShape | None:
    """What a row keeps for them; None: they are none."""
    return replace(found[0].shape, layers=len(found)) if found else None


@contextmanager
def mixing(found: Sequence[Mixer], kv: TorchKV) -> Iterator[None]:
    """Modules of recurrent layers go over the states of ``kv``, and compute as before afterwards."""
    try:
        for each in found:
            each.module.forward = _forward(each, kv.step)
        yield
    finally:
        for each in found:
            vars(each.module).pop("forward", None)


def _forward(mixer: Mixer, step: Any) -> Any:
    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return mixer(step, hidden_states[0])[None]

    return forward
