"""Templates in the shapes of published ones, as far as calls and reasoning go, written for these tests.

Sources of the shapes: the models' own templates, which llama.cpp's repository lists under models/templates.
"""

from __future__ import annotations


def template(calls: str, *, turn: str = "<|im_start|>", end: str = "<|im_end|>", thoughts: str = "") -> str:
    """A template whose assistant writes ``calls``, a loop's body or all of them; ``thoughts``: before an answer."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}" + turn + "{{ m.role }}\n"
        "{% if m.role == 'assistant' and m.reasoning_content %}" + thoughts + "{% endif %}"
        "{{ m.content or '' }}{% if m.tool_calls %}" + calls + "{% endif %}" + end + "\n{% endfor %}"
        "{% if add_generation_prompt %}" + turn + "assistant\n{% endif %}"
    )  # fmt: skip


def each(call: str, between: str = "") -> str:
    """Calls one after another; ``call`` reads ``f``, its function."""
    between = "{% if not loop.last %}{{ '" + between + "' }}{% endif %}" if between else ""
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + call + between + "{% endfor %}"


def tags(opening: str, middle: str, closing: str, *, plain: bool = True) -> str:
    """Arguments, each in tags."""
    value = "{{ v if v is string else v | tojson }}" if plain else "{{ v | tojson }}"
    return "{% for k, v in f.arguments | items %}" + opening + "{{ k }}" + middle + value + closing + "{% endfor %}"


_ANY = "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"
_THINK = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
_BRACES = (
    "{%- macro w(v) -%}{%- if v is string -%}<|\"|>{{ v }}<|\"|>{%- elif v is mapping -%}{{ '{' }}"
    "{%- for k, x in v | dictsort -%}{{ k }}:{{ w(x) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}}"
    "{%- elif v is sequence -%}[{%- for x in v -%}{{ w(x) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}]"
    "{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
)  # fmt: skip

_KIND = (
    "{% macro kind(v) %}{{ 'boolean' if v is boolean else 'null' if v is none else 'number' if v is number else "
    "'string' if v is string else 'object' if v is mapping else 'array' }}{% endmacro %}"
)
_XML = (
    "{%- macro xml(v) -%}{%- if v is mapping -%}{%- for k, x in v | items if x is not none -%}"
    "]<]minimax[>[<{{ k }}>{{ xml(x) }}]<]minimax[>[</{{ k }}>{%- endfor -%}"
    "{%- elif v is sequence and v is not string -%}"
    "{%- for x in v -%}]<]minimax[>[<item>{{ xml(x) }}]<]minimax[>[</item>{%- endfor -%}"
    "{%- else -%}{{ v | tojson if v is boolean else v }}{%- endif -%}{%- endmacro -%}"
)

PUBLISHED = {
    "qwen3-coder": template(
        each("<tool_call>\n<function={{ f.name }}>\n" + tags("<parameter=", ">\n", "\n</parameter>\n")
             + "</function>\n</tool_call>", "\\n"),
        thoughts=_THINK,
    ),
    "glm-4.5": template(
        each("<tool_call>{{ f.name }}\n" + tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
             + "</tool_call>", "\\n"),
        thoughts=_THINK,
    ),
    "glm-4.7": template(
        each("<tool_call>{{ f.name }}" + tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>") + "</tool_call>"),
        thoughts=_THINK,
    ),
    "minimax-m2": template(
        "<minimax:tool_call>\n"
        + each('<invoke name="{{ f.name }}">\n' + tags('<parameter name="', '">', "</parameter>\n") + "</invoke>\n")
        + "</minimax:tool_call>",
        turn="]~b]", end="[e~[", thoughts=_THINK,
    ),
    "seed-oss": template(
        each("<seed:tool_call>\n<function={{ f.name }}>\n" + tags("<parameter=", ">", "</parameter>\n")
             + "</function>\n</seed:tool_call>", "\\n"),
        thoughts="<seed:think>{{ m.reasoning_content }}</seed:think>",
    ),
    "deepseek-v3.2": template(
        "<｜DSML｜function_calls>\n"
        + each(
            '<｜DSML｜invoke name="{{ f.name }}">\n'
            + tags('<｜DSML｜parameter name="', "\" string=\"{{ 'true' if v is string else 'false' }}\">",
                   "</｜DSML｜parameter>\n")
            + "</｜DSML｜invoke>\n"
        )
        + "</｜DSML｜function_calls>",
        end="<｜end▁of▁sentence｜>", thoughts=_THINK,
    ),
    "deepseek-v3.1": template(
        "<｜tool▁calls▁begin｜>"
        + each("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + _ANY + "<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>",
        end="<｜end▁of▁sentence｜>", thoughts=_THINK,
    ),
    "deepseek-v3": template(  # its arguments are text
        "<｜tool▁calls▁begin｜>"
        + each(
            "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```"
            "<｜tool▁call▁end｜>", "\\n",
        )
        + "<｜tool▁calls▁end｜>",
        end="<｜end▁of▁sentence｜>",
    ),
    "mistral-nemo": template(
        "[TOOL_CALLS][" + each('{"name": "{{ f.name }}", "arguments": ' + _ANY + ', "id": "{{ c.id }}"}', ", ") + "]",
        turn="[INST]", end="</s>",
    ),
    "mistral-3.2": template(
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
        "{% set f = c.function %}[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]" + _ANY + "{% endfor %}",
        turn="[INST]", end="</s>", thoughts="[THINK]{{ m.reasoning_content }}[/THINK]",
    ),
    "gemma-4": _BRACES + template(
        each("<|tool_call>call:{{ f.name }}{{ w(f.arguments) }}<tool_call|>"),
        turn="<|turn>", end="<turn|>", thoughts="<|channel>thought\n{{ m.reasoning_content }}\n<channel|>",
    ),
    "kimi-k2": "{% set q = namespace(ids=[]) %}" + template(  # whose list of ids grows
        "<|tool_calls_section_begin|>"
        + each("{% set _ = q.ids.append(c.id) %}<|tool_call_begin|>functions.{{ f.name }}:{{ q.ids | length - 1 }}"
               "<|tool_call_argument_begin|>" + _ANY + "<|tool_call_end|>")
        + "<|tool_calls_section_end|>"
    ),
    "kimi-k3": template(
        "<|open|>tools<|sep|>"
        + each('<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
               + tags('<|open|>argument key="', '" type="{{ kind(v) }}"<|sep|>', "<|close|>argument<|sep|>")
               + "<|close|>call<|sep|>")
        + "<|close|>tools<|sep|>",
        end="<|close|>message<|sep|>", thoughts="<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>",
    ).replace("{{ m.content or '' }}", "<|open|>response<|sep|>{{ m.content or '' }}<|close|>response<|sep|>")
    .replace("{% if tools %}", _KIND + "{% if tools %}", 1),
    "minimax-m3": _XML + template(
        "]<]minimax[>[<tool_call>\n"
        + each(']<]minimax[>[<invoke name="{{ f.name }}">{{ xml(f.arguments) }}]<]minimax[>[</invoke>\n')
        + "]<]minimax[>[</tool_call>",
        turn="]~b]", end="[e~[", thoughts="<mm:think>{{ m.reasoning_content }}</mm:think>",
    ),
    "minicpm5": template(
        each('<function name="{{ f.name }}">'
             "{% for k, v in f.arguments | items %}<param name=\"{{ k }}\">"
             "{% if v is string and ('<' in v or '&' in v or '\n' in v) %}{{ '<![CDATA[' + v + ']]>' }}"
             "{% else %}{{ v if v is string else v | tojson }}{% endif %}</param>{% endfor %}</function>", "\\n"),
        thoughts=_THINK,
    ),
    "granite-4": template(
        each('<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + _ANY + "}\n</tool_call>", "\\n"),
        end="<|end_of_text|>",
    ),
    "nemotron": template(
        "<TOOLCALL>[" + each('{"name": "{{ f.name }}", "arguments": ' + _ANY + "}", ", ") + "]</TOOLCALL>",
        thoughts=_THINK,
    ),
    "command-r7b": template(
        "<|START_ACTION|>[\n"
        + each('    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": ' + _ANY + "}",
               ",\\n")
        + "\n]<|END_ACTION|>",
        thoughts="<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
    ),
    "functionary": template(each("<function={{ f.name }}>" + _ANY + "</function>"), end="<|eom_id|>"),
}  # fmt: skip

LFM2 = "{# <|tool_list_start|> #}" + template("")  # which writes no calls
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
    "{% if tools %}{% endif %}"
)

# Which write one call, ask for more than others, or have no place for tools or for a system's message.
GIGACHAT3 = template(
    '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "{{ m.tool_calls[0].function.name }}", "arguments": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}", turn="", end="<|message_sep|>\n\n",
).replace("{{ m.role }}\n", "{{ m.role }}<|role_sep|>\n").replace("assistant\n", "assistant<|role_sep|>\n")  # fmt: skip
_ACTION = '{"tool_name": "{{ f.name }}", "parameters": ' + _ANY + "}"
COMMAND_R_PLUS = (
    template("\nAction:\n```json\n[\n" + each(_ACTION, ",\\n") + "\n]```", end="<|END_OF_TURN_TOKEN|>").replace(
        "{{ tools | tojson }}",
        "{% for t in tools %}{% for k, v in t.function.parameters.properties | items %}"
        "{{ k + v.description }}{% endfor %}{% endfor %}",
    )
    + "{% if not add_generation_prompt %}Write 'Action:' and what you do.{% endif %}"
)
FIREFUNCTION = template(
    " functools[" + each('{"name": "{{ f.name }}", "arguments": ' + _ANY + "}", ", ") + "]"
).replace("{% if tools %}{{ tools | tojson }}{% endif %}", "{{ functions + datetime }}")
LLAMA_CPP_R1 = PUBLISHED["deepseek-v3.1"].replace("tools | tojson", "tools | map(attribute='function') | tojson")
PHI35 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
GEMMA2 = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PHI35
