"""What a forward costs by width, rows and context: measured once for a model, backend and machine, kept on disk. It is
where the policy begins; what it then learns from real steps (native/drafting/policy.h) overrules it.

A forward of B rows with N new tokens in all is modelled as

    seconds = width(N) + row * (B - 1) + sum over rows of context_i * (position + position_width * width_i)

``width`` is a table over measured totals, joined by straight lines and never falling; the rest are slopes. A mixture's
table holds for the experts that its forwards read (``read``), and ``expert`` is what one more or less takes: the
difference between a forward of tokens that choose others and one of tokens that choose the same. What disturbs a
machine only ever adds, so a cell's time is its least, and no width costs more than a greater one.

Long because measuring, keeping and distrusting a table belong together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.common.files import cache_dir, write_json
from outpace.errors import MemoryLimitError
from outpace.models import host
from outpace.models.base import Batch

if TYPE_CHECKING:
    from outpace.models.base import Model, ModelInfo

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
FEW_WIDTHS = (1, 2, 4, 8, 16, 32)  # where there is no time for all
SHORT, LONG = 32, 512  # contexts
BUDGET = 1.6  # seconds that measuring may take; what does not fit is left to the steps themselves
ROUNDS = 6  # at most
FEW = 4  # tokens of a slow mixture's only narrow forward
ALIKE = 8  # at most so many tokens that choose the same experts
AGREE = 0.05  # the two least times of a cell do, when no further apart: if all do, the moment was a steady one
MOMENTS = 8  # a machine that was busy at so many is not measured again
VERSION = 6  # of the file's format and of the protocol
OLDEST = 30 * 86_400.0  # seconds for which a table is believed

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a forward. ``widths``: totals of new tokens, ascending from 1; ``seconds``: theirs, at no context.

    Of a mixture: ``experts`` in a layer, ``used`` by a token; ``read``: how many the forwards of these widths read;
    ``expert``: seconds of one more in every layer. All empty or 0: there is none, or its forwards do not count them.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    row: float = 0.0  # for each row beyond the first
    position: float = 0.0  # for each cached position of a row
    position_width: float = 0.0  # for each cached position and new token
    experts: int = 0
    used: int = 0
    expert: float = 0.0
    read: tuple[float, ...] = ()
    steady: bool = field(default=True, compare=False, repr=False)  # whether it need not be measured again
    moments: int = field(default=1, compare=False, repr=False)  # number of times it was measured
    _table: list[float] = field(default_factory=list, init=False, compare=False, repr=False)

    def width(self, new: int) -> float:
        """Seconds of ``new`` tokens in one row without context; beyond the table on its last slope."""
        while len(self._table) <= new:
            self._table.append(self._line(len(self._table)))
        return self._table[new]

    def _line(self, n: int) -> float:
        xs, ys = self.widths, self.seconds
        if n >= xs[-1]:
            return ys[-1] + self.last_slope * (n - xs[-1])
        return float(np.interp(n, xs, ys)) if n else 0.0

    @property
    def last_slope(self) -> float:
        """Seconds a token beyond the table."""
        xs, ys = self.widths, self.seconds
        return (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else ys[-1] / xs[-1]

    def experts_read(self, new: int) -> float:
        """Experts in a layer that the table's forward of ``new`` tokens read; 0: that is not known."""
        return float(np.interp(new, self.widths, self.read)) if self.read and new else 0.0

    def forward(self, widths: Sequence[int], contexts: Sequence[int]) -> float:
        """Seconds of a forward of rows with ``widths`` [B] new tokens after ``contexts`` [B] cached ones."""
        total = self.width(sum(widths)) + self.row * (len(widths) - 1)
        for width, context in zip(widths, contexts, strict=True):
            total += context * (self.position + self.position_width * width)
        return total

    def ratio(self, width: int, context: int = 400) -> float:
        """A forward of ``width`` tokens over one of a single token, in one row."""
        return self.forward([width], [context]) / self.forward([1], [context])

    def faster(self, other: Cost) -> Cost:
        """The lesser of both at each width, since what disturbs a machine only adds; steady if this is, if the two
        agree, or after ``MOMENTS``."""
        wide = max(self, other, key=lambda cost: len(cost.widths))
        pairs = [(self.width(w), other.width(w)) for w in wide.widths]
        moments = self.moments + other.moments
        agree = all(max(pair) <= (1 + AGREE) * min(pair) for pair in pairs)
        steady = self.steady or agree or moments >= MOMENTS
        seconds, expert = tuple(map(min, pairs)), min(self.expert or math.inf, other.expert or math.inf)
        expert = 0.0 if math.isinf(expert) else expert
        return replace(wide, seconds=seconds, expert=expert, steady=steady, moments=moments)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    def doubts(self) -> str | None:
        """Why no machine can be like this, in words; None: it can be."""
        numbers = (*self.seconds, self.row, self.position, self.position_width)
        if not self.widths or len(self.widths) != len(self.seconds) or self.widths[0] != 1:
            return "it has no width 1, or not one time a width"
        if any(low >= high for low, high in itertools.pairwise(self.widths)):
            return "its widths do not ascend"
        numbers += (self.expert, *self.read)
        if self.read and len(self.read) != len(self.widths):
            return "it has not one number of experts a width"
        if not all(math.isfinite(n) and n >= 0 for n in numbers) or min(self.seconds) <= 0:
            return "a time is zero, negative or not a number"
        for width, seconds in zip(self.widths, self.seconds, strict=True):
            if seconds < 0.5 * self.seconds[0]:
                return f"{width} tokens take half the time of one"
        return None

    @staticmethod
    def guess(seconds: float = 1e-3, widest: int = 64, last: float | None = None) -> Cost:
        """Where nothing was measured but a forward of one token (and perhaps one of ``widest``): rather flat."""
        return Cost((1, widest), (seconds, max(seconds, 6 * seconds if last is None else last)))


