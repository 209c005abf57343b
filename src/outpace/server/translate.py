"""From a request to what an engine takes: token ids, ``SamplingParams``, options. Refusals are here. Pure, but for the
seed that is drawn where none is given, before calls are named after it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.arrays import I32
from outpace.engine.grammar import LIMITS
from outpace.errors import GrammarError
from outpace.exact.noise import fresh_seed
from outpace.models.text.chat_template import variables_of
from outpace.params import LogitRule, SamplingParams
from outpace.server.errors import APIError
from outpace.server.schema.chat import ChatRequest, Grammar, ResponseFormat
from outpace.server.schema.common import Sampling
from outpace.server.schema.completions import CompletionRequest
from outpace.server.schema.tokens import TokenizeRequest
from outpace.server.served import Served
from outpace.server.settings import ServerSettings
from outpace.server.tools.base import OutputParser
from outpace.server.tools.definitions import checked, names_of, tool_grammar
from outpace.server.tools.detect import format_of, parser_for, thoughts_end
from outpace.server.tools.messages import conversation

_EXACT = 2**53  # whole numbers below it survive JSON anywhere
_MOST_STOPS = 64  # strings: every token of an answer is looked through for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine is asked: every prompt with the same parameters.

    ``parser``: of a choice's text, by its index; ``trace``: the answer says who wrote it; ``nothing``: only the prompts
    are asked about; ``texts``: the prompts, where the answer repeats them.
    """

    prompts: list[I32]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    parser: Callable[[int], OutputParser] | None = None
    trace: bool = False
    nothing: bool = False
    texts: list[str] = field(default_factory=list)
    user: str | None = None

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n


_SAME = (  # parameters that are called alike here
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "bad_words", "ignore_eos", "skip_special_tokens", "n", "stop",
)  # fmt: skip
_OTHERWISE = {
    "stop_token_ids": "stop_ids",
    "allowed_token_ids": "allowed_tokens",
    "include_stop_str_in_output": "include_stop",
}
_OF_CHATS, _OF_TEXTS = ("tools", "chat_template_kwargs", "add_generation_prompt"), ("add_special_tokens",)
_TAKEN = ("messages", "tools", "add_generation_prompt", "documents")  # variables of templates that have fields


def sampling(body: Sampling, settings: ServerSettings, **more: Any) -> SamplingParams:
    """The body's parameters, with ``more``. Raises ParameterError or APIError."""
    if body.n is not None and body.n > settings.max_n:
        raise APIError(400, f"n={body.n} is more than this server's {settings.max_n}: ask for fewer", param="n")
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options needs stream: set it to true", param="stream_options")
    if isinstance(body.stop, list) and len(body.stop) > _MOST_STOPS:
        raise APIError(400, f"stop has {len(body.stop)} strings: give at most {_MOST_STOPS}", param="stop")
    given = {name: getattr(body, name) for name in _SAME}
    given |= {ours: getattr(body, theirs) for theirs, ours in _OTHERWISE.items()}
    given["temperature"] = 1.0 if body.temperature is None else body.temperature
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if body.seed is not None:
        given["seed"] = body.seed % 2**64 if -(2**63) <= body.seed < 0 else body.seed
    return SamplingParams(**{name: value for name, value in given.items() if value is not None}, **more)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise APIError(400, f"logit_bias has {text!r}, which is no token id: give ids as keys", param="logit_bias")
    return int(text)


def seeded(params: SamplingParams) -> SamplingParams:
    """The same with a seed: its own, or a fresh one that answers can tell."""
    return params if params.seed is not None else params.with_(seed=fresh_seed() % _EXACT)


def serving(body: Sampling, settings: ServerSettings, scope: str) -> dict[str, Any]:
    """Options of ``Engine.prepare``. ``scope``: whose KV may be shared."""
    options: dict[str, Any] = {"cache_scope": scope if body.cache_salt is None else f"{scope}/{body.cache_salt}"}
    bounds = [its for its in (body.deadline, settings.request_timeout) if its is not None]
    if bounds:
        options["deadline"] = min(bounds)
    if body.priority is not None:
        options["priority"] = body.priority
    if body.reuse_prefix is not None:
        options["reuse_prefix"] = body.reuse_prefix
    wish = body.speculation
    if wish is not None:
        if wish.off and any(its is not None for its in (wish.drafter, wish.size, wish.acceptance)):
            raise APIError(
                400, "speculation.off leaves nothing to draft: leave drafter, size and acceptance out",
                param="speculation.off",
            )  # fmt: skip
        options["drafter"] = False if wish.off else wish.drafter
        options["size"], options["acceptance"] = wish.size, wish.acceptance
    return options


