"""``--trace``: every step of a run as JSON lines, written beside it and never in its way.

One line each: the header, a request when it is first seen, the texts of tokens when they first occur, every step, every
result. A line is written whole or not at all, all lines of a step with one write.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from outpace.common.files import StrPath, check_writable
from outpace.engine.text import Decoder, TextReader, pieces
from outpace.errors import ParameterError
from outpace.exact.drafts import Draft
from outpace.exact.noise import Noise
from outpace.measure.compare import promises_tokens
from outpace.measure.facts import Described, facts
from outpace.measure.scores import margins
from outpace.measure.tracefile import VERSION, number
from outpace.models.text.token_bytes import TokenBytes
from outpace.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outpace.engine.request import Request, StepRecord
    from outpace.engine.results import Result
    from outpace.models.base import Model
    from outpace.models.options import LoadOptions

log = logging.getLogger(__name__)

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Spells(Decoder, Protocol):
    """The part of a tokenizer that a trace needs, so that whoever reads it needs none."""

    def token(self, token_id: int) -> str | None: ...


class Traceable(Described, Protocol):
    """An engine, as far as tracing goes. It calls ``on_step`` after every step and ``on_result`` when a sample has
    ended, however it did: ``request`` still knows the request then, and the record of its last step comes after."""

    on_step: Callable[[StepRecord], None] | None
    on_result: Callable[[Result], None] | None

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def request(self, request: int) -> Request: ...


@contextmanager
def tracing(
    engine: Traceable, path: StrPath, *, load: LoadOptions | None = None, scores: bool = False
) -> Iterator[TraceWriter]:
    """Trace what ``engine`` does inside into ``path``. ``load``: how its model was loaded. ``scores``: at the end,
    compute by how much each output token won (one more prefill of every answer), for ``outpace explain``.

    Raises ParameterError when ``path`` cannot be written; after that, no fault of tracing reaches the engine.
    """
    if engine.on_step is not None or engine.on_result is not None:
        raise ParameterError("this engine is being watched already: end that trace first")
    writer = TraceWriter(path, facts(engine, load), engine.tokenizer, engine.request)
    engine.on_step, engine.on_result = writer.step, writer.result
    try:
        yield writer
    finally:
        engine.on_step = engine.on_result = None
        if scores:
            writer.score(engine.model, engine.tokenizer)
        writer.close()


class TraceWriter:
    """Writes a trace. ``facts``: what the header says; ``tokenizer``: for the texts of tokens (None: there are none);
    ``request``: looks a request up by its id.

    After the constructor nothing raises: a full disk, or any other fault, ends tracing with one warning, and what was
    written until then is a trace.
    """

    def __init__(
        self,
        path: StrPath,
        facts: Mapping[str, Any],
        tokenizer: Spells | None = None,
        request: Callable[[int], Request] | None = None,
    ) -> None:
        self.path = Path(path)
        check_writable(self.path)
        self._tokenizer, self._request = tokenizer, request
        self._spelling = None if tokenizer is None else Spelling(tokenizer)
        self._requests: dict[int, Request] = {}
        self._outputs: dict[tuple[int, int], tuple[int, ...]] = {}
        self._spelled: set[int] = set()
        self._steps = self._whole = 0  # steps written; bytes of whole lines
        self._file: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._write([{"trace": VERSION, **facts}])

    def add(self, request: Request) -> None:
        """Write a request, once."""
        self._guarded(lambda: self._seen([request]))

    def step(self, record: StepRecord) -> None:
        """Write a step, and before it the requests and token texts that are new in it."""
        self._guarded(lambda: self._step(record))

    def result(self, result: Result) -> None:
        """Write how a sample ended."""
        self._guarded(lambda: self._result(result))

    def score(self, model: Model, tokenizer: Tokenizer | None) -> None:
        """Compute and write every finished answer's margins. The model's KV must have room for a row."""
        self._guarded(lambda: self._score(model, tokenizer))

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
        ids = dict.fromkeys([*record.requests, *(chunk.request for chunk in record.chunks)])
        new = [] if self._request is None else [self._request(i) for i in ids if i not in self._requests]
        self._seen(new)
        rows = rows_of(record)
        line: dict[str, Any] = {
            "step": record.index,
            "s": {phase: round(spent, 7) for phase, spent in record.seconds.items()},
            "r": rows,
        }
        if record.chunks:
            line["c"] = [[c.request, c.sample, c.row, c.start, c.count] for c in record.chunks]
        if record.faults:
            line["f"] = list(record.faults)
        self._write([*self._texts(tokens_of(rows)), line])
        self._steps += 1

    def _seen(self, requests: Sequence[Request]) -> None:
        lines = []
        for request in requests:
            if request.id in self._requests:
                continue
            self._requests[request.id] = request
            lines.append({"request": request_line(request, self._tokenizer)})
        self._write(lines)

    def _result(self, result: Result) -> None:
        if self._request is not None and result.request not in self._requests:
            self._seen([self._request(result.request)])  # it ended before its first step
        if not result.error:
            self._outputs[result.request, result.sample] = result.token_ids
        self._write([{"result": result_line(result, self._requests.get(result.request), self._tokenizer)}])

    def _score(self, model: Model, tokenizer: Tokenizer | None) -> None:
        for (id_, sample), output in self._outputs.items():
            request = self._requests.get(id_)
            if request is None or not output or not promises_tokens(request.acceptance, request.params):
                continue  # what is drawn by rejection is no best score
            found = margins(model, tokenizer, request.prompt, output, request.params, Noise(request.seed, sample))
            self._write([{"margins": [number(float(f"{m:.6g}")) for m in found], "q": id_, "n": sample}])

    def _texts(self, used: set[int]) -> list[dict[str, Any]]:
        new = sorted(used - self._spelled)
        if self._spelling is None or not new:
            return []
        self._spelled.update(new)
        return [self._spelling.line(new)]

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
        if self._file is None or not lines:
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


def request_line(request: Request, tokenizer: Spells | None) -> dict[str, Any]:
    """A request as a trace has it."""
    prompt = request.prompt.tolist()
    line = {
        "id": request.id,
        "prompt": prompt,
        "params": request.params.to_dict(),
        "seed": request.seed,
        "limit": request.limit,
        "size": request.size,
        "adaptive": request.adaptive,
        "acceptance": request.acceptance,
        "drafter": request.drafter,
        "reuse_prefix": request.reuse_prefix,
        "priority": request.priority,
        "deadline": request.deadline,
    }
    if tokenizer is not None:
        line["pieces"] = pieces(TextReader(tokenizer, skip_special=False), prompt)
    return line


def result_line(result: Result, request: Request | None, tokenizer: Spells | None) -> dict[str, Any]:
    """A result as a trace has it; ``request``: the one that it is of, where that is known."""
    line: dict[str, Any] = {
        "request": result.request,
        "sample": result.sample,
        "text": result.text,
        "pieces": [] if tokenizer is None else _cut(_pieces(result, request, tokenizer), result.text),
        "sources": list(result.sources),
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "stats": result.stats.to_dict(),
    }
    if result.error:
        line["error"] = result.error
    if result.notes:
        line["notes"] = list(result.notes)
    return line


def tokens_of(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """The tokens that a step's rows name."""
    return {token for row in rows for token in (*row.get("t", ()), *row["v"])}


