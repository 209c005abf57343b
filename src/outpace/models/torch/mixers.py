"""What recurrent layers compute in the place of attention, on the weights of a transformers module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.errors import ModelError
from outpace.models import families
from outpace.models.families import SPELLINGS
from outpace.models.torch.kv import TorchKV
from outpace.models.torch.recurrent import StateShape, Step

Join = Callable[[Sequence[torch.nn.Linear]], Callable[[Tensor], Tensor]]  # their products, one behind the other


def beside(modules: Sequence[torch.nn.Linear]) -> Callable[[Tensor], Tensor]:
    """See ``Join``: by the modules as they are."""
    return modules[0] if len(modules) == 1 else lambda x: torch.cat([each(x) for each in modules], 1)


class DeltaNet:
    """A gated delta net (arXiv 2412.06464) with its projections: number ``layer`` of all layers, ``place`` of the
    recurrent ones."""

    def __init__(self, module: Any, rule: families.DeltaNet, layer: int, place: int, join: Join) -> None:
        from transformers.activations import ACT2FN

        def find(name: str) -> Any:
            return module.get_submodule(SPELLINGS[1].format(layer, name))

        def tensor(places: families.Places) -> Tensor:
            owner, _, name = places[1][0].rpartition(".")
            found: Tensor = getattr(find(owner), name)
            return found

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

    def __init__(self, module: Any, rule: families.ShortConv, layer: int, place: int, join: Join) -> None:
        def find(name: str) -> Any:
            return module.get_submodule(SPELLINGS[1].format(layer, name))

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


Mixer = DeltaNet | ShortConv


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
    layers = [i for i, attends in enumerate(attending_layers(module)) if not attends]
    if layers and isinstance(rule, families.StateSpace):
        raise ModelError("it has state spaces, which the native backend alone has")
    make: Any = DeltaNet if isinstance(rule, families.DeltaNet) else ShortConv
    return tuple(make(module, rule, layer, place, join) for place, layer in enumerate(layers))


def attending_layers(module: Any) -> list[bool]:
    """Which layers of a module of a known family have attention."""
    family, count = families.of_class(type(module).__name__), len(module.model.layers)
    if family is None or family.recurrent is None:
        return [True] * count
    return [kind in families.ATTENDING for kind in module.config.layer_types]


def state_shape(module: Any, found: Sequence[Mixer]) -> StateShape | None:
    """What a row keeps for them; None: they are none."""
    if not found:
        return None
    config = module.config
    if isinstance(found[0], DeltaNet):
        return delta_shape(config, len(found))
    return StateShape(len(found), int(config.conv_L_cache), int(config.hidden_size))


def delta_shape(config: Any, layers: int) -> StateShape:
    keys, values = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    key_dim, value_dim = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
    channels = 2 * keys * key_dim + values * value_dim
    return StateShape(layers, int(config.linear_conv_kernel_dim), channels, keys, values, key_dim, value_dim)


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
