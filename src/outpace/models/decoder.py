"""A decoder as data: what its family says (``families``) together with GGUF metadata or config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.models import families, rope
from outpace.models.families import KEYS, Family
from outpace.models.rope import Rope
from outpace.models.weights.facts import Facts, read_config
from outpace.models.weights.gguf import GGUFFile

_GGUF, _FOLDER = 0, 1  # columns of KEYS
_MOST_LAYERS = 1 << 12
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder's shape and arithmetic; weights not included."""

    family: Family
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    attention_scale: float
    embedding_scale: float
    residual_scale: float  # of what a branch adds
    logit_divisor: float
    max_length: int
    ropes: tuple[Rope, ...]
    layer_rope: tuple[int, ...]  # which table, by layer; -1: none
    windows: tuple[int, ...]  # positions a token sees, itself among them, by layer; 0: all
    tied: bool

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def limit(self) -> int:
        """Positions a row may have: the model's, or those for which its rotations hold."""
        return min([self.max_length, *(table.limit for table in self.ropes if table.limit is not None)])

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each matrix of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": q, "k": kv, "v": kv, "o": self.hidden, "gate": self.inner, "up": self.inner, "down": self.hidden,
        }  # fmt: skip


def from_gguf(gguf: GGUFFile, verdict: str) -> Decoder:
    """The decoder that a GGUF file describes. ``verdict``: what a message says of a file that is refused.

    Raises ModelError when it is of no known family, or describes what no family here has.
    """
    architecture = gguf.architecture
    facts = Facts(gguf.path.name, gguf.metadata, f"{architecture}.", verdict)
    family = families.of_gguf(architecture)
    if family is None:
        known = ", ".join(each.gguf for each in families.FAMILIES if each.gguf is not None)
        raise facts.fail(f"the architecture {architecture!r} is not one of {known}")
    if facts.get("expert_count", 0):
        raise facts.fail("it is a mixture of experts")
    embedding = gguf.info("token_embd.weight").shape
    if len(embedding) != 2:
        raise facts.fail("token_embd.weight is not a matrix")
    layers, head_dim = facts.whole("block_count", most=_MOST_LAYERS), _head_dim(facts, _GGUF, None)
    if f"blk.{layers - 1}.{family.layer['q'][_GGUF]}.weight" not in gguf.tensors:
        raise facts.fail(f"it announces {layers} layers, but the last one's tensors are missing")
    if facts.whole("attention.value_length", head_dim) != head_dim:
        raise facts.fail("its keys and values differ in width")
    factors = [
        gguf.dequantize(name).reshape(-1) if name in gguf.tensors else None
        for name in ("rope_freqs.weight", "rope_factors_short.weight")
    ]
    bases = [facts.number(source.gguf, source.base) for source in family.ropes]
    ropes = [rope.from_gguf(facts, bases[0], head_dim, *factors)]  # what stretches it is meant for layers that see all
    ropes += [Rope(base, rope.inverse_frequencies(base, head_dim)) for base in bases[1:]]
    windowed = family.windows is not None and family.windows.flag is None
    wide = layers == family.wide_scalar_layers
    scalar = facts.whole("embedding_length") // facts.whole("attention.head_count") if wide else head_dim
    return _decoder(
        facts,
        _GGUF,
        family,
        vocab=embedding[0],
        head_dim=head_dim,
        ropes=ropes,
        windows=_windows(facts, _GGUF, family, layers) if windowed else [0] * layers,
        scale=scalar**-0.5,
        tied="output.weight" not in gguf.tensors,
    )


def from_folder(folder: Path, verdict: str) -> Decoder:
    """The decoder that a Hugging Face folder's config.json describes. Raises ModelError as ``from_gguf`` does."""
    config = read_config(folder)
    facts = Facts(str(folder), config, verdict=verdict)
    named = next(iter(config.get("architectures") or [None]))
    family = families.of_class(str(named))
    if family is None:
        known = ", ".join(each.model for each in families.FAMILIES)
        raise facts.fail(f"the architecture {named!r} is not one of {known}")
    if "auto_map" in config and not family.brings_code:
        raise facts.fail("it brings its own code")
    if "quantization_config" in config:
        raise facts.fail("its weights are quantised in a format other than GGUF")
    activation = facts.get(family.activation_key)
    if activation is not None and _ACTIVATIONS.get(str(activation)) != family.activation:
        raise facts.fail(f"its activation {activation!r} is not supported")
    if facts.get("mlp_bias"):
        raise facts.fail("its feed-forward layers have biases")
    if facts.get("use_bidirectional_attention"):
        raise facts.fail("it attends in both directions")
    layers, head_dim = facts.whole("num_hidden_layers", most=_MOST_LAYERS), _head_dim(facts, _FOLDER, family.head_dim)
    windows = [0] * layers
    if family.windows is not None and (family.windows.flag is None or facts.get(family.windows.flag)):
        windows = _windows(facts, _FOLDER, family, layers)
    scalar = facts.number("query_pre_attn_scalar", float(head_dim)) if family.query_scalar else float(head_dim)
    return _decoder(
        facts,
        _FOLDER,
        family,
        vocab=facts.whole("vocab_size"),
        head_dim=head_dim,
        ropes=_folder_ropes(facts, family, head_dim),
        windows=windows,
        scale=scalar**-0.5,
        tied=bool(facts.get("tie_word_embeddings", family.tied)),
    )


