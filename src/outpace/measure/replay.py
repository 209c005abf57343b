"""``outpace trace replay``: a run once more, with the drafts that were recorded. What should come out is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from outpace.common.arrays import I32
from outpace.drafters.base import Drafter, RowView
from outpace.engine.request import RowRecord, StepRecord
from outpace.errors import Argument, MemoryLimitError, ParameterError
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.noise import Noise
from outpace.measure.same import Difference, Target, first_difference, promises_tokens, score_gap
from outpace.measure.trace import Trace, TracedRequest, facts
from outpace.models.options import LoadOptions
from outpace.params import Acceptance, SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine

Key = tuple[int, int]  # request, sample


class ReplayDrafter(Drafter):
    """Proposes what was verified in a trace: for the same request and sample, after as many committed tokens."""

    name = "replay"

    def __init__(self, trace: Trace) -> None:
        self._rows = {key: {row.start: row for _, row in rows} for key, rows in trace.rows().items()}
        self._recorded: dict[int, int] = {}  # the engine's ids -> the trace's

    def follow(self, request: int, recorded: int) -> None:
        """The engine's ``request`` is the trace's ``recorded``."""
        self._recorded[request] = recorded

    @property
    def size(self) -> int:
        """The most nodes of any step."""
        return max((len(row.kept) for rows in self._rows.values() for row in rows.values()), default=0)

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        return Drafts.of(
            [self._tree(view, size) for view, size in zip(rows, sizes.tolist(), strict=True)], (self.name,)
        )

    def _tree(self, view: RowView, size: int) -> Draft:
        key = self._recorded.get(view.request, -1), view.chooser.noise.sample
        row = self._rows.get(key, {}).get(len(view.tokens))
        tree = Draft()
        if row is not None:
            place = {-1: -1}
            for node in row.kept[:size]:
                place[node] = tree.add(row.tokens[node], place[row.parents[node]], 1.0)
        return tree


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a sample's replay first left its record, in the trace's step ``step``: recorded and now.

    The difference's ``what`` is "token" (None: there was none), "path" or "gained" of a step with the same tokens, or
    "step": none was recorded after so many tokens.
    """

    request: int
    sample: int
    step: int
    difference: Difference

    def __str__(self) -> str:
        sample = f", sample {self.sample}" if self.sample else ""
        return f"request {self.request}{sample}, step {self.step}: {self.difference}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"request": self.request, "sample": self.sample, "step": self.step, **self.difference.to_dict()}


@dataclass(frozen=True, slots=True)
class Report:
    """What a replay found. ``skipped``: requests that cannot be replayed, with the reason. ``notes``: what is not as it
    was when the trace was made."""

    samples: int
    tokens: int
    steps: int  # of samples
    departures: tuple[Departure, ...]
    skipped: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]

    @property
    def identical(self) -> bool:
        return not self.departures

    def to_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "samples": self.samples,
            "tokens": self.tokens,
            "steps": self.steps,
            "departures": [departure.to_dict() for departure in self.departures],
            "skipped": [{"request": request, "reason": reason} for request, reason in self.skipped],
            "notes": list(self.notes),
        }


def replay(trace: Trace, engine: Engine, drafter: ReplayDrafter) -> Report:
    """Run the trace's requests again, all at once. ``drafter`` is the engine's own, made of the same trace.

    Raises ParameterError when no request can be replayed.
    """
    recorded, now = trace.rows(), dict[Key, list[RowRecord]]()
    ends: dict[int, dict[Key, int]] = {}  # of each recorded request: how long its samples became
    for key, rows in recorded.items():
        ends.setdefault(key[0], {})[key] = max(row.start + row.gained for _, row in rows)
    replayed: dict[int, TracedRequest] = {}  # by the engine's ids
    running: set[int] = set()
    skipped: list[tuple[int, str]] = []

    def on_step(record: StepRecord) -> None:
        for row in record.rows:
            if row.request in replayed:
                now.setdefault((replayed[row.request].id, row.sample), []).append(row)

    def over(number: int) -> bool:
        """Whether all samples are as long as the trace goes."""
        last = ((now[key][-1] if key in now else None, end) for key, end in ends.get(replayed[number].id, {}).items())
        return all(row is not None and row.start + row.gained >= end for row, end in last)

    before, engine.on_step = engine.on_step, on_step
    try:
        for request in trace.requests:
            try:
                params = _replayable(request, recorded)
            except ParameterError as error:
                skipped.append((request.id, str(error)))
                continue
            number = engine.add(list(request.prompt), params, acceptance=cast(Acceptance, request.acceptance))
            drafter.follow(number, request.id)
            replayed[number] = request
            running.add(number)
        if not replayed:
            raise ParameterError(skipped[0][1] if skipped else f"{trace.name} has no requests: trace a run first")
        while not engine.idle:
            engine.step()
            for number in [number for number in running if over(number)]:
                engine.cancel(number)  # it was cancelled, or cut off, where the trace ends
                running.remove(number)
    finally:
        engine.on_step = before
        for number in running:
            engine.cancel(number)
    target, tokens, steps = (engine.model, engine.tokenizer), 0, 0
    departures: list[Departure] = []
    for request in replayed.values():
        for key in ends.get(request.id, ()):
            output, same, departure = _checked(key, request, recorded[key], now.get(key, ()))
            tokens, steps = tokens + len(output), steps + same
            if departure is not None:
                departures.append(_with_gap(departure, request, output, target))
    departures.sort(key=lambda departure: (departure.request, departure.sample))
    notes = tuple(f"{name} {then} then, {today} now" for name, then, today in changes(trace.header, facts(engine)))
    return Report(len(now.keys() & recorded.keys()), tokens, steps, tuple(departures), tuple(skipped), notes)


