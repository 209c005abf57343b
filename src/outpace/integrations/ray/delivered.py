"""What a client was given of a streamed answer, so that another server can go on with it.

A stream is read by whole events. ``Delivered.take`` says what of an event goes to the client, and keeps its token ids;
``Delivered.request`` is what the next server is asked. Ids and times stay those that came first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

_LOST = ("shutting_down", "engine_stopped", "engine_failing", "overloaded_error")  # others can go on after these errors

_FIRST = {"response.created": 0, "response.in_progress": 1, "message_start": 0}  # events, and how many are before them
_ENDS = ("response.output_item.done", "content_block_stop")  # the last that has token ids, where the answer has ended
_LAST = {"response.completed": True, "response.incomplete": True, "message_delta": False, "message_stop": True}
_KEY = 32  # digits


class LostError(Exception):
    """The server cannot go on with an answer; another can."""


class Delivered:
    """Of chats and completions. ``body``: the request, with a seed; it is not changed. ``whole``: the stream has
    ended; ``fingerprint``: what its bits depend on, empty before it began."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {**body, "return_token_ids": True}
        self._shows_ids = bool(body.get("return_token_ids"))
        self._ids = _given(body.get("resume"))
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._first: dict[str, Any] = {}
        self.fingerprint = ""
        self.whole = False

    @property
    def model(self) -> Any:
        return self._body.get("model")

    def request(self) -> dict[str, Any]:
        """The JSON for the next server."""
        if not any(self._ids.values()):
            return self._body
        prompt = self._body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        ids = [self._ids.get(index, []) for index in range(prompts * (self._body.get("n") or 1))]
        return {**self._body, "resume": {"token_ids": ids if len(ids) > 1 else ids[0]}}

    def take(self, event: bytes) -> bytes:
        """What the client gets of ``event``, which ends with an empty line. Raises LostError."""
        _, found, text = event.rpartition(b"data: ")
        if event.startswith(b":") or not found:
            return event
        if text.strip() == b"[DONE]":
            self.whole = True
            return event
        data = json.loads(text)
        if error := data.get("error") or (data.get("response") or {}).get("error"):
            if error.get("code", error.get("type")) in _LOST:
                raise LostError(error["message"])
            self.whole = True
            return self._written(data)
        return self._take(data)

    def _take(self, chunk: dict[str, Any]) -> bytes:
        if not self._first:
            self._first = {name: chunk[name] for name in ("id", "created")}
        chunk.update(self._first)
        had = bool(chunk["choices"])
        chunk["choices"] = [choice for choice in chunk["choices"] if self._new(choice)]
        if had and not chunk["choices"]:
            return b""
        if not self._shows_ids:
            chunk.pop("prompt_token_ids", None)
            if all(choice["finish_reason"] is None for choice in chunk["choices"]):
                chunk.pop("seed", None)
        return self._written(chunk)

    def _written(self, data: dict[str, Any]) -> bytes:
        return b"data: %s\n\n" % json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()

    def _new(self, choice: dict[str, Any]) -> bool:
        """Take up a choice's part; whether the client has not had it."""
        index = choice["index"]
        if index in self._ended:
            return False
        delta = choice.get("delta", {})
        if delta.get("role") and index in self._begun:
            return False
        self._begun.add(index)
        ids = choice.get("token_ids") if self._shows_ids else choice.pop("token_ids", None)
        self._ids.setdefault(index, []).extend(ids or [])
        if choice["finish_reason"] is not None:
            self._ended.add(index)
        return True


def _given(resume: Any) -> dict[int, list[int]]:
    """The token ids that a request resumes after, by choice; none of what is malformed, which the server refuses."""
    given = resume.get("token_ids") if isinstance(resume, dict) else None
    if not isinstance(given, list) or not given:
        return {0: []}
    if all(isinstance(each, list) for each in given):
        return dict(enumerate(map(list, given)))
    return {0: list(given)}


class DeliveredEvents(Delivered):
    """Of responses and Anthropic's messages: their events count, and go to the client, once one has token ids."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self._held: list[dict[str, Any]] = []
        self._over = False  # only the last events are missing
        self._sent = 0  # events
        self._key = ""  # what ids of items have in common
        self._created = 0
        self._logprobs: defaultdict[int, list[Any]] = defaultdict(list)  # by item

    def request(self) -> dict[str, Any]:
        self._held = []
        return super().request()

    def _take(self, data: dict[str, Any]) -> bytes:
        kind = data["type"]
        if kind in _FIRST:
            return self._written(data) if self._sent == _FIRST[kind] else b""
        if self._over and kind not in _LAST:
            return b""
        self._held.append(data)
        self.whole = _LAST.get(kind, False)
        if "token_ids" not in data and not self.whole:
            return b""
        self._ids[0] += data.get("token_ids", ())
        self._over = kind in _ENDS
        held, self._held = self._held, []
        return b"".join(map(self._written, held))

    def _written(self, data: dict[str, Any]) -> bytes:
        """As an event of the one answer."""
        at, response = data.get("output_index", 0), data.get("response")
        items = [data["item"]] if "item" in data else response["output"] if response else []
        if "sequence_number" in data:
            data["sequence_number"] = self._sent
        if "item_id" in data:
            data["item_id"] = self._same_key(data["item_id"])
        for each in [*items, *([response] if response else [])]:
            each["id"] = self._same_key(each["id"])
        if response:
            response["created_at"] = self._created = self._created or response["created_at"]
        if data["type"] == "response.output_text.delta":
            self._logprobs[at] += data["logprobs"]
        else:
            parts = [(at, data), (at, data.get("part", {}))]
            parts += [(index, part) for index, item in enumerate(items, at) for part in item.get("content", ())]
            for index, part in parts:
                if "logprobs" in part:
                    part["logprobs"] = self._logprobs[index]
        if not self._shows_ids:
            for each in (data, response or {}):
                each.pop("token_ids", None)
                each.pop("prompt_token_ids", None)
        self._sent += 1
        return b"event: %s\n%s" % (data["type"].encode(), super()._written(data))

    def _same_key(self, name: str) -> str:
        kind, _, key = name.partition("_")
        self._key = self._key or key[:_KEY]
        return f"{kind}_{self._key}{key[_KEY:]}"


RESUMABLE = {
    "/v1/chat/completions": Delivered, "/v1/completions": Delivered,
    "/v1/responses": DeliveredEvents, "/v1/messages": DeliveredEvents,
}  # fmt: skip
