"""Builds a ``tokenizers.Tokenizer`` from a GGUF file's metadata (keys ``tokenizer.ggml.*``).

Three families: "gpt2", byte-level BPE with the file's merges and split patterns named by ``tokenizer.ggml.pre``;
"llama", SentencePiece BPE; and "gemma4", BPE with the file's merges over SentencePiece's spelling. Texts are cut as
llama.cpp does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.common.arrays import I32
from outpace.errors import ModelError
from outpace.text import byte_level, sentencepiece
from outpace.text.sentencepiece import CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED

if TYPE_CHECKING:
    from outpace.models.weights.gguf import GGUFFile

_DEFAULT_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where a SentencePiece vocabulary names none
_CONTROL_NAMES = re.compile(
    r"<\|(eo[tm]_id|im_end|end|endoftext|end_of_text|return|calls?|flush|fim_(prefix|suffix|middle|pad|repo)|"
    r"(code_)?(prefix|suffix|middle)|repo_name|file_sep)\|>|<(end_of_turn|end_of_utterance|fim[-_](prefix|suffix|middle|"
    r"pad)|fim-repo|reponame|PAD|REPO)>|_?<EOT>|\u2581?<(PRE|SUF|MID)>|"
    "<\uff5c(end\u2581of\u2581sentence|fim\u2581(begin|hole|end))\uff5c>"
)

# What ends an answer: llama.cpp's special_eog_ids (src/llama-vocab.cpp, commit 00ad355e), which knows them by name
# since files do not list them all. Those that begin another file or pad one end a completed middle.
_END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
_MIDDLE_END_NAMES = frozenset((
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
))  # fmt: skip
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_MIDDLE_KEYS = {  # of tokens for filling in the middle, the second as files had it before
    "prefix": ("fim_pre", "prefix"), "suffix": ("fim_suf", "suffix"), "middle": ("fim_mid", "middle"),
    "repository": ("fim_rep",), "file": ("fim_sep",), "pad": ("fim_pad",),
}  # fmt: skip


def build(gguf: GGUFFile, cache: Path | None) -> Any:
    """A ``tokenizers.Tokenizer``; ``cache`` is a folder for derived merges. Raises ModelError for other tokenizers."""
    kind = gguf.text("tokenizer.ggml.model", "")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _spelled}
    if kind not in builders:
        raise ModelError(
            f"{gguf.path.name} has the tokenizer {kind!r}, which is not supported ({', '.join(builders)} are): "
            f"use the original model folder with its tokenizer.json"
        )
    tokens = _tokens(gguf)
    tokenizer = builders[kind](gguf, tokens, cache)
    types = token_types(gguf, len(tokens))
    sentencepiece.add_tokens(tokenizer, tokens, types, _rstrip(gguf, tokens, types))
    return tokenizer


def _listed(gguf: GGUFFile) -> list[str]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):  # a list has one type
        raise ModelError(f"{gguf.path.name} has no vocabulary (tokenizer.ggml.tokens): use the model's own folder")
    return tokens


def _tokens(gguf: GGUFFile) -> list[str]:
    """As listed, but no two alike."""
    tokens = _listed(gguf)
    if len(set(tokens)) == len(tokens):
        return tokens
    seen: set[str] = set()
    unique = []
    for i, token in enumerate(tokens):  # a duplicate cannot be told apart by its text; the first one keeps it
        name = token if token not in seen else f"<duplicate {i}>"
        seen.add(name)
        unique.append(name)
    return unique


def token_types(gguf: GGUFFile, count: int) -> I32:
    """``tokenizer.ggml.token_type`` int32 [count]; normal where the file lists none, and control, as in llama.cpp, for
    tokens with the name of one, whatever the file says."""
    types = gguf.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.full(count, NORMAL, np.int32)
    if not isinstance(types, np.ndarray) or len(types) != count or types.dtype.kind not in "iu":
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml.token_type does not match its {count} tokens")
    types = types.astype(np.int32)
    named = [i for i, token in enumerate(_listed(gguf)) if token[-1:] == ">" and _CONTROL_NAMES.fullmatch(token)]
    types[named] = CONTROL
    types[_ends_by_name(gguf)] = CONTROL
    return types


def token_id(gguf: GGUFFile, name: str) -> int | None:
    """A special token's id, ``tokenizer.ggml.<name>_token_id``, or llama.cpp's default for SentencePiece, or None.
    Raises ModelError when out of range."""
    value = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
    count = len(_listed(gguf))
    if value is None:
        default = _DEFAULT_IDS.get(name, count) if gguf.text("tokenizer.ggml.model", "") == "llama" else count
        return default if default < count else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml.{name}_token_id={value!r} is not one of its {count} tokens")
    return value


def chat_templates(gguf: GGUFFile) -> dict[str, str]:
    """By name: ``tokenizer.chat_template`` is "default", others are ``tokenizer.chat_template.<name>``."""
    key = "tokenizer.chat_template"
    found = {name.removeprefix(f"{key}."): value for name, value in gguf.metadata.items() if name.startswith(f"{key}.")}
    if key in gguf.metadata:
        found["default"] = gguf.metadata[key]
    return {name: source for name, source in found.items() if isinstance(source, str)}


def eos_ids(gguf: GGUFFile) -> tuple[int, ...]:
    """Every id that ends an answer: those that the file has keys for, the main one first, and those known by name. What
    ends a completed middle comes last."""
    keyed, tokens = [token_id(gguf, name) for name in _END_KEYS], _listed(gguf)
    middle = {i for name, i in zip(_END_KEYS, keyed, strict=True) if name.startswith("fim")}
    middle |= {i for i in _ends_by_name(gguf) if tokens[i] in _MIDDLE_END_NAMES}
    found = dict.fromkeys(i for i in (*keyed, *_ends_by_name(gguf)) if i is not None)
    found = dict.fromkeys(sorted(found, key=lambda i: i in middle and i != keyed[0]))
    names = {tokens[i] for i in found}
    if names & {"<|return|>", "<|flush|>"} and names & {"<|call|>", "<|calls|>"}:
        return tuple(i for i in found if tokens[i] != "<|end|>")  # gpt-oss and Solar end a message with it, no answer
    return tuple(found)


def middle_ids(gguf: GGUFFile) -> dict[str, int]:
    """The tokens for filling in the middle that the file has keys for, by fields of ``middle.Middle``."""
    keyed = ((field, token_id(gguf, name)) for field, names in _MIDDLE_KEYS.items() for name in reversed(names))
    return {field: token for field, token in keyed if token is not None}


def _ends_by_name(gguf: GGUFFile) -> list[int]:
    first: dict[str, int] = {}
    for i, token in enumerate(_listed(gguf)):
        if token in _END_NAMES or token in _MIDDLE_END_NAMES:
            first.setdefault(token, i)  # a duplicate has another name (_tokens)
    if "<eos>" in first:
        # Gemma ends with <eos> and writes HTML, of which </s> is a tag. llama.cpp knows that of Gemma 4 alone.
        first.pop("</s>", None)
    return sorted(first.values())


def _merges(gguf: GGUFFile) -> list[tuple[str, str]]:
    lines = gguf.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise ModelError(f"{gguf.path.name} has no merges (tokenizer.ggml.merges): use the model's own folder")
    if lines and not isinstance(lines[0], str):  # a list has one type
        raise ModelError(f"{gguf.path.name} has merges that are no text: get the file again")
    cuts = [line.find(" ", 1) for line in lines]  # a merge's first part may be a space
    return [(line[:cut], line[cut + 1 :]) for line, cut in zip(lines, cuts, strict=True)]


def _byte_level(gguf: GGUFFile, tokens: list[str], cache: Path | None) -> Any:
    merges = _merges(gguf)
    rule = gguf.text("tokenizer.ggml.pre", "default")
    if rule not in byte_level.RULES:
        raise ModelError(
            f"{gguf.path.name} splits text by the rule {rule!r}, which is not known here: "
            f"use the original model folder with its tokenizer.json"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    whole = rule in byte_level.WHOLE_WORDS
    return byte_level.build(gguf.path.name, vocabulary, merges, byte_level.RULES[rule], whole=whole)


def _spelled(gguf: GGUFFile, tokens: list[str], cache: Path | None) -> Any:
    """Gemma 4's: a text's lines, spaces spelled as U+2581, merged without cuts at words."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = token_id(gguf, "unknown")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=_merges(gguf),
                byte_fallback=True,
                fuse_unk=True,
                unk_token=None if unknown is None else tokens[unknown],
            )
        )
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{gguf.path.name}: the vocabulary and its merges do not fit together ({error})") from error
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _sentencepiece(gguf: GGUFFile, tokens: list[str], cache: Path | None) -> Any:
    # Runs of spaces are stored as such, but looked up in SentencePiece's spelling.
    texts = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    meta = gguf.metadata
    scores = meta.get("tokenizer.ggml.scores")
    if gguf.architecture.startswith("gemma"):  # its scores are not in merge order, its ids are
        scores = -np.arange(len(texts), dtype=np.float64)
    if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "fiu":
        scores = np.zeros(0)
    if len(scores) != len(texts) or not np.isfinite(scores).all():
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml.scores does not match its {len(texts)} tokens")
    pieces = sentencepiece.Pieces(
        texts,
        scores.astype(np.float64),
        token_types(gguf, len(texts)),
        unknown=token_id(gguf, "unknown"),
        prefix="always" if meta.get("tokenizer.ggml.add_space_prefix", True) else "never",
        squeeze=bool(meta.get("tokenizer.ggml.remove_extra_whitespaces", False)),
    )
    return sentencepiece.build(pieces, gguf.path.name, cache)


def _rstrip(gguf: GGUFFile, tokens: list[str], types: I32) -> frozenset[str]:
    """Tokens that take the white space after them. No key has them; llama.cpp knows them by the model's name."""
    name = gguf.text("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    marked = np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED, UNKNOWN))).tolist()
    return frozenset({tokens[i] for i in marked} | {"</s>"}) - {"<unk>", "<s>", "<|endoftext|>"}
