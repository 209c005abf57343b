"""Our own forward of the families that ``models.families`` describes, on the weights of a transformers module.

Few, large operations on packed tokens [N]: fused projections, repacked for the CPU's matrix kernels where torch has
them, so that a step of few tokens costs little more than reading the weights.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.common.allocator import huge
from outpace.models import families
from outpace.models.architecture import ATTENDING, KEYS, SPELLINGS, Family
from outpace.models.decoder import ACTIVATIONS
from outpace.models.torch import attention, between
from outpace.models.torch.attention import CLOSE, Plan, able
from outpace.models.torch.between import Norm, Table
from outpace.models.torch.mixers import Mixer, attending_layers, mixers
from outpace.models.torch.state import hooked

log = logging.getLogger(__name__)
TOKENS = 8  # the width that weights are repacked for
# The tensor in which a linear module's weights lie beside others'.
_JOINED: weakref.WeakKeyDictionary[torch.nn.Linear, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()


def apart(module: Any) -> None:
    """Give every weight of ``module`` that was joined with others memory of its own again, as files that are saved
    from it want."""
    for part in module.modules():
        if _JOINED.pop(part, None) is not None:
            part.weight.data = part.weight.data.clone()


class Projection:
    """One product with the rows of several linear modules, in their order."""

    def __init__(self, modules: Sequence[torch.nn.Linear]) -> None:
        weights, biases = [m.weight.detach() for m in modules], [m.bias for m in modules if m.bias is not None]
        self.rows = [len(weight) for weight in weights]
        self._bias = torch.cat(list(biases)) if biases else None
        self._packed: Tensor | None = None
        weight = _JOINED.get(modules[0], lambda: None)()  # another decoder's, of this very module
        if weight is not None and len(weight) != sum(self.rows):  # the module was resized since
            weight = None
        if weight is None or [p.data_ptr() for p in weight.split(self.rows)] != [w.data_ptr() for w in weights]:
            weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if weight.device.type == "cpu" and _repacks(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
            return
        self._weight = weight
        if weight.data_ptr() != weights[0].data_ptr():  # the modules read the same memory
            for module, part in zip(modules, weight.split(self.rows), strict=True):
                module.weight.data = part
                _JOINED[module] = weakref.ref(weight)

    def settle(self) -> None:
        """Put repacked weights into huge pages: reading them is most of a step."""
        if self._packed is not None:
            huge(torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed))

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def _repacks(dtype: torch.dtype) -> bool:
    """Whether this CPU's matrix kernels take repacked weights of ``dtype``: bfloat16 wants AVX-512 or newer."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    bf16 = dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bf16 or dtype == torch.float32


class _Layer:
    """One layer's parts: its norms by ``NORMS``, None where it has none. ``mixer``: in attention's place."""

    def __init__(self, module: Any, index: int, family: Family, eps: float, place: int, mixer: Mixer | None) -> None:
        def find(part: str) -> Any:
            return module.get_submodule(SPELLINGS[1].format(index, family.layer[part][1]))

        def norm(part: str) -> Norm | None:
            left_out = part not in family.layer or (mixer is not None and part in ("q_norm", "k_norm"))
            return None if left_out else Norm(find(part), family.norm_offset, eps)

        def together(*parts: str) -> Projection:
            names = dict.fromkeys(family.layer[part][1] for part in parts)
            return Projection([module.get_submodule(SPELLINGS[1].format(index, name)) for name in names])

        self.place, self.mixer = place, mixer  # among the layers that attend
        if mixer is None:
            self.qkv, self.o = together("q", "k", "v"), together("o")
        self.gate_up, self.down = together("gate", "up"), together("down")
        self.attn_norm, self.post_attn_norm = norm("attn_norm"), norm("post_attn_norm")
        self.ffn_norm, self.post_ffn_norm = norm("ffn_norm"), norm("post_ffn_norm")
        self.q_norm, self.k_norm = norm("q_norm"), norm("k_norm")


