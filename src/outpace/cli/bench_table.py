"""The table that ``outpace bench`` prints from what it writes."""

from __future__ import annotations

from typing import Any

from outpace.cli.terminal import table
from outpace.measure.bench import doubt, written

_COLUMNS = ("decode tok/s", "end-to-end tok/s", "tokens/step", "accepted", "speedup (95 %)", "identical")

_MOVED = "!"  # beside a ratio that drafting cannot explain


def show(value: dict[str, Any], *, promised: bool) -> None:
    """Print the table of ``value`` (what ``--json`` writes), then every difference.

    ``promised``: whether identical tokens were (not under rejection, unless greedy).
    """
    configs = value["configs"]
    print(
        f"{value['model']}, {value['backend']} {value['dtype']}, {value['threads']} threads, "
        f"{configs[0]['prompts']} answers of at most {value['max_tokens']} tokens, "
        f"temperature {value['temperature']:g}, {value['acceptance']}"
    )
    categories = list(configs[0]["by_category"])
    rows = []
    for category in [None, *(categories if len(categories) > 1 else [])]:
        for i, entry in enumerate(configs):
            figures = entry if category is None else entry["by_category"][category]
            cells = _cells(figures, promised, drafts=entry["size"] != 0)
            rows.append(["" if i else category or "all", entry["name"], *cells])
    print(table(("category", "drafter", *_COLUMNS), rows, left=2))
    first, control = configs[0]["name"], value["control"]["speedup"]
    print(f"speedup: decode tok/s over those of {first}; in brackets: 95 % over prompts")
    print(f"{first} against {first}, as a control: {written(control)}; so much a ratio says of the machine alone")
    if any(cells[-2].endswith(_MOVED) for cells in rows):
        print(f"{_MOVED} more than its tokens a step can give: the machine's speed changed between the runs")
    for note in filter(None, (doubt(entry["name"], entry) for entry in configs)):
        print(note)
    if not promised:
        print(f"{value['acceptance']} does not promise the same tokens: see docs/exactness.md")
        return
    for run in value["runs"]:
        difference = run["difference"]
        if difference is not None:
            kind = "near-tie" if difference["near_tie"] else "DIFFERENT"
            gap = "infinite" if difference["gap"] is None else f"{difference['gap']:.2g}"
            print(
                f"{run['config']}, prompt {run['id']}, turn {run['turn'] + 1}: {kind} at token {difference['index']}, "
                f"score gap {gap}"
            )


def _cells(figures: dict[str, Any], promised: bool, *, drafts: bool) -> list[str]:
    ties = f" ({figures['near_ties']} near-ties)" if promised and figures["near_ties"] else ""
    return [
        f"{figures['decode_tokens_per_second']:.1f}",
        f"{figures['end_to_end_tokens_per_second']:.1f}",
        f"{figures['tokens_per_step']:.2f}",
        f"{figures['acceptance_rate']:.0%}" if drafts else "-",
        written(figures["speedup"]) + (_MOVED if figures["moved"] else ""),
        f"{figures['identical']}/{figures['prompts']}{ties}",
    ]
