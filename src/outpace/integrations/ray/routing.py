"""Which replica a request goes to: the one that has answered the longest beginning of it, unless too much is there."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any

PIECE = 512  # characters of a text, or token ids, that are compared as one
MOST = 256  # pieces of one request that are compared
REMEMBERED = 100_000  # beginnings
_PRIME = 2**61 - 1
SLACK = 1.25  # a replica may have so much of the mean load, and one request more


def beginnings(body: Any) -> list[str]:
    """Digests of longer and longer beginnings of the prompt in a request's JSON: what comes before all messages first,
    then each piece of the messages or the text. None for what has no prompt."""
    if not isinstance(body, Mapping):
        return []
    head = [body.get(name) for name in ("model", "tools", "system", "instructions")]
    given = next((body[name] for name in ("messages", "prompt", "input") if body.get(name)), None)
    if given is None:
        return []
    parts = given if isinstance(given, list) and isinstance(given[0], dict) else [given]
    texts = [json.dumps(part, sort_keys=True) for part in parts[:MOST]]
    pieces = [text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE)][:MOST]
    if not any(head[1:]):  # a system prompt is the first message
        head.append(pieces.pop(0))

    def longer(seen: bytes, text: str) -> bytes:
        return blake2b(text.encode(), key=seen, digest_size=12).digest()

    return [seen.hex() for seen in accumulate(pieces, longer, initial=longer(b"", json.dumps(head)))]


class Routes:
    """What was sent where. ``names`` of replicas are any strings."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, str] = OrderedDict()  # a beginning: the replica that was sent it last

    def choose(self, begins: Sequence[str], load: Mapping[str, int], avoid: Collection[str] = ()) -> str | None:
        """One of ``load``'s replicas (its requests in flight); None: all are to be avoided.

        The longest beginning that some replica has answered decides, else rendezvous hashing of the first, on which
        several routers agree; a replica with more than its share of the load is passed over.
        """
        usable = {name: count for name, count in load.items() if name not in avoid} if avoid else load
        if not usable:
            return None
        bound = SLACK * sum(usable.values()) / len(usable) + 1
        light = {name for name, count in usable.items() if count < bound}
        known = (self._last.get(begin) for begin in reversed(begins))
        chosen = next((name for name in known if name in light), None)
        if chosen is None and begins:
            first = int(begins[0], 16)
            chosen = max(light, key=lambda name: first * _number(name) % _PRIME)
        elif chosen is None:
            chosen = min(usable, key=lambda name: (usable[name], name))
        for begin in begins:
            self._last[begin] = chosen
            self._last.move_to_end(begin)
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return chosen


@lru_cache(maxsize=10_000)
def _number(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) % _PRIME
