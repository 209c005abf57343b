"""Builds a ``tokenizers.Tokenizer`` from a GGUF file's metadata (keys ``tokenizer.ggml.*``).

Two families: "gpt2", byte-level BPE with the file's merges and a split pattern named by ``tokenizer.ggml.pre``; and
"llama", SentencePiece BPE, whose merges follow from the pieces' scores: a merge ranks as the piece that it makes.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import I32
from outpace.common.files import write_bytes
from outpace.errors import ModelError

if TYPE_CHECKING:
    from outpace.models.weights.gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
SPACE = "\u2581"  # how SentencePiece writes a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = _WORDS % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_GPT4O = _WORDS % ((_CONTRACTIONS + "?",) * 2) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL

_PLAIN = ("default", "gpt-2", "gpt2", "phi-2", "olmo", "jina-es", "jina-de", "jina-v2-code", "mpt")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")

# What ends an answer: llama.cpp's special_eog_ids (src/llama-vocab.cpp, commit 00ad355e), which knows them by name
# since files do not list them all. Those that begin another file or pad one end a completed middle.
_END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>",
    "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
))  # fmt: skip
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def build(gguf: GGUFFile, cache: Path | None) -> Any:
    """A ``tokenizers.Tokenizer``; ``cache`` is a folder for derived merges. Raises ModelError for other tokenizers."""
    kind = gguf.text("tokenizer.ggml.model", "")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelError(
            f"{gguf.path.name} has the tokenizer {kind!r}, which is not supported ({', '.join(builders)} are): "
            f"use the original model folder with its tokenizer.json"
        )
    tokens = _tokens(gguf)
    tokenizer = builders[kind](gguf, tokens, cache)
    _add_special(tokenizer, tokens, token_types(gguf, len(tokens)))
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
    """``tokenizer.ggml.token_type`` int32 [count]; all normal when the file lists none."""
    types = gguf.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.full(count, NORMAL, np.int32)
    if not isinstance(types, np.ndarray) or len(types) != count or types.dtype.kind not in "iu":
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml.token_type does not match its {count} tokens")
    types = types.astype(np.int32)
    types[_ends_by_name(gguf)] = CONTROL  # whatever the file has them as: no text may spell them
    return types


def token_id(gguf: GGUFFile, name: str) -> int | None:
    """A special token's id, ``tokenizer.ggml.<name>_token_id``, or None. Raises ModelError when out of range."""
    value = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    count = len(_listed(gguf))
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
    """Every id that ends an answer: those that the file has keys for, the main one first, and those known by name."""
    keyed = [token_id(gguf, name) for name in _END_KEYS]
    found = dict.fromkeys(i for i in (*keyed, *_ends_by_name(gguf)) if i is not None)
    tokens = _listed(gguf)
    names = {tokens[i] for i in found}
    if names & {"<|return|>", "<|flush|>"} and names & {"<|call|>", "<|calls|>"}:
        return tuple(i for i in found if tokens[i] != "<|end|>")  # gpt-oss and Solar end a message with it, no answer
    return tuple(found)


def _ends_by_name(gguf: GGUFFile) -> list[int]:
    first: dict[str, int] = {}
    for i, token in enumerate(_listed(gguf)):
        if token in _END_NAMES:
            first.setdefault(token, i)  # a duplicate has another name (_tokens)
    if "<eos>" in first:
        # Gemma ends with <eos> and writes HTML, of which </s> is a tag. llama.cpp knows that of Gemma 4 alone.
        first.pop("</s>", None)
    return sorted(first.values())


