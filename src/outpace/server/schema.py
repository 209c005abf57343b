"""Typed requests and answers: their pydantic bases, and how a request that is none is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.server.errors import APIError

T = TypeVar("T")
M = TypeVar("M", bound="Body")

Items = Annotated[list[T], Field(fail_fast=True)]  # one error a list: a list of errors costs far more than its request


class Body(BaseModel):
    """A request, or a part of one. Nothing is coerced (``"1"`` is no number), and a field that is not known is refused
    by name unless it is null: nothing is ignored silently."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    __pydantic_extra__: dict[str, None] = Field(init=False)
    bulk: ClassVar[int] = 1  # so many times as many values as other requests may have


class Answer(BaseModel):
    """An answer, or a part of one. What was not given at construction is left out of the JSON."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> bytes:
        """The JSON, in UTF-8."""
        return self.model_dump_json(exclude_unset=True, by_alias=True).encode()

    def to_dict(self) -> dict[str, Any]:
        """What the JSON says."""
        return self.model_dump(exclude_unset=True, by_alias=True)


UNSUPPORTED: Mapping[str, str] = {  # fields of other servers, and why this one takes none but null
    "access_programs": "this server has none",
    "audio": "this server writes text alone",
    "background_options": "no answer is kept for later: stream it",
    "chat_template": "a server runs no code of its clients",
    "citations": "this server cites nothing",
    "container": "this server runs no code",
    "context": "no conversation is kept: send its messages",
    "conversation": "no conversation is kept: send it as input",
    "documents": "no template here is given any: put them into a message",
    "encrypted_content": "no reasoning is encrypted here: send its text",
    "function_call": "it is deprecated: use tool_choice",
    "functions": "it is deprecated: use tools",
    "image": "this server writes text alone",
    "image_url": "this server reads text alone",
    "images": "this server reads text alone",
    "logit_processors": "a server runs no code of its clients",
    "logits_processors": "a server runs no code of its clients",
    "mcp_servers": "this server calls nothing",
    "mm_processor_kwargs": "this server reads text alone",
    "moderation": "this server moderates nothing",
    "previous_response_id": "no answer is kept: send the conversation as input",
    "prompt": "no prompt is kept: send its text",
    "prompt_logprobs": "use /v1/completions with echo",
    "reasoning": "use reasoning_effort",
    "structural_tag": "use grammar",
    "suffix": "these models do not fill in the middle",
    "truncate_prompt_tokens": "shorten the prompt",
    "web_search_options": "this server searches nothing",
    "whitespace_pattern": "JSON stands on one line",
}
HARMLESS: Mapping[str, tuple[Any, str]] = {  # fields whose value changes nothing here: what is taken, else why not
    "backend_sampling": (bool, "give true or false"),
    "background": (Literal[False], "no answer is kept for later: stream it"),
    "best_of": (Literal[1], "use n, and choose among the answers"),
    "cache_prompt": (bool, "use reuse_prefix"),
    "client_metadata": (dict[str, Any], "give an object"),
    "context_management": (dict[str, Any] | list[Any], "give an object"),
    "early_stopping": (Literal[False], "it is of beams, which this server does not search"),
    "guided_decoding_backend": (str, "give a string"),
    "include_reasoning": (Literal[True], "answers have their reasoning in a field of its own: leave it unread"),
    "length_penalty": (Annotated[float, Field(ge=1, le=1)], "it is of beams, which this server does not search"),
    "max_tool_calls": (int, "give a number"),
    "metadata": (dict[str, str], "give strings by name"),
    "prediction": (dict[str, Any], "give an object"),
    "prompt_cache_key": (str, "give a string"),
    "prompt_cache_options": (dict[str, Any], "give an object"),
    "prompt_cache_retention": (str, "give a string"),
    "reasoning_format": (Literal["auto"], "reasoning has a field of its own"),
    "request_id": (str, "give a string"),
    "return_progress": (bool, "use /v1/traces"),
    "safety_identifier": (str, "give a string"),
    "service_tier": (
        Literal["auto", "default", "flex", "scale", "priority", "standard_only"], "this server has one tier",
    ),
    "spaces_between_special_tokens": (Literal[True], "use skip_special_tokens"),
    "store": (bool, "no answer is kept"),
    "timings_per_token": (bool, "use /v1/traces"),
    "use_beam_search": (Literal[False], "it samples, or takes the likeliest token (temperature 0)"),
    "verbosity": (Literal["low", "medium", "high"], "give low, medium or high"),
}  # fmt: skip
KNOWN: Mapping[str, Any] = {  # for pydantic's create_model
    name: (takes | None, Field(default=None, description="Changes nothing.")) for name, (takes, _) in HARMLESS.items()
}


def parsed(kind: type[M], body: bytes) -> M:
    """``body`` as a ``kind``. Raises APIError (400) that names the first thing wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None


def made(kind: type[M], fields: Mapping[str, Any]) -> M:
    """A ``kind`` of those fields that are not None. Raises APIError (400) that names the first thing wrong."""
    try:
        return kind(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise refusal(error) from None


def refusal(error: ValidationError) -> APIError:
    """What a client reads of ``error``: one thing that is wrong, by name."""
    if error.error_count() > _MOST_ERRORS:  # of a mapping's values; each would become an object
        return APIError(400, f"the body has {error.error_count()} mistakes: correct it", code="invalid_value")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # of a union's branches, the one that went furthest is what was meant
    first = min(found, key=lambda each: (each["type"] != "none_required", -len(each["loc"])))
    kind, where = first["type"], first["loc"]
    place = [str(part) for part in where[:-1] if not _internal(part)]
    if where and (kind == "none_required" or not _internal(where[-1])):  # an unknown name is the client's own
        place.append(str(where[-1]))
    if not place:
        return APIError(400, f"the body is not a JSON object of this kind: {first['msg']}", code="invalid_json")
    param = ".".join(place)
    known = UNSUPPORTED.get(place[-1]) or HARMLESS.get(place[-1], (None, None))[1]
    if kind == "none_required" or (known and kind != "missing"):
        why = known or "it is unknown: check its spelling, or leave it out"
        return APIError(400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter")
    if kind == "missing":
        return APIError(400, f"{param} is missing: give it", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return APIError(400, f"{param}: {message}", param=param, code="invalid_value")


def _internal(part: str | int) -> bool:
    """Whether pydantic put it there: the name of a branch of a union, not of a field."""
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or part in _BRANCHES)


_MOST_ERRORS = 10_000
_BRANCHES = {"str", "int", "float", "bool", "dict", "constrained-str"}