def _trace(body: Sampling) -> bool:
    return body.speculation is not None and body.speculation.trace


def chat(body: ChatRequest, model: Served, settings: ServerSettings, scope: str) -> Work:
    """Raises ParameterError, RuleError or APIError."""
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
    _check_logprobs("top_logprobs", top, settings)
    template = model.tokenizer.chat_template
    tools = checked([tool.model_dump(exclude_none=True) for tool in body.tools or ()])
    choice = _tool_choice(body, bool(tools))
    talk = conversation([message.model_dump(exclude_none=True) for message in body.messages], template, tools, choice)
    variables = _variables(body.chat_template_kwargs or {}, template)
    prompt = model.tokenizer.render_chat(talk.messages, tools=talk.tools, **variables)
    tokens = model.tokenizer.encode(prompt, add_special=False, parse_special=True)
    _check_length(tokens, model, "messages")
    after = thoughts_end(template, prompt)
    rules = grammar_rules(body.response_format, body.grammar, model, after)
    offered = bool(tools) and choice != "none"
    if rules and offered:
        raise APIError(
            400, "tools and a format of the whole answer exclude each other: leave one out, or say tool_choice none",
            param="tools",
        )  # fmt: skip
    if offered:
        parallel = body.parallel_tool_calls is not False
        text = tool_grammar(format_of(template).kind, tools, choice, parallel=parallel)
        rules = [] if text is None else [_calls(text, model, after)]
    params = seeded(
        sampling(
            body, settings, max_tokens=_most_tokens(body), logprobs=bool(body.logprobs), top_logprobs=top, rules=rules
        )
    )
    called = hashlib.sha256(tokens.tobytes() + str(params.seed).encode())

    def parser(index: int) -> OutputParser:
        def name(call: int) -> str:
            digest = called.copy()
            digest.update(f"/{index}/{call}".encode())
            return f"call_{digest.hexdigest()[:24]}"

        names = names_of(tools) if offered else None
        return parser_for(template, tools=offered, reasoning=True, tool_id=name, prompt=prompt, names=names)

    return Work(
        prompts=[tokens], params=params, options=serving(body, settings, scope), parser=parser, trace=_trace(body),
        user=body.user,
    )  # fmt: skip


def _calls(text: str, model: Served, after: str | None) -> LogitRule:
    """The rule of ``tool_grammar``'s text, in which nothing but the functions' schemas is the client's own."""
    try:
        return model.grammars.lark(text, after=after, items=LIMITS["max_items_in_row"])
    except GrammarError as error:
        raise APIError(400, f"tools cannot be used: {error}", param="tools") from error


def tokens(body: TokenizeRequest, model: Served) -> I32:
    """Token ids int32 [n] of a text or a conversation. Raises ParameterError or APIError."""
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give either prompt or messages", param="prompt")
    kind, others = ("prompt", _OF_CHATS) if body.messages is None else ("messages", _OF_TEXTS)
    for name in others:
        if name in body.model_fields_set and getattr(body, name) is not None:
            raise APIError(400, f"{name} means nothing beside {kind}: leave it out", param=name)
    if body.prompt is not None:
        return model.tokenizer.encode(body.prompt, add_special=body.add_special_tokens)
    template = model.tokenizer.chat_template
    tools = checked([tool.model_dump(exclude_none=True) for tool in body.tools or ()])
    messages = [message.model_dump(exclude_none=True) for message in body.messages or ()]
    talk = conversation(messages, template, tools, "auto" if tools else "none")
    variables = _variables(body.chat_template_kwargs or {}, template)
    return model.tokenizer.encode_chat(
        talk.messages, tools=talk.tools, add_generation_prompt=body.add_generation_prompt, **variables
    )


