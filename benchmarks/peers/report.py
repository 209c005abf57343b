"""From answers to figures: speeds, ratios, and how many outputs a drafting mode changed."""

from __future__ import annotations

from statistics import median
from typing import Any

Row = dict[str, Any]  # one answer: config, prompt, tokens, first_tokens, first, rest, ids or text


def speed(rows: list[Row]) -> float:
    """Pooled decode tokens/s: (tokens after the first delta) / (time after the first delta)."""
    seconds = sum(row["rest"] for row in rows)
    return sum(row["tokens"] - row.get("first_tokens", 1) for row in rows) / seconds if seconds else 0.0


def changed(rows: list[Row], plain: list[Row]) -> int:
    """How many outputs differ from those of the same engine without drafts."""
    before = {row["prompt"]: row.get("ids", row.get("text")) for row in plain}
    return sum(row.get("ids", row.get("text")) != before[row["prompt"]] for row in rows)


def ratios(rows: list[Row], other: list[Row]) -> list[float]:
    """Prompt by prompt, the speed of ``rows`` over that of ``other``."""
    by = {row["prompt"]: speed([row]) for row in other}
    return [speed([row]) / by[row["prompt"]] for row in rows if by.get(row["prompt"]) and row["rest"]]


def table(answers: list[Row], plain_of: dict[str, str]) -> list[Row]:
    """One entry a configuration: pooled speed, ratio to the best configuration of the best peer, changed outputs."""
    by: dict[str, list[Row]] = {}
    for row in answers:
        by.setdefault(row["config"], []).append(row)
    peers = {name: speed(rows) for name, rows in by.items() if not name.startswith("outpace")}
    best = max(peers, key=peers.__getitem__) if peers else None
    out = []
    for name, rows in by.items():
        steps = sum(row.get("steps") or 0 for row in rows)
        out.append(
            {
                "config": name,
                "prompts": len(rows),
                "tokens": sum(row["tokens"] for row in rows),
                "decode_tokens_per_second": speed(rows),
                "tokens_per_step": sum(row["tokens"] for row in rows) / steps if steps else None,
                "of_best_peer": speed(rows) / peers[best] if best and peers[best] else None,
                "median_of_best_peer": median(found) if best and (found := ratios(rows, by[best])) else None,
                "changed": changed(rows, by[plain_of[name]]) if plain_of.get(name) in by else None,
            }
        )
    return out


def prefill(answers: list[Row]) -> dict[str, float]:
    """Median tokens/s of reading a prompt, by configuration; the first delta comes with the prompt's end."""
    by: dict[str, list[float]] = {}
    for row in answers:
        by.setdefault(row["config"], []).append(row["prompt_tokens"] / row["first"])
    return {name: median(found) for name, found in by.items()}
