"""A model as the server knows it: its engine, its words, and who may be in the house for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from outpace.arrays import I32
from outpace.engine.aio import AsyncEngine
from outpace.engine.grammar import Grammars
from outpace.engine.text import TextReader
from outpace.errors import ModelError
from outpace.models.base import ModelInfo
from outpace.models.text.token_bytes import TokenBytes, token_texts
from outpace.models.text.tokenizer import Tokenizer
from outpace.server.admission import Admission
from outpace.server.errors import APIError
from outpace.server.sources import Colours


class Served:
    """``queue``: samples that may wait beyond those that run; ``shared``: there are several API keys."""

    def __init__(self, name: str, serving: AsyncEngine, *, queue: int, shared: bool, fingerprint: str) -> None:
        engine = serving.engine
        if engine.tokenizer is None:
            raise ModelError(f"{name} has no tokenizer, which a server needs: add its tokenizer.json")
        self.name, self.serving, self.fingerprint = name, serving, fingerprint
        self.tokenizer: Tokenizer = engine.tokenizer
        self.info: ModelInfo = engine.model.info
        self.created = int(time.time())
        self.admission = Admission(engine.options.max_rows, queue, shared=shared)

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars for this model's tokens, made when the first is asked for."""
        return Grammars(self.tokenizer, self.info.vocab_size, self.info.eos_ids)

    def ids(self, given: Sequence[int], param: str) -> I32:
        """Token ids int32 [n]. Raises APIError for one that the model does not have."""
        for its in given:
            if not 0 <= its < self.info.vocab_size:
                most = self.info.vocab_size - 1
                raise APIError(400, f"{param} has token id {its}, but this model's go from 0 to {most}", param=param)
        return np.array(given, np.int32)

    def colours(self, skip_special: bool) -> Colours:
        """Who writes what, of one choice."""
        return Colours(TextReader(self.tokenizer, skip_special=skip_special))

    @cached_property
    def text_of(self) -> Callable[[int], str]:
        """A token's own text."""
        return token_texts(self.tokenizer)

    @cached_property
    def bytes_of(self) -> Callable[[int], list[int] | None]:
        """A token's bytes as JSON has them; None where the tokenizer's tokens have none of their own."""
        if self.tokenizer.spelling is None:
            return lambda token: None
        code = TokenBytes(self.tokenizer)
        return lambda token: list(code.of(token))
