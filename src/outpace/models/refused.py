"""Names that are no model's here: folders that are misspelt, and models of images. Each is refused as what it is."""

from __future__ import annotations

import difflib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.common.files import expanded
from outpace.errors import Argument, ModelError
from outpace.models.families import named_class, text_part

BUILT_IN = ("demo", "demo-draft", "demo-gemma")  # models that need no hub
_IMAGE_GGUF = frozenset(
    ("clip", "flux", "sd1", "sd3", "sdxl", "aura", "hidream", "cosmos", "ltxv", "hyvid", "wan", "lumina2", "qwen_image")
)
# Architectures in GGUF files, and kinds of layers in config.json, with a state that cannot go back to an earlier token.
RECURRENT = frozenset(
    (
        "mamba", "mamba2", "jamba", "kimi-linear", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7",
    )
)  # fmt: skip
RECURRENT_LAYERS = frozenset(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"))
_RECURRENT_TYPES = frozenset(("mamba", "mamba2", "falcon_mamba", "falcon_h1", "rwkv", "xlstm", "zamba", "zamba2"))
# Types of image models of which transformers 5.23 serves the part for text by itself, for where it is not installed.
TEXT_ALONE = frozenset(
    (
        "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "mllama", "phi4_multimodal", "qwen3_5",
        "qwen3_5_moe",
    )
)  # fmt: skip
_IMAGE_KEYS = ("vision_config", "image_size", "image_token_id", "image_token_index", "vision_tower", "mm_vision_tower")


def refuse_misspelt(spec: str) -> None:
    """Raise ModelError for what looks like a path of this machine: a hub would only learn the name of a folder."""
    path = expanded(spec)
    near = _near(path) or next(iter(difflib.get_close_matches(spec, BUILT_IN, 1, 0.7)), None)
    hub = ("; a model of a hub by this name: give ", Argument("revision", "main"))
    if near is not None:
        raise ModelError(f"{spec} does not exist: did you mean {near}?", *hub)
    if len(path.parts) > 1 and Path(path.parts[0]).is_dir():
        raise ModelError(f"{spec} does not exist, but the folder {path.parts[0]} does: check the path", *hub)


def _near(path: Path) -> Path | None:
    """The model that lies here under nearly the name ``path``: some letters differ, no digit."""
    found = Path()
    for part in path.parts:
        if not (found / part).exists():
            there = [entry.name for entry in found.iterdir()] if found.is_dir() else []
            same = [name for name in there if re.findall(r"\d+", name) == re.findall(r"\d+", part)]
            close = difflib.get_close_matches(part, same, 1, 0.8)
            if not close:
                return None
            part = close[0]
        found /= part
    return found if (found / "config.json").is_file() or found.suffix.lower() == ".gguf" else None


def refuse_images(name: str, path: Path, architecture: str | None) -> None:
    """Raise ModelError where ``path`` holds a model of images that no backend serves as one of text.

    ``architecture``: a GGUF file's; None: a folder, whose configuration tells.
    """
    if architecture is not None:
        if architecture in _IMAGE_GGUF:
            raise _refusal(name, architecture)
        return
    pipeline, config = _read(path / "model_index.json"), _read(path / "config.json")
    if "_class_name" in pipeline:
        raise _refusal(name, str(pipeline["_class_name"]))
    if text_part(config) is not None:
        return
    if any(key in config for key in _IMAGE_KEYS) and config.get("model_type") not in _with_text_alone():
        raise _refusal(name, str(named_class(config) or config.get("model_type")))


def refuse_recurrent(name: str, path: Path, architecture: str | None) -> None:
    """Raise ModelError for recurrent layers that no backend serves; arguments as ``refuse_images``."""
    config = _read(path / "config.json") if architecture is None else {}
    config = config.get("text_config") or config
    kinds = config.get("layer_types") or config.get("layers_block_type")
    found = sorted(RECURRENT_LAYERS & {str(kind) for kind in kinds}) if isinstance(kinds, list) else []
    if not found and kinds is None and config.get("model_type") in _RECURRENT_TYPES:
        found = [str(config["model_type"])]
    if architecture in RECURRENT:
        found = [str(architecture)]
    if found:
        raise ModelError(
            f"{name} cannot be served exactly: it has recurrent layers ({found[0]}), and those of Qwen's models, "
            "LFM2, Granite 4, Nemotron-H and Falcon-H1 alone can go back to an earlier token here: give such a model, "
            "or one with attention alone"
        )


def _with_text_alone() -> frozenset[str]:
    """Model types of which transformers serves the part for text by itself."""
    if find_spec("transformers") is None:
        return TEXT_ALONE
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _refusal(name: str, kind: str) -> ModelError:
    return ModelError(f"{name} is an image model ({kind}), and only text is decoded here: give a language model")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # whoever loads it says what is wrong
        return {}
    return value if isinstance(value, dict) else {}
