"""A model as the server knows it: its engine, its words, and how many samples may be in the house for it."""

from __future__ import annotations

import math
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
from outpace.server.errors import BUSY, APIError
from outpace.server.sources import Colours


class Served:
    """``queue``: samples that may wait beyond those that run."""

    def __init__(self, name: str, serving: AsyncEngine, *, queue: int, fingerprint: str) -> None:
        engine = serving.engine
        if engine.tokenizer is None:
            raise ModelError(f"{name} has no tokenizer, which a server needs: add its tokenizer.json")
        self.name, self.serving, self.fingerprint = name, serving, fingerprint
        self.tokenizer: Tokenizer = engine.tokenizer
        self.info: ModelInfo = engine.model.info
        self.created = int(time.time())
        self.admission = Admission(engine.options.max_rows, queue)

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


class Admission:
    """Counts samples in the house: those that run, and so many that wait."""

    def __init__(self, rows: int, queue: int) -> None:
        self.rows, self.capacity = rows, rows + queue
        self.inside = 0
        self._seconds = 1.0  # that a sample runs, on average

    def take(self, samples: int, inside: int = 0) -> None:
        """Let ``samples`` in, of a request of which ``inside`` are already. Raises APIError: 429, or 400 for one that
        would never fit."""
        if samples + inside > self.capacity:
            raise APIError(
                400, f"{samples + inside} samples are more than this server queues ({self.capacity}): ask for fewer",
                param="n",
            )  # fmt: skip
        if self.inside + samples > self.capacity:
            raise APIError(
                429, f"the queue is full ({self.inside} samples): try again later", code="queue_full", kind=BUSY,
                headers={"retry-after": str(self.patience())},
            )  # fmt: skip
        self.inside += samples

    def give(self, samples: int) -> None:
        """They have left."""
        self.inside -= samples

    def took(self, seconds: float) -> None:
        """A sample ran for so long."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def patience(self) -> int:
        """Seconds until there may be room."""
        waiting = max(self.inside - self.rows, 1)
        return min(max(math.ceil(self._seconds * waiting / self.rows), 1), 60)
