"""``outpace trace`` and ``outpace explain`` as a person runs them, over a toy that stands for the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.models import load as loading
from tests.integration.test_cli import outpace
from tests.toy import ToyModel
from tests.tracing import VOCAB, Spelled, Swapped, engine, record


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What loading a model gives, and what was asked for."""
    given: dict[str, Any] = {"model": ToyModel(VOCAB), "asked": []}

    def load(name: str, options: object) -> tuple[ToyModel, Spelled]:
        given["asked"].append((name, options))
        return given["model"], Spelled()

    monkeypatch.setattr(loading, "load", load)
    return given


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    record(tmp_path / "run.trace", made=engine(halving=True))
    return tmp_path / "run.trace"


def test_replay(capsys: pytest.CaptureFixture[str], served: dict[str, Any], trace: Path) -> None:
    code, out, _ = outpace(capsys, "trace", "replay", trace)
    assert code == 0
    assert "identical: " in out
    assert served["asked"][0][0] == "toy"  # the model that the header names
    code, out, _ = outpace(capsys, "trace", "replay", trace, "--model", "other", "--threads", "2", "--json")
    assert code == 0
    assert json.loads(out)["identical"] is True
    name, options = served["asked"][-1]
    assert (name, options.threads) == ("other", 2)
    served["model"] = Swapped([1, 2, 3, 4, 5], 6, by=1.5)
    code, out, _ = outpace(capsys, "trace", "replay", trace)
    assert code == 1
    assert "request 0: recorded" in out
    assert "score gap 1.5" in out
    assert "1 of 7 answers differ" in out
    served["model"] = Swapped([1, 2, 3, 4, 5], 6, by=1.5)
    code, out, _ = outpace(capsys, "trace", "replay", trace, "--json")
    assert code == 1
    assert json.loads(out)["departures"][0]["index"] == 0


def test_view(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    code, out, _ = outpace(capsys, "trace", "view", trace)
    assert code == 0
    assert str(trace.with_suffix(".html")) in out
    assert trace.with_suffix(".html").read_text().startswith("<!doctype html>")
    code, out, _ = outpace(capsys, "trace", "view", trace, "-o", tmp_path / "page.html", "--json")
    assert code == 0
    assert json.loads(out)["bytes"] == (tmp_path / "page.html").stat().st_size


def test_explain(capsys: pytest.CaptureFixture[str], served: dict[str, Any], trace: Path, tmp_path: Path) -> None:
    code, out, _ = outpace(capsys, "explain", trace, trace)
    assert code == 0
    assert out.count("identical") == 7
    assert not served["asked"]  # nothing to measure
    other = tmp_path / "other.trace"
    record(other, made=engine(model=Swapped([1, 2, 3, 4, 5], 6, by=1.5)))
    code, out, _ = outpace(capsys, "explain", trace, other)
    assert code == 1
    assert "part at token 0" in out
    assert "bug: everything is the same, gap" in out
    assert len(served["asked"]) == 1
    code, out, _ = outpace(capsys, "explain", trace, other, "--json")
    assert code == 1
    assert json.loads(out)["explanations"][0]["cause"] == "bug"
