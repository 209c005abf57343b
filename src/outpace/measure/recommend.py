"""Which drafter, and in what size: predicted from plain answers, the cost of a forward by width, and the load.

One pass of the target over its plain answers says what each drafter would have had accepted: under ``coupled`` the
target's token after each beginning of its own answer is the answer's next one, so a draft is accepted as far as it
follows the answer. What a drafter reads of the target (hidden states, likeliest tokens) is known of the answer's own
tokens, but not of rejected nodes: ``recycle``, which learns from those too, is underestimated.

A second pass says what a step costs: by its width, since it verifies tokens that are surely wrong, now few, now many;
and by accepted token, since every fourth round of widths verifies what the answer has next. A drafter's own time is
measured while what it drafts is compared with the answers.

A prediction says how far it may be off: as far as predictions of each part of the measurement differ, and as
predictions were off on machines where they were compared with runs. What is recommended without a run is expected to be
faster than plain decoding by more than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.control import cost as costs
from outpace.control.cost import Cost
from outpace.drafters.base import Drafter, Event, RowView
from outpace.drafters.composed import follow
from outpace.errors import Argument, DrafterError, ParameterError
from outpace.exact.drafts import Drafts, Verdict
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, HostHiddenStates, Model
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.request import StepRecord
    from outpace.engine.results import Result

SIZES = (1, 2, 3, 4, 6, 8, 12)
CARDS = {  # by their makers' data sheets: GB/s, and dense 16-bit TFLOP/s
    "A100": (2039.0, 312.0),
    "H100": (3350.0, 989.0),
    "H200": (4800.0, 989.0),
    "L4": (300.0, 121.0),
    "L40S": (864.0, 362.0),
}
_WARM_UP = 32  # tokens
_FEWEST = 2 * (len(SIZES) + 1)  # steps: two of each width
_WIDE = 64  # tokens: as wide as reading a prompt
_REACHED = 0.6  # share of a data sheet's figures that decoding reaches
_CHUNK = 128  # positions a forward: their logits are held at once
_COLD = 8  # steps of an answer before which the target runs once, so that the caches are as they are between forwards
_PARTS = 6  # of the measurement, each of which is left out once
_OFF = 0.042  # root mean square error of predicted speedups, as a share: the 25 of docs/cli.md's table
_OFF_ELSEWHERE = 0.15  # the same of what a step costs by a table that was not measured in steps (docs/notebook.md)
_SIGMAS = 2.0  # about 19 of 20 predictions
LEAST = 1.02  # measured speedup below which nothing is recommended; what is closer together is as fast


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to predict for: ``cores`` like this one's, ``bandwidth`` in GB/s of its memory, or a ``card`` by name.
    Empty: this one. Raises ParameterError."""

    cores: int | None = None
    bandwidth: float | None = None
    card: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("cores", self.cores), ("bandwidth", self.bandwidth)):
            if value is not None and not value > 0:
                raise ParameterError(Argument(name, value), " is out of range: give more than 0")
        if self.card is not None and self.card not in CARDS:
            raise ParameterError(Argument("card", self.card), f" is not known: use one of {', '.join(CARDS)}")

    def cost(self, here: Cost, model: Model) -> Cost:
        """The cost of a step there: of reading the weights, or of the arithmetic, whichever takes longer. A mixture's
        step reads and computes with the experts that its tokens choose."""
        if self == Machine():
            return here
        info, token = model.info, here.last_slope
        if self.card is not None:
            bandwidth, flops = (_REACHED * figure for figure in CARDS[self.card])
            parameters = info.read_bytes(1) / (4 if info.dtype == "float32" else 2 if "16" in info.dtype else 0.6)
            token, read = 2 * parameters / (flops * 1e12), 2 * parameters / (bandwidth * 1e9)
        else:
            token *= 1.0 if self.cores is None else (model.threads or 1) / self.cores
            read = here.seconds[0] if self.bandwidth is None else info.read_bytes(1) / (self.bandwidth * 1e9)
        faster, wider = read / here.seconds[0], [info.read_bytes(width) / info.read_bytes(1) for width in costs.WIDTHS]
        return Cost(
            costs.WIDTHS, tuple(max(read * more, token * n) for n, more in zip(costs.WIDTHS, wider, strict=True)),
            here.row * faster, here.position * faster, here.position_width * faster,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """A drafter in one size. ``speed``: tokens/s of each reader after the first token; ``speedup``: over plain
    decoding; ``nodes``: drafted a step; ``drafting``: seconds a step; ``memory``: bytes of weights and readers' KV;
    ``may_err``: by which share of the true one ``speedup`` may be off, in 19 of 20 cases."""

    drafter: str
    size: int
    tokens_per_step: float
    nodes: float
    drafting: float
    speed: float
    speedup: float
    memory: int
    may_err: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.drafter} --size {self.size}" if self.size else self.drafter

    @property
    def least(self) -> float:
        """The speedup, if it is as far off as it may be."""
        return self.speedup / (1 + self.may_err)


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain answers, decoded ``readers`` at a time, and what a step costs, drafting aside: by its width, and
    ``accepting`` seconds for each accepted token. ``waiting``: seconds that all answers, once begun, wait for the
    prompts of others. ``without``: the same of all but a part of the measurement, each part left out once, with the
    numbers of the answers that are left."""

    answers: list[Recorded]
    readers: int
    cost: Cost
    accepting: float = 0.0
    waiting: float = 0.0
    without: tuple[tuple[tuple[int, ...], Plain], ...] = ()


class _Widths(Drafter):
    """Proposes, in every width in turn, tokens that are surely wrong, and in every fourth round those of the answer."""

    name = "widths"

    def __init__(self, vocab: int) -> None:
        self._vocab, self._turn = vocab, 0
        self.answers: dict[bytes, I32] = {}  # by the prompt's tokens, once known

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        self._turn += 1
        turns, turn = divmod(self._turn, len(SIZES) + 1)
        most = (0, *SIZES)[turn]
        return Drafts.chains(
            [
                self._chain(view, min(most, size), turns % 4 == 3)
                for view, size in zip(rows, sizes.tolist(), strict=True)
            ]
        )

    def _chain(self, view: RowView, size: int, right: bool) -> I32:
        index = view.chooser.index
        answer = self.answers.get(view.tokens[: len(view.tokens) - index].tobytes())
        if right and answer is not None:
            return answer[index : index + size]
        return ((int(view.tokens[-1]) + 7919 * np.arange(1, size + 1, dtype=np.int32)) % self._vocab).astype(np.int32)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step with drafts of ``_Widths``. ``seconds``: without drafting and context; ``begun``: its rows that had begun
    to answer before; ``reads``: whether it reads a part of a prompt, too."""

    width: int
    accepted: int
    seconds: float
    begun: int
    reads: bool


