"""What docs/deploying.md shows: systemd takes the unit, Compose the file, nginx the server, ``outpace`` the options."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from outpace.cli.app import parse
from tests.integration.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "deploying.md"


def checked(tool: str, *arguments: str | Path) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    (unit,) = blocks(PAGE, "ini")
    (start,) = (line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart="))
    assert callable(parse(shlex.split(start)[1:]))
    file = tmp_path / "outpace.service"
    file.write_text(unit.replace("/opt/outpace/bin/outpace", "/bin/true"), encoding="utf-8")
    checked("systemd-analyze", "verify", "--man=no", file)


def test_compose_starts_the_image_with_options_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = blocks(PAGE, "yaml")
    service = yaml.safe_load(text)["services"]["outpace"]
    assert callable(parse(["serve", "--host", "0.0.0.0", *service["command"]]))
    assert (ROOT / service["build"]["dockerfile"]).exists()


def test_nginx_takes_the_server(tmp_path: Path) -> None:
    (text,) = blocks(PAGE, "nginx")
    plain = "\n".join(line for line in text.splitlines() if "ssl_" not in line).replace("443 ssl", "8443")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "access_log off;\n" + "\n".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    file = tmp_path / "nginx.conf"
    file.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{folders}\n{plain}\n}}\n", encoding="utf-8")
    checked("nginx", "-t", "-c", file, "-g", f"error_log {tmp_path}/log;")
