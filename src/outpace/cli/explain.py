"""``outpace explain``: where two recorded runs part, and why."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.common.parameter import argument, option

if TYPE_CHECKING:
    from outpace.measure.same import Target
    from outpace.measure.trace import Trace


def run(
    common: Common,
    first: Annotated[Path, argument("A trace.", metavar="A")],
    second: Annotated[Path, argument("The trace to compare it with.", metavar="B")],
    model: Annotated[str | None, option("The target, where it is not the one that A names.", "--model", "-m")] = None,
) -> int:
    """Find the first difference of two runs and name its cause. Exit code 1 when they differ.

    Where everything recorded is the same, the model is loaded to measure how near the tie was.
    """
    from outpace.measure.explain import explain
    from outpace.measure.trace import read

    a, b = read(first), read(second)
    with ExitStack() as stack:
        comparison = explain(a, b, lambda: _target(a, model, stack))
    if common.emit({**comparison.to_dict(), "cut": [a.cut, b.cut]}):
        return 0 if comparison.identical else 1
    for explanation in comparison.explanations:
        print(explanation)
    for path, ids in zip((first, second), comparison.alone, strict=True):
        if ids:
            print(f"only in {path}: {', '.join(f'request {i}' for i in ids)}")
    for path, trace in ((first, a), (second, b)):
        if trace.cut:
            print(f"{path} is not whole: {trace.cut}")
    return 0 if comparison.identical else 1


def _target(trace: Trace, model: str | None, stack: ExitStack) -> Target | None:
    """The model to measure gaps with; None, with a word on standard error, when the trace's own cannot be had."""
    from outpace.errors import OutpaceError
    from outpace.measure.replay import load_options, model_name
    from outpace.models.fingerprint import fingerprint_of
    from outpace.models.load import load

    options = load_options(trace)
    try:
        name = model or model_name(trace)
        recorded = trace.header.get("model", {}).get("fingerprint")
        if model is None and recorded is not None and fingerprint_of(name, options) != recorded:
            print(
                f"outpace: {name} is not the model that made {trace.name} any more: give it with --model",
                file=sys.stderr,
            )
            return None
        target, tokenizer = load(name, options)
    except OutpaceError as error:
        if model is not None:
            raise
        print(f"outpace: no score gap: {error}", file=sys.stderr)
        return None
    stack.callback(target.close)
    return target, tokenizer


COMMAND = Command(
    "explain",
    run,
    "outpace generate 'Count to ten.' --trace before.trace\n"
    "outpace explain before.trace after.trace\n"
    "outpace explain before.trace after.trace -m model.gguf --json cause.json",
)