def plain(
    engine: Engine, prompts: Sequence[I32], params: SamplingParams, readers: int, drafters: Sequence[Drafter]
) -> Plain:
    """The target's own answers to ``prompts`` int32 [P] each, each read once for what ``drafters`` see of the target.

    Raises ParameterError when no answer has two tokens.
    """
    model = engine.model
    layers = tuple(sorted({layer for drafter in drafters for layer in drafter.needs.hidden_layers}))
    ranks = max((drafter.needs.ranks for drafter in drafters), default=0)
    table = costs.of(model)
    widths = _Widths(model.info.vocab_size)
    measuring = type(engine)(model, engine.tokenizer, drafter=widths, size=max(SIZES), max_rows=readers, prefix_rows=0)
    groups: list[list[MeasuredStep]] = []  # steps of the prompts that are answered together
    answering: set[int] = set()  # requests that have begun to
    ended = 0.0

    def on_step(step: StepRecord) -> None:
        nonlocal ended
        begun, ended = ended, time.perf_counter()
        rows = step.rows
        context = sum(row.start * (table.position + table.position_width * (1 + len(row.kept))) for row in rows)
        spent = max(ended - begun - step.seconds["draft"] - context, 1e-9)
        width, accepted = sum(1 + len(row.kept) for row in rows), sum(len(row.path) for row in rows)
        old = sum(row.request in answering for row in rows)
        groups[-1].append(MeasuredStep(width, accepted, spent, old, bool(step.chunks)))
        answering.update(row.request for row in rows)

    prompt_ids = [prompt.tolist() for prompt in prompts]
    for each in (engine, measuring):
        each.generate_many(prompt_ids[:readers], params.with_(min_tokens=0, max_tokens=_WARM_UP), progress=False)
    measuring.on_step = on_step
    results: list[Result] = []
    for start in range(0, len(prompts), readers):  # in turn, so that what disturbs a machine disturbs both
        group = prompt_ids[start : start + readers]
        results += engine.generate_many(group, params, progress=False)
        for prompt, result in zip(prompts[start:], results[start:], strict=False):
            widths.answers[prompt.tobytes()] = np.asarray(result.token_ids, np.int32)
        groups.append([])
        measuring.generate_many(group, params, progress=False)
    steps = [step for each in groups for step in each]
    if len(steps) < _FEWEST or not any(result.stats.decode_seconds for result in results):
        raise ParameterError(f"the answers take {len(steps)} steps, too few to predict from: give more or longer ones")
    answers = []
    for prompt, result in zip(prompts, results, strict=True):
        tokens = np.concatenate([prompt, np.asarray(result.token_ids, np.int32)]).astype(np.int32)
        noise = Noise(result.seed, result.sample)
        answers.append(record(model, tokens, len(prompt), params, noise, layers=layers, ranks=ranks))
    return priced(groups, table, answers, [result.stats.decode_seconds for result in results], readers)


