"""Traces: every step of a run as JSON lines, written beside it and never in its way, and read back as records.

One line each: the header, a request when it is first seen, the texts of tokens when they first occur, every step, every
result. A line is written whole or not at all, all lines of a step with one write. docs/traces.md has every key.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.common.files import StrPath, check_writable
from outpace.engine.request import ChunkRecord, Likely, Place, RowRecord, StepRecord, Trial
from outpace.errors import ParameterError
from outpace.exact.noise import Noise
from outpace.measure import machine
from outpace.measure.same import margins_along, promises_tokens
from outpace.models.fingerprint import arithmetic, fingerprint_of
from outpace.models.options import BACKENDS, LoadOptions
from outpace.params import PARAMETERS, SamplingParams
from outpace.text.answer import TextReader, pieces
from outpace.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.request import Request
    from outpace.engine.results import Result
    from outpace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

VERSION = 1  # of the format; a reader refuses any other
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@contextmanager
def tracing(
    engine: Engine,
    path: StrPath,
    *,
    load: LoadOptions | None = None,
    scores: bool = False,
    probabilities: bool = False,
) -> Iterator[TraceWriter]:
    """Trace what ``engine`` does inside into ``path``. ``load``: how its model was loaded. ``scores``: at the end,
    compute by how much each output token won (one more prefill of every answer), for ``outpace explain``.
    ``probabilities``: steps have p, q, the target's likeliest tokens and the random numbers (``Engine.probabilities``).

    Raises ParameterError when ``path`` cannot be written; after that, no fault of tracing reaches the engine.
    """
    if engine.on_step is not None or engine.on_result is not None:
        raise ParameterError("this engine is being watched already: end that trace first")
    writer = TraceWriter(path, engine, load)
    before, engine.probabilities = engine.probabilities, probabilities
    engine.on_step, engine.on_result = writer.step, writer.result
    try:
        yield writer
    finally:
        engine.on_step = engine.on_result = None
        engine.probabilities = before
        if scores:
            writer.score()
        writer.close()


class TraceWriter:
    """Writes a trace of what ``engine`` does; ``load``: how its model was loaded.

    The engine gives it every step and every sample that has ended, however it did. After the constructor nothing
    raises: a full disk, or any other fault, ends tracing with one warning, and what was written until then is a trace.
    """

    def __init__(self, path: StrPath, engine: Engine, load: LoadOptions | None = None) -> None:
        self.path, self._engine, self._tokenizer = Path(path), engine, engine.tokenizer
        check_writable(self.path, "JSON lines")
        self._spell = None if engine.tokenizer is None else spelling(engine.tokenizer)
        self._requests: dict[int, Request] = {}
        self._outputs: dict[tuple[int, int], tuple[int, ...]] = {}
        self._spelled: set[int] = set()
        self._steps = self._whole = 0  # steps written; bytes of whole lines
        self._file: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._write([{"trace": VERSION, **facts(engine, load)}])

    def step(self, record: StepRecord) -> None:
        """Write a step, and before it the requests and token texts that are new in it."""
        self._guarded(lambda: self._step(record))

    def result(self, result: Result) -> None:
        """Write how a sample ended; the record of its last step comes after."""
        self._guarded(lambda: self._result(result))

    def score(self) -> None:
        """Compute and write every finished answer's margins. The model's KV must have room for a row."""
        self._guarded(self._score)

    def close(self) -> None:
        """End the trace. Calling twice is allowed."""
        if self._file is not None:
            self._write([{"end": {"steps": self._steps}}])
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def on(self) -> bool:
        """Whether it still writes."""
        return self._file is not None

    # -- lines -------------------------------------------------------------------------------------------------------

    def _step(self, record: StepRecord) -> None:
        for request in record.requests:
            self._seen(request)
        new = sorted(tokens_of(record) - self._spelled)
        texts = [] if self._spell is None or not new else [{"texts": [[token, self._spell(token)] for token in new]}]
        self._spelled.update(new)
        self._write([*texts, step_line(record)])
        self._steps += 1

    def _seen(self, number: int) -> None:
        if number not in self._requests:
            request = self._requests[number] = self._engine.request(number)
            self._write([{"request": request_line(request, self._tokenizer)}])

    def _result(self, result: Result) -> None:
        self._seen(result.request)  # it may have ended before its first step
        if not result.error:
            self._outputs[result.request, result.sample] = result.token_ids
        self._write([{"result": result_line(result, self._requests[result.request], self._tokenizer)}])

    def _score(self) -> None:
        target = self._engine.model, self._tokenizer
        for (number, sample), output in self._outputs.items():
            request = self._requests[number]
            if not output or not promises_tokens(request.acceptance, request.params):
                continue  # what is drawn by rejection is no best score
            margins = margins_along(target, request.prompt, output, request.params, Noise(request.seed, sample))
            self._write([{"margins": [number_of(float(f"{m:.6g}")) for m in margins], "q": number, "n": sample}])

    # -- the file ----------------------------------------------------------------------------------------------------

    def _guarded(self, write: Callable[[], None]) -> None:
        if self._file is None:
            return
        try:
            write()
        except Exception as error:  # whatever it is, it is not worth a request
            self._give_up(repr(error), "please report it")

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """All of these lines with one write; where that is cut short, what was written of them is taken back."""
        if self._file is None:
            return
        data = "".join(_encode(line) + "\n" for line in lines).encode("ascii")
        try:
            done = os.write(self._file, data)
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            self._give_up(error.strerror or str(error), "give --trace a place with room")
            return
        except BaseException:  # Ctrl-C between two halves of a line
            self._cut_back(self._file)
            raise
        self._whole += len(data)

    def _give_up(self, reason: str, remedy: str) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        self._cut_back(file)
        os.close(file)
        log.warning(
            "%s: tracing stopped after %d steps (%s), decoding goes on: %s", self.path, self._steps, reason, remedy
        )

    def _cut_back(self, file: int) -> None:
        """Leave whole lines only."""
        try:
            os.ftruncate(file, self._whole)
        except OSError as error:  # a pipe cannot be cut; a reader bears a cut line
            log.debug("%s was not cut to whole lines: %s", self.path, error)


# -- what stands in a line -------------------------------------------------------------------------------------------


def facts(engine: Engine, load: LoadOptions | None = None) -> dict[str, Any]:
    """What a run's tokens and times depend on beside its requests: model, arithmetic, engine, machine. ``load``: how
    the model was loaded, so that a replay can load it the same way."""
    from outpace.common.version import __version__

    model, info = engine.model, engine.model.info
    options = load or LoadOptions(backend=info.backend if info.backend in BACKENDS else "auto")
    return {
        "outpace": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": {
            "name": info.name,
            "fingerprint": fingerprint_of(info.name, options)
            if info.backend in BACKENDS
            else None,  # a toy has no files
            "backend": info.backend,
            "arithmetic": arithmetic(info.backend),
            "path": model.isa,
            "dtype": info.dtype,
            "kv_dtype": None if load is None or load.kv_dtype == "auto" else load.kv_dtype,
            "kv_bytes_per_position": info.kv_bytes_per_position,
            "device": info.device,
            "threads": model.threads,
            "layers": info.layers,
            "vocab_size": info.vocab_size,
            "max_length": info.max_length,
        },
        "load": {name: value for name, value in asdict(options).items() if value != getattr(LoadOptions(), name)},
        "engine": {"drafters": list(engine.drafters), **asdict(engine.options)},
        "machine": machine.cpu(),
    }


_REQUEST = ("id", "seed", "limit", "size", "adaptive", "acceptance", "drafter")  # fields that a line has as they are
_RESULT = ("request", "sample", "text", "sources", "finish_reason", "stopped_by")


def _floats(values: Iterable[float | str]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _places(values: Iterable[Any]) -> tuple[Place, ...]:
    return tuple(
        Place(
            node, choice, tuple(Likely(*one) for one in likeliest), tuple(Trial(*one) for one in trials),
            tuple(Likely(*one) for one in residual), _floats(q),
        )
        for node, choice, likeliest, trials, residual, q in values
    )  # fmt: skip


_ROW: Mapping[str, tuple[str, Callable[[Any], Any]]] = {  # fields of a RowRecord but ``sources``: their keys, and types
    "request": ("q", int), "sample": ("n", int), "row": ("w", int), "start": ("a", int), "tokens": ("t", tuple),
    "parents": ("p", tuple), "confidence": ("c", _floats), "drawn": ("d", bool), "kept": ("k", tuple),
    "verdict": ("v", tuple), "path": ("h", tuple), "gained": ("g", int), "near_ties": ("m", int), "size": ("z", int),
    "expected": ("e", float), "why": ("y", str), "worth": ("u", _floats), "p": ("P", _floats), "q": ("Q", _floats),
    "places": ("i", _places),
}  # fmt: skip


def request_line(request: Request, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A request as a trace has it."""
    prompt = request.prompt.tolist()
    line = {name: getattr(request, name) for name in (*_REQUEST, "reuse_prefix", "priority", "deadline")}
    line |= {"prompt": prompt, "params": request.params.to_dict()}
    if tokenizer is not None:
        line["pieces"] = pieces(TextReader(tokenizer, skip_special=False), prompt)
    return line


