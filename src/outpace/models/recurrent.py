"""Recurrent layers as data: their sizes, and which layers are such, from GGUF metadata or config.json.

Beside them, which layers only feed forward, where a layer either mixes tokens or does that.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from outpace.models import architecture
from outpace.models.architecture import ATTENDING, Family
from outpace.models.weights.facts import Facts, brief

_Kind = TypeVar("_Kind", bound="DeltaNet | ShortConv")
MOST_LAYERS = 1 << 12
_MIXERS = ("full_attention", "linear_attention")  # of layers with and without recurrence
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_MOST_HEADS, _MOST_TAPS = 1 << 12, 8  # native/model/weights.h
_STATE_COLUMNS = 32  # of a tile of a state; native/kernels/table.h


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta nets: a state of ``key_dim`` x ``value_dim`` for each of ``value_heads``, which share ``key_heads``.

    ``taps``: of the convolution before them. ``tiled``: value head i reads key head i modulo ``key_heads``, where
    otherwise neighbours share one.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class StateSpace(DeltaNet):
    """State spaces (Mamba-2): ``key_heads`` groups of B and C, of ``key_dim`` numbers each.

    ``width``: of a head, which is padded with zeros to ``value_dim``. ``normed``: what they give has a norm.
    ``beside``: of layers that attend, too.
    """

    width: int = 0
    normed: bool = True
    beside: bool = False


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Short convolutions over so many ``taps``, as wide as the model."""

    taps: int


def from_config(facts: Facts, family: Family, layers: int) -> tuple[DeltaNet | ShortConv | None, tuple[bool, ...]]:
    """What a folder's recurrent layers are, and which layers are such."""
    if family.conv is not None:
        listed, attend = facts.get("layer_types"), facts.get("full_attn_idxs")
        if listed is None:
            listed = ["full_attention" if attend is None or i in attend else "conv" for i in range(layers)]
        known = ("conv", "full_attention")
        if not isinstance(listed, list) or len(listed) != layers or any(kind not in known for kind in listed):
            raise facts.fail("layer_types must name full_attention or conv for each layer")
        convolved = tuple(kind == "conv" for kind in listed)
        return _attending(facts, ShortConv(facts.whole("conv_L_cache", most=_MOST_TAPS)), convolved)
    if family.scan is not None:
        return _folder_scan(facts, family.scan, layers)
    if family.delta is None:
        return None, ()
    kinds = facts.get("layer_types")
    if kinds is None:
        every = facts.whole("full_attention_interval", family.delta.attends_every)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _MIXERS for kind in kinds):
        raise facts.fail("layer_types must name full_attention or linear_attention for each layer")
    net = DeltaNet(
        key_heads=facts.whole("linear_num_key_heads", most=_MOST_HEADS),
        value_heads=facts.whole("linear_num_value_heads", most=_MOST_HEADS),
        key_dim=facts.whole("linear_key_head_dim", most=_MOST_HEADS),
        value_dim=facts.whole("linear_value_head_dim", most=_MOST_HEADS),
        taps=facts.whole("linear_conv_kernel_dim", most=_MOST_TAPS),
        tiled=False,
    )
    return _fitting(facts, net, tuple(kind == "linear_attention" for kind in kinds))


def _folder_scan(
    facts: Facts, rule: architecture.StateSpace, layers: int
) -> tuple[StateSpace | None, tuple[bool, ...]]:
    """What a folder's state spaces are, and which layers are such."""
    kinds = ["mamba"] * layers if rule.beside else facts.get("layer_types")
    scans = ("linear_attention", "mamba")
    known = (*scans, *ATTENDING, "mlp", "moe")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise facts.fail("layer_types must name mamba or attention for each layer")
    recurrent = tuple(kind in scans for kind in kinds)
    if not any(recurrent):
        return None, ()
    normed = rule.normed is None or bool(facts.get(rule.normed))
    if normed and rule.norm_first is not None and facts.get(rule.norm_first):
        raise facts.fail(
            f"its state spaces are normed before their gate ({rule.normed}, {rule.norm_first}), not behind it"
        )
    limit = facts.get("time_step_limit")
    if limit not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # transformers' spelling is the last
        raise facts.fail(f"it limits time steps (time_step_limit {brief(limit)})")
    heads = facts.whole(rule.heads, most=_MOST_HEADS)
    inner, said = 0, f"{rule.expand} times hidden_size"
    if rule.inner and facts.get(rule.inner) is not None:
        inner, said = facts.whole(rule.inner), rule.inner
    elif rule.expand:
        inner = facts.whole("hidden_size") * facts.whole(rule.expand)
    width = inner // heads if facts.get(rule.head_dim) == "auto" else facts.whole(rule.head_dim, most=_MOST_HEADS)
    if inner and width * heads != inner:
        raise facts.fail(f"its state spaces' {heads} heads of {width} are not {said}, {inner}")
    net = StateSpace(
        key_heads=facts.whole(rule.groups, most=_MOST_HEADS),
        value_heads=heads,
        key_dim=facts.whole(rule.state, most=_MOST_HEADS),
        value_dim=width + -width % _STATE_COLUMNS,
        taps=facts.whole(rule.taps, most=_MOST_TAPS),
        tiled=False,
        width=width,
        normed=normed,
        beside=rule.beside,
    )
    return _fitting(facts, net, recurrent)


