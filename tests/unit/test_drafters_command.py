"""Which published drafters are known for a model, whatever it is called."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outpace.cli.app import parse as command
from outpace.cli.drafters import _absolute
from outpace.drafters.published import PUBLISHED, known_for
from outpace.drafters.registry import parse
from outpace.errors import ParameterError


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "Qwen3-8B"),
        ("/models/qwen3-coder-30b-a3b-instruct.Q4_K_M.gguf", "Qwen3-Coder-30B-A3B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen3.5-4B", "Qwen3.5-4B"),
        ("unsloth/gemma-4-12B-it-GGUF", "gemma-4-12B-it"),
        ("Qwen/Qwen3-0.6B", None),
        ("someone/Qwen3-80B", None),
    ],
)
def test_a_model_is_known_by_its_name(name: str, model: str | None) -> None:
    assert {each.model for each in known_for(name)} == ({model} if model else set())


def test_every_one_is_named_as_a_drafter_is() -> None:
    assert all(parse(f"suffix+{each.spec}").parts for each in PUBLISHED)
    assert len(set(PUBLISHED)) == len(PUBLISHED)
    assert all(re.fullmatch(r"[\d.]+B|unknown", each.parameters) and each.license for each in PUBLISHED)


def test_the_command_says_how_to_use_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["drafters", "Qwen/Qwen3-8B", "--json"])() == 0
    found = json.loads(capsys.readouterr().out)["drafters"]
    assert "dspark:deepseek-ai/dspark_qwen3_8b_block7" in [each["drafter"] for each in found]
    assert all(f"-d suffix+{each['drafter']}" in each["command"] for each in found)
    assert command(["drafters", "demo"])() == 0
    assert "None is known for demo" in capsys.readouterr().out
    with pytest.raises(ParameterError, match="--limit is for figures"):
        command(["drafters", "demo", "--limit", "3"])()
    with pytest.raises(ParameterError, match="model='' is no name"):
        command(["drafters", ""])()


def test_paths_are_remembered_whole_and_names_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo-draft", "mine"):
        Path(name).mkdir()
    for name in ("suffix+eagle:demo", "model:demo-draft,size=2", "model:user/repo:Q4_K_M"):
        assert _absolute(name) == name
    assert _absolute("suffix+eagle:mine,branch=1") == f"suffix+eagle:{tmp_path.resolve() / 'mine'},branch=1"
