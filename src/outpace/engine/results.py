"""What callers get back: deltas as a request gains tokens, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Literal

from outpace.engine.statistics import Stats
from outpace.errors import OutpaceError
from outpace.exact.sampling import TokenLogprob
from outpace.params import Acceptance

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
Errors = Literal["raise", "return"]
TARGET = "target"  # the source of recovered and bonus tokens
_COLOURS = ("46, 160, 67", "9, 105, 218", "191, 135, 0", "130, 80, 223")  # of drafters, in the order of their tokens
_SHOWN = 60  # characters of a text in a repr


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sample of a request gained since its last delta.

    ``request``: the id that ``Engine.add`` returned; ``sample``: from 0 to n - 1. ``text`` may lag behind ``token_ids``
    while a character or a stop string is incomplete. ``sources``: who wrote each token, a drafter's name or "target".
    ``logprobs``: of each token, where they were asked for; ``prompt_logprobs``: with the first delta. ``drafted``:
    draft tokens verified since the last delta. The last delta has a ``finish_reason`` and the ``result``.
    """

    request: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    drafted: int = 0
    finish_reason: FinishReason | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One finished sample of one request: plain values, which can be pickled, copied, and made a dictionary by
    ``dataclasses.asdict``. ``str(result)`` is its text.

    ``request``, ``sample``, ``text``, ``token_ids``, ``sources``, ``logprobs``: as in ``Delta``, of the whole answer.
    Tokens that it was resumed after have the source "resumed" and no log-probabilities.
    ``finish_reason``: "stop" (EOS, a stop string or a stop id, which ``stopped_by`` names), "length", "cancelled",
    "deadline" or "error" (``error`` is its message, ``cause`` the exception where one was raised). ``prompt_tokens``:
    how many the prompt has. ``seed``: of the noise, drawn where none was given; the same request with it gets the same
    tokens. ``drafter`` and ``acceptance``: what drafted ("none": plain decoding) and how drafts were verified.
    ``stats``: counts and times. ``prompt_logprobs``: one a prompt token, None for the first. ``notes``: what was turned
    off or is lossy, and why. ``pieces``: the text in order as ``(piece, source)``: whole characters, credited to the
    token that ended them. Neighbours of one source are one piece; "target" wrote what no drafter did.
    """

    request: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    drafter: str
    acceptance: Acceptance
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    stopped_by: str | int | None = None
    error: str | None = None
    cause: OutpaceError | None = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()
    pieces: tuple[tuple[str, str], ...] = ()

    @property
    def completion_tokens(self) -> int:
        """How many tokens the answer has."""
        return len(self.token_ids)

    def raise_for_error(self) -> Result:
        """The result itself. Raises the error that ended it, where one did."""
        if self.error is not None:
            raise self.cause or OutpaceError(self.error)
        return self

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 3] + "..."
        end = f"error: {self.error}" if self.error is not None else self.finish_reason
        return f"Result({text!r}, {end}, {self.drafter}, {self.stats.summary})"

    def _repr_html_(self) -> str:
        """For notebooks: the text, what drafters wrote in colour, and the figures."""
        drafters = [source for source in dict.fromkeys(self.sources) if source != TARGET]
        colour = {source: f"rgba({_COLOURS[i % len(_COLOURS)]}, 0.3)" for i, source in enumerate(drafters)}

        def marked(text: str, source: str) -> str:
            text = escape(text)
            return f'<span style="background: {colour[source]}">{text}</span>' if source in colour else text

        text = "".join(marked(*piece) for piece in self.pieces)
        who = ", ".join([*(marked(source, source) for source in drafters), "the rest: the target's own"])
        figures = "; ".join([self.finish_reason, self.stats.summary, *self.notes])
        figures = f"error: {self.error}; {figures}" if self.error is not None else figures
        return (
            f'<div style="white-space: pre-wrap">{text}</div>'
            f'<div style="opacity: 0.7; font-size: smaller">{who}<br>{escape(figures)}</div>'
        )


def joined(deltas: list[Delta]) -> list[Delta]:
    """The same with one delta a sample, in the order in which they first come."""
    parts: dict[tuple[int, int], list[Delta]] = {}
    for delta in deltas:
        parts.setdefault((delta.request, delta.sample), []).append(delta)
    return [own[0] if len(own) == 1 else _one(own) for own in parts.values()]


def _one(parts: list[Delta]) -> Delta:
    first, last = parts[0], parts[-1]
    return Delta(
        request=first.request,
        sample=first.sample,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        sources=tuple(source for part in parts for source in part.sources),
        logprobs=tuple(token for part in parts for token in part.logprobs),
        prompt_logprobs=tuple(token for part in parts for token in part.prompt_logprobs),
        drafted=sum(part.drafted for part in parts),
        finish_reason=last.finish_reason,
        result=last.result,
    )