def result_line(result: Result, request: Request, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A result, which is of ``request``, as a trace has it."""
    line = {name: getattr(result, name) for name in _RESULT}
    line |= {"pieces": [], "stats": result.stats.to_dict()}
    if tokenizer is not None:
        reader = TextReader(tokenizer, skip_special=request.params.skip_special_tokens, after=request.prompt)
        line["pieces"] = _cut(pieces(reader, result.token_ids), result.text)
    return line | {name: value for name in ("error", "notes") if (value := getattr(result, name))}


def _cut(texts: list[str], text: str) -> list[str]:
    """The pieces as far as ``text`` goes: a stop string ends it within a token, a stop token is no part of it."""
    left, out = text, []
    for piece in texts:
        if not (piece.startswith(left) or left.startswith(piece)):
            return []  # decoded in another way: no text is better than a wrong one
        out.append(piece[: len(left)])
        left = left[len(piece) :]
    if out:
        out[-1] += left  # a stop string that stays in the text, though it spells what is not shown
    return out


def tokens_of(record: StepRecord) -> set[int]:
    """The tokens that a step's rows name."""
    rows = record.rows
    likely = {each.token for row in rows for place in row.places for each in (*place.likeliest, *place.residual)}
    return likely | {token for row in rows for token in (*row.tokens, *row.verdict)}


def spelling(tokenizer: Tokenizer) -> Callable[[int], str]:
    """How a token by itself is spelled: its text, its bytes where it is no whole character, or the vocabulary's way."""
    code = None if tokenizer.spelling is None else TokenBytes(tokenizer)

    def spelled(token: int) -> str:
        text, name = tokenizer.decode([token], skip_special=False), tokenizer.token(token) or f"[{token}]"
        if "\ufffd" in text and code is not None and code.of(token):
            return f"⟨{code.of(token).hex()}⟩"
        if not text or "\ufffd" in text:
            return name
        return " " + text if name.startswith("▁") and not text.startswith(" ") else text

    return spelled


def step_line(record: StepRecord) -> dict[str, Any]:
    """A step as a trace has it."""
    seconds = {phase: round(spent, 7) for phase, spent in record.seconds.items()}
    line: dict[str, Any] = {"step": record.index, "s": seconds, "r": [row_line(row) for row in record.rows]}
    if record.chunks:
        line["c"] = [astuple(chunk) for chunk in record.chunks]
    if record.faults:
        line["f"] = record.faults
    return line


def row_line(row: RowRecord) -> dict[str, Any]:
    """A step's row as a trace has it: what a reader would assume is left out."""
    assumed = _assumed(len(row.tokens), len(row.kept), len(row.verdict))
    values = ((key, getattr(row, name), assumed.get(name)) for name, (key, _) in _ROW.items())
    line = {key: _plain(value, 6 if key in "PQi" else 4) for key, value, usual in values if value != usual}
    if row.sources:
        line["o"] = names = list(dict.fromkeys(row.sources))
        if len(names) > 1:
            line["s"] = [names.index(name) for name in row.sources]
    return line


def row_of(line: Mapping[str, Any]) -> RowRecord:
    """The row that a step's line has."""
    values = {name: kind(line[key]) for name, (key, kind) in _ROW.items() if key in line}
    k = len(values.get("tokens", ()))
    assumed = _assumed(k, len(values.get("kept", range(k))), len(values["verdict"]))
    names, numbers = line.get("o", ["draft"]), line.get("s", [0] * k)
    return RowRecord(**{**assumed, **values}, sources=tuple(names[number] for number in numbers))


def _assumed(proposed: int, kept: int, gained: int) -> dict[str, Any]:
    """What a reader assumes of a row with so many nodes and tokens: all of a chain was kept, and all tokens committed;
    nothing is known of the draft."""
    return {
        "sample": 0, "tokens": (), "parents": tuple(range(-1, proposed - 1)), "confidence": (), "drawn": False,
        "kept": tuple(range(proposed)), "path": (), "gained": gained, "near_ties": 0, "size": kept, "expected": None,
        "why": "", "worth": (), "p": (), "q": (), "places": (),
    }  # fmt: skip


def _plain(value: Any, digits: int) -> Any:
    """A row's value as JSON has it."""
    if isinstance(value, tuple):
        return [_plain(each, digits) for each in value]
    if isinstance(value, float):
        return number_of(round(value, digits))
    return int(value) if isinstance(value, bool) else value


def number_of(value: float) -> float | str:
    """A float as JSON has it: infinities and NaN as text."""
    return value if math.isfinite(value) else str(value)


# -- reading ---------------------------------------------------------------------------------------------------------


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
    steps: tuple[StepRecord, ...]
    results: tuple[TracedResult, ...]
    texts: Mapping[int, str]  # tokens by themselves
    margins: Mapping[tuple[int, int], tuple[float, ...]]
    cut: str | None

    def rows(self) -> dict[tuple[int, int], list[tuple[StepRecord, RowRecord]]]:
        """The steps of each (request, sample), in order."""
        rows: dict[tuple[int, int], list[tuple[StepRecord, RowRecord]]] = {}
        for step in self.steps:
            for row in step.rows:
                rows.setdefault((row.request, row.sample), []).append((step, row))
        return rows

    def outputs(self) -> dict[tuple[int, int], list[int]]:
        """The output tokens of each (request, sample)."""
        return {key: [t for _, row in rows for t in row.output] for key, rows in self.rows().items()}


def lines(path: StrPath) -> tuple[dict[str, Any], list[dict[str, Any]], str | None]:
    """A trace's header, its other lines, and what is cut off. Raises ParameterError for any other file or version."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ParameterError(
            f"{path} cannot be read ({error.strerror or error}): give a file that outpace generate --trace wrote"
        ) from error
    *complete, rest = data.split(b"\n")
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
    steps: list[StepRecord] = []
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
    plain = {name: value[name] for name in (*_REQUEST, "params")}
    return TracedRequest(**plain, prompt=tuple(value["prompt"]), pieces=tuple(value.get("pieces", ())))


def _step(line: Mapping[str, Any]) -> StepRecord:
    chunks = tuple(ChunkRecord(*map(int, chunk)) for chunk in line.get("c", ()))
    return StepRecord(line["step"], tuple(map(row_of, line["r"])), chunks, line["s"], tuple(line.get("f", ())))


def _result(value: Mapping[str, Any]) -> TracedResult:
    values: dict[str, Any] = {each.name: value[each.name] for each in fields(TracedResult) if each.name in value}
    for name in ("pieces", "sources", "notes"):
        values[name] = tuple(values.get(name, ()))
    return TracedResult(**values)
