"""What the build does with compilers that know less, fail, or are not there. Configuring only: nothing is compiled."""

import os
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from outpace import _native

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(
    COMPILER is None or shutil.which("cmake") is None or shutil.which("ninja") is None,
    reason="needs cmake and a compiler",
)


def configure(tmp_path: Path, *more: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, what was said, and the generated build."""
    command = [shutil.which("cmake"), "-S", ROOT / "native", "-B", tmp_path / "build", "-G", "Ninja"]
    own = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "SKBUILD")}
    done = subprocess.run(
        [*command, *more, f"-DPython_EXECUTABLE={sys.executable}"],
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    plan = tmp_path / "build" / "build.ninja"
    said = " ".join((done.stdout + done.stderr).split())  # cmake breaks lines
    return done.returncode, said, plan.read_text() if plan.exists() else ""


def compiler_without(tmp_path: Path, *flags: str, word: str = "") -> str:
    """One that refuses some flags, and sources that contain ``word``."""
    fake = tmp_path / "c++"
    cases = "|".join(flags) or "--none"
    refuse = 'echo "c++: error: unrecognized command-line option $flag" >&2; exit 1'
    lines = [f"for flag; do case $flag in {cases}) {refuse};; esac; done"]
    if word:
        lines.append(f'for source; do case $source in *.cxx) ! grep -q {word} "$source" || exit 1;; esac; done')
    fake.write_text("\n".join(["#!/bin/sh", *lines, f'exec {COMPILER} "$@"', ""]))
    fake.chmod(0o755)
    return str(fake)


@pytest.mark.skipif("avx2" not in _native.built_isas(), reason="the paths are x86's")
def test_an_older_compiler_loses_paths_by_name(tmp_path: Path) -> None:
    code, said, plan = configure(tmp_path, CXX=compiler_without(tmp_path, "-mavx512bf16", "-mavxvnni"))
    assert code == 0
    assert "the path avx512-bf16 is left out" in said
    assert "lacks -mavx512bf16; a newer one builds it" in said
    assert "the path avx2-vnni is left out" in said
    assert "kernels_avx512.cpp" in plan
    assert "kernels_avx512bf16.cpp" not in plan
    assert "OUTPACE_HAS_AVX512BF16" not in plan
    lost = "avx512-bf16 (-mavx512bf16), avx2-vnni (-mavxvnni)"
    assert lost in plan  # what the extension will say


@pytest.mark.skipif("avx2" not in _native.built_isas(), reason="the paths are x86's")
def test_tiles_need_an_assembler_that_knows_them_and_their_emulation_is_asked_for(tmp_path: Path) -> None:
    code, said, plan = configure(tmp_path, CXX=compiler_without(tmp_path, word="tilerelease"))
    assert code == 0
    assert "lacks the instruction tilerelease; a newer one builds it" in said
    assert "kernels_avx512bf16.cpp" in plan
    assert "kernels_avx512amx" not in plan
    assert "avx512-amx (the instruction tilerelease)" in plan
    assert "kernels_avx512amxemulated.cpp" in configure(tmp_path, "-DOUTPACE_EMULATE_TILES=ON")[2]


@pytest.mark.skipif("avx2" not in _native.usable_isas(), reason="the paths are x86's")
def test_a_build_for_this_machine_has_its_best_path_and_none_that_it_lacks(tmp_path: Path) -> None:
    code, said, plan = configure(tmp_path, "-DOUTPACE_HOST_PATHS=ON")
    assert code == 0
    usable = _native.usable_isas()
    assert f"kernels_{usable[0].replace('-', '')}.cpp" in plan
    for name in (set(_native.built_isas()) - set(usable)) | {"portable"}:
        assert f"kernels_{name.replace('-', '')}.cpp" not in plan
        assert f"{name} (only what this machine needs was asked for)" in plan
    assert "lacks" not in said


@pytest.mark.skipif("avx2" not in _native.built_isas(), reason="the paths are x86's")
def test_a_path_goes_with_the_path_that_it_builds_on(tmp_path: Path) -> None:
    code, said, plan = configure(tmp_path, CXX=compiler_without(tmp_path, "-mfma"))
    assert code == 0
    assert "instruction-set paths: portable" in said.replace(";", "")
    assert "the path avx2 (" not in plan
    assert "-mfma, the path avx2" in plan
    assert "kernels_portable.cpp" in plan
    assert "kernels_avx" not in plan


def test_what_would_change_sums_is_refused(tmp_path: Path) -> None:
    code, said, _ = configure(tmp_path, CXX=compiler_without(tmp_path, "-ffp-contract=off"))
    assert code != 0
    assert "cannot keep sums as written (-ffp-contract=off): use GCC 9" in said


def test_a_compiler_that_fails_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    code, said, _ = configure(tmp_path, CXX=str(broken))
    assert code != 0
    assert "is not able to compile" in said


@pytest.mark.parametrize(
    ("named", "looked_for"), [({}, "c++, g++, clang++"), ({"CXX": "no-such-c++ -O2"}, "no-such-c++")]
)
def test_no_compiler_is_an_error_with_the_remedy(tmp_path: Path, named: dict[str, str], looked_for: str) -> None:
    code, said, plan = configure(tmp_path, PATH=bare(tmp_path, "ninja")["PATH"], **named)
    assert (code != 0, plan) == (True, "")
    assert f"no C++ compiler was found ({looked_for}). Outpace's extension needs one" in said
    assert "apt install g++" in said


def bare(tmp_path: Path, *tools: str) -> dict[str, str]:
    """Of a Python that has what builds Outpace and no more, and ``tools`` alone to call."""
    venv.create(tmp_path / "venv")
    (tmp_path / "bin").mkdir()
    for name in tools:
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "site").mkdir()
    for name in ("scikit_build_core", "packaging", "pathspec"):
        found = find_spec(name)
        assert found is not None
        assert found.submodule_search_locations
        (tmp_path / "site" / name).symlink_to(found.submodule_search_locations[0])
    return {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("tools", "ends"),
    [
        (("cmake", "ninja"), "install GCC 9, Clang 10 or newer (apt install g++,"),
        ((), "CMakeNotFoundError: Could not find CMake with version >=3.18"),
    ],
    ids=["no compiler", "no cmake"],
)
def test_pip_says_what_is_not_there(tmp_path: Path, tools: tuple[str, ...], ends: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv" / "bin" / "python", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path, ROOT]
    done = subprocess.run(wheel, env=bare(tmp_path, *tools), capture_output=True, text=True, timeout=120)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1
    assert ends in said
    assert ("Traceback" in said) == (not tools)  # the build tool's own, where cmake is missing
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.parametrize(("tools", "wanted"), [((), {"cmake", "ninja"}), (("cmake", "ninja"), set())])
def test_pip_is_asked_for_the_build_tools_that_are_missing(
    tmp_path: Path, tools: tuple[str, ...], wanted: set[str]
) -> None:
    code = "from scikit_build_core.build import *; print(*get_requires_for_build_wheel())"
    environment = bare(tmp_path, *tools)
    command = [tmp_path / "venv" / "bin" / "python", "-c", code]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert {name.partition(">=")[0] for name in done.stdout.split()} == wanted
