"""A trace as a file: JSON lines, and the values that they are read back as. docs/traces.md has every key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outpace.common.files import StrPath
from outpace.errors import ParameterError
from outpace.params import PARAMETERS, SamplingParams

VERSION = 1  # of the format; a reader refuses any other


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request as it was accepted. ``pieces``: the text of each prompt token, special ones spelled out."""

    id: int
    prompt: tuple[int, ...]
    params: Mapping[str, Any]  # SamplingParams, field by field, as plain values
    seed: int
    limit: int
    size: int
    adaptive: bool
    acceptance: str
    drafter: str
    pieces: tuple[str, ...] = ()

    def sampling(self) -> SamplingParams:
        """The parameters, with the seed that was used. Raises ParameterError where they cannot be had again."""
        if self.params.get("rules"):
            named = ", ".join(self.params["rules"])
            raise ParameterError(
                f"request {self.id} has logit rules of its own ({named}), which no trace can hold: leave them out"
            )
        unknown = sorted(self.params.keys() - PARAMETERS.keys())
        if unknown:
            raise ParameterError(
                f"request {self.id} has the parameter {unknown[0]!r}, which this version of outpace does not know: "
                "use the version that wrote the trace"
            )
        return SamplingParams.from_dict({**self.params, "seed": self.seed})


