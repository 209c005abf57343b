"""A plugin for pytest: which of another server's tests run, and what came of them.

``OUTPACE_PEERS``: the name of the table; "all", or "runs" for those that apply; and the file that is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from table import RUNS, read

_name, _which, _out = os.environ["OUTPACE_PEERS"].split(":", 2)
_table = read(_name)
_outcomes = dict[str, tuple[str, str]]()  # by id: what came of it, and why
_COUNTS = ("n_prompt", "n_cache")
_MOST = 300  # characters of a reason


def _word(item: pytest.Item) -> str:
    file, _, name = item.nodeid.partition("::")
    return _table.word(file, name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _which == "all" or _word(item) in RUNS]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """The words of another model, and the counts of its tokens, are let be where the table says so."""
    if _word(item) == "words":
        item.module.match_regex = lambda *_: True
        given = item.callspec.params if hasattr(item, "callspec") else {}
        given.update({name: ANY for name in _COUNTS if name in given})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(report.longrepr or "") if crash is None else crash.message
        _outcomes.setdefault(report.nodeid, (report.outcome, why[:_MOST]))
    Path(_out).write_text(json.dumps(_outcomes), encoding="utf-8")