def of(model: Model, *, again: bool = False, progress: Progress | None = None) -> Cost:
    """The model's cost on this machine: from the cache unless ``again``, else measured now, in under 2 seconds.

    A model too slow for that gets a table of few widths, and the rest is learned from its steps. One that cannot hold
    a row for measuring now gets a guess, which is logged and not kept. A cost that did not become steady is measured
    again by the next process, and the faster of both counts. ``progress`` gets a line of what is being done.
    """
    path = _path(model)
    known = None if again else _read(path)
    if known is not None and known.steady:
        return known
    tell = progress or log.info
    tell("measuring what a forward costs (once for this model and machine) ...")
    begun = time.perf_counter()
    try:
        cost = measure(model)
        if doubts := cost.doubts():
            log.warning("the cost of a forward was measured once more, since %s", doubts)
            cost = measure(model)
    except MemoryLimitError as error:
        log.warning("the cost of a forward was not measured, so a flat one is assumed: %s", error)
        return Cost.guess()
    spent = time.perf_counter() - begun
    if doubts := cost.doubts():
        log.warning("the cost of a forward could not be measured now (%s): steps correct what is assumed", doubts)
        return known or Cost.guess()
    if known is not None:
        cost = cost.faster(known)
    tell(f"measured what a forward costs in {spent:.1f} s: {1e3 * cost.seconds[0]:.1f} ms for one token")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"version": VERSION, "at": time.time(), **_identity(model), **cost.to_dict()})
    except OSError as error:
        log.warning("the cost of a forward is not kept: %s", error)
    return cost


def measure(model: Model, budget: float = BUDGET) -> Cost:
    """Time forwards of ``model``, all cells in turn, until each one's two least times agree, at most for ``budget``
    seconds (or the few forwards that a slow model needs to be timed at all).

    Raises MemoryLimitError when not even a short row fits. Its rows are gone afterwards.
    """
    begun = time.perf_counter()

    def left() -> float:
        return budget - (time.perf_counter() - begun)

    bench = _Bench(model)
    try:
        first = bench.seconds(_Cell(1))
        if left() < 8 * (first + bench.prefill):
            return replace(_guessed(model.info, bench, first), steady=False)
        least: dict[_Cell, list[float]] = {_Cell(1): [first]}  # two times of each cell

        def expected(widths: Sequence[int]) -> float:
            return sum(first + bench.prefill * w / bench.short for w in widths)

        fits = [w for w in WIDTHS if w <= bench.widest]
        widths = fits if 3 * expected(fits) < left() else [w for w in fits if w in FEW_WIDTHS]
        while len(widths) > 2 and 2 * expected(widths) > left():
            widths.pop()
        cells = [_Cell(w) for w in widths]
        if bench.prefill * LONG / bench.short < 0.3 * left() and bench.add(LONG):
            cells += [_Cell(w, LONG) for w in (1, 8, 16) if w <= bench.widest]
        if 3 * bench.prefill < 0.2 * left() and all(bench.add(SHORT) for _ in range(3)):
            cells.append(_Cell(1, SHORT, bench.rows(SHORT)))
        if 0 < model.info.used_experts < model.info.experts and len(widths) > 1:
            cells.append(_Cell(max(w for w in widths if w <= ALIKE), alike=True))
        steady = False
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for cell in cells:
                least[cell] = sorted([*least.get(cell, ()), bench.seconds(cell)])[:2]
            steady = all(len(two) > 1 and two[1] <= (1 + AGREE) * two[0] for two in least.values())
            if steady or left() < 1.2 * (time.perf_counter() - started):
                break
    finally:
        bench.close()
    cost = _fit({cell: two[0] for cell, two in least.items()})
    return replace(cost, steady=steady, **_mixture(model.info, cost, least, bench.read))


