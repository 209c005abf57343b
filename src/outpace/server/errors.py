"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel

from outpace.errors import (
    Argument,
    ComplexityError,
    MemoryLimitError,
    MissingExtraError,
    NoTokenAllowedError,
    OutpaceError,
)
from outpace.params import PARAMETERS

CLIENT, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"

_SPELLED = {  # parameters of SamplingParams and of engines, as requests spell them
    **{each.name: each.request for each in PARAMETERS.values() if each.request is not None},
    "drafter": "speculation.drafter",
    "size": "speculation.size",
    "acceptance": "speculation.acceptance",
}
Names = Mapping[str, str]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorBody


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicRefusal(BaseModel):
    """The same, as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicError


class OllamaRefusal(BaseModel):
    """The same, as Ollama's clients read it."""

    error: str


class APIError(Exception):
    """An error with the status and the fields that a client sees. ``headers``: of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message, param = cut(message, 2000), param and cut(param, 200)  # a client's own words may be in them
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or (SERVER if status >= 500 else CLIENT)
        self.headers = dict(headers or {})
        self.observed = False  # by observers, as the end of a generation

    @property
    def body(self) -> Refusal:
        """What the client reads."""
        return Refusal(error=ErrorBody(message=self.message, type=self.kind, param=self.param, code=self.code))


class ContextError(APIError):
    """A prompt that is too long: it has ``length`` tokens or, where it was not ``counted`` to its end, more; the
    context holds ``most``, the answer included. ``unit``: characters, where these alone are bounded. Clients know the
    words, and shorten the conversation."""

    def __init__(self, param: str, length: int, most: int, *, unit: str = "tokens", counted: bool = True) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {most} {unit}. However, you requested {length} {unit}"
            f"{'' if counted else ' or more'} in the {param}, the answer not counted: shorten it",
            param=param,
            code="context_length_exceeded",
        )
        self.length, self.most = length, most
        self.anthropic = f"prompt is too long: {length} {unit} > {most - 1} maximum"


_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def as_anthropic(error: APIError) -> bytes:
    """The body as Anthropic's clients read it."""
    kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.anthropic if isinstance(error, ContextError) else error.message
    refusal = AnthropicRefusal(type="error", error=AnthropicError(type=kind, message=message))
    return refusal.model_dump_json().encode()


def as_llama(error: APIError) -> bytes:
    """The body as llama.cpp's clients read it: they know too long a prompt by its type, its length and the context."""
    body = error.body.model_dump()
    if isinstance(error, ContextError):
        message = f"the request ({error.length} tokens) exceeds the available context size ({error.most}): shorten it"
        body["error"] |= {"message": message, "type": "exceed_context_size_error"}
        body["error"] |= {"n_prompt_tokens": error.length, "n_ctx": error.most}
    elif error.status in (401, 403, 404):
        body["error"]["type"] = _ANTHROPIC[error.status]
    return json.dumps(body).encode()


def as_ollama(error: APIError) -> bytes:
    """The body as Ollama's clients read it."""
    return OllamaRefusal(error=error.message).model_dump_json().encode()


def written(error: APIError, path: str) -> bytes:
    """The body as clients of ``path`` read it."""
    if path.startswith("/v1/messages"):
        return as_anthropic(error)
    if path.startswith("/api/"):
        return as_ollama(error)
    if path in ("/completion", "/completions", "/infill"):
        return as_llama(error)
    return error.body.model_dump_json().encode()


def cut(text: str, most: int) -> str:
    """``text``, in at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def spell(argument: Argument, names: Names = _SPELLED) -> str:
    """An argument as a request spells it, whose own ``names`` for ours are given."""
    if argument.name == "raw":  # what it asks for is a route here
        return "/v1/completions"
    name = names.get(argument.name, argument.name)
    return f"{name}={argument.value!r}" if argument.has_value else name


def of(error: BaseException, names: Names | None = None) -> APIError:
    """What a client reads of ``error``: all that it can mend, nothing internal. ``names``: spellings of parameters that
    differ from those of chats."""
    named = _SPELLED if names is None else {**_SPELLED, **names}

    def spell_(argument: Argument) -> str:
        return spell(argument, named)

    if isinstance(error, APIError):
        if names is not None and error.param is not None:
            error.param = names.get(error.param, error.param)
        return error
    if isinstance(error, MissingExtraError):
        return APIError(501, error.spelled(spell_), code="not_installed")
    if isinstance(error, MemoryLimitError):
        return APIError(400, error.spelled(spell_), param=_param(error, named), code="context_length_exceeded")
    if isinstance(error, (ComplexityError, NoTokenAllowedError)):  # what was asked for ended it
        return APIError(400, error.spelled(spell_), code="no_answer")
    if isinstance(error, OutpaceError) and isinstance(error, ValueError):
        return APIError(400, error.spelled(spell_), param=_param(error, named))
    if isinstance(error, OutpaceError):
        return APIError(500, error.spelled(spell_))
    return APIError(500, "an internal error; the server's log has it")


def _param(error: OutpaceError, names: Names) -> str | None:
    name = error.parameter
    return None if name is None or name == "raw" else names.get(name, name)
