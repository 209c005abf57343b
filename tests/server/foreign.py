"""Others' packages, as their own documentation has them, each in a process of an environment of its own
(scripts/clients)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

import pytest

_VENV = Path(__file__).parents[2] / ".venv"
_QUIET = {
    "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1", "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true", "DSPY_CACHEDIR": "cache",
}  # fmt: skip
_BOUND = 230  # seconds of a script, after which it says where it hangs
PROGRAMS = _VENV / "npm" / "node_modules" / ".bin"
_HANGING = f"""setTimeout(() => {{
  console.error("hangs with", process.getActiveResourcesInfo()); process.exit(1);
}}, {_BOUND}000).unref();"""


def skip(package: str, script: str) -> NoReturn:
    """Skip a test for want of ``package``, which ``scripts/SCRIPT`` installs."""
    pytest.skip(f"{package} is not installed: scripts/{script} does it")


@dataclass(frozen=True)
class Client:
    """A ``package`` of an ``environment`` of scripts/clients; of "npm" where it runs in Node. ``without``: what it has
    no way to do, such as to run tools and send their results back."""

    name: str
    environment: str
    package: str
    without: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """The name of what drives it, without its ending."""
        return re.sub(r"\W+", "_", self.name.lower()).strip("_")

    @property
    def version(self) -> str:
        """The installed one. Skips the test where there is none."""
        home = _VENV / self.environment
        if self.environment == "npm":
            files = [home / "node_modules" / self.package / "package.json"]
            found = [json.loads(file.read_text(encoding="utf-8"))["version"] for file in files if file.exists()]
        else:
            places = [str(place) for place in home.glob("lib/python*/site-packages")]
            found = [each.version for each in distributions(name=self.package, path=places)]
        return str(found[0]) if found else skip(self.package, "clients")

    def results(self, folder: Path, url: str, home: Path, **values: Any) -> Any:
        """What its script in ``folder`` leaves in ``found``, as in ``results_of``."""
        (file,) = folder.glob(f"{self.script}.*")
        text = file.read_text(encoding="utf-8")
        if self.environment != "npm":
            return results_of(self.environment, self.package, text, url, home, **values)
        known = {"URL": url, "BASE": f"{url}/v1", **values}
        lines = [_HANGING, *(f"const {name} = {json.dumps(value)};" for name, value in known.items())]
        program = "\n".join([*lines, text, "console.log(); console.log(JSON.stringify(found));"])
        command = ["node", "--input-type=module", "-"]
        return _last(command, _VENV / "npm", home, program)


def results_of(environment: str, package: str, script: str, url: str, home: Path, **values: Any) -> Any:
    """What ``script`` leaves in ``found``, as JSON has it. It knows URL, BASE (with /v1) and ``values``. Skips the test
    where ``package`` is not installed."""
    own = _VENV / environment / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    looks = f"import importlib.metadata as m, sys; sys.exit(not any(m.distributions(name={package!r})))"
    if subprocess.run([python, "-c", looks], check=False).returncode:
        skip(package, "clients")
    known = {"URL": url, "BASE": f"{url}/v1", **values}
    lines = [f"import faulthandler, json; faulthandler.dump_traceback_later({_BOUND}, exit=True)"]
    lines += [*(f"{name} = {value!r}" for name, value in known.items()), script]
    file = home / "script.py"
    file.write_text("\n".join([*lines, "print()", "print(json.dumps(found))"]), encoding="utf-8")
    return _last([python, str(file)], home, home)


def _last(command: list[str], folder: Path, home: Path, program: str | None = None) -> Any:
    """The last line that a command prints, as JSON."""
    env = {**os.environ, **_QUIET, "HOME": str(home), "LLM_USER_PATH": str(home / "llm")}
    done = subprocess.run(
        command, env=env, cwd=folder, input=program, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
