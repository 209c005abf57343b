"""Draws decode speed beside other engines as two SVG files, for light and dark pages, from what ``peers`` wrote.

    python -m benchmarks chart docs/results/peers.json docs/images/speed

writes docs/images/speed-light.svg and docs/images/speed-dark.svg. ``--brief FILE`` also keeps the results without the
answers.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

from outpace.common.files import write_bytes, write_json

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 820, 22, 8, 230, 240, 48
INK = {"light": ("#1f2328", "#59636e", "#afb8c1", "#1a7f37"), "dark": ("#f0f6fc", "#9198a1", "#3d444d", "#3fb950")}
NAMES = {
    "llamacpp-q4_1": "llama.cpp Q4_1",
    "llamacpp-q4_0": "llama.cpp Q4_0",
    "openvino": "OpenVINO",
    "outpace": "Outpace",
}


def label(config: str) -> str:
    """``engine mode`` as a reader knows it."""
    engine, _, mode = config.partition(" ")
    return f"{NAMES.get(engine, engine)}, {'plain' if mode == 'none' else mode}"


def draw(value: dict[str, Any], theme: str) -> str:
    """One bar a configuration, the fastest last; Outpace's are coloured."""
    text, quiet, grey, green = INK[theme]
    rows = sorted(value["table"], key=lambda row: float(row["decode_tokens_per_second"]))
    most = rows[-1]["decode_tokens_per_second"]
    height = TOP + len(rows) * (BAR + GAP) + 28
    setting = f"{rows[0]['prompts']} Spec-Bench prompts, greedy, {value['threads']} threads"
    about = f"{value['model']}, {setting}, {value['machine']['model']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="14">',
        f"<title>Decode speed in tokens/s: {escape(about)}</title>",
        f'<text x="0" y="18" fill="{text}" font-size="16" font-weight="600">Decode speed, tokens/s</text>',
    ]
    for i, row in enumerate(rows):
        y, speed = TOP + i * (BAR + GAP), row["decode_tokens_per_second"]
        ours = row["config"].startswith("outpace")
        length = max((WIDTH - LEFT - RIGHT) * speed / most, 1)
        plain = row["changed"] is None or row["config"].split()[1] in ("plain", "paged", "none")
        note = "" if plain else f" ({row['changed']} of {row['prompts']} answers changed)"
        ink, after = (text if ours else quiet), LEFT + length + 8
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end" fill="{ink}">{escape(label(row["config"]))}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" fill="{green if ours else grey}"/>',
            f'<text x="{after:.1f}" y="{y + 16}" fill="{text}">{speed:.0f}<tspan fill="{quiet}">{note}</tspan></text>',
        ]
    parts += [f'<text x="0" y="{height - 8}" fill="{quiet}" font-size="12">{escape(about)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="what peers --json wrote")
    parser.add_argument("out", type=Path, help="beginning of the two files' names")
    parser.add_argument("--brief", type=Path, help="keep the results without their answers here")


def run(given: argparse.Namespace) -> int:
    value = json.loads(given.results.read_text(encoding="utf-8"))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for theme in INK:
        write_bytes(Path(f"{given.out}-{theme}.svg"), draw(value, theme).encode())
    if given.brief:
        write_json(given.brief, {key: found for key, found in value.items() if key not in ("answers", "prefill")})
    return 0
