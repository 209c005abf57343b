"""What an architecture is: its tensors' names in both spellings, where its numbers stand, and how its layers differ.

The base is Llama: RMSNorm before both branches, SwiGLU, rotation of half against half over the whole head, scores
scaled by head_dim^-0.5. ``families`` has the table of those that are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Names = Mapping[str, tuple[str, str]]  # a part -> GGUF's name, Hugging Face's

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm", "q_norm", "k_norm")  # of a layer, as it has them
BIASES = ("q", "k", "v", "o")  # of a layer, where the files have them
OUTER: Names = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
SPELLINGS = ("blk.{}.{}", "model.layers.{}.{}")  # of a part of a layer: GGUF's, Hugging Face's

# Of a mixture of experts: the names of a layer's tensor, whole, in GGUF files and in Hugging Face's, the first that a
# file has; {} is an expert's number, and without it the tensor has all experts.
Places = tuple[tuple[str, ...], tuple[str, ...]]

# The numbers of a description: our name -> GGUF's key behind the architecture's, config.json's.
KEYS: Names = {
    "hidden": ("embedding_length", "hidden_size"),
    "inner": ("feed_forward_length", "intermediate_size"),
    "layers": ("block_count", "num_hidden_layers"),
    "heads": ("attention.head_count", "num_attention_heads"),
    "kv_heads": ("attention.head_count_kv", "num_key_value_heads"),
    "head_dim": ("attention.key_length", "head_dim"),
    "eps": ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    "max_length": ("context_length", "max_position_embeddings"),
    "window": ("attention.sliding_window", "sliding_window"),
    "full_every": ("attention.sliding_window_pattern", "sliding_window_pattern"),
    "attention_scale": ("attention.scale", "attention_multiplier"),
    "embedding_scale": ("embedding_scale", "embedding_multiplier"),
    "residual_scale": ("residual_scale", "residual_multiplier"),
    "logit_divisor": ("logit_scale", "logits_scaling"),
    "score_cap": ("attn_logit_softcapping", "attn_logit_softcapping"),
    "logit_cap": ("final_logit_softcapping", "final_logit_softcapping"),
}

SCALES = ("attention_scale", "embedding_scale", "residual_scale", "logit_divisor")  # of ``KEYS``


@dataclass(frozen=True, slots=True)
class RopeSource:
    """A table of rotations and where its base stands. ``layers``: whose table, as ``layer_types`` calls them."""

    base: float  # where the files do not say
    gguf: str = "rope.freq_base"
    config: str = "rope_theta"
    layers: str = "full_attention"


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers see a window, where the files give its size."""

    every: bool = False  # all layers; else config.json's layer_types and GGUF's pattern say which
    full_every: int = 0  # where they do not say: every so-many-th layer sees all; 0: none does
    full_every_key: bool = True  # config.json may say another number
    last_full: bool = False  # in folders the last layer sees all, whatever they say
    flag: str | None = None  # a key of config.json without which there are none; GGUF files then have none, too
    first: str | None = None  # a key of config.json: the first windowed layer, where layer_types does not say
    unrotated: bool = False  # where it does not say, layers without rotation have one
    every_other_below: str | None = None  # a key: where it does not say, every other layer before that one, from 0 on
    gguf_size: int = 0  # where a GGUF file does not say it; 0: there are none then


