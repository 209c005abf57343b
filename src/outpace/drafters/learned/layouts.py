"""The layouts in which learned drafters are published: what config.json says, what the tensors are called there; read
and written.

Layouts: speculators 0.9 (eagle3, peagle, dspark, dflash, dflash2), EAGLE-3's own flat one, which is P-EAGLE's, too,
z-lab's DFlash and DFlash2, DSpark as DeepSpec and as SpecForge write it, DeepSpec's EAGLE-3, Medusa's (vLLM's names,
and the older ones of its authors). A file is untrusted: what it says is either understood or refused by name, since a
drafter that is misread drafts badly without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outpace.drafters.learned.config import (
    Config,
    Decoder,
    EagleConfig,
    MedusaConfig,
    ParallelConfig,
    Shapes,
)
from outpace.models import rope as ropes
from outpace.models.weights.facts import Facts

# -- reading -----------------------------------------------------------------------------------------------------------

SPECULATORS = "0.9.0"  # whose layout is written
METHODS = {
    "eagle3": "eagle",
    "peagle": "eagle",
    "dspark": "parallel",
    "dflash": "parallel",
    "dflash2": "parallel",
}  # speculators' names, and ours
NAMES = {EagleConfig: "eagle3", ParallelConfig: "dspark"}
_EAGLE_LAYERS, _PARALLEL_LAYERS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")
_EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "PEagleDraftModel")
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # P-EAGLE's mask token, as readers call it
_DEEPSPEC = {"Qwen3DSparkModel": False, "Gemma4DSparkModel": True}  # whether its layers are Gemma 4's
_DEEPSPEC_EAGLE = {"Qwen3Eagle3Model": False, "Gemma4Eagle3Model": True}
_BLOCKS = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2", "DSparkDraftModel": "dspark"}
_UNREAD = {"xpress": "XPress's heads"}  # what it is of a layout that is known, but not read
# What DFlash2 calls the parts of a Markov head.
_SELECTOR = {
    "candidate_selector.predecessor_codebook": "markov_head.markov_w1.weight",
    "candidate_selector.successor_codebook": "markov_head.markov_w2.weight",
    "candidate_selector.hidden_projection.weight": "markov_head.hidden_projection.weight",
}
# What training leaves in a file although the target has it, or it follows from the description.
IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq", "mask_embedding")
MAX_VOCAB = 1 << 22
_REMEDY = "use a drafter without it"


def describe(facts: Facts, own: Facts, config: Mapping[str, Any], shapes: Shapes) -> tuple[str, Config]:
    """The method and shape that a config.json and its tensors' shapes describe; ``own``: our object in it. Raises
    ModelError."""
    if "speculators_model_type" in config:
        method, found = speculators(facts, shapes)
        return method, _as_stored(found, own, shapes)
    if is_medusa(config):
        return medusa(facts, own, shapes)
    named = {*facts.listed("architectures")}
    for name in named & _DEEPSPEC.keys():
        return "parallel", _deepspec(facts, _DEEPSPEC[name])
    for name in named & _BLOCKS.keys():
        return "parallel", _block(facts, _BLOCKS[name], shapes)
    for name in named & _DEEPSPEC_EAGLE.keys():
        return "eagle", _deepspec_eagle(facts, _DEEPSPEC_EAGLE[name])
    if is_eagle(facts, shapes):
        return "eagle", _as_stored(flat_eagle(facts, shapes), own, shapes)
    raise facts.fail(
        f"it describes {config.get('architectures') or config.get('model_type')!r}: give a drafter in the layout of "
        "speculators, EAGLE-3, DFlash, DSpark or Medusa"
    )


def _as_stored(config: EagleConfig | ParallelConfig, own: Facts, shapes: Shapes) -> Config:
    """Of makers that embed tokens by the target's rows as they are stored, where the target may scale them; a file of
    ours says what it was made of."""
    if own.all:
        scale = own.number("embedding_scale") if own.get("embedding_scale") is not None else None
    else:
        scale = None if "embed_tokens.weight" in shapes else 1.0
    return replace(config, decoder=replace(config.decoder, embedding_scale=scale))


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of Medusa heads; their authors' has no model_type."""
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def is_eagle(facts: Facts, shapes: Shapes) -> bool:
    """Whether a config.json in the style of a Llama model is an EAGLE-3 drafter's: its authors call it a Llama."""
    named = {*facts.listed("architectures")}
    return bool(named & {*_EAGLE}) or ("LlamaForCausalLM" in named and {"fc.weight", "d2t"} <= shapes.keys())


