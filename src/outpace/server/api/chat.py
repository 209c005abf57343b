"""``POST /v1/chat/completions``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from outpace.server import schema
from outpace.server.api import formats, sampling
from outpace.server.api.answers import (
    Choice,
    Choices,
    ChosenToken,
    Chunk,
    Completed,
    PromptLogprobs,
    chosen_tokens,
    prompt_logprobs,
)
from outpace.server.api.models import leased
from outpace.server.api.prompt import Prompt, dropped, rendered
from outpace.server.api.route import STREAMED, Route, answered, service_of
from outpace.server.api.sampling import Sampling
from outpace.server.conversation.binding import tool_grammar
from outpace.server.conversation.control import unmarked
from outpace.server.conversation.formats import format_of, parser_for, thoughts_end
from outpace.server.conversation.messages import Messages
from outpace.server.conversation.pieces import Begin, Event, More, OutputParser
from outpace.server.conversation.tools import ToolChoice, checked, schemas_of
from outpace.server.engines.generation import Generation, Part, Whole, Work, seeded
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Items
from outpace.server.settings import ServerSettings
from outpace.text.grammar import Thoughts

router = APIRouter(route_class=Route)


class ChatRequest(Sampling, Prompt):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Items[Literal["text"]] | None = None
    add_special_tokens: Literal[False] | None = Field(default=None, description="The template writes its own.")


def asked(**fields: Any) -> ChatRequest:
    """The chat that another protocol's request asks for: fields that are None are left out. Raises APIError."""
    return schema.made(ChatRequest, fields)


class Function(Answer):
    name: str | None = Field(default=None, description="In a stream: with the call's first delta.")
    arguments: str


