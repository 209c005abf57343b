"""Chat templates of the published formats' shape, written for these tests, and answers in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outpace.server.conversation.pieces import Call, Joined, OutputParser, Segmenter


@dataclass
class Read:
    """What an answer says."""

    text: str = ""
    thoughts: str = ""
    calls: list[Call] = field(default_factory=list)


def read(parser: OutputParser, parts: Iterable[str], *, ended: bool = True) -> Read:
    """What ``parser`` reads in an answer that comes in ``parts``. ``ended``: it ends with them."""
    segmenter, joined = Segmenter(), Joined()
    for part in parts:
        joined.add(segmenter.feed(parser.feed(part)))
    if ended:
        joined.add(segmenter.feed(parser.finish(), last=True))
    return Read(joined.text, joined.thoughts, joined.calls)


LLAMA3 = """{{ bos_token }}<|start_header_id|>system<|end_header_id|>

{% if messages[0].role == "system" %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{% if tools %}Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}{% endif %}<|eot_id|>
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call a message") }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == "tool" %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}<|eot_id|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

QWEN3 = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ "user" if message.role == "tool" else message.role }}
{% if message.role == "tool" %}<tool_response>
{% endif %}{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}{% if message.role == "tool" %}
</tool_response>{% endif %}{% for call in message.tool_calls or [] %}{{ "" }}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

OPENING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split("</think>")[-1] }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""

HERMES = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Hermes's own for tools, which raises for what a function does not say, and writes a call's name last.
HERMES_TOOLS = """{{ bos_token }}<tools>{% for tool in tools or [] %}{% set tool = tool.function %}
{{ tool.name + "(" }}{% for name, field in tool.parameters.properties | items %}{{ name + ", " }}{% endfor %}
{{- ") - " + tool.description }} {{ tool.parameters | tojson }}{% endfor %}
</tools><|im_end|>
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}<tool_response>
{{ {"name": message.name, "content": message.content} | tojson }}
</tool_response>{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}{{ "" }}
<tool_call>
{"arguments": {{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GEMMA3 = """{{ bos_token }}{% if messages[0].role == "system" %}
{%- set prefix = messages[0].content + "\n\n" %}{% set turns = messages[1:] %}
{%- else %}{% set prefix = "" %}{% set turns = messages %}{% endif %}
{%- for m in turns %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("turns must alternate") }}{% endif %}<start_of_turn>
{{- "model" if m.role == "assistant" else m.role }}
{{ prefix if loop.first else "" }}{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

SMOLLM2 = HERMES.replace("{% for", "{# SmolLM #}{% for", 1)

CODER = "{% if tools %}<tool_call><function=f><parameter=p>{% endif %}<|im_start|>"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 20}},
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMES: dict[str, Any] = {"get_weather": WEATHER["function"]["parameters"], "now": {}}

TEMPLATES = {"llama3": LLAMA3, "qwen3": QWEN3, "gemma3": GEMMA3, "smollm2": SMOLLM2}

# Two calls in each format's own spelling; and Gemma's other one.
CITY = '{"city": "Zürich 日本", "days": 3}'
F, G = f'{{"name": "get_weather", "arguments": {CITY}}}', '{"name": "now", "arguments": {}}'
BOTH = {
    "llama3": f"{F}; {G}".replace("arguments", "parameters"),
    "qwen3": f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
    "gemma3": f"```tool_call\n{F}\n{G}\n```",
    "smollm2": f"<tool_call>[{F}, {G}]</tool_call>",
}
PYTHON = '[get_weather(city="Zürich 日本", days=3), now()]'
