"""The shapes of Ollama's requests and answers, and its requests made chats' and completions'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.server.api.answers import ChosenToken
from outpace.server.api.formats import JsonSchema, ResponseFormat
from outpace.server.api.prompt import Effort
from outpace.server.api.sampling import Sampling, SamplingFields, Speculation
from outpace.server.conversation.messages import FunctionCall, Message, ToolCall
from outpace.server.conversation.pieces import Joined
from outpace.server.conversation.tools import Tools
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items

_HARMLESS = Field(default=None, description="Changes nothing.")
_NONE = Field(default=None, max_length=0)


class OllamaOptions(SamplingFields):
    """Ollama's, and all parameters of chats by their own names; what is not given has a chat's default."""

    num_predict: int | None = Field(default=None, description="Below 0: as many as the context holds.")
    repeat_penalty: float | None = Field(default=None, description="repetition_penalty, of the whole text.")
    speculation: Speculation | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = _HARMLESS
    mirostat_eta: float | None = _HARMLESS
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None
    repeat_last_n: int | None = _HARMLESS
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
    suffix: str | None = _NONE
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
    for i, turn in enumerate(turns):
        more: dict[str, Any] = {}
        if turn.tool_calls:
            waiting = []
            for j, call in enumerate(turn.tool_calls):
                arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                function = FunctionCall(name=call.function.name, arguments=arguments)
                waiting.append(ToolCall(id=call.id or f"call_{i}_{j}", type="function", function=function))
            more["tool_calls"] = list(waiting)
        if turn.role == "tool":
            more["tool_call_id"] = turn.tool_call_id or _answered_call(turn, waiting, i)
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
    """A call whose arguments were cut off has none: ``done_reason`` says why."""
    found = []
    for index, call in enumerate(joined.calls):
        function = OllamaAnswerFunction(index=index, name=call.name, arguments=call.object())
        found.append(OllamaAnswerCall(id=call.id, function=function))
    return found
