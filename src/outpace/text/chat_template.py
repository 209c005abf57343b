"""Chat templates: Jinja in a sandbox, set up as Hugging Face's templates expect it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

from outpace.errors import Argument, ParameterError

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates


class ChatTemplates:
    """A model's chat templates by name: one, "default"; or others beside it, or in its place. ``tokens``: as of each.

    Which one writes a conversation is ``transformers``' rule: with tools "tool_use" if there is one, else "default".
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._templates = {name: ChatTemplate(source, tokens) for name, source in sources.items()}

    @property
    def sources(self) -> dict[str, str]:
        return {name: template.source for name, template in self._templates.items()}

    def get(self, *, tools: bool) -> ChatTemplate | None:
        """The one for a conversation with or without tools, if there is one."""
        default = self._templates.get(DEFAULT)
        return self._templates.get(TOOL_USE, default) if tools else default

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """As ``ChatTemplate.render``. Raises ParameterError where no template is for such a conversation, too."""
        template = self.get(tools=bool(variables.get("tools")))
        if template is None:
            raise ParameterError(
                f"this model's chat templates are named {', '.join(sorted(self._templates))}, and none of them is for "
                "a conversation without tools: give plain text with ", Argument("raw", True),
            )  # fmt: skip
        return template.render(messages, **variables)


class _Given(list[dict[str, Any]]):
    """Messages, which no template changes."""


class ChatTemplate:
    """A chat template. ``tokens`` are the variables such as ``bos_token`` that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._tokens = dict(tokens)
        self._compiled: Any = None
        self._names: frozenset[str] = frozenset()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation. Raises ParameterError when the messages or the template are unusable.

        ``variables``: what else the template may read, such as ``tools`` and ``enable_thinking``.
        """
        _check(messages)
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
                self._names = variables_of(self.source)
            arguments = {**self._tokens, "tools": None, "documents": None, **variables}
            if takes_functions(self._names):
                listed = json.dumps(variables.get("tools") or [], ensure_ascii=False, indent=4)
                arguments = {"functions": listed, "datetime": f"{datetime.now():%Y-%m-%d %H:%M:%S}", **arguments}
            arguments = {"messages": _Given(dict(m) for m in messages), **arguments}
            if "append" in self.source or "pop" in self.source:  # a list of the caller's, too
                arguments = deepcopy(arguments)
            text: str = self._compiled.render(arguments, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is foreign code: it can raise anything
            reason = str(error) or type(error).__name__
            raise ParameterError(
                f"the model's chat template refused the messages: {reason}; change them, or give plain text with ",
                Argument("raw", True),
            ) from error
        return text


def given(template: str) -> str:
    """The source of the template of chats that a user gives: its text, or a file with it. Raises ParameterError for
    one that cannot write a user's message, with the line."""
    import jinja2

    is_text = any(mark in template for mark in ("{{", "{%", "{#"))
    shown = _SHOWN if is_text else _PATH  # of a path the end says most
    where = Argument("chat_template", template if len(template) <= shown else f"{template[:_SHOWN]}...")
    try:
        source = template if is_text else Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(
            where, f" cannot be read ({reason}): give a file with a Jinja template, or the template's text"
        ) from None
    message = "A first question."
    trial = ChatTemplate(source, _UNKNOWN)
    try:
        written = trial.render([{"role": "user", "content": message}])
    except ParameterError as refused:
        cause = refused.__cause__
        try:
            written = trial.render([{"role": "user", "content": message}], tools=[_TOOL])  # some are for tools alone
        except ParameterError:
            frames = traceback.extract_tb(None if cause is None else cause.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
            what, line = "fails at a user's message", lines[-1] if lines else None
            if isinstance(cause, jinja2.TemplateSyntaxError):
                what, line = "is broken", cause.lineno
            place = "" if line is None else f" in line {line}"
            raise ParameterError(where, f" {what}{place}: {cause}; correct it there") from None
    if message not in written:
        raise ParameterError(
            where, " does not write what messages say: give a Jinja template with {{ message.content }} for each of "
            "messages",
        )  # fmt: skip
    return source


_SHOWN, _PATH = 80, 4096  # characters of a template in an error; of what may be a path
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": _PARAMETERS}}
_UNKNOWN = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")  # before the model is loaded


def variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads. None where it is no template: rendering says why."""
    import jinja2
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


def takes_functions(names: frozenset[str]) -> bool:
    """Whether a template reads tools as JSON text, in a variable ``functions`` (Firefunction's)."""
    return "functions" in names and "tools" not in names


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise ParameterError("the conversation is empty: give at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ParameterError(f"message {i} is {message!r}: give a mapping with 'role' and 'content'")


def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
        """In which lists grow and shrink: Kimi K2's template keeps a queue of ids."""

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    class Generation(Extension):  # type: ignore[misc]
        """``{% generation %}`` marks the assistant's words for training; here its body is all that counts."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=listed
        )

    def listed(value: Any) -> list[Any]:
        """What Jinja's own filters give, such as ``map``."""
        if isinstance(value, Iterator):  # an undefined value is iterable, too
            return list(value)
        raise TypeError(f"{type(value).__name__} is not JSON")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
