"""``/api/chat``, ``/api/generate``, ``/api/tags`` and what Ollama's clients ask beside them: chats and completions in
Ollama's form."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from outpace.common.version import __version__
from outpace.server import errors
from outpace.server.api import chat, completions
from outpace.server.api.answers import ChosenToken, chosen_tokens
from outpace.server.api.formats import JsonSchema, ResponseFormat
from outpace.server.api.models import leased, no_embeddings
from outpace.server.api.prompt import Effort
from outpace.server.api.route import Encoder, Route, answered, service_of
from outpace.server.api.sampling import Sampling, SamplingFields, Speculation
from outpace.server.conversation.formats import format_of
from outpace.server.conversation.messages import FunctionCall, Message, ToolCall
from outpace.server.conversation.pieces import Joined, json_object
from outpace.server.conversation.tools import Tools
from outpace.server.engines.generation import Part, Whole, Work, usage
from outpace.server.engines.models import Served
from outpace.server.engines.service import Service
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items

# -- ollama shapes ----------------------------------------------------------------------------------------------------
# The shapes of Ollama's requests and answers, and its requests made chats' and completions'.

_HARMLESS = Field(default=None, description="Changes nothing.")
_NONE = Field(default=None, max_length=0)


class OllamaOptions(SamplingFields):
    """Ollama's, and all parameters of chats by their own names; what is not given has a chat's default."""

    num_predict: int | None = Field(default=None, description="Below 0: as many as the context holds.")
    repeat_penalty: float | None = Field(default=None, description="repetition_penalty, of the whole text.")
    speculation: Speculation | None = None
    num_ctx: int | None = _HARMLESS
    num_keep: int | None = _HARMLESS
    num_batch: int | None = _HARMLESS
    num_gpu: int | None = _HARMLESS
    main_gpu: int | None = _HARMLESS
    num_thread: int | None = _HARMLESS
    numa: bool | None = _HARMLESS
    low_vram: bool | None = _HARMLESS
    use_mmap: bool | None = _HARMLESS
    use_mlock: bool | None = _HARMLESS


class OllamaRequest(Body):
    """What both kinds of requests share."""

    model: str
    stream: bool | None = Field(default=None, description="Default: true.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(default=None, description="Or a JSON schema.")
    options: OllamaOptions | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: float | str | None = _HARMLESS


class OllamaFunction(Body):
    name: str = Field(min_length=1)
    arguments: dict[str, Any]
    index: int | None = _HARMLESS


class OllamaCall(Body):
    id: str | None = None
    index: int | None = _HARMLESS
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Items[Any] | None = _NONE
    tool_calls: Items[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    """Without messages the model is loaded."""

    messages: Items[OllamaMessage] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Without a prompt the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(default=None, description="Continue the prompt as it is, without a template.")
    suffix: str | None = Field(default=None, description="What follows the answer, as in /v1/completions.")
    template: str | None = _NONE
    images: Items[Any] | None = _NONE
    context: Items[int] | None = _NONE


class OllamaAnswer(Answer):
    """Ends every answer; durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ChosenToken] | None = None
    seed: int | None = None


class OllamaAnswerFunction(Answer):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaAnswerCall(Answer):
    id: str
    function: OllamaAnswerFunction


class OllamaAnswerMessage(Answer):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaAnswerCall] | None = None


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: str | None = None