class OwnDecoder:
    """The forward of a module that ``described`` takes. ``windows``, ``scales``: by layer that attends, as its
    attention has them.

    Weights are read when this is made.
    """

    def __init__(self, module: Any, windows: Sequence[int | None], scales: Sequence[float]) -> None:
        family = families.of_class(type(module).__name__)
        assert family is not None
        config = module.config
        self._family, self._windows, self._scales = family, windows, scales
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or self._heads)
        names = {ours: theirs for theirs, ours in family.aliases.items()}
        eps = float(getattr(config, names.get(KEYS["eps"][1], KEYS["eps"][1])))

        def factor(name: str) -> float:
            return float(getattr(config, KEYS[name][1])) if name in family.scales else 1.0

        self._embedding, self._rotary = module.get_input_embeddings(), module.model.rotary_emb
        self._embedding_scale = factor("embedding_scale")  # beyond what the embedding's module does
        self._residual, self._divisor = factor("residual_scale"), factor("logit_divisor")
        kinds = getattr(config, "layer_types", None) or []
        attends = attending_layers(module)
        self._kinds = list(kinds) if len(family.ropes) > 1 else [None] * len(attends)
        self._rotated = config.no_rope_layers if family.unrotated_every else [1] * len(attends)
        recurrent, place = iter(mixers(module, Projection)), iter(range(len(windows)))
        self._layers = [
            _Layer(module, i, family, eps, next(place) if own else -1, None if own else next(recurrent))
            for i, own in enumerate(attends)
        ]
        self._norm = Norm(module.get_submodule(family.outer["final_norm"][1]), family.norm_offset, eps)
        self._head = Projection([module.get_output_embeddings()])
        parts = [p for layer in self._layers for p in vars(layer).values()]
        products = [p for layer in self._layers if layer.mixer is not None for p in layer.mixer.products]
        for each in (self._head, *parts, *products):
            if isinstance(each, Projection):
                each.settle()

    def __call__(
        self, plan: Plan, layers: int, features: Tensor | None, kept: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [M, V] of the plan's wanted tokens, and the outputs [N, H] of the layers in ``kept``.

        ``layers``: run the first so many. ``features`` [N, H]: added to what enters the first one.
        """
        x = self._embedding(plan.tokens)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if features is not None:
            x = x + features.to(x.dtype)
        tables = {kind: self._table(x, plan.positions, kind) for kind in set(self._kinds)}
        found: dict[int, Tensor] = {}
        norms = [*(layer.attn_norm for layer in self._layers[:layers]), self._norm]
        normed = _applied(norms[0], x)
        ops = _operations(x.device, x.dtype)
        for i, layer in enumerate(self._layers[:layers]):
            if layer.mixer is None:
                mixed = self._attend(i, layer, plan, normed, tables, ops)
            else:
                assert plan.kv.step is not None
                mixed = layer.mixer(plan.kv.step, normed)
            x, normed = ops.added(x, _applied(layer.post_attn_norm, mixed), self._residual, layer.ffn_norm)
            inner = layer.down(ops.gated(layer.gate_up(normed), self._family.activation))
            x, normed = ops.added(x, _applied(layer.post_ffn_norm, inner), self._residual, norms[i + 1])
            if i in kept:
                found[i] = x
        if plan.wanted is not None:
            normed = normed.index_select(0, plan.wanted)
        logits = self._head(normed)
        return (logits if self._divisor == 1.0 else logits / self._divisor), found

    def _table(self, x: Tensor, positions: Tensor, kind: str | None) -> Table:
        """Cosines and signed sines [N, 1, width]."""
        cos, sin = self._rotary(x[None], positions[None], *([] if kind is None else [kind]))
        half = sin.shape[-1] // 2
        return cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)

    def _attend(
        self, i: int, layer: _Layer, plan: Plan, x: Tensor, tables: dict[str | None, Table], ops: Any
    ) -> Tensor:
        qkv, heads, place = layer.qkv(x), self._heads, layer.place
        q_norm, k_norm = layer.q_norm, layer.k_norm
        gate: Tensor | None = None
        if self._family.gated:
            width = qkv.shape[1] // (2 * (heads + self._kv_heads))
            both, kv = qkv.split([2 * heads * width, 2 * self._kv_heads * width], -1)
            q, gate = both.view(len(x), heads, 2 * width).split(width, -1)
            qkv = torch.cat([q.flatten(1), kv], -1)
        if q_norm is not None and k_norm is not None and self._family.norms_over_heads:
            width = qkv.shape[1] // (heads + 2 * self._kv_heads)
            q, k, v = qkv.split([heads * width, self._kv_heads * width, self._kv_heads * width], -1)
            qkv, q_norm, k_norm = torch.cat([q_norm(q), k_norm(k), v], -1), None, None
        table = tables[self._kinds[i]] if self._rotated[i] else None
        query = ops.placed(qkv, heads, q_norm, k_norm, table, plan.kv.keys[place], plan.kv.values[place], plan.write)
        mixed = attention.mixed(place, plan, query, scale=self._scales[place], window=self._windows[place])
        return layer.o((mixed if gate is None else mixed * torch.sigmoid(gate)).flatten(1))


def _applied(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


@cache
def _operations(device: torch.device, dtype: torch.dtype) -> Any:
    """What has ``added``, ``gated`` and ``placed``: ``fused`` where it runs and agrees with ``between``, which is
    what runs elsewhere."""
    if not able(device, dtype):
        return between
    try:
        from outpace.models.torch import fused

        for ours, expected in zip(_tried(fused, device, dtype), _tried(between, device, dtype), strict=True):
            torch.testing.assert_close(ours, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    except Exception as error:  # a compiler's, a driver's
        log.warning("the kernels between products are off, which costs speed: %s", error)
        return between
    return fused


def _tried(module: ModuleType, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    def line(*size: int) -> Tensor:
        return torch.linspace(-1, 1, torch.Size(size).numel(), device=device, dtype=dtype).view(size)

    norm = Norm(torch.nn.RMSNorm(96, device=device, dtype=dtype), 0.5, 1e-6)
    found = [*module.added(line(3, 96), line(3, 96), 0.5, norm), module.gated(line(3, 128), "silu")]
    found.append(module.gated(line(3, 128), "gelu"))
    keys, values, write = line(2, 8, 96), line(2, 8, 96), torch.tensor([5, 1, 2], device=device)
    table = line(3, 1, 64), line(3, 1, 64)
    return [*found, module.placed(line(3, 8 * 96), 4, norm, norm, table, keys, values, write), keys, values]


def described(module: Any) -> bool:
    """Whether ``OwnDecoder`` computes what ``module`` does: a known class, plain layers and weights, no hooks."""
    family = families.of_class(type(module).__name__)
    config = module.config
    if (
        family is None
        or family.modules
        or (family.mixture is not None and not (family.mixture.optional and not getattr(config, family.mixture.count)))
        or (family.scan is not None and set(config.layer_types) - {*ATTENDING})
        or (family.rotates_if is not None and getattr(config, family.rotates_if[0]) != family.rotates_if[1])
        or family.grows
        or any(getattr(config, key, None) for key in family.refuses if key != "mlp_bias")
    ):
        return False
    if families.unmet(family, lambda key: getattr(config, key, None)) is not None:
        return False
    activation = family.activation if family.activation_key is None else getattr(config, family.activation_key)
    if ACTIVATIONS.get(str(activation)) != family.activation:
        return False  # the proof does not tell two forms of GELU from each other
    if getattr(config, "quantization_config", None) is not None:
        return False
    changed = hooked(module) or any("forward" in vars(m) for m in module.modules())
    inside = [m for layer in module.model.layers for m in layer.modules() if hasattr(m, "weight")]
    usual = (torch.nn.Linear, *([torch.nn.Conv1d] if family.recurrent is not None else []))
    plain = all(type(m) in usual or type(m).__module__.startswith("transformers.models.") for m in inside)
    plain &= all(type(p) is torch.nn.Parameter and type(p.data) is Tensor for p in module.parameters())
    one = len({p.device for p in module.parameters()}) == 1
    return plain and one and not changed and type(module.get_output_embeddings()) is torch.nn.Linear