Recorded = Sequence[tuple[StepRecord, RowRecord]]  # a sample's steps, in order


def _replayable(request: TracedRequest, recorded: Mapping[Key, Recorded]) -> SamplingParams:
    samples = {key[1]: rows for key, rows in recorded.items() if key[0] == request.id}
    if request.acceptance == "rejection" and any(row.drawn for rows in samples.values() for _, row in rows):
        raise ParameterError(
            f"request {request.id} was verified by rejection against a drafter's distributions, which no trace holds: "
            "replay runs under coupled acceptance, or with a drafter that looks tokens up"
        )
    params = request.sampling()
    return params.with_(n=max(params.n, 1 + max(samples, default=0)))


def _checked(
    key: Key, request: TracedRequest, recorded: Recorded, now: Sequence[RowRecord]
) -> tuple[list[int], int, Departure | None]:
    """A sample's output as replayed, up to the first difference; in how many steps; and that difference."""
    rows = {row.start: (step.index, row) for step, row in recorded}
    prompt, end = len(request.prompt), max(row.start + row.gained for _, row in recorded)
    output: list[int] = []
    for steps, row in enumerate(now):
        if row.start >= end:
            return output, steps, None
        nearest = row.start if row.start in rows else max((at for at in rows if at < row.start), default=min(rows))
        step, was = rows[nearest]
        if (parted := _difference(was, row, row.start - prompt)) is not None:
            output.extend(row.verdict[: parted.index - (row.start - prompt)])
            return output, steps, Departure(*key, step, parted)
        output.extend(row.output)
    length = prompt + len(output)
    if length == end:
        return output, len(now), None
    step, was = next((step, row) for step, row in rows.values() if row.start + row.gained > length)
    ended = Difference("token", len(output), (was.output[max(0, length - was.start)], None))
    return output, len(now), Departure(*key, step, ended)


def _difference(was: RowRecord, now: RowRecord, index: int) -> Difference | None:
    """The first one between a recorded row and its replay, which begins at output index ``index``."""
    if was.start != now.start:
        return Difference("step", index, (None, now.verdict))
    at = first_difference(was.verdict, now.verdict)
    if at is not None:
        a, b = (verdict[at] if at < len(verdict) else None for verdict in (was.verdict, now.verdict))
        return Difference("token", index + at, (a, b))
    path = tuple(was.kept[node] for node in now.path)  # what was kept is all that the replay proposes
    if path != was.path:
        return Difference("path", index, (was.path, path))
    return None if now.gained == was.gained else Difference("gained", index, (was.gained, now.gained))


def _with_gap(departure: Departure, request: TracedRequest, output: Sequence[int], target: Target) -> Departure:
    """The departure with its score gap, where two tokens stand against each other."""
    parted = departure.difference
    if parted.what != "token" or None in parted.values:
        return departure
    gap = recorded_gap(target, request, departure.sample, output[: parted.index], parted.values)
    return replace(departure, difference=replace(parted, gap=gap))


def recorded_gap(
    target: Target, request: TracedRequest, sample: int, output: Sequence[int], tokens: tuple[int, int]
) -> float | None:
    """How far the worse of two tokens scores below the best after a recorded ``output``; None where no best score
    chooses, or the KV cache has no room to compute it."""
    params = request.sampling()
    if not promises_tokens(request.acceptance, params):
        return None
    prompt, noise = np.array(request.prompt, np.int32), Noise(request.seed, sample)
    try:
        return score_gap(target, prompt, output, tokens, params, noise)
    except MemoryLimitError:
        return None


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two headers and may change a token: its name, and both values."""
    if a.get("outpace") != b.get("outpace"):
        yield "outpace", a.get("outpace"), b.get("outpace")
    for key, name in SENSITIVE.items():
        x, y = a.get("model", {}).get(key), b.get("model", {}).get(key)
        if x != y and x is not None and y is not None:
            yield name, x, y


SENSITIVE = {  # of the header's model: what the arithmetic depends on
    "fingerprint": "model",
    "backend": "backend",
    "arithmetic": "arithmetic",
    "dtype": "dtype",
    "kv_bytes_per_position": "KV bytes a position",
    "device": "device",
}


def load_options(trace: Trace, **changed: Any) -> LoadOptions:
    """How the trace's model was loaded, with some options changed (None: as recorded)."""
    known = {f.name for f in fields(LoadOptions)}
    recorded = {name: value for name, value in trace.header.get("load", {}).items() if name in known}
    return LoadOptions(**{**recorded, **{name: value for name, value in changed.items() if value is not None}})


@contextmanager
def engine_for(trace: Trace, model: str | None = None, **changed: Any) -> Iterator[tuple[Engine, ReplayDrafter]]:
    """An engine that replays ``trace``, on the model its header names or on ``model``; ``changed``: load options.

    Raises ModelError or ParameterError.
    """
    from outpace.engine.engine import Engine
    from outpace.models.load import load

    target, tokenizer = load(model or model_name(trace), load_options(trace, **changed))
    try:
        drafter = ReplayDrafter(trace)
        options = trace.header.get("engine", {})
        kept = {name: options[name] for name in ("max_rows", "prefill_chunk") if isinstance(options.get(name), int)}
        engine = Engine(target, tokenizer, drafter=drafter, size=drafter.size, **kept)
    except BaseException:
        target.close()
        raise
    with engine:
        yield engine, drafter


def model_name(trace: Trace) -> str:
    """The model that the trace's header names. Raises ParameterError."""
    name = trace.header.get("model", {}).get("name")
    if not name:
        raise ParameterError(f"{trace.name} does not name its model: give one as ", Argument("model"))
    return str(name)
