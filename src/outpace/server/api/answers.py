"""What answers of chats and completions have in common: who answered, at what cost, and what else was asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

from pydantic import Field

from outpace.exact.sampling import TokenLogprob
from outpace.server.api.sampling import Parameters, Sampling
from outpace.server.engines.generation import Generation, Part, Speculation, Usage, Whole, speculation, usage
from outpace.server.engines.models import Served
from outpace.server.schema import Answer
from outpace.server.streaming import DONE, event


class Written(Answer):
    """Who wrote the text, where ``speculation.trace`` asks for it."""

    sources: list[str] = Field(description="A drafter's name, or the target's, for each of texts.")
    texts: list[str]
    drafted_now: int = Field(description="Draft tokens that were verified meanwhile.")


class WrittenAtLast(Speculation, Written):
    """The last chunk of a stream, and the whole answer."""


class Choice(Answer):
    """What choices say beside OpenAI's fields."""

    index: int
    finish_reason: str | None
    stop_reason: str | int | None = Field(default=None, description='A stop string, a token\'s id, or "deadline".')
    token_ids: list[int] | None = None
    speculation: Written | None = None


class AcceptedDrafts(Answer):
    """As vLLM and AIPerf name it. ``acceptance_histogram``: of steps with a draft, how many had 0, 1, 2, ... tokens of
    it accepted."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float = Field(description="Tokens gained in a step with a draft.")
    draft_acceptance_rate: float
    acceptance_histogram: list[int]


class Metrics(Answer):
    speculative_decoding: AcceptedDrafts


class Completed(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Metrics | None = Field(default=None, description="Of a request with one choice that could be drafted.")
    seed: int | None
    prompt_token_ids: list[int] | None = None


class Chunk(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    metrics: Metrics | None = None
    speculation: WrittenAtLast | Written | Speculation | None = None
    seed: int | None = None
    prompt_token_ids: list[int] | None = None


class Alternative(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(Alternative):
    top_logprobs: list[Alternative]


def head(generation: Generation, streamed: Sampling | None = None) -> dict[str, Any]:
    """The first fields of an answer, or of every chunk of a stream."""
    fields: dict[str, Any] = {
        "id": generation.id,
        "created": generation.created,
        "model": generation.model.name,
        "system_fingerprint": generation.model.fingerprint,
    }
    return fields | ({"usage": None} if streamed is not None and streamed.wants_usage else {})


def tail(generation: Generation, body: Parameters) -> dict[str, Any]:
    """The last fields of an answer that is not streamed."""
    fields: dict[str, Any] = {**_cost(generation), "seed": generation.work.params.seed}
    if body.return_token_ids and len(generation.work.prompts) == 1:
        fields["prompt_token_ids"] = generation.work.prompts[0].tolist()
    return fields


def choice_fields(choice: Whole | Part, body: Parameters) -> dict[str, Any]:
    """Fields of ``Choice``."""
    fields: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
    if choice.finish is not None:
        fields["stop_reason"] = choice.stop_reason
    if body.return_token_ids:
        fields["token_ids"] = list(choice.token_ids)
    if isinstance(choice, Whole) and body.traced:
        fields["speculation"] = _written(choice)
    return fields


def chunk_fields(generation: Generation, part: Part, body: Parameters) -> dict[str, Any]:
    """Fields of ``Chunk`` that belong to this part; the last chunk's are of the whole answer, too."""
    written = _written(part) if body.traced else None
    if part.result is None or len(generation.results) < generation.work.samples:
        seed = {"seed": generation.work.params.seed} if body.return_token_ids else {}
        return seed if written is None else {**seed, "speculation": written}
    total = speculation(generation.in_order)
    last = total if written is None else WrittenAtLast(**total.to_dict(), **written.to_dict())
    return {"speculation": last, "seed": generation.work.params.seed}


def last_events(
    generation: Generation, body: Sampling, chunk: Callable[..., Chunk], top: dict[str, Any]
) -> Callable[[], Awaitable[bytes]]:
    """The end of a stream; the usage in a ``chunk`` of its own, with the fields ``top``."""

    async def last() -> bytes:
        if not body.wants_usage:
            return DONE
        return event(chunk(**{**top, "choices": [], **_cost(generation)}).to_json()) + DONE

    return last


def _cost(generation: Generation) -> dict[str, Any]:
    """The fields ``usage`` and, where there is one choice that could be drafted, ``metrics``."""
    results = generation.in_order
    if len(results) > 1 or results[0].drafter == "none":
        return {"usage": usage(generation)}
    stats = results[0].stats
    reached = [*stats.drafted_at[:1], *stats.accepted_at, 0]  # steps with a draft of which 0, 1, 2, ... or more stayed
    steps = reached[0]
    drafts = AcceptedDrafts(
        num_spec_steps=steps,
        num_draft_tokens=stats.drafted,
        num_accepted_draft_tokens=stats.accepted,
        mean_acceptance_length=1 + stats.accepted / steps if steps else 1.0,
        draft_acceptance_rate=stats.acceptance_rate,
        acceptance_histogram=[here - further for here, further in pairwise(reached)],
    )
    return {"usage": usage(generation), "metrics": Metrics(speculative_decoding=drafts)}


def _written(choice: Whole | Part) -> Written:
    return Written(
        sources=[source for _, source in choice.written],
        texts=[text for text, _ in choice.written],
        drafted_now=choice.drafted,
    )


def chosen_tokens(entries: Sequence[TokenLogprob], top: int, model: Served) -> list[ChosenToken]:
    """Log-probabilities (the target's own, before any rule or temperature) as chats and responses have them, with the
    ``top`` likeliest alternatives a token."""

    def token(entry: Any) -> dict[str, Any]:
        return {"token": entry.text or "", "logprob": entry.logprob, "bytes": model.bytes_of(entry.token)}

    return [
        ChosenToken(**token(entry), top_logprobs=[Alternative(**token(other)) for other in entry.top[:top]])
        for entry in entries
    ]
