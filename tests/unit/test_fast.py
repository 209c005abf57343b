"""The one place that chooses between the extension and its references: it says what it chose, and never falls back."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from outpace import _fast
from outpace.errors import ModelError


@pytest.mark.parametrize("built", [SimpleNamespace(), SimpleNamespace(INTERFACE=1), SimpleNamespace(INTERFACE=99)])
def test_an_extension_of_another_interface_is_an_error_with_its_remedy(built: SimpleNamespace) -> None:
    with pytest.raises(ModelError, match=r"build it again: ./scripts/setup"):
        _fast._checked(built)


def test_the_command_line_tells_it_in_one_line() -> None:
    stale = "import sys, types; sys.modules['outpace._native'] = types.ModuleType('outpace._native')\n"
    stale += "import outpace; outpace._native = sys.modules['outpace._native']\n"
    command = [sys.executable, "-c", stale + "from outpace.__main__ import main; main()"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.startswith("outpace: the native extension is of interface 1, this Python needs")
    assert found.stderr.count("\n") == 1


def test_what_was_picked_can_be_told() -> None:
    import outpace.drafters.lookup.ngram
    import outpace.models.base

    kind = "python" if _fast.native is None else "native"
    assert {_fast.chosen()[name] for name in ("pack_batch", "newest_chain", "merge")} == {kind}
    assert outpace.drafters.lookup.ngram.NgramDrafter().name == "ngram"
