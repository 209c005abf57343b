"""``POST /v1/replay``: does the request still get this answer, bit for bit? If not, where it first departs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.server import errors, replay, translate
from outpace.server.errors import APIError
from outpace.server.events import Part, Whole
from outpace.server.generation import Generation
from outpace.server.replay import Departure, Said
from outpace.server.responses import NAMES, as_chat
from outpace.server.routes import chat, completions, responses
from outpace.server.routes.answering import answer, asked, begun, each_part, service_of, whole
from outpace.server.routes.described import describes
from outpace.server.schema.chat import ChatRequest
from outpace.server.schema.completions import CompletionRequest
from outpace.server.schema.replay import Answered, ReplayRequest
from outpace.server.schema.responses import ResponsesRequest
from outpace.server.served import Served
from outpace.server.translate import Work

router = APIRouter()

_Asked = ChatRequest | CompletionRequest | ResponsesRequest

_UNSAID = ("speculation", "index")  # of a choice: how it was made is no part of what it says
_KINDS: dict[type[_Asked], str] = {
    ChatRequest: "chat.completion", CompletionRequest: "text_completion", ResponsesRequest: "response",
}  # fmt: skip


@router.post("/v1/replay", openapi_extra=describes(ReplayRequest), response_model=None)
async def replayed(request: Request) -> Response:
    """Say an answer again and compare."""
    body, service = await asked(request, ReplayRequest), service_of(request)
    settings = service.settings
    asks = _asks(body)
    if isinstance(asks, ResponsesRequest):
        then, recorded = [_bare(body.answer.output)], [_responded(body.answer)]
    else:
        then, recorded = body.answer.choices, [_said(i, its) for i, its in enumerate(body.answer.choices)]
    wish = body.request.speculation
    acceptance = (wish and wish.acceptance) or "coupled"

    def work(model: Served, scope: str) -> Work:
        if isinstance(asks, CompletionRequest):
            its = translate.completion(asks, model, settings, scope)
        else:
            talk = as_chat(asks) if isinstance(asks, ResponsesRequest) else asks
            its = translate.chat(talk, model, settings, scope)
        if its.samples != len(recorded):
            raise APIError(
                400, f"the request has {its.samples} choices, the answer {len(recorded)}", param="answer.choices"
            )
        return its

    def again(model: Served, scope: str) -> Work:
        its = work(model, scope)
        known = its.params.with_(seed=asks.seed)  # a fresh one would be that of no answer
        params, options = replay.prepared(model.serving.engine, known, recorded, acceptance)
        return replace(its, params=params, options={**its.options, **options})

    try:
        first = await begun(request, asks.model, "replay-", again)
    except (APIError, OutpaceError) as error:
        raise errors.of(error, NAMES if isinstance(asks, ResponsesRequest) else {}) from error
    now, results = await _now(request, first, asks), first.in_order
    base = first.work.params.with_(rules=first.work.params.rules[:-1])  # without the rule that has it drafted

    def compared() -> tuple[list[Departure | None], tuple[SamplingParams, replay.Told] | None]:
        found = []
        for its, said, result, before in zip(now(), recorded, results, then, strict=True):
            found.append(replay.departure(said, Said.of(result)) or _other(before, its))
        return found, replay.watching(first.model.serving.engine, base, recorded, found)

    found, second = await service.work(compared)
    if second is not None:
        closer = replace(first.work, params=second[0], parser=None)
        await whole(request, await begun(request, asks.model, "replay-", lambda model, scope: closer))
        measure = partial(replay.measured, told=second[1], params=base)
        found = await service.work(
            lambda: [
                its and measure(i, its, result=result)
                for i, (its, result) in enumerate(zip(found, results, strict=True))
            ]
        )
    return await answer(
        request,
        lambda: {
            "object": "replay",
            "identical": not any(found),
            "tokens": sum(len(result.token_ids) for result in results),
            "system_fingerprint": {"recorded": body.answer.system_fingerprint, "now": first.model.fingerprint},
            "choices": [
                {"index": i, "identical": its is None, "difference": its and its.to_dict()}
                for i, its in enumerate(found)
            ],
        },
    )


async def _now(request: Request, first: Generation, asks: _Asked) -> Callable[[], list[dict[str, Any]]]:
    """What makes choices of what is said now; a response is its only one. Raises APIError."""
    if isinstance(asks, ResponsesRequest):
        made = responses.Made(first, asks)

        def take(part: Part) -> None:
            made.add(part)

        await each_part(request, first, take)
        return lambda: [_bare(made.told()["output"])]
    wholes = await whole(request, first)

    def choice(its: Whole) -> dict[str, Any]:
        return chat.choice(first, its, asks) if isinstance(asks, ChatRequest) else completions.choice(first, its, asks)

    return lambda: [choice(its) for its in wholes]


def _bare(output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A response's items as a choice: without their ids, which are new in every answer."""
    return {"output": [{name: value for name, value in item.items() if name != "id"} for item in output]}


