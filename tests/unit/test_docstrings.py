"""Every public name has a docstring, and each parameter of it is described there, or where that docstring points."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import outpace

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def found(name: str) -> Any:
    """The object of a dotted name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, last = name.rpartition(".")
        return getattr(found(module), last)


def named() -> dict[str, Any]:
    """What docs/api.md and ``outpace.__all__`` name; of a module, its classes."""
    names = [*re.findall(r"^::: (\S+)", API, re.MULTILINE), *(f"outpace.{name}" for name in outpace.__all__)]
    objects = {name: found(name) for name in names if not name.endswith("__")}
    for name, module in list(objects.items()):
        if inspect.ismodule(module):
            del objects[name]
            objects |= {f"{name}.{c.__name__}": c for c in vars(module).values() if _own(c, module)}
    return {f"{made.__module__}.{made.__qualname__}": made for made in objects.values()}


def _own(made: Any, module: Any) -> bool:
    return inspect.isclass(made) and made.__module__ == module.__name__


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Its own public methods and properties."""
    for name, value in vars(owner).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def parameters(made: Any) -> list[str]:
    signature = inspect.signature(made).parameters.values()
    generic = ("self", "cls", "args", "kwargs")  # those of a Protocol, which nobody calls
    return [parameter.name for parameter in signature if parameter.name not in generic]


def text(made: Any, owner: type | None, seen: set[str]) -> str:
    """Its docstring, its owner's, and those of methods that they point to as ``name`` or ``Class.name``."""
    bases = inspect.getmro(owner) if inspect.isclass(owner) else ()
    docs = [inspect.getdoc(made) or "", *(inspect.getdoc(base) or "" for base in bases)]
    for name in re.findall(r"``(?:(\w+)\.)?(\w+)``", docs[0]):
        place = getattr(outpace, name[0], None) if name[0] in outpace.__all__ else owner
        other = getattr(place, name[1], None)
        key = ".".join(name)
        if inspect.isroutine(other) and key not in seen:
            docs.append(text(other, place, seen | {key}))
    return "\n".join(docs)


@pytest.mark.parametrize("name", sorted(named()))
def test_it_is_described(name: str) -> None:
    owner = named()[name]
    assert owner.__doc__, f"{name} has no docstring"
    missing = []
    for label, made in [("", owner), *members(owner)]:
        assert inspect.getdoc(made), f"{name}.{label} has no docstring"
        words = set(re.findall(r"\w+", " ".join(re.findall(r"``([^`]+)``", text(made, owner, set())))))
        if made is owner and is_dataclass(owner):  # docs/api.md has the table of its definitions
            words |= {each.name for each in fields(owner) if "definition" in each.metadata}
        missing += [f"{label}({parameter})" for parameter in parameters(made) if parameter not in words]
    assert not missing, f"{name} does not describe {', '.join(missing)}"
