"""SentencePiece vocabularies as ``tokenizers.Tokenizer``, without the sentencepiece package.

From a GGUF file's lists or a ``tokenizer.model`` (a protocol buffer, sentencepiece_model.proto). BPE's merges follow
from the pieces' scores: a merge ranks as the piece that it makes.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import I32
from outpace.common.files import write_bytes
from outpace.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # a piece's type, in both kinds of file
SPACE = "\u2581"  # how SentencePiece writes a space
_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary: ``texts``, ``scores`` float [n] and ``types`` int32 [n] by id, and how a text becomes pieces.

    ``unknown``: the id of what no piece spells. ``prefix``: "always" writes a space before a text and after every added
    token, whatever follows; "first" before a text alone, unless it has one; "never". ``squeeze``: spaces at both ends
    go, and one is left of several. ``escape``: spaces are written as U+2581. ``charsmap``: SentencePiece's table of
    normalizations. ``split``: user-defined pieces are cut out of the text after the prefix, as SentencePiece does;
    otherwise they are added tokens, as llama.cpp has them, and the prefix stands after them, too.
    """

    texts: list[str]
    scores: npt.NDArray[np.float64]
    types: I32
    unknown: int | None = None
    unigram: bool = False
    prefix: str = "always"
    squeeze: bool = False
    escape: bool = True
    charsmap: bytes = b""
    byte_fallback: bool = True
    split: bool = False
    ends: dict[str, int] = field(default_factory=dict)  # ids by "bos_token" and "eos_token"


