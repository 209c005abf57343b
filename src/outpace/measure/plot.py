"""Pictures of what ``outpace bench`` measured, decode speed by drafter and category and acceptance by position, and of
what ``outpace plan`` expects."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.common.files import StrPath, check_writable, write_bytes
from outpace.common.installing import install
from outpace.errors import MissingExtraError, ParameterError
from outpace.measure.bench import interval
from outpace.measure.plan import Planned, best

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def check(path: StrPath) -> None:
    """Raise ParameterError or MissingExtraError now if ``draw`` could not write ``path`` later."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ParameterError(f"{path} is neither a .png nor an .svg: give the picture a name that ends so")
    check_writable(path, path.suffix[1:].upper())
    if find_spec("matplotlib") is None:
        raise MissingExtraError(f"a plot needs matplotlib: {install('outpace[plot]')}")


def draw(path: StrPath, value: Mapping[str, Any]) -> None:
    """Draw ``value``, which ``bench --json`` writes. Raises OSError."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    configs = value["configs"]
    categories = list(configs[0]["by_category"])
    groups = ["all", *(categories if len(categories) > 1 else [])]
    figure = Figure(figsize=(max(9.0, 4 + 1.2 * len(groups)), 4.2), layout="constrained")
    speed, accepted = figure.subplots(1, 2, width_ratios=[2 + len(groups) / 4, 2])
    width = 0.8 / len(configs)
    for i, entry in enumerate(configs):
        figures = [entry, *(entry["by_category"][name] for name in groups[1:])]
        places = [at - 0.4 + width * (i + 0.5) for at in range(len(groups))]
        intervals = [interval(each) for each in figures]
        speeds = [value for value, _, _ in intervals]
        errors = [[value - low for value, low, _ in intervals], [high - value for value, _, high in intervals]]
        bars = speed.bar(
            places, speeds, width, label=entry["name"], color=f"C{i}", yerr=errors if i else None, capsize=3
        )
        (colour,) = {patch.get_facecolor() for patch in bars}
        shares = entry["acceptance_by_position"]
        accepted.plot(range(1, len(shares) + 1), shares, marker="o", color=colour)  # a single position is a point
    counts = [configs[0], *(configs[0]["by_category"][name] for name in groups[1:])]
    labels = [f"{group}\nn = {each['prompts']}" for group, each in zip(groups, counts, strict=True)]
    speed.set_xticks(range(len(groups)), labels, rotation=20 if len(groups) > 4 else 0)
    speed.set_ylabel("decode tokens/s")
    speed.set_title("n: answers; black: 95 % interval of the speedup over prompts", fontsize=8)
    speed.legend(fontsize="small")
    accepted.set_xlabel("position in the draft")
    accepted.set_ylabel("share accepted, of drafts so long")
    accepted.set_xticks(range(1, max(len(entry["acceptance_by_position"]) for entry in configs) + 1))
    accepted.set_ylim(-0.02, 1.02)
    for axes in (speed, accepted):
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(
        f"{value['model']}, {value['backend']} {value['dtype']}, {configs[0]['prompts']} answers", fontsize=10
    )
    save(figure, path)


def draw_plan(path: StrPath, planned: Sequence[Planned], title: str) -> None:
    """Draw the speed of each size of drafts. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    sizes, top = [each.size for each in planned], best(planned)
    axes.plot(sizes, [each.speed for each in planned], marker="o", label="speed: plain decoding is 1")
    axes.plot(sizes, [each.tokens for each in planned], linestyle="--", label="tokens a step")
    axes.plot(sizes, [each.step for each in planned], linestyle=":", label="a step's time: a plain one is 1")
    axes.annotate(f"{top.speed:.2f} at {top.size}", (top.size, top.speed), (0, 8), textcoords="offset points")
    axes.set_xlabel("tokens drafted a step")
    axes.set_xticks(sizes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def save(figure: Figure, path: StrPath) -> None:
    """Write a figure. Raises OSError."""
    path, buffer = Path(path), io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower()[1:], dpi=130)
    write_bytes(path, buffer.getvalue())
