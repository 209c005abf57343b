"""``POST /v1/replay``: does the request still get this answer, bit for bit? If not, where it first departs.

The recorded tokens are drafted, so that each forward checks as many as fit. The target chooses every token again, under
the request's parameters and noise, whatever else runs and whoever drafted then. So an answer that was changed in one
token departs from its replay in that token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request

from outpace.common.arrays import F32, I32
from outpace.engine.engine import Engine
from outpace.engine.results import Result
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.exact.noise import Noise, Stream
from outpace.exact.sampling import scores
from outpace.measure import same
from outpace.params import SamplingParams
from outpace.server import errors
from outpace.server.api import chat, completions, responses
from outpace.server.api.answers import Choices
from outpace.server.api.chat import ChatEncoder, ChatRequest
from outpace.server.api.completions import CompletionRequest, TextEncoder
from outpace.server.api.responses import ResponseEncoder, ResponsesRequest
from outpace.server.api.route import Encoder, Route, begun, each_part, service_of
from outpace.server.engines.generation import Work
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body

router = APIRouter(route_class=Route)

_Asked = ChatRequest | CompletionRequest | ResponsesRequest

_NOT_COMPARED = ("speculation", "index")  # of a choice: how it was made
_LIKE_STOP = ("tool_calls", "function_call")  # what OpenAI calls an answer that stopped after a call
_ANSWERS: dict[type[_Asked], tuple[str, type[Encoder]]] = {  # their ``object``, and who writes them
    ChatRequest: ("chat.completion", ChatEncoder),
    CompletionRequest: ("text_completion", TextEncoder),
    ResponsesRequest: ("response", ResponseEncoder),
}


class RecordedAnswer(BaseModel):
    """An answer as the server gave it, not streamed. What clients add to it is ignored."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    object: Literal["chat.completion", "text_completion", "response"]
    choices: list[dict[str, Any]] = Field(default_factory=list, max_length=1024, fail_fast=True)
    output: list[dict[str, Any]] = Field(
        default_factory=list, max_length=1024, fail_fast=True, description="Of a response."
    )
    status: str | None = None
    token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    seed: int | None = None
    system_fingerprint: str | None = None


def _asks_for(request: Any) -> str:
    if isinstance(request, BaseModel):
        return type(request).__name__
    fields = [name for name in _BY_FIELD if isinstance(request, dict) and name in request]
    return _BY_FIELD[fields[0]].__name__ if fields else ChatRequest.__name__


_BY_FIELD: dict[str, type[_Asked]] = {"messages": ChatRequest, "input": ResponsesRequest, "prompt": CompletionRequest}


class ReplayRequest(Body):
    """``request`` is the body that was sent; ``token_ids`` and ``logprobs`` in ``answer`` are compared where it has
    them."""

    bulk = 8  # log-probabilities are many

    request: Annotated[
        Annotated[ChatRequest, Tag("ChatRequest")]
        | Annotated[CompletionRequest, Tag("CompletionRequest")]
        | Annotated[ResponsesRequest, Tag("ResponsesRequest")],
        Discriminator(_asks_for),
    ]
    answer: RecordedAnswer


class Difference(Answer):
    """Where the answer first departs: ``what`` (a token, a logprob, a field), at ``index`` in it. ``gap``: how far the
    worse of two tokens scores below the best."""

    what: str
    index: int
    recorded: Any
    now: Any
    gap: float | None
    near_tie: bool


class ReplayedChoice(Answer):
    index: int
    identical: bool
    difference: Difference | None


class Fingerprints(Answer):
    recorded: str | None
    now: str


class Replayed(Answer):
    object: Literal["replay"]
    identical: bool
    tokens: int
    system_fingerprint: Fingerprints
    choices: list[ReplayedChoice]