def _mixture(info: ModelInfo, cost: Cost, least: dict[_Cell, list[float]], read: dict[_Cell, float]) -> dict[str, Any]:
    """What a mixture adds to its cost: see ``Cost``."""
    same = next((cell for cell in least if cell.alike), None)
    if same is None or not (fewer := read[same]):
        return {}
    more = read[other := same._replace(alike=False)] - fewer
    one = (least[other][0] - least[same][0]) / more if more >= 1 else 0.0
    one = min(max(one, 0.0), cost.seconds[0] / info.used_experts)  # else it was a disturbed moment
    count = tuple(read[_Cell(width)] for width in cost.widths)
    return {"experts": info.experts, "used": info.used_experts, "expert": one, "read": count}


def _guessed(info: ModelInfo, bench: _Bench, first: float) -> Cost:
    """Of a model that is too slow for a table: of a prompt's forward, and of a mixture's few tokens, whose price lies
    on no line between one's and that."""
    least = {_Cell(1): [min(first, bench.seconds(_Cell(1)))]}
    flat = Cost.guess(least[_Cell(1)][0], bench.short, bench.prefill)
    if not 0 < info.used_experts < info.experts or min(bench.widest, bench.short - 1) < FEW:
        return flat
    for cell in (_Cell(FEW), _Cell(FEW, alike=True)):
        least[cell] = [bench.seconds(cell)]
    low, high = flat.seconds
    cost = Cost((1, FEW, bench.short), (low, min(max(least[_Cell(FEW)][0], low), high), high))
    return replace(cost, **_mixture(info, cost, least, bench.read))


def _fit(times: dict[_Cell, float]) -> Cost:
    alone = {(c.width, c.context): t for c, t in times.items() if c.rows == 1 and not c.alike}
    short = {w: t for (w, context), t in alone.items() if context == SHORT}
    slopes = [(w, (t - short[w]) / (LONG - SHORT)) for (w, context), t in alone.items() if context == LONG]
    position = position_width = 0.0
    if len(slopes) > 1:
        position_width, position = np.polyfit([w for w, _ in slopes], [s for _, s in slopes], 1).tolist()
        position, position_width = max(position, 0.0), max(position_width, 0.0)
    bare = [max(t - SHORT * (position + position_width * w), t / 2) for w, t in sorted(short.items())]
    if len(bare) > 1 and max(bare) >= 0.5 * bare[0]:  # else the times make no sense, and `doubts` says so
        bare = np.minimum.accumulate(bare[::-1])[::-1].tolist()
    cost = Cost(tuple(sorted(short)), tuple(float(s) for s in bare), 0.0, position, position_width)
    rows = max(cell.rows for cell in times)
    if rows == 1:
        return cost
    beyond = times[_Cell(1, SHORT, rows)] - cost.forward([1] * rows, [SHORT] * rows)
    return Cost(cost.widths, cost.seconds, max(beyond / (rows - 1), 0.0), position, position_width)


class _Cell(NamedTuple):
    """What is measured together. ``alike``: all new tokens are one, so that they choose the same experts."""

    width: int
    context: int = SHORT
    rows: int = 1
    alike: bool = False


