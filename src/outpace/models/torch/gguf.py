"""A GGUF file of a known family as a transformers model: configuration and weights, rebuilt from metadata and tensors.

``gguf_others`` has the families that only transformers knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outpace.errors import ModelError
from outpace.models import decoder as decoders
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
    from transformers import AutoModelForCausalLM

    decoder = decoders.from_gguf(gguf, _VERDICT)
    stored = tensors.of_gguf(gguf, decoder)
    if unknown := stored.unused():
        raise ModelError(f"{gguf.path.name} has tensors that a {gguf.architecture} model does not use: {unknown[0]}")
    config = _config(gguf, decoder)
    weights = {name: torch.from_numpy(values).to(device, dtype) for name, values in stored.originals()}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if decoder.tied:
        expected.pop("lm_head.weight", None)
    for name, size in expected.items():
        if name not in weights:
            raise ModelError(f"{gguf.path.name} is incomplete: it has no tensor for {name}")
        if weights[name].shape != size:
            raise ModelError(f"{gguf.path.name}: {name} is {list(weights[name].shape)}, but must be {list(size)}")
    if unknown := sorted(set(weights) - set(expected)):
        raise ModelError(f"{gguf.path.name} has tensors that a {gguf.architecture} model does not use: {unknown[0]}")
    model.load_state_dict(weights, strict=False, assign=True)
    if decoder.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    # What is computed from the configuration and not stored was made on the meta device too: make it anew.
    rotary = model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    for source, table in zip(decoder.family.ropes, decoder.ropes, strict=True):
        if table.plain:
            continue
        layers = "" if len(decoder.ropes) == 1 else f"{source.layers}_"
        frequencies = torch.from_numpy(np.ascontiguousarray(table.frequencies)).to(device)
        setattr(rotary, f"{layers}inv_freq", frequencies)
        setattr(rotary, f"{layers}attention_scaling", table.scale)
    if hasattr(model.model.embed_tokens, "scalar_embed_scale"):
        scale = torch.tensor(float(model.model.embed_tokens.scalar_embed_scale), device=device)
        model.model.embed_tokens.register_buffer("embed_scale", scale, persistent=False)
    left = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise ModelError(f"{gguf.path.name}: this version of transformers has a part that is not known here: {left[0]}")
    return model.eval()


def _config(gguf: GGUFFile, decoder: Decoder) -> Any:
    """The family's configuration, with keys of others, which change nothing; its rotations are not stretched."""
    from transformers import AutoConfig

    width = 2 * len(decoder.ropes[0].frequencies)
    part = {"rope_type": "default", "partial_rotary_factor": width / decoder.head_dim}
    if decoder.family.grows:
        own = decoder.ropes[0]
        part |= {"llama_4_scaling_beta": own.growth, "original_max_position_embeddings": own.period}
    tables = zip(decoder.family.ropes, decoder.ropes, strict=True)
    ropes = {source.layers: {**part, "rope_theta": table.base} for source, table in tables}
    return AutoConfig.for_model(
        decoder.family.transformers,
        vocab_size=decoder.vocab,
        hidden_size=decoder.hidden,
        intermediate_size=decoder.inner,
        num_hidden_layers=decoder.layers,
        num_attention_heads=decoder.heads,
        num_key_value_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        max_position_embeddings=decoder.limit,
        original_max_position_embeddings=decoder.limit,
        rms_norm_eps=decoder.eps,
        tie_word_embeddings=decoder.tied,
        rope_parameters=ropes if len(ropes) > 1 else next(iter(ropes.values())),
        attention_bias=bool(decoder.biases),
        use_sliding_window=any(decoder.windows),
        sliding_window=max(decoder.windows) or None,
        layer_types=["sliding_attention" if window else "full_attention" for window in decoder.windows],
        query_pre_attn_scalar=round(decoder.attention_scale**-2),
        no_rope_layers=[int(table >= 0) for table in decoder.layer_rope],
        attention_multiplier=decoder.attention_scale,
        embedding_multiplier=decoder.embedding_scale,
        residual_multiplier=decoder.residual_scale,
        logits_scaling=decoder.logit_divisor,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
