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


class DeltaNet:
    """A gated delta net (arXiv 2412.06464) with its projections: number ``layer`` of all layers, ``place`` of the
    recurrent ones."""

    def __init__(self, module: Any, rule: architecture.DeltaNet, layer: int, place: int, join: Join) -> None:
        from transformers.activations import ACT2FN

        find, tensor = _finders(module, layer)
        config = module.config
        self._place, self.shape = place, delta_shape(config, 0)
        names = dict.fromkeys(rule.matrices[part][1] for part in ("qkv", "z", "b", "a"))
        projections, out = [find(name) for name in names], find(rule.matrices["o"][1])
        self.products = join(projections), join([out])
        self._rows = [len(each.weight) for each in projections]
        self.module = find(rule.matrices["o"][1].rpartition(".")[0])
        self._woven, self._activation = len(names) == 2, ACT2FN[self.module.activation]
        self._weight, self._decay, self._bias = tensor(rule.convolution), tensor(rule.decay), tensor(rule.dt_bias)
        self._norm = find(rule.norm[1][0].rpartition(".")[0])

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """[N, H] of ``x`` [N, H]."""
        shape, dim = self.shape, self.shape.key_dim
        qkv, z, b, a = self._projected(x)
        mixed = step.convolved(self._place, qkv.float(), self._weight[:, 0].float().t())
        mixed = self._activation(mixed.to(x.dtype)).float()  # rounded where transformers rounds
        query, key, value = mixed.split([*(2 * [shape.key_heads * dim]), shape.value_heads * shape.value_dim], 1)
        query, key = (_unit(each.view(-1, shape.key_heads, dim)) for each in (query, key))
        value = value.view(-1, shape.value_heads, shape.value_dim)
        decay = torch.exp(-torch.exp(self._decay.float()) * F.softplus(a.float() + self._bias.float()))
        out = step.gone_over(self._place, query * dim**-0.5, key, value, torch.sigmoid(b).float(), decay)
        normed = self._norm(out.to(x.dtype).reshape(-1, shape.value_dim), z.reshape(-1, shape.value_dim))
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


class ShortConv:
    """A short convolution between two gates; arguments as ``DeltaNet``'s."""

    def __init__(self, module: Any, rule: architecture.ShortConv, layer: int, place: int, join: Join) -> None:
        find, _ = _finders(module, layer)
        self._place = place
        self.products = join([find(rule.matrices["in"][1])]), join([find(rule.matrices["o"][1])])
        self.module = find(rule.matrices["o"][1].rpartition(".")[0])
        self._conv = find(rule.convolution[1][0].rpartition(".")[0])

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """[N, H] of ``x`` [N, H]."""
        before, behind, inner = self.products[0](x).chunk(3, 1)
        mixed = step.convolved(self._place, (before * inner).float(), self._conv.weight[:, 0].float().t())
        if self._conv.bias is not None:
            mixed = mixed + self._conv.bias.float()
        return self.products[1](behind * mixed.to(x.dtype))


