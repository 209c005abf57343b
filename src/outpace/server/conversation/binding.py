"""A grammar that binds an answer to calls of a request's functions, in the model's own spelling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outpace.errors import Argument, GrammarError, ParameterError
from outpace.server.conversation.spelling import CDATA, KEY, WILD, Spelling
from outpace.server.conversation.tools import ToolChoice, choice_name
from outpace.server.conversation.values import ITEM, Types, types_of
from outpace.text.expressed import expressed, loosened
from outpace.text.schemas import check, closed, resolved

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes it
_ID = "/[a-zA-Z0-9]{1,9}/"
_PLAIN = r"/(.|\n)*/"
DEEPEST = 4  # lists and objects in tags whose contents a grammar binds
_SCALARS = frozenset({"integer", "number", "boolean", "null"})

Literal = Callable[[str], str]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def tool_grammar(
    spelling: Spelling | None,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    part: bool = False,
    close: bool = False,
    literal: Literal = quoted,
    left_out: list[str] | None = None,
) -> str | None:
    """Lark text (llguidance's) for an answer, or None where nothing binds it. ``tools``: as ``checked`` gives them.

    "required" and a named function force calls, as ``spelling`` writes them; arguments follow their schema (of
    functions that are not ``strict``, as far as the grammar can express it). Under "auto" the answer is bound only
    where a function is strict or ``parallel`` is off: plain text, or text and then calls. A named function is called
    once. ``part``: an answer without a call must be ``@part``, the grammar of the answer's own format. ``close``:
    arguments have no properties that their schema does not name, unless it allows them. ``literal``: writes a text, in
    which control tokens are spelled. ``left_out`` gets what of the schemas is not enforced. Raises ParameterError
    where the choice cannot be honoured.
    """
    name = choice_name(choice, tools)
    if choice == "none" or not tools:
        return None
    if spelling is None:
        raise ParameterError(
            Argument("tool_choice", choice), " cannot be honoured: this model's chat template has no known calls"
        )
    forced = choice != "auto"
    if not forced and not part and parallel and not any(tool["function"].get("strict") for tool in tools):
        return None
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    several = parallel and name is None and spelling.kind != "channels"
    rules = [*_start(spelling, forced, several, part, literal)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(chosen))))
    unenforced: list[str] = [] if left_out is None else left_out
    for i, function in enumerate(chosen):
        try:
            check(function.get("parameters"))
            schema = _schema(function, close, unenforced)
        except (GrammarError, RecursionError) as error:
            place = Argument(f"tools.{[tool['function'] for tool in tools].index(function)}.function.parameters")
            raise ParameterError(place, f" cannot be used: {error}") from error
        opening = _wild(function["name"] + spelling.middle, literal)
        rules.append(f"call_{i}: {opening} arguments_{i} {literal(spelling.closing)}")
        rules += _Arguments(spelling, schema, f"arguments_{i}", literal).rules()
    return "\n".join(rules) + "\n"


def _start(spelling: Spelling, forced: bool, several: bool, part: bool, literal: Literal) -> list[str]:
    """The rules ``start`` and what it needs beside ``call``."""
    trigger = spelling.trigger
    rest = _wild(spelling.begins[len(trigger) :], literal)
    between = _wild(spelling.between + spelling.opening, literal)
    again = f" ({between} call)*" if several else ""
    calls = f"{rest} call{again} {literal(spelling.tail)}"
    if spelling.frame:  # the first mark may end the prompt
        first, begin = literal(trigger), literal(spelling.frame[0])
        opened = f"({begin})?" if begin != quoted(spelling.frame[0]) else ""  # words may begin with it where it is text
        begins = f"start: {opened} words " + (f"{first} {calls}" if forced or part else f"({first} {calls})?")
        other = f" | {opened} @part" if part and not forced else ""
        return [begins + other, *_free("words", spelling.frame[1], literal)]
    if forced or part:
        other = f" | {literal(spelling.answer)} @part"
        return [f"start: {literal(trigger)} {calls}" + ("" if forced else other)]
    if spelling.answer:  # an answer says itself what it is
        return [f"start: {literal(spelling.answer)} TEXT | {literal(trigger)} {calls}", f"TEXT: {_PLAIN}"]
    if not trigger:  # calls are the whole answer, and only they begin with a bracket
        return [
            f'start: {calls} | TEXT | ""',
            r"TEXT: /[^{\[\s](.|\n)*/ & ~/(.|\n)*(<function=|<\|python_tag\|>)(.|\n)*/",
        ]
    first = literal(trigger)
    if first == quoted(trigger):
        return [f"start: TEXT | head {calls}", f"TEXT: {_PLAIN}", f"head[lazy]: {_PLAIN} {first}"]
    return [f"start: TEXT | TEXT {first} {calls}", f"TEXT: {_PLAIN}"]


def _wild(text: str, literal: Literal) -> str:
    """``text``, in which ids are anything."""
    return f" {_ID} ".join(literal(part) for part in text.split(WILD))


def _schema(function: Mapping[str, Any], close: bool, left_out: list[str]) -> dict[str, Any]:
    schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
    schema = expressed(schema if function.get("strict") else loosened(schema, left_out))
    schema["x-guidance"] = _ONE_LINE | ({} if function.get("strict") else {"lenient": True})
    return dict(closed(schema)) if close else schema


class _Arguments:
    """Rules of one function's arguments. ``schema``: an object's; ``name``: of the first rule."""

    def __init__(self, spelling: Spelling, schema: dict[str, Any], name: str, literal: Literal) -> None:
        self._spelling, self._schema, self._name, self._literal = spelling, schema, name, literal
        self._types: Types = {}

    def rules(self) -> list[str]:
        """In JSON the schema's own; elsewhere its named properties in order, each value of its own schema. Patterns
        and lengths of texts without quotes are not enforced."""
        spelling, name, literal = self._spelling, self._name, self._literal
        if spelling.kind in ("objects", "json", "channels"):
            return [f"{name}: %json {json.dumps(self._schema)}"]
        head, separator, tail = ("{", ",", "}") if spelling.kind == "braces" else ("", ", ", "")
        if spelling.tags is not None:
            separator = spelling.tags.between
        found: dict[str, Any] = self._schema.get("properties") or {}
        properties, required = list(found.items()), set(self._schema.get("required") or ())
        if spelling.kind == "braces":
            properties.sort(key=lambda each: each[0].lower())  # as Gemma 4's template writes them
        rules = [f"{name}: {literal(head)} {name}_f0 {literal(tail)}"]
        for i, (key, schema) in enumerate(properties):  # f: none is written yet, g: some are
            opening, value = self._property(f"{name}_p{i}", key, schema)
            for state, before in (("f", ""), ("g", separator)):  # one terminal each, since the longest one wins
                without = f" | {name}_{state}{i + 1}" if key not in required else ""
                rules.append(f"{name}_{state}{i}: {literal(before + opening)} {name}_p{i} {name}_g{i + 1}{without}")
            rules += value
        rules += [f'{name}_{state}{len(properties)}: ""' for state in "fg"]
        return rules

    def _property(self, rule: str, key: str, schema: Any) -> tuple[str, list[str]]:
        """What stands before a value, and the rules of the rest."""
        spelling, literal = self._spelling, self._literal
        types, tags = types_of(schema, self._schema, self._types), spelling.tags
        if tags is not None:
            plain = not types or "string" in types
            middle = tags.middle.replace(WILD, tags.flag("string" if plain else min(types)))
            end = "\n" * tags.line + tags.closing.replace(KEY, key)
            return tags.opening + key + middle + "\n" * tags.line, self._tagged(rule, end, schema, DEEPEST)
        if spelling.kind == "python":
            return f"{key}=", [f"{rule}: {self._json(schema)}"]
        if types == {"string"}:
            return f"{key}:{spelling.quote}", self._text(rule, spelling.quote, schema)
        if types and types <= _SCALARS:
            return f"{key}:", [f"{rule}: {self._json(schema)}"]
        return f"{key}:", _braces(rule, spelling.quote, literal)

    def _tagged(self, rule: str, end: str, schema: Any, depth: int) -> list[str]:
        """A value and the ``end`` of its tag: text, JSON, or tags again, in lists and objects ``depth`` deep (deeper
        ones are any text)."""
        tags, literal = self._spelling.tags, self._literal
        assert tags is not None
        types = types_of(schema, self._schema, self._types)
        if not types or "string" in types:
            if not tags.cdata or self._listed(schema):
                return self._text(rule, end, schema)
            begin, close = CDATA
            inner = _free(f"{rule}_cdata", close + end, literal)
            return [f"{rule}: /[^<&\\n]*/ {literal(end)} | {literal(begin)} {rule}_cdata", *inner]
        if KEY not in tags.closing or not types & {"array", "object"}:
            return [f"{rule}: {self._json(schema)} {literal(end)}"]
        schema = resolved(schema, self._schema)
        items, properties = schema.get("items"), schema.get("properties")
        if depth and types == {"array"} and isinstance(items, dict):
            parts, many = {ITEM: items}, "*"
        elif depth and types == {"object"} and isinstance(properties, dict) and properties:
            parts, many = properties, "?"
        else:
            return _free(rule, end, literal)
        required = set(schema.get("required") or ()) if many == "?" else set()
        names = {name: f"{rule}_n{i}" for i, name in enumerate(parts)}
        opened = {name: f"({literal(f'{tags.opening}{name}>')} {names[name]})" for name in parts}
        each = " ".join(opened[name] + ("" if name in required else many) for name in parts)
        rules = [f"{rule}: {each} {literal(end)}"]
        for name, part in parts.items():
            rules += self._tagged(names[name], tags.closing.replace(KEY, name), part, depth - 1)
        return rules

    def _json(self, schema: Any) -> str:
        if isinstance(schema, dict) and not str(schema.get("$ref", "#/$defs/")).startswith(
            ("#/$defs/", "#/definitions/")
        ):
            schema = resolved(schema, self._schema)
        root = {word: self._schema[word] for word in ("$defs", "definitions", "x-guidance") if word in self._schema}
        return f"%json {json.dumps({**root, **schema} if isinstance(schema, dict) else root)}"

    def _text(self, rule: str, end: str, schema: Any) -> list[str]:
        """A text without quotes: one of those that its schema lists, or anything up to ``end``."""
        if listed := self._listed(schema):
            each = " | ".join(quoted(text) or '""' for text in listed)
            return [f"{rule}: ({each}) {self._literal(end)}"]
        return _free(rule, end, self._literal)

    def _listed(self, schema: Any) -> list[str]:
        schema = resolved(schema, self._schema)
        listed = (
            schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
        )
        return listed if isinstance(listed, list) and all(isinstance(each, str) for each in listed) else []


def _free(rule: str, end: str, literal: Literal) -> list[str]:
    """Any text up to ``end``."""
    spelled = literal(end)
    if spelled == quoted(end):
        return [f"{rule}[suffix={spelled}]: /(?s:.*)/"]
    return [f"{rule}: /(?s:.*)/ {spelled}"]


def _braces(rule: str, quote: str, literal: Literal) -> list[str]:
    """Any value in Gemma 4's braces."""
    return [
        f'{rule}: {literal(quote)} {rule}_text | /-?(0|[1-9][0-9]*)(\\.[0-9]+)?/ | "true" | "false" | "null"'
        f' | "[" ({rule} ("," {rule})*)? "]" | "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"',
        f'{rule}_pair: /[A-Za-z_][A-Za-z0-9_]*/ ":" {rule}',
        *_free(f"{rule}_text", quote, literal),
    ]
