"""A decoder as data: what its family says (``families``) together with GGUF metadata or config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.models import families, layer_shapes, metadata, multipliers, recurrent, rope
from outpace.models import latent as latents
from outpace.models.architecture import ABSENT, BIASES, KEYS, Family, Mixture
from outpace.models.latent import Latent
from outpace.models.layer_shapes import LayerShape
from outpace.models.multipliers import NONE, Multipliers
from outpace.models.recurrent import MOST_LAYERS, DeltaNet, ShortConv, StateSpace
from outpace.models.rope import Rope
from outpace.models.weights import safetensors
from outpace.models.weights.facts import Facts, brief, read_config
from outpace.models.weights.file_bytes import StoredTensor
from outpace.models.weights.gguf import GGUFFile

_GGUF, _FOLDER = 0, 1  # columns of KEYS
# By config.json's names; a family's own, which is none of these, it has whatever its configuration says.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
_MOST_EXPERTS = 1 << 14
_GATING = {1: "softmax", 2: "sigmoid", 3: "of_chosen"}  # llama.cpp's numbers of scores
_PIECE = 1 << 24  # bytes that are compared at once
# Keys of config.json that make another model of it, where the family reads them, and why they are refused.
REFUSED = {
    "mlp_bias": "its feed-forward layers have biases",
    "attention_out_bias": "what attention gives has a bias",
    "final_logit_softcapping": "it caps its logits softly",
    "num_local_experts": "it is a mixture of experts",
    "use_bidirectional_attention": "it attends in both directions",
    "attention_bias": "its attention has biases",
    "clip_qkv": "it clips queries, keys and values",
    "use_bias": "its products have biases",
    "conv_bias": "its convolutions have biases",
    "mamba_proj_bias": "its state spaces' products have biases",
    "projectors_bias": "its products have biases",
    "moe_latent_size": "its experts work in a space of another size",
}


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of ``count`` experts of ``inner`` size, of which a token goes to ``used``.

    ``shared``: inner size of the expert that every token goes to; 0: there is none. ``score``, ``renormalise``,
    ``least_total``: as ``Mixture`` has them; weights are multiplied by ``scale``.
    """

    count: int
    used: int
    inner: int
    shared: int
    score: str
    renormalise: bool
    least_total: float
    scale: float
    chosen_by_bias: bool = True  # if the family has biases for that
    groups: int = 1  # of neighbours, of which the best ``used_groups`` are chosen before experts are
    used_groups: int = 1


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder's shape and arithmetic; weights not included."""

    family: Family
    vocab: int
    hidden: int
    heads: int
    by_layer: tuple[LayerShape, ...]  # by layer
    eps: float
    attention_scale: float
    embedding_scale: float
    residual_scale: float  # of what a branch adds
    logit_divisor: float
    score_cap: float  # that scores are kept within, softly; 0: they are not
    logit_cap: float
    max_length: int
    ropes: tuple[Rope, ...]
    layer_rope: tuple[int, ...]  # which table, by layer; -1: none
    windows: tuple[int, ...]  # positions a token sees, itself among them, by layer; 0: all
    biases: tuple[str, ...]  # parts of a layer that have one
    tied: bool  # the head is the embedding
    experts: Experts | None = None
    mixed: tuple[bool, ...] = ()  # which layers are mixtures of these; empty: none
    latent: Latent | None = None
    recurrence: DeltaNet | ShortConv | None = None
    recurrent: tuple[bool, ...] = ()  # which layers are such; empty: none
    fed: tuple[
        bool, ...
    ] = ()  # of layers that either mix tokens or feed them forward, which do that; empty: all do both
    input_width: int = 0  # of tokens' inputs for each layer; 0: there are none
    input_vocab: int = 0  # rows of their table
    norms: bool = True  # queries and keys have the norms that the family has for them
    beyond: int = 0  # layers behind the last one, which only draft
    multipliers: Multipliers = NONE
    wrapped: bool = False  # it is the text's part of a model that reads images, too

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def kv_heads(self) -> int:
        """Of the first layer, as are the next two."""
        return self.by_layer[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.by_layer[0].head_dim

    @property
    def inner(self) -> int:
        return self.by_layer[0].inner

    @property
    def limit(self) -> int:
        """Positions a row may have: the model's, or those for which its rotations hold."""
        return min([self.max_length, *(table.limit for table in self.ropes if table.limit is not None)])

    def mixture(self, layer: int) -> Experts | None:
        """What a layer's feed-forward is a mixture of; None: it is dense."""
        return self.experts if self.mixed and (layer >= self.layers or self.mixed[layer]) else None

    def state(self, layer: int) -> DeltaNet | ShortConv | None:
        """What a layer has in the place of attention or beside it; None: it has attention alone."""
        return self.recurrence if layer < len(self.recurrent) and self.recurrent[layer] else None

    def shape(self, layer: int) -> LayerShape:
        """Of a layer; of one behind the last, the first one's."""
        return self.by_layer[layer if layer < self.layers else 0]

    def stores(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return self.attends(layer) and self.shape(layer).shares < 0

    def attends(self, layer: int) -> bool:
        net = self.state(layer)
        return self.mixes(layer) and (net is None or (isinstance(net, StateSpace) and net.beside))

    def mixes(self, layer: int) -> bool:
        """Whether a layer has attention, or what stands in its place."""
        return not self.fed or not self.fed[layer]

    def feeds(self, layer: int) -> bool:
        """Whether a layer has a feed-forward."""
        return not self.fed or self.fed[layer]

    def shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of each matrix of a layer; of a mixture, the shared expert's in place of a dense one's."""
        own, hidden, experts = self.shape(layer), self.hidden, self.mixture(layer)
        q, kv = self.heads * own.head_dim, own.kv_heads * own.head_dim
        inner = 0 if not self.feeds(layer) else own.inner if experts is None else experts.shared
        found: dict[str, tuple[int, int]] = {}
        if not self.mixes(layer):
            pass
        elif isinstance(net := self.state(layer), ShortConv):
            found = {"in": (3 * hidden, hidden), "o": (hidden, hidden)}
        elif net is not None:
            found = {
                "qkv": (net.channels, hidden), "z": (net.values, hidden), "a": (net.value_heads, hidden),
                "o": (hidden, net.value_heads * net.width if isinstance(net, StateSpace) else net.values),
            }  # fmt: skip
            if not isinstance(net, StateSpace):
                found["b"] = (net.value_heads, hidden)
            elif net.beside:
                found |= {"state_o": found["o"], "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden)}
                found["o"] = (hidden, q)
        elif (a := self.latent) is not None:
            found = {
                "q": (self.heads * (a.plain + a.rotated), a.q_rank or hidden), "k": (kv, hidden),
                "k_up": (self.heads * a.rank, a.plain), "v_up": (self.heads * a.value, a.rank),
                "o": (hidden, self.heads * a.value),
            }  # fmt: skip
            found |= {"q_down": (a.q_rank, hidden)} if a.q_rank else {}
        else:
            queries = 2 * q if self.family.gated else q
            found = {"q": (queries, hidden), "o": (hidden, q)}
            if own.shares < 0:
                found |= {"k": (kv, hidden)} | ({"v": (kv, hidden)} if own.values else {})
        if self.input_width:
            found |= {"input_gate": (self.input_width, hidden), "input_project": (hidden, self.input_width)}
        if inner:
            gate = {"gate": (inner, hidden)} if self.family.activation != "relu2" else {}
            found |= {**gate, "up": (inner, hidden), "down": (hidden, inner)}
        return found


def from_gguf(gguf: GGUFFile, verdict: str) -> Decoder:
    """The decoder that a GGUF file describes. ``verdict``: what a message says of a file that is refused.

    Raises ModelError when it is of no known family, or describes what no family here has.
    """
    architecture = gguf.architecture
    facts = Facts(gguf.path.name, gguf.metadata, f"{architecture}.", verdict)
    windowed, mixed, gating = (  # whether the family reads them or not
        gguf.metadata.get(f"{architecture}.{key}")
        for key in (KEYS["window"][_GGUF], "expert_count", "expert_gating_func")
    )
    softmax = _GATING.get(gating or 0) != "sigmoid"
    if not gating:  # old files
        softmax = not any(name.endswith(".exp_probs_b.bias") for name in gguf.tensors)
    family = families.of_gguf(architecture, bool(windowed), bool(mixed), softmax)
    if family is None:
        known = ", ".join(each.gguf for each in families.FAMILIES if each.gguf is not None)
        raise facts.fail(f"the architecture {architecture!r} is not one of {known}")
    keys = facts.get(KEYS["kv_heads"][_GGUF])
    inners = facts.get(KEYS["inner"][_GGUF]) if family.single else None
    for name, each in (("kv_heads", keys if family.conv or family.scan else None), ("inner", inners)):
        if isinstance(each, np.ndarray) and len(some := {int(n) for n in each} - {0}) == 1:
            one = {f"{architecture}.{KEYS[name][_GGUF]}": some.pop()}  # of layers that have some
            facts = Facts(gguf.path.name, {**facts.all, **one}, f"{architecture}.", verdict)
    for name in ("kv_heads", "inner") if family.varied else ():  # the first layer's; layer_shapes has those of all
        key = f"{architecture}.{KEYS[name][_GGUF]}"
        if isinstance(each := gguf.metadata.get(key), np.ndarray) and len(each):
            facts = Facts(gguf.path.name, {**facts.all, key: int(each[0])}, f"{architecture}.", verdict)
    if family.mixture is None and facts.get("expert_count", 0):
        raise facts.fail("it is a mixture of experts (expert_count)")
    embedding = gguf.info("token_embd.weight").shape
    if len(embedding) != 2:
        raise facts.fail("token_embd.weight is not a matrix")
    layers = facts.whole("block_count", most=MOST_LAYERS)
    latent = None if family.latent is None else latents.from_gguf(facts)
    head_dim = _head_dim(facts, _GGUF) if latent is None else latent.rank + latent.rotated
    beyond = 0 if family.heads_beyond is None else facts.whole("nextn_predict_layers", 0, layers - 1, 0)
    layers -= beyond
    everywhere = family.layer["attn_norm" if family.recurrent or latent else "q"][_GGUF]
    if f"blk.{layers - 1}.{everywhere}.weight" not in gguf.tensors:
        if f"blk.{layers}.nextn.eh_proj.weight" in gguf.tensors:
            raise facts.fail(
                "it has the layer that drafts alone, as llama.cpp's converter writes it on request: give a file of the "
                "whole model, which has this layer unless it is left out on request, too"
            )
        raise facts.fail(f"it announces {layers} layers, but the last one's tensors are missing")
    if latent is None and facts.whole("attention.value_length", head_dim) != head_dim:
        raise facts.fail("its keys and values differ in width (attention.key_length, attention.value_length)")
    factors = [
        gguf.dequantize(name).reshape(-1) if name in gguf.tensors else None
        for name in ("rope_freqs.weight", "rope_factors_short.weight")
    ]
    bases = [facts.number(source.gguf, source.base) for source in family.ropes]
    longest = facts.whole(KEYS["max_length"][_GGUF])
    spread, wider = latents.spread(facts, family)
    ropes = [
        rope.from_gguf(
            facts, bases[0], head_dim if latent is None else latent.rotated, family.rotates_part, longest, factors[0],
            factors[1], family.yarn_truncates, spread,
        )
    ]  # fmt: skip
    if family.grows:
        original = "rope.scaling.original_context_length"
        ropes = [rope.growing(ropes[0], facts, "attention.temperature_scale", original, longest)]
    windows = _gguf_windows(facts, family, layers)
    shapes = layer_shapes.from_gguf(facts, gguf, windows) if family.varied else None
    # What stretches rotations is meant for layers that see all.
    narrow = next((each.head_dim for each, window in zip(shapes or (), windows, strict=False) if window), head_dim)
    ropes += [Rope(base, rope.inverse_frequencies(base, narrow)) for base in bases[1:]]
    wide = layers == family.wide_scalar_layers
    fed = recurrent.gguf_fed(facts, family, layers, keys, inners)
    scalar = facts.whole("embedding_length") // facts.whole("attention.head_count") if wide else head_dim
    scalar = scalar if latent is None else latent.plain + latent.rotated
    decoder = _decoder(
        facts,
        _GGUF,
        family,
        vocab=embedding[0],
        head_dim=head_dim,
        ropes=ropes,
        rotated=[
            (not family.unrotated_every or (i + 1) % family.unrotated_every > 0)
            and (family.rotates_if is None or facts.flag(family.rotates_if[2], True))
            and family.rotates
            for i in range(layers)
        ],
        windows=windows,
        shapes=shapes,
        scale=1.0 if family.unit_scale else scalar**-0.5 * wider,
        inputs=_gguf_inputs(facts, gguf, family),
        latent=latent,
        biases=tuple(
            part
            for part in BIASES
            if part in family.layer and f"blk.0.{family.layer[part][_GGUF]}.bias" in gguf.tensors
        ),
        tied="output.weight" not in gguf.tensors,
        mixture=_gguf_experts(facts, gguf, family.mixture, layers, fed),
        nets=recurrent.from_gguf(facts, family, layers, keys, fed, _normed(gguf, family)),
        fed=fed,
        norms=family.norms_flag is None or "blk.0.attn_q_norm.weight" in gguf.tensors,
        beyond=beyond,
    )
    metadata.refuse_unread(
        facts, decoder.max_length, hidden=decoder.hidden, head_dim=head_dim, rotated=2 * len(ropes[0].frequencies),
        scale=decoder.attention_scale, bases=bases,
    )  # fmt: skip
    return decoder


def from_folder(folder: Path, verdict: str) -> Decoder:
    """The decoder that a Hugging Face folder's config.json describes. Raises ModelError as ``from_gguf`` does."""
    return from_config(folder, read_config(folder), verdict)


def from_config(
    folder: Path, config: Mapping[str, Any], verdict: str, stored: Mapping[str, StoredTensor] | None = None
) -> Decoder:
    """As ``from_folder``, of a folder whose config.json would say ``config``. ``stored``: its tensors by name (None:
    those of its safetensors files)."""
    text = families.text_part(config)
    config = text or dict(config)
    facts = Facts(str(folder), config, verdict=verdict)
    named = families.named_class(config)
    family = families.of_class(str(named))
    if family is None:
        known = ", ".join(each.model for each in families.FAMILIES)
        inner = f" around {config.get('text_config', {}).get('model_type')!r}" if named in families.WRAPPERS else ""
        raise facts.fail(f"the architecture {named!r}{inner} is not one of {known}")
    renamed = {name: config[alias] for alias, name in family.aliases.items() if alias in config}
    facts = Facts(str(folder), {**ABSENT, **family.absent, **config, **renamed}, verdict=verdict)
    if family.single:
        facts = facts.about({**facts.all, **recurrent.single_layers(facts)})
    if "auto_map" in config and not family.brings_code:
        raise facts.fail("it brings its own code")
    if "quantization_config" in config:
        method = facts.part("quantization_config").get("quant_method")
        if method != "mxfp4" or family.mixture is None or not family.mixture.mxfp4:
            raise facts.fail(
                f"its weights are quantised in a format other than GGUF (quantization_config, method {method!r}): "
                "get a GGUF file of it, or its weights in 16 bits"
            )
    activation = "silu" if family.activation_key is None else facts.get(family.activation_key)
    if ACTIVATIONS.get(str(activation)) != family.activation and family.activation in ACTIVATIONS.values():
        raise facts.fail(f"its activation {activation!r} is not supported")
    for key in family.refuses:
        if facts.get(key):
            raise facts.fail(f"{REFUSED[key]} ({key})")
    if (other := families.unmet(family, facts.get)) is not None:
        only = " or ".join(map(str, family.requires[other[0]]))
        raise facts.fail(f"its {other[0]} has {brief(other[1])}, where only {only} is supported")
    layers = facts.whole("num_hidden_layers", most=MOST_LAYERS)
    latent = None if family.latent is None else latents.from_config(facts, family.latent)
    head_dim = _head_dim(facts, _FOLDER) if latent is None else latent.rank + latent.rotated
    rotated = _rotated(facts, family, layers)
    windows = _folder_windows(facts, family, rotated)
    shapes = layer_shapes.from_config(facts, windows) if family.varied else None
    width = facts.whole(family.inputs, 0, least=0) if family.inputs else 0
    scalar = facts.number("query_pre_attn_scalar") if family.query_scalar else float(head_dim)
    scalar = scalar if latent is None else latent.plain + latent.rotated
    return _decoder(
        facts,
        _FOLDER,
        family,
        vocab=facts.whole("vocab_size"),
        head_dim=head_dim,
        ropes=_folder_ropes(
            facts, family, _widths(family, shapes, windows, head_dim if latent is None else latent.rotated)
        ),
        rotated=rotated,
        windows=windows,
        shapes=shapes,
        scale=1.0 if family.unit_scale else scalar**-0.5 * (1.0 if latent is None else latents.wider(facts)),
        inputs=(width, facts.whole("vocab_size_per_layer_input") if width else 0),
        latent=latent,
        biases=family.biases if family.bias_flag is None or facts.get(family.bias_flag) else (),
        mixture=_folder_experts(facts, family.mixture, layers),
        nets=recurrent.from_config(facts, family, layers),
        fed=tuple(kind in ("mlp", "moe") for kind in facts.get("layer_types")) if family.single else (),
        norms=family.norms_flag is None or bool(facts.get(family.norms_flag)),
        beyond=0 if family.heads_beyond is None else facts.whole(family.heads_beyond, most=MOST_LAYERS, least=0),
        tied=bool(facts.get("tie_word_embeddings")) and not _has_own_head(folder, family, text is not None, stored),
        wrapped=text is not None,
        multiplied=multipliers.from_config(facts) if family.multiplied else NONE,
    )


def _normed(gguf: GGUFFile, family: Family) -> bool:
    """Whether what a file's state spaces give has a norm."""
    rule = family.scan
    return rule is None or rule.normed is None or f"blk.0.{rule.norm[_GGUF][0]}" in gguf.tensors


def _has_own_head(
    folder: Path, family: Family, wrapped: bool, stored: Mapping[str, StoredTensor] | None = None
) -> bool:
    """Whether a folder has a head with other values than its embedding, which then counts whatever config.json says."""
    if stored is None:
        _, stored = safetensors.read_folder(folder)
    if wrapped:
        stored = {name: tensor for full, tensor in stored.items() if (name := families.text_name(full)) is not None}
    embedding, head = (stored.get(f"{family.outer[part][_FOLDER]}.weight") for part in ("embedding", "head"))
    if embedding is None or head is None:
        return False
    if (embedding.type, embedding.shape) != (head.type, head.shape):
        return True
    pieces = range(0, head.n_bytes, _PIECE)
    sizes = (min(_PIECE, head.n_bytes - start) for start in pieces)
    same = ((embedding.part(at, n) == head.part(at, n)).all() for at, n in zip(pieces, sizes, strict=True))
    return not all(same)


def _head_dim(facts: Facts, spelling: int) -> int:
    hidden, heads = facts.whole(KEYS["hidden"][spelling]), facts.whole(KEYS["heads"][spelling], most=1 << 16)
    return facts.whole(KEYS["head_dim"][spelling], max(1, hidden // heads), most=1 << 12)


def _decoder(
    facts: Facts,
    spelling: int,
    family: Family,
    *,
    vocab: int,
    head_dim: int,
    ropes: Sequence[Rope],
    rotated: Sequence[bool],
    windows: Sequence[int],
    shapes: tuple[LayerShape, ...] | None,
    scale: float,
    inputs: tuple[int, int],
    biases: tuple[str, ...],
    tied: bool,
    mixture: tuple[Experts | None, tuple[bool, ...]],
    nets: tuple[DeltaNet | ShortConv | None, tuple[bool, ...]],
    fed: tuple[bool, ...],
    latent: Latent | None,
    norms: bool,
    beyond: int,
    wrapped: bool = False,
    multiplied: Multipliers = NONE,
) -> Decoder:
    """What both spellings have under names of their own, checked."""

    def whole(name: str, *default: int) -> int:
        return facts.whole(family.keys.get(name, KEYS[name][1]) if spelling else KEYS[name][0], *default)

    def factor(name: str, default: float) -> float:
        if name not in family.scales:
            return default
        key = KEYS[name][spelling]
        return default if spelling == _GGUF and facts.get(key) == 0 else facts.number(key, default)

    def cap(name: str) -> float:
        key, absent = KEYS[name][spelling], family.caps.get(name, 0.0) if spelling == _GGUF else 0.0
        off = name not in family.caps or facts.get(key, absent) == 0
        return 0.0 if off else facts.number(key, absent)

    hidden, heads = whole("hidden"), whole("heads")
    kv_heads = whole("kv_heads", heads) if latent is None else 1
    inner = _adjusted(facts, whole("inner")) if spelling and family.adjusts_inner else whole("inner")
    shapes = shapes or (LayerShape(kv_heads, head_dim, inner),) * len(windows)
    for each in shapes:
        if heads % each.kv_heads or each.head_dim % 2:
            raise facts.fail(f"{heads} heads, {each.kv_heads} KV heads of {each.head_dim} do not fit together")
    tables = [int(window > 0 and len(ropes) > 1) for window in windows]
    return Decoder(
        family=family,
        vocab=vocab,
        hidden=hidden,
        heads=heads,
        by_layer=shapes,
        eps=facts.number(KEYS["eps"][spelling]),
        attention_scale=factor("attention_scale", scale) * multiplied.scores,
        embedding_scale=factor("embedding_scale", math.sqrt(hidden) if family.width_scales_embedding else 1.0)
        * multiplied.embedding,
        residual_scale=factor("residual_scale", 1.0),
        logit_divisor=factor("logit_divisor", 1.0) / multiplied.logits,
        score_cap=cap("score_cap"),
        logit_cap=cap("logit_cap"),
        max_length=whole("max_length"),
        ropes=tuple(ropes),
        layer_rope=tuple(table if turns else -1 for table, turns in zip(tables, rotated, strict=True)),
        windows=tuple(windows),
        biases=biases,
        tied=tied,
        experts=mixture[0],
        mixed=mixture[1],
        latent=latent,
        recurrence=nets[0],
        recurrent=nets[1],
        fed=fed,
        input_width=inputs[0],
        input_vocab=inputs[1],
        norms=norms,
        beyond=beyond,
        multipliers=multiplied,
        wrapped=wrapped,
    )


def _folder_experts(facts: Facts, rule: Mixture | None, layers: int) -> tuple[Experts | None, tuple[bool, ...]]:
    """What a folder's mixtures are, and which layers are mixtures."""
    if rule is None or (rule.flag is not None and not facts.get(rule.flag)):
        return None, ()
    kinds = facts.get("layer_types") or []
    if rule.optional and (facts.get(rule.count) == 0 or ("mlp" in kinds and "moe" not in kinds)):
        return None, ()
    first = facts.whole(rule.first, least=0) if rule.first else 0
    last = facts.whole(rule.last, least=-1) if rule.last else -1
    step, dense = facts.whole(rule.step, 1) if rule.step else 1, facts.get(rule.dense) if rule.dense else None
    if not isinstance(dense or [], list):
        raise facts.fail(f"{rule.dense} is {brief(dense)}, not a list of layers")
    mixed = tuple(
        kinds[i] == "moe"
        if "moe" in kinds
        else first <= i <= (layers - 1 if last < 0 else last) and (i + 1) % step == 0 and i not in (dense or [])
        for i in range(layers)
    )
    if rule.kinds is not None:
        kinds = facts.get(rule.kinds, ["dense"] + ["sparse"] * (layers - 1))
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
            raise facts.fail(f"{rule.kinds} must name dense or sparse for each layer")
        mixed = tuple(kind == "sparse" for kind in kinds)
    if not any(mixed):
        raise facts.fail("none of its layers is a mixture of experts")
    count, inner = facts.whole(rule.count, most=_MOST_EXPERTS), facts.whole(rule.inner)
    shared = facts.whole(rule.shared_inner) if rule.shared_inner else 0
    if rule.shared_count:
        shared = inner * facts.whole(rule.shared_count, least=0)
    groups = (1, 1)
    if rule.groups and (rule.grouped is None or facts.get(rule.grouped[0]) == rule.grouped[1]):
        groups = _groups(facts, rule, count, rule.used, rule.groups, rule.used_groups)
    return Experts(
        count=count,
        used=facts.whole(rule.used, most=count),
        groups=groups[0],
        used_groups=groups[1],
        inner=inner,
        shared=shared,
        score=rule.score,
        renormalise=bool(facts.get(rule.renormalise_key)) if rule.renormalise_key else rule.renormalise,
        least_total=facts.number(rule.least_total_key, rule.least_total) if rule.least_total_key else rule.least_total,
        scale=facts.number(rule.scale) if rule.scale else 1.0,
        chosen_by_bias=rule.choice_flag is None or bool(facts.get(rule.choice_flag)),
    ), mixed  # fmt: skip


def _gguf_experts(
    facts: Facts, gguf: GGUFFile, rule: Mixture | None, layers: int, fed: tuple[bool, ...]
) -> tuple[Experts | None, tuple[bool, ...]]:
    """What a GGUF file's mixtures are, and which layers are mixtures: of ``fed``, where that is not empty, some. Sizes
    are the tensors'; a key that says another is refused."""
    if rule is None or (rule.flag is not None and not facts.get("expert_count")):
        return None, ()
    if rule.optional and not facts.get("expert_count", 0):
        inner = facts.whole("feed_forward_length")
        if facts.whole("expert_shared_feed_forward_length", inner, least=0) != inner:
            raise facts.fail(
                f"its {facts.prefix}expert_shared_feed_forward_length is not its feed_forward_length, {inner}"
            )
        return None, ()
    (router,) = rule.router[_GGUF]
    mixed = tuple(f"blk.{i}.{router}" in gguf.tensors for i in range(layers))
    count = facts.whole("expert_count", most=_MOST_EXPERTS)
    dense, step = (
        facts.whole(key, absent, least=0) if there else absent
        for key, absent, there in (
            ("leading_dense_block_count", 0, rule.first), ("interleave_moe_layer_step", 1, rule.step and rule.first),
        )
    )  # fmt: skip
    if not any(mixed):
        raise facts.fail(
            f"it is a mixture of experts ({facts.prefix}expert_count), and no layer has the tensor {router}"
        )
    if not fed and mixed != tuple(i >= dense and (i + 1) % max(1, step) == 0 for i in range(layers)):
        where = f"leading_dense_block_count {dense}, interleave_moe_layer_step {step}"
        raise facts.fail(f"other layers have a router than its description says ({where})")
    names = [f"blk.{mixed.index(True)}.{name.format(0)}" for name in rule.experts["up"][_GGUF]]
    sizes = [shape for name in names if (shape := _shape(gguf, name))]
    if not sizes:
        raise facts.fail(f"it has no tensor {names[0]!r}, so the model is incomplete")
    gate, up = (rule.experts[part][_GGUF][0] if part in rule.experts else None for part in ("gate", "up"))
    joined = gate == up and names[0] in gguf.tensors
    inner, shared = sizes[0][-2] // (2 if joined else 1), 0
    if rule.shared and (size := _shape(gguf, f"blk.{mixed.index(True)}.{rule.shared['up'][_GGUF]}.weight")):
        shared = size[0]
    said = {"expert_feed_forward_length": inner}
    said |= {"expert_shared_feed_forward_length": shared} if rule.shared else {}
    said |= {"feed_forward_length": inner} if rule.inner == KEYS["inner"][_FOLDER] else {}
    said |= {"feed_forward_length": shared} if rule.shared_inner == KEYS["inner"][_FOLDER] else {}
    said |= {"expert_shared_count": shared // inner if rule.shared_count else 1} if rule.shared else {}
    for key, value in said.items():
        if facts.whole(key, value, least=0) != value:
            raise facts.fail(f"its {facts.prefix}{key} is {facts.get(key)}, and its tensors say {value}")
    gating = facts.whole("expert_gating_func", 0, least=0)
    if gating and _GATING.get(gating) != rule.score:
        raise facts.fail(f"its {facts.prefix}expert_gating_func is {gating}, where its family has {rule.score}")
    usual = not rule.renormalise_in_gguf and rule.gguf_renormalises
    renormalise = facts.flag("expert_weights_norm", usual)
    if not rule.renormalise_in_gguf and renormalise != rule.gguf_renormalises:
        raise facts.fail(f"its {facts.prefix}expert_weights_norm is {renormalise}, which its family's files never mean")
    groups = (1, 1)
    if rule.groups and facts.get("expert_group_count"):
        groups = _groups(facts, rule, count, "expert_used_count", "expert_group_count", "expert_group_used_count")
    return Experts(
        count=count,
        used=facts.whole("expert_used_count", most=count),
        groups=groups[0],
        used_groups=groups[1],
        inner=inner,
        shared=shared,
        score=rule.score,
        renormalise=renormalise,
        least_total=rule.least_total,
        scale=facts.number("expert_weights_scale", 1.0) if rule.scale else 1.0,
    ), mixed  # fmt: skip


def _groups(facts: Facts, rule: Mixture, count: int, used: str, total: str, chosen: str) -> tuple[int, int]:
    """How many groups experts have, and of how many of them some are used; each number by its key."""
    groups = facts.whole(total, most=count)
    some, each = facts.whole(chosen, most=groups), count // groups
    if count % groups or each < 1 + rule.best_two or facts.whole(used) > some * each:
        raise facts.fail(
            f"{count} experts in {groups} groups ({total}), of which {some} are chosen ({chosen}), do not fit "
            f"together with {facts.whole(used)} a token ({used})"
        )
    return groups, some


def _adjusted(facts: Facts, inner: int) -> int:
    """LFM2's inner size: two thirds of the one that is given, times a factor, up to a multiple."""
    if not facts.get("block_auto_adjust_ff_dim"):
        return inner
    inner = int(2 * inner / 3)
    if facts.get("block_ffn_dim_multiplier") is None:
        return inner
    multiple = facts.whole("block_multiple_of")
    return -(-int(facts.number("block_ffn_dim_multiplier") * inner) // multiple) * multiple


def _shape(gguf: GGUFFile, name: str) -> tuple[int, ...] | None:
    """A matrix's shape; None: the file has no such tensor, or it is no matrix."""
    info = gguf.tensors.get(name)
    return None if info is None or len(info.shape) < 2 else info.shape


def _gguf_windows(facts: Facts, family: Family, layers: int) -> list[int]:
    """Positions that each layer of a GGUF file sees, 0: all."""
    rule = family.windows
    if rule is None or rule.flag is not None:
        return [0] * layers
    window = facts.whole(KEYS["window"][_GGUF], rule.gguf_size, least=0)
    if rule.every or window == 0:
        return [window] * layers
    pattern = facts.get(KEYS["full_every"][_GGUF])
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_:  # which layers have one
        if len(pattern) != layers:
            raise facts.fail(f"{facts.prefix}{KEYS['full_every'][_GGUF]} names {len(pattern)} of its {layers} layers")
        return [window if windowed else 0 for windowed in pattern]
    every = facts.whole(KEYS["full_every"][_GGUF], rule.full_every, least=0)
    return [0 if every and (i + 1) % every == 0 else window for i in range(layers)]


def _folder_windows(facts: Facts, family: Family, rotated: Sequence[bool]) -> list[int]:
    """Positions that each layer of a folder's model sees, 0: all."""
    rule, layers = family.windows, len(rotated)
    if rule is None:
        return [0] * layers
    none = (None, 0) if rule.every_other_below else (None,)  # transformers' own folders of that family have 0
    there = (rule.flag is None or facts.get(rule.flag)) and facts.get(KEYS["window"][_FOLDER]) not in none
    window = facts.whole(KEYS["window"][_FOLDER]) if there else 0
    if rule.every:
        return [window] * layers
    kinds = facts.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise facts.fail("layer_types must name full_attention or sliding_attention for each layer")
        windowed = [kind == "sliding_attention" for kind in kinds]
    elif rule.flag is not None and not there:
        windowed = [False] * layers
    elif rule.every_other_below is not None:
        below = facts.whole(rule.every_other_below, least=0)
        windowed = [i % 2 == 0 and i < below for i in range(layers)]
    elif rule.first is not None:
        first = facts.whole(rule.first, least=0)
        windowed = [i >= first for i in range(layers)]
    elif rule.unrotated:
        windowed = [not turns for turns in rotated]
    elif not rule.full_every:
        windowed = [bool(there)] * layers
    else:
        every = facts.whole(KEYS["full_every"][_FOLDER], rule.full_every) if rule.full_every_key else rule.full_every
        windowed = [(i + 1) % every != 0 for i in range(layers)]
    if rule.last_full:
        windowed[-1] = False
    if any(windowed) and not there:
        raise facts.fail("some of its layers see a window (layer_types), and sliding_window does not say how long")
    return [window if each else 0 for each in windowed]


def _gguf_inputs(facts: Facts, gguf: GGUFFile, family: Family) -> tuple[int, int]:
    """The width of tokens' inputs for each layer, and the rows of their table."""
    width = facts.whole("embedding_length_per_layer_input", 0, least=0) if family.inputs else 0
    return (width, gguf.info(f"{family.outer['inputs_table'][_GGUF]}.weight").shape[0]) if width else (0, 0)


def _rotated(facts: Facts, family: Family, layers: int) -> list[bool]:
    """Which layers of a folder's model rotate."""
    if not family.rotates:
        return [False] * layers
    if family.rotates_if is not None:
        return [facts.get(family.rotates_if[0]) == family.rotates_if[1]] * layers
    if not family.unrotated_every:
        return [True] * layers
    listed = facts.get("no_rope_layers")
    if listed is None:
        every = facts.whole("no_rope_layer_interval", family.unrotated_every)
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers:
        raise facts.fail("no_rope_layers must say for each layer whether it rotates")
    return [bool(turns) for turns in listed]


def _widths(family: Family, shapes: tuple[LayerShape, ...] | None, windows: Sequence[int], head_dim: int) -> list[int]:
    """Of the heads that each of the family's tables rotates."""
    found = [head_dim] * len(family.ropes)
    for shape, window in zip(shapes or (), windows, strict=False):
        found[1 if window else 0] = shape.head_dim
    return found


def _folder_ropes(facts: Facts, family: Family, widths: Sequence[int]) -> list[Rope]:
    """A table for each that the family has, for heads of ``widths``."""
    stretch, parameters = facts.part("rope_scaling"), facts.part("rope_parameters")
    several = len(family.ropes) > 1
    original, longest = facts.get("original_max_position_embeddings"), facts.whole("max_position_embeddings")
    tables = []
    for i, source in enumerate(family.ropes):
        entries = {"rope_theta": facts.number(source.config, source.base)}
        if family.rotates_part:
            entries["partial_rotary_factor"] = facts.get("partial_rotary_factor")
        if several:
            entries |= parameters.part(source.layers).all | (stretch.all if i == 0 else {})
        else:
            entries |= stretch.all or parameters.all
        if original is not None:
            entries["original_max_position_embeddings"] = original
        table = rope.from_config(facts.about(entries), widths[i], family.rotates_part, longest)
        if family.grows:
            growth, there = "llama_4_scaling_beta", "original_max_position_embeddings"
            table = rope.growing(table, facts.about(entries), growth, there, longest)
        tables.append(table)
    return tables