class _Bench:
    """Rows of a model for measuring: a short one, and more where there is time and room. Raises MemoryLimitError."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.short = min(SHORT, max(model.info.max_length // 2, 1))
        self.widest = min(WIDTHS[-1], max(model.info.max_length - self.short - 1, 1))
        self._rows: dict[int, list[int]] = {SHORT: [], LONG: []}  # by context
        self.read: dict[_Cell, float] = {}  # experts of a mixture
        self.prefill = 0.0  # seconds of a short row's prompt
        try:
            self.prefill = self._fill(SHORT, self.short)
            self._room(self._rows[SHORT][0])
        except BaseException:
            self.close()
            raise

    def add(self, context: int) -> bool:
        """Whether there was room for one more row."""
        if context + self.widest >= self._model.info.max_length:
            return False
        try:
            self._fill(context, self.short if context == SHORT else context)
            self._room(self._rows[context][-1])
        except MemoryLimitError:
            self._drop(context)
            log.debug("no memory for a row of %d positions to measure with", context)
            return False
        return True

    def rows(self, context: int) -> int:
        return len(self._rows[context])

    def seconds(self, cell: _Cell) -> float:
        """Wall time of one forward; the rows are as before afterwards, or a token longer."""
        used = self._rows[cell.context][: cell.rows]
        lengths = [self._model.kv.length(row) for row in used]
        batch = self._batch(used, cell.width, lengths, wanted=True, alike=cell.alike)
        begun = time.perf_counter()
        output = self._model.forward(batch)
        spent = time.perf_counter() - begun
        self.read[cell] = output.experts
        # A token more where layers are recurrent: the next forward replays it, as a step's does.
        for row, length in zip(used, lengths, strict=True):
            self._model.kv.truncate(row, length + self._model.kv.recurrent)
        return spent

    def _fill(self, context: int, tokens: int) -> float:
        """A new row of so many tokens, and the seconds that its last 32 or fewer took."""
        row = self._model.kv.alloc()
        self._rows[context].append(row)
        spent = 0.0
        for at in range(0, tokens, 256):
            batch = self._batch([row], min(tokens - at, 256), [at], wanted=False)
            begun = time.perf_counter()
            output = self._model.forward(batch)
            spent = time.perf_counter() - begun
            self.read[_Cell(tokens)] = output.experts
        return spent

    def _room(self, row: int) -> None:
        """Raise MemoryLimitError unless the widest forward fits."""
        kv = self._model.kv
        if kv.limit is not None and kv.bytes + kv.growth(row, self.widest) > kv.limit:
            raise MemoryLimitError(
                f"a row of {self.short + self.widest} positions does not fit in the KV cache's {kv.limit} bytes"
            )

    def _drop(self, context: int) -> None:
        self._model.kv.free(self._rows[context].pop())

    def _batch(self, rows: list[int], width: int, starts: list[int], *, wanted: bool, alike: bool = False) -> Batch:
        vocabulary, steps = self._model.info.vocab_size, np.arange(width) * (not alike)
        tokens = [((steps + start) * 7919 % vocabulary).astype(np.int32) for start in starts]
        return Batch.pack(rows, tokens, starts, [wanted] * len(rows))

    def close(self) -> None:
        for context in self._rows:
            while self._rows[context]:
                self._drop(context)


def _identity(model: Model) -> dict[str, Any]:
    """What a cost depends on; a change of any of these measures anew."""
    from outpace.common.version import __version__

    info = model.info
    return {
        "model": info.name,
        "weight_bytes": info.weight_bytes,
        "layers": info.layers,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "backend": info.backend,
        "dtype": info.dtype,
        "device": info.device,
        "card": model.card,
        **({"strict": True} if model.strict else {}),
        "kv_bytes_per_position": info.kv_bytes_per_position,
        "kv_dtype": info.kv_dtype,
        "max_length": info.max_length,
        "threads": model.threads,
        "instruction_set": model.isa,
        "machine": f"{platform.node()} {platform.machine()}",
        "cpu": host.kind()[0],
        "cores": len(host.allowed()),
        "clock": time.get_clock_info("perf_counter").implementation,
        "outpace": __version__,
    }


def _path(model: Model) -> Path:
    key = hashlib.sha256(json.dumps(_identity(model), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "costs" / f"{key}.json"


def _read(path: Path) -> Cost | None:
    """A cost that was kept; None when there is none, or it is old or impossible."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - float(found["at"])
        if found.get("version") != VERSION or not 0 <= age < OLDEST:
            return None
        cost = Cost(
            tuple(int(w) for w in found["widths"]),
            tuple(float(s) for s in found["seconds"]),
            float(found["row"]),
            float(found["position"]),
            float(found["position_width"]),
            int(found["experts"]),
            int(found["used"]),
            float(found["expert"]),
            tuple(float(n) for n in found["read"]),
            steady=bool(found["steady"]),
            moments=int(found["moments"]),
        )
        doubts = cost.doubts()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        doubts = repr(error)
    if doubts:
        log.warning("%s is not usable (%s), so the cost is measured anew", path, doubts)
        return None
    return cost
