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
    check = _Check(trace)
    skipped: list[tuple[int, str]] = []
    added: dict[int, TracedRequest] = {}
    before, engine.on_step = engine.on_step, check.step
    try:
        for request in trace.requests:
            try:
                params = _replayable(request, check.rows)
            except ParameterError as error:
                skipped.append((request.id, str(error)))
                continue
            number = engine.add(list(request.prompt), params, acceptance=cast(Acceptance, request.acceptance))
            drafter.follow(number, request.id)
            check.follow(number, request)
            added[number] = request
        if not added:
            raise ParameterError(skipped[0][1] if skipped else f"{trace.name} has no requests: trace a run first")
        while not engine.idle:
            engine.step()
            for number in [number for number in added if check.over(number)]:
                engine.cancel(number)  # it was cancelled, or cut off, where the trace ends
                del added[number]
    finally:
        engine.on_step = before
        for number in added:
            engine.cancel(number)
    target = engine.model, engine.tokenizer
    departures = tuple(_with_gap(departure, trace, target, check.outputs) for departure in check.finish())
    notes = tuple(f"{name} {then} then, {now} now" for name, then, now in changes(trace.header, facts(engine)))
    return Report(len(check.outputs), check.tokens, check.steps, departures, tuple(skipped), notes)


def _replayable(request: TracedRequest, rows: Mapping[Key, Mapping[int, tuple[int, RowRecord]]]) -> SamplingParams:
    drawn = any(row.drawn for key, steps in rows.items() if key[0] == request.id for _, row in steps.values())
    if drawn and request.acceptance == "rejection":
        raise ParameterError(
            f"request {request.id} was verified by rejection against a drafter's distributions, which no trace holds: "
            "replay runs under coupled acceptance, or with a drafter that looks tokens up"
        )
    params = request.sampling()
    return params.with_(n=max(params.n, 1 + max((key[1] for key in rows if key[0] == request.id), default=0)))


class _Check:
    """Holds every step of a replay against the recorded one."""

    def __init__(self, trace: Trace) -> None:
        self.rows = {key: {row.start: (step.index, row) for step, row in rows} for key, rows in trace.rows().items()}
        self._end = {
            key: max(start + row.gained for start, (_, row) in rows.items()) for key, rows in self.rows.items()
        }
        self._keys: dict[int, list[Key]] = {}  # of each recorded request
        for key in self._end:
            self._keys.setdefault(key[0], []).append(key)
        self._requests: dict[int, TracedRequest] = {}  # by the engine's id
        self._reached: dict[Key, int] = {}
        self._departed: dict[Key, Departure] = {}
        self.outputs: dict[Key, list[int]] = {}  # as replayed, up to the first difference
        self.steps = self.tokens = 0

    def follow(self, number: int, request: TracedRequest) -> None:
        self._requests[number] = request

    def step(self, record: StepRecord) -> None:
        for row in record.rows:
            request = self._requests.get(row.request)
            if request is not None:
                self._row((request.id, row.sample), request, row)

    def over(self, number: int) -> bool:
        """Whether all samples of the engine's request are as long as the trace goes."""
        keys = self._keys.get(self._requests[number].id, ())
        return all(self._reached.get(key, 0) >= self._end[key] for key in keys)

    def finish(self) -> list[Departure]:
        """All differences, one a sample; a sample that ended before its record did is one."""
        for request in self._requests.values():
            for key in self._keys.get(request.id, ()):
                index = len(self.outputs.get(key, ()))
                length = len(request.prompt) + index
                if key not in self._departed and length < self._end[key]:
                    rows = self.rows[key].values()
                    step, row = next((step, row) for step, row in rows if row.start + row.gained > length)
                    token = row.output[max(0, length - row.start)]
                    self._departed[key] = Departure(*key, step, Difference("token", index, (token, None)))
        return [self._departed[key] for key in sorted(self._departed)]

    def _row(self, key: Key, request: TracedRequest, now: RowRecord) -> None:
        self._reached[key] = now.start + now.gained
        if key in self._departed or now.start >= self._end.get(key, 0):
            return
        output = self.outputs.setdefault(key, [])
        index, rows = now.start - len(request.prompt), self.rows[key]
        nearest = max((start for start in rows if start <= now.start), default=min(rows))
        step, was = rows[nearest]
        if (found := _difference(was, now, index)) is not None:
            self._departed[key] = Departure(*key, step, found)
            if found.what == "token":
                output.extend(now.verdict[: found.index - index])
            return
        output.extend(now.output)
        self.steps += 1
        self.tokens += now.gained


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


def _with_gap(departure: Departure, trace: Trace, target: Target, outputs: Mapping[Key, Sequence[int]]) -> Departure:
    """The departure with its score gap, where two tokens stand against each other."""
    found = departure.difference
    if found.what != "token" or None in found.values:
        return departure
    request = next(r for r in trace.requests if r.id == departure.request)
    output = outputs[departure.request, departure.sample][: found.index]
    gap = recorded_gap(target, request, departure.sample, output, found.values)
    return replace(departure, difference=replace(found, gap=gap))


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
        asked = trace.header.get("engine", {})
        kept = {name: asked[name] for name in ("max_rows", "prefill_chunk") if isinstance(asked.get(name), int)}
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