def _head_dim(facts: Facts, spelling: int, usual: int | None) -> int:
    hidden, heads = facts.whole(KEYS["hidden"][spelling]), facts.whole(KEYS["heads"][spelling], most=1 << 16)
    return facts.whole(KEYS["head_dim"][spelling], usual or max(1, hidden // heads), most=1 << 12)


def _decoder(
    facts: Facts,
    spelling: int,
    family: Family,
    *,
    vocab: int,
    head_dim: int,
    ropes: Sequence[Rope],
    windows: Sequence[int],
    scale: float,
    tied: bool,
) -> Decoder:
    """What both spellings have under names of their own, checked."""

    def whole(name: str, *default: int) -> int:
        return facts.whole(KEYS[name][spelling], *default)

    def factor(name: str, default: float) -> float:
        return facts.number(KEYS[name][spelling], default) if facts.get(KEYS[name][spelling]) else default

    if facts.get("attn_logit_softcapping") or facts.get("final_logit_softcapping"):
        raise facts.fail("it caps its logits softly")
    hidden, heads = whole("hidden"), whole("heads")
    kv_heads = whole("kv_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise facts.fail(f"{heads} heads, {kv_heads} KV heads of {head_dim} do not fit together")
    tables = [int(window > 0 and len(ropes) > 1) for window in windows]
    rotated = facts.get("no_rope_layers") or [
        not family.unrotated_every or (i + 1) % family.unrotated_every for i in range(len(windows))
    ]
    if not isinstance(rotated, list) or len(rotated) != len(windows):
        raise facts.fail("no_rope_layers must say for each layer whether it rotates")
    return Decoder(
        family=family,
        vocab=vocab,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=whole("inner"),
        eps=facts.number(KEYS["eps"][spelling], *([1e-6] if spelling == _FOLDER else [])),
        attention_scale=factor("attention_scale", scale),
        embedding_scale=factor("embedding_scale", math.sqrt(hidden) if family.width_scales_embedding else 1.0),
        residual_scale=factor("residual_scale", 1.0),
        logit_divisor=factor("logit_divisor", 1.0),
        max_length=whole("max_length"),
        ropes=tuple(ropes),
        layer_rope=tuple(table if turns else -1 for table, turns in zip(tables, rotated, strict=True)),
        windows=tuple(windows),
        tied=tied,
    )


def _windows(facts: Facts, spelling: int, family: Family, layers: int) -> list[int]:
    """Positions that each layer sees, 0: all."""
    assert family.windows is not None
    window = facts.whole(KEYS["window"][spelling], 0, least=0)
    kinds, first = facts.get("layer_types"), facts.get("max_window_layers")
    if window == 0:
        return [0] * layers
    if kinds is None:
        if first is not None:
            return [window if i >= first else 0 for i in range(layers)]
        every = facts.whole(KEYS["full_every"][spelling], family.windows.full_every, least=0)
        return [0 if every and (i + 1) % every == 0 else window for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise facts.fail("layer_types must name full_attention or sliding_attention for each layer")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _folder_ropes(facts: Facts, family: Family, head_dim: int) -> list[Rope]:
    """A table for each that the family has."""
    parameters = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise facts.fail("rope_parameters is not an object")
    original, longest = facts.get("original_max_position_embeddings"), facts.whole("max_position_embeddings")
    tables = []
    for i, source in enumerate(family.ropes):
        entries = {"partial_rotary_factor": facts.get("partial_rotary_factor")}
        entries |= parameters.get(source.layers, parameters if i == 0 else {})
        if original is not None:
            entries["original_max_position_embeddings"] = original
        base = facts.number(source.config, source.base)
        tables.append(rope.from_config(facts.about(entries), base, head_dim, longest))
    return tables
