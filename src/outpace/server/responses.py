"""``/v1/responses`` as a chat: its request made one of chats', and a chat's parts made items and events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outpace.server.errors import APIError
from outpace.server.schema.chat import ChatRequest
from outpace.server.schema.common import Parameters
from outpace.server.schema.responses import (
    CallItem,
    CallOutputItem,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
)
from outpace.server.tools.base import Piece, Reasoning, Text, ToolStart

NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}  # of chats', as here

_Event = dict[str, Any]


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that ``body`` asks for. Raises APIError for what means nothing."""
    if body.speculation is not None and body.speculation.trace:
        raise APIError(
            400, "speculation.trace is not supported here: ask /v1/chat/completions", param="speculation.trace"
        )
    logprobs = bool(body.include)
    if body.top_logprobs is not None and not logprobs:
        raise APIError(400, 'top_logprobs needs include: give ["message.output_text.logprobs"]', param="top_logprobs")
    if logprobs and body.tools and body.tool_choice != "none":
        raise APIError(
            400, "log-probabilities are of text, and tools may be called instead: leave include or tools out, or ask "
            "/v1/chat/completions", param="include",
        )  # fmt: skip
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options needs stream: set it to true", param="stream_options")
    shared = {name: getattr(body, name) for name in Parameters.model_fields}
    asked = shared | {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()] or None,
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body),
        "grammar": body.grammar,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return ChatRequest.model_validate({name: value for name, value in asked.items() if value is not None})


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Thoughts, text and calls that follow one another are one message of the assistant's, as chats have it."""
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    if not body.input:
        raise APIError(400, "input is empty: give some text, or items", param="input")
    answer: dict[str, Any] = {}  # the assistant's message that goes on; empty: none does
    open_calls: set[str] = set()

    def assistants(*over: str) -> dict[str, Any]:
        """The assistant's message that what comes belongs to: a new one where this one has one of ``over``."""
        nonlocal answer
        if not answer or any(name in answer for name in over):
            answer = {"role": "assistant"}
            found.append(answer)
        return answer

    for i, item in enumerate(body.input):
        match item:
            case ReasoningItem():
                said = [part.text for part in item.content or item.summary]
                assistants("reasoning_content", "content", "tool_calls")["reasoning_content"] = "\n".join(said)
                open_calls = set()
            case MessageItem(role="assistant"):
                assistants("content", "tool_calls")["content"] = _content(item.content)
                open_calls = set()
            case MessageItem():
                answer, open_calls = {}, set()
                found.append({"role": item.role, "content": _content(item.content)})
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                calls = assistants().setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
                open_calls.add(item.call_id)
            case CallOutputItem():
                if item.call_id not in open_calls:
                    raise APIError(
                        400, f"input.{i}.call_id={item.call_id!r} answers no function_call right before it: give the "
                        "call_id of one", param=f"input.{i}.call_id",
                    )  # fmt: skip
                answer = {}
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    for message in found:
        message.setdefault("content", None if "tool_calls" in message else "")
    return found


def _content(content: str | Sequence[Part]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    del tool["type"]
    return {"type": "function", "function": tool}


def _choice(body: ResponsesRequest) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if isinstance(wanted, SchemaFormat):
        schema = wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}
    return None if wanted is None else {"type": wanted.type}


class Items:
    """What an answer is made of: its thoughts, its text, its calls, in the order in which they came. Streamed and
    unstreamed answers go through it. ``key``: what its items' ids have in common."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last of them, while more of it may come
        self._said: list[str] = []  # of the open one
        self._logprobs: list[dict[str, Any]] = []  # of the open one
        self._unsaid: list[dict[str, Any]] = []  # of tokens that belong to text that has not come yet

    @property
    def reasoning(self) -> str:
        """What was thought."""
        parts = [part["text"] for item in self.output if item["type"] == "reasoning" for part in item["content"]]
        return "".join(parts)

    def feed(self, pieces: Iterable[Piece], logprobs: Sequence[dict[str, Any]] = ()) -> list[_Event]:
        """Events of what came: neighbouring pieces of a kind are one."""
        events: list[_Event] = []
        self._unsaid.extend(logprobs)
        for piece in pieces:
            if isinstance(piece, ToolStart):
                events += self._end("completed")
                events += self._begin("function_call", call_id=piece.id, name=piece.name, arguments="")
                continue
            kind = {Text: "message", Reasoning: "reasoning"}.get(type(piece), "function_call")
            if self._open is None or self._open["type"] != kind:
                assert kind != "function_call", "arguments of no call"
                events += self._end("completed")
                events += self._begin(kind)
            if events and events[-1]["type"] == _DELTAS[kind]:
                events[-1]["delta"] += piece.text
                self._said.append(piece.text)
            else:
                events.append(self._delta(piece.text))
        return events

    def finish(self, status: str) -> list[_Event]:
        """Nothing more comes; ``status``: of the last item. An answer that says nothing has an empty text."""
        events: list[_Event] = []
        if all(item["type"] == "reasoning" for item in self.output):
            events += [*self._end("completed"), *self._begin("message")]
        if self._open is not None and self._open["type"] == "message" and self._unsaid:
            events.append(self._delta(""))
        return [*events, *self._end(status)]

    def _begin(self, kind: str, **more: Any) -> list[_Event]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{self._key}{len(self.output):02x}", "type": kind}
        own: dict[str, dict[str, Any]] = {
            "message": {"role": "assistant", "content": []},
            "reasoning": {"summary": [], "content": []},
        }
        item |= own.get(kind, more)
        self._open, self._said, self._logprobs = item | {"status": "in_progress"}, [], []
        self.output.append(self._open)
        added = {"type": "response.output_item.added", **self._place(item=False), "item": dict(self._open)}
        if kind == "function_call":
            return [added]
        part = {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": self._part()}
        return [added, part]

    def _delta(self, text: str) -> _Event:
        assert self._open is not None
        kind = self._open["type"]
        self._said.append(text)
        event: _Event = {"type": _DELTAS[kind], **self._place()}
        if kind != "function_call":
            event["content_index"] = 0
        event["delta"] = text
        if kind == "message":
            event["logprobs"], self._unsaid = self._unsaid, []
            self._logprobs += event["logprobs"]
        return event

    def _end(self, status: str) -> list[_Event]:
        """Events of the open item's end, which has its text from now on."""
        item, place = self._open, self._place()
        if item is None:
            return []
        said = "".join(self._said)
        if item["type"] == "function_call":
            item["arguments"] = said
            done = {"arguments": said, "name": item["name"]}
            events = [{"type": "response.function_call_arguments.done", **place, **done}]
        else:
            part, at = self._part(said), {**place, "content_index": 0}
            item["content"] = [part]
            told = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events = [
                {"type": _DELTAS[item["type"]].replace("delta", "done"), **at, "text": said, **told},
                {"type": "response.content_part.done", **at, "part": part},
            ]
        item["status"] = status
        events.append({"type": "response.output_item.done", **self._place(item=False), "item": item})
        self._open = None
        return events

    def _place(self, *, item: bool = True) -> dict[str, Any]:
        if self._open is None:
            return {}
        return ({"item_id": self._open["id"]} if item else {}) | {"output_index": len(self.output) - 1}

    def _part(self, text: str = "") -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


def echoed(body: ResponsesRequest) -> Mapping[str, Any]:
    """What an answer says of its request."""
    wanted = None if body.text is None else body.text.format
    choice = body.tool_choice
    tools = [{"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()]
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