def _most_tokens(body: ChatRequest) -> int | None:
    both = {its for its in (body.max_tokens, body.max_completion_tokens) if its is not None}
    if len(both) > 1:
        raise APIError(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    return both.pop() if both else None


def _tool_choice(body: ChatRequest, offered: bool) -> str | Mapping[str, Any]:
    choice = body.tool_choice
    if not offered and body.parallel_tool_calls is not None:
        raise APIError(400, "parallel_tool_calls needs tools: give some", param="parallel_tool_calls")
    if choice is None:
        return "auto" if offered else "none"
    if isinstance(choice, str):
        return choice if offered or choice == "required" else "none"
    return choice.model_dump()


def _variables(given: Mapping[str, Any], template: str | None) -> Mapping[str, Any]:
    known = frozenset() if template is None else variables_of(template)
    for name in given:
        if name in _TAKEN or name not in known:
            raise APIError(
                400, f"chat_template_kwargs.{name} is no variable of this model's chat template: leave it out",
                param=f"chat_template_kwargs.{name}",
            )  # fmt: skip
    return given


def grammar_rules(
    wanted: ResponseFormat | None, grammar: Grammar | None, model: Served, after: str | None
) -> Sequence[LogitRule]:
    """The rule that makes the answer what was asked for. ``after``: the text that ends what comes before it.

    Raises GrammarError (a ParameterError) or APIError.
    """
    if wanted is not None and wanted.type != "json_schema" and wanted.json_schema is not None:
        place = "response_format.json_schema"
        raise APIError(400, f"{place} needs the type json_schema, not {wanted.type}", param=place)
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is not None and grammar is not None:
        raise APIError(400, "response_format and grammar both say what is allowed: give one of them", param="grammar")
    if wanted is None and grammar is None:
        return []
    try:
        if grammar is not None:
            compiled = model.grammars.regex if grammar.type == "regex" else model.grammars.lark
            return [compiled(grammar.value, after=after)]
        if wanted is None or wanted.type == "json_object":
            return [model.grammars.json_object(after=after)]
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        if schema is None:
            place = "response_format.json_schema.schema"
            raise APIError(400, f"{place} is missing: give it", param=place)
        return [model.grammars.json_schema(schema, after=after)]
    except GrammarError as error:
        raise APIError(400, str(error), param="grammar" if wanted is None else "response_format") from error


def completion(body: CompletionRequest, model: Served, settings: ServerSettings, scope: str) -> Work:
    """Raises ParameterError, RuleError or APIError."""
    if body.logprobs is not None:
        _check_logprobs("logprobs", body.logprobs, settings)
    prompts, texts = _prompts(body, model, settings)
    echo = bool(body.echo)
    nothing = body.max_tokens == 0 and echo
    params = sampling(
        body, settings,
        max_tokens=1 if nothing else 16 if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=body.logprobs if echo else None,
        rules=grammar_rules(body.response_format, body.grammar, model, None),
    )  # fmt: skip
    return Work(
        prompts=prompts, params=params, options=serving(body, settings, scope), trace=_trace(body), nothing=nothing,
        texts=texts if echo else [], user=body.user,
    )  # fmt: skip


def _prompts(body: CompletionRequest, model: Served, settings: ServerSettings) -> tuple[list[I32], list[str]]:
    """Token ids and texts of all prompts."""
    given = body.prompt
    many: Sequence[str | list[int]]
    if isinstance(given, str):
        many = [given]
    elif not given:
        raise APIError(400, "prompt is empty: give some text, or token ids", param="prompt")
    elif isinstance(given[0], int):
        many = [[its for its in given if isinstance(its, int)]]
    else:
        many = [its for its in given if not isinstance(its, int)]
    if len(many) > settings.max_prompts:
        most = settings.max_prompts
        raise APIError(400, f"prompt has {len(many)} prompts: this server takes at most {most}", param="prompt")
    prompts, texts = [], []
    for its in many:
        if not its:
            raise APIError(400, "prompt is empty: give some text, or token ids", param="prompt")
        if isinstance(its, str):
            tokens, text = model.tokenizer.encode(its), its
        else:
            tokens = model.ids(its, "prompt")
            text = model.tokenizer.decode(tokens)
        _check_length(tokens, model, "prompt")
        prompts.append(tokens)
        texts.append(text)
    return prompts, texts


def _check_logprobs(name: str, wanted: int, settings: ServerSettings) -> None:
    if wanted > settings.max_logprobs:
        most = settings.max_logprobs
        raise APIError(400, f"{name}={wanted} is more than this server's {most}: ask for fewer", param=name)


def _check_length(tokens: I32, model: Served, param: str) -> None:
    if len(tokens) >= model.info.max_length:
        raise APIError(
            400,
            f"the prompt has {len(tokens)} tokens, but the context holds {model.info.max_length}, the answer included: "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )
