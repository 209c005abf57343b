"""``POST /v1/replay``: does the request still get this answer, bit for bit? If not, where it first departs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.server import errors
from outpace.server.api import chat, comparison, completions, responses
from outpace.server.api.chat import ChatRequest
from outpace.server.api.comparison import Departure, Recorded
from outpace.server.api.completions import CompletionRequest
from outpace.server.api.responses import ResponsesRequest
from outpace.server.api.route import Route, begun, each_part, service_of, whole
from outpace.server.engines.generation import Generation, Work
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body

router = APIRouter(route_class=Route)

_Asked = ChatRequest | CompletionRequest | ResponsesRequest

_NOT_COMPARED = ("speculation", "index")  # of a choice: how it was made
_KINDS: dict[type[_Asked], str] = {
    ChatRequest: "chat.completion", CompletionRequest: "text_completion", ResponsesRequest: "response",
}  # fmt: skip


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
    found = [name for name in _BY_FIELD if isinstance(request, dict) and name in request]
    return _BY_FIELD[found[0]].__name__ if found else ChatRequest.__name__


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
        params, options = comparison.prepared(model.serving.engine, known, recorded, acceptance)
        return replace(work, params=params, options={**work.options, **options})

    try:
        first = await begun(request, asks.model, "replay-", again)
    except (APIError, OutpaceError) as error:
        raise errors.of(error, responses.NAMES if isinstance(asks, ResponsesRequest) else {}) from error
    now, results = await _now(request, first, asks), first.in_order
    base = first.work.params.with_(rules=first.work.params.rules[:-1])  # without the rule that has the answer drafted

    def compared() -> tuple[list[Departure | None], tuple[SamplingParams, comparison.Drafted] | None]:
        found = []
        for choice, answer, result, before in zip(now(), recorded, results, then, strict=True):
            found.append(comparison.departure(answer, Recorded.of(result)) or _other(before, choice))
        return found, comparison.watching(first.model.serving.engine, base, recorded, found)

    found, second = await service.work(compared)
    if second is not None:
        closer = replace(first.work, params=second[0], parser=None)
        await whole(request, await begun(request, asks.model, "replay-", lambda model, scope: closer))
        measure = partial(comparison.measured, drafted=second[1], params=base)
        found = await service.work(
            lambda: [
                departure and measure(i, departure, result=result)
                for i, (departure, result) in enumerate(zip(found, results, strict=True))
            ]
        )
    tokens = sum(len(result.token_ids) for result in results)
    prints = Fingerprints(recorded=body.answer.system_fingerprint, now=first.model.fingerprint)
    return await service.work(_told, found, tokens, prints)


def _told(found: Sequence[Departure | None], tokens: int, prints: Fingerprints) -> Replayed:
    choices = [
        ReplayedChoice(
            index=i,
            identical=departed is None,
            difference=None if departed is None else Difference(**departed.to_dict()),
        )
        for i, departed in enumerate(found)
    ]
    return Replayed(
        object="replay", identical=not any(found), tokens=tokens, system_fingerprint=prints, choices=choices
    )


async def _now(request: Request, first: Generation, asks: _Asked) -> Callable[[], list[dict[str, Any]]]:
    """What gives today's choices; a response is its only one. Raises APIError."""
    if isinstance(asks, ResponsesRequest):
        making = responses.Making(first, asks)
        await each_part(request, first, making.add)
        return lambda: [_bare(making.response().to_dict()["output"])]
    wholes = await whole(request, first)
    if isinstance(asks, ChatRequest):
        return lambda: [chat.choice(first, each, asks).to_dict() for each in wholes]
    return lambda: [completions.choice(first, each, asks).to_dict() for each in wholes]


def _bare(output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A response's items as a choice: without their ids, which are new in every answer."""
    return {"output": [{name: value for name, value in item.items() if name != "id"} for item in output]}


def _asks(body: ReplayRequest) -> _Asked:
    """The request as it is asked again. Raises APIError."""
    asked = body.request
    if body.answer.object != _KINDS[type(asked)]:
        raise APIError(
            400, f"the answer is a {body.answer.object}, the request asks for another", param="answer.object"
        )
    if isinstance(asked, CompletionRequest) and asked.echo:
        raise APIError(400, "an answer that repeats its prompt is not replayed: leave echo out", param="request.echo")
    seed = asked.seed if asked.seed is not None else body.answer.seed
    plain = dict.fromkeys(("stream", "stream_options", "speculation", "deadline"))
    return asked.model_copy(update={**plain, "seed": seed, "return_token_ids": True})


def _kept(answer: RecordedAnswer) -> tuple[list[dict[str, Any]], list[Recorded]]:
    """The choices of an answer: as they came, and what of them the engine's are compared with. Raises APIError."""
    if answer.object == "response":
        return [_bare(answer.output)], [_recorded_response(answer)]
    return answer.choices, [_recorded(i, each) for i, each in enumerate(answer.choices)]


def _recorded(index: int, choice: dict[str, Any]) -> Recorded:
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
        return Recorded(
            None if ids is None else tuple(ids),
            (text or "") if ids is None else None,
            None if logprobs is None else tuple(float(logprob) for logprob in logprobs),
            finish,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise APIError(
            400, f"answer.choices.{index} is no choice of this server's ({error})", param=f"answer.choices.{index}"
        ) from None


def _recorded_response(answer: RecordedAnswer) -> Recorded:
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
    return Recorded(ids, text if ids is None else None, tuple(logprobs) or None, finish)


def _other(recorded: dict[str, Any], now: dict[str, Any]) -> Departure | None:
    """A difference in the rest of the choice: text, calls, alternatives."""
    kept = {name: value for name, value in recorded.items() if name not in _NOT_COMPARED}
    found = _differs(kept, now, "")
    return None if found is None else Departure(*found)


def _differs(a: Any, b: Any, path: str) -> tuple[str, int, Any, Any] | None:
    """Where ``a`` differs from ``b``; fields that clients added and left empty do not count."""
    if isinstance(a, dict) and isinstance(b, dict):
        each = [(f"{path}.{name}".lstrip("."), value, b.get(name)) for name, value in a.items()]
        return next((found for place, x, y in each if (found := _differs(x, y, place))), None)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        each = [(path, x, y) for x, y in zip(a, b, strict=True)]
        for i, (place, x, y) in enumerate(each):
            if (found := _differs(x, y, place)) is not None:
                return found[0], i, found[2], found[3]
        return None
    if a == b and type(a) is type(b):
        return None
    if isinstance(a, str) and isinstance(b, str):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return path, at, a[at : at + 20], b[at : at + 20]
    return path, 0, a, b