def rows_of(record: StepRecord) -> list[dict[str, Any]]:
    """A step's rows as a trace has them: keys whose value a reader would assume are left out."""
    proposed, kept, verdicts = record.proposed, record.kept, record.verdicts
    tokens, widths = proposed.tokens.tolist(), proposed.widths.tolist()
    parents = None if proposed.parents is None else proposed.parents.tolist()
    confidence = None if proposed.confidence is None else proposed.confidence.tolist()
    source = None if proposed.source is None else proposed.source.tolist()
    gained_tokens, accepted, path = verdicts.tokens.tolist(), verdicts.accepted.tolist(), verdicts.path.tolist()
    rows = []
    for i, (request, sample) in enumerate(zip(record.requests, record.samples, strict=True)):
        k, a, decision = widths[i], max(accepted[i], 0), record.decisions[i]
        verdict = gained_tokens[i][: a + 1]
        row: dict[str, Any] = {"q": request, "w": record.rows[i], "a": record.starts[i], "v": verdict}
        if sample:
            row["n"] = sample
        nodes = list(range(k))
        if k:
            row["t"] = tokens[i][:k]
            if parents is not None and parents[i][:k] != list(range(-1, k - 1)):
                row["p"] = parents[i][:k]
            if confidence is not None:
                row["c"] = _rounded(confidence[i][:k])
            if proposed.sources:
                row["o"] = list(proposed.sources)
            if source is not None and any(source[i][:k]):
                row["s"] = source[i][:k]
            if proposed.q is not None:
                row["d"] = 1
            if kept.widths[i] < k:
                row["k"] = nodes = _kept(proposed.row(i), kept.row(i))
        if a:
            row["h"] = [nodes[node] for node in path[i][:a]]
        if record.gained[i] != len(verdict):
            row["g"] = record.gained[i]
        if record.near_ties[i]:
            row["m"] = record.near_ties[i]
        if decision.size != len(nodes):
            row["z"] = decision.size
        if decision.expected is not None:
            row["e"] = number(round(decision.expected, 4))
        if decision.why:
            row["y"] = decision.why
        if decision.worth:
            row["u"] = _rounded(decision.worth)
        rows.append(row)
    return rows


