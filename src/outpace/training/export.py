"""Learned drafters written to folders: in our own layout, and in those that other programs read.

Weights are written first, config.json with their checksum last, each whole or not at all, so that a reader never takes
one for another's. Numbers are rounded once, to ``dtype``. Needs neither torch nor safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.arrays import F32
from outpace.common.files import write_json
from outpace.drafters.learned import checkpoint as checkpoints
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import (
    Config,
    Decoder,
    EagleConfig,
    MedusaConfig,
    ParallelConfig,
    embedding_shape,
    head_shapes,
    tensor_shapes,
)
from outpace.errors import ModelError, ParameterError
from outpace.models.load import Source
from outpace.models.native.build import open_weights
from outpace.models.weights import safetensors
from outpace.models.weights.facts import read_config

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SPECULATORS = "0.9.0"  # whose layout is written
_NAMES = {EagleConfig: "eagle3", ParallelConfig: "dspark"}


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What a drafter shares with its target: float32 ``embedding`` [V, h] as it enters, ``head`` [V, h].

    ``layers``: how many the target has.
    """

    embedding: F32
    head: F32
    layers: int

    @classmethod
    def of(cls, source: Source) -> TargetRows:
        """Of a model's files, dequantised. Raises ModelError for one that the native backend does not serve."""
        model, weights, _ = open_weights(source.gguf or source.path, None, "auto")
        embedding = weights.values(None, "embedding")
        head = embedding if model.tied else weights.values(None, "head")
        return cls(embedding * np.float32(model.embedding_scale), head, model.layers)


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target as other programs find it: ``name`` a Hugging Face id or folder (None: not said)."""

    name: str | None = None
    architectures: tuple[str, ...] = ()


def verifier_of(source: Source, name: str | None) -> Verifier:
    """``name``, else the model itself where others can read it: they do not read GGUF. Raises ModelError."""
    if source.kind == "gguf":
        return Verifier(name)
    return Verifier(name or source.name, tuple(read_config(source.path).get("architectures") or ()))


def write(
    path: str | Path,
    method: str,
    config: Config,
    tensors: Mapping[str, Any],
    target: Mapping[str, Any],
    recipe: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
) -> None:
    """Write a drafter in our layout. ``tensors``: canonical names, numpy arrays or torch tensors; others are left out.

    Output rows are written where ``tensors`` has them; otherwise they are the target's, as the embedding is. Raises
    ModelError for a tensor that is missing or of another shape, ParameterError for ``dtype``, OSError.
    """
    head = "own" if next(iter(head_shapes(config))) in tensors else "target"
    _write(Path(path), Checkpoint(method, config, tensors, target, recipe), head, Verifier(), dtype)


def to_speculators(
    path: str | Path,
    checkpoint: Checkpoint,
    rows: TargetRows,
    verifier: Verifier | None = None,
    *,
    tokens: int = 4,
    dtype: str = "bfloat16",
) -> None:
    """Write ``eagle`` and ``parallel`` as speculators 0.9 and vLLM read them: nothing is left to the target.

    ``tokens``: drafted a step unless somebody says otherwise. Raises as ``write`` does.
    """
    if isinstance(checkpoint.config, MedusaConfig):
        raise ParameterError("speculators has no Medusa: export it to vLLM, which has")
    _write(Path(path), _whole(checkpoint, rows), "own", verifier or Verifier(), dtype, tokens)


def to_eagle3(path: str | Path, checkpoint: Checkpoint, rows: TargetRows, *, dtype: str = "bfloat16") -> None:
    """Write ``eagle`` in the flat layout of EAGLE-3's authors (``midlayer.*``). Raises as ``write`` does."""
    config = checkpoint.config
    if not isinstance(config, EagleConfig):
        raise ParameterError(f"the layout of EAGLE-3 is for the method eagle, and this is {checkpoint.method}")
    whole = _whole(checkpoint, rows)
    arrays = {
        name.replace("layers.0.", "midlayer."): values for name, values in _arrays(Path(path), whole, True).items()
    }
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(config.decoder, config.vocab, dtype),
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.decoder.hidden,
        **_flags(config),
        **_layer_ids("eagle_aux_hidden_state_layer_ids", config.taps),
    }
    if config.decoder.qk_norm:
        raise ParameterError("the layout of EAGLE-3 has no norms of query and key heads: export to speculators")
    _put(Path(path), arrays, described, None, dtype)


def to_medusa(path: str | Path, checkpoint: Checkpoint, rows: TargetRows, *, dtype: str = "bfloat16") -> None:
    """Write ``medusa`` as vLLM reads it, the head included. Raises as ``write`` does."""
    if not isinstance(checkpoint.config, MedusaConfig):
        raise ParameterError(f"the layout of Medusa is for the method medusa, and this is {checkpoint.method}")
    _write(Path(path), _whole(checkpoint, rows), "own", Verifier(), dtype)


