"""What a forward costs by width, rows and context: measured once for a model, backend and machine, kept on disk.

A forward of B rows with N new tokens in all is modelled as

    seconds = width(N) + row * (B - 1) + sum over rows of context_i * (position + position_width * width_i)

``width`` is a table over measured totals, joined by straight lines and never falling; the rest are slopes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.errors import MemoryLimitError
from outpace.files import cache_dir, write_json
from outpace.models.base import Batch

if TYPE_CHECKING:
    from outpace.models.base import Model

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
FEW_WIDTHS = (1, 2, 4, 8, 16, 32)  # where a forward takes long
SLOW = 0.02  # seconds a forward, above which few widths are measured
SHORT, LONG = 32, 512  # contexts
BUDGET = 0.6  # seconds that measuring may take, about; every cell is measured at least once
ROUNDS = 5
QUANTILE = 0.25  # of a cell's times: what disturbs a machine only ever adds
VERSION = 1  # of the file's format and of the protocol


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a forward. ``widths``: totals of new tokens, ascending from 1; ``seconds``: theirs, at no context."""

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    row: float = 0.0  # for each row beyond the first
    position: float = 0.0  # for each cached position of a row
    position_width: float = 0.0  # for each cached position and new token
    _table: list[float] = field(default_factory=list, compare=False, repr=False)

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

    def forward(self, widths: Sequence[int], contexts: Sequence[int]) -> float:
        """Seconds of a forward of rows with ``widths`` [B] new tokens after ``contexts`` [B] cached ones."""
        total = self.width(sum(widths)) + self.row * (len(widths) - 1)
        for width, context in zip(widths, contexts, strict=True):
            total += context * (self.position + self.position_width * width)
        return total

    def ratio(self, width: int, context: int = 400) -> float:
        """A forward of ``width`` tokens over one of a single token, in one row."""
        return self.forward([width], [context]) / self.forward([1], [context])

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


def of(model: Model, *, again: bool = False) -> Cost:
    """The model's cost on this machine: from the cache unless ``again``, else measured now.

    That takes under a second for a small model. One that cannot hold a row for measuring now gets a flat guess, which
    is logged and not kept.
    """
    path = _path(model)
    if not again:
        known = _read(path)
        if known is not None:
            return known
    begun = time.perf_counter()
    try:
        cost = measure(model)
    except MemoryLimitError as error:
        log.warning("the cost of a forward was not measured, so a flat one is assumed: %s", error)
        return Cost((1, 64), (1e-3, 16e-3))
    log.info("measured what a forward costs in %.1f s", time.perf_counter() - begun)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"version": VERSION, **_identity(model), **cost.to_dict()})
    except OSError as error:
        log.warning("the cost of a forward is not kept: %s", error)
    return cost


def measure(model: Model, budget: float = BUDGET) -> Cost:
    """Time forwards of ``model``, all cells in turn, up to 5 rounds in ``budget`` seconds.

    Raises MemoryLimitError when not even a short row fits. Its rows are gone afterwards.
    """
    bench = _Bench(model)
    try:
        first = bench.seconds(1, SHORT)
        widths = [w for w in (WIDTHS if first < SLOW else FEW_WIDTHS) if w <= bench.widest]
        cells = [(w, SHORT, 1) for w in widths]
        if bench.rows(LONG):
            cells += [(w, LONG, 1) for w in (1, 8, 16)]
        if bench.rows(SHORT) > 1:
            cells.append((1, SHORT, bench.rows(SHORT)))
        times: dict[tuple[int, int, int], list[float]] = {cell: [] for cell in cells}
        begun = time.perf_counter()
        for done in range(ROUNDS):
            if done and (time.perf_counter() - begun) * (done + 1) / done > budget:
                break
            for cell in cells:
                times[cell].append(bench.seconds(*cell))
    finally:
        bench.close()
    return _fit({cell: float(np.quantile(found, QUANTILE)) for cell, found in times.items()})


