"""Control tokens that clients' texts spell stay text: only a template writes the model's own.

A conversation's texts are marked before they are rendered: within each spelling of a control token stands a character
that no text has. What the template writes is then what is spelled without one, and becomes tokens. To be encoded, a
prompt is marked the other way round and stays whole: tokens, and the start of a text, bear on the spaces beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from outpace.common.arrays import I32
from outpace.text.tokenizer import Tokenizer

MARK = "\ufdd0"  # a noncharacter (Unicode 23.7): not for interchange


class ControlTokens:
    """Of one tokenizer. ``allowed``: clients may spell them."""

    def __init__(self, tokenizer: Tokenizer, *, allowed: bool) -> None:
        self._tokenizer, self._allowed = tokenizer, allowed
        self._ids = {tokenizer.token(token) or "": token for token in tokenizer.special_ids}
        longest_first = sorted((text for text in self._ids if len(text) > 1), key=len, reverse=True)
        self._spelled = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def marked(self, value: Any) -> Any:
        """``value``, of JSON's types, with marks in its texts."""
        if self._allowed:
            return value
        if isinstance(value, str):
            return self._spelled.sub(lambda found: _marked(found[0]), value)
        if isinstance(value, Mapping):
            return {self.marked(name): self.marked(inner) for name, inner in value.items()}
        return [self.marked(inner) for inner in value] if isinstance(value, Sequence) else value

    def encode(self, prompt: str) -> I32:
        """Token ids int32 [n] of a rendered conversation."""
        if MARK not in prompt:
            return self._tokenizer.encode(prompt, add_special=False, parse_special=True)
        pieces = self._spelled.split(prompt)
        return self._encode_marked("".join((_marked if i % 2 else unmarked)(piece) for i, piece in enumerate(pieces)))

    def spelled_in(self, text: str) -> list[int]:
        """The control tokens whose spelling ``text`` has."""
        return sorted({self._ids[found] for found in self._spelled.findall(text)})

    @cached_property
    def _encode_marked(self) -> Callable[[str], I32]:
        return self._tokenizer.respelled(_marked)


def _marked(token: str) -> str:
    return f"{token[:1]}{MARK}{token[1:]}"


def unmarked(text: str) -> str:
    """``text`` as it is read."""
    return text.replace(MARK, "")
