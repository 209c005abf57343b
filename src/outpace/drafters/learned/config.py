"""Learned drafters as data: their shapes, and the tensors that each has, by the names of the speculators library (0.9).

Layers are counted as in ``Batch.hidden_layers``: ``hidden_layers`` are outputs of layers, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.common.arrays import I32
from outpace.models import rope as ropes
from outpace.models.rope import Rope
from outpace.models.weights.facts import Facts

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # of the file's tensors, by canonical name


@dataclass(frozen=True, slots=True)
class Decoder:
    """A small Llama decoder's shape (``qk_norm``: a Qwen3 one's, with norms of query and key heads; ``gemma``: Gemma
    4's, with norms behind attention and feed-forward, too, and of values, gelu, a scale of each layer's output and none
    of scores).

    ``windows``: positions that a token of each layer sees, itself among them, 0 being all (empty: every layer sees
    all). ``scaling``: how the rotations are stretched, as rope_parameters say it (empty: they are not). ``conv``: taps
    and channels of a group of DFlash2's convolutions over a block's slots, around attention and feed-forward; none: 0.
    ``values``: without, values are made of keys' product. ``embedding_scale``: of the embedding's rows (None: as the
    target scales its own, and 1 for the drafter's). ``logit_cap``: that logits are kept within, softly; 0: none.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    rope_theta: float
    max_length: int
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    scaling: Mapping[str, Any] = field(default_factory=dict)
    gemma: bool = False
    values: bool = True
    conv: tuple[int, int] = (0, 0)
    embedding_scale: float | None = None
    logit_cap: float = 0.0

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def rope(self) -> Rope:
        """Raises ModelError for a stretch that is not known."""
        facts = Facts("a drafter's config.json", {**self.scaling, "rope_theta": self.rope_theta})
        return ropes.from_config(facts, self.head_dim, False, self.max_length)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """EAGLE-3 (arXiv 2503.01840) with the norms of 3.1 (arXiv 2605.09992).

    ``fc_norm``: a norm for each layer before ``fc``; ``norm_before_fc``: one norm over all of them; at most one of
    the two. ``norm_before_residual``: the layer's residual is the normed g. ``norm_output``: what is fed back is the
    output after ``norm`` (otherwise before it). ``hidden_layers``: ascending; empty: see ``eagle_layers``.

    ``mask_token``: P-EAGLE: all tokens of a draft come from one forward, in which this id of the target's and the
    tensor ``mask_hidden`` stand where nothing is known; up to ``depths`` of them, by more than one layer, of which the
    first reads tokens and g, the others are plain. None: EAGLE-3.
    """

    decoder: Decoder
    vocab: int
    draft_vocab: int
    hidden_layers: tuple[int, ...]
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    mask_token: int | None = None
    depths: int = 8


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """DSpark (arXiv 2607.05147): ``block`` tokens from one forward. Without its heads it is DFlash (arXiv 2602.06036).

    ``mask_token``: the target's id that stands where nothing is known. ``markov_rank``: of the low-rank bias that the
    token before gives; 0: none; ``markov``: what it reads: "vanilla", that token alone; "gated", through a gate that
    the slot's state opens; "rnn", and what the slots before have left; "selector" (DFlash2's), times a product of the
    slot's state, for the ``candidates`` likeliest tokens of each slot alone, of which it then chooses. ``confidence``:
    whether a head estimates each position's acceptance; ``confidence_markov``: it reads the token before, too.
    ``sample_from_anchor``: the pending token's own place predicts as well, so that a block gives ``block`` tokens
    (otherwise one fewer). In layers with a window: ``causal``: a slot sees no later slot; ``anchored``: every slot sees
    the ``window`` positions before the anchor (otherwise its window ends at the slot itself, and behind that it sees
    all slots unless ``causal``).
    """

    decoder: Decoder
    vocab: int
    draft_vocab: int
    hidden_layers: tuple[int, ...]
    block: int
    mask_token: int
    markov_rank: int
    confidence: bool
    confidence_markov: bool = True
    sample_from_anchor: bool = True
    causal: bool = True
    anchored: bool = False
    markov: str = "vanilla"
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Medusa (arXiv 2401.10774): ``heads`` stacks of ``layers`` residual blocks on the *normed* last hidden state.

    Head k, from 0, predicts the token after next but k. ``bias``: the blocks have biases. ``own_heads``: each stack has
    output rows of its own (otherwise all share one head). ``tree``: paths of a static tree, each the rank of its
    head's token by level.
    """

    hidden: int
    vocab: int
    draft_vocab: int
    heads: int
    layers: int
    tree: tuple[tuple[int, ...], ...] = ()
    bias: bool = False
    own_heads: bool = False


Config = EagleConfig | ParallelConfig | MedusaConfig


def eagle_layers(layers: int) -> tuple[int, ...]:
    """EAGLE-3's hidden layers of a target of N layers: the inputs of layers 2, N // 2 and N - 3, as outputs from 0."""
    return 1, layers // 2 - 1, layers - 4


def draft_ids(config: Config, tensors: Mapping[str, Any]) -> I32:
    """The target's token ids int32 [D] of a checkpoint's draft vocabulary, ascending."""
    ids: I32 = (np.arange(config.draft_vocab) + tensors.get("d2t", 0)).astype(np.int32)
    return ids


def tensor_shapes(config: Config) -> dict[str, Shape]:
    """The tensors that a checkpoint must have, by canonical name; without vocabulary map, head and embedding."""
    return dict(_medusa(config) if isinstance(config, MedusaConfig) else _with_decoder(config))


def head_shapes(config: Config) -> dict[str, Shape]:
    """The output rows, which a checkpoint has unless they are the target's."""
    names = ["lm_head.weight"]
    if isinstance(config, MedusaConfig) and config.own_heads:
        names = [f"lm_heads.{i}.weight" for i in range(config.heads)]
    return {name: (config.draft_vocab, hidden_of(config)) for name in names}


def embedding_shape(config: Config) -> dict[str, Shape]:
    """The embedding, which a checkpoint may have; otherwise it is the target's."""
    return {} if isinstance(config, MedusaConfig) else {"embed_tokens.weight": (config.vocab, hidden_of(config))}


def hidden_of(config: Config) -> int:
    return config.hidden if isinstance(config, MedusaConfig) else config.decoder.hidden


# Markov heads that read more than a token: their product's name, its rows, and what these read beside the state, both
# in ranks; whether it has a bias.
MARKOV = {
    "gated": ("gate_proj", 1, 1, True),
    "rnn": ("joint_proj", 3, 2, True),
    "selector": ("hidden_projection", 1, 0, False),
}


def mix_of(config: ParallelConfig) -> str:
    """The product's name."""
    return f"markov_head.{MARKOV[config.markov][0]}"


def _medusa(config: MedusaConfig) -> Iterator[tuple[str, Shape]]:
    for head in range(config.heads):
        for layer in range(config.layers):
            yield f"blocks.{head}.layers.{layer}.weight", (config.hidden, config.hidden)
            if config.bias:
                yield f"blocks.{head}.layers.{layer}.bias", (config.hidden,)


def _with_decoder(config: EagleConfig | ParallelConfig) -> Iterator[tuple[str, Shape]]:
    d, eagle = config.decoder, isinstance(config, EagleConfig)
    hidden_layers = len(config.hidden_layers) or 3
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    yield "fc.weight", (d.hidden, hidden_layers * d.hidden)
    yield "norm.weight", (d.hidden,)
    for i in range(d.layers):
        at = f"layers.{i}."
        first = eagle and i == 0
        enters = 2 * d.hidden if first else d.hidden  # the embedding's half, then g's
        yield at + "input_layernorm.weight", (d.hidden,)
        yield at + "post_attention_layernorm.weight", (d.hidden,)
        if first:
            yield at + "hidden_norm.weight", (d.hidden,)
        yield at + "self_attn.q_proj.weight", (q, enters)
        yield at + "self_attn.k_proj.weight", (kv, enters)
        if d.values:
            yield at + "self_attn.v_proj.weight", (kv, enters)
        yield at + "self_attn.o_proj.weight", (d.hidden, q)
        if d.qk_norm:
            yield at + "self_attn.q_norm.weight", (d.head_dim,)
            yield at + "self_attn.k_norm.weight", (d.head_dim,)
        yield at + "mlp.gate_proj.weight", (d.ffn, d.hidden)
        yield at + "mlp.up_proj.weight", (d.ffn, d.hidden)
        yield at + "mlp.down_proj.weight", (d.hidden, d.ffn)
        if d.gemma:
            yield at + "pre_feedforward_layernorm.weight", (d.hidden,)
            yield at + "post_feedforward_layernorm.weight", (d.hidden,)
            yield at + "layer_scalar", (1,)
        for name in ("attention_conv", "mlp_conv") if d.conv[0] else ():
            taps, group = d.conv
            yield f"{at}{name}.base_kernel", (2, taps, d.hidden)
            yield f"{at}{name}.kernel_projection.weight", (2 * taps * d.hidden // group, d.hidden)
    if isinstance(config, EagleConfig):
        if config.fc_norm:
            yield from ((f"fc_norm.{i}.weight", (d.hidden,)) for i in range(hidden_layers))
        if config.norm_before_fc:
            yield "input_norm.weight", (hidden_layers * d.hidden,)
        if config.mask_token is not None:
            yield "mask_hidden", (1, 1, hidden_layers * d.hidden)
        return
    yield "hidden_norm.weight", (d.hidden,)
    if config.markov_rank:
        yield "markov_head.markov_w1.weight", (config.vocab, config.markov_rank)
        yield "markov_head.markov_w2.weight", (config.draft_vocab, config.markov_rank)
        if config.markov in MARKOV:
            _, rows, reads, bias = MARKOV[config.markov]
            yield f"{mix_of(config)}.weight", (rows * config.markov_rank, d.hidden + reads * config.markov_rank)
            if bias:
                yield f"{mix_of(config)}.bias", (rows * config.markov_rank,)
    if config.confidence:
        yield "confidence_head.proj.weight", (1, d.hidden + config.confidence_markov * config.markov_rank)
        yield "confidence_head.proj.bias", (1,)