_EXPERTS: Mapping[str, Places] = {
    "gate": (("ffn_gate_exps.weight",), ("mlp.experts.{}.gate_proj.weight", "mlp.experts.gate_up_proj")),
    "up": (("ffn_up_exps.weight",), ("mlp.experts.{}.up_proj.weight", "mlp.experts.gate_up_proj")),
    "down": (("ffn_down_exps.weight",), ("mlp.experts.{}.down_proj.weight", "mlp.experts.down_proj")),
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """Feed-forward layers that are mixtures of experts: their tensors, and where their numbers stand in config.json.

    Parts of ``experts`` that have one tensor are halves of each expert's rows. Layers are mixtures unless a key says
    otherwise.
    """

    router: Places = (("ffn_gate_inp.weight",), ("mlp.gate.weight",))
    experts: Mapping[str, Places] = field(default_factory=lambda: _EXPERTS)
    shared: Names = field(default_factory=dict)  # the matrices of an expert that every token goes to
    shared_gate: Places | None = None  # one row: the logistic of its product is the shared expert's weight
    choice_bias: Places | None = None  # is added to scores for the choice alone ...
    choice_flag: str | None = None  # ... unless this key of config.json is false
    biases: Mapping[str, Places] = field(default_factory=dict)  # of "router", "gate", "up" and "down"
    woven: bool = False  # Hugging Face has inputs by outputs, of gate and up in turn
    flag: str | None = None  # a key of config.json without which no layer is one
    # Norms without an offset, by the runtime's names: see ``Experts`` in native/model/weights.h.
    norms: Mapping[str, Places] = field(default_factory=dict)
    router_scale: Places | None = None  # the router reads its input under this norm, times hidden^-0.5
    expert_scale: Places | None = None  # of the weights, by expert
    mxfp4: bool = False  # or, in a quantised folder, outputs by blocks of inputs, and scales of these blocks
    count: str = "num_experts"
    optional: bool = False  # where there are none of them, all layers are dense
    used: str = "num_experts_per_tok"
    inner: str = "moe_intermediate_size"
    shared_inner: str | None = None  # of the shared expert ...
    shared_count: str | None = None  # ... or how many times ``inner`` it is; 0: there is none
    score: str = "softmax"  # or "sigmoid", or "of_chosen": the softmax of the chosen experts' logits
    renormalise: bool = True  # weights of the chosen ones sum to 1 ...
    renormalise_key: str | None = None  # ... or config.json says
    gguf_renormalises: bool = True  # GGUF files mean that, but where ``renormalise_in_gguf``
    renormalise_in_gguf: bool = False  # expert_weights_norm says
    least_total: float = 0.0  # that weights are divided by ...
    least_total_key: str | None = None  # ... or config.json says
    scale: str | None = None  # of the weights
    first: str | None = None  # the first layer that is one
    last: str | None = None  # and the last; -1: of all
    step: str | None = None  # each so many layers one is
    kinds: str | None = None  # or a list says of each layer whether it is "sparse" or "dense"; else the first is dense
    groups: str = ""  # of experts, of which ``used_groups`` are chosen before experts are ...
    used_groups: str = ""
    grouped: tuple[str, str] | None = None  # ... if this key of config.json has this value
    best_two: bool = False  # a group's score is that of its best two experts, not of the best one
    dense: str | None = None  # layers that are none


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention to latent vectors (arXiv 2405.04434): its tensors beside the family's own q, k, o and norms, of which q
    reads what ``q_down`` gives, and k gives latent vectors and keys' rotated part.
    """

    q_down: tuple[str, str] = ("attn_q_a", "self_attn.q_a_proj")
    q_alone: tuple[str, str] = ("attn_q", "self_attn.q_proj")  # q of models without ``q_down``
    both_up: tuple[str, str] = ("attn_kv_b", "self_attn.kv_b_proj")  # of each head the rows of keys, then of values
    k_up: str = "attn_k_b"  # GGUF files may have both apart, keys' transposed, by head
    v_up: str = "attn_v_b"
    neighbours: bool = True  # pairs that turn together stand side by side ...
    neighbours_key: str | None = None  # ... or config.json says


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers of gated delta nets, in the place of attention: their tensors.

    Matrices of one name are one tensor, whose rows stand by key head: of each those for q, k, v and z, or b and a.
    """

    matrices: Names = field(
        default_factory=lambda: {
            "qkv": ("attn_qkv", "linear_attn.in_proj_qkv"),
            "z": ("attn_gate", "linear_attn.in_proj_z"),
            "b": ("ssm_beta", "linear_attn.in_proj_b"),
            "a": ("ssm_alpha", "linear_attn.in_proj_a"),
            "o": ("ssm_out", "linear_attn.out_proj"),
        }
    )
    convolution: Places = (("ssm_conv1d.weight",), ("linear_attn.conv1d.weight",))
    decay: Places = (("ssm_a",), ("linear_attn.A_log",))  # GGUF has -e^A_log
    dt_bias: Places = (("ssm_dt.bias",), ("linear_attn.dt_bias",))
    norm: Places = (("ssm_norm.weight",), ("linear_attn.norm.weight",))
    attends_every: int = 4  # each so many layers one attends, where the files do not say
    tiled: bool = True  # in GGUF files a value head reads key head i modulo their number


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Layers of state spaces (Mamba-2), in the place of attention or ``beside`` it: their tensors.

    Rows of ``into`` are the gate's, the inputs', B's, C's and the time steps'.
    """

    into: tuple[str, str] = ("ssm_in", "mamba.in_proj")
    o: tuple[str, str] = ("ssm_out", "mamba.out_proj")
    convolution: Places = (("ssm_conv1d.weight",), ("mamba.conv1d.weight",))
    convolution_bias: Places = (("ssm_conv1d.bias",), ("mamba.conv1d.bias",))
    decay: Places = (("ssm_a",), ("mamba.A_log",))  # GGUF has -e^A_log
    dt_bias: Places = (("ssm_dt.bias",), ("mamba.dt_bias",))
    skip: Places = (("ssm_d",), ("mamba.D",))
    norm: Places = (("ssm_norm.weight",), ("mamba.norm.weight",))
    # Its numbers in config.json. ``expand``: how many times hidden_size its heads have together; None: any size.
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    expand: str | None = "mamba_expand"
    inner: str | None = None  # the key of that size, where config.json may say it itself
    normed: str | None = None  # a key without which there is no norm; GGUF files have the norm or not
    norm_first: str | None = None  # a key with which the norm comes before the gate, which is refused
    beside: bool = False  # every layer has one beside attention

    @property
    def matrices(self) -> Names:
        return {**dict.fromkeys(("z", "qkv", "a"), self.into), "o": self.o}


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Layers of short convolutions between two gates, in the place of attention: their tensors."""

    matrices: Names = field(
        default_factory=lambda: {
            "in": ("shortconv.in_proj", "conv.in_proj"), "o": ("shortconv.out_proj", "conv.out_proj"),
        }
    )  # fmt: skip
    convolution: Places = (("shortconv.conv.weight",), ("conv.conv.weight",))


@dataclass(frozen=True, slots=True)
class Heads:
    """Layers behind the last one that only draft (multi-token prediction, arXiv 2412.19437): what they have beside the
    parts of any layer. Names that begin with one of the family's ``drafts`` stand for themselves."""

    join: Places = (("nextn.eh_proj.weight",), ("eh_proj.weight",))  # of the token's embedding and the target's output
    embed_norm: Places = (("nextn.enorm.weight",), ("enorm.weight",))
    features_norm: Places = (("nextn.hnorm.weight",), ("hnorm.weight",))
    norm: Places = (("nextn.shared_head_norm.weight",), ("shared_head.norm.weight",))
    layer: str | None = None  # how a folder spells their parts, by their number among them; None: as of other layers


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture. ``layer``: a layer's tensors by part, norms where it has them.

    Parts of one name are one fused tensor, its rows in the order of ``MATRICES``. What is not named here is not read:
    transformers passes over such keys of config.json, and a GGUF file that has them is refused (``metadata``).
    """

    name: str
    model: str  # the class in Hugging Face's files
    transformers: str  # model_type
    layer: Names
    gguf: str | None = None  # general.architecture; None: its GGUF files name another family
    gguf_mixed: str | None = None  # of its files with experts, where that is another
    windowed: str | None = None  # the family of its GGUF files that have windows, by name
    mixed: str | None = None  # the family of its GGUF files that have experts, by name
    mixture: Mixture | None = None
    softmax: str | None = None  # the family of its GGUF files whose experts' scores are no sigmoids, by name
    latent: Latent | None = None
    delta: DeltaNet | None = None  # of layers that do not attend
    conv: ShortConv | None = None  # the same
    scan: StateSpace | None = None  # the same
    gated: bool = False  # q has of each head its queries, then what its output is gated by
    sinks: Places | None = None  # logits of each head's softmax that have no value
    yarn_truncates: bool = True  # in GGUF files, which do not say it
    norms_flag: str | None = None  # the key of config.json without which queries and keys have no norms
    heads_beyond: str | None = None  # a key: so many layers behind the last one draft, and are left out
    heads: Heads | None = None  # what those layers have
    drafts: tuple[str, ...] = ()  # beginnings of a folder's tensors that only draft, and are left out
    neighbours: bool = False  # safetensors, too, have the order of rows that ``interleaved`` says
    ropes: tuple[RopeSource, ...] = (RopeSource(1e4),)  # of layers that see all, and of windowed ones where they differ
    rotates_part: bool = False  # of a head, where the files say so
    windows: Windows | None = None
    grows: bool = False  # queries grow with their position, where the files say so
    unrotated_every: int = 0  # each so many layers one has no rotation
    # Keys without whose value no layer has: config.json's with that value, and a flag of GGUF files.
    rotates_if: tuple[str, str, str] | None = None
    rotates: bool = True  # any layer
    # A layer either mixes tokens or feeds them forward. Kinds stand in layers_block_type, or, a letter each, in
    # hybrid_override_pattern; GGUF files have 0 keys, or a feed-forward size of 0, where a layer has none.
    single: bool = False
    multiplied: bool = False  # its config.json has ``multipliers``
    bare: tuple[str, ...] = ()  # parts of a layer whose tensors' names do not end with ".weight" in GGUF files
    layers: str = SPELLINGS[1]  # of a part of a layer, in folders
    norm_offset: float = 0.0  # what safetensors leave out of norm weights; GGUF files have it added
    unit_scale: bool = False  # scores are not scaled
    varied: bool = False  # layers differ in their heads (``layer_shapes``)
    value_norm: bool = False  # each head's values are normed, without weights
    output_scale: Places | None = None  # one number a layer, of what it leaves
    inputs: str | None = None  # the key of the width of tokens' inputs for each layer; 0: there are none
    norms_over_heads: bool = False  # norms of queries and keys run over all heads at once
    interleaved: bool = False  # GGUF stores rows of queries and keys as 0 d/2 1 d/2+1 ... of each head
    activation: str = "silu"  # or "gelu_tanh", or "clamped_silu": gpt-oss's; or "relu2", of layers without a gate
    activation_key: str | None = "hidden_act"  # None: there is no choice
    adjusts_inner: bool = False  # its config.json may say that the inner size is made of the one it gives
    outer: Names = field(default_factory=lambda: OUTER)
    biases: tuple[str, ...] = BIASES  # that a folder's model may have; GGUF files have any of ``BIASES``
    bias_flag: str | None = "attention_bias"  # the key of config.json without which there are none; None: always
    scales: tuple[str, ...] = ()  # those of ``SCALES`` that its files may give
    # "score_cap", "logit_cap": what its files may keep within a bound, softly, and the bound of a file that says none.
    caps: Mapping[str, float] = field(default_factory=dict)
    modules: bool = False  # the Transformers backend runs transformers' modules and reads GGUF files as those say
    width_scales_embedding: bool = False  # embeddings are multiplied by sqrt(hidden)
    query_scalar: bool = False  # config.json has query_pre_attn_scalar^-0.5 for head_dim^-0.5
    wide_scalar_layers: int = 0  # a GGUF file of so many layers has (hidden / heads)^-0.5 for it
    refuses: tuple[str, ...] = ()  # keys of ``decoder.REFUSED`` that its config.json may have
    # What its config.json must say, by key, of each layer where it is a list.
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # of its config.json, where they differ from ``KEYS``
    absent: Mapping[str, Any] = field(default_factory=dict)  # what a config.json leaves out, beyond ``ABSENT``
    aliases: Mapping[str, str] = field(default_factory=dict)  # names that count before those of its config.json
    brings_code: bool = False  # published folders name Python files, which transformers has since made its own

    @property
    def recurrent(self) -> DeltaNet | ShortConv | StateSpace | None:
        """What layers have that do not attend; None: all do."""
        return self.delta or self.conv or self.scan


# How layer_types calls layers that attend, among state spaces.
ATTENDING = ("full_attention", "attention")
FEEDING = ("mlp", "moe")  # and those that only feed forward
# What every family's config.json may leave out, and the value that it then has.
ABSENT: Mapping[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
