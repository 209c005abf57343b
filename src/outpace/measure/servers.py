"""``outpace verify --url``: do two servers, or two ways to ask one, say the same? Where not, how near was it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outpace.common.parameter import Integer, Number, Texts
from outpace.errors import Argument, ParameterError
from outpace.measure.compare import NEAR_TIE
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Answer, Remote, RemoteError, Token
from outpace.params import PARAMETERS, SamplingParams

TOP = 5  # alternatives a token, where a server tells them: for the gap
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class RemoteDifference:
    """The first one between two answers. ``what``: token, text (the servers tell no tokens), logprob (the tokens are
    the same, the bits are not) or finish; ``index``: a token's, or a character's of the text. ``gap`` in nats: how far
    the worse of two tokens lies below the better, by what the servers say; None where they do not say."""

    what: str
    index: int
    a: Any
    b: Any
    gap: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", gap {self.gap:.2g}{' (near-tie)' if self.near_tie else ''}"
        unit = "character" if self.what == "text" else "token"
        kind = "" if self.what in ("token", "text") else f"{self.what} "
        return f"{kind}DIFFERENT at {unit} {self.index} ({self.a!r} / {self.b!r}{gap})"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "near_tie": self.near_tie}


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


def difference(a: Answer, b: Answer) -> RemoteDifference | None:
    """None where two answers are the same: in their tokens and the bits of their logprobs if both tell them, in their
    text and how they ended. Where the text is the same, tokens that do not make it count as logprobs."""
    if a.tokens is not None and b.tokens is not None:
        for i, (token, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
            if token.text != other.text:
                # llama.cpp's server tells under a grammar which token would have come without it
                what = "token" if a.text != b.text or (_spells(a) and _spells(b)) else "logprob"
                return RemoteDifference(what, i, token.text, other.text, _gap(token, other))
        short, there = min(len(a.tokens), len(b.tokens)), (a.tokens, b.tokens)
        if len(a.tokens) != len(b.tokens):
            x, y = (tokens[short].text if len(tokens) > short else None for tokens in there)
            return RemoteDifference("token", short, x, y)
    if a.text != b.text:
        pairs = enumerate(zip(a.text, b.text, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), min(len(a.text), len(b.text)))
        return RemoteDifference("text", at, a.text[at : at + 20], b.text[at : at + 20])
    if a.finish != b.finish:
        return RemoteDifference("finish", len(a.tokens or a.text), a.finish, b.finish)
    for i, (token, other) in enumerate(zip(a.tokens or (), b.tokens or (), strict=False)):
        if token.logprob != other.logprob:
            return RemoteDifference("logprob", i, token.logprob, other.logprob, abs(token.logprob - other.logprob))
    return None


def _spells(answer: Answer) -> bool:
    """Whether the tokens of the logprobs make the text, with thoughts, stop strings or ends perhaps beside it."""
    spelled = "".join(token.text for token in answer.tokens or ())
    return answer.text in spelled.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _gap(x: Token, y: Token) -> float | None:
    """How far apart the two tokens lie in the answer that knows both; the larger of two such figures."""
    found = [abs(one.logprob - one.top[other]) for one, other in ((x, y.text), (y, x.text)) if other in one.top]
    return max(found) if found else None
