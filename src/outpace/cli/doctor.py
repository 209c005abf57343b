"""``outpace doctor``: what this machine has, whether a model runs on it, and what its forwards cost."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

from outpace import _fast
from outpace.cli.command import Command
from outpace.cli.options import Common, Load
from outpace.common.installing import install
from outpace.common.parameter import option
from outpace.errors import OutpaceError
from outpace.measure import machine

_PACKAGES = ("outpace", "numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")


def run(
    load: Load,
    common: Common,
    measure: Annotated[bool, option("Measure anew what a forward costs, on a machine that is idle now.")] = False,
) -> int:
    """Show versions, CPU features, backends, memory, and what a model's forwards cost here by width."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": machine.cpu(),
        "amx": machine.amx(),
        "memory": machine.memory(),
        "backends": _backends(),
        "instruction_sets": _instruction_sets(),
        "model": _model(load, measure, _silent if common.prints_json else _say),
    }
    if not common.emit(found):
        _print(found)
    return 0 if found["model"]["ok"] else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _silent(text: str) -> None:
    """For scripts, which read what is printed."""


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _backends() -> dict[str, str]:
    installed = _version("torch") and _version("transformers")
    other = "available" if installed else f"not installed: {install('outpace[torch]')}"
    return {"native": "available", "transformers": other}


def _instruction_sets() -> dict[str, Any]:
    """Paths that the extension has and that this machine can run, best first; what its compiler could not build."""
    left_out = _fast.native.left_out_isas()
    return {"built": _fast.native.built_isas(), "usable": _fast.native.usable_isas(), "left_out": left_out or None}


def _model(load: Load, measure: bool, say: Callable[[str], None]) -> dict[str, Any]:
    from outpace.control import adaptive
    from outpace.control import cost as costs
    from outpace.params import SamplingParams

    begun = time.perf_counter()
    try:
        with load.engine("auto") as engine:
            loaded = time.perf_counter() - begun
            cost = costs.of(engine.model, again=measure, progress=say)
            params = SamplingParams(max_tokens=48)
            result = engine.generate(_PROMPT, params, drafter=False)
            engine.generate(_PROMPT, params)
            info = engine.model.info
            threads, path, team = engine.model.threads, engine.model.isa, machine.team_of(engine.model)
            learnt = adaptive.report(cost, engine.policy)
            drafts: dict[str, Any] = {
                "auto": engine.drafter.name,
                "why": engine.drafter.why,
            }
            drafts["notes"] = list(engine.drafter.notes)
    except Exception as error:  # whatever is broken here is what this command is for
        message = error.spelled(COMMAND.spell) if isinstance(error, OutpaceError) else str(error)
        return {"name": load.model, "ok": False, "error": message or type(error).__name__}
    return {
        "name": load.model,
        "ok": True,
        "backend": info.backend,
        "dtype": info.dtype,
        "threads": threads,
        "team": team,
        "instruction_set": path,
        "load_seconds": loaded,
        "text": result.text,
        "decode_tokens_per_second": result.stats.decode_tokens_per_second,
        "drafter": drafts,
        **learnt,
    }


_PROMPT = "Count from one to twenty in words."
_CONTEXT = 400  # of the table
_BAR = 40  # characters


def _print_cost(found: dict[str, Any]) -> None:
    """A forward's milliseconds by width, beside bars of its price in plain steps; the speculation's whole economy."""
    from outpace.control.cost import Cost

    cost = Cost(**found)
    longest = cost.ratio(cost.widths[-1], _CONTEXT)
    print(f"\nwhat a forward costs after {_CONTEXT} tokens (outpace doctor --measure measures anew):\n")
    if cost.read:
        print(f"  of a mixture of {cost.experts} experts, {cost.used} a token; tokens as unlike as these read:")
        print("  " + ", ".join(f"{n:.0f} at width {w}" for w, n in zip(cost.widths, cost.read, strict=True)) + "\n")
    print("  width      ms  x width 1   tokens a step it needs to pay")
    for width in cost.widths:
        ratio = cost.ratio(width, _CONTEXT)
        seconds = cost.forward([width], [_CONTEXT])
        print(f"  {width:>5} {1e3 * seconds:>7.2f} {ratio:>10.2f}   {'#' * max(round(_BAR * ratio / longest), 1)}")