class OllamaDetails(Answer):
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    """``size``, ``digest`` and ``details`` are known once the model has been used."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Answer):
    models: list[OllamaModel]


class OllamaShowRequest(Body):
    model: str
    name: str | None = Field(default=None, description="Changes nothing: model is what it was once called.")
    verbose: bool | None = _HARMLESS


class OllamaEmbedRequest(Body):
    model: str
    input: Any = None
    prompt: Any = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = _HARMLESS


class OllamaShown(Answer):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]


class Version(Answer):
    version: str


def shared(body: OllamaRequest) -> dict[str, Any]:
    """Fields of chats and of completions."""
    options = body.options or OllamaOptions()
    names = SamplingFields.model_fields.keys() & Sampling.model_fields.keys() - {"repetition_penalty"}
    found = {name: getattr(options, name) for name in names}
    found["repetition_penalty"] = _either(options, "repeat_penalty", "repetition_penalty")
    found["speculation"] = options.speculation
    found["max_tokens"] = -1 if options.num_predict is None or options.num_predict < 0 else options.num_predict
    if isinstance(body.format, dict):
        schema = JsonSchema(name="format", schema=body.format)
        found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    elif body.format:
        found["response_format"] = ResponseFormat(type="json_object")
    return found


def of_chats(body: OllamaRequest) -> dict[str, Any]:
    """Fields of chats alone."""
    effort = body.think
    if isinstance(effort, bool):
        effort = "medium" if effort else "none"
    return {"reasoning_effort": effort, "logprobs": body.logprobs, "top_logprobs": body.top_logprobs}


def _either(options: OllamaOptions, first: str, second: str) -> Any:
    value = getattr(options, first)
    return getattr(options, second) if value is None else value


def messages_of(turns: Sequence[OllamaMessage]) -> list[Message]:
    """A chat's messages: calls get ids, and results those of the calls that they answer, in their order."""
    found: list[Message] = []
    waiting: list[ToolCall] = []
    named = True
    for i, turn in enumerate(turns):
        more: dict[str, Any] = {}
        if turn.tool_calls:
            waiting, named = [], any(call.id for call in turn.tool_calls)
            for j, call in enumerate(turn.tool_calls):
                arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                function = FunctionCall(name=call.function.name, arguments=arguments)
                waiting.append(ToolCall(id=call.id or f"call_{i}_{j}", type="function", function=function))
            more["tool_calls"] = list(waiting)
        if turn.role == "tool":
            own = turn.tool_call_id if named else None  # LiteLLM names calls in their results alone
            more["tool_call_id"] = own or _answered_call(turn, waiting, i)
        content = turn.content if turn.content is not None or turn.tool_calls else ""
        found.append(Message(role=turn.role, content=content, reasoning_content=turn.thinking or None, **more))
    return found


def _answered_call(turn: OllamaMessage, waiting: list[ToolCall], index: int) -> str:
    for call in waiting:
        if turn.tool_name in (None, call.function.name):
            waiting.remove(call)
            return call.id
    raise APIError(
        400, f"messages.{index} is the result of no call of the assistant's message before it: give its tool_name",
        param=f"messages.{index}.tool_name",
    )  # fmt: skip


def calls_of(joined: Joined) -> list[OllamaAnswerCall]:
    """The whole ones. A call that was cut off is none: ``done_reason`` says why."""
    found = []
    for index, call in enumerate(joined.calls):
        if (arguments := json_object(call.arguments)) is not None:
            function = OllamaAnswerFunction(index=index, name=call.name, arguments=arguments)
            found.append(OllamaAnswerCall(id=call.id, function=function))
    return found


_REFUSALS: dict[int | str, dict[str, Any]] = {status: {"model": errors.OllamaRefusal} for status in ("4XX", "5XX")}
router, bodies = APIRouter(responses=_REFUSALS), APIRouter(route_class=Route, responses=_REFUSALS)

NAMES = {  # of fields of chats and completions, as here
    "max_completion_tokens": "options.num_predict", "max_tokens": "options.num_predict", "response_format": "format",
    "reasoning_effort": "think", "repetition_penalty": "options.repeat_penalty",
}  # fmt: skip
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}}


@router.get("/version")
@router.get("/api/version")
async def version() -> Version:
    """The version of Outpace."""
    return Version(version=__version__)


@router.get("/api/tags")
async def tags(request: Request) -> OllamaModels:
    """The models that are served."""
    service = service_of(request)
    return OllamaModels(models=[_model(service, name) for name in service.names()])


