"""Which rows run now: admission under the memory bound, and prefill chunks beside decoding rows."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.arrays import I32, common_prefix
from outpace.engine.sequence import Sequence
from outpace.errors import MemoryLimitError

if TYPE_CHECKING:
    from outpace.drafters.base import Drafter
    from outpace.models.base import KVCache

MIN_SHARED = 16  # a shorter common prefix is not worth a copy


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens ``start .. start + count - 1`` of a sequence, to be prefilled in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def tokens(self) -> I32:
        return self.sequence.tokens[self.start : self.start + self.count]


@dataclass(frozen=True, slots=True)
class Plan:
    decoding: list[Sequence]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A finished row whose KV stays for requests that begin alike (the prefix cache)."""

    tokens: I32  # those whose KV is there
    reserved: int


class Scheduler:
    """First come, first served. A row's memory is reserved whole at admission, so a running row never waits."""

    def __init__(
        self,
        kv: KVCache,
        drafter: Drafter,
        *,
        max_rows: int,
        prefill_chunk: int,
        kv_memory: int | None,
        prefix_rows: int,
    ) -> None:
        self._kv, self._drafter = kv, drafter
        self._max_rows, self._prefill_chunk = max_rows, prefill_chunk
        self._kv_memory, self._prefix_rows = kv_memory, prefix_rows
        self._waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by row, least recently used first

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting

    @property
    def requests(self) -> list[int]:
        """Those that run or wait."""
        return list(dict.fromkeys(s.request for s in [*self.running, *self._waiting]))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def reserved(self) -> int:
        """KV bytes promised to rows, target and drafter together."""
        return sum(s.reserved for s in self.running) + sum(kept.reserved for kept in self._kept.values())

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises MemoryLimitError when it could never run."""
        capacity = self._capacity(sequence)
        sequence.reserved = self._kv.bytes_for(capacity)
        if sequence.size:
            sequence.reserved += self._drafter.bytes_for(capacity)
        if self._kv_memory is not None and sequence.reserved > self._kv_memory:
            raise MemoryLimitError(
                f"{capacity} positions need {sequence.reserved:,} bytes of KV, but kv_memory is {self._kv_memory:,}: "
                "raise kv_memory, or lower max_tokens or the prompt"
            )
        self._waiting.append(sequence)

    def plan(self) -> Plan:
        """Admit what fits, then pick this step's rows: all that decode, and prefill chunks up to the budget."""
        while self._waiting and self._admit(self._waiting[0]):
            self.running.append(self._waiting.popleft())
        decoding = [s for s in self.running if s.decoding]
        budget = self._prefill_chunk
        chunks = []
        for sequence in self.running:
            if budget and not sequence.decoding:
                count = min(budget, sequence.prompt_length - 1 - sequence.prefilled)
                chunks.append(Chunk(sequence, sequence.prefilled, count))
                budget -= count
        return Plan(decoding, chunks)

    def cancel(self, request: int) -> list[Sequence]:
        """Take a request's samples out of the queue and find those that run; both are returned."""
        queued = [s for s in self._waiting if s.request == request]
        self._waiting = deque(s for s in self._waiting if s.request != request)
        return queued + [s for s in self.running if s.request == request]

    def release(self, sequence: Sequence) -> None:
        """A running sequence has ended: keep its row for the prefix cache, or free it."""
        if sequence.row < 0:
            return
        self.running.remove(sequence)
        row, sequence.row = sequence.row, -1
        n = self._kv.length(row)
        if self._prefix_rows and n >= MIN_SHARED and sequence.error is None:
            self._kept[row] = _Kept(sequence.tokens[:n].copy(), sequence.reserved)
            if len(self._kept) > self._prefix_rows:
                self._evict()
        else:
            self._free(row)

    def roll_back(self) -> None:
        """A step failed halfway: cut what it wrote behind the committed tokens."""
        for sequence in self.running:
            n = sequence.length - 1 if sequence.decoding else sequence.prefilled
            self._kv.truncate(sequence.row, min(n, self._kv.length(sequence.row)))

    def close(self) -> None:
        while self._kept:
            self._evict()

    def check(self) -> None:
        """Assert that memory is accounted for and that no row leaks."""
        owned = sorted([*(s.row for s in self.running), *self._kept])
        assert owned == self._kv.rows, f"rows {self._kv.rows} are allocated, but {owned} are owned"
        assert len(self.running) <= self._max_rows
        assert self._kv_memory is None or self.reserved <= self._kv_memory, "more KV memory is promised than there is"
        assert self._kv.bytes + self._drafter.bytes <= self.reserved, "more KV memory is in use than was reserved"
        self._kv.check()
        self._drafter.check(owned)

    def _admit(self, sequence: Sequence) -> bool:
        if len(self.running) >= self._max_rows:
            return False
        siblings = [s for s in self.running if s.request == sequence.request]
        if siblings and not siblings[0].decoding:
            return False  # its prompt is being prefilled: wait for it and share
        donor, shared = self._donor(sequence, siblings)
        while self._kv_memory is not None and self.reserved + sequence.reserved > self._kv_memory:
            if not self._kept:
                return False
            if next(iter(self._kept)) == donor:
                donor, shared = -1, 0
            self._evict()
        sequence.row = self._kv.alloc(self._capacity(sequence))
        sequence.stats.kv_bytes = sequence.reserved
        if sequence.size:
            try:
                self._drafter.admit(sequence.row, self._capacity(sequence))
            except BaseException:
                self._kv.free(sequence.row)
                sequence.row = -1
                raise
        if shared:
            self._kv.fork(donor, sequence.row, shared)
            if sequence.size:
                self._drafter.fork(donor, sequence.row, shared)
            sequence.prefilled = sequence.stats.reused_tokens = shared
            if donor in self._kept:
                self._kept.move_to_end(donor)
        return True

    def _donor(self, sequence: Sequence, siblings: list[Sequence]) -> tuple[int, int]:
        """The row that shares the longest prefix with the sequence's prompt, and how many positions."""
        donors = [(s.row, s.tokens[: self._kv.length(s.row)]) for s in siblings]
        donors += [(row, kept.tokens) for row, kept in self._kept.items()]
        best, shared = -1, MIN_SHARED - 1
        for row, tokens in donors:
            n = common_prefix(sequence.tokens[:-1], tokens)
            if n > shared:
                best, shared = row, n
        return (best, shared) if best >= 0 else (-1, 0)

    def _capacity(self, sequence: Sequence) -> int:
        return sequence.limit + sequence.size  # a tree's nodes may reach beyond the limit before it is settled

    def _evict(self) -> None:
        row, _ = self._kept.popitem(last=False)
        self._free(row)

    def _free(self, row: int) -> None:
        self._drafter.release(row)
        self._kv.free(row)
