"""Byte-level BPE as ``tokenizers.Tokenizer``: merges over GPT-2's alphabet for bytes, and the rules that cut a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from outpace.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = _WORDS % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_GPT4O = _WORDS % ((_CONTRACTIONS + "?",) * 2) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL

_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
RULES: Mapping[str, str | None] = {  # by llama.cpp's names: a pattern, None for GPT-2's own, "" for that and one digit
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "olmo", "jina-es", "jina-de", "jina-v2-code", "mpt")),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), ""),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken")  # a word that is a token is not merged; texts begin with the start token, too


def build(
    name: str,
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    rule: str | None,
    *,
    whole: bool = False,
    prefix: bool = False,
) -> Any:
    """A ``tokenizers.Tokenizer``. ``rule``: one of RULES, or another pattern; ``whole``: look a word up before it is
    merged; ``prefix``: write a space before a text that has none. Raises ModelError that begins with ``name``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    try:
        model = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=whole)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{name}: the vocabulary and its merges do not fit together ({error})") from error
    tokenizer = Tokenizer(model)
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not rule)
    if rule == "":
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    elif rule is not None:
        split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), behavior="isolated"), split])
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 as it is, the rest from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