@router.get("/api/ps")
async def loaded(request: Request) -> OllamaModels:
    """Those of them that are loaded."""
    service = service_of(request)
    state = service.models.state()
    return OllamaModels(models=[_model(service, name) for name in state if state[name]["state"] == "loaded"])


@bodies.post("/api/show", response_model=OllamaShown)
async def show(request: Request, body: OllamaShowRequest) -> OllamaShown:
    """What a model, which is loaded, can do."""

    def shown(model: Served) -> OllamaShown:
        template = format_of(model.tokenizer.chat_template)
        tools = format_of(model.tokenizer.chat_template_of(tools=True))
        able = {"completion": True, "tools": tools.calls is not None, "thinking": template.thinks}
        return OllamaShown(
            modelfile="",
            parameters="",
            template=model.tokenizer.chat_template or "",
            details=_model(service_of(request), model.name).details,
            model_info={"general.architecture": "outpace", "outpace.context_length": model.info.max_length},
            capabilities=[name for name, is_able in able.items() if is_able],
        )

    return await leased(request, _name(service_of(request), body.model), shown)


@bodies.post("/api/embed", response_model=errors.OllamaRefusal)
@bodies.post("/api/embeddings", response_model=errors.OllamaRefusal)
async def embed(request: Request, body: OllamaEmbedRequest) -> Answer:
    """Refused: the models here write text."""
    raise no_embeddings(body.model)


@bodies.post("/api/chat", response_model=OllamaChatAnswer, responses=STREAMED)
async def ollama_chat(request: Request, body: OllamaChatRequest) -> Answer | Response:
    """Answer a conversation, as Ollama's clients ask."""

    def work(model: Served, scope: str) -> Work:
        talk = chat.asked(**shared(body), **of_chats(body), messages=messages_of(body.messages or ()), tools=body.tools)
        return chat.work(talk, service_of(request).settings, model, scope)

    return await _answered(request, body, work if body.messages else None, OllamaChatEncoder)


@bodies.post("/api/generate", response_model=OllamaGenerateAnswer, responses=STREAMED)
async def ollama_generate(request: Request, body: OllamaGenerateRequest) -> Answer | Response:
    """Answer a text, or continue it, as Ollama's clients ask."""

    def work(model: Served, scope: str) -> Work:
        settings = service_of(request).settings
        if body.raw or body.suffix:
            name = "suffix" if body.suffix else "raw"
            if body.system or body.think is not None:
                raise APIError(400, f"{name} has no template for system and think: leave them out", param=name)
            top = (body.top_logprobs or 0) if body.logprobs else None
            texts = completions.asked(**{**shared(body), "suffix": body.suffix}, prompt=body.prompt, logprobs=top)
            return completions.work(texts, settings, model, scope)
        system = [Message(role="system", content=body.system)] if body.system else []
        talk = [*system, Message(role="user", content=body.prompt)]
        return chat.work(chat.asked(**shared(body), **of_chats(body), messages=talk), settings, model, scope)

    return await _answered(request, body, work if body.prompt else None, OllamaGenerateEncoder)