def build(pieces: Pieces, name: str, cache: Path | None) -> Any:
    """A ``tokenizers.Tokenizer``; ``name`` is the file's, ``cache`` a folder for derived merges. Raises ModelError."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    own = [
        text for text, kind in zip(pieces.texts, pieces.types.tolist(), strict=True) if kind == USER_DEFINED and text
    ]
    own = own if pieces.split else []
    try:
        tokenizer = Tokenizer(_unigram(pieces) if pieces.unigram else _bpe(pieces, bool(own), cache))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{name}: its vocabulary is not usable ({error})") from error
    steps: list[Any] = []
    if pieces.charsmap:
        try:
            steps.append(normalizers.Precompiled(pieces.charsmap))
        except Exception as error:
            raise ModelError(f"{name}: its table of normalizations is damaged ({error}): get the file again") from error
    if pieces.squeeze:
        end = f"[ {SPACE}]" if pieces.escape else " "
        steps += [normalizers.Replace(Regex(rf"\A +|{end}+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.prefix == "always":
        steps.append(normalizers.Prepend(" "))
    if pieces.escape:
        steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    cuts: list[Any] = []
    if pieces.prefix == "first":
        cuts.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False))
    if own:
        longest_first = "|".join(re.escape(text) for text in sorted(own, key=len, reverse=True))
        cuts.append(pre_tokenizers.Split(Regex(longest_first), behavior="isolated"))
        if not pieces.unigram:  # what stands alone is looked up, and a byte's name is none of it
            cuts.append(pre_tokenizers.Split(Regex(r"\A<0x(?=[0-9A-F]{2}>\z)"), behavior="isolated"))
    if cuts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.squeeze or pieces.prefix != "never":
        back.append(decoders.Strip(content=" ", left=_ALL if pieces.squeeze else 1))
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _bpe(pieces: Pieces, whole: bool, cache: Path | None) -> Any:
    """``whole``: what is cut out of a text is looked up before anything is merged."""
    from tokenizers import models

    return models.BPE(
        vocab={text: i for i, text in enumerate(pieces.texts)},
        merges=merges(pieces.texts, pieces.scores, pieces.types, cache),
        byte_fallback=pieces.byte_fallback,
        fuse_unk=True,
        unk_token=None if pieces.unknown is None else pieces.texts[pieces.unknown],
        ignore_merges=whole,
    )


def _unigram(pieces: Pieces) -> Any:
    """Unused pieces' scores put them out of reach. With bytes, a text that spells a byte's name gets that byte."""
    from tokenizers import models

    scores = np.where(pieces.types == UNUSED, pieces.scores.min(initial=0.0) - 20.0, pieces.scores).tolist()
    return models.Unigram(list(zip(pieces.texts, scores, strict=True)), pieces.unknown, pieces.byte_fallback)


def add_tokens(tokenizer: Any, texts: list[str], types: I32, rstrip: frozenset[str] = frozenset()) -> None:
    """Control tokens match only where special tokens are wanted, and so does the unknown one; user-defined ones are
    ordinary text, kept whole. ``rstrip``: those that take the white space after them."""
    from tokenizers import AddedToken

    def listed(kinds: tuple[int, ...], special: bool) -> list[Any]:
        found = [texts[i] for i in np.flatnonzero(np.isin(types, kinds)) if texts[i]]
        return [
            AddedToken(text, normalized=False, special=special, rstrip=text in rstrip)
            for text in found
            if tokenizer.token_to_id(text) is not None
        ]

    tokenizer.add_special_tokens(listed((CONTROL, UNKNOWN), True))
    tokenizer.add_tokens(listed((USER_DEFINED,), False))


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


def merges(texts: list[str], scores: npt.NDArray[np.float64], types: I32, cache: Path | None) -> list[tuple[str, str]]:
    """``derive_merges`` as texts; the ids are kept in ``cache`` under a hash of what they depend on, and a damaged copy
    is made anew."""
    vocabulary = {text: i for i, text in enumerate(texts)}
    key = hashlib.sha256("\0".join(texts).encode())
    key.update(np.ascontiguousarray(scores, np.float64).tobytes() + types.tobytes() + b"merges 1")
    path = None if cache is None else cache / f"merges-{key.hexdigest()[:32]}.bin"
    stored = None if path is None else _read_checked(path)
    if stored is not None:
        pairs: I32 = np.frombuffer(stored, "<i4").reshape(-1, 2)
    else:
        pairs = derive_merges(texts, vocabulary, scores, types)
        if path is not None:
            _write_checked(path, pairs.astype("<i4").tobytes())
    return [(texts[left], texts[right]) for left, right in pairs.tolist()]


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


def read(path: Path, *, legacy: bool) -> Pieces | None:
    """The vocabulary in a ``tokenizer.model``; None for a file of another kind (tiktoken's have that name, too).

    ``legacy``: whether the prefix stands after special tokens, too (Hugging Face's setting of that name). Raises
    ModelError when the file is damaged or asks for what is not supported.
    """
    content = path.read_bytes()
    if not content.startswith(b"\n"):  # the first field: a piece
        return None
    try:
        return _pieces(path, _fields(content), legacy)
    except (ValueError, LookupError, OverflowError, struct.error) as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again") from error


def _pieces(path: Path, model: dict[int, list[bytes]], legacy: bool) -> Pieces:
    found = [_fields(piece) for piece in model[1]]
    trainer, normalizer = (_fields(model[part][-1]) if part in model else {} for part in (2, 3))
    kind = _number(trainer, 3, 1)
    if kind not in (1, 2):
        raise ModelError(f"{path} splits text into {'words' if kind == 3 else 'characters'}: add its tokenizer.json")
    if _number(trainer, 24, 0):
        raise ModelError(f"{path} writes a word's space after it, which is not supported: add its tokenizer.json")
    types = np.array([_number(piece, 3, NORMAL) for piece in found], np.int32)
    unknown = np.flatnonzero(types == UNKNOWN).tolist()
    prefixed = "always" if legacy else "first"
    named = {"bos_token": _number(trainer, 41, 1), "eos_token": _number(trainer, 42, 2)}  # -1 is a large number here
    return Pieces(
        texts=[piece[1][-1].decode("utf-8") for piece in found],
        scores=np.array([struct.unpack("<f", piece[2][-1])[0] if 2 in piece else 0.0 for piece in found], np.float64),
        types=types,
        unknown=unknown[0] if unknown else None,
        unigram=kind == 1,
        prefix=prefixed if _number(normalizer, 3, 1) else "never",
        squeeze=bool(_number(normalizer, 4, 1)),
        escape=bool(_number(normalizer, 5, 1)),
        charsmap=normalizer.get(2, [b""])[-1],
        byte_fallback=bool(_number(trainer, 35, 0)),
        split=True,
        ends={name: i for name, i in named.items() if i < len(types) and types[i] == CONTROL},
    )


def _number(fields: dict[int, list[bytes]], number: int, default: int) -> int:
    return int.from_bytes(fields[number][-1], "little") if number in fields else default


def _fields(content: bytes) -> dict[int, list[bytes]]:
    """A protocol buffer's fields by number; numbers as eight bytes, little endian. Raises ValueError when damaged."""
    fields: dict[int, list[bytes]] = {}
    for number, value in _each_field(content):
        fields.setdefault(number, []).append(value)
    return fields


def _each_field(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(content) or shift > 63:
                raise ValueError("it is no protocol buffer")
            byte = content[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF

    while at < len(content):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint().to_bytes(8, "little")
            continue
        sizes = {1: 8, 5: 4}
        size = varint() if key & 7 == 2 else sizes.get(key & 7, -1)
        if not 0 <= size <= len(content) - at:
            raise ValueError("it is no protocol buffer")
        yield key >> 3, content[at : at + size]
        at += size
