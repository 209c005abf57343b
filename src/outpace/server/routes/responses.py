"""``POST /v1/responses``, streamed and not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.errors import OutpaceError
from outpace.server import errors, translate
from outpace.server.errors import APIError
from outpace.server.events import Part
from outpace.server.generation import Generation
from outpace.server.logprobs import of_chat
from outpace.server.responses import NAMES, Items, as_chat, echoed
from outpace.server.routes.answering import answer, asked, begun, each_part, service_of
from outpace.server.routes.described import describes
from outpace.server.schema.responses import ResponsesRequest
from outpace.server.served import Served
from outpace.server.streaming import ALIVE, EventStream, event
from outpace.server.translate import Work
from outpace.server.usage import usage

router = APIRouter()


@router.post("/v1/responses", openapi_extra=describes(ResponsesRequest), response_model=None)
async def responses(request: Request) -> Response:
    """Answer text, or a conversation of items."""
    body, settings = await asked(request, ResponsesRequest), service_of(request).settings

    def work(model: Served, scope: str) -> Work:
        return translate.chat(as_chat(body), model, settings, scope)

    try:
        generation = await begun(request, body.model, "resp_", work)
    except (APIError, OutpaceError) as error:
        raise errors.of(error, NAMES) from error
    said = Made(generation, body)
    if body.stream:
        return _stream(request, said)

    def take(part: Part) -> None:
        said.add(part)

    await each_part(request, generation, take)
    return await answer(request, said.whole)


class Made:
    """A response as it is made."""

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        self.generation = generation
        self._body = body
        self._items = Items(generation.id.partition("_")[2])
        self._last: Part | None = None

    def add(self, part: Part) -> list[dict[str, Any]]:
        """Events of what came."""
        generation, body = self.generation, self._body
        logprobs = of_chat(part.logprobs, body.top_logprobs or 0, generation.model)["content"] if body.include else []
        events = self._items.feed(part.pieces, logprobs)
        if part.result is not None:
            self._last = part
            events += self._items.finish(self.status)
        return events

    @property
    def status(self) -> str:
        """Of the response, and of its last item."""
        if self._last is None:
            return "in_progress"
        return "incomplete" if self._last.finish == "length" else "completed"

    def told(self, error: APIError | None = None) -> dict[str, Any]:
        """The response so far, or as ``error`` left it."""
        generation, status = self.generation, self.status if error is None else "failed"
        if error is not None:
            self._items.finish("incomplete")
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": why,
            "model": generation.model.name,
            "output": [] if status == "in_progress" else self._items.output,
            "usage": None,
            **echoed(self._body),
            "system_fingerprint": generation.model.fingerprint,
            "seed": generation.work.params.seed,
        }

    def whole(self) -> dict[str, Any]:
        """The response at its end. Counts tokens, so that it is not for the event loop."""
        generation, its = self.generation, usage(self.generation)
        assert self._last is not None
        assert self._last.result is not None
        tokenizer, thought = generation.model.tokenizer, self._items.reasoning
        thoughts = len(tokenizer.encode(thought, add_special=False)) if thought else 0
        cached = its["prompt_tokens_details"]["cached_tokens"]
        written = 0 if self._body.reuse_prefix is False else its["prompt_tokens"] - cached
        told = self.told() | {
            "stop_reason": self._last.stop_reason,
            "usage": {
                "input_tokens": its["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
                "output_tokens": its["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thoughts},
                "total_tokens": its["total_tokens"],
                "speculation": its["speculation"],
            },
        }
        if self._body.return_token_ids:
            told["prompt_token_ids"] = generation.work.prompts[0].tolist()
            told["token_ids"] = list(self._last.result.token_ids)
        return told


def _stream(request: Request, said: Made) -> EventStream:
    service, generation, numbers = service_of(request), said.generation, count()

    def line(its: dict[str, Any]) -> bytes:
        return event({**its, "sequence_number": next(numbers)}, its["type"])

    def last() -> bytes:
        whole = said.whole()
        return line({"type": f"response.{whole['status']}", "response": whole})

    def failed(error: APIError) -> bytes:
        return line({"type": "response.failed", "response": said.told(error)})

    async def events() -> AsyncGenerator[bytes]:
        begun_ = said.told()
        yield b"".join(line({"type": f"response.{its}", "response": begun_}) for its in ("created", "in_progress"))
        while generation.left:
            parts = await generation.parts(service.settings.keep_alive)
            if not parts:
                yield ALIVE
            elif data := b"".join(line(its) for part in parts for its in said.add(part)):
                yield data
        yield await service.work(last)

    return EventStream(events(), generation.aclose, service.settings.write_timeout, failed)
