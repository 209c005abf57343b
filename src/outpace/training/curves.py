"""How a training went: a line of blocks for a terminal, a picture for a person."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.common.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """``values`` as a line of at most ``width`` blocks, each a mean of its stretch, from the least to the greatest."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in means)


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Loss, simulated tokens per step and acceptance by position against tokens trained, as a PNG. Raises OSError.

    ``rows`` as the loop keeps them: "tokens", "loss", "tokens_per_step", "acceptance".
    """
    buffer = io.BytesIO()
    drawn(rows).savefig(buffer, format="png", dpi=110)
    write_bytes(path, buffer.getvalue())


def drawn(rows: Sequence[dict[str, Any]]) -> Figure:
    """The picture. A line through a single point would show nothing, so points are marked while they are few."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    marker = "o" if len(rows) < 10 else None
    at = [row["tokens"] / 1e6 for row in rows]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loss, gained, accepted = figure.subplots(1, 3)
    loss.plot(at, [row["loss"] for row in rows], marker=marker)
    loss.set_ylabel("loss")
    gained.plot(at, [row["tokens_per_step"] for row in rows], marker=marker)
    gained.set_ylabel("simulated tokens per step, held out")
    for position in range(len(rows[0]["acceptance"]) if rows else 0):
        shares = [row["acceptance"][position] for row in rows]
        accepted.plot(at, shares, marker=marker, label=f"token {position + 1}")
    accepted.set_ylabel("acceptance")
    if rows:
        accepted.legend(fontsize="small")
    for axes in (loss, gained, accepted):
        axes.set_xlabel("million tokens trained")
        axes.grid(alpha=0.3)
    return figure