@router.post("/v1/replay", response_model=Replayed)
async def replayed(request: Request, body: ReplayRequest) -> Replayed:
    """Generate an answer again and compare."""
    service = service_of(request)
    asks = _asks(body)
    then, recorded = await service.work(_kept, body.answer)
    wish = body.request.speculation
    acceptance = (wish and wish.acceptance) or "coupled"

    def again(model: Served, scope: str) -> Work:
        if isinstance(asks, CompletionRequest):
            work = completions.work(asks, service.settings, model, scope)
        else:
            talk = responses.as_chat(asks) if isinstance(asks, ResponsesRequest) else asks
            work = chat.work(talk, service.settings, model, scope)
        if work.samples != len(recorded):
            raise APIError(
                400, f"the request has {work.samples} choices, the answer {len(recorded)}", param="answer.choices"
            )
        known = work.params.with_(seed=asks.seed)  # a fresh one would be that of no answer
        params, options = prepared(model.serving.engine, work.prompts, known, recorded, acceptance)
        return replace(work, params=params, options={**work.options, **options})

    try:
        first = await begun(request, asks.model, "replay-", again)
    except (APIError, OutpaceError) as error:
        raise errors.of(error, responses.NAMES if isinstance(asks, ResponsesRequest) else {}) from error
    encoder = _ANSWERS[type(asks)][1](first, asks)
    await each_part(request, first, encoder.fold)
    results = first.in_order
    base = first.work.params.with_(rules=first.work.params.rules[:-1])  # without the rule that has the answer drafted

    def compared() -> tuple[list[same.Difference | None], tuple[SamplingParams, Drafted] | None]:
        differences = []
        for choice, answer, result, before in zip(_choices(encoder), recorded, results, then, strict=True):
            kept = {name: value for name, value in before.items() if name not in _NOT_COMPARED}
            differences.append(same.difference(answer, same.Output.of(result)) or _differs(kept, choice, ""))
        return differences, watching(first.model.serving.engine, first.work.prompts, base, recorded, differences)

    differences, second = await service.work(compared)
    if second is not None:
        closer, drafted = replace(first.work, params=second[0], parser=None), second[1]
        watched = await begun(request, asks.model, "replay-", lambda model, scope: closer)
        await each_part(request, watched, lambda part: None)
        differences = await service.work(lambda: drafted.measured(differences, base, results))
    tokens = sum(len(result.token_ids) for result in results)
    prints = Fingerprints(recorded=body.answer.system_fingerprint, now=first.model.fingerprint)
    return await service.work(_told, differences, tokens, prints)


def _told(differences: Sequence[same.Difference | None], tokens: int, prints: Fingerprints) -> Replayed:
    choices = []
    for i, each in enumerate(differences):
        difference = None if each is None else Difference(**each.to_dict("recorded", "now"))
        choices.append(ReplayedChoice(index=i, identical=each is None, difference=difference))
    return Replayed(
        object="replay", identical=not any(differences), tokens=tokens, system_fingerprint=prints, choices=choices
    )


def _choices(encoder: Encoder) -> list[dict[str, Any]]:
    """Today's choices; a response is its only one."""
    if isinstance(encoder, ResponseEncoder):
        return [_bare([item.to_dict() for item in encoder.items()])]
    assert isinstance(encoder, Choices)
    return [choice.to_dict() for choice in encoder.choices()]


