"""A tokenizer as ``llguidance`` sees it: the bytes of every token, and how forced text is written in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from outpace.models.text.token_bytes import TokenBytes
from outpace.models.text.tokenizer import Tokenizer

MOST_SPELLINGS = 4096  # texts whose tokens are kept
MARK = "\x02"  # text before a text that is continued, which no token joins with what follows


class Vocabulary:
    """``vocab_size``: the model's; ``eos_ids``: what ends an answer. Takes 10 to 30 microseconds a token to make.

    Raises ModelError for a tokenizer whose tokens stand for no bytes of their own.
    """

    def __init__(self, llguidance: Any, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._code = tokenizer, TokenBytes(tokenizer, vocab_size)
        texts = [self._code.of(token) for token in range(vocab_size)]
        special = [token for token in range(min(vocab_size, tokenizer.vocab_size)) if not texts[token]]
        for token in special:  # named, so that a grammar may ask for one
            texts[token] = (tokenizer.token(token) or "").encode()
        wrapper = _Wrapper(texts, special, eos_ids[0], self._encoded)
        self.native = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(eos_ids))
        self.spell = lru_cache(MOST_SPELLINGS)(self._spelled)
        prefix = tokenizer.encode(MARK, add_special=False).tolist()
        self._mark: list[int] = prefix

    def special(self, text: str) -> int | None:
        """The special token that ``text`` is the name of, if it is one."""
        ids = self._tokenizer.encode(text, add_special=False, parse_special=True).tolist()
        return ids[0] if len(ids) == 1 and not self._code.of(ids[0]) else None

    def _encoded(self, text: str | bytes) -> list[int]:
        """Tokens of text that follows other text."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        ids: list[int] = self._tokenizer.encode(MARK + text, add_special=False).tolist()
        n = len(self._mark)
        return ids[n:] if ids[:n] == self._mark else []

    def _spelled(self, text: bytes) -> tuple[int, ...]:
        """Tokens of the longest beginning of ``text`` that is whole characters; none where its spelling is another."""
        try:
            whole = text.decode()
        except UnicodeDecodeError as error:
            whole = text[: error.start].decode()
        ids = self._encoded(whole) if whole else []
        return tuple(ids) if self._code.join(ids) == whole.encode() else ()


class _Wrapper:
    """What ``llguidance.LLTokenizer`` reads of a tokenizer that is not its own."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int, encoded: Any) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._encoded = encoded

    def __call__(self, text: str | bytes) -> list[int]:
        found: list[int] = self._encoded(text)
        return found