def canonical(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Canonical name -> the file's, of the tensors that count. ``d2t``, ``t2d`` and ``token_map`` keep their names."""
    medusa = is_medusa(config)
    found = {}
    for name in names:
        if not name.endswith(IGNORED):
            own = name.replace("midlayer.", "layers.0.").removeprefix("logit_head.")  # SpecForge's early DSpark
            found[_medusa_name(name) if medusa else _SELECTOR.get(own, own)] = name
    if medusa and config.get("original_lm_head") and "lm_head.weight" not in found and "lm_heads.0.weight" in found:
        shared = found["lm_heads.0.weight"]  # one head for all, although each is listed
        found = {name: tensor for name, tensor in found.items() if not name.startswith("lm_heads.")}
        found["lm_head.weight"] = shared
    return found


def _medusa_name(name: str) -> str:
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    parts = name.split(".")
    if len(parts) < 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return name
    head, layer = parts[:2]
    if parts[2] == "linear":
        return f"blocks.{head}.layers.{layer}.{'.'.join(parts[3:])}"
    return f"lm_heads.{head}.{'.'.join(parts[2:])}"


def speculators(facts: Facts, shapes: Shapes) -> tuple[str, EagleConfig | ParallelConfig]:
    """The method and shape of a speculators config. Raises ModelError for what this library does not run."""
    kind = facts.get("speculators_model_type")
    if isinstance(kind, str) and kind in _UNREAD:
        raise facts.fail(f"speculators_model_type is {kind!r}, and {_UNREAD[kind]} are not read: {_REMEDY}")
    if not isinstance(kind, str) or kind not in METHODS:
        raise facts.fail(f"speculators_model_type is {kind!r}: {', '.join(METHODS)} and Medusa are read")
    layer = facts.part("transformer_layer_config")
    model = layer.get("model_type", "llama")
    if model not in ("llama", "qwen3"):
        raise layer.fail(f"its layers are those of {model!r}: llama and qwen3 are read")
    _same_hidden(facts, layer)
    vocab = layer.whole("vocab_size", most=MAX_VOCAB)
    draft = facts.whole("draft_vocab_size", vocab, most=vocab)
    if METHODS[kind] == "eagle":
        decoder = _decoder(layer, model == "qwen3", None if kind == "peagle" else 1)
        flags = {name: facts.flag(name, False) for name in _FLAGS}
        config = _eagle(facts, decoder, vocab, draft, _hidden_layers(facts, _EAGLE_LAYERS), flags)
        if kind == "eagle3":
            return "eagle", config
        proposed = facts.part("speculators_config").get("proposal_methods")
        first = proposed[0] if isinstance(proposed, list) and proposed and isinstance(proposed[0], dict) else {}
        return "eagle", _masked(facts, config, facts.about(first).whole("speculative_tokens", config.depths, most=64))
    hidden_layers = _hidden_layers(facts, _PARALLEL_LAYERS)
    if not hidden_layers:
        raise facts.fail(f"{_PARALLEL_LAYERS} is missing: name the target's layers that it reads")
    decoder = _decoder(layer, True, None)  # its layers are Qwen3's, whatever the model_type
    block, mask = facts.whole("block_size", most=1024), facts.whole("mask_token_id", most=vocab - 1, least=0)
    dspark, second = kind == "dspark", kind == "dflash2"
    anchor = facts.flag("sample_from_anchor", None if dspark else False)
    heads, markov = _heads(facts, 256, True, True) if dspark else ((0, False, False), "vanilla")
    windows = any(decoder.windows)
    causal = not (facts.flag("sliding_window_non_causal", second) and windows)
    shape = decoder, vocab, draft, hidden_layers, block, mask
    if markov == "rnn" and not anchor:
        raise facts.fail(f"its recurrent Markov head begins before what is drafted (sample_from_anchor): {_REMEDY}")
    found = ParallelConfig(*shape, *heads, anchor, causal, windows, markov)
    return "parallel", _second(facts, found) if second else found


def _second(facts: Facts, config: ParallelConfig) -> ParallelConfig:
    """DFlash2: convolutions over a block's slots, and what chooses among each slot's likeliest tokens."""
    d = config.decoder
    taps, group = facts.whole("conv_kernel_size", 2, most=config.block), facts.whole("conv_group_size", 16)
    if d.hidden % group:
        raise facts.fail(f"conv_group_size is {group}, which does not divide its hidden_size, {d.hidden}")
    most = min(64, config.draft_vocab)
    return replace(
        config, decoder=replace(d, conv=(taps, group)), markov="selector",
        markov_rank=facts.whole("selector_rank", 256), candidates=facts.whole("selector_top_k", 16, most=most),
    )  # fmt: skip


def _heads(facts: Facts, rank: int, confidence: bool, reads: bool) -> tuple[tuple[int, bool, bool], str]:
    """DSpark's: the Markov head's rank, whether there is a confidence head, and whether that reads the token before;
    and the Markov head's kind. Given: what is meant where nothing is said."""
    kind = facts.get("markov_head_type")
    kind = "vanilla" if kind is None else kind
    if kind not in ("vanilla", "gated", "rnn"):
        raise facts.fail(f"its markov_head_type is {kind!r}: vanilla, gated, rnn are read")
    rank, head = facts.whole("markov_rank", rank, least=0), facts.flag("enable_confidence_head", confidence)
    reads = facts.flag("confidence_head_with_markov", reads)
    if head and reads and not rank:
        raise facts.fail("confidence_head_with_markov needs a markov_rank above 0")
    return (rank, head, reads), kind if rank else "vanilla"


def _deepspec(facts: Facts, gemma: bool) -> ParallelConfig:
    """DSpark as deepseek-ai/DeepSpec writes it: all keys beside a Qwen3's or Gemma 4's, the pending token's place
    predicts, too. A DFlash of its has the same layout, without heads."""
    vocab = facts.whole("vocab_size", most=MAX_VOCAB)
    mask, block = facts.whole("mask_token_id", most=vocab - 1, least=0), facts.whole("block_size", most=1024)
    heads, markov = _heads(facts, 0, False, False)
    if not facts.flag("sample_from_anchor", True):
        raise facts.fail(f"its sample_from_anchor is False: {_REMEDY}")
    decoder = _gemma(facts, None) if gemma else _decoder(facts, True, None)
    return ParallelConfig(decoder, vocab, vocab, _outputs(facts), block, mask, *heads, markov=markov)


def _deepspec_eagle(facts: Facts, gemma: bool) -> EagleConfig:
    """EAGLE-3 as DeepSpec writes it: a Qwen3's or Gemma 4's keys, embedding and head of its own, what is fed back is
    not normed."""
    vocab = facts.whole("vocab_size", most=MAX_VOCAB)
    return EagleConfig(_gemma(facts, 1) if gemma else _decoder(facts, True, 1), vocab, vocab, _outputs(facts))


def _gemma(facts: Facts, layers: int | None) -> Decoder:
    """Gemma 4's full layers: the heads and rotations of these, an embedding that is scaled by its width."""
    if facts.get("hidden_activation") != "gelu_pytorch_tanh":
        raise facts.fail(f"its activation is {facts.get('hidden_activation')!r}: gelu_pytorch_tanh is read")
    for key in ("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp"):
        if facts.get(key):
            raise facts.fail(f"it has {key}: {_REMEDY}")
    if "sliding_attention" in facts.listed("layer_types"):
        raise facts.fail(f"its layers have 'sliding_attention': {_REMEDY}")
    shared = bool(facts.get("attention_k_eq_v"))
    heads = "num_global_key_value_heads" if shared else "num_key_value_heads"
    full = facts.part("rope_parameters").part("full_attention").all or facts.get("rope_parameters")
    changed = {"hidden_act": "silu", "head_dim": facts.get("global_head_dim"), "num_key_value_heads": facts.get(heads),
               "rope_parameters": full}  # fmt: skip
    d = _decoder(facts.about({**facts.all, **changed}), True, layers)
    cap = facts.number("final_logit_softcapping") if facts.get("final_logit_softcapping") is not None else 0.0
    return replace(d, gemma=True, values=not shared, embedding_scale=math.sqrt(d.hidden), logit_cap=cap)


def _block(facts: Facts, kind: str, shapes: Shapes) -> ParallelConfig:
    """DFlash and DFlash2 as z-lab writes them, and SpecForge, whose DSpark predicts at the pending token's place, too,
    and has its keys beside the decoder's, in ``dspark_config`` or in ``dflash_config``; what is left out of its
    confidence head follows from the tensors."""
    nested = facts.about({**facts.all, **facts.part("dspark_config").all, **facts.part("dflash_config").all})
    dspark, second = kind == "dspark", kind == "dflash2"
    for key, neutral in (("output_multiplier", 1), ("shift_label", False), ("pure_draft_prefix_len", 0),
                         ("causal_head_type", None), ("sample_from_anchor", dspark)):  # fmt: skip
        if nested.get(key, neutral) != neutral:
            raise facts.fail(f"its {key} is {nested.get(key)!r}: {_REMEDY}")
    if nested.get("projector_type", kind) != kind:
        raise facts.fail(f"its projector_type is {nested.get('projector_type')!r}: {_REMEDY}")
    vocab = facts.whole("vocab_size", most=MAX_VOCAB)
    mask = nested.whole("mask_token_id", most=vocab - 1, least=0)
    block = nested.whole("block_size", most=1024, least=2)
    scale, cap = nested.get("input_embedding_scale"), nested.get("final_logit_softcapping")
    decoder = replace(
        _decoder(facts, True, None),
        embedding_scale=None if scale is None else nested.number("input_embedding_scale"),
        logit_cap=nested.number("final_logit_softcapping") if cap else 0.0,
    )
    ids = _outputs(nested) if nested.get("target_layer_ids") is not None else _spread(facts, decoder.layers)
    reads = shapes.get("confidence_head.proj.weight", (0,))[-1]
    heads, markov = _heads(nested, 0, reads > 0, reads > decoder.hidden) if dspark else ((0, False, False), "vanilla")
    causal = facts.get("is_causal") is not False and not (second and facts.get("is_causal") is None)
    config = ParallelConfig(decoder, vocab, vocab, ids, block, mask, *heads, dspark, causal, markov=markov)
    return _second(nested, config) if second else config


def _outputs(facts: Facts) -> tuple[int, ...]:
    """``target_layer_ids``, which count layers' outputs from 0, as we do."""
    ids = facts.get("target_layer_ids")
    whole = isinstance(ids, list) and ids and all(type(i) is int and i >= -1 for i in ids)
    if not whole or ids != sorted(set(ids)):
        raise facts.fail(f"target_layer_ids is {ids!r}: it must be whole numbers from 0, ascending")
    if ids[0] < 0:
        raise facts.fail(f"it reads the target's embeddings (layer -1): {_REMEDY}")
    return tuple(ids)


def _spread(facts: Facts, layers: int) -> tuple[int, ...]:
    """The layers that DFlash reads where its file names none: from the second to the third last, evenly."""
    count = facts.whole("num_target_layers", most=1 << 16, least=4)
    if layers == 1:
        return (count // 2,)
    return tuple(round(1 + i * (count - 4) / (layers - 1)) for i in range(layers))


def flat_eagle(facts: Facts, shapes: Shapes) -> EagleConfig:
    """An EAGLE-3 drafter whose config.json is a Llama model's with ``draft_vocab_size``."""
    nested = facts.part("eagle_config")
    if nested.get("use_aux_hidden_state", True) is not True:
        raise facts.fail("it reads no hidden states (use_aux_hidden_state), as EAGLE-1 and 2 do: only EAGLE-3 is read")
    # Where both are, the nested ones count as SGLang does, from the outputs.
    hidden_layers = _hidden_layers(facts if facts.get(_EAGLE_LAYERS) else nested, _EAGLE_LAYERS)
    vocab = facts.whole("vocab_size", most=MAX_VOCAB)
    draft = facts.whole("draft_vocab_size", vocab, most=vocab)
    flags = {name: facts.flag(name, False) for name in ("fc_norm", "norm_output")}
    flags["norm_before_fc"] = (nested if nested.get("norm_before_fc") is not None else facts).flag(
        "norm_before_fc", False
    )
    _same_hidden(facts, facts)
    layers = sum(name.endswith("self_attn.q_proj.weight") for name in shapes)
    if "mask_hidden" not in shapes and layers > 1:
        raise facts.fail(f"it has {layers} layers, and EAGLE-3 has one: {_REMEDY}")
    decoder = _decoder(facts, False, None, layers)
    config = _eagle(facts, decoder, vocab, draft, hidden_layers, flags, False)
    return _masked(facts, config, config.depths) if "mask_hidden" in shapes else config


def _masked(facts: Facts, config: EagleConfig, depths: int) -> EagleConfig:
    """The same as P-EAGLE. In the flat layout nothing says how deep it was trained: 8, as by default."""
    for key in _MASKS:
        if facts.get(key) is not None:
            return replace(config, mask_token=facts.whole(key, most=config.vocab - 1, least=0), depths=depths)
    raise facts.fail(f"it does not say its mask token ({', '.join(_MASKS)}): write the one that it was trained with")


def medusa(facts: Facts, own: Facts, shapes: Shapes) -> tuple[str, Config]:
    """Medusa heads; what an older config.json leaves out follows from the tensors. ``own``: our object in it."""
    listed = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    # The authors' config.json names fewer heads than their files have.
    heads = facts.whole("num_heads", len(listed), most=64)
    layers = facts.whole("num_hidden_layers", facts.get("medusa_num_layers", 1), most=64)
    first = shapes.get("blocks.0.layers.0.weight", ())
    hidden = facts.whole("hidden_size", first[0] if first else None)
    own_heads = "lm_heads.0.weight" in shapes
    rows = shapes.get("lm_heads.0.weight" if own_heads else "lm_head.weight", ())
    known = shapes.get("token_map", ())
    vocab = facts.whole("vocab_size", rows[0] if rows else None, most=MAX_VOCAB)
    draft = facts.whole("truncated_vocab_size", known[0] if known else vocab, most=vocab)
    if facts.number("logit_scale", 1.0) != 1.0:
        raise facts.fail(f"it scales its logits (logit_scale): {_REMEDY}")
    bias = "blocks.0.layers.0.bias" in shapes
    return "medusa", MedusaConfig(hidden, vocab, draft, heads, layers, _tree(own, heads), bias, own_heads)


def _tree(facts: Facts, heads: int) -> tuple[tuple[int, ...], ...]:
    """The static tree of a Medusa checkpoint of ours: paths of ranks from 0."""
    tree = facts.get("tree", [])
    fits = isinstance(tree, list) and all(
        isinstance(path, list) and 1 <= len(path) <= heads and all(type(rank) is int and rank >= 0 for rank in path)
        for path in tree
    )
    if not fits:
        raise facts.fail(f"its tree is not a list of paths of 1 to {heads} ranks from 0: export it again")
    return tuple(tuple(path) for path in tree)


def _eagle(
    facts: Facts, decoder: Decoder, vocab: int, draft: int, hidden_layers: tuple[int, ...], flags: dict[str, bool],
    absent: bool | None = None,
) -> EagleConfig:  # fmt: skip
    # speculators takes a missing norm_before_residual for false, vLLM for true: so it has to be there. In the flat
    # layout both take it for false (``absent``).
    if absent is None and facts.get("norm_before_residual") is None:
        raise facts.fail(
            "it does not say norm_before_residual, and readers differ: write true or false, as it was trained"
        )
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise facts.fail("fc_norm and norm_before_fc exclude each other: keep the one that it was trained with")
    return EagleConfig(decoder, vocab, draft, hidden_layers, facts.flag("norm_before_residual", absent), **flags)


def _hidden_layers(facts: Facts, key: str) -> tuple[int, ...]:
    """Outputs of layers, from 0. speculators and vLLM count a layer's input: their k is the output of layer k - 1."""
    ids = facts.get(key)
    if ids is None:
        return ()
    whole = isinstance(ids, list) and all(type(i) is int and i >= 1 for i in ids)
    if not whole or ids != sorted(set(ids)):
        raise facts.fail(f"{key} is {ids!r}: it must be whole numbers from 1, ascending, since vLLM sorts them")
    return tuple(i - 1 for i in ids)


def _same_hidden(facts: Facts, layer: Facts) -> None:
    hidden = layer.whole("hidden_size")
    if facts.whole("target_hidden_size", hidden) != hidden:
        raise facts.fail(f"target_hidden_size is not its own hidden_size, {hidden}: {_REMEDY}")


def _decoder(facts: Facts, qk_norm: bool, layers: int | None, counted: int = 0) -> Decoder:
    """``layers``: how many there must be; ``counted``: how many there are, whatever num_hidden_layers says (some have
    the target's)."""
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if facts.get(key):
            raise facts.fail(f"it has {key}: {_REMEDY}")
    if facts.get("hidden_act", "silu") != "silu":
        raise facts.fail(f"its activation is {facts.get('hidden_act')!r}: silu is read")
    hidden, heads = facts.whole("hidden_size"), facts.whole("num_attention_heads", most=1 << 16)
    found = counted or facts.whole("num_hidden_layers", 1, most=1024)
    if layers is not None and found != layers:
        raise facts.fail(f"it has {found} layers: {layers} is read")
    kv_heads = facts.whole("num_key_value_heads", heads, most=heads)
    head_dim = facts.whole("head_dim", max(1, hidden // heads), most=1 << 12)
    if heads % kv_heads or head_dim % 2:
        raise facts.fail(f"{heads} heads, {kv_heads} KV heads of {head_dim} do not fit together")
    theta, scaling = _rotations(facts)
    decoder = Decoder(
        hidden, found, heads, kv_heads, head_dim, facts.whole("intermediate_size"), facts.number("rms_norm_eps", 1e-6),
        theta, facts.whole("max_position_embeddings", 2048), qk_norm, _windows(facts, found), scaling,
    )  # fmt: skip
    ropes.from_config(facts.about({**scaling, "rope_theta": theta}), head_dim, False, decoder.max_length)
    return decoder


def _windows(facts: Facts, layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 where it has none; empty where none has."""
    kinds = facts.listed("layer_types")
    if not kinds and facts.get("use_sliding_window") and facts.get("sliding_window"):  # as Qwen3 says it
        full = facts.whole("max_window_layers", 28, least=0)
        kinds = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(layers - full, 0)
    if unknown := {*kinds} - {"full_attention", "sliding_attention"}:
        raise facts.fail(f"its layers have {sorted(unknown)[0]!r}: {_REMEDY}")
    if "sliding_attention" not in kinds[:layers]:
        return ()
    if len(kinds) < layers or facts.get("use_sliding_window") is False:
        raise facts.fail(f"layer_types names windows, but not of all {layers} layers, or use_sliding_window is false")
    window = facts.whole("sliding_window", most=1 << 24)
    return tuple(window * (kind == "sliding_attention") for kind in kinds[:layers])


def _rotations(facts: Facts) -> tuple[float, dict[str, Any]]:
    """rope_theta, and what stretches the rotations. Where kinds of layers differ, windowed ones count."""
    rope = facts.part("rope_parameters" if facts.get("rope_parameters") else "rope_scaling")
    rope = rope.part("sliding_attention") if rope.get("sliding_attention") else rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", 1.0) != 1.0 and kind != "proportional"
    if part or rope.get("full_attention"):
        raise facts.fail(f"its rope turns a part of each head, or differs by layer: {_REMEDY}")
    theta = rope.number("rope_theta", facts.number("rope_theta", 1e4))
    if kind in ("default", "mrope"):  # without images the parts of a position are all the same
        return theta, {}
    told = {key: value for key, value in rope.all.items() if key not in ("rope_theta", "type")}
    return theta, {**told, "rope_type": kind}


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target as other programs find it: ``name`` a Hugging Face id or folder (None: not known)."""

    name: str | None = None
    architectures: tuple[str, ...] = ()


def to_speculators(config: EagleConfig | ParallelConfig, verifier: Verifier, tokens: int, dtype: str) -> dict[str, Any]:
    """A speculators config; ``tokens``: drafted a step unless somebody says otherwise."""
    kind = published_as(config)
    if isinstance(config, EagleConfig) and config.mask_token is not None:
        tokens = config.depths
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    common = {
        "architectures": [{"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}.get(kind, "DSparkSpeculator")],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS,
        "dtype": dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.decoder.hidden,
        "transformer_layer_config": _layer(config.decoder, config.vocab, dtype),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
    }
    if isinstance(config, EagleConfig):
        ids = _layer_ids(_EAGLE_LAYERS, config.hidden_layers)
        mask = {} if config.mask_token is None else {"mask_token_id": config.mask_token}
        return {**common, **_flags(config), **ids, **mask, "embed_requires_grad": False}
    return {
        **common,
        **_layer_ids(_PARALLEL_LAYERS, config.hidden_layers),
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.sample_from_anchor,  # absent, speculators takes it for true, vLLM for false
        "sliding_window_non_causal": not config.causal,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_markov,
    }


def published_as(config: EagleConfig | ParallelConfig) -> str:
    """speculators' name for its method."""
    return "peagle" if isinstance(config, EagleConfig) and config.mask_token is not None else NAMES[type(config)]


def to_flat_eagle(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """A config in the flat layout of EAGLE-3's authors, whose tensors have the names of ``flat_name``."""
    return {
        "architectures": [_EAGLE[0]],
        **_layer(config.decoder, config.vocab, dtype),
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.decoder.hidden,
        **_flags(config),
        **_layer_ids(_EAGLE_LAYERS, config.hidden_layers),
    }


def to_sglang(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """The flat layout as SGLang reads it, which counts outputs of layers from 0, in an object of its own."""
    own = {"use_aux_hidden_state": True, _EAGLE_LAYERS: [*config.hidden_layers]}
    return {**to_flat_eagle(config, dtype), "eagle_config": own}


def flat_name(name: str) -> str:
    """What the flat layout calls a tensor."""
    return name.replace("layers.0.", "midlayer.")


def to_medusa(config: MedusaConfig) -> dict[str, Any]:
    """A config of Medusa heads as vLLM reads it."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden,
        "vocab_size": config.vocab,
        "truncated_vocab_size": config.draft_vocab,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "original_lm_head": not config.own_heads,
        "medusa_fc_bias": config.bias,
    }


def _flags(config: EagleConfig) -> dict[str, bool]:
    """All of them, always: readers differ in what they take an absent one for."""
    return {name: getattr(config, name) for name in ("norm_before_residual", *_FLAGS)}


def _layer_ids(key: str, hidden_layers: tuple[int, ...]) -> dict[str, list[int] | None]:
    """speculators and vLLM count a layer's input, from 0: the output of layer k - 1 is their k."""
    return {key: [layer + 1 for layer in hidden_layers] or None}


def _layer(decoder: Decoder, vocab: int, dtype: str) -> dict[str, Any]:
    """A transformers configuration of the drafter's layers; ``rope_theta`` where old and new versions look for it."""
    return {
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "vocab_size": vocab,
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.ffn,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": decoder.max_length,
        "rms_norm_eps": decoder.eps,
        "rope_theta": decoder.rope_theta,
        "rope_parameters": {"rope_type": "default", **decoder.scaling, "rope_theta": decoder.rope_theta},
        **_windowed(decoder),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _windowed(decoder: Decoder) -> dict[str, Any]:
    """Keys of a decoder whose layers have windows, which are all of one length."""
    if not any(decoder.windows):
        return {}
    kinds = ["sliding_attention" if window else "full_attention" for window in decoder.windows]
    return {"layer_types": kinds, "sliding_window": max(decoder.windows), "use_sliding_window": True}
