"""Others' packages, as their own documentation has them, each in a process of an environment of its own
(scripts/clients)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

_VENV = Path(__file__).parents[2] / ".venv"
_QUIET = {
    "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1", "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true",
}  # fmt: skip


def skip(package: str, script: str) -> NoReturn:
    """Skip a test for want of ``package``, which ``scripts/SCRIPT`` installs."""
    pytest.skip(f"{package} is not installed: scripts/{script} does it")


def results_of(environment: str, package: str, script: str, url: str, home: Path, **values: Any) -> Any:
    """What ``script`` leaves in ``found``, as JSON has it. It knows URL, BASE (with /v1) and ``values``. Skips the test
    where ``package`` is not installed."""
    own = _VENV / environment / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([python, "-c", looks], check=False).returncode:
        skip(package, "clients")
    known = {"URL": url, "BASE": f"{url}/v1", **values}
    lines = ["import json", *(f"{name} = {value!r}" for name, value in known.items()), script]
    file = home / "script.py"
    file.write_text("\n".join([*lines, "print()", "print(json.dumps(found))"]), encoding="utf-8")
    env = {**os.environ, **_QUIET, "HOME": str(home), "LLM_USER_PATH": str(home / "llm")}
    done = subprocess.run([python, file], env=env, cwd=home, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
