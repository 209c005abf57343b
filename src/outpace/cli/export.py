"""``outpace export``: a learned drafter for other programs, or with 4-bit weights."""

from __future__ import annotations

import json as json_
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command, Group
from outpace.cli.options import Common
from outpace.common.parameter import argument, option
from outpace.errors import ParameterError


def vllm(
    common: Common,
    path: Annotated[Path, argument("The drafter: a folder with config.json and safetensors.")],
    out: Annotated[Path | None, option("The folder to make. Default: PATH-vllm.")] = None,
    model: Annotated[str, option("The target that it was trained beside.", "--model", "-m")] = "demo",
    verifier: Annotated[str | None, option("The target as vLLM serves it: a folder or id. Default: --model.")] = None,
    tokens: Annotated[int, option("Tokens drafted a step (eagle).")] = 4,
    dtype: Annotated[str, option("bfloat16, float16 or float32.")] = "bfloat16",
) -> int:
    """Write a drafter as vLLM and speculators read it, nothing left to the target, and print how to serve it."""
    from outpace.drafters.learned.checkpoint import read
    from outpace.models.load import resolve
    from outpace.training.export import TargetRows, to_vllm, verifier_of

    if not 1 <= tokens <= 64:
        raise ParameterError(f"--tokens {tokens} is out of range: give 1 to 64")
    source = resolve(model)
    out = _place(path, out, "-vllm", source.path)
    drafter = read(path)
    rows = TargetRows.of(source)
    served = verifier_of(source, verifier)
    config = to_vllm(out, drafter, rows, served, tokens=tokens, dtype=dtype)
    if common.emit({"target": served.name, "out": str(out), "speculative_config": config}):
        return 0
    if served.name is None:
        print(
            f"outpace: vLLM does not serve {model}, a GGUF file: name its folder or id with --verifier", file=sys.stderr
        )
    target = served.name or "MODEL"
    print(f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json_.dumps(config))}")
    return 0


def sglang(
    common: Common,
    path: Annotated[Path, argument("The drafter: a folder with config.json and safetensors.")],
    out: Annotated[Path | None, option("The folder to make. Default: PATH-sglang.")] = None,
    model: Annotated[str, option("The target that it was trained beside.", "--model", "-m")] = "demo",
    dtype: Annotated[str, option("bfloat16, float16 or float32.")] = "bfloat16",
) -> int:
    """Write an EAGLE drafter as SGLang reads it, nothing left to the target, and print how to serve it."""
    from outpace.drafters.learned.checkpoint import read
    from outpace.models.load import resolve
    from outpace.training.export import TargetRows, to_eagle3

    source = resolve(model)
    out = _place(path, out, "-sglang", source.path)
    to_eagle3(out, read(path), TargetRows.of(source), dtype=dtype, sglang=True)
    if not common.emit({"out": str(out), "speculative_algorithm": "EAGLE3"}):
        target = "MODEL" if source.kind == "gguf" else source.name
        print(
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(str(out))}"
        )
    return 0


def gguf(
    common: Common,
    path: Annotated[Path, argument("The drafter: a folder with config.json and safetensors.")],
    out: Annotated[Path | None, option("The file to make. Default: PATH.gguf.")] = None,
    model: Annotated[str, option("The target that it was trained beside, a GGUF file.", "--model", "-m")] = "demo",
    dtype: Annotated[str, option("bfloat16, float16, float32, q8_0 or q4_0.")] = "bfloat16",
) -> int:
    """Write an EAGLE-3, DSpark or DFlash drafter as llama.cpp reads it, and print how to serve it."""
    from outpace.drafters.learned.checkpoint import read
    from outpace.models.load import resolve
    from outpace.training.export import TargetRows
    from outpace.training.export_gguf import to_gguf

    source = resolve(model)
    out = _place(path, out, ".gguf", source.path)
    if source.kind != "gguf":
        raise ParameterError(f"--model {model} is no GGUF file, and llama.cpp serves those: name the target's file")
    kind = to_gguf(out, read(path), TargetRows.of(source), source.path, dtype=dtype)
    if not common.emit({"out": str(out), "spec_type": kind}):
        served = shlex.quote(str(source.path))
        print(f"llama-server -m {served} --spec-draft-model {shlex.quote(str(out))} --spec-type {kind}")
    return 0


def q4(
    common: Common,
    path: Annotated[Path, argument("The drafter: a folder with config.json and safetensors.")],
    out: Annotated[Path | None, option("The folder to make. Default: PATH-q4.")] = None,
) -> int:
    """Write a drafter with 4-bit weights, a third of its size; beside a target of 4 bits it drafts the same."""
    from outpace.drafters.learned.checkpoint import WEIGHTS, read, write

    out = _place(path, out, "-q4")
    drafter = read(path)
    write(out, drafter.method, drafter.config, drafter.tensors, drafter.target, drafter.recipe, dtype="q4_1")
    size = (out / WEIGHTS).stat().st_size
    print(json_.dumps({"out": str(out), "bytes": size}) if common.json else f"{out}: {size / 1e6:.1f} MB")
    return 0


def _place(path: Path, out: Path | None, ending: str, target: Path | None = None) -> Path:
    """What to write: ``out``, or what stands beside the drafter under its name with ``ending``. Raises ParameterError
    where that is read, so that writing it would be the end of a model."""
    if out is None:
        named = path if path.name not in ("", "..") else Path(os.path.abspath(path))
        out = named.with_name(f"{path.resolve().name}{ending}")
    for read, what in ((path, "drafter"), (target, "target")):
        if read is not None and out.exists() and out.resolve() == read.resolve():
            raise ParameterError(f"--out {out} is the {what} itself: give another name")
    return out


COMMAND = Group(
    "export",
    "Write a learned drafter for other programs, or smaller.",
    "outpace export vllm drafter --model demo --out served\n"
    "outpace export gguf drafter -m model.gguf\n"
    "outpace export q4 drafter --out small",
    (
        Command(
            "vllm",
            vllm,
            "outpace export vllm drafter --model demo --out served\n"
            "outpace export vllm drafter -m Qwen/Qwen3-8B --tokens 3\n"
            "outpace export vllm drafter -m model.gguf --verifier Qwen/Qwen3-8B",
        ),
        Command(
            "sglang",
            sglang,
            "outpace export sglang drafter --model demo --out served\n"
            "outpace export sglang drafter -m Qwen/Qwen3-8B\n"
            "outpace export sglang drafter -m model.gguf --json made.json",
        ),
        Command(
            "gguf",
            gguf,
            "outpace export gguf drafter --model demo --out drafter.gguf\n"
            "outpace export gguf drafter -m model.gguf\n"
            "outpace export gguf drafter -m model.gguf --json made.json",
        ),
        Command(
            "q4",
            q4,
            "outpace export q4 drafter\n"
            "outpace export q4 drafter --out small\n"
            "outpace export q4 drafter --json made.json",
        ),
    ),
)
