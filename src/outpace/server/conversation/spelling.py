"""How a model writes calls: read off its chat template, which is made to write two of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from outpace.errors import ParameterError
from outpace.server.conversation.reasoning import marks_in
from outpace.text.chat_template import ChatTemplate

WILD = "\ufdd1"  # in marks: an id, a call's number, or a value's type (noncharacters, Unicode 23.7)
KEY = "\ufdd2"  # an argument's name
CDATA = ("<![CDATA[", "]]>")
# Around an answer's text, and behind all of an answer: Kimi K3's.
FRAMES = (("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),)


@dataclass(frozen=True, slots=True)
class Tags:
    """How an argument is written whose value has no quotes. ``line``: a line break stands on both sides of a value.
    ``typed``: ``WILD`` in ``middle`` is the type of the value's JSON, otherwise "true" for a text and "false" for JSON.
    ``cdata``: texts may stand in CDATA sections. With ``KEY`` in ``closing`` objects and lists are tags, too."""

    opening: str  # before its name
    middle: str  # between its name and its value
    closing: str
    between: str = ""  # after its value, before the next one
    line: bool = False
    typed: bool = False
    cdata: bool = False

    @property
    def prefix(self) -> str:
        """What precedes every tag."""
        return self.closing.partition("</")[0]

    def flag(self, kind: str) -> str:
        """What ``WILD`` in ``middle`` is for a value of this JSON type."""
        if self.typed:
            return "number" if kind == "integer" else kind
        return "true" if kind == "string" else "false"


Kind = Literal["objects", "python", "json", "braces", "tags", "channels"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """``head``, then calls with ``between`` after each, then ``tail``; a call is ``opening``, the function's name,
    ``middle``, the arguments and ``closing``.

    ``kind``: what a call is: an object of JSON with name and arguments; Python; marks with arguments in JSON, in Gemma
    4's braces, or each in tags; a message in a channel. ``quote``: around texts within braces. ``answer``: precedes an
    answer that is no call. ``single``: a message holds one call. ``frame``: one of ``FRAMES``.
    """

    kind: Kind
    head: str
    opening: str
    middle: str
    closing: str
    between: str
    tail: str
    tags: Tags | None = None
    quote: str = ""
    answer: str = ""
    single: bool = False
    frame: tuple[str, ...] = ()

    @property
    def begins(self) -> str:
        return self.head + self.opening

    @property
    def trigger(self) -> str:
        """The first mark of calls; none where only an answer's beginning shows that it is one."""
        found = None if self.begins.startswith("{") else _TRIGGER.match(self.begins)
        return found[0] if found else ""

    @property
    def marks(self) -> str:
        """All that is written around names and values."""
        tags = self.tags
        parts = (self.head, self.opening, self.middle, self.closing, self.between, self.tail, self.quote, self.answer)
        if tags is not None:
            parts += (tags.opening, tags.middle, tags.closing, *(CDATA if tags.cdata else ()))
        return "\n".join((*parts, *self.frame))

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls as the model itself writes them; ``arguments`` are a mapping, or text that is no JSON object."""
        texts = [
            self.opening + call["function"]["name"] + self.middle + self._arguments(call["function"]["arguments"])
            + self.closing
            for call in calls
        ]  # fmt: skip
        return self.head + self.between.join(texts) + self.tail

    def _arguments(self, arguments: Any) -> str:
        if self.kind == "python" and isinstance(arguments, Mapping):
            return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return json.dumps(arguments, ensure_ascii=False)


class Written(NamedTuple):
    """How a template writes calls. ``spelling``: None where that cannot be read off. ``as_text``: it takes arguments as
    JSON text; ``no_content``: it writes calls of messages whose content is None alone; ``short_ids``: their ids must
    be as Mistral's are; ``described``: it refuses tools whose arguments have no description; ``thoughts``: what stands
    around those of an answer."""

    spelling: Spelling | None = None
    as_text: bool = False
    no_content: bool = False
    short_ids: bool = False
    described: bool = False
    thoughts: tuple[str, str] | None = None


HERMES = Spelling("objects", "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "")
SMOLLM2 = Spelling("objects", "<tool_call>[", '{"name": "', '", "arguments": ', "}", ", ", "]</tool_call>")
LLAMA3 = Spelling("objects", "", '{"name": "', '", "parameters": ', "}", "; ", "", single=True)
GEMMA3 = Spelling("objects", "```tool_call\n", '{"name": "', '", "arguments": ', "}", "\n", "\n```")
LFM2 = Spelling("python", "<|tool_call_start|>[", "", "(", ")", ", ", "]<|tool_call_end|>")
GRANITE3 = Spelling("objects", "<|tool_call|>[", '{"name": "', '", "arguments": ', "}", ", ", "]")
HARMONY = Spelling(
    "channels", "", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "", "",
    answer="<|channel|>final<|message|>", single=True,
)  # fmt: skip

_TRIGGER = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|\S+")
_TAG = r"<\|close\|>\w+<\|sep\|>|<[^<>]*>"
_CLOSING = re.compile(rf"[^\n]{{0,32}}?</{KEY}>|\s*(?:{_TAG})")
_TAIL = re.compile(rf"[\s\]}})]*({_TAG}|\[/?[A-Z_]+\]|```)?")
_QUESTION, _ANSWER = "QuestionQZ", "AnswerQZ"
_NAMES, _IDS = ("fnoneqz", "fntwoqz"), ("idqz00001", "idqz00002")
_LONG_ID = "call_0123456789abcdef"
_KEYS, _TEXTS, _NUMBER = ("keyaqz", "keybqz", "keycqz"), ("ValueAQZ", "ValueCQZ", "ValueDQZ"), 4217
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    dict(zip(_KEYS, (_TEXTS[0], _NUMBER, _TEXTS[1]), strict=True)), {_KEYS[0]: _TEXTS[2]},
)  # fmt: skip
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def written(source: str) -> Written | None:
    """How the template ``source`` writes calls; None: it writes none."""
    template, unread = ChatTemplate(source, _TOKENS), False
    plain = _rendered(template, {"content": _ANSWER})
    frame = next((frame for frame in FRAMES if plain and all(mark in plain for mark in frame)), ())
    thoughts = marks_in(plain or "")
    described = plain is not None and _rendered(template, {"content": _ANSWER}, _tools(described=False)) is None
    plain = plain and without(plain, frame)
    for as_text, no_content in product((False, True), repeat=2):
        content = None if no_content else ""
        one, both, other = (
            _rendered(template, {"content": content, "tool_calls": calls})
            for calls in (_calls(1, as_text), _calls(2, as_text), _calls(1, as_text, _LONG_ID))
        )
        if plain is None or one is None or _NAMES[0] not in one:
            continue
        header, _, footer = plain.partition(_ANSWER)
        whole = both is not None and all(name in both for name in _NAMES)
        text = both if whole and both is not None else one
        for id_ in _IDS:
            text = text.replace(id_, WILD)
        text = without(text, frame)
        found, unread = _read_off(text, header, footer, whole), True
        own = plain[len(_shared_start(plain, text)) :]
        if found and _tells(found, own[: len(own) - len(_shared_end(own, text))]):
            if found.tags is not None and CDATA[0] in source:
                found = replace(found, tags=replace(found.tags, cdata=True))
            return Written(replace(found, frame=frame), as_text, no_content, other is None, described, thoughts)
    return Written() if unread else None


def refuses_system(source: str) -> bool:
    """Whether the template ``source`` takes conversations, but none that begins with a message of the system."""
    template, talk = ChatTemplate(source, _TOKENS), [{"role": "user", "content": _QUESTION}]
    try:
        template.render(talk)
    except ParameterError:
        return False
    try:
        return "SystemQZ" not in template.render([{"role": "system", "content": "SystemQZ"}, *talk])
    except ParameterError:
        return True


def _tells(spelling: Spelling, plain: str) -> bool:
    """Whether marks tell calls from the answer ``plain``, and nothing of the questions asked is part of them."""
    if "qz" in spelling.marks.lower() or "'" in spelling.marks:  # a value of Python as it stands
        return False
    if spelling.trigger and not re.search(r"\w", spelling.trigger):
        return False
    return spelling.trigger not in plain if spelling.trigger else spelling.kind == "objects"


def _calls(n: int, as_text: bool, *ids: str) -> list[dict[str, Any]]:
    return [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(its) if as_text else its}}
        for id_, name, its in list(zip(ids or _IDS, _NAMES, _ARGUMENTS, strict=False))[:n]
    ]


def _tools(*, described: bool = True) -> list[dict[str, Any]]:
    """Both, whose arguments are ``described`` or not."""
    words = {"description": "x"} if described else {}
    properties = {key: {"type": "integer" if key == _KEYS[1] else "string", **words} for key in _KEYS}
    schema = {"type": "object", "properties": properties, "required": list(_KEYS[:1])}
    return [
        {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}} for name in _NAMES
    ]


def _rendered(
    template: ChatTemplate, answer: dict[str, Any], tools: Sequence[dict[str, Any]] | None = None
) -> str | None:
    """What follows the question; None where the template refuses."""
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", **answer}]
    try:
        text = template.render(messages, tools=tools or _tools(), add_generation_prompt=False)
    except ParameterError:
        return None
    return text.rpartition(_QUESTION)[2]


class _Span(NamedTuple):
    """Where a call stands in a text. ``opening``, ``middle`` and ``closing``: of it, as far as they are its own."""

    kind: Kind
    begin: int
    end: int
    opening: str
    middle: str
    closing: str
    tags: Tags | None = None
    quote: str = ""


def _read_off(text: str, header: str, footer: str, two: bool) -> Spelling | None:
    first = _span(text, 0, 0)
    if first is None:
        return None
    second = _span(text, first.end, 1) if two else None
    if two and (second is None or (first.kind, first.opening) != (second.kind, second.opening)):
        return None
    start, end = text[: first.begin], text[(second or first).end :]
    if second is None:
        opening, closing, between = start, _without(end, footer), "; "
    else:
        joint = text[first.end : second.begin]
        closing = _whole_end(_shared_start(joint, end)) if joint and end else ""
        joint = joint[len(closing) :]
        opening = _whole_start(_shared_end(start, joint)).lstrip()
        between = joint[: len(joint) - len(opening)]
        end = end[len(closing) :]
    head = start[: len(start) - len(opening)] if second is not None else ""
    if second is None:
        opening = _without_header(opening, header)
    head = _without_header(head, header)
    tail = ""
    if head and second is not None and (found := _TAIL.match(_without(end, footer))):
        tail = found[0]
    middle = first.middle
    if second is not None and middle != second.middle:
        before = _shared_start(middle, second.middle)
        middle = before + WILD + _shared_end(middle[len(before) :], second.middle[len(before) :])
    return Spelling(
        first.kind, head, opening + first.opening, middle, first.closing + closing, between, tail, first.tags,
        first.quote, single=second is None,
    )  # fmt: skip


def _span(text: str, start: int, which: int) -> _Span | None:
    """The call of ``_NAMES[which]``, looked for from ``start`` on."""
    at = text.find(_NAMES[which], start)
    if at < 0:
        return None
    arguments, behind = _ARGUMENTS[which], at + len(_NAMES[which])
    return (
        _object(text, start, at, which)
        or _json(text, at, behind, arguments)
        or _marked(text, at, behind, list(arguments))
    )


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None, at


def _object(text: str, start: int, name_at: int, which: int) -> _Span | None:
    """A call that is an object with its name and its arguments."""
    for found in re.finditer(r"\{", text[start : name_at + 1]):
        begin = start + found.start()
        value, end = _decoded(text, begin)
        if isinstance(value, dict) and end > name_at:
            names = [key for key, its in value.items() if its == _NAMES[which]]
            keys = [key for key, its in value.items() if its == _ARGUMENTS[which]]
            if names and keys:
                return _Span("objects", begin, end, f'{{"{names[0]}": "', f'", "{keys[0]}": ', "}")
    return None


def _json(text: str, at: int, behind: int, arguments: dict[str, Any]) -> _Span | None:
    """A name, then its arguments in JSON."""
    for found in re.finditer(r"\{", text[behind:]):
        value, end = _decoded(text, behind + found.start())
        if value == arguments:
            return _Span("json", at, end, "", text[behind : behind + found.start()], "")
    return None


def _marked(text: str, at: int, behind: int, keys: list[str]) -> _Span | None:
    """A name, then arguments in Python, in braces or in tags."""
    places: list[tuple[int, int]] = []  # of what precedes each key, and of what precedes its value
    values = [str(value) for value in _ARGUMENTS[0 if len(keys) > 1 else 1].values()]
    place, ends = behind, [behind]
    for key, value in zip(keys, values, strict=True):
        key_at = text.find(key, place)
        value_at = text.find(value, key_at + len(key))
        if key_at < 0 or value_at < 0:
            return None
        places.append((key_at, value_at))
        place = value_at + len(value)
        ends.append(place)
    before = text[behind : places[0][0]]
    middles = [text[k + len(key) : v] for (k, v), key in zip(places, keys, strict=True)]
    if before == "(" and middles[0] in ("='", '="'):
        end = text.find(")", place) + 1
        return _Span("python", at, end, "", "(", ")") if end else None
    if before == "{" and middles[0].startswith(":"):
        end = text.find("}", place) + 1
        return _Span("braces", at, end, "", "", "", None, middles[0][1:]) if end and middles[0][1:] else None
    tag_at = before.rfind("<")
    if tag_at < 0 or not middles[0]:
        return None
    opening, middle = before[tag_at:], middles[0]
    typed = False
    if len(middles) > 1 and middles[1] != middle:
        head = re.sub(r"[^\"]*$", "", _shared_start(middle, middles[1]))
        tail = re.sub(r"^[^\"]*", "", _shared_end(middle[len(head) :], middles[1][len(head) :]))
        flags = middle[len(head) : len(middle) - len(tail)], middles[1][len(head) : len(middles[1]) - len(tail)]
        if flags not in (("true", "false"), ("string", "number")):
            return None
        typed, middle = flags[0] == "string", head + WILD + tail
    closing = _CLOSING.match(text[ends[1] :].replace(keys[0], KEY))  # after the first value
    if closing is None:
        return None
    written = closing[0]
    following = text[ends[1] + len(written.replace(KEY, keys[0])) :]
    if KEY in written and not opening.startswith(prefix := written.partition("</")[0]):
        if not before.endswith(prefix + opening):
            return None
        tag_at, opening = tag_at - len(prefix), prefix + opening
    between = following.partition(opening)[0]
    line = middle.endswith("\n") and written.startswith("\n")
    tags = Tags(opening, middle.rstrip("\n") if line else middle, written.strip(), between, line, typed)
    end = place + len(written.replace(KEY, keys[-1]))
    return _Span("tags", at, end, "", before[:tag_at], "", tags)


def _shared_start(a: str, b: str) -> str:
    """The longest text that both begin with."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _shared_end(a: str, b: str) -> str:
    """The longest text that both end with."""
    return _shared_start(a[::-1], b[::-1])[::-1]


def _whole_end(text: str) -> str:
    """Without a mark that is cut off at the end."""
    return re.sub(r"<[^<>]*$", "", text)


def _whole_start(text: str) -> str:
    """Without the end of a mark at the start."""
    return re.sub(r"^[^<>]*>", "", text)


def without(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _without(text: str, footer: str) -> str:
    return text[: -len(footer)] if footer and text.endswith(footer) else text


_THOUGHTS_END = re.compile(r"(?s)^.*(</[\w:]*think[\w:]*>|\[/THINK\]|<\|END_THINKING\|>)")


def _without_header(text: str, header: str) -> str:
    """``text`` without what begins every answer, and without reasoning."""
    own = text[len(_whole_end(_shared_start(text, header))) :]
    return _THOUGHTS_END.sub("", own).lstrip()
