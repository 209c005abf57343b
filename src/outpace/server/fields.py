"""Fields of other servers and of other routes, where a request has no such field: what is taken, since it changes no
answer, and what is refused, since it would. The table in docs/serving.md is made from ``FIELDS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

Zero, One = Annotated[float, Field(ge=0, le=0)], Annotated[float, Field(ge=1, le=1)]
Texts = Annotated[list[str], Field(fail_fast=True)]
_NO_CODE = "a server runs no code of its clients"
_NO_BEAMS = "it is of beams, which this server does not search"
_NO_STORE = "no answer is kept"
_NOT_OFFERED = "this way of sampling is not offered: use temperature, top_k, top_p, min_p or top_n_sigma"
_NO_ADAPTERS = "this server has no adapters: serve the adapted model"
_TEXT = "this server reads and writes text alone"


class Other(NamedTuple):
    """``takes``: the values that are taken, but for null; None: none. ``why``: others are not."""

    takes: Any
    why: str


FIELDS: Mapping[str, Other] = {
    "access_programs": Other(None, "this server has none"),
    "adaptive_decay": Other(float, "give a number"),
    "adaptive_target": Other(None, _NOT_OFFERED),
    "audio": Other(None, _TEXT),
    "backend_sampling": Other(bool, "give true or false"),
    "background": Other(Literal[False], "no answer is kept for later: stream it"),
    "background_options": Other(None, "no answer is kept for later: stream it"),
    "best_of": Other(Literal[1], "use n, and choose among the answers"),
    "cache_prompt": Other(bool, "use reuse_prefix"),
    "chat_template": Other(None, _NO_CODE),
    "client_metadata": Other(dict[str, Any], "give an object"),
    "container": Other(None, "this server runs no code"),
    "context": Other(None, "no conversation is kept: send its messages"),
    "context_management": Other(dict[str, Any] | list[Any], "give an object"),
    "conversation": Other(None, "no conversation is kept: send it as input"),
    "do_sample": Other(Literal[True], "use temperature 0"),
    "documents": Other(None, "no template here is given any: put them into a message"),
    "dry_allowed_length": Other(int, "give a number"),
    "dry_base": Other(float, "give a number"),
    "dry_multiplier": Other(Zero, _NOT_OFFERED),
    "dry_penalty_last_n": Other(int, "give a number"),
    "dry_sequence_breakers": Other(Texts, "give strings"),
    "dynatemp_exponent": Other(float, "give a number"),
    "dynatemp_range": Other(Zero, _NOT_OFFERED),
    "early_stopping": Other(Literal[False], _NO_BEAMS),
    "ebnf": Other(None, "use guided_grammar"),
    "echo": Other(None, "use /v1/completions"),
    "encrypted_content": Other(None, "no reasoning is encrypted here: send its text"),
    "epsilon_cutoff": Other(Zero, _NOT_OFFERED),
    "eta_cutoff": Other(Zero, _NOT_OFFERED),
    "format": Other(None, "use response_format"),
    "function_call": Other(None, "it is deprecated: use tool_choice"),
    "functions": Other(None, "it is deprecated: use tools"),
    "guided_decoding_backend": Other(str, "give a string"),
    "id_slot": Other(int, "give a number"),
    "image": Other(None, _TEXT),
    "image_url": Other(None, _TEXT),
    "images": Other(None, _TEXT),
    "include_reasoning": Other(Literal[True], "answers have their reasoning in a field of its own: leave it unread"),
    "input": Other(None, "use messages, or /v1/responses"),
    "instructions": Other(None, "write it as a message of the system"),
    "length_penalty": Other(One, _NO_BEAMS),
    "logit_processors": Other(None, _NO_CODE),
    "logits_processors": Other(None, _NO_CODE),
    "logprobs": Other(None, "use /v1/chat/completions"),
    "lora": Other(Annotated[list[Any], Field(max_length=0)], _NO_ADAPTERS),
    "lora_path": Other(None, _NO_ADAPTERS),
    "max_completion_tokens": Other(None, "use max_tokens"),
    "max_new_tokens": Other(None, "use max_tokens"),
    "max_output_tokens": Other(None, "use max_tokens"),
    "max_tokens": Other(None, "use max_output_tokens"),
    "max_tool_calls": Other(int, "give a number"),
    "mcp_servers": Other(None, "this server calls nothing"),
    "messages": Other(None, "use /v1/chat/completions"),
    "metadata": Other(dict[str, str], "give strings by name"),
    "min_keep": Other(int, "give a number"),
    "mirostat": Other(Literal[0], _NOT_OFFERED),
    "mirostat_eta": Other(float, "give a number"),
    "mirostat_tau": Other(float, "give a number"),
    "mm_processor_kwargs": Other(None, _TEXT),
    "moderation": Other(None, "this server moderates nothing"),
    "n": Other(Literal[1], "ask several times, or use /v1/chat/completions"),
    "n_keep": Other(int, "give a number"),
    "n_predict": Other(None, "use max_tokens"),
    "n_probs": Other(None, "use logprobs and top_logprobs"),
    "num_beams": Other(Literal[1], _NO_BEAMS),
    "options": Other(None, "give what it has beside the other fields"),
    "output_config": Other(None, "use response_format and reasoning_effort"),
    "penalty_alpha": Other(Zero, _NOT_OFFERED),
    "prediction": Other(dict[str, Any], "give an object"),
    "previous_response_id": Other(None, "no answer is kept: send the conversation as input"),
    "prompt": Other(None, "no prompt is kept: send its text"),
    "prompt_cache_key": Other(str, "give a string"),
    "prompt_cache_options": Other(dict[str, Any], "give an object"),
    "prompt_cache_retention": Other(str, "give a string"),
    "prompt_logprobs": Other(None, "use /v1/chat/completions or /v1/completions"),
    "raw": Other(None, "use /v1/completions"),
    "reasoning": Other(None, "use reasoning_effort"),
    "reasoning_effort": Other(None, "use reasoning.effort, or /v1/chat/completions"),
    "reasoning_format": Other(Literal["auto"], "reasoning has a field of its own"),
    "regex": Other(None, "use guided_regex"),
    "repeat_last_n": Other(int, "penalties are of the whole text"),
    "request_id": Other(str, "give a string"),
    "response_format": Other(None, "use text.format, or output_config.format"),
    "return_progress": Other(bool, "give true or false"),
    "return_tokens_as_token_ids": Other(Literal[False], "return_token_ids gives ids beside the text"),
    "safe_prompt": Other(Literal[False], "write it as a message of the system"),
    "safety_identifier": Other(str, "give a string"),
    "samplers": Other(Texts, "give strings"),
    "service_tier": Other(
        Literal["auto", "default", "flex", "scale", "priority", "standard_only"], "this server has one tier"
    ),
    "spaces_between_special_tokens": Other(Literal[True], "use skip_special_tokens"),
    "stop_sequences": Other(None, "use stop"),
    "store": Other(bool, _NO_STORE),
    "structural_tag": Other(None, "use grammar"),
    "suffix": Other(Annotated[str, Field(max_length=0)], "use /v1/completions, or /infill"),
    "system": Other(None, "write it as a message of the system"),
    "template": Other(None, _NO_CODE),
    "text": Other(None, "use response_format"),
    "tfs_z": Other(One, _NOT_OFFERED),
    "think": Other(None, "use reasoning_effort"),
    "thinking": Other(None, "use reasoning_effort"),
    "tool_choice": Other(None, "use /v1/chat/completions"),
    "tools": Other(None, "use /v1/chat/completions"),
    "top_a": Other(Zero, _NOT_OFFERED),
    "top_logprobs": Other(None, "use /v1/chat/completions"),
    "truncate_prompt_tokens": Other(None, "shorten the prompt"),
    "typical_p": Other(One, _NOT_OFFERED),
    "use_beam_search": Other(Literal[False], "it samples, or takes the likeliest token (temperature 0)"),
    "verbosity": Other(Literal["low", "medium", "high"], "give low, medium or high"),
    "web_search_options": Other(None, "this server searches nothing"),
    "whitespace_pattern": Other(None, "JSON stands on one line"),
    "xtc_probability": Other(Zero, _NOT_OFFERED),
    "xtc_threshold": Other(float, "give a number"),
}  # fmt: skip
OF_CONTENT = frozenset(("audio", "documents", "encrypted_content", "function_call", "image", "image_url", "images"))
TAKEN: Mapping[str, Any] = {  # for pydantic's create_model
    name: (other.takes | None, Field(default=None, description="Changes nothing."))
    for name, other in FIELDS.items()
    if other.takes is not None
}
