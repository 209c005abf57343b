"""What others' clients did against the server, as their tests saw it: ``clients/table.json``, of which
``scripts/tables.py`` makes a table of the docs. ``./scripts/clients table`` writes it; other runs compare."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.server.foreign import Client

FILE = Path(__file__).parent / "clients" / "table.json"


def table() -> dict[str, dict[str, Any]]:
    """Package, version and what was done, by the client's name."""
    rows: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return rows


def recorded(client: Client, did: list[str]) -> None:
    """Assert that the table says what ``client`` did, or have it say so."""
    rows = table()
    row = {"package": client.package, "version": client.version, "did": did, "without": list(client.without)}
    if os.environ.get("OUTPACE_CLIENTS") == "write":
        text = json.dumps({**rows, client.name: row}, indent=1, sort_keys=True)
        FILE.write_text(text + "\n", encoding="utf-8")
    else:
        assert rows.get(client.name) == row, "run ./scripts/clients table"
