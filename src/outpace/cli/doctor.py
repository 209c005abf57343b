"""``outpace doctor``: what this machine has, and whether the demo model runs on it."""

from __future__ import annotations

import json
import platform
import time
from typing import Any

import typer

from outpace.cli import machine
from outpace.cli.command import flatten
from outpace.cli.options import Common

_PACKAGES = ("outpace", "numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: outpace doctor --json")(flatten(run))


def run(common: Common) -> int:
    """Show versions, CPU features, backends and memory, and decode a few tokens with the demo model."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": machine.cpu(),
        "memory": machine.memory(),
        "backends": _backends(),
        "demo": _demo(),
    }
    if common.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0 if found["demo"]["ok"] else 1


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _backends() -> dict[str, str]:
    from outpace.models import native

    out = {"native": "available" if native.available() else "not built: install a C++17 compiler and reinstall outpace"}
    torch = _version("torch")
    out["transformers"] = "available" if torch and _version("transformers") else "pip install torch transformers"
    return out


def _demo() -> dict[str, Any]:
    from outpace.engine import Engine
    from outpace.types import SamplingParams

    begun = time.perf_counter()
    try:
        with Engine.load("demo", drafter="ngram") as engine:
            loaded = time.perf_counter() - begun
            result = engine.generate("Say hello.", SamplingParams(max_tokens=16))
            info = engine.model.info
            threads, path = machine.threads_of(engine.model), machine.path_of(engine.model)
    except Exception as error:  # whatever is broken here is what this command is for
        return {"ok": False, "error": str(error) or type(error).__name__}
    return {
        "ok": True,
        "backend": info.backend,
        "dtype": info.dtype,
        "threads": threads,
        "instruction_set": path,
        "load_seconds": loaded,
        "text": result.text,
        "decode_tokens_per_second": result.stats.decode_tokens_per_second,
    }


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    from outpace.units import format_bytes

    console = Console(highlight=False)
    console.print(f"python        {found['python']}")
    for name, version in found["packages"].items():
        console.print(f"{name:<13} {version or 'not installed'}")
    cpu, memory, demo = found["cpu"], found["memory"], found["demo"]
    console.print(
        f"cpu           {cpu['model']}, {cpu['cores']} cores, {' '.join(cpu['features']) or 'features unknown'}"
    )
    if memory["total"] is not None:
        free = "unknown" if memory["available"] is None else format_bytes(memory["available"])
        console.print(f"memory        {format_bytes(memory['total'])}, {free} available")
    for name, state in found["backends"].items():
        console.print(f"{name:<13} {state}", soft_wrap=True)
    if demo["ok"]:
        path = f", {demo['instruction_set']}" if demo["instruction_set"] else ""
        console.print(
            f"demo model    loads in {demo['load_seconds']:.1f} s ({demo['backend']} {demo['dtype']}{path}), "
            f"decodes at {demo['decode_tokens_per_second']:.0f} tokens/s with {demo['threads']} threads",
            soft_wrap=True,
        )
    else:
        console.print(f"demo model    FAILED: {demo['error']}", soft_wrap=True)
