"""Lookups and the size policy as vLLM's drafter: its config names this module and, after it, a drafter's spec.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
        "model": "outpace.integrations.vllm.ngram+suffix:history=1"}'

vLLM (0.32 and 0.33) takes the text behind the last dot for a class of this module, and calls its ``propose`` after
every step with the rows of its batch. It says neither which request a row belongs to nor when one ends, and rows change
places, so a row is known by its tokens. It verifies chains alone: of a tree, the likeliest path.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from outpace.common.arrays import I32
from outpace.control.adaptive import Adaptive
from outpace.control.cost import Cost
from outpace.errors import DrafterError, OutpaceError
from outpace.integrations import lookups
from outpace.integrations.lookups import WIDER, Lookups, likeliest

END = 32  # last tokens by which a row is looked for

log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """What vLLM takes for a class: a Proposer of the spec ``name``; ``configured``: of that in additional_config."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(Proposer, None if name == "configured" else name)


@dataclass(slots=True)
class Row(lookups.Row):
    """``gained``: the tokens of the last step; ``draft``: what was proposed for the next one."""

    gained: list[int]
    draft: list[int] = field(default_factory=list)


class Proposer:
    """What vLLM makes with its config, by the drafter's ``spec`` (None: ``--additional-config '{"outpace": SPEC}'``,
    for one with a dot in it). Raises DrafterError, and OutpaceError where vLLM is another than it was written for.
    """

    def __init__(self, spec: str | None, config: Any) -> None:
        try:
            if spec is None:
                spec = str((config.additional_config or {}).get("outpace", ""))
            vocab = int(config.model_config.get_vocab_size())
            self._longest = int(config.model_config.max_model_len)
            most = int(config.speculative_config.num_speculative_tokens)
        except (AttributeError, TypeError) as error:
            raise _other(f"its config differs ({error})") from error
        if not spec:
            raise DrafterError('no drafter is configured: give one in vLLM\'s additional_config, {"outpace": "suffix"}')
        given = lookups.checked(spec, "vLLM")
        if given.size == 0:
            raise DrafterError(f"{spec}: size=0 drafts nothing: leave speculative_config out")
        self._policy = Adaptive(Cost.guess()) if given.size in (None, "auto") else None
        self._most = most if given.size in (None, "auto") else min(most, int(given.size or 0))
        self._lookups = Lookups(given, vocab, self._longest, WIDER * self._most, self._policy)
        self._step = self._lookups.step
        self._live: list[Row] = []
        self._drafted: list[Row] = []  # rows of the step under way, as `_step` has them
        self._drafting, self._ended = 0.0, 0.0
        size = "fixed" if self._policy is None else "sized by the policy"
        log.info("outpace drafts in vLLM: %s, chains of at most %d tokens, %s", given.text, self._most, size)

    def close(self) -> None:
        """Save a history, if it has a file; at the latest when the process ends."""
        self._lookups.close()

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(self, *given: Any, **_: Any) -> list[list[int]]:
        """A chain for each row of vLLM's batch.

        ``given``: the tokens that each row gained (none: its prompt is not read yet), how many tokens int32 [B] it has
        with these, and all of them int32 [B, T]. Raises OutpaceError where vLLM calls it otherwise.
        """
        begun = perf_counter()
        sampled, counts, tokens = _arguments(given)
        rows = self._rows_of(sampled, counts, tokens)
        self._learn(rows, begun)
        self._live = [row for row in rows if row is not None]
        self._lookups.keep(self._live)
        self._draft([row for row in self._live if row.gained])
        self._ended = perf_counter()
        self._drafting = self._ended - begun
        return [[] if row is None else row.draft for row in rows]

    def _rows_of(self, sampled: Sequence[list[int]], counts: I32, tokens: I32) -> list[Row | None]:
        """The row at each place of the batch. It is one that had all but the ``sampled`` tokens, else a new one; None:
        a prompt that is not read yet."""
        known: dict[tuple[int, bytes], list[Row]] = {}
        for row in self._live:
            known.setdefault(_key(row.tokens), []).append(row)
        found: list[Row | None] = []
        for i, gained in enumerate(sampled):
            text = np.array(tokens[i, : counts[i]], np.int32)
            before = text[: len(text) - len(gained)]
            alike = known.get(_key(before), [])
            at = next((n for n, row in enumerate(alike) if np.array_equal(row.tokens, before)), None)
            if at is not None:
                row = alike.pop(at)
                row.tokens, row.gained = text, list(gained)
            elif gained:
                number, native = self._lookups.open(len(before))
                row = Row(number, text, native, list(gained))
            found.append(None if at is None and not gained else row)
        return found

    def _learn(self, rows: Sequence[Row | None], begun: float) -> None:
        """What became of the last drafts, and how long the step took that verified them."""
        gained = {row.number: row.gained for row in rows if row is not None}
        if self._policy is None or not all(gained.get(row.number) for row in self._drafted) or not self._drafted:
            return  # a request has ended or was put off: its draft was not verified
        for i, row in enumerate(self._drafted):
            tokens = gained[row.number]
            good = 0
            while good < min(len(row.draft), len(tokens) - 1) and row.draft[good] == tokens[good]:
                good += 1
            self._step.decide(i, tokens[: good + 1], list(range(good)))
        alone = len(rows) == len(self._drafted)  # no prompt was read beside them, which would take time, too
        self._step.learn(self._drafting, begun - self._ended if alone else 0.0, 0.0)

    def _draft(self, rows: list[Row]) -> None:
        room = {row.number: min(self._most, self._longest - len(row.tokens) - 1) for row in rows}
        for row in self._live:
            row.draft = []
        rows = self._drafted = [row for row in rows if room[row.number] > 0]
        self._lookups.draft([(row, WIDER * room[row.number]) for row in rows])
        for i, row in enumerate(rows):
            tokens, parents, gains, _ = self._step.draft(i)
            path = likeliest(parents, gains)[: room[row.number]]
            if len(path) < len(tokens):
                self._step.keep(i, path)
        self._step.trim()
        for i, row in enumerate(rows):
            row.draft = self._step.draft(i)[0]


def _key(tokens: I32) -> tuple[int, bytes]:
    return len(tokens), tokens[-END:].tobytes()


def _arguments(given: Sequence[Any]) -> tuple[list[list[int]], I32, I32]:
    if len(given) >= 3:
        sampled, counts, tokens = given[:3]
        arrays = isinstance(counts, np.ndarray) and isinstance(tokens, np.ndarray) and tokens.ndim == 2
        if isinstance(sampled, list) and arrays and len(sampled) <= min(len(counts), len(tokens)):
            return sampled, counts, tokens
    raise _other(f"it calls propose with ({', '.join(type(each).__name__ for each in given)})")


def _other(how: str) -> OutpaceError:
    version = getattr(sys.modules.get("vllm"), "__version__", "of an unknown version")
    return OutpaceError(
        f"vLLM {version} has another interface for custom drafters than 0.32 and 0.33: {how}. Install one of these, or "
        'write "method": "ngram" or "suffix" in its speculative_config'
    )