def _asks(body: ReplayRequest) -> _Asked:
    """The request as it is to be asked again. Raises APIError."""
    its = body.request
    if body.answer.object != _KINDS[type(its)]:
        raise APIError(
            400, f"the answer is a {body.answer.object}, the request asks for another", param="answer.object"
        )
    if isinstance(its, CompletionRequest) and its.echo:
        raise APIError(400, "an answer that repeats its prompt is not replayed: leave echo out", param="request.echo")
    seed = its.seed if its.seed is not None else body.answer.seed
    plainly: dict[str, Any] = {
        "stream": None,
        "stream_options": None,
        "speculation": None,
        "deadline": None,
        "seed": seed,
    }
    return its.model_copy(update={**plainly, "return_token_ids": True})


def _said(index: int, choice: dict[str, Any]) -> Said:
    """What a recorded choice says. Raises APIError."""
    try:
        ids = choice.get("token_ids")
        told = choice.get("logprobs") or {}
        logprobs = told.get("token_logprobs")
        if logprobs is None and told.get("content") is not None:
            logprobs = [entry["logprob"] for entry in told["content"]]
        text = choice["text"] if "text" in choice else choice["message"].get("content")
        finish = choice.get("finish_reason")
        if not isinstance(text, str | None) or not isinstance(finish, str | None):
            raise TypeError("its text or finish_reason is no text")
        if ids is not None and not all(type(token) is int for token in ids):
            raise TypeError("a token id is no whole number")
        return Said(
            None if ids is None else tuple(ids),
            (text or "") if ids is None else None,
            None if logprobs is None else tuple(float(its) for its in logprobs),
            finish,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise APIError(
            400, f"answer.choices.{index} is no choice of this server's ({error})", param=f"answer.choices.{index}"
        ) from None


def _responded(its: Answered) -> Said:
    """What a recorded response says. Raises APIError."""
    try:
        parts = [part for item in its.output if item.get("type") == "message" for part in item["content"]]
        logprobs = [float(entry["logprob"]) for part in parts for entry in part.get("logprobs") or ()]
        text = "".join([part["text"] for part in parts])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise APIError(400, f"answer.output is none of this server's ({error!r})", param="answer.output") from None
    if its.token_ids is None and [item.get("type") for item in its.output] != ["message"]:
        raise APIError(
            400, "thoughts and calls are replayed by their tokens: ask with return_token_ids", param="answer.token_ids"
        )
    finish = {"completed": "stop", "incomplete": "length"}.get(its.status or "")
    ids = None if its.token_ids is None else tuple(its.token_ids)
    return Said(ids, text if ids is None else None, tuple(logprobs) or None, finish)


def _other(recorded: dict[str, Any], now: dict[str, Any]) -> Departure | None:
    """A difference in whatever else the choice says: its text, its calls, alternatives."""
    kept = {name: value for name, value in recorded.items() if name not in _UNSAID}
    found = _differs(kept, now, "")
    return None if found is None else Departure(*found)


def _differs(a: Any, b: Any, path: str) -> tuple[str, int, Any, Any] | None:
    """Where ``a`` says what ``b`` does not; what clients added and left empty counts for nothing."""
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