def priced(
    groups: Sequence[Sequence[MeasuredStep]], table: Cost, answers: list[Recorded], spent: Sequence[float], readers: int
) -> Plain:
    """What steps cost, from those of each group of prompts that were answered together, and from the seconds that
    plain ``answers`` ``spent`` each; the same without each part of these."""
    whole = _priced([step for group in groups for step in group], table, answers, spent, readers)
    without = []
    for kept, chosen in _parts(groups, len(answers), readers):
        if any(spent[i] for i in chosen) and any(not step.reads and not step.accepted for step in kept):
            left = _priced(kept, table, [answers[i] for i in chosen], [spent[i] for i in chosen], readers)
            without.append((chosen, left))
    return replace(whole, without=tuple(without))


def _parts(
    groups: Sequence[Sequence[MeasuredStep]], answers: int, readers: int
) -> Iterator[tuple[list[MeasuredStep], tuple[int, ...]]]:
    """The steps and the answers that are left without each of some parts: of whole groups, or, where there is only one,
    of a stretch of its steps."""
    everything = tuple(range(answers))
    if len(groups) == 1:
        for gone in np.array_split(np.arange(len(groups[0])), _PARTS):
            yield [step for i, step in enumerate(groups[0]) if i not in gone], everything
        return
    for gone in np.array_split(np.arange(len(groups)), min(_PARTS, len(groups))):
        chosen = tuple(i for i in everything if i // readers not in gone)
        yield [step for i, each in enumerate(groups) if i not in gone for step in each], chosen


def _priced(
    steps: Sequence[MeasuredStep], table: Cost, answers: list[Recorded], spent: Sequence[float], readers: int
) -> Plain:
    """What ``steps`` cost, all shifted alike so that plain ``answers`` take the seconds that they ``spent``."""
    found = replace(fit(steps, table), answers=answers, readers=readers)
    cost, bare = found.cost, [_plainly(answer) for answer in answers]
    expected = sum(_seconds(bare, found, cost, 0.0)) + found.waiting
    # What a step takes since a drafter in Python proposed, at any width.
    more, least = (expected - sum(spent)) / sum(map(len, bare)), 0.5 * cost.seconds[0]
    return replace(found, cost=replace(cost, seconds=tuple(max(seconds - more, least) for seconds in cost.seconds)))


def fit(steps: Sequence[MeasuredStep], table: Cost) -> Plain:
    """The medians by width, and of the seconds of an accepted token, all raised alike to give the whole time: what
    disturbs a step does not depend on them. No answers yet."""
    decoding = [step for step in steps if not step.reads]
    by_width: dict[int, list[float]] = {}
    for step in decoding:
        if not step.accepted:
            by_width.setdefault(step.width, []).append(step.seconds)
    widths = sorted(by_width)
    each = [float(np.median(by_width[width])) for width in widths]
    medians = np.minimum.accumulate(each[::-1])[::-1].tolist()  # disturbances only add: no width is above a greater one

    def usual(step: MeasuredStep) -> float:
        return float(np.interp(step.width, widths, medians))

    more = [(step.seconds - usual(step)) / step.accepted for step in decoding if step.accepted]
    accepting = max(float(np.median(more)), 0.0) if more else 0.0
    raised = sum(step.seconds for step in decoding) / sum(usual(step) + accepting * step.accepted for step in decoding)
    cost = Cost(tuple(widths), tuple(raised * median for median in medians), 0.0, table.position, table.position_width)
    waiting = sum(step.begun * max(step.seconds - raised * usual(step), 0.0) for step in steps if step.reads)
    return Plain([], 0, cost, raised * accepting, waiting)


def predict(engine: Engine, spec: str, sizes: Sequence[int], recorded: Plain, machine: Machine) -> list[Prediction]:
    """What ``engine``'s drafter would do in steps of each of ``sizes`` nodes. Raises DrafterError for one that cannot
    be known without running it."""
    drafter, model = engine.drafter, engine.model
    answers, readers = recorded.answers, recorded.readers
    bare = [_plainly(answer) for answer in answers]
    longest = max(answer.limit for answer in answers)
    groups = [answers[start : start + readers] for start in range(0, len(answers), readers)]
    steps = dict.fromkeys(sizes, bare)
    for size in filter(None, sizes):
        each = [replayed(drafter, group, size, (i - len(groups)) * readers, model) for i, group in enumerate(groups)]
        steps[size] = [row for group in each for row in group]
    own_forwards = bool(drafter.needs.hidden_layers or drafter.cost.levels is not None)

    def speeds(measured: Plain, chosen: Sequence[int]) -> dict[int, tuple[float, float, float]]:
        """By size: seconds of drafting a step, tokens/s, and the speed over plain decoding's."""
        there = machine.cost(measured.cost, model)
        waiting = measured.waiting * there.width(_WIDE) / measured.cost.width(_WIDE)
        slower = there.seconds[0] / measured.cost.seconds[0] if own_forwards else 1.0
        taken = {size: [rows[i] for i in chosen] for size, rows in steps.items()}
        drafting = drafting_seconds({size: [step for row in rows for step in row] for size, rows in taken.items()})
        plainly = [bare[i] for i in chosen]
        slow = _later(plainly) / (sum(_seconds(plainly, measured, there, 0.0)) + waiting)
        found = {}
        for size, rows in taken.items():
            own = slower * drafting[size]
            speed = _later(rows) / (sum(_seconds(rows, measured, there, own)) + waiting)
            found[size] = own, speed, speed / slow
        return found

    whole = speeds(recorded, range(len(answers)))
    parts = [speeds(left, chosen) for chosen, left in recorded.without]
    off = _OFF if machine == Machine() else _OFF_ELSEWHERE
    found = []
    for size, (drafting, speed, speedup) in whole.items():
        taken = [step for row in steps[size] for step in row]
        gained, nodes = (sum(getattr(step, name) for step in taken) / len(taken) for name in ("gained", "nodes"))
        kv = model.kv.bytes_for(longest) + (drafter.growth(0, longest) if size else 0)
        memory = model.info.weight_bytes + readers * kv
        may_err = _SIGMAS * math.hypot(off, _spread([part[size][2] for part in parts])) if size else 0.0
        found.append(Prediction(spec, size, gained, nodes, drafting, speed, speedup, memory, may_err))
    return found


def _spread(ratios: Sequence[float]) -> float:
    """The standard error, as a share, of a ratio that is ``ratios`` where a part of the data is left out (jackknife:
    Tukey 1958)."""
    logs = np.log(ratios)
    return math.sqrt((len(logs) - 1) * float(logs.var())) if len(logs) > 1 else 0.0


def best_predicted(found: Sequence[Prediction]) -> Prediction | None:
    """The setting that is the fastest if each is as slow as it may be; None: plain decoding is."""
    drafting = [each for each in found if each.size and each.least > 1]
    return max(drafting, key=lambda each: each.least, default=None)


@dataclass(frozen=True, slots=True)
class Ran:
    """A setting as it was measured beside plain decoding. ``speedup``: of its pooled speed; ``low``: the lower end of
    its 95 % interval; ``adaptive``: whether each step drafts as much as pays."""

    name: str
    speedup: float
    low: float
    adaptive: bool


def best_measured(ran: Sequence[Ran], again: float = 1.0) -> Ran | None:
    """The fastest of those that were faster than plain decoding for sure, and than plain decoding again, which had
    ``again`` times its own speed; an adaptive one before what is as fast, since it is plain decoding where the text is
    another one."""
    sure = [each for each in ran if each.low > 1 and each.speedup >= LEAST * max(again, 1.0)]
    best = max(sure, key=lambda each: each.speedup, default=None)
    near = [each for each in sure if best is not None and each.adaptive and each.speedup * LEAST >= best.speedup]
    return max(near, key=lambda each: each.speedup, default=best)


def _plainly(answer: Recorded) -> list[Taken]:
    return [Taken(length, 0, 1, 0.0, False) for length in range(answer.prompt, len(answer.tokens))]


def _later(answers: Sequence[Sequence[Taken]]) -> int:
    """Tokens after each answer's first delta."""
    return sum(step.gained for steps in answers for step in steps[1:])


def _seconds(answers: Sequence[Sequence[Taken]], recorded: Plain, cost: Cost, drafting: float) -> list[float]:
    """Seconds from each answer's first delta to its last, as many of them stepping together as in ``recorded``."""
    found = []
    for start in range(0, len(answers), recorded.readers):
        group = [list(steps) for steps in answers[start : start + recorded.readers]]
        spent = [0.0] * len(group)
        for turn in range(max(map(len, group))):
            rows = [i for i, steps in enumerate(group) if turn < len(steps)]
            now = [group[i][turn] for i in rows]
            seconds = cost.forward([1 + step.nodes for step in now], [step.length for step in now])
            seconds += drafting * len(rows) + recorded.accepting * sum(step.gained - 1 for step in now)
            for i in rows if turn else ():
                spent[i] += seconds
        found += spent
    return found


def predictions(
    engines: Mapping[str, Engine], recorded: Plain, machine: Machine, sizes: Sequence[int] = SIZES,
    done: Callable[[int], None] = lambda n: None,
) -> tuple[list[Prediction], dict[str, str]]:  # fmt: skip
    """All drafters, each in every size or in its own, the fastest first and plain decoding among them; and why others
    are missing."""
    found: list[Prediction] = []
    missing: dict[str, str] = {}
    for spec, engine in engines.items():
        own = engine.options.size
        try:
            asked = (0,) if engine.drafter.name == "none" else sizes if own == "auto" else (own,)
            found += predict(engine, spec, asked, recorded, machine)
        except DrafterError as error:
            missing[spec] = str(error)
        done(1)
    return sorted(found, key=lambda each: -each.speed), missing


# -- what a drafter would have had accepted --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plain answer. ``tokens`` int32 [L]: the prompt's ``prompt`` ones, then the answer; ``limit``: the most that the
    sequence could have had. ``states`` float32 [L - 1, T, H] of ``layers``; ``likeliest`` int32 [L - 1, R]."""

    tokens: I32
    prompt: int
    limit: int
    params: SamplingParams
    noise: Noise
    layers: tuple[int, ...]
    states: F32
    likeliest: I32


@dataclass(frozen=True, slots=True)
class Taken:
    """A row's step as it would have been: after ``length`` committed tokens, ``nodes`` drafted in ``seconds`` (a row's
    share), of which ``gained`` - 1 were accepted. ``cold``: whether the target had swept the caches before."""

    length: int
    nodes: int
    gained: int
    seconds: float
    cold: bool


def record(
    model: Model,
    tokens: I32,
    prompt: int,
    params: SamplingParams,
    noise: Noise,
    *,
    layers: tuple[int, ...] = (),
    ranks: int = 0,
) -> Recorded:
    """Read a plain answer once, keeping the outputs of ``layers`` and the ``ranks`` likeliest tokens after each one.

    Raises MemoryLimitError. The row that it takes is free again.
    """
    states, likeliest = (
        [np.zeros((0, len(layers), model.info.hidden_size), np.float32)],
        [np.zeros((0, ranks), np.int32)],
    )
    row = model.kv.alloc()
    try:
        for at in range(0, len(tokens) - 1 if layers or ranks else 0, _CHUNK):
            piece = tokens[at : min(at + _CHUNK, len(tokens) - 1)]
            here = np.arange(len(piece), dtype=np.int32)
            out = model.forward(Batch.pack([row], [piece], [at], [ranks > 0], hidden_layers=layers))
            if layers:
                states.append(out.hidden_states(here).numpy().copy())
            if ranks:
                likeliest.append(np.argsort(-out.logits(here), axis=1, kind="stable")[:, :ranks].astype(np.int32))
    finally:
        model.kv.free(row)
    longest = model.info.max_length
    limit = longest if params.max_tokens is None else min(prompt + params.max_tokens, longest)
    return Recorded(tokens, prompt, limit, params, noise, layers, np.concatenate(states), np.concatenate(likeliest))


def replayed(
    drafter: Drafter, answers: Sequence[Recorded], size: int, request: int, model: Model | None = None
) -> list[list[Taken]]:
    """The steps of each of the answers, decoded together, if ``drafter`` were asked for ``size`` nodes in each, as the
    engine asks it. ``request``: the first answer's id; the others' ids follow.

    ``model``: the target, to run between the first drafts (None: only what is accepted matters). Raises DrafterError
    for a drafter that needs the target itself, or its choices after rejected nodes.
    """
    if drafter.needs.choices or drafter.needs.target_rows:
        raise DrafterError(f"{drafter.name} drafts with the target's own forwards: its acceptance has to be measured")
    rows = [_Row(drafter, i, request + i, answer) for i, answer in enumerate(answers)]
    try:
        drafter.observe([row.event(1, row.length, None) for row in rows])
        step = 0
        while going := [row for row in rows if row.length < len(row.answer.tokens)]:
            _step(drafter, going, size, model if step < _COLD else None, first=step == 0)
            step += 1
    finally:
        for row in rows:
            drafter.release(row.number, row.answer.tokens)
    return [row.taken for row in rows]


class _Row:
    """An answer on its way. ``length``: committed tokens; the last token of a prompt is pending."""

    def __init__(self, drafter: Drafter, number: int, request: int, answer: Recorded) -> None:
        self.number, self.answer, self.length = number, answer, answer.prompt
        self.taken: list[Taken] = []
        self._drafter, self._request = drafter, request
        self._columns = [answer.layers.index(layer) for layer in drafter.needs.hidden_layers]
        self._chooser = Chooser.start(answer.params, answer.noise, (), answer.tokens[: answer.prompt])

    @property
    def room(self) -> int:
        """Nodes that may be drafted."""
        return self.answer.limit - self.length - 1

    def event(self, start: int, end: int, verdict: Verdict | None) -> Event:
        answer, columns = self.answer, self._columns
        states = HostHiddenStates(answer.states[start - 1 : end - 1, columns]) if columns else None
        return Event(self.number, start, answer.tokens[start:end], verdict, states)

    def view(self) -> RowView:
        answer = self.answer
        chooser = self._chooser.after(answer.tokens[answer.prompt : self.length].tolist())
        return RowView(
            self.number, self._request, answer.tokens[: self.length], answer.limit, chooser, "coupled",
            drafter=self._drafter.name, cost=self._drafter.cost,
        )  # fmt: skip


def _step(drafter: Drafter, rows: Sequence[_Row], size: int, model: Model | None, *, first: bool) -> None:
    """One step of rows that are not whole yet; ``model`` runs before."""
    if model is not None:
        sweep(model)
    asked = [row for row in rows if row.room > 0 and size]
    views = [row.view() for row in asked]
    begun = time.perf_counter()
    drafts = drafter.propose(views, np.array([min(size, row.room) for row in asked], np.int32)) if asked else None
    spent = time.perf_counter() - begun
    found = {} if drafts is None else {row.number: drafts.row(i) for i, row in enumerate(asked)}
    events, taken = [], []
    for row in rows:
        tokens, length, draft = row.answer.tokens, row.length, found.get(row.number)
        path = np.zeros(0, np.int32) if draft is None else follow(draft, tokens[length:])
        row.length = end = min(length + len(path) + 1, len(tokens))
        if drafter.needs.ranks:
            known = row.answer.likeliest[length - 1 : end - 1, : drafter.needs.ranks]
            drafter.rank(row.number, tokens[length - 1 : end - 1], np.ascontiguousarray(known))
        if end < len(tokens):
            events.append(row.event(length, end, Verdict(tokens[length:end], path)))
        taken.append((length, 0 if draft is None else len(draft), end - length))
    begun = time.perf_counter()
    drafter.observe(events)
    spent += time.perf_counter() - begun
    for row, facts in zip(rows, taken, strict=True):
        row.taken.append(Taken(*facts, spent / len(rows), model is not None and not first))


def sweep(model: Model) -> None:
    """A forward of one token in a row of its own: weights pass through the caches as between two steps."""
    row = model.kv.alloc()
    try:
        model.forward(Batch.pack([row], [np.zeros(1, np.int32)], [0], [False]))
    finally:
        model.kv.free(row)


def drafting_seconds(steps: Mapping[int, Sequence[Taken]]) -> dict[int, float]:
    """Seconds of drafting a row's step by size, once the prompt is read: medians of the steps that the target ran
    before, all raised alike to give the whole time, since what disturbs a step does not depend on the size."""
    cold = {size: [step.seconds for step in taken if step.cold] for size, taken in steps.items()}
    medians = {size: float(np.median(seconds)) if seconds else 0.0 for size, seconds in cold.items()}
    usual = sum(medians[size] * len(seconds) for size, seconds in cold.items())
    raised = sum(map(sum, cold.values())) / usual if usual else 1.0
    return {size: raised * median for size, median in medians.items()}