@dataclass(frozen=True, slots=True)
class TracedRow:
    """A decoding row of a step: k proposed nodes, those that were kept and verified, and the verdict."""

    request: int
    sample: int
    row: int  # in the KV cache
    start: int  # committed tokens before the step
    tokens: tuple[int, ...]  # [k] proposed
    parents: tuple[int, ...]  # [k]; -1 is the pending token
    confidence: tuple[float, ...]  # [k], or none
    sources: tuple[str, ...]  # [k] who proposed it
    kept: tuple[int, ...]  # proposed nodes that were verified, ascending
    verdict: tuple[int, ...]  # accepted tokens, then the target's own
    path: tuple[int, ...]  # accepted nodes, as proposed ones
    gained: int  # tokens committed: a stop may cut the verdict's
    near_ties: int  # of them, those that another order of sums might have chosen otherwise
    size: int  # what the policy decided
    expected: float | None = None
    why: str = ""
    worth: tuple[float, ...] = ()  # [k], or none
    drawn: bool = False  # the nodes were drawn from distributions, which a trace does not hold

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens committed."""
        return self.verdict[: self.gained]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of the engine. ``chunks``: (request, sample, row, start, count) of prefill. ``seconds`` by phase."""

    index: int
    rows: tuple[TracedRow, ...]
    chunks: tuple[tuple[int, int, int, int, int], ...]
    seconds: Mapping[str, float]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedResult:
    """One finished sample. ``pieces``: the text of each token; together they are ``text``."""

    request: int
    sample: int
    text: str
    pieces: tuple[str, ...]
    sources: tuple[str, ...]
    finish_reason: str
    stopped_by: str | int | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read. ``margins``: by (request, sample), how far each output token's score was above the next
    best, where that was recorded. ``cut``: what is missing at the end, if anything, in words."""

    name: str
    header: Mapping[str, Any]
    requests: tuple[TracedRequest, ...]
    steps: tuple[TracedStep, ...]
    results: tuple[TracedResult, ...]
    texts: Mapping[int, str]  # tokens by themselves
    margins: Mapping[tuple[int, int], tuple[float, ...]]
    cut: str | None

    def rows(self) -> dict[tuple[int, int], list[tuple[TracedStep, TracedRow]]]:
        """The steps of each (request, sample), in order."""
        found: dict[tuple[int, int], list[tuple[TracedStep, TracedRow]]] = {}
        for step in self.steps:
            for row in step.rows:
                found.setdefault((row.request, row.sample), []).append((step, row))
        return found

    def outputs(self) -> dict[tuple[int, int], list[int]]:
        """The output tokens of each (request, sample)."""
        return {key: [t for _, row in rows for t in row.output] for key, rows in self.rows().items()}


def lines(path: StrPath) -> tuple[dict[str, Any], list[dict[str, Any]], str | None]:
    """A trace's header, its other lines, and what is cut off. Raises ParameterError for any other file or version."""
    try:
        whole = Path(path).read_bytes()
    except OSError as error:
        raise ParameterError(
            f"{path} cannot be read ({error.strerror or error}): give a file that outpace generate --trace wrote"
        ) from error
    *complete, rest = whole.split(b"\n")
    cut = None if not rest else f"the last line is cut off after {len(rest)} bytes"
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate(complete, 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("no object")
        except ValueError as error:
            if number == 1:
                break
            raise ParameterError(f"{path}, line {number}, is damaged ({error}): trace the run again") from error
        parsed.append(value)
    if not parsed or "trace" not in parsed[0]:
        raise ParameterError(f"{path} is no trace: give a file that outpace generate --trace wrote")
    header, *others = parsed
    if header["trace"] != VERSION:
        raise ParameterError(
            f"{path} is a trace of format {header['trace']}, written by outpace {header.get('outpace', '?')}, "
            f"and this version reads format {VERSION}: use the version that wrote it"
        )
    if cut is None and not any("end" in line for line in others[-1:]):
        cut = "the run did not end: its last lines may be missing"
    return header, others, cut


def read(path: StrPath) -> Trace:
    """A trace from its file. Raises ParameterError."""
    header, others, cut = lines(path)
    requests: list[TracedRequest] = []
    steps: list[TracedStep] = []
    results: list[TracedResult] = []
    texts: dict[int, str] = {}
    margins: dict[tuple[int, int], tuple[float, ...]] = {}
    try:
        for line in others:
            if "step" in line:
                steps.append(_step(line))
            elif "request" in line:
                requests.append(_request(line["request"]))
            elif "texts" in line:
                texts.update({int(token): text for token, text in line["texts"]})
            elif "result" in line:
                results.append(_result(line["result"]))
            elif "margins" in line:
                margins[line["q"], line.get("n", 0)] = tuple(float(m) for m in line["margins"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ParameterError(f"{path} has a line that is no trace's ({error!r}): trace the run again") from error
    return Trace(Path(path).name, header, tuple(requests), tuple(steps), tuple(results), texts, margins, cut)


def _request(value: Mapping[str, Any]) -> TracedRequest:
    names = [f.name for f in fields(TracedRequest)]
    plain = {name: value[name] for name in names if name not in ("prompt", "pieces")}
    return TracedRequest(**plain, prompt=tuple(value["prompt"]), pieces=tuple(value.get("pieces", ())))


def _step(line: Mapping[str, Any]) -> TracedStep:
    chunks = tuple((int(q), int(n), int(w), int(a), int(c)) for q, n, w, a, c in line.get("c", ()))
    return TracedStep(line["step"], tuple(map(row_from, line["r"])), chunks, line["s"], tuple(line.get("f", ())))


def row_from(row: Mapping[str, Any]) -> TracedRow:
    """A row as a step's line has it, with everything spelled out."""
    tokens = tuple(row.get("t", ()))
    k = len(tokens)
    names, numbers = row.get("o", ["draft"]), row.get("s")
    verdict = tuple(row["v"])
    kept = tuple(row["k"]) if "k" in row else tuple(range(k))
    expected = row.get("e")
    return TracedRow(
        request=row["q"],
        sample=row.get("n", 0),
        row=row["w"],
        start=row["a"],
        tokens=tokens,
        parents=tuple(row["p"]) if "p" in row else tuple(range(-1, k - 1)),
        confidence=tuple(map(float, row.get("c", ()))),
        sources=tuple(names[0 if numbers is None else numbers[i]] for i in range(k)),
        kept=kept,
        verdict=verdict,
        path=tuple(row.get("h", ())),
        gained=row.get("g", len(verdict)),
        near_ties=row.get("m", 0),
        size=row.get("z", len(kept)),
        expected=None if expected is None else float(expected),
        why=row.get("y", ""),
        worth=tuple(map(float, row.get("u", ()))),
        drawn=bool(row.get("d", False)),
    )


def _result(value: Mapping[str, Any]) -> TracedResult:
    known = {f.name for f in fields(TracedResult)}
    plain = {name: item for name, item in value.items() if name in known}
    for name in ("pieces", "sources", "notes"):
        plain[name] = tuple(plain.get(name, ()))
    return TracedResult(**plain)


def number(value: float) -> float | str:
    """A float as JSON has it: infinities and NaN as text."""
    return value if math.isfinite(value) else str(value)
