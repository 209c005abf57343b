"""Which rows run now: admission, prefill chunks beside decoding rows, and what gives way when memory runs out.

Memory is taken as rows grow, never reserved. When it is short, kept prefixes go first, then drafts of this step, then
the youngest row: it waits again, and its tokens are computed anew later, the very same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.common.arrays import I32, common_prefix
from outpace.engine.drafting import Drafting
from outpace.engine.pace import Pace, shares
from outpace.engine.prefix import PIECE, PrefixCache
from outpace.engine.sequence import Sequence
from outpace.engine.turns import Place, Turns
from outpace.errors import MemoryLimitError
from outpace.models.base import KVCache

ATTEMPTS = 3  # at giving a sequence its row, after which it fails
AHEAD = 16  # steps for which memory is looked at together, where there is plenty


@dataclass(frozen=True, slots=True)
class Chunk:
    """Committed tokens ``start .. start + count - 1`` of a sequence, whose KV is written in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def tokens(self) -> I32:
        return self.sequence.tokens[self.start : self.start + self.count]

    @property
    def wanted(self) -> bool:
        """Whether the logits after these tokens are needed: for the prompt's own log-probabilities."""
        params, sequence = self.sequence.request.params, self.sequence
        return params.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.prompt_length


@dataclass(slots=True)  # frozen, it would take four times as long to make
class Plan:
    """A step's rows. ``failed``: sequences that cannot run, with the reason."""

    decoding: list[Sequence]
    chunks: list[Chunk]
    failed: list[tuple[Sequence, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.decoding) + len(self.chunks)


class Scheduler:
    """Owners take turns; each is served by priority, then first come, first served. ``memory``: bound in bytes over
    target and drafters."""

    def __init__(
        self, kv: KVCache, drafting: Drafting, *, max_rows: int, pace: Pace, memory: int | None, prefix_rows: int
    ) -> None:
        self._kv, self._drafting = kv, drafting
        self._max_rows, self.pace, self._memory = max_rows, pace, memory
        self.prefixes = PrefixCache(prefix_rows)
        self._waiting: list[tuple[Place, Sequence]] = []  # ascending
        self._turns = Turns()
        self.running: list[Sequence] = []  # the oldest first
        self.preemptions = 0
        self._top = 0  # rows that there ever were, at once
        self._sure, self._sure_of = 0, list[Sequence]()  # steps for which there is memory, if these rows decode

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting

    @property
    def sequences(self) -> list[Sequence]:
        """Those that run or wait."""
        return [*self.running, *(s for _, s in self._waiting)]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._queue(sequence, self._turns.join(sequence))

    def most_positions(self) -> int | None:
        """The most positions that a row could ever have in the memory there is (None: no bound)."""
        if self._memory is None:
            return None
        return self._memory // self._kv.bytes_for(self._kv.block) * self._kv.block

    # -- a step ------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Admit what fits, then pick this step's rows: all that decode, and prefill chunks up to the budget."""
        failed: list[tuple[Sequence, str]] = []
        for sequence in self.running:
            sequence.paused = False
        if self._waiting and self.running and (found := self._turns.way(self.running)) is not None:
            first, victim = found
            if len(self.running) == self._max_rows or not self._has_room(first, -1, 0):
                self.preempt(victim, for_another=True)
                self._waiting.sort(key=lambda entry: entry[1] is not first)  # the others stay in order
        held = set[str]()  # owners whose next one waits for what another row computes
        for sequence in [s for _, s in self._waiting]:
            if len(self.running) == self._max_rows:
                break
            if sequence.request.owner in held:
                continue
            if self._memory is not None and self._kv.bytes_for(sequence.length + 1) > self._memory:
                failed.append((sequence, self._full(sequence.length + 1)))
            else:
                try:
                    donor, shared, wait = self._donor(sequence)
                    if wait:
                        held.add(sequence.request.owner)
                    elif not self._admit(sequence, donor, shared):
                        break
                    continue
                except Exception as error:
                    sequence.attempts += 1
                    if sequence.attempts < ATTEMPTS or (isinstance(error, MemoryLimitError) and self.running):
                        break  # it waits: what runs gives memory back, and what failed once may not fail again
                    failed.append((sequence, f"it could not begin: {error or type(error).__name__}"))
            self._remove(sequence)
        while True:
            plan = self._rows(failed)
            if self._fits(plan):
                return plan

    def _rows(self, failed: list[tuple[Sequence, str]]) -> Plan:
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.decoding else filling).append(sequence)
        if not filling:
            return Plan(decoding, [], failed)
        owners, budget = len({s.request.owner for s in self.running}), self.pace.budget(bool(decoding))
        counts = shares([(s.request.owner, s.length - 1 - s.cached) for s in filling], owners, budget)
        chunks = [Chunk(s, s.cached, count) for s, count in zip(filling, counts, strict=True) if count]
        return Plan(decoding, chunks, failed)

    def _fits(self, plan: Plan) -> bool:
        """Whether memory suffices for a step's rows; if not, something gave way, or the last row failed."""
        if self._memory is None:
            return True
        if not self._sure or plan.decoding != self._sure_of or plan.chunks:
            ahead = 1 if plan.chunks else AHEAD
            fits = self._most_growth(plan, ahead) <= self._memory
            self._sure, self._sure_of = ahead if fits else 0, plan.decoding
        if self._sure:
            self._sure -= 1
            return True
        while (need := self._growth(plan)) > self._memory:
            if not self._evict(need - self._memory):
                break
        if need <= self._memory:
            return True
        drafting = [s for s in plan.decoding if s.size and not s.paused]
        if drafting:
            for sequence in drafting:
                sequence.paused = True  # plain decoding for this step
            return False
        if len(self.running) > 1:
            self.preempt(self.youngest)
            return False
        only = self.running[0]
        if self._drafting.bytes and only.size:
            self._drafting.give_up(
                only, "there is no kv_memory for its drafter too, so it was decoded plainly from there on"
            )
            return False
        plan.failed.append((only, self._full(only.length + 1)))
        self._leave(only)
        return False

    def _most_growth(self, plan: Plan, steps: int) -> float:
        """An upper bound of ``_growth`` after so many steps of these rows, which costs next to nothing."""
        block = self._kv.block
        blocks = sum(steps * (1 + sequence.size) // block + 2 for sequence in plan.decoding)
        blocks += sum(chunk.count // block + 2 for chunk in plan.chunks)
        drafting = self._drafting.bytes + self._drafting.most_growth(plan.decoding, steps)
        return self._kv.bytes + self._kv.bytes_for(blocks * block) + drafting

    def _growth(self, plan: Plan) -> int:
        """Bytes in use once the plan's rows have grown."""
        total = self._kv.bytes + self._drafting.bytes
        for sequence in plan.decoding:
            total += self._kv.growth(sequence.row, _width(sequence))
            if not sequence.paused:
                total += self._drafting.growth(sequence, sequence.length + sequence.size)
        return total + sum(self._kv.growth(chunk.sequence.row, chunk.count) for chunk in plan.chunks)

    # -- rows come and go --------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence, donor: tuple[int, Sequence | None], shared: int) -> bool:
        """Give a sequence its row if there is room; its first ``shared`` positions are those of the donor."""
        if not self._has_room(sequence, donor[0], shared):
            if self.running:
                return False
            donor, shared = (-1, None), 0  # alone, it fits: what is kept makes way
            self.close()
        shared, common = self._known(sequence, *donor, shared)
        row = self._kv.alloc()
        self._top = max(self._top, row + 1)
        try:
            if shared:
                self._share(row, donor[0], shared, sequence)
        except BaseException:
            self._kv.free(row)
            sequence.cached = 0
            raise
        if sequence.cached and donor[1] is not None and donor[1].request is sequence.request:
            sequence.prompt_logprobs = list(donor[1].prompt_logprobs)
        sequence.row = row
        self._remove(sequence)
        self.running.append(sequence)
        self._turns.begin(sequence)
        sequence.begin()
        if sequence.cached:
            self._drafting.fork(*donor, sequence, common)
            if donor[1] is None:
                self.prefixes.used(donor[0])
        return True

    def _known(self, sequence: Sequence, donor: int, source: Sequence | None, shared: int) -> tuple[int, int]:
        """How many positions to share, and of how many tokens a drafter may know from the donor."""
        if not shared or not self._drafting.reads_from(donor, source, sequence):
            return shared, shared
        tokens = self.prefixes.tokens(donor) if source is None else source.tokens
        common = common_prefix(sequence.tokens, tokens)
        if (
            common == shared and 1 < shared < sequence.length - 1
        ):  # the last one again, with the token that follows here
            return shared - 1, shared
        return shared, min(common, shared + 1)

    def _share(self, row: int, donor: int, shared: int, sequence: Sequence) -> None:
        """Fork the first ``shared`` positions; where that fails, the row begins empty."""
        try:
            self._kv.fork(donor, row, shared)
        except MemoryLimitError:
            raise
        except Exception:
            self._drafting.faults.append("a prefix could not be shared: it is computed again")
            if self._kv.length(row):
                self._kv.truncate(row, 0)
            return
        sequence.cached = shared
        sequence.stats.reused_tokens += shared

    def _donor(self, sequence: Sequence) -> tuple[tuple[int, Sequence | None], int, bool]:
        """The row that shares the longest beginning (and the sequence that runs in it), how many positions, and whether
        to wait because a row that is being prefilled will soon share more."""
        begin = sequence.tokens[: sequence.length - 1]
        shares = sequence.request.reuse_prefix and sequence.request.params.prompt_logprobs is None
        scope = sequence.request.cache_scope
        best: tuple[tuple[int, Sequence | None], int] = ((-1, None), 0)
        soon = 0
        for other in self.running:
            sibling = other.request is sequence.request
            if not sibling and not (shares and other.request.reuse_prefix and other.request.cache_scope == scope):
                continue
            common, least = common_prefix(begin, other.tokens[: other.length - 1]), 1 if sibling else PIECE
            if (ready := min(common, other.cached)) > best[1] and ready >= least:
                best = (other.row, other), ready
            if not other.decoding and common >= least:
                soon = max(soon, common)
        if shares and self.prefixes.most:
            row, shared = self.prefixes.find(begin, scope)
            if shared > best[1]:
                best = (row, None), shared
        return best[0], best[1], soon > best[1]

    def _has_room(self, sequence: Sequence, donor: int, shared: int) -> bool:
        """Whether all of its tokens fit beside what runs; kept prefixes go only if that makes the room."""
        if self._memory is None:
            return True
        block = self._kv.bytes_for(self._kv.block)
        whole = self._kv.bytes_for(sequence.length + 1)
        need = whole - shared // self._kv.block * block + block * len(self.running)
        need += self._kv.bytes + self._drafting.bytes - self._memory
        if need <= 0:
            return True
        others = [row for row in self.prefixes.rows if row != donor]
        if self._kv.exclusive(others) >= need:
            while need > 0 and (freed := self._evict(need, spare=donor)):
                need -= freed
        return need <= 0

    def _evict(self, need: int, spare: int = -1) -> int:
        """Free the least recently used kept row that frees anything; how many bytes that gave."""
        for row in self.prefixes.rows:
            if row == spare:
                continue
            before = self._kv.bytes + self._drafting.bytes
            self._forget(row)
            if (freed := before - self._kv.bytes - self._drafting.bytes) > 0:
                return freed
        return 0

    def _forget(self, row: int) -> None:
        """A kept row is gone."""
        self.prefixes.forget(row)
        try:
            self._drafting.forget(row)
        finally:
            self._kv.free(row)

    def make_room(self) -> bool:
        """Free every kept prefix; whether that freed anything."""
        before = self._kv.bytes + self._drafting.bytes
        self.close()
        return self._kv.bytes + self._drafting.bytes < before

    def preempt(self, sequence: Sequence, *, for_another: bool = False) -> None:
        """Take a running sequence's row away; it waits again. ``for_another``: owner; its KV is kept as a prefix."""
        try:
            self._leave(sequence, keep=for_another)
        finally:
            self._begin_again(sequence)
            sequence.stats.preemptions += 1
            self.preemptions += 1
            self._queue(sequence, (self._turns.join if for_another else self._turns.come_back)(sequence))

    @staticmethod
    def _begin_again(sequence: Sequence) -> None:
        sequence.cached = 0
        if len(sequence.prompt_logprobs) < sequence.prompt_length:
            sequence.prompt_logprobs = []  # the prompt is gone through again

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended: its row is kept for the prefix cache, or freed. Does nothing for one that has left."""
        self._remove(sequence)
        self._turns.leave(sequence)
        if sequence.row >= 0:
            self._leave(sequence, keep=True)

    def roll_back(self) -> None:
        """Cut what a step wrote behind the committed tokens; preempt a row that cannot be cut."""
        for sequence in list(self.running):
            try:
                if self._kv.length(sequence.row) != sequence.cached:
                    self._kv.truncate(sequence.row, sequence.cached)
            except Exception:
                self.preempt(sequence)

    def mend(self, living: list[Sequence]) -> None:
        """After an interruption anywhere: make rows fit ``living``, all that have not left. Who lost its row waits."""
        held, rows = {id(s) for s in living}, set(self._kv.rows)
        self.running = [s for s in self.running if id(s) in held and s.row in rows]
        runs = {id(s) for s in self.running}
        waiting = [s for s in living if id(s) not in runs]
        for sequence in waiting:
            sequence.row, sequence.native = -1, None
            self._begin_again(sequence)
        if self.prefixes.fault(rows - {s.row for s in self.running}) is not None:
            self.prefixes = PrefixCache(self.prefixes.most)
        alive = {*(s.row for s in self.running), *self.prefixes.rows}
        self._drafting.mend(set(range(self._top)) - alive, self.prefixes.rows)
        for row in rows - alive:
            self._kv.free(row)
        if self._turns.fault(self.running, waiting) is not None:
            self._turns = Turns()
            for sequence in living:
                self._turns.join(sequence)
            for sequence in self.running:
                self._turns.begin(sequence)
        self._waiting = sorted(((self._turns.of(s), s) for s in waiting), key=lambda entry: entry[0])
        self._sure = 0
        self.roll_back()

    def close(self) -> None:
        """Give back what is kept."""
        for row in self.prefixes.rows:
            self._forget(row)

    def check(self) -> None:
        """Assert that memory is accounted for and that no row leaks."""
        owned = sorted([*(s.row for s in self.running), *self.prefixes.rows])
        assert owned == self._kv.rows, f"rows {self._kv.rows} are allocated, but {owned} are owned"
        assert len(self.running) <= self._max_rows
        assert self._memory is None or self._kv.bytes <= self._memory, "more KV memory is in use than there is"
        assert (
            fault := self._turns.fault(self.running, [s for _, s in self._waiting])
            or self.prefixes.fault(set(self._kv.rows))
        ) is None, fault
        self._kv.check()
        self._drafting.check([s.row for s in self.running])

    def _leave(self, sequence: Sequence, keep: bool = False) -> None:
        """The sequence gives up its row; whatever interrupts this, the row is not lost."""
        row = sequence.row
        shares = sequence.request.reuse_prefix and sequence.error is None and self.prefixes.most > 0
        keep = keep and shares and self._kv.length(row) >= PIECE
        try:
            self._drafting.release(sequence, kept=keep)
        finally:
            self.running.remove(sequence)
            sequence.row, sequence.native = -1, None
            if keep:
                self.prefixes.keep(row, sequence.tokens[: self._kv.length(row)], sequence.request.cache_scope)
                if len(self.prefixes) > self.prefixes.most:
                    self._forget(self.prefixes.rows[0])
            else:
                self._kv.free(row)

    def _remove(self, sequence: Sequence) -> None:
        self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]

    def _queue(self, sequence: Sequence, moved: bool) -> None:
        """Put a sequence among those that wait. ``moved``: others' places have changed for it."""
        self._waiting.append((self._turns.of(sequence), sequence))
        if moved:
            self._waiting = [(self._turns.of(other), other) for _, other in self._waiting]
        self._waiting.sort(key=lambda entry: entry[0])

    @property
    def youngest(self) -> Sequence:
        """The running sequence that gives way first."""
        return self._turns.youngest(self.running)

    def _full(self, positions: int) -> str:
        need = f"{positions} positions need {self._kv.bytes_for(positions):,} bytes of KV"
        return f"{need}, but kv_memory is {self._memory:,}: raise kv_memory, or lower max_tokens or the prompt"


def _width(sequence: Sequence) -> int:
    """New tokens of a decoding row in this step, at most."""
    return 1 + (0 if sequence.paused else min(sequence.size, max(sequence.room - 1, 0)))
