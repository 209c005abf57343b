"""A model that says what a script has for a prompt, with the demo's tokenizer and template: real agents talk to it
through the real server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outpace import Engine
from outpace.common.arrays import I32
from outpace.common.fair_lock import FairLock
from outpace.models.base import Batch, HostOutput, KVCache, Model, ModelInfo
from outpace.models.demo import smollm2
from outpace.models.weights.gguf import GGUFFile
from outpace.text.tokenizer import Tokenizer

Script = Callable[[str], str]  # the answer to a prompt


class Texts:
    """A row's token ids stand for its keys and values."""

    settle = KVCache.settle
    block, limit, recurrent, windowed = 1, None, False, False

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def alloc(self) -> int:
        row = next(i for i in range(len(self.texts) + 1) if i not in self.texts)
        self.texts[row] = []
        return row

    def free(self, row: int) -> None:
        del self.texts[row]

    def length(self, row: int) -> int:
        return len(self.texts[row])

    def reachable(self, row: int, n: int) -> int:
        return min(n, self.length(row))

    def truncate(self, row: int, n: int) -> None:
        del self.texts[row][n:]

    def compact(self, row: int, start: int, keep: I32) -> None:
        text = self.texts[row]
        text[start:] = [text[start + i] for i in keep.tolist()]

    def fork(self, src: int, dst: int, n: int) -> None:
        self.texts[dst] = self.texts[src][:n]

    def growth(self, row: int, n: int) -> int:
        return n

    def bytes_for(self, positions: int) -> int:
        return positions

    def exclusive(self, rows: Sequence[int]) -> int:
        return sum(map(self.length, rows))

    @property
    def bytes(self) -> int:
        return self.exclusive(self.rows)

    @property
    def rows(self) -> list[int]:
        return sorted(self.texts)

    def check(self) -> None:
        """Nothing can be wrong."""


class ScriptedModel(Model):
    """Plain decoding alone: a row's tokens follow one another."""

    def __init__(self, tokenizer: Tokenizer, script: Script, max_length: int) -> None:
        self.kv: Any = Texts()
        self.lock = FairLock()
        self._tokenizer, self._script = tokenizer, script
        self._turn = tokenizer.encode("<|im_start|>assistant\n", add_special=False, parse_special=True).tolist()
        (self._end,) = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True).tolist()
        vocab = tokenizer.vocab_size
        self.info = ModelInfo("scripted", "toy", vocab, 1, 1, max_length, (self._end,), "float32", "cpu", 0, 1)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def _next(self, text: list[int]) -> int:
        """The token after ``text``, which ends within an answer or right before it."""
        turn, n = self._turn, len(self._turn)
        begun = next((i for i in range(len(text), n - 1, -1) if text[i - n : i] == turn), len(text))
        prompt = tuple(text[:begun])
        if prompt not in self._answers:
            answer = self._script(self._tokenizer.decode(list(prompt), skip_special=False))
            self._answers[prompt] = [*self._tokenizer.encode(answer, add_special=False).tolist(), self._end]
        return self._answers[prompt][min(len(text) - begun, len(self._answers[prompt]) - 1)]

    def forward(self, batch: Batch) -> HostOutput:
        logits = np.zeros((len(batch.wanted), self.info.vocab_size), np.float32)
        wanted = {at: i for i, at in enumerate(batch.wanted.tolist())}
        for b in range(len(batch.starts) - 1):
            text = self.kv.texts[int(batch.row[batch.starts[b]])]
            for i in range(batch.starts[b], batch.starts[b + 1]):
                text.append(int(batch.token[i]))
                if i in wanted:
                    logits[wanted[i], self._next(text)] = 100
        return HostOutput(batch.wanted, logits)

    def close(self) -> None:
        """Nothing is held."""


def scripted(script: Script, max_length: int = 65536) -> Engine:
    """An engine that answers as ``script`` has it."""
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(smollm2()))
    return Engine(ScriptedModel(tokenizer, script, max_length), tokenizer, prefill_chunk=8192)
