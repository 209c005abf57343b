"""What a client was given of a streamed answer, so that another server can go on with it.

A stream is read by whole events. ``Delivered.take`` says what of an event goes to the client, and keeps its token ids;
``Delivered.resume`` is what the next server is asked. Ids and times stay those that came first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

RESUMABLE = ("/v1/chat/completions", "/v1/completions")
_LOST = ("shutting_down", "engine_stopped", "engine_failing")  # errors after which another server can go on


class LostError(Exception):
    """The server cannot go on with an answer; another can."""


class MixedError(LostError):
    """Another server's bits differ."""


class Delivered:
    """``body``: the request, with a seed; it is not changed."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {**body, "return_token_ids": True}
        self._shows_ids = bool(body.get("return_token_ids"))
        given = (body.get("resume") or {}).get("token_ids") or []
        several = bool(given) and isinstance(given[0], list)
        self._ids: dict[int, list[int]] = dict(enumerate(map(list, given))) if several else {0: list(given)}
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._first: dict[str, Any] = {}
        self.whole = False

    @property
    def model(self) -> Any:
        return self._body.get("model")

    @property
    def fingerprint(self) -> str:
        """What the answer's bits depend on; empty before the first chunk."""
        return str(self._first.get("system_fingerprint", ""))

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
        if not event.startswith(b"data: "):
            return event
        data = event[6:].strip()
        if data == b"[DONE]":
            self.whole = True
            return event
        chunk = json.loads(data)
        if "error" in chunk:
            if chunk["error"].get("code") in _LOST:
                raise LostError(chunk["error"].get("message"))
            self.whole = True
            return event
        self._same(chunk)
        had = bool(chunk["choices"])
        chunk["choices"] = [choice for choice in chunk["choices"] if self._new(choice)]
        if had and not chunk["choices"]:
            return b""
        if not self._shows_ids:
            chunk.pop("prompt_token_ids", None)
            if all(choice["finish_reason"] is None for choice in chunk["choices"]):
                chunk.pop("seed", None)
        return b"data: %s\n\n" % json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()

    def _same(self, chunk: dict[str, Any]) -> None:
        """Give ``chunk`` the stream's id and time. Raises MixedError."""
        if not self._first:
            self._first = {name: chunk[name] for name in ("id", "created", "system_fingerprint")}
        if chunk["system_fingerprint"] != self._first["system_fingerprint"]:
            ours, other = self._first["system_fingerprint"], chunk["system_fingerprint"]
            raise MixedError(f"the answer began with {ours}, and this server has {other}")
        chunk.update(self._first)

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
