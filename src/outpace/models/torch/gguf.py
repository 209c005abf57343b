"""A GGUF file of a known family as a transformers model: configuration and weights, rebuilt from metadata and tensors.

``gguf_others`` has the families that only transformers knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from outpace.common.arrays import F32
from outpace.errors import ModelError
from outpace.models import decoder as decoders
from outpace.models.architecture import KEYS
from outpace.models.decoder import Decoder
from outpace.models.weights import tensors
from outpace.models.weights.gguf import GGUFFile

_VERDICT = "cannot be loaded"


def kv_numbers(gguf: GGUFFile) -> int:
    """Numbers that one position of keys and values takes. Raises ModelError for what ``build`` would not serve."""
    decoder = decoders.from_gguf(gguf, _VERDICT)
    return 2 * decoder.layers * decoder.kv_heads * decoder.head_dim


def build(gguf: GGUFFile, dtype: torch.dtype, device: torch.device) -> Any:
    """The PreTrainedModel in evaluation mode. Raises ModelError when the file is incomplete or not supported."""
    decoder = decoders.from_gguf(gguf, _VERDICT)
    stored = tensors.of_gguf(gguf, decoder)
    if unknown := stored.unused():
        raise ModelError(f"{gguf.path.name} has tensors that a {gguf.architecture} model does not use: {unknown[0]}")
    model = empty(_config(gguf, decoder), dtype, device)
    rotary = model.model.rotary_emb
    for source, table in zip(decoder.family.ropes, decoder.ropes, strict=True):
        if not table.plain:
            layers = "" if len(decoder.ropes) == 1 else f"{source.layers}_"
            frequencies = torch.from_numpy(np.ascontiguousarray(table.frequencies)).to(device)
            setattr(rotary, f"{layers}inv_freq", frequencies)
            setattr(rotary, f"{layers}attention_scaling", table.scale)
    return filled(gguf, model, stored.originals())


def empty(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of ``config`` whose weights are not set."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.tie_weights()
    return model


def filled(gguf: GGUFFile, module: Any, weights: Iterable[tuple[str, F32]]) -> Any:
    """``module`` in evaluation mode with the ``weights`` of ``gguf``, by their names. Raises ModelError unless these
    are the module's, each once."""
    name_of, own = gguf.path.name, module.state_dict(keep_vars=True)
    found: dict[int, str] = {}  # by identity: tied parameters are one
    with torch.no_grad():
        for name, given in weights:
            target = own.get(name)
            if target is None:
                raise ModelError(f"{name_of} has a tensor {name!r} that a {gguf.architecture} model does not use")
            if target.shape != given.shape:
                sizes = f"{list(given.shape)}, but must be {list(target.shape)}"
                raise ModelError(f"{name_of}: {name} is {sizes}")
            values = torch.from_numpy(np.ascontiguousarray(given)).to(target.device, target.dtype)
            if id(target) in found and not torch.equal(target, values):
                raise ModelError(f"{name_of}: {name} and {found[id(target)]} differ, but are one in this family")
            target.copy_(values)
            found[id(target)] = name
    missing = [name for name, target in own.items() if id(target) not in found]
    if missing:
        raise ModelError(f"{name_of} is incomplete: it has no tensor for {missing[0]}")
    return module.eval()


def _config(gguf: GGUFFile, decoder: Decoder) -> Any:
    """The family's configuration, with keys of others, which change nothing; its rotations are not stretched."""
    from transformers import AutoConfig

    width = 2 * len(decoder.ropes[0].frequencies)
    part = {"rope_type": "default", "partial_rotary_factor": width / decoder.head_dim}
    if decoder.family.grows:
        grown = decoder.ropes[0]
        part |= {"llama_4_scaling_beta": grown.growth, "original_max_position_embeddings": grown.period}
    tables = zip(decoder.family.ropes, decoder.ropes, strict=True)
    ropes = {source.layers: {**part, "rope_theta": table.base} for source, table in tables}
    numbers = {theirs: getattr(decoder, ours) or None for ours, (_, theirs) in KEYS.items() if hasattr(decoder, ours)}
    own = {
        "vocab_size": decoder.vocab,
        "max_position_embeddings": decoder.limit,
        "original_max_position_embeddings": decoder.limit,
        "tie_word_embeddings": decoder.tied,
        "rope_parameters": ropes if len(ropes) > 1 else next(iter(ropes.values())),
        "attention_bias": bool(decoder.biases),
        "use_sliding_window": any(decoder.windows),
        "sliding_window": max(decoder.windows) or None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in decoder.windows],
        "query_pre_attn_scalar": round(decoder.attention_scale**-2),
        "no_rope_layers": [int(table >= 0) for table in decoder.layer_rope],
    }
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return AutoConfig.for_model(decoder.family.transformers, **numbers | own | none)
