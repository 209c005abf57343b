"""``POST /completion``: a text that goes on, as clients of llama.cpp's own server ask for it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from outpace.exact.sampling import TokenLogprob
from outpace.server.api import completions, sampling
from outpace.server.api.formats import Grammar, JsonSchema, ResponseFormat
from outpace.server.api.route import STREAMED, Encoder, Route, answered, event, service_of
from outpace.server.api.sampling import Sampling, SamplingFields, Speculation
from outpace.server.engines.generation import Generation, Part, PromptProgress, Whole, Work, usage
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Items

router = APIRouter(route_class=Route)

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
_NAMES = {  # of fields of completions, as here
    "max_tokens": "n_predict", "repetition_penalty": "repeat_penalty",
    "response_format": "json_schema", "response_format.json_schema.schema": "json_schema",
}  # fmt: skip


class LlamaRequest(SamplingFields):
    """llama.cpp's fields, with its defaults, and the parameters of completions by their own names."""

    prompt: str | Items[int]
    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = Field(default=None, description="Below 0, and by default: as many as the context holds.")
    n_probs: int | None = Field(default=None, description="Each token's log-probability, with so many others.")
    repeat_penalty: float | None = Field(default=None, description="repetition_penalty, of the whole text.")
    logit_bias: dict[str, float] | Items[tuple[int, float | Literal[False]]] | None = None
    grammar: str | None = Field(default=None, description="GBNF, or llguidance's Lark.")
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = Field(default=None, description="A stream says how much of the prompt was read.")
    speculation: Speculation | None = None
    post_sampling_probs: Literal[False] | None = None


class TokenProbability(Answer):
    id: int
    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[TokenProbability] | None = None


class Timings(Answer):
    """Milliseconds, and tokens a second."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class LlamaAnswer(Answer):
    """A part of the answer, or all of it. ``stop``: whether it is the last; only that one has what is None here."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = -1
    completion_probabilities: list[TokenProbability] | None = None
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    generation_settings: dict[str, Any] | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None


@router.post("/completions", response_model=LlamaAnswer, responses=STREAMED)
@router.post("/completion", response_model=LlamaAnswer, responses=STREAMED)
async def completion(request: Request, body: LlamaRequest) -> Answer | Response:
    """Go on with a text, as llama.cpp's clients ask."""

    def work(model: Served, scope: str) -> Work:
        settings = service_of(request).settings
        sampling.check_logprobs("n_probs", body.n_probs or 0, settings)
        made = completions.work(_as_completion(body), settings, model, scope)
        biases = body.logit_bias if isinstance(body.logit_bias, list) else []
        forbidden = {token: -math.inf for token, bias in biases if bias is False}
        return replace(made, params=made.params.with_(logit_bias={**made.params.logit_bias, **forbidden}))

    return await answered(request, body, LlamaEncoder, work, model=body.model, streamed=bool(body.stream))


def _as_completion(body: LlamaRequest) -> completions.CompletionRequest:
    """Raises APIError."""
    names = SamplingFields.model_fields.keys() & Sampling.model_fields.keys()
    found: dict[str, Any] = {**_DEFAULTS, **{name: each for name in names if (each := getattr(body, name)) is not None}}
    if found["top_k"] <= 0:
        found["top_k"] = 0
    if found["top_p"] == 0 or found["temperature"] <= 0:  # both mean greedy there
        found |= {"temperature": 0.0, "top_p": 1.0}
    if body.seed == -1 or body.seed == 2**32 - 1:
        found["seed"] = None
    if isinstance(biases := found.get("logit_bias"), list):
        found["logit_bias"] = {str(token): bias for token, bias in biases if bias is not False}
    found["repetition_penalty"] = body.repeat_penalty or found.get("repetition_penalty")
    if body.json_schema is not None:
        schema = JsonSchema(name="schema", schema=body.json_schema)
        found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    if body.grammar:
        found["grammar"] = Grammar(type="lark", value=body.grammar)
    most = -1 if body.n_predict is None or body.n_predict < 0 else body.n_predict
    if most == 0:
        raise APIError(400, "n_predict=0 asks for no answer: give at least 1", param="n_predict")
    return completions.asked(
        **found, prompt=body.prompt, max_tokens=most, logprobs=body.n_probs or None, speculation=body.speculation
    )


class LlamaEncoder(Encoder):
    """Events with what was gained, the last of them with what it cost; there is no ``[DONE]``."""

    prefix, names = "cmpl-", _NAMES
    body: LlamaRequest

    def __init__(self, generation: Generation, body: LlamaRequest) -> None:
        super().__init__(generation, body)
        self._probabilities = bool(body.n_probs)

    def whole(self) -> LlamaAnswer:
        choice = self.only
        tokens = list(choice.token_ids) if self.body.return_tokens else []
        return LlamaAnswer(content=choice.joined.text, tokens=tokens, **self._listed(choice), **self._last())

    @property
    def shows_progress(self) -> bool:
        return bool(self.body.return_progress)

    def progress(self) -> bytes:
        progress = self.generation.progress
        return event(LlamaAnswer(index=0, content="", tokens=[], stop=False, prompt_progress=progress).to_json())

    def part(self, part: Part) -> bytes:
        self.fold(part)
        if not (part.joined.text or part.token_ids):
            return b""
        tokens, listed = list(part.token_ids), self._listed(part)
        return event(
            LlamaAnswer(index=0, content=part.joined.text, tokens=tokens, stop=False, id_slot=-1, **listed).to_json()
        )

    def end(self) -> bytes:
        return event(LlamaAnswer(content="", tokens=[], **self._last()).to_json())

    def failed(self, error: APIError) -> bytes:
        return event(error.body.model_dump_json().encode())

    def _listed(self, made: Whole | Part) -> dict[str, Any]:
        if not self._probabilities:
            return {}
        return {"completion_probabilities": [self._probability(entry) for entry in made.logprobs]}

    def _probability(self, entry: TokenLogprob) -> TokenProbability:
        def of(each: Any, **more: Any) -> TokenProbability:
            bytes_ = self.generation.model.bytes_of(each.token)
            return TokenProbability(id=each.token, token=each.text or "", bytes=bytes_, logprob=each.logprob, **more)

        return of(entry, top_logprobs=[of(other) for other in entry.top[: self.body.n_probs]])

    def _last(self) -> dict[str, Any]:
        generation, choice = self.generation, self.only
        cost, now = usage(generation), time.perf_counter()
        first = generation.first_token_at or now
        reading, writing = first - generation.began, now - first
        new = cost.prompt_tokens - cost.prompt_tokens_details.cached_tokens
        word = choice.stop_reason if isinstance(choice.stop_reason, str) and choice.finish == "stop" else ""
        return {
            "index": 0,
            "stop": True,
            "id_slot": -1,
            "model": generation.model.name,
            "tokens_predicted": cost.completion_tokens,
            "tokens_evaluated": cost.prompt_tokens,
            "tokens_cached": cost.total_tokens,
            "truncated": False,
            "stop_type": "word" if word else "eos" if choice.finish == "stop" else "limit",
            "stopping_word": word,
            "generation_settings": generation.work.params.to_dict(),
            "timings": Timings(
                prompt_n=new,
                prompt_ms=1e3 * reading,
                prompt_per_second=new / reading if reading else 0.0,
                predicted_n=cost.completion_tokens,
                predicted_ms=1e3 * writing,
                predicted_per_second=cost.completion_tokens / writing if writing else 0.0,
                draft_n=cost.speculation.drafted,
                draft_n_accepted=cost.speculation.accepted,
            ),
        }
