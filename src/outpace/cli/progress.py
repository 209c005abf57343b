"""A bar on a terminal for what takes a while; where nobody looks, nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    def __call__(self, n: int, tokens: int = 0, /) -> None:
        """``n`` more of the total are done; ``tokens`` count for the speed that is shown."""


@contextmanager
def progress(what: str, total: int, *, speed: bool = False) -> Iterator[Advance]:
    """How far it is, in ``what``, and the time left; ``speed``: tokens a second, too."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = [TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()]
    if speed:
        columns.append(TextColumn("{task.fields[speed]:,.0f} tokens/s"))
    shown = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total, speed=0.0)
        begun, count = bar.get_time(), 0

        def advance(n: int, tokens: int = 0, /) -> None:
            nonlocal count
            count += tokens
            bar.update(task, advance=n, speed=count / max(bar.get_time() - begun, 1e-3))

        yield advance
