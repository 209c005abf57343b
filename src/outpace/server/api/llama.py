"""``POST /completion`` and ``/infill``: a text that goes on, and what is between two, as clients of llama.cpp's own
server ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field, RootModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from outpace.engine.intake import encode_raw
from outpace.exact.sampling import TokenLogprob
from outpace.server.api import completions, sampling
from outpace.server.api.formats import Grammar, JsonSchema, ResponseFormat
from outpace.server.api.route import STREAMED, Encoder, Route, answered, event, service_of
from outpace.server.api.sampling import Sampling, SamplingFields, Speculation
from outpace.server.engines.generation import Generation, Part, PromptProgress, Timings, Whole, Work, timings
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items
from outpace.server.settings import ServerSettings

router = APIRouter(route_class=Route)

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
_OFF = {  # ways of sampling that are not offered, as they are spelled there where they are off
    "adaptive_target": -1.0, "adaptive_decay": 0.9, "dry_multiplier": 0.0, "dynatemp_range": 0.0, "mirostat": 0,
    "typical_p": 1.0, "xtc_probability": 0.0,
}  # fmt: skip
_BIASED, _TEXTS = 1024, 256  # tokens of a text in logit_bias; its texts
_NAMES = {  # of fields of completions, as here
    "max_tokens": "n_predict", "suffix": "input_suffix", "repetition_penalty": "repeat_penalty",
    "response_format": "json_schema", "response_format.json_schema.schema": "json_schema",
}  # fmt: skip


class PromptObject(Body):
    """A prompt as llama.cpp has those with pictures, of which there are none here."""

    prompt_string: str
    multimodal_data: Items[str] | None = Field(default=None, max_length=0)


Text = str | PromptObject | Items[int | str]  # the last: pieces of one prompt


class LlamaFields(SamplingFields):
    """llama.cpp's fields, with its defaults, and the parameters of completions by their own names."""

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = Field(
        default=None, description="Below 0, and by default: as many as the context holds; 0: the prompt is only read."
    )
    n_probs: int | None = Field(default=None, description="Each token's log-probability, with so many others.")
    repeat_penalty: float | None = Field(default=None, description="repetition_penalty, of the whole text.")
    logit_bias: dict[str, float] | Items[tuple[int | str, float | Literal[False]]] | None = Field(
        default=None, description="Of token ids, or of all tokens of a text; false forbids."
    )
    grammar: str | None = Field(default=None, description="GBNF, or llguidance's Lark.")
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    response_fields: Items[str] | None = Field(
        default=None, description="The answer has these alone, or the last event of a stream; a/b: b of a."
    )
    timings_per_token: bool | None = Field(default=None, description="A stream's parts have timings.")
    return_progress: bool | None = Field(default=None, description="A stream says how much of the prompt was read.")
    speculation: Speculation | None = None
    post_sampling_probs: Literal[False] | None = None


class LlamaRequest(LlamaFields):
    prompt: Text | Items[Text] = Field(description="Several, of which one is no text: the answer is a list.")


class ExtraFile(Body):
    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields):
    """What is too much for the context goes: of other files the first tokens, then what is far from the middle."""

    input_prefix: str
    input_suffix: str
    input_extra: Items[ExtraFile] | None = Field(default=None, description="Other files, or parts of them.")
    prompt: str | None = Field(default=None, description="What follows input_prefix, and may spell special tokens.")


class TokenProbability(Answer):
    id: int
    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[TokenProbability] | None = None


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
    truncated: bool | None = Field(default=None, description="Whether the context ended it.")
    has_new_line: bool | None = None
    prompt: str | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    generation_settings: dict[str, Any] | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None


class LlamaAnswers(RootModel[list[LlamaAnswer]]):
    """Those to several prompts."""


@router.post("/completions", response_model=LlamaAnswer | LlamaAnswers, responses=STREAMED)
@router.post("/completion", response_model=LlamaAnswer | LlamaAnswers, responses=STREAMED)
async def completion(request: Request, body: LlamaRequest) -> Answer | Response:
    """Go on with a text, or with each of several, as llama.cpp's clients ask."""

    def work(model: Served, scope: str) -> Work:
        return _work(body, _prompt(body.prompt, model), service_of(request).settings, model, scope)

    return await answered(request, body, LlamaEncoder, work, model=body.model, streamed=bool(body.stream))


