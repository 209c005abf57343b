"""``POST /v1/completions``: text that goes on, without a chat template."""

from __future__ import annotations

from outpace.server.schema.chat import Grammar, ResponseFormat
from outpace.server.schema.common import Sampling


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | None = None
