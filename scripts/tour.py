"""Runs the cells of docs/tour.ipynb, a notebook for Jupyter, and writes what they show: ``python scripts/tour.py``.

A cell shows what it prints and the value of its last expression, as Jupyter does. The sources are the notebook's own.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "tour.ipynb"


def sources(page: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell in ``names``, and return what it shows, as the format of notebooks (4.5) has it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, PAGE.name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), PAGE.name, "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = [value._repr_html_()]
        found.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return found


def main() -> None:
    page, names, count = json.loads(PAGE.read_text(encoding="utf-8")), {}, 0
    for cell in page["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell |= {"execution_count": count, "outputs": outputs("".join(cell["source"]), names, count)}
    PAGE.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