@router.post("/infill", response_model=LlamaAnswer, responses=STREAMED)
async def infill(request: Request, body: InfillRequest) -> Answer | Response:
    """Write what is between two texts, as llama.cpp's clients ask; only models with tokens for that can."""
    settings = service_of(request).settings

    def work(model: Served, scope: str) -> Work:
        before, after = body.input_prefix, body.input_suffix
        files = [(each.filename, each.text) for each in body.input_extra or ()]
        sampling.check_together(
            [before, after, *map("".join, files)], model, "input_extra" if files else "input_prefix"
        )
        for text in (name + text for name, text in files):
            sampling.check_size(text, model, "input_extra", settings.max_values)
        begun = body.prompt or ""
        sampling.check_text(begun, model, "prompt", special=True)
        (ids,) = completions.between(
            model, [completions.plain(before, model, "input_prefix", settings)], after, _most(body, settings), settings,
            files=files, begun=model.tokenizer.encode(begun, add_special=False, parse_special=True).tolist(),
        )  # fmt: skip
        made = _work(body, ids.tolist(), settings, model, scope)
        return replace(made, params=completions.ended(made.params, model))

    return await answered(request, body, LlamaEncoder, work, model=body.model, streamed=bool(body.stream))


def _work(body: LlamaFields, prompt: Any, settings: ServerSettings, model: Served, scope: str) -> Work:
    """``prompt``: as completions take it. Raises ParameterError, RuleError or APIError."""
    sampling.check_logprobs("n_probs", body.n_probs or 0, settings)
    made = completions.work(_as_completion(body, prompt, settings), settings, model, scope)
    params = made.params.with_(logit_bias={**made.params.logit_bias, **_biases(body, model)})
    return replace(made, params=params, nothing=body.n_predict == 0)


def _most(body: LlamaFields, settings: ServerSettings) -> int | None:
    """Tokens to write; None: as many as the context holds. Where n_predict is 0 it is one, which the answer leaves out:
    the prompt is read, so that a later one finds its KV."""
    most = settings.sampling.get("max_tokens", -1) if body.n_predict is None else max(body.n_predict, -1)
    return None if most is None else sampling.bounded(most or 1)


def _as_completion(body: LlamaFields, prompt: Any, settings: ServerSettings) -> completions.CompletionRequest:
    """Raises APIError."""
    names = (SamplingFields.model_fields.keys() & Sampling.model_fields.keys()) - {"logit_bias"}
    given = {name: each for name in names if (each := getattr(body, name)) is not None}
    found: dict[str, Any] = {**_DEFAULTS, **settings.sampling, **given}
    if found["top_k"] <= 0:
        found["top_k"] = 0
    if found["top_p"] == 0 or found["temperature"] <= 0:  # both mean greedy there
        found |= {"temperature": 0.0, "top_p": 1.0}
    if body.seed == 2**32 - 1:
        found["seed"] = -1
    found["repetition_penalty"] = body.repeat_penalty or found.get("repetition_penalty")
    if body.json_schema is not None:
        schema = JsonSchema(name="schema", schema=body.json_schema)
        found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    if body.grammar:
        found["grammar"] = Grammar(type="lark", value=body.grammar)
    most = _most(body, settings)
    more = {
        "max_tokens": -1 if most is None else most,
        "logprobs": body.n_probs or None,
        "speculation": body.speculation,
    }
    return completions.asked(**{**found, **more}, prompt=prompt)


def _prompt(given: Text | list[Text], model: Served) -> str | list[str] | list[list[int]]:
    """As completions take it. Raises APIError."""
    several = isinstance(given, list) and not any(isinstance(each, int) for each in given)
    many: Sequence[Any] = given if several and isinstance(given, list) else [given]
    texts = [each.prompt_string if isinstance(each, PromptObject) else each for each in many]
    if all(isinstance(each, str) for each in texts):
        return texts
    return [_tokens([each] if isinstance(each, str) else each, model) for each in texts]


def _tokens(pieces: Sequence[int | str], model: Served) -> list[int]:
    """Of texts and token ids that follow one another; the first alone begins with what a model expects there."""
    found = list[int]()
    for i, piece in enumerate(pieces):
        if isinstance(piece, int):
            found.append(piece)
        else:
            sampling.check_text(piece, model, "prompt", special=True)
            found += encode_raw(piece, model.tokenizer, add_special=i == 0).tolist()
    return found


