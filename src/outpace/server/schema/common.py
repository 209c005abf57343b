"""What requests for chats and completions have in common, and how a body becomes one of them."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.server.errors import APIError

M = TypeVar("M", bound="Body")

_DEEPEST = 64  # levels of JSON: beyond it a body is no request


class Body(BaseModel):
    """Nothing is coerced (``"1"`` is no number), and nothing is taken that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Speculation(Body):
    """Who drafts, how much, and by which rule; ``off``: plain decoding. None of it changes a token (docs/exactness.md)
    but ``acceptance``."""

    drafter: str | None = None
    size: int | Literal["auto"] | None = None
    acceptance: Literal["coupled", "rejection", "typical"] | None = None
    off: bool = False
    trace: bool = Field(default=False, description="Every chunk says who wrote its tokens.")


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Parameters(Body):
    """The parameters of sampling, and of serving, that all requests for an answer share."""

    model: str | None = Field(default=None, description="Default: the server's first.")
    temperature: float | None = Field(default=None, description="0 is greedy. Default: 1.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(default=None, description="Default: a fresh one, which the answer says.")
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(default=None, description="The answer has its token ids, and the prompt's.")
    stream: bool | None = None
    user: str | None = Field(default=None, max_length=512, description="Named in the server's log.")
    speculation: Speculation | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31, description="Higher runs first. Default: 0.")
    deadline: float | None = Field(default=None, gt=0, description="Seconds; then the answer ends as it is.")
    reuse_prefix: bool | None = Field(default=None, description="False: KV is shared with no other request.")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=512, description="KV is shared within it.")


class Sampling(Parameters):
    """What chats and completions share beside them."""

    n: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None


def parsed(kind: type[M], body: bytes) -> M:
    """``body`` as a ``kind``. Raises APIError (400) that names the first thing wrong."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise APIError(400, f"the body is a JSON {_kind(value)}: give an object", code="invalid_json")
    if _deeper(value, _DEEPEST):
        raise APIError(400, f"the body is nested more than {_DEEPEST} levels deep", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refused(kind, error) from None


UNSUPPORTED = {  # known to others, and why not here
    "audio": "this server writes text alone",
    "prediction": "drafts are made by the server's drafters: choose one with speculation.drafter",
    "functions": "it is deprecated: use tools",
    "function_call": "it is deprecated: use tool_choice",
    "suffix": "these models do not fill in the middle",
    "best_of": "use n, and choose among the answers",
    "web_search_options": "this server searches nothing",
    "logit_processors": "a server runs no code of its clients",
    "logits_processors": "a server runs no code of its clients",
    "use_beam_search": "it samples, or takes the likeliest token (temperature 0)",
    "guided_json": "use response_format",
    "guided_regex": "use grammar",
    "guided_grammar": "use grammar",
    "structured_outputs": "use response_format or grammar",
    "previous_response_id": "no answer is kept: send the conversation as input",
    "conversation": "no conversation is kept: send it as input",
    "prompt": "no prompt is kept: send its text",
    "background": "no answer is kept for later: stream it",
    "max_tool_calls": "this server calls nothing: it bounds calls of built-in tools",
    "reasoning": "a model's template says whether it thinks: use chat_template_kwargs",
    "verbosity": "no model here knows it",
}


def _refused(kind: type[Body], error: ValidationError) -> APIError:
    found = error.errors(include_url=False)  # of a union's branches, the one that went furthest is what was meant
    first = min(found, key=lambda its: (its["type"] != "extra_forbidden", -len(its["loc"])))
    unknown = first["type"] == "extra_forbidden"
    *above, last = (None, *first["loc"])
    place = [str(part) for part in above if part is not None and not _internal(part)]
    if last is not None and (unknown or not _internal(last)):  # an unknown field's name is the client's own
        place.append(str(last))
    param = ".".join(place) if place else None
    if unknown:
        why = UNSUPPORTED.get(place[-1], "it is unknown: check its spelling, or leave it out")
        return APIError(400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter")
    if first["type"] == "missing":
        return APIError(400, f"{param} is missing: give it", param=param, code="missing_required_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    return APIError(400, f"{param or 'the body'}: {message}", param=param, code="invalid_value")


def _internal(part: str | int) -> bool:
    """Whether pydantic put it there: the name of a branch of a union, not of a field."""
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or part in _BRANCHES)


_BRANCHES = {"str", "int", "float", "bool", "dict", "constrained-str"}


def _kind(value: Any) -> str:
    kinds = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _deeper(value: Any, levels: int) -> bool:
    level: list[Any] = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for its in level:
            inner.extend(v for v in (its.values() if isinstance(its, dict) else its) if isinstance(v, (dict, list)))
        if not inner:
            return False
        level = inner
    return True