class StateSpace:
    """A state space (Mamba-2, arXiv 2405.21060) with its projections; arguments as ``DeltaNet``'s."""

    def __init__(self, module: Any, rule: architecture.StateSpace, layer: int, place: int, join: Join) -> None:
        from transformers.activations import ACT2FN

        find, tensor = _finders(module, layer)
        self._place, self.shape = place, scan_shape(module.config, rule, 0)
        self.products = join([find(rule.into[1])]), join([find(rule.o[1])])
        self.module = find(rule.o[1].rpartition(".")[0])
        self._activation = ACT2FN[self.module.activation]
        self._convolution = find(rule.convolution[1][0].rpartition(".")[0])
        self._decay, self._bias, self._skip = tensor(rule.decay), tensor(rule.dt_bias), tensor(rule.skip)
        norm = find(rule.norm[1][0].rpartition(".")[0])
        self._norm = None if isinstance(norm, torch.nn.Identity) else norm

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """[N, H] of ``x`` [N, H]."""
        shape = self.shape
        keys, inner = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        multiplied = hasattr(self.module, "mup_vector")  # Falcon-H1's
        projected = self.products[0](x * self.module.ssm_in_multiplier if multiplied else x)
        if multiplied:
            projected = projected * self.module.mup_vector[0]
        gate, mixed, dt = projected.split([inner, shape.channels, shape.value_heads], 1)
        mixed = step.convolved(self._place, mixed.float(), self._convolution.weight[:, 0].float().t())
        if self._convolution.bias is not None:
            mixed = mixed + self._convolution.bias.float()
        mixed = self._activation(mixed.to(x.dtype)).float()
        value, key, query = mixed.split([inner, keys, keys], 1)
        key, query = (each.view(-1, shape.key_heads, shape.key_dim) for each in (key, query))
        value = value.view(-1, shape.value_heads, shape.value_dim)
        dt = F.softplus(dt.float() + self._bias.float())
        decay = torch.exp(-torch.exp(self._decay.float()) * dt)
        out = step.gone_over(self._place, query, key, value, dt, decay, corrects=False)
        out = (out + self._skip.float()[:, None] * value).flatten(1).to(x.dtype)
        out = out * F.silu(gate) if self._norm is None else self._norm(out, gate)
        return self.products[1](out.to(x.dtype))


Mixer = DeltaNet | ShortConv | StateSpace
_MAKE: dict[type, Any] = {
    architecture.DeltaNet: DeltaNet,
    architecture.ShortConv: ShortConv,
    architecture.StateSpace: StateSpace,
}


def _finders(module: Any, layer: int) -> tuple[Callable[[str], Any], Callable[[architecture.Places], Tensor]]:
    """What gives a module of a layer by its name, and a tensor."""

    def find(name: str) -> Any:
        return module.get_submodule(SPELLINGS[1].format(layer, name))

    def tensor(places: architecture.Places) -> Tensor:
        owner, _, name = places[1][0].rpartition(".")
        found: Tensor = getattr(find(owner), name)
        return found

    return find, tensor


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
    kinds = module.config.layer_types
    layers = [i for i, kind in enumerate(kinds) if kind not in (*ATTENDING, *FEEDING)]
    if layers and isinstance(rule, architecture.StateSpace):
        _check_steps(module)
    return tuple(_MAKE[type(rule)](module, rule, layer, place, join) for place, layer in enumerate(layers))


def _check_steps(module: Any) -> None:
    """Raise ModelError for state spaces whose time steps are cut."""
    limit = getattr(module.config, "time_step_limit", None)
    if limit is not None and tuple(limit) != (0.0, math.inf):
        raise ModelError(f"it limits time steps (time_step_limit {tuple(limit)})")


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


def state_shape(module: Any, found: Sequence[Mixer]) -> StateShape | None:
    """What a row keeps for them; None: they are none."""
    if not found:
        return None
    config = module.config
    if isinstance(found[0], DeltaNet):
        return delta_shape(config, len(found))
    if isinstance(found[0], StateSpace):
        return replace(found[0].shape, layers=len(found))
    return StateShape(len(found), int(config.conv_L_cache), int(config.hidden_size))


def delta_shape(config: Any, layers: int) -> StateShape:
    keys, values = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    key_dim, value_dim = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
    channels = 2 * keys * key_dim + values * value_dim
    return StateShape(layers, int(config.linear_conv_kernel_dim), channels, keys, values, key_dim, value_dim)


def scan_shape(config: Any, rule: architecture.StateSpace, layers: int) -> StateShape:
    groups, heads, state, width, taps = (
        int(getattr(config, name)) for name in (rule.groups, rule.heads, rule.state, rule.head_dim, rule.taps)
    )
    return StateShape(layers, taps, heads * width + 2 * groups * state, groups, heads, state, width)


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


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