def from_gguf(
    facts: Facts, family: Family, layers: int, keys: Any, fed: tuple[bool, ...], normed: bool
) -> tuple[DeltaNet | ShortConv | None, tuple[bool, ...]]:
    """What a GGUF file's recurrent layers are, and which layers are such: those whose number of ``keys`` is 0, where
    layers differ in it, and that are not ``fed``; all, where a state space stands beside attention. ``normed``: what
    state spaces give has a norm."""
    if family.conv is not None:
        if not isinstance(keys, np.ndarray) or len(keys) != layers:
            raise facts.fail(f"its {facts.prefix}attention.head_count_kv must have a number for each layer")
        taps = ShortConv(facts.whole("shortconv.l_cache", most=_MOST_TAPS))
        return _attending(facts, taps, tuple(int(n) == 0 for n in keys))
    if family.delta is None and family.scan is None:
        return None, ()
    if family.delta is not None:
        every = facts.whole("full_attention_interval", family.delta.attends_every)
        recurrent = tuple((i + 1) % every > 0 for i in range(layers))
    elif family.scan is not None and family.scan.beside:
        recurrent = (True,) * layers
    elif isinstance(keys, np.ndarray) and len(keys) == layers:
        recurrent = tuple(int(n) == 0 and not (fed and fed[i]) for i, n in enumerate(keys))
    else:
        raise facts.fail(f"its {facts.prefix}attention.head_count_kv must have a number for each layer")
    heads = facts.whole("ssm.time_step_rank", most=_MOST_HEADS)
    inner = facts.whole("ssm.inner_size")
    if inner % heads:
        raise facts.fail(f"its ssm.inner_size of {inner} is not shared by {heads} heads (ssm.time_step_rank)")
    width = inner // heads
    net = DeltaNet(
        key_heads=facts.whole("ssm.group_count", most=_MOST_HEADS),
        value_heads=heads,
        key_dim=facts.whole("ssm.state_size", most=_MOST_HEADS),
        value_dim=width,
        taps=facts.whole("ssm.conv_kernel", most=_MOST_TAPS),
        tiled=family.delta is not None and family.delta.tiled,
    )
    if family.scan is not None:
        padded = {**asdict(net), "value_dim": width + -width % _STATE_COLUMNS}
        net = StateSpace(**padded, width=width, normed=normed, beside=family.scan.beside)
    return _fitting(facts, net, recurrent)


def gguf_fed(facts: Facts, family: Family, layers: int, keys: Any, inners: Any) -> tuple[bool, ...]:
    """Of a file whose layers either mix tokens or feed them forward: which do that."""
    if not family.single:
        return ()
    if any(not isinstance(each, np.ndarray) or len(each) != layers for each in (keys, inners)):
        raise facts.fail("attention.head_count_kv and feed_forward_length must have a number for each layer")
    if any(n and inner for n, inner in zip(keys, inners, strict=True)):
        raise facts.fail(
            "a layer of it has attention and a feed-forward (attention.head_count_kv, feed_forward_length)"
        )
    return tuple(int(inner) > 0 for inner in inners)


def single_layers(facts: Facts) -> dict[str, Any]:
    """How many layers a folder has that either mix tokens or feed them forward, and the kind of each."""
    kinds, pattern = facts.get("layers_block_type"), facts.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter) for letter in pattern]
    known = {*_LETTERS.values(), "mamba", "attention"}
    if not isinstance(kinds, list) or not kinds or len(kinds) > MOST_LAYERS or set(kinds) - known:
        raise facts.fail("layers_block_type must name mamba, attention, mlp or moe for each layer")
    return {"num_hidden_layers": len(kinds), "layer_types": kinds}


def _fitting(facts: Facts, net: _Kind, recurrent: tuple[bool, ...]) -> tuple[_Kind, tuple[bool, ...]]:
    """Both, if they can be. Raises ModelError."""
    assert isinstance(net, DeltaNet)
    if net.value_heads % net.key_heads or net.key_dim % 16 or net.value_dim % 32:
        raise facts.fail(
            f"recurrent layers of {net.key_heads} key heads of {net.key_dim} and {net.value_heads} value heads of "
            f"{net.value_dim} are not supported: sizes must be multiples of 16 and 32, and heads share evenly"
        )
    return _attending(facts, net, recurrent)


def _attending(facts: Facts, kind: _Kind, recurrent: tuple[bool, ...]) -> tuple[_Kind, tuple[bool, ...]]:
    """Both, if some layer attends. Raises ModelError."""
    if all(recurrent) and not (isinstance(kind, StateSpace) and kind.beside):
        raise facts.fail(f"none of its {len(recurrent)} layers has attention (full_attention_interval, layer_types)")
    return kind, recurrent
