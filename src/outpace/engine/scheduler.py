"""Which rows run now: admission, prefill chunks beside decoding rows, and what gives way when memory runs out.

Memory is taken as rows grow, never reserved. When it is short, kept prefixes go first, then drafts of this step, then
the youngest row: it waits again, and its tokens are computed anew later, the very same ones.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outpace.common.arrays import I32, common_prefix
from outpace.engine.drafting import Drafting
from outpace.engine.kv_store import KVStore, Reading
from outpace.engine.prefixes import PIECE, PrefixCache
from outpace.engine.sequence import Sequence
from outpace.errors import MemoryLimitError
from outpace.models.base import KVCache

LEAST = 4  # prompt tokens a step, beside rows that decode
_AIM = 0.8  # of the seconds that it may: chunks take more now and then, and go by tiles of tokens
_WEIGHT = 0.2  # of the newest measurement, where it says that things go faster than thought


class Pace:
    """How many prompt tokens a step may take beside rows that decode.

    ``most``: tokens a step; ``seconds``: that a prefill may add to a step in which rows decode (None: any).

    What a token costs is measured: what steps with chunks take beyond those without, over their tokens. A cost that
    rises is believed at once, one that falls slowly.
    """

    def __init__(self, most: int, seconds: float | None) -> None:
        self._most, self._seconds = most, seconds
        self.bounded = seconds is not None  # whether it learns
        self._plain = 0.0  # seconds of a step without chunks
        self._token: float | None = None  # seconds of a prompt's token

    def budget(self, decoding: bool) -> int:
        """Prompt tokens of the next step. ``decoding``: whether rows decode in it."""
        if not decoding or self._seconds is None:
            return self._most
        if self._token is None:
            return min(LEAST, self._most)
        fits = _AIM * self._seconds / self._token if self._token > 0 else self._most
        return int(min(max(fits // LEAST * LEAST, LEAST), self._most))

    def learn(self, tokens: int, decoding: bool, seconds: float) -> None:
        """A step with so many prompt ``tokens`` took ``seconds``."""
        if not tokens:
            self._plain += _WEIGHT * (seconds - self._plain)
            return
        each = max(seconds - (self._plain if decoding else 0.0), 0.0) / tokens
        slower = self._token is None or each > self._token
        self._token = each if slower else (self._token or 0.0) + _WEIGHT * (each - (self._token or 0.0))


def shares(wanted: SequenceOf[tuple[str, int]], owners: int, budget: int) -> list[int]:
    """Tokens of a step for each row, at most ``budget`` together: its owner and what it ``wanted``, the oldest first.

    None of so many ``owners`` has more than an even share, whether or not others need theirs: those who decode beside a
    long prompt wait less.
    """
    counts, left = list[int](), Counter(dict.fromkeys((owner for owner, _ in wanted), max(budget // owners, 1)))
    for owner, tokens in wanted:
        count = min(tokens, left[owner], budget)
        counts.append(count)
        left[owner] -= count
        budget -= count
    return counts


_READ = 0.05  # seconds of a step in which a row is read from the disk, at most
_APART = 64  # positions that are worth keeping what recurrent layers or windows need where rows part
_FAR = 1 << 26  # positions beyond any window


class Place(NamedTuple):
    """Where a sequence stands, ascending: what begins first, and gives way last."""

    round: int
    number: int  # of the place, in the order in which they were given out


class Turns:
    """Whose turn it is among sequences that wait: owners take turns, each with its highest priority first.

    Start-time fair queueing with every sample of one length: a sequence gets the number of the round in which it is to
    begin, one after the owner's last and never below the round that is being served, and keeps it when it is preempted.
    Priorities order what one owner asks, never one owner before another. With one owner and one priority that is first
    come, first served. Source: Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
    """

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # by id(sequence)
        self._arrivals: dict[int, int] = {}  # by id(sequence)
        self._waiting: dict[str, list[Sequence]] = {}  # those that have their turn to come, by owner, in order
        self._last: dict[str, int] = {}  # round of an owner's last, where it is not over
        self._round = 0  # being served
        self._latest = self._count = 0  # the latest round, and places given out, so far

    def join(self, sequence: Sequence) -> bool:
        """It comes, or has lost its turn. Whether others of its owner moved for it."""
        owner = sequence.request.owner
        if not self._waiting:
            self._round = self._latest + 1
            self._last.clear()
        self._count += 1
        turn = max(self._round, self._last.get(owner, 0) + 1)
        self._last[owner], self._latest = turn, max(self._latest, turn)
        self._arrivals.setdefault(id(sequence), self._count)
        self._places[id(sequence)] = Place(turn, self._count)
        return self.come_back(sequence)

    def come_back(self, sequence: Sequence) -> bool:
        """It waits again, with the turn that it had. Whether others of its owner moved for it."""
        waiting = self._waiting.setdefault(sequence.request.owner, [])
        bisect.insort_right(waiting, sequence, key=self._rank)
        before = [self._places[id(other)] for other in waiting]
        places = sorted(before)
        for other, place in zip(waiting, places, strict=True):
            self._places[id(other)] = place
        return places != before

    def begin(self, sequence: Sequence) -> None:
        """It has its row, for the first time or again."""
        if self._waits_no_more(sequence):
            turn = self._places[id(sequence)].round
            if turn > self._round:
                self._round = turn
                self._last = {owner: last for owner, last in self._last.items() if last >= turn}

    def leave(self, sequence: Sequence) -> None:
        """It is over. Does nothing for one that has left."""
        if id(sequence) in self._places:
            self._waits_no_more(sequence)
            del self._places[id(sequence)], self._arrivals[id(sequence)]

    def of(self, sequence: Sequence) -> Place:
        """Where it stands."""
        return self._places[id(sequence)]

    def way(self, running: list[Sequence]) -> tuple[Sequence, Sequence] | None:
        """Who comes first of owners that have no row among ``running``, and who gives way to it: the youngest of the
        owner that has most. None where nobody has two."""
        owners = Counter(s.request.owner for s in running)
        most, rows = owners.most_common(1)[0]
        first = [waiting[0] for owner, waiting in self._waiting.items() if owner not in owners]
        if not first or rows == 1:
            return None
        return min(first, key=self.of), self.youngest([s for s in running if s.request.owner == most])

    def youngest(self, sequences: list[Sequence]) -> Sequence:
        """Who gives way first: of the owner whose turn came last, the one of the lowest priority that came last."""
        last = max(sequences, key=self.of).request.owner
        return max((s for s in sequences if s.request.owner == last), key=lambda s: (-s.request.priority, self.of(s)))

    def fault(self, running: list[Sequence], waits: list[Sequence]) -> str | None:
        """What is wrong unless these, which run or wait, are all that it knows."""
        there = {id(s) for s in (*running, *waits)}
        if not there == set(self._places) == set(self._arrivals):
            return "a sequence's place is not that of one that lives"
        if not all(self._waiting.values()):
            return "an owner of none that waits"
        if sorted(id(s) for waiting in self._waiting.values() for s in waiting) != sorted(map(id, waits)):
            return "one has its turn to come that does not wait"
        for waiting in self._waiting.values():
            if not waiting == sorted(waiting, key=self._rank) == sorted(waiting, key=self.of):
                return "not in order"
        return None

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        """Its order among its owner's."""
        return -sequence.request.priority, self._arrivals[id(sequence)]

    def _waits_no_more(self, sequence: Sequence) -> bool:
        """Whether its turn was to come."""
        owner = sequence.request.owner
        waiting = self._waiting.get(owner, [])
        found = next((i for i, other in enumerate(waiting) if other is sequence), None)
        if found is None:
            return False
        del waiting[found]
        if not waiting:
            del self._waiting[owner]
        return True


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
        self,
        kv: KVCache,
        drafting: Drafting,
        *,
        max_rows: int,
        pace: Pace,
        memory: int | None,
        prefix_rows: int,
        store: KVStore | None = None,
    ) -> None:
        self._kv, self._drafting, self.store = kv, drafting, store
        self._max_rows, self.pace, self._memory = max_rows, pace, memory
        self.prefixes = PrefixCache(prefix_rows)
        self._waiting: list[tuple[Place, Sequence]] = []  # ascending
        self._turns = Turns()
        self.running: list[Sequence] = []  # the oldest first
        self.preemptions = 0
        self._top = 0  # rows that there ever were, at once
        one = kv.bytes_for(kv.block)
        self._block_bytes = kv.bytes_for(2 * kv.block) - one
        self._full_bytes = kv.bytes_for(_FAR + kv.block) - kv.bytes_for(_FAR)  # of a block, in layers that see all
        self._state_bytes = one - self._block_bytes  # of a row beside its blocks; 0 where no layer is recurrent
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
        if self._memory is None or self._kv.bytes_for(_FAR) <= self._memory:
            return None
        least, most, block = 0, _FAR // self._kv.block, self._kv.block
        while most - least > 1:  # blocks that fit, and that do not
            middle = (least + most) // 2
            fits = self._kv.bytes_for(middle * block) <= self._memory
            least, most = (middle, most) if fits else (least, middle)
        return least * block

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
        for sequence in self.running:
            if sequence.reading is not None:
                self._read(sequence, sequence.reading)
        while True:
            plan = self._rows(failed)
            if self._fits(plan):
                return plan

    def _rows(self, failed: list[tuple[Sequence, str]]) -> Plan:
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for sequence in self.running:
            if sequence.reading is None:
                (decoding if sequence.decoding else filling).append(sequence)
        if not filling:
            return Plan(decoding, [], failed)
        owners, budget = len({s.request.owner for s in self.running}), self.pace.budget(bool(decoding))
        counts = shares([(s.request.owner, s.length - 1 - s.cached) for s in filling], owners, budget)
        chunks = [
            Chunk(s, s.cached, min(count, s.branch - s.cached) if s.cached < s.branch else count)
            for s, count in zip(filling, counts, strict=True)
            if count
        ]
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
            if not self._evict(need - self._memory) and not self._shorten(plan):
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

    def _shorten(self, plan: Plan) -> bool:
        """Halve the longest chunk, where layers have windows, which a row need not hold more of than it reads at once;
        whether there was one to halve."""
        longest = max(range(len(plan.chunks)), key=lambda i: plan.chunks[i].count, default=-1)
        if not self._kv.windowed or longest < 0 or plan.chunks[longest].count <= LEAST:
            return False
        plan.chunks[longest] = replace(plan.chunks[longest], count=plan.chunks[longest].count // 2)
        return True

    def _most_growth(self, plan: Plan, steps: int) -> float:
        """An upper bound of ``_growth`` after so many steps of these rows, which costs next to nothing."""
        block = self._kv.block
        blocks = sum(steps * (1 + sequence.size) // block + 2 for sequence in plan.decoding)
        blocks += sum(chunk.count // block + 2 for chunk in plan.chunks)
        drafting = self._drafting.bytes + self._drafting.most_growth(plan.decoding, steps)
        # Recurrent states: of each row another one, and windows of the widest draft.
        states = 7 * (len(plan.decoding) + len(plan.chunks)) * self._state_bytes
        return self._kv.bytes + blocks * self._block_bytes + states + drafting

    def _growth(self, plan: Plan) -> int:
        """Bytes in use once the plan's rows have grown."""
        total = self._kv.bytes + self._drafting.bytes
        for sequence in plan.decoding:
            total += self._kv.growth(sequence.row, _width(sequence))
            if not sequence.paused:
                total += self._drafting.growth(sequence, sequence.length + sequence.size)
        return total + sum(self._chunk_growth(chunk) for chunk in plan.chunks)

    def _chunk_growth(self, chunk: Chunk) -> int:
        row, count = chunk.sequence.row, chunk.count
        if not self._kv.recurrent or chunk.wanted:
            return self._kv.growth(row, count)
        return self._kv.growth(row, count, settled=count - 1)

    # -- rows come and go --------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence, donor: tuple[int, Sequence | None], shared: int) -> bool:
        """Give a sequence its row if there is room; its first ``shared`` positions are those of the donor."""
        if not self._has_room(sequence, donor[0], shared):
            if self.running:
                return False
            donor, shared = (-1, None), 0  # alone, it fits: what is kept makes way
            self.close()
        shared, common = self._known(sequence, *donor, shared)
        if (reading := self._on_disk(sequence, shared)) is not None:  # it goes on behind whole blocks
            whole = 0 if self._kv.recurrent else shared // self._kv.block * self._kv.block
            shared = common = whole if whole and self._kv.reachable(donor[0], whole) == whole else 0
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
        sequence.row, sequence.reading = row, reading
        self._remove(sequence)
        self.running.append(sequence)
        self._turns.begin(sequence)
        sequence.begin()
        if sequence.cached:
            self._drafting.fork(*donor, sequence, common)
            if donor[1] is None:
                self.prefixes.used(donor[0])
        return True

    def _on_disk(self, sequence: Sequence, shared: int) -> Reading | None:
        """The beginning that is to be read from the disk, though so many positions are shared."""
        if self.store is None or not self._stored(sequence) or sequence.request.params.prompt_logprobs is not None:
            return None
        if sequence.chain is None:
            sequence.chain = self.store.chain(sequence.request.cache_scope)
        found = self.store.find(sequence.chain, sequence.tokens[: sequence.length - 1], shared)
        reached = max(shared, 0 if found is None else found.positions)
        if self._kv.recurrent and (parts := sequence.chain.stored * self._kv.block) - reached >= _APART:
            sequence.branch = max(sequence.branch, parts)  # its state is kept for who comes next
        return found

    def _stored(self, sequence: Sequence) -> bool:
        """Whether the disk may have, and get, what the sequence has KV of."""
        return self.store is not None and sequence.request.reuse_prefix and sequence.error is None

    def _read(self, sequence: Sequence, reading: Reading) -> None:
        """Go on with what is read from the disk, for a part of a step."""
        assert self.store is not None
        self._sure = 0  # it takes memory
        more = self.store.read(reading, sequence.row, _READ)
        length, before = self._kv.length(sequence.row), sequence.cached
        if not more and self._kv.reachable(sequence.row, length) != length:  # its states are missing
            self._kv.truncate(sequence.row, 0)
            length = 0
        sequence.cached, sequence.reading = length, reading if more else None
        sequence.stats.reused_tokens += length - before

    def save(self, sequence: Sequence) -> None:
        """A part of its prompt has been read: the disk gets it."""
        chain = sequence.chain if self._stored(sequence) and sequence.reading is None else None
        if self.store is not None and chain is not None:
            self.store.save(chain, sequence.row, sequence.tokens[: sequence.cached])

    def save_kept(self) -> None:
        """The disk gets what it was too slow for, however long that takes."""
        if self.store is None:
            return
        for row in self.prefixes.rows:
            chain = self.store.chain(self.prefixes.scope(row))
            self.store.save(chain, row, self.prefixes.tokens(row), ended=True, wait=True)

    def _known(self, sequence: Sequence, donor: int, source: Sequence | None, shared: int) -> tuple[int, int]:
        """How many positions to share, and of how many tokens a drafter may know from the donor."""
        if not shared or not self._drafting.reads_from(donor, source, sequence):
            return shared, shared
        tokens = self.prefixes.tokens(donor) if source is None else source.tokens
        common = common_prefix(sequence.tokens, tokens)
        if (
            common == shared and 1 < shared < sequence.length - 1
        ):  # the last one again, with the token that follows here
            if (ready := self._kv.reachable(donor, shared - 1)) == shared - 1:
                return ready, shared
            shared = ready
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
        soon = alike = 0
        for other in self.running:
            sibling = other.request is sequence.request
            if not sibling and not (shares and other.request.reuse_prefix and other.request.cache_scope == scope):
                continue
            common, least = common_prefix(begin, other.tokens[: other.length - 1]), 1 if sibling else PIECE
            alike = max(alike, min(common, other.cached))
            if (ready := self._kv.reachable(other.row, min(common, other.cached))) > best[1] and ready >= least:
                best = (other.row, other), ready
            # Recurrent layers can be cut where a prompt ends, not within it.
            reads_on = not other.decoding and common > other.cached
            if reads_on and common >= (other.length - 1 if self._kv.recurrent else least):
                soon = max(soon, common)
        if shares and self.prefixes.most:
            row, shared, common = self.prefixes.find(begin, self._kv.reachable, scope)
            alike = max(alike, common)
            if shared > best[1]:
                best = (row, None), shared
        parts = (self._kv.recurrent or self._kv.windowed) and alike - best[1] >= _APART
        sequence.branch = alike if parts else 0  # who comes next can share so much
        return best[0], best[1], soon > best[1]

    def _has_room(self, sequence: Sequence, donor: int, shared: int) -> bool:
        """Whether all of its tokens fit beside what runs; kept prefixes go only if that makes the room."""
        if self._memory is None:
            return True
        block = self._block_bytes
        whole = self._kv.bytes_for(sequence.length + 1)
        need = whole - shared // self._kv.block * self._full_bytes
        need += (
            sum(self._kv.growth(s.row, 1) for s in self.running) if self._kv.recurrent else block * len(self.running)
        )
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
            sequence.row, sequence.native, sequence.reading = -1, None, None
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
        shares = sequence.request.reuse_prefix and sequence.error is None and sequence.reading is None
        keep = keep and shares and self._kv.length(row) >= PIECE
        if keep and self.store is not None and sequence.chain is not None:
            self.store.save(sequence.chain, row, sequence.tokens[: self._kv.length(row)], ended=True)
        keep = keep and self.prefixes.most > 0
        try:
            self._drafting.release(sequence, kept=keep)
        finally:
            self.running.remove(sequence)
            sequence.row, sequence.native, sequence.reading = -1, None, None
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
