"""OpenAI-compatible servers, as ``outpace verify --url`` needs them: chats, ways to have them answered, and whether two
answers are the same."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from outpace.common.parameter import Integer, Number, Texts
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.measure.prompts import PromptRow
from outpace.measure.same import Difference, Output
from outpace.measure.same import difference as first_of
from outpace.params import PARAMETERS, SamplingParams

TOP = 5  # alternatives a token, where a server tells them: for the gap
_DEFAULTS = SamplingParams()
_TRIES = 5  # of a request that the server asks to repeat later
_LONGEST = 30.0  # seconds between two of them


class RemoteError(OutpaceError):
    """A server cannot be reached, refuses, or answers what is no answer. ``status``: its HTTP status, if it has one."""

    def __init__(self, *parts: Any, status: int | None = None) -> None:
        super().__init__(*parts)
        self.status = status


@dataclass(frozen=True, slots=True)
class Token:
    """A token as a server sends it; ``top``: the likeliest ones' logprobs in nats, by text."""

    text: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens``: None where the server sends no logprobs; ``speculation``: statistics, None where there are none."""

    text: str
    finish: str | None
    tokens: tuple[Token, ...] | None
    speculation: Mapping[str, Any] | None = None
    fingerprint: str | None = None

    @property
    def output(self) -> Output:
        """What another server's answer can be compared with."""
        if self.tokens is None:
            return Output(None, self.text, None, self.finish)
        tokens, logprobs = (tuple(getattr(token, name) for token in self.tokens) for name in ("text", "logprob"))
        return Output(tokens, self.text, logprobs, self.finish)


@dataclass(frozen=True, slots=True)
class Remote:
    """A server. ``url``: with or without /v1; ``key``: for its Authorization header, in no message; ``timeout``: of one
    answer, in seconds."""

    url: str
    key: str | None = None
    timeout: float = 600.0

    @property
    def base(self) -> str:
        """The address that paths are added to."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    def models(self) -> list[str]:
        """What it serves. Raises RemoteError."""
        with self._open("/models", None) as response:
            listed = _json(self.base, response)
        try:
            return [str(model["id"]) for model in listed["data"]]
        except (KeyError, TypeError) as error:
            raise RemoteError(f"{self.base}/models does not list models: is it an OpenAI-compatible server?") from error

    def model(self, wanted: str | None) -> str:
        """``wanted``, or the first that it serves. Raises RemoteError for one that it does not."""
        there = self.models()
        if not there or (wanted is not None and wanted not in there):
            served = ", ".join(there) or "nothing"
            raise RemoteError(f"{self.url} serves {served}; name one as ", Argument("model"))
        return there[0] if wanted is None else wanted

    def chat(self, body: Mapping[str, Any], *, stream: bool = False) -> Answer:
        """The answer to a request for a chat. Raises RemoteError."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body
        with self._open("/chat/completions", asked) as response:
            try:
                return _streamed(self.base, response) if stream else _whole(_json(self.base, response))
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise RemoteError(f"{self.base} answers what is no chat completion ({error!r})") from error
            except (OSError, HTTPException) as error:
                raise RemoteError(f"{self.base} ended an answer in the middle ({error})") from error

    def chats(self, bodies: Sequence[Mapping[str, Any]], concurrency: int, *, stream: bool = False) -> list[Answer]:
        """All answers, in order, so many at once. Raises RemoteError."""
        if concurrency == 1:
            return [self.chat(body, stream=stream) for body in bodies]
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [pool.submit(self.chat, body, stream=stream) for body in bodies]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that ``path``, below /v1, answers. Raises RemoteError."""
        with self._open(path, body) as response:
            return _json(self.base, response)

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "User-Agent": "outpace"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        for last in (*[False] * (_TRIES - 1), True):
            try:
                request = urllib.request.Request(self.base + path, data, headers)
                return urllib.request.urlopen(request, timeout=self.timeout)
            except urllib.error.HTTPError as error:
                with error:
                    why, busy = _reason(error), error.headers.get("Retry-After", "")
                waits = error.code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
                if last or not waits or not busy.isdecimal() or int(busy) > _LONGEST:
                    raise RemoteError(f"{self.base}{path} refuses ({why})", status=error.code) from None
                time.sleep(int(busy))
            except (OSError, HTTPException, ValueError) as error:
                reason = getattr(error, "reason", error)
                raise RemoteError(f"{self.base} cannot be reached ({reason}): check ", Argument("url")) from error
        raise AssertionError("unreachable")


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        message = json.loads(error.read(1 << 16))["error"]["message"]
        return f"HTTP {error.code}: {' '.join(str(message).split())}"
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


def _json(base: str, response: Any) -> Any:
    try:
        return json.loads(response.read())
    except (ValueError, OSError, HTTPException) as error:
        raise RemoteError(f"{base} answers what is no JSON ({error})") from error


def _whole(answer: Any) -> Answer:
    choice = answer["choices"][0]
    return Answer(
        str(choice["message"].get("content") or ""),
        choice.get("finish_reason"),
        _tokens(choice.get("logprobs")),
        (answer.get("usage") or {}).get("speculation"),
        answer.get("system_fingerprint"),
    )


def _streamed(base: str, response: Any) -> Answer:
    text, finish, usage, fingerprint = "", None, None, None
    tokens: list[Token] | None = None
    done = False
    for chunk in _events(base, response):
        if chunk is None:
            done = True
            break
        fingerprint = chunk.get("system_fingerprint") or fingerprint
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            text += choice.get("delta", {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
            if (more := _tokens(choice.get("logprobs"))) is not None:
                tokens = [*(tokens or ()), *more]
    if not done:
        raise RemoteError(f"{base} ended a stream without [DONE]")
    whole = None if tokens is None else tuple(tokens)
    return Answer(text, finish, whole, (usage or {}).get("speculation"), fingerprint)


def _events(base: str, response: Any) -> Iterator[Any]:
    """The stream's JSON, one an event; None: its end."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            chunk = None if data == b"[DONE]" else json.loads(data)
            if chunk is not None and "error" in chunk:
                raise RemoteError(f"{base} failed in the middle of an answer ({chunk['error']})")
            yield chunk


