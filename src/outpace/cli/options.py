"""Options that commands share, as dataclasses whose fields are options of the command itself (``flatten``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.errors import ParameterError

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.params import SamplingParams


def _option(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, **more)


@dataclass(frozen=True, slots=True)
class Common:
    json: Annotated[bool, _option("--json", help="Print one JSON object instead of text.")] = False
    verbose: Annotated[bool, _option("--verbose", "-v", help="Show what loading does, and the memory it takes.")] = (
        False
    )
    debug: Annotated[bool, _option("--debug", help="Show a traceback when something fails.")] = False


@dataclass(frozen=True, slots=True)
class BenchCommon:
    verbose: Annotated[bool, _option("--verbose", "-v", help="Show what loading does, and the memory it takes.")] = (
        False
    )
    debug: Annotated[bool, _option("--debug", help="Show a traceback when something fails.")] = False


@dataclass(frozen=True, slots=True)
class Load:
    """Which target to load, and how."""

    model: Annotated[
        str, _option("--model", "-m", help="demo, demo-gemma, a Hugging Face id, a folder or a .gguf file.")
    ] = "demo"
    backend: Annotated[str, _option("--backend", help="auto, native (C++ on the CPU) or transformers.")] = "auto"
    dtype: Annotated[str, _option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, _option("--device", help="auto, cpu or cuda.")] = "auto"
    threads: Annotated[int | None, _option("--threads", "-t", help="CPU threads. Default: the cores there are.")] = None
    kv_memory: Annotated[
        str | None, _option("--kv-memory", metavar="SIZE", help="Bound of the KV cache, such as 2GiB.")
    ] = None
    max_length: Annotated[
        int | None, _option("--max-length", help="Most positions of a row. Default: the model's.")
    ] = None
    revision: Annotated[str | None, _option("--revision", help="Branch, tag or commit on Hugging Face.")] = None
    trust_remote_code: Annotated[bool, _option("--trust-remote-code", help="Run code that comes with the model.")] = (
        False
    )
    allow_pickle: Annotated[
        bool, _option("--allow-pickle", help="Read weights that are not safetensors; they can run code.")
    ] = False

    def engines(self, drafters: Sequence[str], **options: Any) -> list[Engine]:
        """Load the target once, and an engine a drafter over it."""
        from outpace.engine.engine import Engine
        from outpace.engine.load import load_engines

        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        given = {name: value for name, value in options.items() if value is not None}
        return load_engines(Engine, self.model, drafters, {**own, **given})

    def engine(self, drafter: str, **options: Any) -> Engine:
        """Load the target with one drafter."""
        return self.engines([drafter], **options)[0]


def _size(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter("give auto (what pays), or a number of tokens (0 decodes plainly)") from None


SIZE = _option("--size", "-s", parser=_size, metavar="N|auto", help="Tokens drafted a step. Default: auto, what pays.")
ACCEPTANCE = _option("--acceptance", help="coupled (same tokens), rejection (same distribution), typical (lossy).")


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter."""

    drafter: Annotated[
        str, _option("--drafter", "-d", help="none, ngram[:min=,max=] or model:ID (docs/drafters.md).")
    ] = "ngram"
    size: Annotated[Any, SIZE] = None
    acceptance: Annotated[str, ACCEPTANCE] = "coupled"


@dataclass(frozen=True, slots=True)
class Sampling:
    """SamplingParams, option by option."""

    max_tokens: Annotated[int, _option("--max-tokens", "-n", help="Most tokens to write.")] = 256
    temperature: Annotated[float, _option("--temperature", "-T", help="0 is greedy.")] = 0.0
    top_k: Annotated[int, _option("--top-k", help="Keep the k likeliest tokens. 0: off.")] = 0
    top_p: Annotated[
        float, _option("--top-p", help="Keep the likeliest tokens that reach this probability. 1: off.")
    ] = 1.0
    min_p: Annotated[
        float, _option("--min-p", help="Drop tokens less likely than this share of the likeliest. 0: off.")
    ] = 0.0
    repetition_penalty: Annotated[float, _option("--repetition-penalty", help="Counts prompt and output. 1: off.")] = (
        1.0
    )
    presence_penalty: Annotated[float, _option("--presence-penalty", help="Counts the output. 0: off.")] = 0.0
    frequency_penalty: Annotated[float, _option("--frequency-penalty", help="Counts the output. 0: off.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, _option("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit. Repeatable.")
    ] = None
    stop: Annotated[list[str] | None, _option("--stop", help="Stop before this text. Repeatable.")] = None
    stop_id: Annotated[list[int] | None, _option("--stop-id", help="Stop after this token id. Repeatable.")] = None
    ignore_eos: Annotated[bool, _option("--ignore-eos", help="Write on after the end-of-sequence token.")] = False
    seed: Annotated[int | None, _option("--seed", help="Default: a fresh one, which is reported.")] = None

    def params(self, **more: Any) -> SamplingParams:
        """Raises ParameterError that names the value."""
        from outpace.params import SamplingParams

        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("logit_bias", "stop", "stop_id")}
        return SamplingParams(
            **{**own, **more},
            logit_bias=dict(_bias(text) for text in self.logit_bias or ()),
            stop=tuple(self.stop or ()),
            stop_ids=tuple(self.stop_id or ()),
        )


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ParameterError(
            f"--logit-bias {text!r} is malformed: write a token id and a number, like 42=-1.5"
        ) from None
