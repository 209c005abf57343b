"""What chats and completions say alike: who answered, what it cost, what else was asked for."""

from __future__ import annotations

from typing import Any

from outpace.server.events import Part, Whole
from outpace.server.generation import Generation
from outpace.server.schema.common import Sampling
from outpace.server.streaming import DONE, event
from outpace.server.usage import speculation, usage


def head(generation: Generation, kind: str, streamed: Sampling | None = None) -> dict[str, Any]:
    """Of an answer, or of every chunk of a stream."""
    told: dict[str, Any] = {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.model.name,
        "system_fingerprint": generation.model.fingerprint,
    }
    if streamed is not None and _wants_usage(streamed):
        told["usage"] = None
    return told


def told_whole(generation: Generation, body: Sampling) -> dict[str, Any]:
    """The end of an answer that is not streamed."""
    told: dict[str, Any] = {"usage": usage(generation), "seed": generation.work.params.seed}
    if body.return_token_ids and len(generation.work.prompts) == 1:
        told["prompt_token_ids"] = generation.work.prompts[0].tolist()
    return told


def choice_extras(its: Whole | Part, body: Sampling) -> dict[str, Any]:
    """What a choice, or a part of one, says beside OpenAI's fields."""
    told: dict[str, Any] = {}
    if its.finish is not None:
        told["stop_reason"] = its.stop_reason
    if body.return_token_ids:
        told["token_ids"] = list(its.token_ids)
    if isinstance(its, Whole) and _traced(body):
        told["speculation"] = _written(its)
    return told


def part_extras(generation: Generation, part: Part, body: Sampling) -> dict[str, Any]:
    """What a chunk says of who wrote it; the last one also of the whole answer."""
    told: dict[str, Any] = {}
    if _traced(body):
        told["speculation"] = _written(part)
    if part.result is not None and len(generation.results) == generation.work.samples:
        told["speculation"] = {**speculation(generation.in_order), **told.get("speculation", {})}
        told["seed"] = generation.work.params.seed
    return told


def last_chunk(generation: Generation, top: dict[str, Any], body: Sampling) -> list[bytes]:
    """What ends a stream."""
    if not _wants_usage(body):
        return [DONE]
    return [event({**top, "choices": [], "usage": usage(generation)}), DONE]


def _written(its: Whole | Part) -> dict[str, Any]:
    sources, texts = [source for _, source in its.written], [text for text, _ in its.written]
    return {"sources": sources, "texts": texts, "drafted_now": its.drafted}


def _traced(body: Sampling) -> bool:
    return body.speculation is not None and body.speculation.trace


def _wants_usage(body: Sampling) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