def _byte_level(gguf: GGUFFile, tokens: list[str], cache: Path | None) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    lines = gguf.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise ModelError(f"{gguf.path.name} has no merges (tokenizer.ggml.merges): use the model's own folder")
    if lines and not isinstance(lines[0], str):  # a list has one type
        raise ModelError(f"{gguf.path.name} has merges that are no text: get the file again")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    pre = gguf.text("tokenizer.ggml.pre", "default")
    if pre in _PLAIN:
        split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    elif pre in _SPLITS:
        words = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        split = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        raise ModelError(
            f"{gguf.path.name} splits text by the rule {pre!r}, which is not known here: "
            f"use the original model folder with its tokenizer.json"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{gguf.path.name}: the vocabulary and its merges do not fit together ({error})") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GGUFFile, tokens: list[str], cache: Path | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    # Runs of spaces are stored as such, but looked up in SentencePiece's spelling.
    pieces = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    unknown = token_id(gguf, "unknown")
    pairs = _cached_merges(gguf, pieces, vocabulary, cache)
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=[(pieces[left], pieces[right]) for left, right in pairs.tolist()],
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else pieces[unknown],
        )
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{gguf.path.name}: its vocabulary is not usable ({error})") from error
    tokenizer = Tokenizer(model)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        back.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _add_special(tokenizer: Any, tokens: list[str], types: I32) -> None:
    """Control tokens match only where special tokens are wanted; user-defined ones are ordinary text, kept whole."""
    from tokenizers import AddedToken

    control = [tokens[i] for i in np.flatnonzero(types == CONTROL) if tokens[i]]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    user = [tokens[i] for i in np.flatnonzero(types == USER_DEFINED) if tokens[i]]
    known = [t for t in user if tokenizer.token_to_id(t) is not None]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in known])


def derive_merges(pieces: list[str], vocabulary: dict[str, int], scores: npt.NDArray[Any], types: I32) -> I32:
    """Merges int32 [M, 2] as pairs of ids, best first: by the made piece's score, then the longer left part.

    Only ordinary and user-defined pieces are made: no merge may ever spell a control token.
    """
    rows: list[tuple[float, int, int, int]] = []
    makes = (types == NORMAL) | (types == USER_DEFINED)
    for i in np.flatnonzero(makes).tolist():
        piece = pieces[i]
        score = -float(scores[i])
        for cut in range(len(piece) - 1, 0, -1):
            left = vocabulary.get(piece[:cut])
            if left is not None:
                right = vocabulary.get(piece[cut:])
                if right is not None:
                    rows.append((score, -cut, left, right))
    rows.sort(key=lambda row: row[:2])
    return np.array([row[2:] for row in rows], np.int32).reshape(-1, 2)


def _cached_merges(gguf: GGUFFile, pieces: list[str], vocabulary: dict[str, int], cache: Path | None) -> I32:
    """``derive_merges``, kept in ``cache`` under a hash of what it depends on; a damaged copy is made anew."""
    types = token_types(gguf, len(pieces))
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if gguf.architecture.startswith("gemma"):  # its scores are not in merge order, its ids are
        scores = -np.arange(len(pieces), dtype=np.float64)
    if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "fiu":
        scores = np.zeros(0)
    if len(scores) != len(pieces) or not np.isfinite(scores).all():
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml.scores does not match its {len(pieces)} tokens")
    if cache is None:
        return derive_merges(pieces, vocabulary, scores, types)
    key = hashlib.sha256("\0".join(pieces).encode())
    key.update(np.ascontiguousarray(scores, np.float64).tobytes() + types.tobytes() + b"merges 1")
    path = cache / f"merges-{key.hexdigest()[:32]}.bin"
    stored = _read_checked(path)
    if stored is not None:
        return np.frombuffer(stored, "<i4").reshape(-1, 2)
    merges = derive_merges(pieces, vocabulary, scores, types)
    _write_checked(path, merges.astype("<i4").tobytes())
    return merges


def _read_checked(path: Path) -> bytes | None:
    """The content of a cache file, or None when it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, body = content[:32], content[32:]
    return body if len(body) % 8 == 0 and hashlib.sha256(body).digest() == digest else None


def _write_checked(path: Path, body: bytes) -> None:
    """A cache that cannot be written is done without."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, hashlib.sha256(body).digest() + body)
