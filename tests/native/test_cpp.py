"""native/tests/run.cpp, compiled and run: what is tested in C++ itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
PARTS = (
    "tests/run.cpp",
    "platform.cpp",
    "runtime/pool.cpp",
    "runtime/kv.cpp",
    "runtime/kv_arena.cpp",
    "runtime/kv_blocks.cpp",
    "runtime/states.cpp",
    "model/grow.cpp",
)


@pytest.mark.skipif(COMPILER is None or sys.platform == "win32", reason="needs a compiler that is not cl.exe")
def test_units_in_cpp(tmp_path: Path) -> None:
    program = tmp_path / "run"
    flags = ["-std=c++17", "-O1", "-D_GLIBCXX_ASSERTIONS", "-pthread", f"-I{NATIVE}", "-o", program]
    subprocess.run([COMPILER, *flags, *(NATIVE / part for part in PARTS)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 failures\n")
