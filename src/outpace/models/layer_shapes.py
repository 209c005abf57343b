"""Layers that differ in their heads, their values or where their keys come from: Gemma 4's, by both spellings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.models.weights.facts import Facts
from outpace.models.weights.gguf import GGUFFile

_DIM, _KV_HEADS = "head_dim", "num_key_value_heads"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """``inner``: of a dense feed-forward."""

    kv_heads: int
    head_dim: int
    inner: int
    values: bool = True  # it has a matrix of values; otherwise they are what its keys are made of
    shares: int = -1  # an earlier layer whose keys and values it reads; -1: it has its own


def from_config(facts: Facts, windows: Sequence[int]) -> tuple[LayerShape, ...]:
    """Of a folder whose layers see ``windows`` (0: all). Raises ModelError."""
    inner, wide = facts.whole("intermediate_size"), bool(facts.get("use_double_wide_mlp"))
    same_values = bool(facts.get("attention_k_eq_v"))
    plain = {_DIM: facts.whole(_DIM), _KV_HEADS: facts.whole(_KV_HEADS)}
    if "per_layer_config" in facts.all:  # as transformers writes it
        listed = facts.part("per_layer_config")
        found = [listed.part(str(i)).all for i in range(len(windows))]
    else:
        full = {_DIM: facts.whole("global_head_dim")}
        if same_values and facts.get("num_global_key_value_heads") is not None:
            full[_KV_HEADS] = facts.whole("num_global_key_value_heads")
        found = [{} if window else full for window in windows]
    if other := sorted({key for each in found for key in each} - plain.keys()):
        raise facts.fail(f"its per_layer_config says {other[0]}, where only {_DIM} and {_KV_HEADS} are supported")
    layers = [facts.about(plain | each) for each in found]
    sharing = _sharing(facts, "num_kv_shared_layers", windows)
    return _checked(
        facts,
        windows,
        [
            LayerShape(
                each.whole(_KV_HEADS, most=1 << 16), each.whole(_DIM, most=1 << 12),
                2 * inner if wide and shares >= 0 else inner, bool(window) or not same_values, shares,
            )
            for each, window, shares in zip(layers, windows, sharing, strict=True)
        ],
        "layer_types, per_layer_config",
    )  # fmt: skip


def from_gguf(facts: Facts, gguf: GGUFFile, windows: Sequence[int]) -> tuple[LayerShape, ...]:
    """Of a GGUF file. Raises ModelError."""
    full, narrow = (_width(facts, ending) for ending in ("", "_swa"))
    kv_heads, inner = (
        _by_layer(facts, gguf, key, len(windows)) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    sharing = _sharing(facts, "attention.shared_kv_layers", windows)
    return _checked(
        facts,
        windows,
        [
            LayerShape(
                kv_heads[i], narrow if window else full, inner[i],
                sharing[i] >= 0 or f"blk.{i}.attn_v.weight" in gguf.tensors, sharing[i],
            )
            for i, window in enumerate(windows)
        ],
        "attention.sliding_window_pattern, attention.head_count_kv",
    )  # fmt: skip


def _width(facts: Facts, ending: str) -> int:
    width = facts.whole(f"attention.key_length{ending}", most=1 << 12)
    for key in (f"attention.value_length{ending}", f"rope.dimension_count{ending}"):
        if facts.whole(key, width) != width:
            raise facts.fail(f"its {facts.prefix}{key} is {facts.get(key)}, and its keys are {width} wide")
    return width


def _by_layer(facts: Facts, gguf: GGUFFile, key: str, layers: int) -> list[int]:
    """A number for each layer, or one for all of them."""
    whole = facts.whole(key)  # the first one's, where there are several
    listed = gguf.metadata.get(facts.prefix + key)
    if not isinstance(listed, np.ndarray):
        return [whole] * layers
    if len(listed) != layers:
        raise facts.fail(f"its {facts.prefix}{key} has {len(listed)} numbers for {layers} layers")
    return [facts.about({key: int(number)}).whole(key) for number in listed]


def _sharing(facts: Facts, key: str, windows: Sequence[int]) -> list[int]:
    """The layer that each one shares keys and values with: of the last so many, the last other one of its kind."""
    first = len(windows) - facts.whole(key, 0, len(windows) - 1, 0)
    kinds = [bool(window) for window in windows]
    if set(kinds[first:]) - set(kinds[:first]):
        raise facts.fail(f"its {facts.prefix}{key} leaves no layer that the last ones could share keys and values with")
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [-1 if i < first else last[kind] for i, kind in enumerate(kinds)]


def _checked(facts: Facts, windows: Sequence[int], shapes: Sequence[LayerShape], keys: str) -> tuple[LayerShape, ...]:
    """The shapes, if layers of a kind, which have one table of rotations and may share keys and values, agree."""
    for seen in (True, False):
        widths = {shape.head_dim for shape, window in zip(shapes, windows, strict=True) if bool(window) == seen}
        if len(widths) > 1:
            both = " and ".join(map(str, sorted(widths)))
            raise facts.fail(f"layers with the same window have heads of {both} numbers ({keys})")
    if any(shape.shares >= 0 and shape.kv_heads != shapes[shape.shares].kv_heads for shape in shapes):
        raise facts.fail(f"layers that share keys and values have different numbers of KV heads ({keys})")
    return tuple(shapes)