def _bare(output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A response's items as a choice: without their ids, which are new in every answer."""
    return {"output": [{name: value for name, value in item.items() if name != "id"} for item in output]}


def _asks(body: ReplayRequest) -> _Asked:
    """The request as it is asked again. Raises APIError."""
    request = body.request
    if body.answer.object != _ANSWERS[type(request)][0]:
        raise APIError(
            400, f"the answer is a {body.answer.object}, the request asks for another", param="answer.object"
        )
    if isinstance(request, CompletionRequest) and request.echo:
        raise APIError(400, "an answer that repeats its prompt is not replayed: leave echo out", param="request.echo")
    seed = request.seed if request.seed is not None else body.answer.seed
    plain = dict.fromkeys(("stream", "stream_options", "speculation", "deadline"))
    return request.model_copy(update={**plain, "seed": seed, "return_token_ids": True})


def _kept(answer: RecordedAnswer) -> tuple[list[dict[str, Any]], list[same.Output]]:
    """The choices of an answer: as they came, and what of them the engine's are compared with. Raises APIError."""
    if answer.object == "response":
        return [_bare(answer.output)], [_recorded_response(answer)]
    return answer.choices, [_recorded(i, each) for i, each in enumerate(answer.choices)]


def _recorded(index: int, choice: dict[str, Any]) -> same.Output:
    """A recorded choice. Raises APIError."""
    try:
        ids = choice.get("token_ids")
        listed = choice.get("logprobs") or {}
        logprobs = listed.get("token_logprobs")
        if logprobs is None and listed.get("content") is not None:
            logprobs = [entry["logprob"] for entry in listed["content"]]
        text = choice["text"] if "text" in choice else choice["message"].get("content")
        finish = choice.get("finish_reason")
        if not isinstance(text, str | None) or not isinstance(finish, str | None):
            raise TypeError("its text or finish_reason is no text")
        if ids is not None and not all(type(token) is int for token in ids):
            raise TypeError("a token id is no whole number")
        return same.Output(
            None if ids is None else tuple(ids),
            (text or "") if ids is None else None,
            None if logprobs is None else tuple(float(logprob) for logprob in logprobs),
            "stop" if finish in _LIKE_STOP else finish,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise APIError(
            400, f"answer.choices.{index} is no choice of this server's ({error})", param=f"answer.choices.{index}"
        ) from None


def _recorded_response(answer: RecordedAnswer) -> same.Output:
    """A recorded response. Raises APIError."""
    try:
        parts = [part for item in answer.output if item.get("type") == "message" for part in item["content"]]
        logprobs = [float(entry["logprob"]) for part in parts for entry in part.get("logprobs") or ()]
        text = "".join([part["text"] for part in parts])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise APIError(400, f"answer.output is none of this server's ({error!r})", param="answer.output") from None
    if answer.token_ids is None and [item.get("type") for item in answer.output] != ["message"]:
        raise APIError(
            400, "thoughts and calls are replayed by their tokens: ask with return_token_ids", param="answer.token_ids"
        )
    finish = {"completed": "stop", "incomplete": "length"}.get(answer.status or "")
    ids = None if answer.token_ids is None else tuple(answer.token_ids)
    return same.Output(ids, text if ids is None else None, tuple(logprobs) or None, finish)


def _differs(a: Any, b: Any, path: str) -> same.Difference | None:
    """Where ``a`` differs from ``b``: text, calls, alternatives; fields that clients added and left empty do not
    count."""
    if isinstance(a, dict) and isinstance(b, dict):
        each = (_differs(value, b.get(name), f"{path}.{name}".lstrip(".")) for name, value in a.items())
        return next((parted for parted in each if parted is not None), None)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if (parted := _differs(x, y, path)) is not None:
                return replace(parted, index=i)
        return None
    if a == b and type(a) is type(b):
        return None
    if isinstance(a, str) and isinstance(b, str):
        parted = same.difference(same.Output(text=a), same.Output(text=b))
        return parted and replace(parted, what=path)
    return same.Difference(path, 0, (a, b))


# -- on an engine ----------------------------------------------------------------------------------------------------


class Drafted:
    """A logit rule that changes nothing and has recorded answers drafted: while a row's tokens are those of one of its
    prompt's answers, the rest of that answer is proposed. One serves one replay.

    ``prompts`` int32 [P] each, of as many answers each. ``watched``: answer -> index of the token of which the logits
    are kept, so that ``measured`` can say how near it was.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[I32],
        recorded: Sequence[same.Output],
        watched: Mapping[int, int] | None = None,
    ) -> None:
        self._answers = [_guess(engine, answer) for answer in recorded]
        self._prompts = [prompt for prompt in prompts for _ in range(len(recorded) // len(prompts))]
        self._watched = dict(watched or {})
        self._logits: dict[int, F32] = {}

    def start(self, prompt: I32) -> tuple[int, tuple[int, ...]]:
        return 0, tuple(i for i, of in enumerate(self._prompts) if np.array_equal(of, prompt))

    def advance(self, state: tuple[int, tuple[int, ...]], token: int) -> tuple[int, tuple[int, ...]]:
        index, alike = state
        return index + 1, tuple(i for i in alike if self._answers[i][index : index + 1] == (token,))

    def apply(self, state: tuple[int, tuple[int, ...]], logits: F32) -> None:
        index, alike = state
        for answer in alike:
            if self._watched.get(answer) == index:
                self._logits[answer] = logits.copy()

    def forced(self, state: tuple[int, tuple[int, ...]]) -> Sequence[int]:
        index, alike = state
        return self._answers[alike[0]][index:] if alike else ()

    def measured(
        self, differences: Sequence[same.Difference | None], params: SamplingParams, results: Sequence[Result]
    ) -> list[same.Difference | None]:
        """Each difference with its score gap, after the second run."""
        return [each and self._measured(i, each, params, results[i]) for i, each in enumerate(differences)]

    def _measured(
        self, answer: int, parted: same.Difference, params: SamplingParams, result: Result
    ) -> same.Difference:
        logits, (recorded, now) = self._logits.get(answer), parted.values
        if logits is None or not 0 <= recorded < len(logits):
            return parted
        noise = Noise(result.seed, result.sample)
        return replace(
            parted, gap=same.gap_between(scores(logits, params, noise, parted.index, Stream.CHOICE), (recorded, now))
        )


def prepared(
    engine: Engine, prompts: Sequence[I32], params: SamplingParams, recorded: Sequence[same.Output], acceptance: str
) -> tuple[SamplingParams, dict[str, Any]]:
    """The parameters and options of ``Engine.prepare`` under which ``recorded``, the answers to the prompts, are
    generated again.

    Raises ParameterError where the tokens are not promised, the seed is not known, or nothing was written down.
    """
    same.require_tokens(acceptance, params)
    if params.seed is None and not params.greedy:
        raise ParameterError(Argument("seed"), " is missing: give the one that the answer was drawn with")
    for i, answer in enumerate(recorded):
        if answer.tokens is None and answer.text is None:
            raise ParameterError(f"answer {i} has neither token ids nor text, so there is nothing to replay: give one")
    wants = any(answer.logprobs is not None for answer in recorded)
    nodes = engine.options.nodes
    options: dict[str, Any] = {"acceptance": acceptance, "drafter": None if nodes else False, "size": nodes or None}
    rules = (*params.rules, Drafted(engine, prompts, recorded))
    return params.with_(rules=rules, logprobs=params.logprobs or wants), options


def watching(
    engine: Engine,
    prompts: Sequence[I32],
    params: SamplingParams,
    recorded: Sequence[same.Output],
    differences: Sequence[same.Difference | None],
) -> tuple[SamplingParams, Drafted] | None:
    """For a second run, no longer than it must be, which measures the gaps; None where there are none."""
    watched = {i: d.index for i, d in enumerate(differences) if d and d.what == "token" and None not in d.values}
    if not watched:
        return None
    rule = Drafted(engine, prompts, recorded, watched)
    most = max(max(watched.values()) + 1, params.min_tokens)
    return params.with_(rules=(*params.rules, rule), max_tokens=most), rule


def _guess(engine: Engine, answer: same.Output) -> tuple[int, ...]:
    """The tokens that the answer may have had: a draft may be wrong."""
    ids: Sequence[Any] | None = answer.tokens
    if ids is None:
        ids = () if engine.tokenizer is None else engine.tokenizer.encode(answer.text or "", add_special=False).tolist()
    known = engine.model.info.vocab_size
    return tuple(itertools.takewhile(lambda token: 0 <= token < known, ids))