class OllamaEncoder(Encoder):
    """Lines: texts as they come, calls with the last of them, and one that ends the answer."""

    prefix, names = "ollama-", NAMES
    media_type, alive = "application/x-ndjson", b""  # there is no line that says nothing
    body: OllamaRequest

    @staticmethod
    @abstractmethod
    def answer(name: str, joined: Joined, calls: list[OllamaAnswerCall], **more: Any) -> OllamaAnswer:
        """A line. ``name``: the model's, as the request has it."""

    def whole(self) -> OllamaAnswer:
        choice = self.only
        return self._last(choice.joined, calls_of(choice.joined), self._logprobs(choice))

    def part(self, part: Part) -> bytes:
        self.fold(part)
        joined, logprobs = part.joined, self._logprobs(part)
        calls = [] if part.result is None else calls_of(self.only.joined)
        if not (joined.text or joined.thoughts or logprobs or calls):
            return b""
        return _line(self.answer(self.body.model, joined, calls, done=False, **logprobs))

    def end(self) -> bytes:
        return _line(self._last(Joined(), [], {}))

    def failed(self, error: APIError) -> bytes:
        return errors.as_ollama(error) + b"\n"

    def _logprobs(self, choice: Part | Whole) -> dict[str, Any]:
        if not (self.body.logprobs and choice.logprobs):
            return {}
        return {"logprobs": chosen_tokens(choice.logprobs, self.body.top_logprobs or 0, self.generation.model)}

    def _last(self, joined: Joined, calls: list[OllamaAnswerCall], logprobs: dict[str, Any]) -> OllamaAnswer:
        generation, cost, now = self.generation, usage(self.generation), time.perf_counter()
        first = generation.first_token_at or now
        return self.answer(
            self.body.model, joined, calls,
            done=True,
            done_reason="length" if self.only.finish == "length" else "stop",
            total_duration=_nanoseconds(now - generation.began),
            load_duration=0,
            prompt_eval_count=cost.prompt_tokens,
            prompt_eval_duration=_nanoseconds(first - generation.began),
            eval_count=cost.completion_tokens,
            eval_duration=_nanoseconds(now - first),
            seed=generation.work.params.seed,
            **logprobs,
        )  # fmt: skip


class OllamaChatEncoder(OllamaEncoder):
    @staticmethod
    def answer(name: str, joined: Joined, calls: list[OllamaAnswerCall], **more: Any) -> OllamaAnswer:
        called: dict[str, Any] = {"tool_calls": calls} if calls else {}
        message = OllamaAnswerMessage(role="assistant", content=joined.text, **_thinking(joined), **called)
        return OllamaChatAnswer(model=name, created_at=_now(), message=message, **more)


class OllamaGenerateEncoder(OllamaEncoder):
    @staticmethod
    def answer(name: str, joined: Joined, calls: list[OllamaAnswerCall], **more: Any) -> OllamaAnswer:
        return OllamaGenerateAnswer(model=name, created_at=_now(), response=joined.text, **_thinking(joined), **more)


def _thinking(joined: Joined) -> dict[str, Any]:
    return {"thinking": joined.thoughts} if joined.thoughts else {}


def _now() -> str:
    return datetime.now(UTC).isoformat()


async def _answered(request: Request, body: OllamaRequest, work: Any, kind: type[OllamaEncoder]) -> Answer | Response:
    """``work``: None where the model is only to be loaded."""
    service = service_of(request)
    name = _name(service, body.model)
    if work is not None:
        return await answered(request, body, kind, work, model=name, streamed=body.stream is not False)
    unload = body.keep_alive in (0, "0", "0s") and await service.unload(service.named(name))
    if not unload:
        await leased(request, name, lambda model: None)
    return kind.answer(body.model, Joined(), [], done=True, done_reason="unload" if unload else "load")


def _name(service: Service, name: str) -> str:
    """Without the tag that Ollama's clients put there."""
    return name if name in service.names() else name.removesuffix(":latest")


def _model(service: Service, name: str) -> OllamaModel:
    known = service.known(service.named(name))
    kind, dtype = ("", "") if known is None else (known.info.backend, known.info.dtype)
    return OllamaModel(
        name=name,
        model=name,
        modified_at=datetime.fromtimestamp(service.started, UTC).isoformat(),
        size=0 if known is None else known.info.weight_bytes,
        digest="" if known is None else known.fingerprint,
        details=OllamaDetails(format=kind, family="", families=[], parameter_size="", quantization_level=dtype),
    )


def _line(answer: Answer) -> bytes:
    return answer.to_json() + b"\n"


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
