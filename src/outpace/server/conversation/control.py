"""Control tokens that clients' texts spell stay text: only a template writes the model's own.

A conversation's texts are marked before they are rendered: within each spelling of a control token stands a character
that no text has. What the template writes is then what is spelled without one, and becomes tokens; the rest is encoded
as plain text, piece by piece between them. Texts that spell none are encoded with their surroundings, as ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outpace.common.arrays import I32
from outpace.models.text.tokenizer import Tokenizer

MARK = "\ufdd0"  # a noncharacter (Unicode 23.7): not for interchange


class ControlTokens:
    """Of one tokenizer. ``allowed``: clients may spell them."""

    def __init__(self, tokenizer: Tokenizer, *, allowed: bool) -> None:
        self._tokenizer, self._allowed = tokenizer, allowed
        spelled = {tokenizer.token(token) or "" for token in tokenizer.special_ids}
        longest_first = sorted((text for text in spelled if len(text) > 1), key=len, reverse=True)
        self._spelled = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def marked(self, value: Any) -> Any:
        """``value``, of JSON's types, with marks in its texts."""
        if self._allowed:
            return value
        if isinstance(value, str):
            return self._spelled.sub(lambda found: f"{found[0][0]}{MARK}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self.marked(name): self.marked(inner) for name, inner in value.items()}
        return [self.marked(inner) for inner in value] if isinstance(value, Sequence) else value

    def encode(self, prompt: str) -> I32:
        """Token ids int32 [n] of a rendered conversation."""
        if MARK not in prompt:
            return self._tokenizer.encode(prompt, add_special=False, parse_special=True)
        ids = [
            self._tokenizer.encode(unmarked(piece), add_special=False, parse_special=bool(i % 2))
            for i, piece in enumerate(self._spelled.split(prompt))
            if piece
        ]
        return np.concatenate(ids)


def unmarked(text: str) -> str:
    """``text`` as it is read."""
    return text.replace(MARK, "")
