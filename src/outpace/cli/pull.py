"""``outpace pull``: download a model before it is needed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.common.parameter import argument, option
from outpace.errors import ModelError


def run(
    common: Common,
    model: Annotated[str, argument("user/repo:Q4_K_M, or a Hugging Face id.")],
    revision: Annotated[str | None, option("Branch, tag or commit on Hugging Face.")] = None,
    allow_pickle: Annotated[bool, option("Read weights that are not safetensors; they can run code.")] = False,
) -> int:
    """Download a model, as its first use would, and say where it lies. Nothing is downloaded twice."""
    from outpace.common.units import format_bytes
    from outpace.models.load import resolve
    from outpace.models.options import LoadOptions
    from outpace.models.weights.gguf import shards
    from outpace.models.weights.hub import without_hub

    name = without_hub(model)
    try:
        path = Path(resolve(name, LoadOptions(revision=revision, allow_pickle=allow_pickle)).path)
    except ModelError as error:
        if "/" in name:
            raise
        hint = "; Ollama's own names are not known here: give user/repo:Q4_K_M, of a Hugging Face repository"
        raise ModelError(error, hint) from error
    files = shards(path) if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    size = sum(each.stat().st_size for each in files)
    more = f" --revision {shlex.quote(revision)}" if revision is not None else ""
    more += " --allow-pickle" if allow_pickle else ""
    command = f"outpace run {shlex.quote(name)}{more}"
    if not common.emit({"model": name, "path": str(path), "bytes": size, "run": command}):
        print(f"{name}: {format_bytes(size)} in {path}")
        print(f"to talk to it: {command}")
    return 0


COMMAND = Command(
    "pull",
    run,
    "outpace pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M\n"
    "outpace pull Qwen/Qwen3-0.6B\n"
    "outpace pull hf.co/unsloth/Qwen3-1.7B-GGUF:Q8_0 --revision main",
)