class Call(Answer):
    index: int | None = Field(default=None, description="In a stream: which of the calls this is.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="The same, as others call it.")
    tool_calls: list[Call] | None = None


class Delta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None


class ChatLogprobs(Answer):
    content: list[ChosenToken]
    refusal: None


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletion(Completed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def chat_completions(request: Request, body: ChatRequest) -> Answer | Response:
    """Answer a conversation."""
    asks = partial(work, body, service_of(request).settings)
    return await answered(request, body, ChatEncoder, asks, model=body.model, streamed=bool(body.stream))


class InputTokens(Answer):
    """As OpenAI counts those of a request for a response."""

    object: Literal["response.input_tokens", "chat.completion.input_tokens"]
    input_tokens: int


@router.post("/v1/chat/completions/input_tokens", response_model=InputTokens)
async def input_tokens(request: Request, body: ChatRequest) -> InputTokens:
    """How many tokens a conversation has, as llama.cpp's clients ask."""
    count = await counted(request, body, body.model)
    return InputTokens(object="chat.completion.input_tokens", input_tokens=count)


async def counted(request: Request, body: ChatRequest, model: str | None) -> int:
    """Tokens of a conversation, tools included. Raises APIError or OutpaceError."""

    def count(served: Served) -> int:
        tools = checked(body.tools)
        text = rendered(body, body.messages, tools, body.tool_choice or ("auto" if tools else "none"), served)
        return len(served.control.encode(text))

    return await leased(request, model, count)


def work(body: ChatRequest, settings: ServerSettings, model: Served, scope: str) -> Work:
    """What an engine is asked. Raises ParameterError, RuleError or APIError."""
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
    sampling.check_logprobs("top_logprobs", top, settings)
    sampling.check_prompt_logprobs(body, settings)
    tools = checked(body.tools)
    choice = body.tool_choice or ("auto" if tools else "none")
    if not tools and choice == "auto":
        choice = "none"
    offered = bool(tools) and choice != "none"
    template = model.tokenizer.chat_template_of(tools=offered)
    marked = rendered(body, body.messages, tools, choice, model)
    sampling.check_text(marked, model, "messages", special=True)
    form = format_of(template)
    tokens, prompt = model.control.encode(marked), unmarked(marked)
    sampling.check_length(tokens, model, "messages")
    thinks = not body.continue_final_message  # what goes on with an answer has no thoughts before it
    after = thoughts_end(template, prompt, calls=offered) if thinks else None
    wish, left_out = formats.wanted(body, body.response_format), list[str]()  # of tools' schemas
    if offered:
        if isinstance(after, Thoughts) and choice == "auto" and wish is None:  # a text, which may begin as thoughts do
            after = after.end if form.may_think else None
        parallel = body.parallel_tool_calls is not False
        text = tool_grammar(
            form.calls, tools, choice, parallel=parallel, part=wish is not None, close=model.close_schemas,
            literal=model.grammars.literal, left_out=left_out,
        )  # fmt: skip
        rules = [] if text is None else [formats.rule_of_calls(text, wish, model, after)]
    else:
        rules = formats.rules(wish, model, after)
    params = seeded(
        sampling.parameters(
            body,
            settings,
            max_tokens=_most_tokens(body, settings),
            logprobs=bool(body.logprobs),
            top_logprobs=top,
            prompt_logprobs=body.prompt_logprobs,
            rules=rules,
        )
    )
    digest = hashlib.sha256(tokens.tobytes() + str(params.seed).encode())

    def parser(index: int) -> OutputParser:
        def name(call: int) -> str:
            found = digest.copy()
            found.update(f"/{index}/{call}".encode())
            return f"call_{found.hexdigest()[:24]}"

        return parser_for(
            template, tools=offered, reasoning=thinks, tool_id=name, prompt=prompt,
            schemas=schemas_of(tools) if offered else None, formatted=wish is not None,
        )  # fmt: skip

    options = sampling.engine_options(body, settings, scope)
    if shown := model.control.spelled_in(form.marks(tools=offered)):
        options["shown_tokens"] = shown
    return Work(
        prompts=[tokens], params=params, options=options, parser=parser,
        trace=body.traced, user=body.user,
        notes=[*dropped(body, template), *formats.left_out(rules, left_out if offered else None)],
        **sampling.resumed(body, params.n),
    )  # fmt: skip


def _most_tokens(body: ChatRequest, settings: ServerSettings) -> int | None:
    both = {limit for limit in (body.max_tokens, body.max_completion_tokens, body.n_predict) if limit is not None}
    if len(both) > 1:
        raise APIError(
            400, "max_tokens, max_completion_tokens or n_predict differ: give one of them", param="max_tokens"
        )
    return sampling.bounded(both.pop() if both else settings.sampling.get("max_tokens", -1))


class ChatEncoder(Choices):
    """A chat's answer. A choice's first chunk has its role, unless the answer was resumed after it."""

    prefix = "chatcmpl-"
    answer, chunk = (ChatCompletion, "chat.completion"), (ChatChunk, "chat.completion.chunk")
    body: ChatRequest

    def __init__(self, generation: Generation, body: ChatRequest) -> None:
        super().__init__(generation, body)
        self._begun = set(generation.resumed)

    def of_prompt(self) -> dict[str, Any]:
        most = self.body.prompt_logprobs
        return {} if most is None else {"prompt_logprobs": prompt_logprobs(self.folded[0].prompt_logprobs, most)}

    def choice(self, made: Whole | Part) -> ChatChoice | ChunkChoice:
        fields = {"logprobs": self._logprobs(made), **self.fields(made)}
        if isinstance(made, Part):
            return ChunkChoice(delta=_delta(made.events), **fields)
        text, thoughts, calls = made.joined.text, made.joined.thoughts, made.joined.calls
        extras: dict[str, Any] = {}
        if thoughts:
            extras["reasoning_content"] = extras["reasoning"] = thoughts
        if calls:
            extras["tool_calls"] = [
                Call(id=call.id, type="function", function=Function(name=call.name, arguments=call.arguments))
                for call in calls
            ]
        content = None if calls and not text else text
        message = AnswerMessage(role="assistant", content=content, refusal=None, **extras)
        return ChatChoice(message=message, **fields)

    def part(self, part: Part) -> bytes:
        if part.index in self._begun:
            return super().part(part)
        self._begun.add(part.index)
        delta = Delta(role="assistant", content="")
        first = ChunkChoice(index=part.index, delta=delta, logprobs=None, finish_reason=None)
        ids = {"prompt_token_ids": self.generation.work.prompts[0].tolist()} if self.body.return_token_ids else {}
        return self.event([first], **ids) + super().part(part)

    def _logprobs(self, made: Whole | Part) -> ChatLogprobs | None:
        if not self.body.logprobs or (isinstance(made, Part) and not made.logprobs):
            return None
        top = self.body.top_logprobs or 0
        return ChatLogprobs(content=chosen_tokens(made.logprobs, top, self.generation.model), refusal=None)


def _delta(events: Sequence[Event]) -> Delta:
    """Neighbouring texts of a segment are one."""
    delta: dict[str, Any] = {}
    calls: list[Call] = []
    for each in events:
        segment = each.segment
        if isinstance(each, Begin) and segment.kind == "call":
            function = Function(name=segment.name, arguments="")
            calls.append(Call(index=segment.call, id=segment.id, type="function", function=function))
        elif isinstance(each, More) and segment.kind == "call":
            if not calls:
                calls.append(Call(index=segment.call, function=Function(arguments="")))
            calls[-1].function.arguments += each.text
        elif isinstance(each, More):
            name = "content" if segment.kind == "text" else "reasoning_content"
            delta[name] = delta.get(name, "") + each.text
    if "reasoning_content" in delta:
        delta["reasoning"] = delta["reasoning_content"]
    if calls:
        delta["tool_calls"] = calls
    return Delta(**delta)