def _fit(times: dict[tuple[int, int, int], float]) -> Cost:
    short = {w: t for (w, context, rows), t in times.items() if rows == 1 and context == SHORT}
    slopes = [(w, (t - short[w]) / (context - SHORT)) for (w, context, rows), t in times.items() if context > SHORT]
    position = position_width = 0.0
    if len(slopes) > 1:
        position_width, position = np.polyfit([w for w, _ in slopes], [s for _, s in slopes], 1).tolist()
        position, position_width = max(position, 0.0), max(position_width, 0.0)
    bare = [max(t - SHORT * (position + position_width * w), t / 2) for w, t in sorted(short.items())]
    seconds = np.maximum.accumulate(bare)
    cost = Cost(tuple(sorted(short)), tuple(float(s) for s in seconds), 0.0, position, position_width)
    rows = max(r for _, _, r in times)
    if rows == 1:
        return cost
    beyond = times[1, SHORT, rows] - cost.forward([1] * rows, [SHORT] * rows)
    return Cost(cost.widths, cost.seconds, max(beyond / (rows - 1), 0.0), position, position_width)


class _Bench:
    """Rows of a model for measuring: up to 4 short ones and a long one, as many as it has room for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.widest = min(WIDTHS[-1], max(model.info.max_length - SHORT - 1, 1))
        self._rows: dict[int, list[int]] = {SHORT: [], LONG: []}  # by context
        try:
            self._add(SHORT)
        except BaseException:
            self.close()
            raise
        for context in (LONG, SHORT, SHORT, SHORT):
            if context + self.widest < model.info.max_length:
                try:
                    self._add(context)
                except MemoryLimitError:
                    log.debug("no memory for a row of %d positions to measure with", context)

    def rows(self, context: int) -> int:
        return len(self._rows[context])

    def seconds(self, width: int, context: int, rows: int = 1) -> float:
        """Wall time of one forward; the rows are as before afterwards."""
        used = self._rows[context][:rows]
        lengths = [self._model.kv.length(row) for row in used]
        batch = self._batch(used, width, lengths, wanted=True)
        begun = time.perf_counter()
        self._model.forward(batch)
        spent = time.perf_counter() - begun
        for row, length in zip(used, lengths, strict=True):
            self._model.kv.truncate(row, length)
        return spent

    def _add(self, context: int) -> None:
        row = self._model.kv.alloc(context + self.widest)
        self._rows[context].append(row)
        for at in range(0, context, 256):
            self._model.forward(self._batch([row], min(context - at, 256), [at], wanted=False))

    def _batch(self, rows: list[int], width: int, starts: list[int], *, wanted: bool) -> Batch:
        vocabulary = self._model.info.vocab_size
        tokens = [((np.arange(width) + start) * 7919 % vocabulary).astype(np.int32) for start in starts]
        return Batch.pack(rows, tokens, starts, [wanted] * len(rows))

    def close(self) -> None:
        for row in (row for rows in self._rows.values() for row in rows):
            self._model.kv.free(row)
        self._rows = {SHORT: [], LONG: []}


def _identity(model: Model) -> dict[str, Any]:
    """What a cost depends on; a change of any of these measures anew."""
    from outpace import __version__

    info = model.info
    return {
        "model": info.name,
        "weight_bytes": info.weight_bytes,
        "layers": info.layers,
        "backend": info.backend,
        "dtype": info.dtype,
        "device": info.device,
        "threads": getattr(model, "threads", None),
        "instruction_set": getattr(model, "isa", None),
        "machine": f"{platform.node()} {platform.machine()}",
        "outpace": __version__,
    }


def _path(model: Model) -> Path:
    key = hashlib.sha256(json.dumps(_identity(model), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "costs" / f"{key}.json"


def _read(path: Path) -> Cost | None:
    """A cost that was kept; None when there is none or it cannot be used."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("version") != VERSION:
            return None
        cost = Cost(
            tuple(int(w) for w in found["widths"]),
            tuple(float(s) for s in found["seconds"]),
            float(found["row"]),
            float(found["position"]),
            float(found["position_width"]),
        )
        return cost if cost.widths and len(cost.widths) == len(cost.seconds) and min(cost.seconds) > 0 else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not usable, so the cost is measured anew: %s", path, error)
        return None
