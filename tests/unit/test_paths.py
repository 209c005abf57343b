"""Every public call that takes a path takes text and ``os.PathLike`` alike."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace import AsyncEngine, DrafterError, Engine, ModelError
from outpace.drafters.lookup import datastore
from outpace.drafters.registry import parse
from outpace.errors import ParameterError
from outpace.measure.prompts import read_prompts
from outpace.measure.trace import read, tracing
from outpace.models.load import estimate, load, resolve
from tests.toy import ToyModel, ToyTokenizer

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outpace"
INSIDE = ("outpace.common", "outpace.cli", "outpace.server", "outpace.integrations.ray")  # called by commands alone


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes that the docs' programs, the command line and the doors to other libraries use."""
    names = {("outpace", name) for name in outpace.__all__ if not name.startswith("__")}
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        names |= {tuple(found.rsplit(".", 1)) for found in re.findall(r"^::: (outpace\.\S+)", text, re.MULTILINE)}
        for module, found in re.findall(r"^\s*from (outpace[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            names |= {(module, name.strip()) for name in found.split(",")}
    for path in [*SOURCE.glob("cli/**/*.py"), SOURCE / "integrations" / "transformers.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outpace."):
                names |= {(str(node.module), alias.name) for alias in node.names}
    for module, name in sorted(names):
        if module.startswith(INSIDE):
            continue
        found = getattr(importlib.import_module(module), name, None)
        if found is None:
            found = importlib.import_module(f"{module}.{name}")
        if inspect.ismodule(found):
            own = {n: v for n, v in vars(found).items() if getattr(v, "__module__", "") == found.__name__}
            yield from ((f"{found.__name__}.{n}", v) for n, v in own.items() if not n.startswith("_"))
        else:
            yield f"{module}.{name}", found


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, found in public():
        if inspect.isfunction(found):
            yield name, found
        elif inspect.isclass(found):
            values = hasattr(found, "__dataclass_fields__")  # made of values that were read already
            for own, value in vars(found).items():
                function = getattr(value, "__func__", value)
                if inspect.isfunction(function) and (not own.startswith("_") or (own == "__init__" and not values)):
                    yield f"{name}.{own}", function


def test_every_parameter_that_is_a_path_is_a_str_path() -> None:
    """With mypy, which lets nobody use one as a Path without making it one."""
    seen, wrong = set(), []
    for name, function in functions():
        for parameter in inspect.signature(function).parameters.values():
            kind = "" if isinstance(parameter.default, Path) else str(parameter.annotation)  # a system's root
            if re.search(r"\b(StrPath|DrafterSource)\b", kind):  # the second is a StrPath, or a drafter
                seen.add(name)
            elif re.search(r"\bPath\b|PathLike", kind):
                wrong.append(f"{name}({parameter.name}: {kind})")
    assert not wrong, "\n".join(wrong)
    assert {"outpace.Engine.load", "outpace.AsyncEngine.load", "outpace.patch"} <= seen
    assert {
        "outpace.models.load.load",
        "outpace.models.load.resolve",
        "outpace.drafters.lookup.datastore.build",
    } <= seen
    assert len(seen) > 20


class Elsewhere(os.PathLike[str]):
    """A path that is no ``pathlib.Path``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's file."""
    link = tmp_path_factory.mktemp("models") / "a model.gguf"
    link.symlink_to(resolve("demo").path)
    return link


@pytest.mark.parametrize("kind", [str, Path, Elsewhere])
def test_paths_of_models_drafters_and_files(model: Path, kind: Any, tmp_path: Path) -> None:
    assert estimate(kind(model)) == estimate("demo")
    with Engine.load(kind(model), threads=1, drafters=[Path(model)], max_length=64) as engine:
        assert engine.model.info.name == str(model)
        assert f"model:{model}" in engine.drafters
        trace = kind(tmp_path / "run.trace")
        with tracing(engine, trace):
            plainly = engine.generate("Hi", max_tokens=3)
        assert len(read(trace).results) == 1
        assert engine.generate("Hi", max_tokens=3, drafter=f"model:{model}").token_ids == plainly.token_ids
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    assert len(read_prompts(kind(prompts))) == 2


def test_a_path_leads_to_what_lies_there(tmp_path: Path, model: Path) -> None:
    datastore.build(Elsewhere(tmp_path / "store"), [[1, 2, 3]], vocabulary="v", model="m")
    assert (parse(tmp_path / "store").name, parse(Elsewhere(model)).name) == ("retrieval", "model")
    assert parse(tmp_path / "store").argument == str(tmp_path / "store")
    trained = ROOT / "drafters" / "demo-eagle"
    assert parse(trained).name == "eagle"
    with Engine.load(model, drafter=trained, threads=1, max_length=64) as engine:
        assert engine.drafter.name == f"eagle:{trained}"


def test_a_path_is_never_a_name_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in (Path("someone/something"), Path("demo"), Path("user/repo:Q4_K_M")):
        with pytest.raises(ModelError, match="does not exist: check the path, or give a model's name as text"):
            load(wrong)
    with pytest.raises(DrafterError, match="does not exist: check the path"):
        Engine.load("demo", drafter=Path("ngram"))


@pytest.mark.parametrize("wrong", [None, 5, ["demo"], b"demo", ToyModel(), ToyTokenizer()])
def test_what_is_neither_name_nor_model_is_refused_as_such(wrong: Any) -> None:
    with pytest.raises(ModelError, match=f"a {type(wrong).__name__} is no model: give a name, a folder"):
        Engine.load(wrong)


def test_a_tokenizer_is_an_object_or_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own = load("demo")[1]
    (tmp_path / "tokenizer").mkdir()
    own.save(tmp_path / "tokenizer")
    config = transformers.LlamaConfig(
        vocab_size=own.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    module = transformers.LlamaForCausalLM(config).eval()
    for folder in (tmp_path / "tokenizer", str(tmp_path / "tokenizer")):
        with Engine.load(module, tokenizer=folder) as engine:
            assert engine.encode("Hi", raw=True).tolist() == own.encode("Hi").tolist()
    with pytest.raises(ParameterError, match="a int is no tokenizer: give a transformers PreTrainedTokenizer"):
        Engine.load(module, tokenizer=5)
    with pytest.raises(ParameterError, match="backend='native' is for a model in files"):
        Engine.load(module, backend="native")


def test_async_engine_takes_paths(model: Path) -> None:
    import asyncio

    async def scenario() -> None:
        async with await AsyncEngine.load(model, drafter=None, threads=1, max_length=64) as engine:
            assert (await engine.generate("Hi", max_tokens=2)).token_ids

    asyncio.run(asyncio.wait_for(scenario(), 60))
