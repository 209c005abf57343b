"""Options that commands share, as dataclasses whose fields are options of the command itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from outpace.common.files import check_writable, write_json
from outpace.common.option import option
from outpace.common.parameter import Biases, Texts, TokenIds, Words
from outpace.errors import Argument, ParameterError
from outpace.params import PARAMETERS, SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.models.options import LoadOptions

T = TypeVar("T")


def system_message(text: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [] if text is None else [{"role": "system", "content": text}]


_STANDARD_OUTPUT = Path("-")


@dataclass(frozen=True, slots=True)
class Common:
    GROUP: ClassVar[str] = "output"

    json: Annotated[
        Path | None,
        option("--json", metavar="[FILE]", bare="-", group="", help="Print JSON, not text; or write it to FILE."),
    ] = None
    verbose: Annotated[bool, option("--verbose", "-v", help="Show what loading does, and the memory it takes.")] = False
    debug: Annotated[bool, option("--debug", help="Show a traceback when something fails.")] = False

    def __post_init__(self) -> None:
        if self.json is not None and not self.prints_json:
            check_writable(self.json)

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
class Load:
    """Which target to load, and how."""

    GROUP: ClassVar[str] = "loading the model"

    model: Annotated[
        str,
        option(
            "--model", "-m", group="",
            help="demo, demo-gemma, user/repo:Q4_K_M, a Hugging Face id, a folder or a .gguf file.",
        ),
    ] = "demo"  # fmt: skip
    backend: Annotated[str, option("--backend", help="auto, native (C++ on the CPU) or transformers.")] = "auto"
    dtype: Annotated[str, option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, option("--device", help="auto, cpu or cuda.")] = "auto"
    threads: Annotated[int | None, option("--threads", "-t", help="CPU threads. Default: the cores there are.")] = None
    kv_memory: Annotated[
        str | None, option("--kv-memory", metavar="SIZE", help="Bound of the KV cache, such as 2GiB.")
    ] = None
    kv_dtype: Annotated[str, option("--kv-dtype", help="Of keys and values: bfloat16 (auto), float32, int8.")] = "auto"
    quantize: Annotated[
        str | None, option("--quantize", help="int8 or int4: weights that are not quantised yet, native.")
    ] = None
    strict: Annotated[
        bool, option("--strict", help="Transformers backend: same bits at any batch, width and chunking (slower).")
    ] = False
    prefix_rows: Annotated[
        int | None,
        option("--prefix-rows", metavar="N", help="Answers whose KV is kept for prompts that begin alike. 0: none."),
    ] = None
    max_length: Annotated[int | None, option("--max-length", help="Most positions of a row. Default: the model's.")] = (
        None
    )
    revision: Annotated[str | None, option("--revision", help="Branch, tag or commit on Hugging Face.")] = None
    offline: Annotated[bool | None, option("--offline", help="Download nothing: what is in the cache must do.")] = None
    trust_remote_code: Annotated[bool, option("--trust-remote-code", help="Run code that comes with the model.")] = (
        False
    )
    allow_pickle: Annotated[
        bool, option("--allow-pickle", help="Read weights that are not safetensors; they can run code.")
    ] = False

    def engines(self, drafters: Sequence[str], more: Sequence[str] = (), **options: Any) -> list[Engine]:
        """Load the target once, and an engine a drafter over it. ``more``: drafters that requests may choose."""
        from outpace.engine.engine import Engine
        from outpace.engine.intake import load_engines

        return load_engines(Engine, self.model, drafters, self.given(**options), more)

    def given(self, **options: Any) -> dict[str, Any]:
        """Options of ``Engine.load`` but the model: one that was given overrides a command's own choice."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return {name: value for part in (options, own) for name, value in part.items() if value is not None}

    def engine(self, drafter: str, more: Sequence[str] = (), **options: Any) -> Engine:
        """Load the target with one drafter, and ``more`` that requests may choose."""
        return self.engines([drafter], more, **options)[0]

    def load_options(self) -> LoadOptions:
        """Raises ParameterError."""
        from outpace.common.units import parse_bytes
        from outpace.models.options import LoadOptions

        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("model", "prefix_rows")}
        if self.offline is None:
            del own["offline"]  # HF_HUB_OFFLINE says
        if self.kv_memory is not None:
            own["kv_memory"] = parse_bytes(self.kv_memory)
        return LoadOptions(**own)


def size_of(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{text!r}: give auto (what pays), or a number of tokens (0 decodes plainly)") from None


SIZE = option("--size", "-s", parser=size_of, metavar="N|auto", help="Tokens drafted a step. Default: auto, what pays.")
PROMPTS = option(
    "--prompts", help="JSON lines (turns or prompt, id, category), CSV with such columns, or text: a prompt a line."
)
LIMIT = option("--limit", help="So many rows, spread evenly over the file.")
SYSTEM = option("--system", metavar="TEXT", help="A system message before the conversation.")
ACCEPTANCE = option("--acceptance", help="coupled (same tokens), rejection (same distribution).")


def _drafters() -> list[tuple[str, str]]:
    from outpace.drafters.catalogue import listed

    return listed()


_DRAFTER = option(
    "--drafter", "-d", group="", help="What drafts, from the list below; + joins several.",
    listing=("drafters (their options: docs/drafters.md)", _drafters),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter."""

    GROUP: ClassVar[str] = "drafting"

    drafter: Annotated[str, _DRAFTER] = "auto"
    size: Annotated[Any, SIZE] = None
    acceptance: Annotated[str, ACCEPTANCE] = "coupled"


_LISTS: dict[type, tuple[Any, str]] = {  # an option that may be repeated, and how help names one of its values
    TokenIds: (list[int] | None, "ID"),
    Texts: (list[str] | None, "TEXT"),
    Words: (list[str] | None, "TEXT"),
    Biases: (list[str] | None, "ID=BIAS"),
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
        kind, default, text, metavar = parameter.values.json, parameter.default, parameter.meaning, None
        if type(parameter.values) in _LISTS:
            kind, metavar = _LISTS[type(parameter.values)]
            text, default = f"{text} Repeatable.", None
        elif kind is bool:
            default = False  # the option changes the parameter's own default
        elif parameter.none == "value":
            kind = kind | None
        group = "" if name in _USUAL else "end of the answer" if parameter.stage in _ENDS else None
        parser = integer_or_none if kind == int | None else None
        spelling = option(*parameter.option, help=text, metavar=metavar, group=group, parser=parser)
        cls.__annotations__[name] = Annotated[kind, spelling]
        setattr(cls, name, default)
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

    max_tokens: Annotated[
        int | None,
        option(
            "--max-tokens", "-n", group="", parser=integer_or_none,
            help="Most tokens an answer. Default: until the model ends it, or the context is full.",
        ),
    ] = None  # fmt: skip


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        name = Argument("logit_bias", text)
        raise ParameterError(name, " is malformed: write a token id and a number, like 42=-1.5") from None
