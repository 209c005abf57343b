"""Typed requests and answers: their pydantic bases, and how a request that is none is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.server.errors import APIError

T = TypeVar("T")
M = TypeVar("M", bound="Body")

Items = Annotated[list[T], Field(fail_fast=True)]  # one error a list: a list of errors costs far more than its request


class Body(BaseModel):
    """A request, or a part of one. Nothing is coerced (``"1"`` is no number), and a field that is not known is refused
    by name: nothing is ignored silently."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Answer(BaseModel):
    """An answer, or a part of one. What was not given at construction is left out of the JSON."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> bytes:
        """The JSON, in UTF-8."""
        return self.model_dump_json(exclude_unset=True, by_alias=True).encode()

    def to_dict(self) -> dict[str, Any]:
        """What the JSON says."""
        return self.model_dump(exclude_unset=True, by_alias=True)


UNSUPPORTED: Mapping[str, str] = {  # fields of other servers that may only be null here, and why
    "audio": "this server writes text alone",
    "background": "no answer is kept for later: stream it",
    "conversation": "no conversation is kept: send it as input",
    "function_call": "it is deprecated: use tool_choice",
    "functions": "it is deprecated: use tools",
    "guided_choice": "use response_format or grammar",
    "guided_grammar": "use grammar",
    "guided_json": "use response_format",
    "guided_regex": "use grammar",
    "logit_processors": "a server runs no code of its clients",
    "logits_processors": "a server runs no code of its clients",
    "max_tool_calls": "this server calls nothing: it bounds calls of built-in tools",
    "prediction": "drafts are made by the server's drafters: choose one with speculation.drafter",
    "previous_response_id": "no answer is kept: send the conversation as input",
    "prompt": "no prompt is kept: send its text",
    "reasoning": "a model's template says whether it thinks: use chat_template_kwargs",
    "reasoning_effort": "a model's template says whether it thinks: use chat_template_kwargs",
    "structured_outputs": "use response_format or grammar",
    "suffix": "these models do not fill in the middle",
    "verbosity": "no model here knows it",
    "web_search_options": "this server searches nothing",
}
HARMLESS: Mapping[str, tuple[Any, str]] = {  # fields whose value changes nothing here: what is taken, else why not
    "best_of": (Literal[1], "use n, and choose among the answers"),
    "metadata": (dict[str, str], "give strings by name"),
    "prompt_cache_key": (str, "give a string"),
    "prompt_cache_retention": (str, "give a string"),
    "safety_identifier": (str, "give a string"),
    "service_tier": (Literal["auto", "default", "flex", "scale", "priority"], "this server has one tier"),
    "store": (bool, "no answer is kept"),
    "use_beam_search": (Literal[False], "it samples, or takes the likeliest token (temperature 0)"),
}
KNOWN: Mapping[str, Any] = {  # for pydantic's create_model
    **{name: (None, Field(default=None, description=f"Not supported: {why}.")) for name, why in UNSUPPORTED.items()},
    **{
        name: (takes | None, Field(default=None, description="Changes nothing."))
        for name, (takes, _) in HARMLESS.items()
    },
}


def parsed(kind: type[M], body: bytes) -> M:
    """``body`` as a ``kind``. Raises APIError (400) that names the first thing wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None


def refusal(error: ValidationError) -> APIError:
    """What a client reads of ``error``: one thing that is wrong, by name."""
    if error.error_count() > _MOST_ERRORS:  # of a mapping's values; each would become an object
        return APIError(400, f"the body has {error.error_count()} mistakes: correct it", code="invalid_value")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # of a union's branches, the one that went furthest is what was meant
    first = min(found, key=lambda its: (its["type"] != "extra_forbidden", -len(its["loc"])))
    kind, where = first["type"], first["loc"]
    place = [str(part) for part in where[:-1] if not _internal(part)]
    if where and (kind == "extra_forbidden" or not _internal(where[-1])):  # an unknown name is the client's own
        place.append(str(where[-1]))
    if not place:
        return APIError(400, f"the body is not a JSON object of this kind: {first['msg']}", code="invalid_json")
    param = ".".join(place)
    known = UNSUPPORTED.get(place[-1]) or HARMLESS.get(place[-1], (None, None))[1]
    if kind == "extra_forbidden" or (known and kind != "missing"):
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
