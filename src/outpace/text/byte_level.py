"""Byte-level BPE as ``tokenizers.Tokenizer``: merges over GPT-2's alphabet for bytes, and the rules that cut a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from outpace.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}" + _TAIL
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}" + _TAIL
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*" + _TAIL
)


def _by_case(ends: str, numbers: str, letters: str = "") -> str:
    """Words cut before capitals; ``letters`` narrows what counts as one."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
    )
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{ends}|{start}{upper}+{lower}*{ends}|{numbers}"


_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_TEKKEN = _by_case("", r"\p{N}") + _SLASHES
_GPT4O = _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}") + _SLASHES
_KIMI = r"\p{Han}+|" + _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"&&[^\p{Han}]") + f"|{_SIGNS}" + _TAIL

_IDEOGRAPHS, _KANA = r"\x{4E00}-\x{9FA5}", r"\x{3040}-\x{30FF}"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3_WORDS = rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", rf"[{_IDEOGRAPHS}{_KANA}]+", rf"{_DEEPSEEK3_WORDS}[\r\n]*" + _TAIL)
# Letters with case as of Unicode 12, without the mathematical ones.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}"
    r"\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]]"
)
_EAST_ASIA = rf"[{_IDEOGRAPHS}\x{{0800}}-\x{{4E00}}\x{{AC00}}-\x{{D7FF}}]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"
_FALCON_SIGNS, _THREE = r"[\p{P}$+<=>^~|%s]+", "[0-9][0-9][0-9]"
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}"
    rf"\x{{FF0C}}\x{{3001}}-\x{{303F}}\x{{FE30}}-\x{{FE4F}}]+|[\x{{3105}}-\x{{312F}}]+|[{_IDEOGRAPHS}{_KANA}]+"
)
_AFMOE = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}"
    r"\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_JAIS2 = r"|\s*[\r\n]+" + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"
_BAILING_ENDS, _BAILING_TAIL = r"'(?i:[sdmt]|ll|ve|re)", r"|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_WORD = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"

_LLAMA3_NAMES = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
)  # fmt: skip
_GROUPS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    # What cuts a text, one pattern after the other over the pieces left, by llama.cpp's names (src/llama-vocab.cpp,
    # commit 00ad355e). Where its pattern stands in for one that its engine cannot read, the model's own is here.
    (
        "gpt-2", "gpt2", "phi-2", "olmo", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code",
        "jina-v1-en", "roberta-bpe", "modern-bert", "mpt", "jais", "trillion", "granite-docling", "exaone4",
        "gigachat", "a.x-4.0", "mellum",
    ): (_GPT2,),
    (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ): (r"\p{N}", _GPT2),
    (*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): (_LLAMA3,),
    (
        "qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "f2llmv2", "grok-2", "solar-open",
    ): (_QWEN2,),
    ("qwen35",): (_QWEN35,),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"): (_GPT4O,),
    ("tekken",): (_TEKKEN,),
    ("tiny_aya", "cohere2moe"): (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    ("kimi-k2",): (_KIMI,),
    ("youtu",): (_YOUTU, _by_case(f"{_CONTRACTIONS}?", r"\p{N}") + _SLASHES),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("spark2_5",): (*_DEEPSEEK3[:2], _DEEPSEEK3_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ("deepseek-llm",): (
        r"[\r\n]", rf"\s?{_CASED}+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$", _EAST_ASIA, r"\p{N}+",
    ),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIA, r"\p{N}"),
    ("falcon",): (_FALCON_SIGNS % "`", _GPT2, _THREE),
    ("default",): (_FALCON_SIGNS % "", _GPT2, r"\p{N}+", _THREE),
    ("bloom", "gpt3-finnish", "poro-chat"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
    ("chameleon",): (
        r"<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
    ),
    ("jais-2",): (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}" + _JAIS2,),
    ("superbpe",): (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (rf"{_BAILING_ENDS}|{_WORD}|\p{{N}}|{_SIGNS}" + _BAILING_TAIL,),
    ("exaone-moe",): (
        rf"{_CONTRACTIONS}|{_EXAONE_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?" + _BAILING_TAIL,
    ),
    ("seed-coder",): (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+" + _TAIL,),
    ("ufakzeka",): (rf"{_WORD}|\p{{N}}|{_SIGNS}" + _TAIL,),
    ("afmoe",): (r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))", _AFMOE, _DEEPSEEK3[2]),
    ("laguna",): (r"[^\n]+|\n+", _QWEN2),
    ("minicpm5",): (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_SIGNS}" + _TAIL),
}  # fmt: skip
RULES = {name: patterns for names, patterns in _GROUPS.items() for name in names}
# A word that is a token is not merged.
WHOLE_WORDS = frozenset((*_LLAMA3_NAMES, "tekken", "youtu", "minicpm5", "granite-embed-multi-97m"))
STARTS = frozenset((*_LLAMA3_NAMES, "tekken", "chameleon"))  # texts begin with the start token


def build(
    name: str,
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    rule: Sequence[str],
    *,
    whole: bool = False,
    prefix: bool = False,
) -> Any:
    """A ``tokenizers.Tokenizer``. ``rule``: patterns, such as one of RULES; ``whole``: look a word up before it is
    merged; ``prefix``: write a space before a text that has none. Raises ModelError that begins with ``name``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    try:
        model = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=whole)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{name}: the vocabulary and its merges do not fit together ({error})") from error
    tokenizer = Tokenizer(model)
    plain = tuple(rule) == (_GPT2,)
    cuts = [] if plain else [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=plain)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 as it is, the rest from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
