"""Learned drafters as data: their shapes, and the tensors that each has, by the names of the speculators library (0.9).

Layers are counted as in ``Batch.hidden_layers``: ``hidden_layers`` are outputs of layers, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace.common.arrays import I32

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A small Llama decoder's shape (``qk_norm``: a Qwen3 one's, with norms of query and key heads)."""

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


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """EAGLE-3 (arXiv 2503.01840) with the norms of 3.1 (arXiv 2605.09992).

    ``fc_norm``: a norm for each layer before ``fc``; ``norm_before_fc``: one norm over all of them; at most one of
    the two. ``norm_before_residual``: the layer's residual is the normed g. ``norm_output``: what is fed back is the
    output after ``norm`` (otherwise before it). ``hidden_layers``: ascending; empty: see ``eagle_layers``.
    """

    decoder: Decoder
    vocab: int
    draft_vocab: int
    hidden_layers: tuple[int, ...]
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """DSpark (arXiv 2607.05147): ``block`` tokens from one forward.

    ``mask_token``: the target's id that stands where nothing is known. ``markov_rank``: of the low-rank bias that the
    token before gives; 0: none. ``confidence``: whether a head estimates each position's acceptance;
    ``confidence_markov``: it reads the token before, too. ``sample_from_anchor``: the pending token's own place
    predicts as well, so that a block gives ``block`` tokens (otherwise one fewer).
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
        enters = 2 * d.hidden if eagle else d.hidden  # the embedding's half, then g's
        yield at + "input_layernorm.weight", (d.hidden,)
        yield at + "post_attention_layernorm.weight", (d.hidden,)
        if eagle:
            yield at + "hidden_norm.weight", (d.hidden,)
        yield at + "self_attn.q_proj.weight", (q, enters)
        yield at + "self_attn.k_proj.weight", (kv, enters)
        yield at + "self_attn.v_proj.weight", (kv, enters)
        yield at + "self_attn.o_proj.weight", (d.hidden, q)
        if d.qk_norm:
            yield at + "self_attn.q_norm.weight", (d.head_dim,)
            yield at + "self_attn.k_norm.weight", (d.head_dim,)
        yield at + "mlp.gate_proj.weight", (d.ffn, d.hidden)
        yield at + "mlp.up_proj.weight", (d.ffn, d.hidden)
        yield at + "mlp.down_proj.weight", (d.hidden, d.ffn)
    if isinstance(config, EagleConfig):
        if config.fc_norm:
            yield from ((f"fc_norm.{i}.weight", (d.hidden,)) for i in range(hidden_layers))
        if config.norm_before_fc:
            yield "input_norm.weight", (hidden_layers * d.hidden,)
        return
    yield "hidden_norm.weight", (d.hidden,)
    if config.markov_rank:
        yield "markov_head.markov_w1.weight", (config.vocab, config.markov_rank)
        yield "markov_head.markov_w2.weight", (config.draft_vocab, config.markov_rank)
    if config.confidence:
        yield "confidence_head.proj.weight", (1, d.hidden + config.confidence_markov * config.markov_rank)
        yield "confidence_head.proj.bias", (1,)