def _rounded(values: Sequence[float]) -> list[float] | list[float | str]:
    out = [round(value, 4) for value in values]
    return out if math.isfinite(sum(out)) else [number(value) for value in out]


def _kept(proposed: Draft, kept: Draft) -> list[int]:
    """Which nodes of ``proposed`` are the nodes of ``kept``: those in their order, with parents renumbered."""
    nodes: list[int] = []
    at = 0
    for token, parent in zip(kept.tokens, kept.parents, strict=True):
        above = nodes[parent] if parent >= 0 else -1
        while proposed.tokens[at] != token or proposed.parents[at] != above:
            at += 1
        nodes.append(at)
        at += 1
    return nodes


def _pieces(result: Result, request: Request | None, tokenizer: Spells) -> list[str]:
    """The answer's text by token, as it was read."""
    if request is None:
        return pieces(TextReader(tokenizer), result.token_ids)
    reader = TextReader(tokenizer, skip_special=request.params.skip_special_tokens, after=request.prompt)
    return pieces(reader, result.token_ids)


def _cut(texts: list[str], whole: str) -> list[str]:
    """The pieces as far as ``whole`` goes: a stop string ends it within a token, a stop token is no part of it."""
    left, out = whole, []
    for text in texts:
        if not (text.startswith(left) or left.startswith(text)):
            return []  # decoded in another way: no text is better than a wrong one
        out.append(text[: len(left)])
        left = left[len(text) :]
    if out:
        out[-1] += left  # a stop string that stays in the text, though it spells what is not shown
    return out


class Spelling:
    """A token by itself: its text, its bytes where it is no whole character, or the vocabulary's spelling."""

    def __init__(self, tokenizer: Spells) -> None:
        known = isinstance(tokenizer, Tokenizer) and tokenizer.spelling is not None
        self._tokenizer, self._code = tokenizer, TokenBytes(cast(Tokenizer, tokenizer)) if known else None

    def line(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The line of a trace that spells these tokens."""
        return {"texts": [[token, self.of(token)] for token in tokens]}

    def of(self, token: int) -> str:
        """One token."""
        text = self._tokenizer.decode([token], skip_special=False)
        spelled = self._tokenizer.token(token) or f"[{token}]"
        if "\ufffd" in text and self._code is not None and self._code.of(token):
            return f"⟨{self._code.of(token).hex()}⟩"
        if not text or "\ufffd" in text:
            return spelled
        return " " + text if spelled.startswith("▁") and not text.startswith(" ") else text
