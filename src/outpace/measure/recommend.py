"""Which drafter, and in what size: predicted from plain answers, the cost of a forward by width, and the load.

One pass of the target over its plain answers says what each drafter would have had accepted (``measure/accepted.py``).
The same pass says what a step costs by its width, since it verifies tokens that are surely wrong, now few, now many.
A drafter's own time is measured while what it drafts is compared with the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outpace.control import cost as costs
from outpace.control.cost import Cost
from outpace.drafters.base import Drafter, RowView
from outpace.errors import Argument, DrafterError, ParameterError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.measure.accepted import Recorded, Taken, drafting_seconds, record, replayed
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.common.arrays import I32
    from outpace.engine.engine import Engine
    from outpace.engine.request import StepRecord
    from outpace.engine.results import Result
    from outpace.models.base import Model

SIZES = (1, 2, 3, 4, 6, 8, 12)
CARDS = {  # by their makers' data sheets: GB/s, and dense 16-bit TFLOP/s
    "A100": (2039.0, 312.0),
    "H100": (3350.0, 989.0),
    "H200": (4800.0, 989.0),
    "L4": (300.0, 121.0),
    "L40S": (864.0, 362.0),
}
_WARM_UP = 32  # tokens
_FEWEST = 4 * len(SIZES)  # steps
_REACHED = 0.6  # share of a data sheet's figures that decoding reaches


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
        """The cost of a step there: of reading all weights, or of the arithmetic, whichever takes longer."""
        if self == Machine():
            return here
        info, token = model.info, here.last_slope
        if self.card is not None:
            bandwidth, flops = (_REACHED * figure for figure in CARDS[self.card])
            parameters = info.weight_bytes / (4 if info.dtype == "float32" else 2 if "16" in info.dtype else 0.6)
            token, read = 2 * parameters / (flops * 1e12), info.weight_bytes / (bandwidth * 1e9)
        else:
            token *= 1.0 if self.cores is None else (getattr(model, "threads", None) or 1) / self.cores
            read = here.seconds[0] if self.bandwidth is None else info.weight_bytes / (self.bandwidth * 1e9)
        faster = read / here.seconds[0]
        return Cost(
            costs.WIDTHS, tuple(max(read, token * width) for width in costs.WIDTHS),
            here.row * faster, here.position * faster, here.position_width * faster,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """A drafter in one size. ``speed``: tokens/s of each reader after the first token; ``speedup``: over plain
    decoding; ``nodes``: drafted a step; ``drafting``: seconds a step; ``memory``: bytes of weights and readers' KV."""

    drafter: str
    size: int
    tokens_per_step: float
    nodes: float
    drafting: float
    speed: float
    speedup: float
    memory: int

    @property
    def name(self) -> str:
        return f"{self.drafter} --size {self.size}" if self.size else self.drafter


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain answers, decoded ``readers`` at a time, and what a step costs, drafting aside, by its width."""

    answers: list[Recorded]
    readers: int
    cost: Cost


class _Widths(Drafter):
    """Proposes what nobody would say, in every width in turn, so that an answer's own steps tell what a width costs."""

    name = "widths"

    def __init__(self, vocab: int) -> None:
        self._vocab, self._turn = vocab, 0

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        self._turn += 1
        most = (0, *SIZES)[self._turn % (len(SIZES) + 1)]
        return Drafts.chains(
            [
                (int(view.tokens[-1]) + 7919 * np.arange(1, min(most, size) + 1, dtype=np.int32)) % self._vocab
                for view, size in zip(rows, sizes.tolist(), strict=True)
            ]
        )


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
    measuring = type(engine)(
        model,
        engine.tokenizer,
        drafter=_Widths(model.info.vocab_size),
        size=max(SIZES),
        max_rows=readers,
        prefix_rows=0,
    )
    steps: list[tuple[int, float]] = []  # width, and seconds without drafting and context
    ended = 0.0

    def on_step(step: StepRecord) -> None:
        nonlocal ended
        begun, ended = ended, time.perf_counter()
        if step.chunks:
            return
        widths = step.kept.widths.tolist()
        context = sum(
            n * (table.position + table.position_width * (1 + w)) for n, w in zip(step.starts, widths, strict=True)
        )
        steps.append((len(step) + sum(widths), max(ended - begun - step.seconds["draft"] - context, 1e-9)))

    prompt_ids = [prompt.tolist() for prompt in prompts]
    measuring.generate_many(prompt_ids[:readers], params.with_(min_tokens=0, max_tokens=_WARM_UP), progress=False)
    measuring.on_step = on_step
    engine.generate_many(prompt_ids[:readers], params.with_(min_tokens=0, max_tokens=_WARM_UP), progress=False)
    results: list[Result] = []
    for start in range(0, len(prompts), readers):  # in turn, so that what disturbs a machine disturbs both
        group = prompt_ids[start : start + readers]
        measuring.generate_many(group, params, progress=False)
        results += engine.generate_many(group, params, progress=False)
    if len(steps) < _FEWEST or not any(result.stats.decode_seconds for result in results):
        raise ParameterError(f"the answers take {len(steps)} steps, too few to predict from: give more or longer ones")
    answers = []
    for prompt, result in zip(prompts, results, strict=True):
        tokens = np.concatenate([prompt, np.asarray(result.token_ids, np.int32)]).astype(np.int32)
        noise = Noise(result.seed, result.sample)
        answers.append(record(model, tokens, len(prompt), params, noise, layers=layers, ranks=ranks))
    cost = _fit(steps, table)
    bare = [_plainly(answer) for answer in answers]
    expected, spent = sum(_seconds(bare, readers, cost, 0.0)), sum(result.stats.decode_seconds for result in results)
    more = (expected - spent) / sum(
        map(len, bare)
    )  # what a step takes since a drafter in Python proposed, at any width
    least = 0.5 * cost.seconds[0]
    cost = replace(cost, seconds=tuple(max(seconds - more, least) for seconds in cost.seconds))
    return Plain(answers, readers, cost)


