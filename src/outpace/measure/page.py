"""Pages that hold all they show: text, bars and tables, without a request to anywhere."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from outpace.common.files import StrPath, write_bytes

_WIDTH, _BAR, _GAP, _TOP, _LEAST = 820, 22, 8, 48, 200  # _LEAST: of the longest bar, where labels leave less
_LETTER = 0.6  # of a font's size: about what a letter takes
# Text, quiet text, other bars, our bars: as the page's style has them, or fixed for a picture in a README.
INK = {
    "page": ("var(--ink)", "var(--quiet)", "var(--line)", "var(--good)"),
    "light": ("#1f2328", "#59636e", "#afb8c1", "#1a7f37"),
    "dark": ("#f0f6fc", "#9198a1", "#656c76", "#3fb950"),
}
_STYLE = """
body { display: block; height: auto; max-width: 76rem; margin: 0 auto; padding: 1.5rem; }
section { margin-top: 2rem; overflow-x: auto; } section.part { margin-top: 1.2rem; }
svg { max-width: 100%; height: auto; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; } h3 { font-size: .9rem; } p { margin: .2rem 0; }
table { border-collapse: collapse; margin-top: .8rem; font-size: .85rem; width: auto; }
th, td { text-align: right; padding: .2rem 0 .2rem 1.6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """``note``: in brackets behind the value; ``ours``: in the colour of what is ours; ``mark``: a line across it."""

    label: str
    value: float
    note: str = ""
    ours: bool = True
    mark: float = 0.0


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a line about the setting, notes and commands, bars with what they count, and a table. ``part``: of
    the section before it."""

    title: str
    about: str
    counts: str = ""
    bars: Sequence[Bar] = ()
    heads: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()
    part: bool = False


def bars(rows: Sequence[Bar | str], title: str, about: str, theme: str = "page") -> str:
    """An SVG picture of a bar for each of ``rows``, from the top; a text begins a group, which has its own scale."""
    text, quiet, grey, green = INK[theme]
    drawn = [row for row in rows if isinstance(row, Bar)]
    labels, notes = (max((_long(text, 14) for text in texts), default=0) for texts in (
        [row.label for row in drawn], [f"{row.value:.0f} ({row.note})" for row in drawn]
    ))  # fmt: skip
    left, length = labels + 14, max(_WIDTH - labels - notes - 30, _LEAST)
    heads = max((_long(row, 14) for row in rows if isinstance(row, str)), default=0)
    width = max(_WIDTH, left + length + notes + 16, heads, _long(title, 16))
    lines = textwrap.wrap(about, int(width / (12 * _LETTER)))
    height = _TOP + len(rows) * (_BAR + _GAP) + (12 + 16 * len(lines) if lines else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="14">',
        f"<title>{escape(f'{title}: {about}' if about else title)}</title>",
        f'<text x="0" y="18" fill="{text}" font-size="16" font-weight="600">{escape(title)}</text>',
    ]
    most = 1.0
    for i, row in enumerate(rows):
        y = _TOP + i * (_BAR + _GAP)
        if not i or isinstance(row, str):
            most = max((bar.value for bar in _group(rows[i:])), default=0.0) or 1.0
        if isinstance(row, str):
            parts.append(f'<text x="0" y="{y + 18}" fill="{text}">{escape(row)}</text>')
            continue
        ink, reach = (text if row.ours else quiet), max(length * row.value / most, 1)
        note = f"&#160;({escape(row.note)})" if row.note else ""
        parts += [
            f'<text x="{left - 10}" y="{y + 16}" text-anchor="end" fill="{ink}">{escape(row.label)}</text>',
            f'<rect x="{left}" y="{y}" width="{reach:.1f}" height="{_BAR}" rx="3" '
            f'fill="{green if row.ours else grey}"/>',
            f'<text x="{left + reach + 8:.1f}" y="{y + 16}" fill="{text}">{row.value:.0f}'
            f'<tspan fill="{quiet}">{note}</tspan></text>',
        ]
        if row.mark and row.mark < row.value:
            at = left + length * row.mark / most
            parts.append(f'<path d="M{at:.1f} {y}v{_BAR}" stroke="{text}" stroke-width="2"/>')
    for i, line in enumerate(lines):
        y = height - 8 - 16 * (len(lines) - 1 - i)
        parts.append(f'<text x="0" y="{y}" fill="{quiet}" font-size="12">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _group(rows: Sequence[Bar | str]) -> list[Bar]:
    """The bars up to the next group's text."""
    return [row for row in takewhile(lambda row: row is rows[0] or isinstance(row, Bar), rows) if isinstance(row, Bar)]


@dataclass(frozen=True, slots=True)
class Line:
    """Values at places from left to right, which all lines of a picture share."""

    label: str
    values: Sequence[float]
    ours: bool = True


def curves(lines: Sequence[Line], places: Sequence[int], title: str, about: str, theme: str = "page") -> str:
    """An SVG picture of ``lines``, each value written at its point."""
    text, quiet, grey, green = INK[theme]
    most = max(max(line.values) for line in lines)
    left, step, top, high = 24, 150, 56, 150
    labels = max(_long(line.label, 14) for line in lines)
    width = max(left + step * (len(places) - 1) + labels + 24, _long(title, 15))
    words = textwrap.wrap(about, int(width / (12 * _LETTER)))
    height = top + high + 34 + 16 * len(words)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="14">',
        f"<title>{escape(f'{title}: {about}' if about else title)}</title>",
        f'<text x="0" y="18" fill="{text}" font-size="16" font-weight="600">{escape(title)}</text>',
    ]
    for i, place in enumerate(places):
        parts.append(
            f'<text x="{left + step * i}" y="{top + high + 22}" text-anchor="middle" fill="{quiet}">{place}</text>'
        )
    taken: list[tuple[int, float]] = []  # by what is written
    for line in lines:
        ink, words_ink = (green, text) if line.ours else (grey, quiet)
        points = [(left + step * i, top + high * (1 - value / most)) for i, value in enumerate(line.values)]
        path = " ".join(f"{x},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="3"/>')
        for (x, y), value in zip(points, line.values, strict=True):
            parts.append(f'<circle cx="{x}" cy="{y:.1f}" r="4" fill="{ink}"/>')
            below = y + 18 if line.ours else y - 9
            if any(x == at_x and abs(below - at_y) < 13 for at_x, at_y in taken):
                continue
            taken.append((x, below))
            at = f'x="{x}" y="{below:.1f}" text-anchor="middle"'
            parts.append(f'<text {at} fill="{words_ink}" font-size="12">{value:.3g}</text>')
        x, y = points[-1]
        parts.append(f'<text x="{x + 14}" y="{y + 5:.1f}" fill="{words_ink}">{escape(line.label)}</text>')
    for i, said in enumerate(words):
        y = height - 6 - 16 * (len(words) - 1 - i)
        parts.append(f'<text x="0" y="{y}" fill="{quiet}" font-size="12">{escape(said)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _long(text: str, size: int) -> int:
    """About how many pixels a text takes in a font of ``size``."""
    return int(len(text) * size * _LETTER)


def write(path: StrPath, title: str, sections: Sequence[Section]) -> None:
    """Write a page. Raises OSError."""
    colours, style = (
        files("outpace.measure.view").joinpath(name).read_text("utf-8") for name in ("colours.css", "page.css")
    )
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{colours}{style}{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
    ]
    for section in sections:
        kind, level = (' class="part"', 3) if section.part else ("", 2)
        parts.append(f"<section{kind}><h{level}>{escape(section.title)}</h{level}>")
        parts += [f'<p class="quiet">{escape(line)}</p>' for line in (section.about, *section.notes) if line]
        parts += [f'<p class="quiet"><code>{escape(line)}</code></p>' for line in section.commands]
        if section.bars:
            parts.append(bars(section.bars, section.counts, ""))
        if section.lines:
            rows = [f"<th>{'</th><th>'.join(map(escape, section.heads))}</th>"]
            rows += [f"<td>{'</td><td>'.join(map(escape, line))}</td>" for line in section.lines]
            parts.append(f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>")
        parts.append("</section>")
    write_bytes(Path(path), "\n".join([*parts, "</body></html>\n"]).encode())
