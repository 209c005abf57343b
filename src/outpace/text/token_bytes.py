"""The bytes that a tokenizer's tokens stand for: what two tokenizers have in common is text, and text is bytes.

Two spellings are known. Byte-level BPE (GPT-2) writes each byte as one printable character; SentencePiece writes a
space as U+2581 and bytes that no piece has as ``<0xNN>``. Added tokens are their own text; special ones stand for none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

from outpace.common.arrays import I32
from outpace.errors import ModelError
from outpace.text.byte_level import alphabet
from outpace.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """A tokenizer as a code for bytes. ``prefixes``: it writes a space before a text that has none; ``vocab_size``: ids
    that the model knows, where those are fewer than the tokenizer's.

    Raises ModelError for a tokenizer that spells its tokens in another way (WordPiece, for one).
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        if tokenizer.spelling is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name or 'this model'} is neither byte-level nor SentencePiece, "
                "so its tokens cannot be turned into bytes one by one"
            )
        self.tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._silent = tokenizer.special_ids | set(tokenizer.eos_ids) | {tokenizer.bos_id}
        self._known: dict[int, bytes] = {}
        self.prefixes = self.join(tokenizer.encode("a", add_special=False)).startswith(b" ")
        start = tokenizer.encode("a").tolist()[:1]
        self.opening = start if start == [tokenizer.bos_id] else []  # ids that every text begins with

    def of(self, token: int) -> bytes:
        """A token's bytes; none for special tokens and ids beyond the vocabulary."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spelled(token)
        return known

    def join(self, tokens: Sequence[int] | I32) -> bytes:
        return b"".join([self.of(int(token)) for token in tokens])

    def _spelled(self, token: int) -> bytes:
        text = None if token in self._silent else self.tokenizer.token(token)
        if text is None:
            return b""
        if self.tokenizer.spelling == "bytes":
            letters = alphabet()
            if token in self.tokenizer.added_ids:
                return text.encode()
            try:
                return bytes([letters[character] for character in text])
            except KeyError:  # its own text, though the tokenizer does not say so
                return text.encode()
        byte = _BYTE.fullmatch(text) if text.startswith("<0x") else None
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()

    def encode(self, text: str, *, continued: bool) -> list[int] | None:
        """Ids of plain text; nothing in it becomes a special token. ``continued``: other text stands before it.

        None where the tokenizer would write a space that is not there.
        """
        if continued and self.prefixes:
            if not text.startswith(" "):
                return None
            text = text[1:]
        ids: list[int] = self.tokenizer.encode(text, add_special=False).tolist()
        return [i for i in ids if i < self._vocab_size]


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A token's own text, looked up once: with the space before a word, U+FFFD for part of a character, and special
    tokens as they are spelled."""
    code = None if tokenizer.spelling is None else TokenBytes(tokenizer)
    ends = {*tokenizer.special_ids, *tokenizer.eos_ids, tokenizer.bos_id}

    @cache
    def text(token: int) -> str:
        if token in ends:
            return tokenizer.token(token) or ""
        if code is None:
            return tokenizer.decode([token], skip_special=False)
        return code.of(token).decode("utf-8", "replace")

    return text