def _fit(steps: Sequence[tuple[int, float]], table: Cost) -> Cost:
    """The medians by width, all raised alike to give the whole time: what disturbs a step does not depend on it."""
    by_width: dict[int, list[float]] = {}
    for width, seconds in steps:
        by_width.setdefault(width, []).append(seconds)
    widths = sorted(by_width)
    medians = np.array([np.median(by_width[width]) for width in widths])
    raised = sum(seconds for _, seconds in steps) / sum(
        median * len(by_width[width]) for width, median in zip(widths, medians.tolist(), strict=True)
    )
    return Cost(tuple(widths), tuple((raised * medians).tolist()), 0.0, table.position, table.position_width)


def predict(engine: Engine, spec: str, size: int, recorded: Plain, machine: Machine) -> Prediction:
    """What ``engine``'s drafter would do in steps of ``size`` nodes. Raises DrafterError for one that cannot be known
    without running it."""
    drafter, model = engine.drafter, engine.model
    here = recorded.cost
    there = machine.cost(here, model)
    bare = [_plainly(answer) for answer in recorded.answers]
    steps = bare
    if size:
        steps = [replayed(drafter, answer, size, -1 - i, model) for i, answer in enumerate(recorded.answers)]
    every = [step for answer in steps for step in answer]
    drafting = drafting_seconds(every)
    if drafter.needs.hidden_layers or drafter.cost.levels is not None:  # forwards of its own, in a like proportion
        drafting *= there.seconds[0] / here.seconds[0]
    speed = _later(steps) / sum(_seconds(steps, recorded.readers, there, drafting))
    slow = _later(bare) / sum(_seconds(bare, recorded.readers, there, 0.0))
    longest = max(answer.limit for answer in recorded.answers)
    gained, nodes = (sum(getattr(step, name) for step in every) / len(every) for name in ("gained", "nodes"))
    kv = model.kv.bytes_for(longest) + (drafter.growth(0, longest) if size else 0)
    return Prediction(
        spec, size, gained, nodes, drafting, speed, speed / slow, model.info.weight_bytes + recorded.readers * kv
    )  # fmt: skip


def _plainly(answer: Recorded) -> list[Taken]:
    return [Taken(length, 0, 1, 0.0, False) for length in range(answer.prompt, len(answer.tokens))]


def _later(answers: Sequence[Sequence[Taken]]) -> int:
    """Tokens after each answer's first delta."""
    return sum(step.gained for steps in answers for step in steps[1:])


def _seconds(answers: Sequence[Sequence[Taken]], readers: int, cost: Cost, drafting: float) -> list[float]:
    """Seconds from each answer's first delta to its last, ``readers`` of them stepping together."""
    found = []
    for start in range(0, len(answers), readers):
        group = [list(steps) for steps in answers[start : start + readers]]
        spent = [0.0] * len(group)
        for turn in range(max(map(len, group))):
            rows = [i for i, steps in enumerate(group) if turn < len(steps)]
            now = [group[i][turn] for i in rows]
            seconds = cost.forward([1 + step.nodes for step in now], [step.length for step in now])
            seconds += drafting * len(rows)
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
            found += [predict(engine, spec, size, recorded, machine) for size in asked]
        except DrafterError as error:
            missing[spec] = str(error)
        done(1)
    return sorted(found, key=lambda each: -each.speed), missing
