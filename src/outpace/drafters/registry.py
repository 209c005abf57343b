"""Turns a spec string into a drafter: ``ngram:min=2,max=5,size=5``, ``model:PATH``, ``none``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outpace.drafters.base import DraftContext, Drafter
from outpace.errors import DrafterError


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed spec: ``name[:argument][,option=value...]``. ``size`` is the engine's; the rest is the drafter's."""

    text: str
    name: str
    argument: str | None
    options: Mapping[str, str]

    @property
    def size(self) -> int | None:
        """The draft size that the spec asks for, if it does."""
        return self.integer("size", None)

    def integer(self, option: str, default: int | None) -> int | None:
        text = self.options.get(option)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            raise DrafterError(f"{self.text}: {option}={text} is not a whole number") from None


def parse(text: str) -> DrafterSpec:
    """Parse and check a spec. Raises DrafterError that lists what there is."""
    name, _, rest = text.strip().partition(":")
    if name not in _METHODS:
        close = difflib.get_close_matches(name, _METHODS, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise DrafterError(f"unknown drafter {name!r}{hint}: use one of {', '.join(_METHODS)}")
    method = _METHODS[name]
    argument, options = None, {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if equals and key in (*method.options, "size"):
            options[key] = value
        elif method.argument and argument is None and not options:
            argument = part
        else:
            known = ", ".join(f"{option}=" for option in (*method.options, "size"))
            raise DrafterError(f"{text}: {part!r} is no option of {name}: it takes {known}")
    if method.argument and not argument:
        raise DrafterError(f"{text}: {name} needs {method.argument}, as in {name}:{method.example}")
    return DrafterSpec(text, name, argument, options)


def build(spec: DrafterSpec, context: DraftContext) -> Drafter:
    """The drafter that ``spec`` describes. Raises DrafterError or ModelError."""
    return _METHODS[spec.name].build(spec, context)


def _none(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.none import NoDrafter

    return NoDrafter()


def _ngram(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.ngram import NgramDrafter

    given = {"least": spec.integer("min", None), "most": spec.integer("max", None)}
    return NgramDrafter(**{name: value for name, value in given.items() if value is not None})


def _model(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.model import ModelDrafter

    assert spec.argument is not None
    return ModelDrafter.load(spec.argument, context)


@dataclass(frozen=True, slots=True)
class _Method:
    build: Callable[[DrafterSpec, DraftContext], Drafter]
    options: tuple[str, ...] = ()
    argument: str = ""  # what the part after the colon names, if anything
    example: str = ""


_METHODS = {
    "none": _Method(_none),
    "ngram": _Method(_ngram, ("min", "max")),
    "model": _Method(
        _model, argument="a model: a name, folder or .gguf file", example="HuggingFaceTB/SmolLM2-135M-Instruct"
    ),
}
