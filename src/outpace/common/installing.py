"""The command that installs a package into this very environment, whoever made it: for hints in errors."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[3]


def install(*packages: str, no_deps: bool = False) -> str:
    """A shell command that installs ``packages``, such as "outpace[serve]", where this Python finds them.

    In a checkout's own .venv that is its setup script, which does not install Ray; in uv's and pipx's environments
    their own commands; elsewhere pip, or uv where the environment has no pip.
    """
    checkout = (_SOURCE / "scripts" / "setup").is_file()
    own = all(name.startswith("outpace[") for name in packages)
    if own and checkout and Path(sys.prefix) == _SOURCE / ".venv" and "outpace[ray]" not in packages:
        return shlex.quote(str(_SOURCE / "scripts" / "setup"))
    wanted = " ".join(map(shlex.quote, packages))
    if own and checkout:
        wanted = " ".join(f"-e {shlex.quote(name.replace('outpace', str(_SOURCE), 1))}" for name in packages)
    options = "--no-deps " if no_deps else ""
    python = shlex.quote(_python())
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx install --force {wanted}" if own else f"pipx runpip outpace install {options}{wanted}"
    if own and (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return f"uv tool install --force {wanted}"
    if find_spec("pip") is not None:
        return f"{python} -m pip install {options}{wanted}"
    if shutil.which("uv") is not None:
        return f"uv pip install --python {python} {options}{wanted}"
    return f"{python} -m ensurepip && {python} -m pip install {options}{wanted}"


def _python() -> str:
    """This interpreter as a shell finds it: by name where that leads to it."""
    found = shutil.which("python")
    return "python" if found is not None and Path(found) == Path(sys.executable) else sys.executable
