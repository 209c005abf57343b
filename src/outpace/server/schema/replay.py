"""``POST /v1/replay``: an answer with the request that it was given to."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outpace.server.schema.chat import ChatRequest
from outpace.server.schema.common import Body
from outpace.server.schema.completions import CompletionRequest
from outpace.server.schema.responses import ResponsesRequest


class Answered(BaseModel):
    """An answer as the server gave it, not streamed. What clients add to it is let be."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    object: Literal["chat.completion", "text_completion", "response"]
    choices: list[dict[str, Any]] = Field(default_factory=list, max_length=1024)
    output: list[dict[str, Any]] = Field(default_factory=list, max_length=1024, description="Of a response.")
    status: str | None = None
    token_ids: list[int] | None = None
    seed: int | None = None
    system_fingerprint: str | None = None


class ReplayRequest(Body):
    """``request`` is the body that was sent; ``token_ids`` and ``logprobs`` in ``answer`` are compared where it has
    them."""

    request: ChatRequest | CompletionRequest | ResponsesRequest
    answer: Answered
