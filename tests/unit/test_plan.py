"""``outpace plan``: expected tokens against every course that a draft can take; the command."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.control.cost import Cost
from outpace.errors import ParameterError
from outpace.measure.plan import best, expected_tokens, plan


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.85, 1.0])
@pytest.mark.parametrize("size", range(7))
def test_expected_tokens_are_those_of_all_courses(acceptance: float, size: int) -> None:
    """Of every way in which tokens would be accepted or refused, its chance and what a step keeps of it."""
    total = 0.0
    for course in itertools.product((True, False), repeat=size):
        kept = size if all(course) else course.index(False)
        total += math.prod(acceptance if each else 1 - acceptance for each in course) * (kept + 1)
    assert expected_tokens(acceptance, size) == pytest.approx(total)


def test_what_pays_depends_on_all_three() -> None:
    flat, steep = Cost((1, 8), (1.0, 1.1)).width, Cost((1, 8), (1.0, 8.0)).width
    assert best(plan(0.9, 0.0, flat, 12)).size == 12
    assert best(plan(0.9, 0.3, flat, 12)).size < 8
    assert best(plan(0.5, 0.0, steep, 12)).size == 0
    assert best(plan(0.0, 0.0, flat, 12)) == (0, 1.0, 1.0, 1.0)
    for each in plan(0.7, 0.1, flat, 5):
        assert each.speed == pytest.approx(expected_tokens(0.7, each.size) / (0.1 * each.size + flat(each.size + 1)))
    for wrong in ({"acceptance": 1.2}, {"draft": -1.0}, {"most": 0}):
        with pytest.raises(ParameterError, match=f"{next(iter(wrong))}=.* is out of range"):
            plan(**{"acceptance": 0.5, "draft": 0.0, "width": flat, "most": 3, **wrong})  # type: ignore[arg-type]


def outpace(*given: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "outpace", "plan", *given], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command(tmp_path: Path) -> None:
    given = ["-a", "0.8", "--draft", "0.1", "--costs", "1:1,8:1.25,16:2.1"]
    status, shown, _ = outpace(*given)
    found = json.loads(outpace(*given, "--json")[1])
    assert status == 0
    assert f"draft {found['best']['size']} tokens a step: {found['best']['speed']:.2f} times plain" in shown
    assert [each["size"] for each in found["sizes"]] == list(range(13))
    assert "decode plainly" in outpace("-a", "0.2", "--costs", "1:1,8:8")[1]
    pytest.importorskip("matplotlib")
    assert outpace(*given, "--plot", str(tmp_path / "curve.svg"))[0] == 0
    assert (tmp_path / "curve.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--costs", "8:2", "-a", "0.5"], "must have the cost of 1 token"),
        (["--costs", "1:x", "-a", "0.5"], "is no cost of a forward: give tokens:cost"),
        (["--costs", "1:1", "-a", "1.5"], "--acceptance 1.5 is out of range: give 0 to 1"),
        (["--costs", "1:1", "-a", "0.5", "--most", "99"], "--most 99 is out of range: give 1 to 63"),
    ],
)
def test_bad_numbers(given: list[str], message: str) -> None:
    status, _, said = outpace(*given)
    assert status == 2
    assert message in said
