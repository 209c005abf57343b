"""A missing extension, or one of another interface, is one error with its remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outpace.common.installing import install


@pytest.mark.parametrize(
    ("extension", "said"),
    [
        ("types.ModuleType('outpace._native')", "the native extension is of interface 1, this Python needs"),
        ("None", "the C++ extension of outpace does not load ("),
    ],
)
def test_the_command_line_tells_it_in_one_line_with_the_remedy(extension: str, said: str) -> None:
    code = f"import sys, types; sys.modules['outpace._native'] = {extension}\n"
    found = subprocess.run(
        [sys.executable, "-c", code + "from outpace.__main__ import main; main()"], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert found.stderr.startswith(f"outpace: {said}")
    assert found.stderr.endswith(f"with a C++17 compiler: {install('outpace[serve]')}\n")
    assert found.stderr.count("\n") == 1
