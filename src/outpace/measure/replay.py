"""``outpace trace replay``: a run once more, with the drafts that were recorded. What should come out is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from outpace.common.arrays import I32
from outpace.drafters.base import Drafter, RowView
from outpace.errors import Argument, MemoryLimitError, ParameterError
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.noise import Noise
from outpace.measure.compare import NEAR_TIE, promises_tokens
from outpace.measure.facts import Described, facts
from outpace.measure.scores import gap_between, scores_along
from outpace.measure.trace import rows_of
from outpace.measure.tracefile import Trace, TracedRequest, TracedRow, row_from
from outpace.models.options import LoadOptions
from outpace.params import Acceptance, SamplingParams

if TYPE_CHECKING:
    from outpace.engine.request import StepRecord
    from outpace.engine.results import Delta
    from outpace.models.base import Model
    from outpace.models.text.tokenizer import Tokenizer

Key = tuple[int, int]  # request, sample
Target = tuple["Model", "Tokenizer | None"]


class Replayable(Described, Protocol):
    """An engine, as far as a replay goes; its drafter is the ReplayDrafter, its size fixed."""

    on_step: Callable[[StepRecord], None] | None

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def idle(self) -> bool: ...

    def add(self, prompt: list[int], params: SamplingParams, *, acceptance: Acceptance | None = None) -> int: ...

    def step(self) -> list[Delta]: ...

    def cancel(self, request: int) -> object: ...


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
    """Where a sample's replay first left its record: at output index ``index``, in the trace's step ``step``.

    ``tokens``: recorded and now (None: there was none). ``gap``: how far the worse of them scores below the best, noise
    included; None where both say the same tokens or no score decides.
    """

    request: int
    sample: int
    step: int
    index: int
    tokens: tuple[int | None, int | None]
    why: str
    gap: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE

    def __str__(self) -> str:
        sample = f", sample {self.sample}" if self.sample else ""
        gap = "" if self.gap is None else f", score gap {self.gap:.2g}{' (near-tie)' if self.near_tie else ''}"
        return f"request {self.request}{sample}: {self.why} at token {self.index}, step {self.step}{gap}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: such a gap is None."""
        gap = self.gap if self.gap is not None and math.isfinite(self.gap) else None
        return {**asdict(self), "tokens": list(self.tokens), "gap": gap, "near_tie": self.near_tie}


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


def replay(trace: Trace, engine: Replayable, drafter: ReplayDrafter) -> Report:
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
    departures = tuple(_with_gap(departure, trace, engine, check.outputs) for departure in check.finish())
    notes = tuple(changes(trace.header, facts(engine)))
    return Report(len(check.outputs), check.tokens, check.steps, departures, tuple(skipped), notes)


def _replayable(request: TracedRequest, rows: Mapping[Key, Mapping[int, tuple[int, TracedRow]]]) -> SamplingParams:
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
        for row in map(row_from, rows_of(record)):
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
                    self._departed[key] = Departure(*key, step, index, (token, None), "the replay ended early")
        return [self._departed[key] for key in sorted(self._departed)]

    def _row(self, key: Key, request: TracedRequest, now: TracedRow) -> None:
        self._reached[key] = now.start + now.gained
        if key in self._departed or now.start >= self._end.get(key, 0):
            return
        output = self.outputs.setdefault(key, [])
        index = now.start - len(request.prompt)
        if now.start not in self.rows[key]:
            nearest = max((start for start in self.rows[key] if start < now.start), default=min(self.rows[key]))
            step = self.rows[key][nearest][0]
            self._departed[key] = Departure(*key, step, index, (None, None), "no step was recorded")
            return
        step, was = self.rows[key][now.start]
        same = _common(was.verdict, now.verdict)
        if same < max(len(was.verdict), len(now.verdict)):
            output.extend(now.verdict[:same])
            tokens = _item(was.verdict, same), _item(now.verdict, same)
            parted = " / ".join("nothing" if token is None else str(token) for token in tokens)
            self._departed[key] = Departure(*key, step, index + same, tokens, f"recorded {parted} now")
            return
        path = tuple(was.kept[node] for node in now.path)
        if path != was.path or now.gained != was.gained:
            why = f"path {list(was.path)} / {list(path)} now, gained {was.gained} / {now.gained}"
            self._departed[key] = Departure(*key, step, index, (None, None), why)
            return
        output.extend(now.output)
        self.steps += 1
        self.tokens += now.gained


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _item(items: Sequence[int], index: int) -> int | None:
    return items[index] if index < len(items) else None


def _with_gap(
    departure: Departure, trace: Trace, engine: Replayable, outputs: Mapping[Key, Sequence[int]]
) -> Departure:
    """The departure with its score gap, where two tokens stand against each other and a best score chose."""
    request = next(r for r in trace.requests if r.id == departure.request)
    a, b = departure.tokens
    if a is None or b is None:
        return departure
    output = outputs[departure.request, departure.sample][: departure.index]
    return replace(departure, gap=score_gap((engine.model, engine.tokenizer), request, departure.sample, output, a, b))


def score_gap(
    target: Target, request: TracedRequest, sample: int, output: Sequence[int], a: int, b: int
) -> float | None:
    """How far the worse of ``a`` and ``b`` scores below the best after ``output``; None where no best score chooses, or
    the KV cache has no room to compute it."""
    params = request.sampling()
    if not promises_tokens(request.acceptance, params):
        return None
    prompt, noise = np.array(request.prompt, np.int32), Noise(request.seed, sample)
    try:
        (scores,) = scores_along(*target, prompt, output, params, noise, first=len(output))
    except MemoryLimitError:
        return None
    return gap_between(scores, a, b)


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two headers and may change a token, in words."""
    if then.get("outpace") != now.get("outpace"):
        yield f"outpace {then.get('outpace')} then, {now.get('outpace')} now"
    for key, name in SENSITIVE.items():
        a, b = then.get("model", {}).get(key), now.get("model", {}).get(key)
        if a != b and a is not None and b is not None:
            yield f"{name} {a} then, {b} now"


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
def engine_for(trace: Trace, model: str | None = None, **changed: Any) -> Iterator[tuple[Replayable, ReplayDrafter]]:
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
