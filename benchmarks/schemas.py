"""JSON schemas, random and in the shape of public suites: valid answers, the same with drafts as without, and how fast.

    python -m benchmarks.schemas --count 200

Every schema is answered twice in turn under the same grammar, plainly and with drafts (lookups, and the text that must
follow). An answer has to be valid by ``jsonschema`` and the same both times. The exit status says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

WORDS = (
    "name", "title", "status", "kind", "city", "street", "email", "phone", "price", "total", "count", "rating",
    "score", "tags", "items", "owner", "author", "created", "updated", "color", "size", "weight", "country",
    "language", "version", "path", "active", "verified", "notes", "summary", "category", "level", "parent",
)  # fmt: skip
PATTERNS = (
    r"^[A-Z]{2}-[0-9]{4}$", r"^#[0-9a-f]{6}$", r"^[a-z]{3,10}$", r"^v[0-9]\.[0-9]{1,2}$", r"^\+?[0-9]{7,11}$",
    r"^(low|medium|high)-[a-z]{2,8}$", r"^[A-Za-z]+( [A-Za-z]+){0,2}$",
)  # fmt: skip
FORMATS = ("date", "date-time", "uuid", "ipv4", "time")
Schema = dict[str, Any]


def schema(rng: Random, depth: int = 3) -> Schema:
    """An object with bounded strings, numbers and arrays, so that every answer ends; depth: of nesting."""
    root = _object(rng, depth)
    if rng.random() < 0.2:
        root["$defs"] = {"shared": _value(rng, 1)}
        root["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        root["required"].append("shared")
    return root


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 5))
    required = [name for name in names if rng.random() < 0.8] or names[:1]
    its = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}, "required": required}
    return {**its, "additionalProperties": False}


def _value(rng: Random, depth: int) -> Schema:
    kinds: list[Callable[[Random, int], Schema]] = [_string, _string, _enum, _integer, _number, _boolean]
    if depth > 0:
        kinds += [_object, _array, _any]
    return rng.choice(kinds)(rng, depth)


def _boolean(rng: Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _any(rng: Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 40}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(8, 40)}


def _enum(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        return {"const": rng.choice(["fixed value", 42, True, None])}
    values: list[Any] = rng.sample(WORDS, rng.randint(2, 5))
    return {"enum": [*values, None] if rng.random() < 0.2 else values}


def _integer(rng: Random, depth: int) -> Schema:
    low = rng.choice([0, 1, -100])
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([5, 100, 100_000])}


def _number(rng: Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": rng.choice([1, 10, 1000])}


def _array(rng: Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = _value(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(1, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--first", type=int, default=0, help="number of the first schema")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--verbose", action="store_true", help="print every answer")
    given = parser.parse_args()

    from jsonschema import Draft202012Validator

    from outpace import Engine, Grammars, SamplingParams

    seconds, steps, sources = dict.fromkeys(("plain", "drafts"), 0.0), Counter[str](), Counter[str]()
    ratios: list[float] = []
    failures: list[str] = []
    tokens = cut = 0
    options = {} if given.threads is None else {"threads": given.threads}
    with Engine.load(given.model, drafter=given.drafter, prefix_rows=0, **options) as engine:
        grammars = Grammars.of(engine)
        for number in range(given.first, given.first + given.count):
            its = schema(Random(number))
            prompt = f"Write one example as JSON. Its schema: {json.dumps(its)}"
            params = SamplingParams(
                rules=[grammars.json_schema(its)], temperature=given.temperature, seed=number, max_tokens=given.tokens
            )
            if number == given.first:
                engine.generate(prompt, params.with_(max_tokens=8))
            ways = {"drafts": None, "plain": False} if number % 2 else {"plain": False, "drafts": None}
            results = {name: engine.generate(prompt, params, drafter=drafter) for name, drafter in ways.items()}
            said = results["drafts"]
            if given.verbose:
                print(number, said.finish_reason, said.text)
            if said.token_ids != results["plain"].token_ids:
                failures.append(f"schema {number}: drafts changed the answer")
            if said.finish_reason == "length":
                cut += 1
            elif said.finish_reason != "stop" or not Draft202012Validator(its).is_valid(json.loads(said.text)):
                failures.append(f"schema {number}: {said.finish_reason}, {said.error}, {said.text!r}")
            for name, result in results.items():
                seconds[name] += result.stats.decode_seconds
                steps[name] += result.stats.steps
            tokens += said.completion_tokens
            sources.update(said.sources)
            ratios.append(results["plain"].stats.decode_seconds / max(said.stats.decode_seconds, 1e-9))
    for failure in failures:
        print(failure)
    print(f"{len(ratios)} schemas, {tokens} tokens, {len(failures)} failures, {cut} cut at {given.tokens} tokens")
    print("tokens by who wrote them: " + ", ".join(f"{name} {n / tokens:.0%}" for name, n in sources.most_common()))
    for name in ("plain", "drafts"):
        print(f"{name:<7} {tokens / seconds[name]:7.1f} tokens/s   {tokens / steps[name]:.2f} tokens a step")
    low, middle, high = (statistics.quantiles(ratios, n=10)[i] for i in (0, 4, 8)) if len(ratios) > 1 else ratios * 3
    print(
        f"speed   {seconds['plain'] / seconds['drafts']:.2f}x in all; by schema {middle:.2f}x ({low:.2f} to {high:.2f})"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
