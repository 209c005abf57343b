"""The fields that all requests for an answer share, and what an engine is asked for because of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, create_model

from outpace.common.arrays import I32
from outpace.common.parameter import Parameter
from outpace.engine.intake import check_resumable
from outpace.params import Acceptance, SamplingParams
from outpace.server.api.formats import Formats, ResponseFormat
from outpace.server.engines.models import Served
from outpace.server.errors import APIError, ContextError
from outpace.server.fields import TAKEN
from outpace.server.schema import Body, Items
from outpace.server.settings import REQUESTED, ServerSettings

_MOST: dict[str, tuple[int | None, int | None]] = {  # items and characters: what each costs in every step, or at first
    "stop": (64, 1024), "stop_ids": (1024, None), "bad_words": (1024, 256),
}  # fmt: skip
_PIECE = 64 << 10  # characters that are made tokens at a time, to see whether a text is too much


class Speculation(Body):
    """Who drafts, how much, and by which rule; ``off``: plain decoding. None of it changes a token (docs/exactness.md)
    but ``acceptance``."""

    own = True
    drafter: str | None = None
    size: int | Literal["auto"] | None = None
    acceptance: Acceptance | None = None
    off: bool = False
    trace: bool = Field(default=False, description="Every chunk says who wrote its tokens.")


class Resume(Body):
    """Go on after tokens that this very request has produced: the answer has only what follows them, and the usage and
    the end of the whole one."""

    own = True
    token_ids: Items[int] | Items[Items[int]] = Field(
        description="Of all chunks that came; with several choices a list for each, by index."
    )
    verify: bool = Field(default=False, description="The target chooses the last 8 of them again; else it is an error.")


class StreamOptions(Body):
    """They change nothing of an answer that is not streamed."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(default=None, description="Each chunk has the usage so far.")
    include_obfuscation: Literal[False] | None = None


def _bounded(hint: Any, items: int | None, characters: int | None) -> Any:
    """``hint`` with lists of at most so many items, which fail at their first one, and texts of so many characters."""
    inner = [_bounded(its, items, characters) for its in get_args(hint)]
    if isinstance(hint, UnionType):
        return reduce(or_, inner)
    if get_origin(hint) is list:
        return Annotated[list[inner[0]], Field(fail_fast=True, max_length=items)]  # type: ignore[valid-type]
    return Annotated[str, Field(max_length=characters)] if hint is str and characters else hint


def _field(parameter: Parameter) -> Any:
    """A parameter's field in a request; null is the server's default."""
    hint = _bounded(parameter.values.json, *_MOST.get(parameter.name, (None, None)))
    default = {"temperature": " Default: 1."}.get(parameter.name, "")
    return hint | None, Field(default=None, description=parameter.meaning + default)


if TYPE_CHECKING:

    class SamplingFields(Body):
        """Of the fields that SamplingParams defines, those that the server reads itself."""

        temperature: float | None = None
        top_p: float | None = None
        seed: int | None = None
        stop: str | list[str] | None = None
else:
    SamplingFields = create_model(
        "SamplingFields", __base__=Body, **TAKEN, **{name: _field(parameter) for name, parameter in REQUESTED.items()}
    )


class Parameters(SamplingFields, Formats):
    """The parameters of sampling, and of serving, that all requests for an answer share."""

    model: str | None = Field(default=None, description="Default: the server's first.")
    return_token_ids: bool | None = Field(
        default=None, description="The answer has its token ids, and the prompt's; chunks have the seed."
    )
    stream: bool | None = None
    repeat_penalty: float | None = Field(default=None, description="repetition_penalty, as llama.cpp names it.")
    user: str | None = Field(default=None, max_length=512, description="Named in the server's log.")
    speculation: Speculation | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31, description="Higher runs first. Default: 0.")
    deadline: float | None = Field(default=None, gt=0, description="Seconds; then the answer ends as it is.")
    reuse_prefix: bool | None = Field(default=None, description="False: KV is shared with no other request.")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=512, description="KV is shared within it.")
    resume: Resume | None = None
    return_progress: bool | None = Field(
        default=None, description="A stream says how much of the prompt was read, as llama.cpp's does."
    )

    @property
    def traced(self) -> bool:
        return self.speculation is not None and self.speculation.trace


class Sampling(Parameters):
    """What chats and completions share beside them."""

    n: int | None = None
    max_tokens: int | None = Field(default=None, description="-1: as many as the context holds.")
    n_predict: int | None = Field(default=None, description="max_tokens, as llama.cpp names it.")
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(
        default=None, description="Log-probabilities of the prompt's tokens, with so many others; not in streams."
    )
    timings_per_token: bool | None = Field(default=None, description="The answer, or each chunk, has `timings`.")

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def bounded(max_tokens: int) -> int | None:
    """As SamplingParams has it, where -1 is None: as many as the context holds."""
    return None if max_tokens == -1 else max_tokens


def parameters(body: Sampling, settings: ServerSettings, **more: Any) -> SamplingParams:
    """The body's parameters, with ``more``. Raises ParameterError or APIError."""
    if body.n is not None and body.n > settings.max_n:
        raise APIError(400, f"n={body.n} is more than this server's {settings.max_n}: ask for fewer", param="n")
    given: dict[str, Any] = {"temperature": 1.0, "n": 1 if body.n is None else body.n}
    given |= {REQUESTED[name].name: value for name, value in settings.sampling.items() if name in REQUESTED} | more
    if body.repeat_penalty is not None:
        given["repetition_penalty"] = body.repeat_penalty
    for name, parameter in REQUESTED.items():
        if (value := getattr(body, name)) is not None:
            given[parameter.name] = value
    if "logit_bias" in given:
        given["logit_bias"] = {token_id(token): bias for token, bias in given["logit_bias"].items()}
    if body.seed == -1:  # llama.cpp and vLLM draw one for it
        given.pop("seed", None)
    elif body.seed is not None and -(2**63) <= body.seed < 0:
        given["seed"] = body.seed % 2**64
    params = SamplingParams(**given)
    if body.resume is not None and any(body.resume.token_ids):
        check_resumable(params)
    return params


