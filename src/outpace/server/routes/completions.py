"""``POST /v1/completions``: texts that go on, streamed and not."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.exact.sampling import TokenLogprob
from outpace.server import translate
from outpace.server.events import Part, Whole
from outpace.server.generation import Generation
from outpace.server.logprobs import Listed
from outpace.server.routes.answering import stream
from outpace.server.routes.choices import choices_of
from outpace.server.routes.described import describes
from outpace.server.routes.heads import choice_extras, head, last_chunk, part_extras
from outpace.server.schema.completions import CompletionRequest
from outpace.server.streaming import EventStream, event
from outpace.server.tools.base import Joined

router = APIRouter()


@router.post("/v1/completions", openapi_extra=describes(CompletionRequest), response_model=None)
async def completions(request: Request) -> Response:
    """Go on with a text, or with each of several."""
    return await choices_of(
        request, CompletionRequest, prefix="cmpl-", kind="text_completion",
        work=translate.completion, choice=choice, streamed=_stream,
    )  # fmt: skip


def choice(generation: Generation, its: Whole, body: CompletionRequest) -> dict[str, Any]:
    """A choice of an answer that is not streamed."""
    return _choice(_Told(generation, its.index, body), its, body)


class _Told:
    """What one choice has said so far: the prompt first, where it is repeated."""

    def __init__(self, generation: Generation, index: int, body: CompletionRequest) -> None:
        work = generation.work
        self._prompt = index // work.params.n
        self._echo = work.texts[self._prompt] if work.texts else ""
        self._first = int(work.prompts[self._prompt][0])
        self._listed = None if body.logprobs is None else Listed(body.logprobs, generation.model)
        self._begun = False

    def of(self, its: Whole | Part) -> tuple[str, dict[str, Any] | None]:
        """The next text, and its log-probabilities."""
        said = its.said if isinstance(its, Whole) else Joined()
        if isinstance(its, Part):
            said.add(its.pieces)
        text = said.text
        entries: list[TokenLogprob | None] = list(its.logprobs)
        if not self._begun:
            text = self._echo + text
            entries = [*its.prompt_logprobs, *entries]
        self._begun = True
        return text, None if self._listed is None else self._listed.of(entries, self._first)


def _choice(told: _Told, its: Whole | Part, body: CompletionRequest) -> dict[str, Any]:
    text, logprobs = told.of(its)
    found = {"index": its.index, "text": text, "logprobs": logprobs, "finish_reason": its.finish}
    return found | choice_extras(its, body)


def _stream(request: Request, generation: Generation, body: CompletionRequest) -> EventStream:
    top = head(generation, "text_completion", body)
    each: dict[int, _Told] = {}

    def told(parts: list[Part]) -> list[bytes]:
        out = []
        for part in parts:
            if part.index not in each:
                each[part.index] = _Told(generation, part.index, body)
            its = _choice(each[part.index], part, body)
            out.append(event({**top, "choices": [its], **part_extras(generation, part, body)}))
        return out

    return stream(request, generation, told, lambda: last_chunk(generation, top, body))
