"""Keywords of the public calls: type checkers know them, and an error says where a misspelt or misplaced one goes."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mypy import api

import outpace
from outpace import AsyncEngine, Engine, ParameterError, SamplingParams
from outpace.common.habits import ELSEWHERE, HOMES
from outpace.engine.request import EngineKeywords, EngineLoadKeywords, RequestKeywords
from tests.toy import ToyModel, ToyTokenizer

ROOT = Path(__file__).parents[2]
HEAD = """\
from pathlib import Path

import numpy as np

import outpace
from outpace import AsyncEngine, Engine, SamplingParams
from outpace.models.base import Model


def early(tokens: object, logits: object) -> None: ...


async def program(model: Model, module: object, engine: Engine, serving: AsyncEngine) -> None:
"""
LOADS = ("Engine.load('demo'", "await AsyncEngine.load('demo'")
REQUESTS = (
    "engine.add('Hi'", "engine.prepare('Hi'", "engine.stream('Hi'", "engine.generate('Hi'",
    "engine.generate_many(['Hi']", "serving.stream('Hi'", "await serving.generate('Hi'",
    "await serving.generate_many(['Hi']",
)  # fmt: skip
PARAMS = ("SamplingParams(stop='x'", "SamplingParams().with_(stop='x'", "SamplingParams.from_model('demo', stop='x'")
OPENED = ("Engine(model", "outpace.patch(module")
RIGHT = (
    *(f"{load}, drafter='suffix', threads=2, kv_memory='2GiB', backend='native', size=4)" for load in LOADS),
    *(f"{load}, drafters=['ngram'], tokenizer=None, on_step=print, quantize=None, size='auto')" for load in LOADS),
    *(f"{ask}, max_tokens=8, temperature=1, stop=['x'], drafter=False, deadline=2.0, seed=None)" for ask in REQUESTS),
    *(f"{ask}, SamplingParams(top_k=3), raw=True, size='auto', rules=[early])" for ask in REQUESTS),
    "engine.generate('Hi', logit_bias={3: -1}, bad_words=['x', [1]], stop='x', resume=[3])",
    *(f"{make}, top_k=3, rules=[early])" for make in PARAMS),
    *(f"{make}, size=4, max_rows=2, acceptance='coupled', kv_memory=2**30)" for make in OPENED),
    "Engine.load(Path('model.gguf'), drafter=Path('eagle'), drafters=['ngram', Path('store')])",
    "engine.generate([1, 2, 3], errors='return')",
    "engine.generate(engine.encode('Hi'))",
    "engine.generate(np.array([1, 2]))",
    "engine.generate([{'role': 'assistant', 'tool_calls': []}])",
    "engine.generate_many(['Hi', [1, 2]], [SamplingParams(), SamplingParams(n=2)], progress=False)",
)  # fmt: skip
WRONG = (
    *(f"{call}, {wrong})" for call in LOADS for wrong in ("threds=1", "top_k=1", "threads='2'", "dtype='int8'")),
    *(f"{call}, {wrong})" for call in REQUESTS for wrong in ("max_token=1", "threads=2", "top_k='3'", "size='many'")),
    *(f"{call}, {wrong})" for call in PARAMS for wrong in ("max_token=1", "deadline=2.0", "top_k='3'")),
    *(f"{call}, {wrong})" for call in OPENED for wrong in ("sise=1", "threads=2", "max_rows='2'")),
)  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's program whose first calls are right, and whose last are not."""
    path = tmp_path_factory.mktemp("user") / "program.py"
    lines = [f"    _ = {call}" for call in (*RIGHT, *WRONG)]
    path.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def calls(lines: Iterator[int]) -> list[str]:
    """The program's calls on these lines, counted from 0, in the program's order."""
    first = len(HEAD.splitlines())
    return [(*RIGHT, *WRONG)[line - first] for line in sorted(set(lines))]


def test_mypy_finds_every_wrong_keyword_and_no_right_one(program: Path) -> None:
    config, cache = str(ROOT / "pyproject.toml"), str(program.parent / "cache")
    said, trouble, _ = api.run(["--config-file", config, "--cache-dir", cache, str(program)])
    assert not trouble
    assert calls(int(n) - 1 for n in re.findall(r"program\.py:(\d+): error", said)) == list(WRONG), said