def _tokens(logprobs: Any) -> tuple[Token, ...] | None:
    if not logprobs or logprobs.get("content") is None:
        return None
    return tuple(
        Token(
            _spelled(item),
            float(item["logprob"]),
            {_spelled(other): float(other["logprob"]) for other in item.get("top_logprobs") or ()},
        )
        for item in logprobs["content"]
    )


def _spelled(item: Any) -> str:
    """A token by its bytes, where the server sends them: half a character has no text."""
    code = item.get("bytes")
    return str(item["token"]) if not code else bytes(code).decode("utf-8", "surrogateescape")


# -- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """One way to have prompts answered."""

    name: str
    server: Remote
    model: str
    concurrency: int = 1
    more: Mapping[str, Any] | None = None  # of the body


def ways(a: Remote, b: Remote | None, wanted: str | None, concurrency: int) -> tuple[list[Way], list[str]]:
    """What to compare, the first with each other, and notes: two servers, or one alone, crowded, and with its
    speculation off and on where it takes our field for it. Raises RemoteError."""
    first = Way(a.url, a, a.model(wanted))
    if b is not None:
        there = b.models()
        model = first.model if first.model in there else b.model(wanted)
        return [first, Way(b.url, b, model)], [f"{a.url} serves {first.model}, {b.url} {model}"]
    first = Way("alone", a, first.model)
    found = [first, Way(f"{concurrency} at once", a, first.model, concurrency)]
    probe = {"model": first.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    off = {"speculation": {"off": True}}
    try:
        answered = a.chat({**probe, **off}).speculation
        refusal = None if answered is not None else "takes speculation: {off} and reports none"
    except RemoteError as error:
        if error.status is None or error.status >= 500:
            raise
        refusal = f"does not take it ({error})"
    if refusal is None:
        found += [Way("speculation off", a, first.model, 1, off)]
        return found, []
    return found, [f"speculation is not turned off: {a.url} {refusal}"]


def bodies(rows: Sequence[PromptRow], params: SamplingParams, way: Way, *, logprobs: bool) -> list[dict[str, Any]]:
    """A request for each row's first turn. Raises ParameterError for what cannot be sent."""
    sent: dict[str, Any] = {"temperature": params.temperature, "seed": params.seed, "max_tokens": params.max_tokens}
    for name, parameter in PARAMETERS.items():
        value = getattr(params, name)
        if name in sent or value == getattr(_DEFAULTS, name):
            continue
        plain = parameter.request == name and isinstance(parameter.values, (Number, Integer, Texts))
        if not plain:
            raise ParameterError(Argument(name), " is not sent to servers, which spell it differently: leave it out")
        sent[name] = list(value) if isinstance(value, tuple) else value
    if logprobs:
        sent |= {"logprobs": True, "top_logprobs": TOP}
    found = []
    for row in rows:
        if row.token_ids:
            raise ParameterError(f"prompt {row.id} is token ids, and a chat takes text: leave it out")
        messages = list(row.messages) or [{"role": "user", "content": row.turns[0]}]
        found.append({"model": way.model, "messages": messages, **sent, **(way.more or {})})
    return found


def answers(rows: Sequence[PromptRow], params: SamplingParams, way: Way) -> tuple[list[Answer], str | None]:
    """What the server says to all rows, and a note where it refuses to tell logprobs. Raises RemoteError."""
    try:
        return way.server.chats(bodies(rows, params, way, logprobs=True), way.concurrency), None
    except RemoteError as error:
        if error.status not in (400, 422, 501):
            raise
        plain = way.server.chats(bodies(rows, params, way, logprobs=False), way.concurrency)
        return plain, f"{way.server.url} sends no logprobs, so texts are compared ({error})"


def difference(a: Answer, b: Answer) -> Difference | None:
    """None where two answers are the same: in their tokens and the bits of their logprobs if both tell them, in their
    text and how they ended. Its gap is what the servers say, in nats. Where the text is the same, tokens that do not
    make it count as logprobs."""
    found = first_of(a.output, b.output)
    if found is None or found.what not in ("token", "logprob") or None in found.values:
        return found
    assert a.tokens is not None
    assert b.tokens is not None
    x, y = a.tokens[found.index], b.tokens[found.index]
    if found.what == "logprob":
        return replace(found, gap=abs(x.logprob - y.logprob))
    # llama.cpp's server tells under a grammar which token would have come without it
    what = "token" if a.text != b.text or (_spells(a) and _spells(b)) else "logprob"
    return replace(found, what=what, gap=_gap(x, y))


def _spells(answer: Answer) -> bool:
    """Whether the tokens of the logprobs make the text, with thoughts, stop strings or ends perhaps beside it."""
    spelled = "".join(token.text for token in answer.tokens or ())
    return answer.text in spelled.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _gap(x: Token, y: Token) -> float | None:
    """How far apart the two tokens lie in the answer that knows both; the larger of two such figures."""
    found = [abs(one.logprob - one.top[other]) for one, other in ((x, y.text), (y, x.text)) if other in one.top]
    return max(found) if found else None
