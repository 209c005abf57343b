"""The scores of several servers, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.invariance.plan import Item, Question

KINDS = ("answers", "changed", "bits", "failed", "near_ties")


def score(
    items: Sequence[Item], questions: Sequence[Question], found: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Counts of ``KINDS``, in all and by each value of each axis, and the first difference of those that count.

    changed: a token, the text or the end is another; bits: a logprob alone is; near_ties: of those changed.
    """
    total = dict.fromkeys(KINDS, 0)
    by: dict[str, dict[str, dict[str, int]]] = {}
    first: dict[str, Any] | None = None
    for item, its in zip(items, found, strict=True):
        kind = None if its is None else _kind(its)
        ways = {**item.ways, "noise": questions[item.question].noise}
        each = [by.setdefault(axis, {}).setdefault(value, dict.fromkeys(KINDS, 0)) for axis, value in ways.items()]
        for counts in (total, *each):
            counts["answers"] += 1
            if its is not None and kind is not None:
                counts[kind] += 1
                counts["near_ties"] += kind == "changed" and its["near_tie"]
        if its is not None and (first is None or (kind == "changed" and first["kind"] != "changed")):
            first = {"kind": kind, **ways, "body": dict(questions[item.question].body), **its}
    return {**total, "by": by, "first": first}


def _kind(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return "failed"
    return "bits" if found["what"] == "logprob" else "changed"


def table(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """A column a server; a dash for what one cannot be told, or was not asked."""
    made = Table("answers changed (in bits alone)", "", *scores, box=None)
    made.add_row("all", "", *(_cell(its) for its in scores.values()), style="bold")
    axes: dict[str, dict[str, None]] = {}
    for its in scores.values():
        for axis, values in its["by"].items():
            axes.setdefault(axis, {}).update(dict.fromkeys(values))
    for axis, values in axes.items():
        for i, value in enumerate(values):
            cells = [_cell(its["by"].get(axis, {}).get(value)) for its in scores.values()]
            made.add_row("" if i else axis, value, *cells)
    return made


def _cell(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "-"
    told = f"{counts['changed']} of {counts['answers']} ({counts['bits']})"
    return told + (f", {counts['failed']} failed" if counts["failed"] else "")
