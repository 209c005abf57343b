"""Tables in docs that are made from the code: ``python scripts/tables.py`` writes them, ``--check`` compares.

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import get_args

from outpace.cli.app import NAMES, command
from outpace.cli.command import Command
from outpace.common.option import Spelling
from outpace.drafters.catalogue import METHODS
from outpace.params import PARAMETERS

DOCS = Path(__file__).parents[1] / "docs"
_BETWEEN = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _code(*names: str) -> str:
    return " ".join(f"`{name}`" for name in names)


def parameters() -> str:
    """Every sampling parameter, as ``outpace.params`` defines it."""
    head = ("parameter", "default", "values", "applies to", "meaning", "option", "in requests", "elsewhere")
    rows = []
    for name, p in PARAMETERS.items():
        request = _code(p.request) if p.request else ""
        known = [alias for alias in p.names if alias != p.request]
        values = p.values.range + (", None" if p.none == "value" else "")
        default = _code(repr(p.default))
        rows.append((_code(name), default, values, p.stage, p.meaning, _code(*p.option), request, _code(*known)))
    return _rows(head, rows)


def _commands() -> dict[str, Command]:
    """Every command by its name, those of a group by both names."""
    found = {}
    for name in NAMES:
        entry = command(name)
        own = {entry.name: entry} if isinstance(entry, Command) else {f"{name} {c.name}": c for c in entry.commands}
        found.update(own)
    return found


def commands() -> str:
    rows = ((_code(f"outpace {name}"), " ".join(c.about.split("\n\n")[0].split())) for name, c in _commands().items())
    return _rows(("command", "does"), rows)


def options(name: str) -> str:
    """The options of a command but those of loading, of sampling and of everybody's, which have their own tables."""
    shared = {} if name == "generate" else {f for f, _, _ in _commands()["generate"].options()}
    rows = []
    for field, hint, default in _commands()[name].options():
        spelling = next(part for part in get_args(hint) if isinstance(part, Spelling))
        if field in shared or not spelling.names:
            continue
        text = spelling.help
        given = default not in (None, False, "", (), Parameter.empty) and "efault:" not in text
        rows.append(
            (
                _code(*spelling.names),
                _code(str(default)) if given else "",
                text,
            )
        )
    return _rows(("option", "default", "meaning"), rows)


def drafters() -> str:
    """Every drafting method, as ``outpace.drafters.catalogue`` registers it."""
    rows = []
    for name, method in METHODS.items():
        spec = f"{name}:{method.short}" if method.short else name
        link = f"[{_code(spec)}](#{spec.lower().replace(':', '')})"
        rows.append((link, method.says, _code(*method.options), method.costs, method.use))
    rows.append(("[`a+b`](#compositions)", "several at once", "", "their sum", "`suffix+eagle:PATH`"))
    return _rows(("spec", "what drafts", "options", "costs", "use it for"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "drafters": drafters,
    "parameters": parameters,
    "commands": commands,
    **{f"options-{name.replace(' ', '-')}": partial(options, name) for name in _commands()},
}


def filled(page: str) -> str:
    """The page with every table made anew. Raises KeyError for a table that there is none of."""
    return _BETWEEN.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def stale() -> dict[Path, str]:
    """Pages whose tables are not the code's, with what they should be."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    return {path: filled(page) for path, page in pages.items() if filled(page) != page}


def main() -> int:
    found = stale()
    if "--check" in sys.argv:
        for path in found:
            print(f"{path.name} has a table that is not the code's: run python scripts/tables.py", file=sys.stderr)
        return 1 if found else 0
    for path, page in found.items():
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