def token_id(text: str) -> int:
    """A key of ``logit_bias``. Raises APIError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise APIError(400, f"logit_bias has {text[:80]!r}, which is no token id: give ids as keys", param="logit_bias")
    return int(text)


def engine_options(body: Parameters, settings: ServerSettings, scope: str) -> dict[str, Any]:
    """Options of ``Engine.prepare``. ``scope``: whose KV may be shared. Raises APIError."""
    options: dict[str, Any] = {"cache_scope": scope if body.cache_salt is None else f"{scope}/{body.cache_salt}"}
    bounds = [bound for bound in (body.deadline, settings.request_timeout) if bound is not None]
    if bounds:
        options["deadline"] = min(bounds)
    if body.priority is not None:
        options["priority"] = body.priority
    if body.reuse_prefix is not None:
        options["reuse_prefix"] = body.reuse_prefix
    wish = body.speculation
    if wish is not None:
        if wish.off and (wish.drafter, wish.size, wish.acceptance) != (None, None, None):
            raise APIError(
                400, "speculation.off leaves nothing to draft: leave drafter, size and acceptance out",
                param="speculation.off",
            )  # fmt: skip
        options["drafter"] = False if wish.off else wish.drafter
        options["size"], options["acceptance"] = wish.size, wish.acceptance
    return options


def resumed(body: Parameters, choices: int) -> dict[str, Any]:
    """Fields of ``Work``: what each of so many choices goes on after. Raises APIError."""
    if body.resume is None:
        return {}
    given: list[Any] = body.resume.token_ids
    each = given if given and isinstance(given[0], list) else [given]
    if len(each) != choices:
        raise APIError(
            400, f"resume.token_ids is of {len(each)} choices, but the request has {choices}: give a list of ids for "
            "each, [] where nothing came", param="resume.token_ids",
        )  # fmt: skip
    return {"resume": each, "verify": body.resume.verify}


def check_logprobs(name: str, wanted: int, settings: ServerSettings) -> None:
    if wanted > settings.max_logprobs:
        most = settings.max_logprobs
        raise APIError(400, f"{name}={wanted} is more than this server's {most}: ask for fewer", param=name)


def check_prompt_logprobs(body: Sampling, settings: ServerSettings) -> None:
    if body.prompt_logprobs is not None and body.prompt_logprobs < 0:
        raise APIError(
            400, f"prompt_logprobs={body.prompt_logprobs} would be of the whole vocabulary (in vLLM): ask for 0 to "
            f"{settings.max_logprobs}", param="prompt_logprobs",
        )  # fmt: skip
    check_logprobs("prompt_logprobs", body.prompt_logprobs or 0, settings)
    if body.prompt_logprobs is not None and body.stream:
        raise APIError(
            400,
            "prompt_logprobs come with a whole answer: leave stream out, or prompt_logprobs",
            param="prompt_logprobs",
        )
    if body.prompt_logprobs is not None and body.resume is not None:
        raise APIError(
            400,
            "prompt_logprobs are of the prompt, and a resumed answer has only what follows: leave one of them out",
            param="prompt_logprobs",
        )


def check_text(text: str, model: Served, param: str, *, special: bool = False) -> None:
    """Raise ContextError for a text that cannot fit, before it is made tokens. ``special``: it may spell special
    ones."""
    most = model.info.max_length
    if len(text) > model.most_text:
        raise ContextError(param, len(text), model.most_text, unit="characters")
    found = most if len(text) > model.most_characters else _counted(text, model, most, special)
    if found is not None:
        raise ContextError(param, found, most, counted=False)


def check_size(text: str, model: Served, param: str, most: int, *, special: bool = False) -> None:
    """Raise APIError for a text that need not fit into the context, but has more than about ``most`` tokens."""
    if len(text) > model.most_text or _counted(text, model, most, special) is not None:
        raise APIError(
            400, f"the text has {len(text)} characters: this server makes at most {model.most_text} and {most} tokens "
            "of one", param=param,
        )  # fmt: skip


def check_together(texts: Sequence[str], model: Served, param: str) -> None:
    """Raise APIError for texts of one prompt that have more characters than one text may have."""
    if (size := sum(map(len, texts))) > model.most_text:
        raise APIError(
            400, f"the prompt's texts have {size} characters together: this server reads at most {model.most_text}; "
            "send what is near the place alone", param=param,
        )  # fmt: skip


def _counted(text: str, model: Served, most: int, special: bool) -> int | None:
    """How many tokens a text has where its pieces say that these are more than twice ``most`` (being cut adds a few to
    thousands), up to where that was seen. A long text of many tokens takes seconds and hundreds of megabytes; of a
    piece, neither."""
    found = 0
    for start in range(0, len(text), _PIECE) if len(text) > _PIECE else ():
        found += len(model.tokenizer.encode(text[start : start + _PIECE], add_special=False, parse_special=special))
        if found > 2 * most:
            return found
    return None


def check_length(tokens: I32, model: Served, param: str) -> None:
    """Raise ContextError for a prompt that leaves no room for an answer."""
    if len(tokens) >= model.info.max_length:
        raise ContextError(param, len(tokens), model.info.max_length)
