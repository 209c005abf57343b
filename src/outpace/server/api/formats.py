"""What an answer must look like, however a request spells it: OpenAI's ``response_format``, vLLM's
``structured_outputs`` and ``guided_*``, and our ``grammar``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from outpace.errors import GrammarError
from outpace.params import LogitRule
from outpace.server.engines.models import Served
from outpace.server.errors import APIError, cut
from outpace.server.schema import Body, Items
from outpace.text.grammar import LIMITS, After, Grammars, Source
from outpace.text.grammar import Grammar as Compiled

_CHOICES = Field(default=None, min_length=1, max_length=1024)


class JsonSchema(Body):
    name: str = Field(default="schema", min_length=1, max_length=128)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="As llama.cpp spells it.")


class Grammar(Body):
    """What the answer must match: a regular expression, or a grammar of llguidance's Lark."""

    own = True
    type: Literal["regex", "lark"]
    value: str = Field(min_length=1)


class StructuredOutputs(Body):
    """As vLLM spells what an answer must match; ``grammar``: of llguidance's Lark, or EBNF."""

    own = True
    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = _CHOICES
    grammar: str | None = None
    json_object: bool | None = None


class Formats(Body):
    """Fields of requests: at most one of them says what the answer must look like."""

    grammar: Grammar | str | None = Field(default=None, description="A text is GBNF, as llama.cpp takes it, or Lark.")
    json_schema: dict[str, Any] | None = Field(default=None, description="As llama.cpp takes it.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = Field(default=None, description="As vLLM spelled it.")
    guided_regex: str | None = None
    guided_choice: Items[str] | None = _CHOICES
    guided_grammar: str | None = None


def wanted(body: Formats, response_format: ResponseFormat | None) -> tuple[Source, str] | None:
    """What the answer must look like, and the field that says so; None: anything. Raises APIError."""
    outputs = body.structured_outputs or StructuredOutputs()
    given: dict[str, Source | None] = {
        "response_format": None if response_format is None else _response_format(response_format),
        "grammar": _grammar(body.grammar),
        "json_schema": None if body.json_schema is None else ("json", body.json_schema),
        "structured_outputs.json_object": ("json", {"type": "object"}) if outputs.json_object else None,
    }
    for name, schema, pattern, choices, grammar in (
        ("structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.grammar),
        ("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar),
    ):
        given[f"{name}json"] = None if schema is None else ("json", schema)
        given[f"{name}regex"] = None if pattern is None else ("regex", pattern)
        given[f"{name}choice"] = None if choices is None else ("lark", _one_of(choices))
        given[f"{name}grammar"] = None if grammar is None else ("lark", grammar)
    found = [(source, name) for name, source in given.items() if source is not None]
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise APIError(400, f"{names} each say what is allowed: give one of them", param=found[1][1])
    return found[0] if found else None


def rules(found: tuple[Source, str] | None, model: Served, after: After) -> list[LogitRule]:
    """The rule of what was ``wanted``. ``after``: the text that ends what comes before the answer proper.

    Raises GrammarError (a ParameterError) or APIError.
    """
    if found is None:
        return []
    source, name = found
    try:
        return [compiled(source, model.grammars, after)]
    except GrammarError as error:
        raise APIError(400, str(error), param=name) from error


def left_out(rules: Sequence[Any], of_tools: Sequence[str] | None = None) -> list[str]:
    """What the answer says of schemas whose keywords no grammar can all express. ``of_tools``: where ``rules`` bind
    calls, what was left out of tools' schemas before."""
    found = [*(of_tools or ()), *(word for rule in rules if isinstance(rule, Compiled) for word in rule.left_out)]
    whose = "the JSON schema" if of_tools is None else "the schemas"  # of tools, and of the answer
    return [cut(f"not enforced of {whose}: {', '.join(dict.fromkeys(found))}", 2000)] if found else []


def compiled(source: Source, grammars: Grammars, after: After = None) -> LogitRule:
    """The rule of ``source``. Raises GrammarError."""
    kind, text = source
    makes: dict[str, Any] = {"json": grammars.json_schema, "regex": grammars.regex, "lark": grammars.lark}
    rule: LogitRule = makes[kind](text, after=after)
    return rule


def rule_of_calls(text: str, found: tuple[Source, str] | None, model: Served, after: After) -> LogitRule:
    """The rule of ``tool_grammar``'s ``text``, in which ``@part`` is what was ``wanted``. Raises APIError."""
    try:
        most = LIMITS["max_items_in_row"]
        return model.grammars.lark(text, after=after, items=most, part=found and found[0])
    except GrammarError as error:
        raise APIError(400, f"tools cannot be used: {error}", param="tools") from error


def _response_format(wish: ResponseFormat) -> Source | None:
    if wish.type != "json_schema":
        if wish.json_schema is not None:
            place = "response_format.json_schema"
            raise APIError(400, f"{place} needs the type json_schema, not {wish.type}", param=place)
        if wish.schema_ is not None and wish.type == "json_object":
            return "json", wish.schema_
        return ("json", {"type": "object"}) if wish.type == "json_object" else None
    schema = wish.schema_ if wish.json_schema is None else wish.json_schema.schema_
    if schema is None:
        place = "response_format.json_schema.schema"
        raise APIError(400, f"{place} is missing: give it", param=place)
    return "json", schema


def _grammar(wish: Grammar | str | None) -> Source | None:
    if isinstance(wish, Grammar):
        return wish.type, wish.value
    return ("lark", wish) if wish else None


def _one_of(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
