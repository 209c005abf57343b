"""Models by their Hugging Face id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outpace.errors import Argument, ModelError

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def from_hub(spec: str, *, revision: str | None, allow_pickle: bool, offline: bool) -> Path:
    """A snapshot of a Hugging Face repository: from the local cache, else downloaded. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    weights = ["*.safetensors", "*.bin"] if allow_pickle else ["*.safetensors"]
    request: dict[str, Any] = {"revision": revision, "allow_patterns": _SMALL_FILES + weights}
    try:
        cached = Path(snapshot_download(spec, local_files_only=True, **request))
        if offline or _complete(cached, allow_pickle):
            return cached
    except HFValidationError as error:
        raise ModelError(f"{spec!r} is neither a file, a folder nor a Hugging Face id: check the spelling") from error
    except LocalEntryNotFoundError as error:
        if offline:
            raise ModelError(
                f"{spec} is not in the local cache, and HF_HUB_OFFLINE is set: unset it, or download the model first"
            ) from error
    try:
        return Path(snapshot_download(spec, **request))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{spec} could not be downloaded ({reason}): check the name, ",
            Argument("revision"),
            " and the connection, or use a local folder or ",
            Argument("model", "demo"),
        ) from error


def _complete(folder: Path, allow_pickle: bool) -> bool:
    """Whether a cached snapshot has a configuration and all of its weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((folder / name).is_file() for name in files)
    patterns = ("*.safetensors", "*.bin") if allow_pickle else ("*.safetensors",)
    return (folder / "config.json").is_file() and any(any(folder.glob(pattern)) for pattern in patterns)
