"""Options that commands share, as dataclasses whose fields are options of the command itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from outpace.common.files import check_writable, write_json
from outpace.common.parameter import UNCHECKED, Biases, Texts, TokenIds, Words, defined, option
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.models.options import LoadOptions
from outpace.params import PARAMETERS, SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine

T = TypeVar("T")
Unfit = Callable[[Any, OutpaceError], bool]


def system_message(text: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [] if text is None else [{"role": "system", "content": text}]


_STANDARD_OUTPUT = Path("-")


@dataclass(frozen=True, slots=True)
class Common:
    GROUP: ClassVar[str] = "output"

    json: Path | None = defined(
        None, "Print JSON, not text; or write it to FILE.", metavar="[FILE]", bare="-", group=""
    )
    verbose: bool = defined(False, "Show what loading does, and the memory it takes.", option=("--verbose", "-v"))
    debug: bool = defined(False, "Show a traceback when something fails.")

    def __post_init__(self) -> None:
        if self.json is not None and not self.prints_json:
            check_writable(self.json, "JSON")

    @property
    def prints_json(self) -> bool:
        """Whether standard output is for JSON alone."""
        return self.json == _STANDARD_OUTPUT

    def emit(self, value: Any) -> bool:
        """Give ``value`` as JSON where ``--json`` asks for it, whole or not at all: True if it was printed, so that
        nothing else may be. Raises OSError."""
        if self.prints_json:
            print(json.dumps(value, ensure_ascii=False), flush=True)
        elif self.json is not None:
            write_json(self.json, value)
        return self.prints_json


@dataclass(frozen=True, slots=True)
class Load(LoadOptions):
    """Which target to load, and how."""

    GROUP: ClassVar[str] = "loading the model"

    model: str = defined(
        "demo", "demo, demo-draft, demo-gemma, user/repo:Q4_K_M, a Hugging Face id, a folder or a .gguf file.",
        option=("--model", "-m"), group="",
    )  # fmt: skip
    prefix_rows: int | None = defined(
        None, "Answers whose KV is kept for prompts that begin alike. 0: none.", metavar="N"
    )

    def engines(
        self,
        drafters: Sequence[str],
        more: Sequence[str] = (),
        unfit: Unfit = lambda drafter, error: False,
        **options: Any,
    ) -> list[Engine]:
        """Load the target once, and an engine a drafter over it. ``more``: drafters that requests may choose; ``unfit``
        as in ``load_engines``."""
        from outpace.engine.engine import Engine
        from outpace.engine.intake import load_engines

        return load_engines(Engine, self.model, drafters, self.given(**options), more, unfit)

    def given(self, **options: Any) -> dict[str, Any]:
        """Options of ``Engine.load`` but the model: one that was given overrides a command's own choice."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return {name: value for part in (options, own) for name, value in part.items() if value is not None}

    def engine(self, drafter: str, more: Sequence[str] = (), **options: Any) -> Engine:
        """Load the target with one drafter, and ``more`` that requests may choose."""
        return self.engines([drafter], more, **options)[0]

    def load_options(self) -> LoadOptions:
        """Those of them that are not of the engine."""
        return LoadOptions(**{f.name: getattr(self, f.name) for f in fields(LoadOptions)})


def size_of(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{text!r}: give auto (what pays), or a number of tokens (0 decodes plainly)") from None


SIZE = option("Tokens drafted a step. Default: auto, what pays.", "--size", "-s", parser=size_of, metavar="N|auto")
_PROMPTS = "JSON lines (turns or prompt, id, category), CSV with such columns, or text: a prompt a line."
PROMPTS = option(_PROMPTS)
PROMPTS_OR_OURS = option(f"{_PROMPTS} Default: 24 short ones.")
LIMIT = option("So many rows, spread evenly over the file.")
SYSTEM = option("A system message before the conversation.", metavar="TEXT")
ACCEPTANCE = option("coupled (same tokens), rejection (same distribution).")


def _drafters() -> list[tuple[str, str]]:
    from outpace.drafters.catalogue import listed

    return listed()


_DRAFTER = option(
    "What drafts, from the list below; + joins several.", "--drafter", "-d", group="",
    listing=("drafters (their options: docs/drafters.md)", _drafters),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter."""

    GROUP: ClassVar[str] = "drafting"

    drafter: str = defined("auto", _DRAFTER)
    size: Any = defined(None, SIZE)
    acceptance: str = defined("coupled", ACCEPTANCE)


_LISTS: dict[type, tuple[Any, str]] = {  # an option that may be repeated, and how help names one of its values
    TokenIds: (list[int], "ID"),
    Texts: (list[str], "TEXT"),
    Words: (list[str], "TEXT"),
    Biases: (list[str], "ID=BIAS"),
}
_OPTIONS = {name: parameter for name, parameter in PARAMETERS.items() if parameter.option}
_USUAL = ("temperature", "max_tokens")
_ENDS = ("end", "text")  # stages


def integer_or_none(text: str) -> int | None:
    """A whole number; None for none, and for -1, by which llama.cpp and others mean it."""
    if text.lower() in ("none", "-1"):
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number: give one, or none") from None


def _by_parameters(cls: type[T]) -> type[T]:
    """A dataclass with a field, an option, for each parameter that has one."""
    for name, parameter in _OPTIONS.items():
        kind, default = parameter.kind, parameter.default
        group = "" if name in _USUAL else "end of the answer" if parameter.stage in _ENDS else None
        own = replace(parameter, values=UNCHECKED, group=group)
        if type(parameter.values) in _LISTS:
            kind, metavar = _LISTS[type(parameter.values)]
            default, own = None, replace(own, metavar=metavar, meaning=f"{parameter.meaning} Repeatable.")
        elif kind is bool:
            default = False  # the option changes the parameter's own default
        elif kind is int and parameter.none == "value":
            own = replace(own, parser=integer_or_none)
        cls.__annotations__[name] = kind
        setattr(cls, name, defined(default, own))
    return dataclass(frozen=True)(cls)


@_by_parameters
class Sampling:
    """SamplingParams, option by option. A flag that is on by default has an option that turns it off."""

    GROUP: ClassVar[str] = "sampling"

    def params(self, **more: Any) -> SamplingParams:
        """Raises ParameterError that names the value."""
        given = {name: getattr(self, name) for name in _OPTIONS}
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"] or ())
        for name, parameter in _OPTIONS.items():
            if parameter.default is True:
                given[name] = not given[name]
        return SamplingParams(**given, **more)


@dataclass(frozen=True)
class Unbounded(Sampling):
    """Of answers that end where the model ends them."""

    max_tokens: int | None = defined(
        None, "Most tokens an answer. Default: until the model ends it, or the context is full.",
        option=("--max-tokens", "-n"), group="", parser=integer_or_none,
    )  # fmt: skip


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        name = Argument("logit_bias", text)
        raise ParameterError(name, " is malformed: write a token id and a number, like 42=-1.5") from None
