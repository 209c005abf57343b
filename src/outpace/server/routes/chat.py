"""``POST /v1/chat/completions``, streamed and not."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.server import translate
from outpace.server.events import Part, Whole
from outpace.server.generation import Generation
from outpace.server.logprobs import of_chat
from outpace.server.routes.answering import stream
from outpace.server.routes.choices import choices_of
from outpace.server.routes.described import describes
from outpace.server.routes.heads import choice_extras, head, last_chunk, part_extras
from outpace.server.schema.chat import ChatRequest
from outpace.server.streaming import EventStream, event
from outpace.server.tools.base import Piece, Reasoning, Text, ToolStart

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=describes(ChatRequest), response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await choices_of(
        request, ChatRequest, prefix="chatcmpl-", kind="chat.completion",
        work=translate.chat, choice=choice, streamed=_stream,
    )  # fmt: skip


def choice(generation: Generation, its: Whole, body: ChatRequest) -> dict[str, Any]:
    """A choice of an answer that is not streamed."""
    said = its.said
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.calls and not said.text:
        message["content"] = None
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    logprobs = of_chat(its.logprobs, body.top_logprobs or 0, generation.model) if body.logprobs else None
    told = {"index": its.index, "message": message, "logprobs": logprobs, "finish_reason": its.finish}
    return told | choice_extras(its, body)


def _stream(request: Request, generation: Generation, body: ChatRequest) -> EventStream:
    top = head(generation, "chat.completion.chunk", body)
    begun_: set[int] = set()

    def told(parts: list[Part]) -> list[bytes]:
        out = []
        for part in parts:
            if part.index not in begun_:
                begun_.add(part.index)
                first = {**top, "choices": [_chunk(part.index, {"role": "assistant", "content": ""})]}
                if body.return_token_ids:
                    first["prompt_token_ids"] = generation.work.prompts[0].tolist()
                out.append(event(first))
            chunk = _chunk(part.index, _delta(part.pieces), part.finish)
            if body.logprobs:
                chunk["logprobs"] = of_chat(part.logprobs, body.top_logprobs or 0, generation.model)
            chunk |= choice_extras(part, body)
            out.append(event({**top, "choices": [chunk], **part_extras(generation, part, body)}))
        return out

    return stream(request, generation, told, lambda: last_chunk(generation, top, body))


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _delta(pieces: list[Piece]) -> dict[str, Any]:
    """Neighbouring pieces of a kind are one."""
    delta: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Text):
            delta["content"] = delta.get("content", "") + piece.text
        elif isinstance(piece, Reasoning):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
        elif isinstance(piece, ToolStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"index": piece.index, "id": piece.id, "type": "function", "function": function})
        elif calls and calls[-1]["index"] == piece.index:
            calls[-1]["function"]["arguments"] += piece.text
        else:
            calls.append({"index": piece.index, "function": {"arguments": piece.text}})
    if calls:
        delta["tool_calls"] = calls
    return delta
