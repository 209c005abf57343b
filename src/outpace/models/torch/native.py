"""A transformers module on the CPU, computed by the native backend: its weights are packed from memory.

The module stays its owner's and is not kept; a change of it is the caller's to see. What is served has passed the proof
that the Transformers backend's forward passes, on the module's own logits.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outpace import _fast
from outpace.errors import ModelError, OutpaceError
from outpace.models import decoder as decoders
from outpace.models.host import free_memory
from outpace.models.native.build import require_served
from outpace.models.native.model import MOST_THREADS, NativeModel, serve
from outpace.models.torch.anatomy import max_length, weight_bytes
from outpace.models.torch.decoder import described
from outpace.models.torch.mixers import mixers
from outpace.models.torch.probe import Reference, agree, small_copy
from outpace.models.weights import safetensors
from outpace.models.weights.file_bytes import StoredTensor
from outpace.models.weights.tensors import Weights

Runtime = _fast.native.Runtime
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class _Memory:
    """A tensor's bytes; see ``Bytes``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes: npt.NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()

    def read(self, start: int, n: int) -> npt.NDArray[np.uint8]:
        return self._bytes[start : start + n]


def packed(
    module: Any, name: str, longest: int | None, kv_memory: int | None, runtime: Runtime | None = None
) -> NativeModel:
    """``module``, in evaluation mode on the CPU, on the native backend. Raises ModelError where that does not serve it.

    Matrices stay in their type, keys and values have the same, and as many threads compute as torch has, or those of
    the ``runtime`` of a model with which it computes in turn. The other arguments are those of ``TransformersModel``.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        most = _require(module, name)
        with ExitStack() as undo:
            try:
                model = _of(module, name, longest, kv_memory, runtime)
                undo.callback(model.close)
                if model.info.max_length < min(most, longest or most):
                    raise ModelError(f"it reads {model.info.max_length} positions there")
                _prove(module, model)
            except (OutpaceError, ValueError, RuntimeError) as error:
                raise ModelError(f"{name} is not served by the native backend: {error}") from error
            undo.pop_all()
    return model


def _require(module: Any, name: str) -> int:
    """The positions that transformers reads. Raises ModelError unless the module is one that is described here, lies on
    the CPU in one type of numbers, and leaves half of the memory free when it is packed."""
    kinds = {p.dtype for p in module.parameters()}
    size = weight_bytes(module)
    free = free_memory("cpu")
    if module.device.type != "cpu" or len(kinds) != 1 or not kinds <= _TYPES.keys():
        raise ModelError(f"{name} is not in one type of numbers on the CPU")
    if any(part._compiled_call_impl is not None for part in module.modules()):
        raise ModelError(f"{name} is compiled")
    if not described(module) or mixers(module):
        raise ModelError(f"{name} is not described here, or has recurrent layers")
    if free is not None and size > free // 2:
        raise ModelError(f"{name} would leave too little memory when it is packed")
    if any(map(_turned, module.modules())):
        raise ModelError(f"{name} has other rotations than its configuration says (cast with the weights, perhaps)")
    claimed, reason = max_length(module.config.get_text_config(decoder=True))
    if reason is not None:
        raise ModelError(f"{name}: {reason}")
    return claimed


def _turned(part: Any) -> bool:
    """Whether a module of rotations has others than one that is made anew: the proof's few positions cannot tell."""
    own = dict(part.named_buffers(recurse=False))
    if not any(key.endswith("inv_freq") for key in own):
        return False
    new = type(part)(part.config)
    same = all(torch.equal(own[key], value) for key, value in new.named_buffers(recurse=False))
    scales = [key for key in vars(new) if key.endswith("attention_scaling")]
    return not same or any(getattr(part, key) != getattr(new, key) for key in scales)


def _of(module: Any, name: str, longest: int | None, kv_memory: int | None, runtime: Runtime | None) -> NativeModel:
    held = module.state_dict()
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    if head.data_ptr() == embedding.data_ptr() and module.config.tie_word_embeddings:
        held = {key: tensor for key, tensor in held.items() if key != "lm_head.weight"}
    stored = {
        key: StoredTensor(_TYPES.get(t.dtype, str(t.dtype)), tuple(t.shape), _Memory(t), 0, t.nbytes)
        for key, t in held.items()
    }
    config = {**module.config.to_dict(), "architectures": [type(module).__name__], "vocab_size": len(embedding)}
    decoder = decoders.from_config(Path(name), config, "cannot be served by the native backend", stored)
    weights = Weights(name, [], decoder, 1, stored, lambda key: safetensors.plain(stored[key], key))
    require_served(decoder, weights)
    return serve(
        decoder,
        weights,
        "keep",
        name=name,
        threads=min(torch.get_num_threads(), MOST_THREADS) if runtime is None else None,
        kv_memory=kv_memory,
        kv_dtype=str(embedding.dtype).removeprefix("torch."),
        max_length=longest,
        runtime=runtime,
    )


def _prove(module: Any, model: NativeModel) -> None:
    """Raises ModelError unless rows and trees give the logits of the module alone; of 16 bits in a small copy in
    float32, too, where rounding hides nothing."""
    kind = module.get_input_embeddings().weight.dtype
    if kind != torch.float32:
        small, _ = small_copy(module, [None] * model.info.layers)
        copied = _of(small, model.info.name, None, None, model.runtime)
        try:
            _prove(small, copied)
        finally:
            copied.close()
    agree(model.forward, model.kv, Reference.of(module, model.info.vocab_size, module.device), kind)
    for row in model.kv.rows:
        model.kv.free(row)