def _biases(body: LlamaFields, model: Served) -> dict[int, float]:
    """By token id. Raises APIError."""
    given = body.logit_bias or {}
    found, texts = dict[int, float](), 0
    for of, bias in given.items() if isinstance(given, dict) else given:
        if isinstance(of, str) and isinstance(given, dict) and of.isascii() and of.isdecimal():
            of = sampling.token_id(of)
        if isinstance(of, int):
            tokens = model.ids([of], "logit_bias").tolist()
        else:
            texts += 1
            if texts > _TEXTS:
                raise APIError(400, f"logit_bias has more than {_TEXTS} texts: give token ids", param="logit_bias")
            sampling.check_size(of, model, "logit_bias", _BIASED)
            tokens = model.tokenizer.encode(of, add_special=False).tolist()
        found |= dict.fromkeys(tokens, -math.inf if bias is False else bias)
    return found


class LlamaEncoder(Encoder):
    """Events with what was gained, the last of each choice with what it cost; there is no ``[DONE]``."""

    prefix, names = "cmpl-", _NAMES
    body: LlamaFields

    def __init__(self, generation: Generation, body: LlamaFields) -> None:
        super().__init__(generation, body)
        self._probabilities = bool(body.n_probs)

    def whole(self) -> Response:
        found = [self._shown(choice) for choice in self.folded]
        return Response(to_json(found[0] if len(found) == 1 else found), media_type="application/json")

    def _shown(self, choice: Whole) -> dict[str, Any]:
        tokens = list(choice.token_ids) if self.body.return_tokens else []
        return self._ended(choice, content=choice.joined.text, tokens=tokens, **self._listed(choice))

    def _ended(self, choice: Whole, **said: Any) -> dict[str, Any]:
        """The fields of an answer, or of the last event of a stream, that are asked for."""
        answer = LlamaAnswer(**said, **self._last(choice)).to_dict()
        if not self.body.response_fields:
            return answer
        shown = dict[str, Any]()
        for name in self.body.response_fields:
            found: Any = answer
            for part in name.split("/"):
                found = found.get(part) if isinstance(found, dict) else None
            if found is not None:
                shown[name] = found
        return shown

    @property
    def shows_progress(self) -> bool:
        return bool(self.body.return_progress)

    def progress(self) -> bytes:
        return self._event(index=0, prompt_progress=self.generation.progress)

    def part(self, part: Part) -> bytes:
        self.fold(part)
        if not (part.joined.text or part.token_ids):
            return b""
        tokens = list(part.token_ids)
        return self._event(index=part.index, content=part.joined.text, tokens=tokens, **self._listed(part))

    def _event(self, content: str = "", tokens: Sequence[int] = (), **more: Any) -> bytes:
        if self.body.timings_per_token:
            more["timings"] = timings(self.generation)
        return event(LlamaAnswer(content=content, tokens=list(tokens), stop=False, id_slot=-1, **more).to_json())

    def end(self) -> bytes:
        return b"".join(event(to_json(self._ended(choice, content="", tokens=[]))) for choice in self.folded)

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

    def _last(self, choice: Whole) -> dict[str, Any]:
        generation, result = self.generation, self.generation.results[choice.index]
        model, params, prompt = generation.model, generation.work.params, generation.work.prompts[choice.index]
        predicted = 0 if generation.work.nothing else result.completion_tokens
        total = len(prompt) + predicted
        word = choice.stop_reason if isinstance(choice.stop_reason, str) and choice.finish == "stop" else ""
        limited, most = choice.finish != "stop", 0 if generation.work.nothing else params.max_tokens or -1
        return {
            "index": choice.index,
            "stop": True,
            "id_slot": -1,
            "model": model.name,
            "tokens_predicted": predicted,
            "tokens_evaluated": len(prompt),
            "tokens_cached": total,
            "truncated": limited and total >= model.info.max_length,
            "has_new_line": "\n" in choice.joined.text,
            "prompt": model.tokenizer.decode(prompt, skip_special=False),
            "stop_type": "word" if word else "limit" if limited else "eos",
            "stopping_word": word,
            "generation_settings": {
                **_OFF, **params.to_dict(), "n_predict": most, "n_probs": self.body.n_probs or 0,
                "repeat_penalty": params.repetition_penalty,
            },
            "timings": timings(generation),
        }  # fmt: skip
