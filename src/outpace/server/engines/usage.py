"""What an answer cost, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.engine.results import Result
from outpace.server.engines.generation import Generation
from outpace.server.schema import Answer


class Speculation(Answer):
    """Of all choices together. ``off_because``: why no draft was made in some or all steps, and other notes."""

    drafter: str
    acceptance: str
    steps: int
    drafted: int
    accepted: int
    tokens_per_step: float
    off_because: str | None


class PromptDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    """OpenAI's ``usage``, and ``speculation``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    speculation: Speculation


def usage(generation: Generation) -> Usage:
    """Of a request whose choices have all ended."""
    results = generation.in_order
    prompts = list({result.request: result for result in results}.values())
    prompt = sum(result.prompt_tokens for result in prompts)
    generated = 0 if generation.work.nothing else sum(result.completion_tokens for result in results)
    reused = sum(min(result.stats.reused_tokens, result.prompt_tokens) for result in prompts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptDetails(cached_tokens=reused),
        speculation=speculation(results),
    )


def speculation(results: Sequence[Result]) -> Speculation:
    """Pooled over the choices."""
    steps = sum(result.stats.steps for result in results)
    tokens = sum(result.stats.tokens for result in results)
    return Speculation(
        drafter=results[0].drafter,
        acceptance=results[0].acceptance,
        steps=steps,
        drafted=sum(result.stats.drafted for result in results),
        accepted=sum(result.stats.accepted for result in results),
        tokens_per_step=tokens / steps if steps else 0.0,
        off_because=_off(results),
    )


def _off(results: Sequence[Result]) -> str | None:
    reasons: list[str] = []
    for result in results:
        if result.drafter == "none":
            reasons.append("plain decoding was asked for, of this request or of the server")
        elif result.stats.steps_by_size.get(0):
            reasons.append(result.stats.decision)
        reasons.extend(result.notes)
    return "; ".join(dict.fromkeys(reasons)) or None
