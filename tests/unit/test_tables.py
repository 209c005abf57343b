"""Tables in docs are the code's."""

from __future__ import annotations

from scripts import tables


def test_tables_in_docs_are_the_codes() -> None:
    assert not tables.stale(), "run python scripts/tables.py"


def test_a_table_is_made_between_its_marks() -> None:
    page = tables.filled("a\n<!-- table: parameters -->\nold\n<!-- end -->\nb\n")
    assert page.startswith("a\n<!-- table: parameters -->\n| parameter |")
    assert page.endswith("|\n<!-- end -->\nb\n")
    assert "old" not in page
    assert "| `top_n_sigma` | `0.0` | 0 to 100 | filter |" in page