def _print_learnt(learnt: dict[str, Any] | None) -> None:
    """What steps took in this process, which is what decides once there have been some."""
    if learnt is None:
        return
    print("\nwhat the steps of this process took:\n")
    print("  rows  steps  plain ms  plain steps that more nodes add")
    for curve in learnt["curves"]:
        more = ", ".join(f"{nodes}: {added:.2f}" for nodes, added, _ in curve["more"])
        line = f"{curve['rows']:>4} {curve['steps']:>6} {1e3 * curve['plain']:>9.2f}"
        print(f"  {line}  {more or 'nothing was drafted'}")


def _amx(found: dict[str, Any]) -> str:
    """Whether products go through tiles, why not, or from how many tokens."""
    if found["off"]:
        return f"not used: {found['off']}"
    widths = ", ".join(f"{kind} {tokens}" for kind, tokens in found["from"].items() if tokens)
    never = ", ".join(kind for kind, tokens in found["from"].items() if not tokens)
    pays = f"pays from so many tokens: {widths}" if widths else "pays at no width"
    return f"permitted and checked; {pays}" + (f"; never: {never}" if widths and never else "")


def _print(found: dict[str, Any]) -> None:
    from outpace.common.units import format_bytes

    print(f"python        {found['python']}")
    for name, version in found["packages"].items():
        print(f"{name:<13} {version or 'not installed'}")
    cpu, memory, model = found["cpu"], found["memory"], found["model"]
    print(f"cpu           {cpu['model']}, {cpu['cores']} cores, {' '.join(cpu['features']) or 'features unknown'}")
    if found["amx"] is not None:
        print(f"amx           {_amx(found['amx'])}")
    if memory["total"] is not None:
        free = "unknown" if memory["available"] is None else format_bytes(memory["available"])
        print(f"memory        {format_bytes(memory['total'])}, {free} available")
    for name, state in found["backends"].items():
        print(f"{name:<13} {state}")
    paths = found["instruction_sets"]
    lost = f"; left out of this build: {paths['left_out']}" if paths["left_out"] else ""
    beyond = [path for path in paths["built"] if path not in paths["usable"]]
    idle = f"; built, not for this machine: {', '.join(beyond)}" if beyond else ""
    print(f"paths         {', '.join(paths['usable'])}{idle}{lost}")
    name = model["name"]
    if model["ok"]:
        path = f", {model['instruction_set']}" if model["instruction_set"] else ""
        threads = "" if model["threads"] is None else f" with {model['threads']} threads"
        print(
            f"{name:<13} loads in {model['load_seconds']:.1f} s ({model['backend']} {model['dtype']}{path}), "
            f"decodes at {model['decode_tokens_per_second']:.0f} tokens/s{threads}",
        )
        drafter = model["drafter"]
        why = f": {drafter['why']}" if drafter["why"] else ""
        print(f"drafter       auto stands for {drafter['auto']}{why}")
        for note in drafter["notes"]:
            print(f"              {note}")
        if model["team"]:
            team = model["team"]
            awake, asleep = (1e6 * team["hand_over_seconds"][how] for how in ("awake", "asleep"))
            print(
                f"threads       {team['size']} of {model['threads']} in use; handing work over takes "
                f"{awake:.1f} us, {asleep:.0f} us where they sleep; {team['dropped']} forwards went on with "
                "fewer, since others used the cores"
                + ("; cores differ, so threads claim half of their work" if team["claims"] else ""),
            )
        _print_cost(model["cost"])
        _print_learnt(model["learnt"])
    else:
        print(f"{name:<13} FAILED: {model['error']}")


COMMAND = Command(
    "doctor",
    run,
    "outpace doctor\noutpace doctor --model model.gguf --measure\noutpace doctor --threads 1 --json doctor.json",
)
