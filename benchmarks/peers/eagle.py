"""An EAGLE-3 drafter of ours for the peers: what their exporters read of it, and where they keep what they make."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from outpace.common.files import cache_dir
from outpace.drafters.learned.checkpoint import WEIGHTS, checksum, fit_shape, read
from outpace.drafters.learned.config import EagleConfig
from outpace.errors import ParameterError
from outpace.models.load import resolve
from outpace.training.export import TargetRows
from outpace.training.export_gguf import to_gguf

BLOCK = 32  # numbers that share a scale
REMEDY = "measure without --eagle3, or with another drafter"


def place(drafter: Path, model: Path, kind: str) -> Path:
    """Its name has the weights' checksum, so that a drafter that was trained further is exported again."""
    weights = drafter / WEIGHTS
    if not weights.is_file():
        raise ParameterError(f"{drafter} has no {WEIGHTS}: give a drafter's folder, its weights in one file")
    folder = cache_dir() / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{model.stem}.{drafter.resolve().name}-{checksum(weights)}.{kind}"


def load(drafter: Path, model: Path) -> tuple[EagleConfig, dict[str, Any]]:
    """Its shape beside the target, a GGUF file, and its tensors by canonical name; output rows always among them.

    Raises ParameterError for what is not exported, ModelError and DrafterError for what Outpace refuses itself.
    """
    target = gguf.GGUFReader(model)
    stored = {tensor.name: tensor for tensor in target.tensors}
    head = stored.get("output.weight", stored["token_embd.weight"])
    architecture = target.fields["general.architecture"].contents()
    layers = int(target.fields[f"{architecture}.block_count"].contents())
    found = fit_shape(read(drafter), model.name, tuple(head.shape.tolist()[::-1]), layers)
    config = found.config
    if not isinstance(config, EagleConfig):
        raise ParameterError(f"{drafter} is a drafter of the method {found.method}, not eagle: {REMEDY}")
    shape = config.decoder
    if shape.qk_norm:
        raise ParameterError(f"{drafter} has norms of query and key heads, which are not exported: {REMEDY}")
    if config.fc_norm and config.norm_before_fc:
        raise ParameterError(
            f"{drafter} has norms of each layer and of all before fc, which are not exported: {REMEDY}"
        )
    if "embed_tokens.weight" in found.tensors:
        raise ParameterError(f"{drafter} has an embedding of its own, which is not exported: {REMEDY}")
    for size in (shape.hidden, shape.ffn, shape.heads * shape.head_dim):
        if size % BLOCK:
            raise ParameterError(f"{drafter} has rows of {size} numbers, not of whole blocks of {BLOCK}: {REMEDY}")
    tensors = dict(found.tensors)
    if "lm_head.weight" not in tensors:
        ids = np.arange(config.draft_vocab) + tensors["d2t"]
        tensors["lm_head.weight"] = gguf.dequantize(head.data[ids], head.tensor_type)
    return config, tensors


def gguf_file(drafter: Path, model: Path) -> Path:
    """llama.cpp's, in Q4_0, which is the fastest. Raises as ``to_gguf`` does."""
    made = place(drafter, model, "gguf")
    if not made.exists():
        to_gguf(made, read(drafter), TargetRows.of(resolve(str(model))), model, dtype="q4_0")
    return made


def openvino_folder(drafter: Path, model: Path, python: Path) -> Path:
    """The folder that eagle_openvino.py writes, whole or not at all. ``python``: OpenVINO's. Raises as ``load``."""
    made = place(drafter, model, "openvino")
    if made.exists():
        return made
    config, tensors = load(drafter, model)
    with tempfile.TemporaryDirectory(dir=made.parent) as name:
        arrays, folder = Path(name) / "drafter.npz", Path(name) / "made"
        np.savez(arrays, config=json.dumps(asdict(config)), **tensors)
        script = Path(__file__).with_name("eagle_openvino.py")
        command = [str(python), str(script), str(model), str(arrays), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip() or f"its process ended with {done.returncode}")[-400:]
            raise ParameterError(f"{drafter} could not be exported for OpenVINO ({why}): {REMEDY}")
        folder.rename(made)
    return made