def test_pyright_finds_every_wrong_keyword_and_no_right_one(program: Path) -> None:
    """By basedpyright, which is pyright with its own node; in strict mode."""
    config = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT / "src")], "pythonVersion": "3.11"}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "-p", str(program.parent), "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert calls(each["range"]["start"]["line"] for each in found) == list(WRONG), done.stdout


TAKEN = {  # by whom; what a hint names is looked up here
    "Engine.load": {"model", "drafter", "drafters", "tokenizer", *EngineLoadKeywords.__annotations__},
    "a request": set(RequestKeywords.__annotations__),
    "Engine": set(EngineKeywords.__annotations__),
    "SamplingParams": set(SamplingParams.__dataclass_fields__),
}


def refused(call: Any, *arguments: Any, **keywords: Any) -> str:
    """What the error says of them."""
    with pytest.raises(ParameterError) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def engine() -> Engine:
    return Engine(ToyModel(6), ToyTokenizer())  # type: ignore[arg-type]


def test_what_is_known_of_keywords_is_what_the_signatures_take() -> None:
    """``HOMES`` and the typed classes are made from the same definitions, but by a script: this looks at the calls."""
    known = {name for names in HOMES.values() for name in names} | TAKEN["SamplingParams"]
    for kind in (Engine, AsyncEngine):
        for name in ("load", "generate", "generate_many", "stream", "encode"):
            own = inspect.signature(getattr(kind, name)).parameters.values()
            assert {p.name for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY} <= known
    assert {"threads", "size", "on_step", "kv_memory"} <= TAKEN["Engine.load"] <= known
    assert {"raw", "size", "resume", "top_k"} <= TAKEN["a request"] <= known


@pytest.mark.parametrize("name", sorted(TAKEN["Engine.load"] ^ TAKEN["a request"]))
def test_a_misplaced_keyword_is_led_to_who_takes_it(name: str) -> None:
    with engine() as made:
        calls = {
            "Engine.load": lambda **given: Engine.load("demo", **given),
            "a request": lambda **given: made.generate("ab", **given),
            "SamplingParams": SamplingParams,
            "Engine": lambda **given: Engine(made.model, **given),
        }
        for call, taken in TAKEN.items():
            if name in taken or (call == "Engine" and name in inspect.signature(Engine).parameters):
                continue
            said = refused(calls[call], **{name: 1})
            assert said.startswith(f"{call} has no {name}: "), said
            if name in ELSEWHERE:
                assert f"({name}=" in said or name in said.partition(": use ")[2], said
            else:
                home = re.fullmatch(r"(Engine\.load|a request).* takes it", said.partition(": ")[2])
                assert home is not None, said
                assert name in TAKEN[home[1]], said


@pytest.mark.parametrize("call", ["Engine.load", "a request"])
def test_a_misspelt_keyword_is_led_to_its_spelling(call: str) -> None:
    with engine() as made:
        for name in sorted(TAKEN[call] - {"model", "n"}):
            for wrong in (name[:1] + name[2:], name + "x", name[0] + name):
                if any(wrong in names for names in TAKEN.values()):
                    continue
                ask = Engine.load if call == "Engine.load" else made.generate
                said = refused(ask, "ab", **{wrong: 1})
                assert said == f"{call} has no {wrong}: did you mean {name}?"


def test_what_stands_for_others_names_is_taken_where_the_hint_says() -> None:
    with engine() as made:
        for name, use in ELSEWHERE.items():
            if name in TAKEN["a request"]:
                continue
            assert use in refused(made.generate, "ab", **{name: 1})
            if name not in TAKEN["Engine.load"]:
                assert use in refused(Engine.load, "demo", **{name: 1})
            for keyword in re.findall(r"Engine\.load\((\w+)=", use):
                assert keyword in TAKEN["Engine.load"]
        assert refused(made.generate, "ab", max_new_tokens=1).endswith("use max_tokens")
        assert "max_tokens, which a request" in refused(Engine.load, "demo", max_new_tokens=1)
        assert "Engine.generate_many takes it" in refused(made.generate, "ab", progress=True)
        assert "generate_many or stream takes it" in refused(made.add, "ab", errors="return")


def test_patch_refuses_an_unknown_option_at_once() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    assert refused(outpace.patch, model, sise=1) == "outpace.patch has no sise: did you mean size?"
    assert "Engine.load takes it" in refused(outpace.patch, model, threads=2)
    with outpace.patch(model, kv_memory="1MiB"):
        pass
