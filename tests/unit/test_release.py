"""scripts/release: what it refuses before it does anything; scripts/check_dist.py: what no release may contain."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clean checkout of version 1.2.0 whose checks leave a file, and then fail."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release", tmp_path / "scripts")
    (tmp_path / "scripts" / "check").write_text("#!/bin/sh\necho checked >checked\nexit 3\n")
    (tmp_path / "scripts" / "check").chmod(0o755)
    (tmp_path / "src" / "outpace" / "common").mkdir(parents=True)
    (tmp_path / "src" / "outpace" / "common" / "version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0\n\n- Something.\n")
    (tmp_path / ".gitignore").write_text("checked\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def release(repository: Path, *arguments: str, path: str = "") -> tuple[int, str]:
    command = [repository / "scripts" / "release", *arguments]
    environment = os.environ | {"PATH": path + os.environ["PATH"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_checks_that_fail_end_the_release(repository: Path) -> None:
    assert release(repository)[0] == 3
    assert (repository / "checked").exists()


@pytest.mark.parametrize("how", ["--dry-run", ""])
def test_refusals(repository: Path, how: str) -> None:
    arguments = [how] if how else []
    (repository / "new").write_text("")
    code, said = release(repository, *arguments)
    assert (code, "the tree is not clean" in said) == ((3, False) if how else (1, True))
    (repository / "new").unlink()
    (repository / "checked").unlink(missing_ok=True)

    git(repository, "tag", "v1.2.0")
    code, said = release(repository, *arguments)
    assert code == 1
    assert "the tag v1.2.0 exists" in said
    for file, text, complaint in (
        ("CHANGELOG.md", "## 1.2.01\n", "no entry '## 1.2.0'"),
        ("src/outpace/common/version.py", '__version__ = "next"\n', "the version 'next'"),
    ):
        (repository / file).write_text(text)
        git(repository, "commit", "-qam", "worse")
        code, said = release(repository, *arguments)
        assert code == 1
        assert complaint in said
    assert not (repository / "checked").exists()


TOOLS = r"""#!/bin/sh
case "$(basename "$0") $*" in
  "python3 -m venv "*)
    mkdir -p "$3/bin"
    for tool in python pip twine cyclonedx-py outpace; do cp "$0" "$3/bin/$tool"; done ;;
  "python -m build --outdir dist "*)
    mkdir dist
    echo source >dist/outpace-1.2.0.tar.gz
    echo wheel >dist/outpace-1.2.0.whl ;;
  cyclonedx-py*)
    while [ "$1" != -o ]; do shift; done
    echo bill >"$2" ;;
  *) echo "$(basename "$0") $*" ;;
esac
"""


@pytest.mark.parametrize("how", ["--dry-run", ""])
def test_what_a_release_leaves(repository: Path, tmp_path_factory: pytest.TempPathFactory, how: str) -> None:
    """With tools that do nothing but leave their files."""
    tools = tmp_path_factory.mktemp("tools")
    (tools / "python3").write_text(TOOLS)
    (tools / "python3").chmod(0o755)
    (repository / "scripts" / "demo-models.txt").write_text("a-model==1\n")
    (repository / ".gitignore").write_text("dist\n")
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (today)\n\n- New.\n\n## 1.1.0\n\n- Old.\n")
    git(repository, "add", "-A")
    git(repository, "config", "user.name", "t")
    git(repository, "config", "user.email", "t@example.org")
    git(repository, "commit", "-qm", "two")
    code, said = release(repository, "--skip-tests", *filter(None, [how]), path=f"{tools}:")
    assert code == 0, said
    left = {path.name: path.read_bytes() for path in (repository / "dist").iterdir()}
    sums = left.pop("SHA256SUMS").decode().splitlines()
    assert sums == [f"{hashlib.sha256(left[name]).hexdigest()}  {name}" for name in sorted(left)]
    assert set(left) == {"NOTES.md", "outpace-1.2.0.cdx.json", "outpace-1.2.0.tar.gz", "outpace-1.2.0.whl"}
    assert left["NOTES.md"].decode().split() == ["-", "New."]
    assert "python3 scripts/check_dist.py dist" in said
    assert "pip -q install -c constraints.txt dist/outpace-1.2.0.whl" in said
    tags = subprocess.run(["git", "tag"], cwd=repository, check=True, capture_output=True, text=True).stdout.split()
    assert tags == ([] if how else ["v1.2.0"])


@pytest.mark.parametrize(
    ("name", "files", "complaint"),
    [
        ("outpace-1-cp312-abi3-linux_x86_64.whl", ["outpace/_native.abi3.so", "outpace/a.py"], ""),
        ("outpace-1-cp312-abi3-win_amd64.whl", ["outpace/_native.pyd"], ""),
        ("outpace-1-cp312-abi3-win_amd64.whl", ["outpace/_native.pyd", "-drafters"], "such as outpace/drafters/"),
        (
            "outpace-1-cp312-abi3-win_amd64.whl",
            ["outpace/_native.pyd", "-demo"],
            "such as outpace/drafters/learned/demo/",
        ),
        ("outpace-1-cp312-abi3-win_amd64.whl", ["outpace/_native.pyd", "-types"], "lacks outpace/_native.pyi"),
        ("outpace-1-cp311-cp311-linux_x86_64.whl", ["outpace/a.py"], "no extension"),
        ("outpace-1-py3-none-any.whl", ["outpace/_native.x.so"], "for any platform"),
        ("outpace-1-cp312-abi3-linux_x86_64.whl", ["outpace/_native.cpython-312.so"], "named otherwise"),
        (
            "outpace-1-cp311-cp311-linux_x86_64.whl",
            ["outpace/_native.x.so", "outpace/old.so"],
            "expected outpace/_native",
        ),
    ],
)
def test_what_a_wheel_holds(tmp_path: Path, name: str, files: list[str], complaint: str) -> None:
    inside = (
        path
        for path in (ROOT / "src" / "outpace").rglob("*")
        if path.suffix in (".py", ".json", ".safetensors", ".gguf")
    )
    needed = {path.relative_to(ROOT / "src").as_posix() for path in inside}
    needed |= set() if "-types" in files else {"outpace/_native.pyi"}
    left_out = {file for file in needed if f"-{Path(file).parent.name}" in files}
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file in {*files, *needed} - left_out:
            wheel.writestr(file, "")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "check_dist.py", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (1 if complaint else 0)
    assert (complaint or "ok") in done.stdout
