"""What an answer cost, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.engine.results import Result
from outpace.server.generation import Generation


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's ``usage`` of a request whose choices have all ended, and ours of speculation."""
    results = generation.in_order
    prompts = list({result.request: result for result in results}.values())
    prompt = sum(result.prompt_tokens for result in prompts)
    said = 0 if generation.work.nothing else sum(result.completion_tokens for result in results)
    reused = sum(min(result.stats.reused_tokens, result.prompt_tokens) for result in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": reused},
        "speculation": speculation(results),
    }


def speculation(results: Sequence[Result]) -> dict[str, Any]:
    """Pooled over the choices. ``off_because``: why it was off in some or all steps, and other notes; None: it was on
    in every one."""
    steps = sum(result.stats.steps for result in results)
    tokens = sum(result.stats.tokens for result in results)
    return {
        "drafter": results[0].drafter,
        "acceptance": results[0].acceptance,
        "steps": steps,
        "drafted": sum(result.stats.drafted for result in results),
        "accepted": sum(result.stats.accepted for result in results),
        "tokens_per_step": tokens / steps if steps else 0.0,
        "off_because": _off(results),
    }


def _off(results: Sequence[Result]) -> str | None:
    said: list[str] = []
    for result in results:
        if result.drafter == "none":
            said.append("plain decoding was asked for, of this request or of the server")
        elif result.stats.steps_by_size.get(0):
            said.append(result.stats.decision)
        said.extend(result.notes)
    return "; ".join(dict.fromkeys(said)) or None
