"""Metadata of GGUF files that nobody reads: what may be passed over, and what would make another model of the file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from outpace.models.weights.facts import Facts, brief

# Keys behind the architecture's that change no logit of a decoder of text, by llama.cpp's sources.
HARMLESS = frozenset(
    (
        "classifier.output_labels",  # names; the classifier itself is a tensor
        "decoder_start_token_id",  # of encoder-decoders
        "pooling_type",  # of embeddings
        "rope.dimension_sections",  # of images: the parts of a text's position are all the same
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",  # yarn and longrope read it, each under its own name
        "tensor_data_layout",
        "vocab_size",  # the embedding has as many rows
    )
)
_OTHER_PARTS = ("vision.", "audio.", "mm.")  # what Ollama's files say of images: text does not pass there
_OFF: dict[str, tuple[Any, ...]] = {  # values that switch something off
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none", "", "linear"),
    "use_parallel_residual": (False,),
}
_COUNTS = ("_count", "_layers", "_layer_step", "_n_layers")  # endings of what is absent where it is 0


def refuse_unread(
    facts: Facts,
    longest: int,
    *,
    hidden: int,
    head_dim: int,
    rotated: int,
    scale: float | None = None,
    bases: Sequence[float] = (),
) -> None:
    """Raise ModelError for a key of the architecture that nobody has read, unless its value changes nothing.

    The numbers are the model's as it would be served: ``longest`` context, ``hidden`` size, ``head_dim`` and how much
    of it is ``rotated``, the ``scale`` of its scores, ``bases`` of its rotations.
    """
    same: dict[str, tuple[Any, ...]] = (
        _OFF
        | {
            "attention.key_length": (head_dim,),
            "attention.key_length_swa": (head_dim,),
            "attention.scale": (0, *([] if scale is None else [scale])),
            "attention.value_length": (head_dim,),
            "attention.value_length_swa": (head_dim,),
            "embedding_length_out": (0, hidden),
            "rope.dimension_count": (rotated,),
            "rope.dimension_count_swa": (rotated,),
            "rope.freq_base_swa": tuple(bases[-1:]),
            "rope.global.freq_base": tuple(bases[:1]),  # Ollama's names
            "rope.local.freq_base": tuple(bases[-1:]),
        }
    )
    for key, value in facts.unread().items():
        if key in HARMLESS or key.startswith(_OTHER_PARTS):
            continue
        if key == "attention.sliding_window" and isinstance(value, int) and not 0 < value < longest:
            continue
        neutral = same.get(key, (0,) if key.endswith(_COUNTS) else ())
        if not any(equal(value, each) for each in neutral):
            raise facts.fail(
                f"its {facts.prefix}{key} is {brief(value)}, which is not supported for a {facts.prefix[:-1]} model "
                "and may change what it computes: use the original Hugging Face model"
            )


def equal(a: Any, b: Any) -> bool:
    numbers = all(isinstance(value, (bool, int, float)) for value in (a, b))
    return math.isclose(a, b, rel_tol=1e-6) if numbers else isinstance(a, str) and a == b
