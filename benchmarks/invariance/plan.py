"""Which questions are asked in which ways: an even sample of all that may go on around a request."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any, TypeVar

from outpace.errors import Argument, ParameterError
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Remote
from outpace.measure.verify import Way, bodies
from outpace.params import SamplingParams

T = TypeVar("T")
ASKED = 10  # times that a question is asked, if there are enough of them
LEAST = 0.5  # of the longest answer's tokens that the shortest one may have
NOISES: tuple[tuple[str, SamplingParams, Mapping[str, Any]], ...] = (
    ("greedy", SamplingParams(seed=1000), {}),
    ("temperature 0.8, top_p", SamplingParams(seed=1001, temperature=0.8, top_p=0.95), {}),
    ("temperature 1, penalty", SamplingParams(seed=1002, temperature=1.0, presence_penalty=0.5), {}),
    (
        "grammar",
        SamplingParams(seed=1003, temperature=0.8),
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "said",
                    "schema": {
                        "type": "object",
                        "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}},
                        "required": ["answer", "sure"],
                        "additionalProperties": False,
                    },
                },
            }
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many requests are in flight, and how many clients beside them begin streams and go away."""

    name: str
    concurrency: int
    neighbours: int = 0


CROWDS = (
    Crowd("alone", 1),
    Crowd("4 at once", 4),
    Crowd("16 at once", 16),
    Crowd("16, and some leave", 16, 4),
)
STREAMS = ("whole", "streamed")
HIT, MISS = "prefix warmed", "prefix not reused"
FIRST = "first start"  # which also says what is expected


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a kind of server can be told: ``starts``, more arguments by name, each a process of its own; ``prefix`` and
    ``speculation``, fields of a request by name. ``{item}`` in a field is the request's number. ``plain``: starts at
    which nothing drafts. ``ours``: it promises bits, names them by its fingerprint, and counts preemptions."""

    starts: Mapping[str, str]
    prefix: Mapping[str, Mapping[str, Any]]
    speculation: Mapping[str, Mapping[str, Any]]
    plain: frozenset[str] = frozenset()
    ours: bool = False

    def fields(self, item: Item) -> dict[str, Any]:
        """What is sent beside the question."""
        told = {**self.prefix[item.prefix], **self.speculation[item.speculation]}
        return {
            name: value.format(item=item.number) if isinstance(value, str) else value for name, value in told.items()
        }


_STARTS = {FIRST: "", "started again": ""}
OURS = Dialect(
    {
        **_STARTS,
        "one thread": "--threads 1",
        "drafter ngram": "--drafter ngram",
        "drafter none": "--drafter none",
        "4 rows": "--max-rows 4",
        "small chunks": "--prefill-delay 0.001",
        "little memory": "--kv-memory 8MiB",
    },
    {HIT: {}, MISS: {"reuse_prefix": False}},
    {
        "as it likes": {},
        "off": {"speculation": {"off": True}},
        "size 1": {"speculation": {"size": 1}},
        "size 8": {"speculation": {"size": 8}},
        "drafter suffix": {"speculation": {"drafter": "suffix"}},
    },
    frozenset({"drafter none"}),
    ours=True,
)
OURS_OPTIONS = "--more-drafter suffix"
OTHERS = {
    "llamacpp": Dialect(_STARTS, {HIT: {}, MISS: {"cache_prompt": False}}, {"as it likes": {}}),
    "vllm": Dialect(_STARTS, {HIT: {}, MISS: {"cache_salt": "{item}"}}, {"as it likes": {}}),
}
OPENAI = Dialect(_STARTS, {HIT: {}}, {"as it likes": {}})  # a server of which nothing else is known


@dataclass(frozen=True, slots=True)
class Item:
    """A question asked in a way."""

    number: int
    question: int
    start: str
    crowd: Crowd
    stream: str
    prefix: str
    speculation: str

    @property
    def ways(self) -> dict[str, str]:
        """What it stands for, by axis."""
        return {
            "start": self.start,
            "crowd": self.crowd.name,
            "stream": self.stream,
            "prefix": self.prefix,
            "speculation": self.speculation,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """``body``: of a chat, without model; ``noise``: a name of ``NOISES``."""

    noise: str
    body: Mapping[str, Any]


def questions(rows: Sequence[PromptRow], tokens: int) -> list[Question]:
    """Every row under every noise, with answers of half of ``tokens`` up to all. Raises ParameterError."""
    if tokens < 1:
        raise ParameterError(Argument("tokens", tokens), " is out of range: give at least 1")
    nowhere = Remote("")  # whoever is asked, the body is the same
    least = max(int(tokens * LEAST), 1)
    found = []
    for i, row in enumerate(rows):
        for name, noise, more in NOISES:
            params = noise.with_(max_tokens=least + i % (tokens - least + 1))
            (body,) = bodies([row], params, Way(name, nowhere, "", more=more), logprobs=True)
            del body["model"]
            found.append(Question(name, body))
    return found


def planned(dialect: Dialect, known: int, requests: int, seed: int = 0) -> list[Item]:
    """So many requests, in the order of starts and crowds, of the first ``known`` that ``questions`` made. Each value
    of an axis, each noise, and each question that is used comes as often as any other. Raises ParameterError."""
    if requests < 1:
        raise ParameterError(Argument("requests", requests), " is out of range: give at least 1")
    dice = random.Random(seed)
    shuffled = [dice.sample(its, len(its)) for its in (range(n, known, len(NOISES)) for n in range(len(NOISES)))]
    chosen = [q for row in zip_longest(*shuffled) for q in row if q is not None][: -(-requests // ASKED)]
    decks = {name: _deck(list(_ways(dialect, name)), dice) for name in dialect.starts}
    each = _deck(chosen, dice)
    phases = list(product(dialect.starts, CROWDS))
    found: list[Item] = []
    for i, (start, crowd) in enumerate(phases):
        while len(found) < (i + 1) * requests // len(phases):
            found.append(Item(len(found), next(each), start, crowd, *next(decks[start])))
    return found


def _ways(dialect: Dialect, start: str) -> Iterator[tuple[str, str, str]]:
    speculation = list(dialect.speculation)[:1] if start in dialect.plain else dialect.speculation
    yield from product(STREAMS, dialect.prefix, speculation)


def _deck(cards: Sequence[T], dice: random.Random) -> Iterator[T]:
    """All cards, in a new order each time."""
    while True:
        yield from dice.sample(cards, len(cards))