def to_vllm(
    path: str | Path, checkpoint: Checkpoint, rows: TargetRows, verifier: Verifier | None = None, *, tokens: int = 4,
    dtype: str = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    """Write a folder that vLLM serves with, and say its ``--speculative-config``. Raises as ``write`` does.

    The method is named in it: otherwise vLLM guesses from the path.
    """
    config = checkpoint.config
    if isinstance(config, MedusaConfig):
        to_medusa(path, checkpoint, rows, dtype=dtype)
        return {"method": "medusa", "model": str(path), "num_speculative_tokens": config.heads}
    if isinstance(config, ParallelConfig):
        tokens = config.block - (not config.sample_from_anchor)
    to_speculators(path, checkpoint, rows, verifier, tokens=tokens, dtype=dtype)
    return {"method": _NAMES[type(config)], "model": str(path), "num_speculative_tokens": tokens}


def _whole(checkpoint: Checkpoint, rows: TargetRows) -> Checkpoint:
    """With output rows and embedding of its own."""
    checkpoint = checkpoints.fit_shape(checkpoint, "the target", rows.head.shape, rows.layers)
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    ids = _numpy(tensors["d2t"]) + np.arange(config.draft_vocab)
    for name in head_shapes(config).keys() - tensors.keys():
        tensors[name] = rows.head[ids]
    for name in embedding_shape(config).keys() - tensors.keys():
        tensors[name] = rows.embedding
    return replace(checkpoint, tensors=tensors)


def _write(folder: Path, checkpoint: Checkpoint, head: str, verifier: Verifier, dtype: str, tokens: int = 4) -> None:
    config = checkpoint.config
    arrays = _arrays(folder, checkpoint, head == "own")
    if isinstance(config, MedusaConfig):
        described = _medusa(config)
        if config.draft_vocab < config.vocab:
            arrays["token_map"] = arrays.pop("d2t") + np.arange(config.draft_vocab)
    else:
        described = _speculators(config, verifier, tokens, dtype)
    own = {
        "format": checkpoints.FORMAT,
        "method": checkpoint.method,
        "head": head,
        "target": dict(checkpoint.target),
        "recipe": dict(checkpoint.recipe),
        **({"tree": [list(path) for path in config.tree]} if isinstance(config, MedusaConfig) else {}),
    }
    _put(folder, arrays, described, own, dtype)


def _arrays(folder: Path, checkpoint: Checkpoint, head: bool) -> dict[str, Any]:
    """The tensors to write, as numpy arrays; without a vocabulary map where the draft's is the target's."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not isinstance(config, MedusaConfig) and list(config.taps) != sorted(set(config.taps)):
        raise ModelError(
            f"{folder} cannot be written: the taps {list(config.taps)} are not ascending, as vLLM has them"
        )
    wanted = {**tensor_shapes(config), **(head_shapes(config) if head else {})}
    if head:
        wanted |= {name: shape for name, shape in embedding_shape(config).items() if name in tensors}
    if config.draft_vocab < config.vocab:
        wanted["d2t"] = (config.draft_vocab,)
        if not isinstance(config, MedusaConfig):
            wanted["t2d"] = (config.vocab,)
    arrays = {}
    for name, shape in wanted.items():
        if name not in tensors:
            raise ModelError(f"{folder} cannot be written: the drafter has no tensor {name!r}")
        arrays[name] = _numpy(tensors[name])
        if arrays[name].shape != shape:
            found = list(arrays[name].shape)
            raise ModelError(f"{folder} cannot be written: {name} is {found}, but must be {list(shape)}")
    return arrays


def _numpy(values: Any) -> Any:
    """A numpy array, or a torch tensor's numbers as one: numpy has no bfloat16."""
    if isinstance(values, np.ndarray):
        return values
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()


def _put(
    folder: Path, arrays: Mapping[str, Any], described: dict[str, Any], own: dict[str, Any] | None, dtype: str
) -> None:
    if dtype not in DTYPES:
        raise ParameterError(f"a drafter is written as {', '.join(DTYPES)}, not {dtype!r}")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / f"{checkpoints.WEIGHTS}.index.json").exists():
        raise ParameterError(f"{folder} holds a model of several files: name a new folder")
    safetensors.write(folder / checkpoints.WEIGHTS, arrays, DTYPES[dtype])
    if own is not None:
        described = {**described, "outpace": {**own, "weights": checkpoints.checksum(folder / checkpoints.WEIGHTS)}}
    write_json(folder / "config.json", described)


def _speculators(config: EagleConfig | ParallelConfig, verifier: Verifier, tokens: int, dtype: str) -> dict[str, Any]:
    eagle = isinstance(config, EagleConfig)
    kind = _NAMES[type(config)]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    common = {
        "architectures": ["Eagle3Speculator" if eagle else "DSparkSpeculator"],
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
        ids = _layer_ids("eagle_aux_hidden_state_layer_ids", config.taps)
        return {**common, **_flags(config), **ids, "embed_requires_grad": False}
    return {
        **common,
        **_layer_ids("aux_hidden_state_layer_ids", config.taps),
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.sample_from_anchor,  # absent, speculators takes it for true, vLLM for false
        "sliding_window_non_causal": False,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_markov,
    }


def _medusa(config: MedusaConfig) -> dict[str, Any]:
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
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(config, name) for name in names}


def _layer_ids(key: str, taps: tuple[int, ...]) -> dict[str, list[int] | None]:
    """speculators and vLLM count a layer's input, from 0: the output of layer k - 1 is their k."""
    return {key: [tap + 1 for tap in taps] or None}


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
        "rope_parameters": {"rope_type": "default", "rope_theta": decoder.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
