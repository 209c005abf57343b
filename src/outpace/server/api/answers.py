"""What answers of chats and completions have in common: who answered, at what cost, and what else was asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

from pydantic import Field

from outpace.exact.sampling import TokenLogprob
from outpace.server.api.route import DONE, Encoder, event
from outpace.server.api.sampling import Sampling
from outpace.server.conversation.pieces import Begin, More
from outpace.server.engines.generation import (
    Generation,
    Part,
    PromptProgress,
    Speculation,
    Timings,
    Usage,
    Whole,
    speculation,
    timings,
    usage,
)
from outpace.server.engines.models import Served
from outpace.server.schema import Answer


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


class PromptLogprob(Answer):
    """As vLLM names it. ``rank``: among all tokens, of those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # by token id; None stands for the first, which follows nothing


def prompt_logprobs(entries: Sequence[TokenLogprob | None], top: int) -> PromptLogprobs:
    """Of each token of a prompt, with the ``top`` likeliest in its place."""

    def of(entry: TokenLogprob) -> dict[int, PromptLogprob]:
        ranks = {other.token: i + 1 for i, other in enumerate(entry.top)}
        found = PromptLogprob(logprob=entry.logprob, rank=ranks.get(entry.token), decoded_token=entry.text)
        others = {
            other.token: PromptLogprob(logprob=other.logprob, rank=i + 1, decoded_token=other.text)
            for i, other in enumerate(entry.top[:top])
        }
        return {entry.token: found, **others}

    return [None if entry is None else of(entry) for entry in entries]


class Completed(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Metrics | None = Field(default=None, description="Of a request with one choice that could be drafted.")
    seed: int | None
    prompt_token_ids: list[int] | None = None
    timings: Timings | None = None


class UsageSoFar(Answer):
    """Of a chunk, where `continuous_usage_stats` asks for it; the last one has all of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Chunk(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | UsageSoFar | None = None
    metrics: Metrics | None = None
    speculation: WrittenAtLast | Written | Speculation | None = None
    seed: int | None = None
    prompt_token_ids: list[int] | None = None
    prompt_progress: PromptProgress | None = None
    timings: Timings | None = None


class Alternative(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(Alternative):
    top_logprobs: list[Alternative]


class Choices(Encoder):
    """An answer that is choices, or a stream of chunks with one each, of a chat or of texts."""

    answer: ClassVar[tuple[type[Completed], str]]  # and its ``object``
    chunk: ClassVar[tuple[type[Chunk], str]]
    body: Sampling

    def __init__(self, generation: Generation, body: Sampling) -> None:
        super().__init__(generation, body)
        self._tokens = sum(len(part.token_ids) for part in generation.resumed.values())  # that chunks had
        self._first: dict[str, Any] = {
            "id": generation.id,
            "created": generation.created,
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
        }

    @abstractmethod
    def choice(self, made: Whole | Part) -> Choice:
        """A choice of the whole answer, or what a chunk has of one."""

    def choices(self) -> list[Choice]:
        """What was folded."""
        return [self.choice(whole) for whole in self.folded]

    def of_prompt(self) -> dict[str, Any]:
        """Fields of the whole answer about its prompt."""
        return {}

    def whole(self) -> Completed:
        generation, (kind, name) = self.generation, self.answer
        fields: dict[str, Any] = {**_cost(generation), "seed": generation.work.params.seed}
        if self.body.return_token_ids and len(generation.work.prompts) == 1:
            fields["prompt_token_ids"] = generation.work.prompts[0].tolist()
        fields |= self._timings() | self.of_prompt()
        return kind(**{**self._first, "object": name, "choices": self.choices(), **fields})

    def part(self, part: Part) -> bytes:
        """Why a choice ended has a chunk of its own, after the last words."""
        if part.finish is None or not self.says(part):
            return self._chunk(part)
        end = Part(part.index, [], finish=part.finish, stop_reason=part.stop_reason, result=part.result)
        return self._chunk(replace(part, finish=None, stop_reason=None, result=None)) + self._chunk(end)

    def says(self, part: Part) -> bool:
        """Whether a part has words."""
        return any(isinstance(each, Begin | More) for each in part.events)

    def _chunk(self, part: Part) -> bytes:
        self._tokens += len(part.token_ids)
        return self.event([self.choice(part)], **self._chunk_fields(part), **self._timings())

    @property
    def shows_progress(self) -> bool:
        return bool(self.body.return_progress)

    def progress(self) -> bytes:
        return self.event([], prompt_progress=self.generation.progress, **self._timings())

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings(self.generation)} if self.body.timings_per_token else {}

    def event(self, choices: list[Choice], **fields: Any) -> bytes:
        """A chunk."""
        kind, name = self.chunk
        usage_ = {"usage": self._so_far()} if self.body.wants_usage else {}
        return event(kind(**{**self._first, **usage_, "object": name, "choices": choices, **fields}).to_json())

    def _so_far(self) -> UsageSoFar | None:
        options = self.body.stream_options
        if options is None or not options.continuous_usage_stats:
            return None
        prompt, written = sum(map(len, self.generation.work.prompts)), self._tokens
        return UsageSoFar(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)

    def end(self) -> bytes:
        cost = _cost(self.generation) if self.body.wants_usage else {}
        return (self.event([], **cost, **self._timings()) if cost else b"") + DONE

    def fields(self, choice: Whole | Part) -> dict[str, Any]:
        """Fields of ``Choice``."""
        fields: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        if choice.finish is not None:
            fields["stop_reason"] = choice.stop_reason
        if self.body.return_token_ids:
            fields["token_ids"] = list(choice.token_ids)
        if isinstance(choice, Whole) and self.body.traced:
            fields["speculation"] = _written(choice)
        return fields

    def _chunk_fields(self, part: Part) -> dict[str, Any]:
        """Fields of ``Chunk`` that belong to this part; the last chunk's are of the whole answer, too."""
        generation, written = self.generation, _written(part) if self.body.traced else None
        seed = {"seed": generation.work.params.seed}
        if part.result is None or len(generation.results) < generation.work.samples:
            return (seed if self.body.return_token_ids else {}) | ({} if written is None else {"speculation": written})
        total = speculation(generation.in_order, generation.work.notes)
        last = total if written is None else WrittenAtLast(**total.to_dict(), **written.to_dict())
        return {"speculation": last, **seed}


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
