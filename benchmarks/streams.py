"""What a server's readers see: answers as streams, when each piece came, and the figures of many."""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from outpace.measure.remote import Remote, RemoteError

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shot:
    """An answer as it came. ``at``: when each piece did, in seconds; ``tokens``: as the server counts them."""

    begun: float
    at: tuple[float, ...]
    tokens: int
    text: str

    @property
    def first(self) -> float:
        """Seconds to the first token; of an empty answer, none."""
        return self.at[0] - self.begun if self.at else math.nan

    @property
    def per_token(self) -> float:
        """Seconds a token after the first one came, over the whole answer; of an answer of one token, none."""
        return (self.at[-1] - self.at[0]) / (self.tokens - 1) if self.at and self.tokens > 1 else math.nan

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [now - before for before, now in zip(self.at, self.at[1:], strict=False)]


def read(remote: Remote, body: Body) -> Shot:
    """The answer to a chat. Lines are stamped as they come, and parsed when the answer has ended. Raises RemoteError
    for what is no whole answer."""
    at = urlsplit(remote.base)
    connection = http.client.HTTPConnection(at.netloc, timeout=remote.timeout)
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines: list[tuple[float, bytes]] = []
    begun = time.perf_counter()
    try:
        connection.request(
            "POST", f"{at.path}/chat/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RemoteError(f"HTTP {response.status}: {response.read(1000)!r}", status=response.status)
        while line := response.readline():
            if line.startswith(b"data:"):
                lines.append((time.perf_counter(), line[5:].strip()))
    except (OSError, http.client.HTTPException) as error:
        raise RemoteError(f"{at.netloc} ended an answer in the middle ({error!r})") from error
    finally:
        connection.close()
    return parsed(begun, lines)


def parsed(begun: float, lines: Sequence[tuple[float, bytes]]) -> Shot:
    """The answer that these events with their times are. Raises RemoteError for one that is not whole."""
    if not lines or lines[-1][1] != b"[DONE]":
        raise RemoteError(f"a stream ended without [DONE], after {lines[-1][1][:500] if lines else b'nothing'!r}")
    at: list[float] = []
    text, tokens = "", None
    for moment, data in lines[:-1]:
        chunk = json.loads(data)
        if "error" in chunk:
            raise RemoteError(f"a stream ended with an error: {chunk['error']}")
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        piece, ids = "", 0
        for choice in chunk.get("choices", ()):
            piece += (choice.get("delta") or {}).get("content") or ""
            ids += len(choice.get("token_ids") or ())
        if piece or ids:
            at.append(moment)
            text += piece
    if tokens is None:
        raise RemoteError("a stream has no usage: nobody knows how many tokens it had")
    return Shot(begun, tuple(at), tokens, text)


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which ``part`` of them lie, between neighbours in proportion; NaN of none."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return math.nan
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def figures(shots: Sequence[Shot]) -> dict[str, float]:
    """Of answers that were asked for together; times in seconds."""
    begun = min(shot.begun for shot in shots)
    ended = max(shot.at[-1] if shot.at else shot.begun for shot in shots)
    seconds = max(ended - begun, 1e-9)
    firsts = [shot.first for shot in shots]
    return {
        "requests": len(shots),
        "tokens": sum(shot.tokens for shot in shots),
        "seconds": seconds,
        "requests_per_second": len(shots) / seconds,
        "tokens_per_second": sum(shot.tokens for shot in shots) / seconds,
        "first_p50": quantile(firsts, 0.5),
        "first_p99": quantile(firsts, 0.99),
        **between(shots),
    }


def between(shots: Iterable[Shot]) -> dict[str, float]:
    """Seconds after the first token, over answers and over gaps: TPOT and ICL, as docs/serving.md has them."""
    shots = list(shots)
    each, gaps = [shot.per_token for shot in shots], [gap for shot in shots for gap in shot.gaps]
    return {
        "tpot_p50": quantile(each, 0.5),
        "tpot_p99": quantile(each, 0.99),
        "icl_p50": quantile(gaps, 0.5),
        "icl_p99": quantile(gaps, 0.99),
    }


def together(remote: Remote, bodies: Sequence[Body], concurrency: int) -> list[Shot]:
    """All answers, so many at once. Raises RemoteError."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: read(remote, body), bodies))
