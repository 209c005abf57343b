"""Weights in pickle files, converted once by torch's weights-only reader, which runs none of their code."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from outpace.common.files import cache_dir
from outpace.errors import ModelError
from outpace.models.weights import safetensors

log = logging.getLogger(__name__)


def files(folder: Path) -> list[Path]:
    """A folder's pickles of weights, in order; what training leaves beside them is none."""
    found = sorted(path for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    return [
        path for path in found if not path.name.startswith(("training_args", "optimizer", "scheduler", "rng_state"))
    ]


def converted(paths: Sequence[Path]) -> Path:
    """A safetensors file with the tensors of all ``paths``, kept in the cache. Raises ModelError for a file that holds
    anything but tensors by name, and where torch, which reads them, is not installed."""
    told = "".join(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}\n" for path in paths)
    kept = cache_dir() / "converted" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.safetensors"
    if kept.is_file():
        return kept
    first = paths[0]
    if find_spec("torch") is None:
        raise ModelError(f"{first} is a pickle, which only torch can convert: pip install torch, or get safetensors")
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            read = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # the reader's, the archive's, the system's
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"{path} is a pickle that holds more than tensors, or is damaged ({reason}): get safetensors"
            ) from error
        if not isinstance(read, dict) or not all(isinstance(each, torch.Tensor) for each in read.values()):
            raise ModelError(f"{path} is no table of tensors by name: get safetensors")
        tensors |= {str(name): each.detach() for name, each in read.items()}
    arrays = {}
    for name, each in tensors.items():
        try:
            arrays[name] = (each.float() if each.is_floating_point() else each).contiguous().numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:  # sparse, quantised, of no numbers
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{first}: the tensor {name} cannot be converted ({reason}): get safetensors") from error
    kinds = {each.dtype for each in tensors.values() if each.is_floating_point()}
    dtype = {frozenset({torch.bfloat16}): "BF16", frozenset({torch.float16}): "F16"}.get(frozenset(kinds), "F32")
    kept.parent.mkdir(parents=True, exist_ok=True)
    safetensors.write(kept, arrays, dtype)
    log.info("%s: its tensors are now in %s", first, kept)
    return kept
