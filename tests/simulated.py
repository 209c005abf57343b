"""A simulated machine, drafters and texts, on a clock of their own, and oracles that know what policies must learn.

Rewards are drawn by position before anybody decides, so every policy and every fixed size meets the same luck. What a
policy sees has noise, stalls and drift; what it is judged by is the true mean of every step that it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from outpace import _native
from outpace.common.arrays import F64
from outpace.control.adaptive import AUTO_SIZE, Adaptive, Decision
from outpace.control.cost import Cost
from outpace.drafters.base import DraftCost, RowView
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.native.output import describe
from outpace.params import SamplingParams

MOST, DEEPEST = AUTO_SIZE, 8
CPU = Cost((1, 2, 4, 8, 16, 32), (1.0, 1.05, 1.15, 1.5, 2.5, 4.9), 0.02, 2e-5, 3e-5)
FREE = Cost((1, 64), (1.0, 1.0 + 1e-6))
DEAR = Cost((1, 64), (1.0, 64.0))  # verifying a node costs a step
ONE_CORE = Cost((1, 2, 4, 8, 16, 32, 64), (13.5e-3, 14.6e-3, 17.6e-3, 24.5e-3, 41e-3, 78e-3, 150e-3), 5e-4)
TWO_CORES = Cost((1, 2, 4, 8, 16, 32, 64), (8.5e-3, 8.6e-3, 9.6e-3, 14e-3, 24e-3, 48e-3, 94e-3), 3e-4)
MACHINES = {"cpu": CPU, "one core": ONE_CORE, "two cores": TWO_CORES}
Disturbed = Callable[[int, float, float], tuple[float, float]]


@dataclass
class Machine:
    """What steps take. ``drift``: the speed's factor by step; ``ask``: a row that is asked; ``level``: a level.

    ``disturbed``: plain steps that a policy sees drafting and all else take, by step and what they take in truth."""

    cost: Cost
    noise: float = 0.06
    drift: Callable[[int], float] = lambda step: 1.0
    ask: float = 0.0  # in plain steps of one row
    level: float = 0.0
    disturbed: Disturbed = lambda _step, draft, body: (draft, body)

    def body(self, rows: int, nodes: int, context: float, step: int, prefill: int = 0) -> float:
        cost, n = self.cost, rows + nodes + prefill
        bare = cost.width(n) + cost.row * (rows - 1)
        bare += rows * context * cost.position + (rows + nodes) * context * cost.position_width
        return bare * self.drift(step)

    def experts(self, tokens: int, step: int) -> float:
        """That a mixture's forward of so many tokens reads; 0: it is none."""
        return 0.0

    def draft(self, asked: int, levels: int) -> float:
        return (self.ask * asked + self.level * levels) * self.cost.width(1)

    def seen(self, seconds: float, rng: np.random.Generator) -> float:
        return seconds * float(np.exp(self.noise * rng.standard_normal()))


def slowed(factor: F64, extra: F64 | float = 0.0) -> Disturbed:
    """By step: so many times as slow, and stopped for so many plain steps."""
    both = [(float(slow), float(more)) for slow, more in np.broadcast(factor, extra)]
    return lambda step, draft, body: (both[step][0] * draft, both[step][0] * body + both[step][1])


def stolen(seed: int, share: float, longest: int = 200, steps: int = 20_000) -> Disturbed:
    """Stolen processor time: bursts of 1 to ``longest`` steps, 1.5 to 10 times as slow, a share of all steps."""
    rng, factor = np.random.default_rng(seed), np.ones(steps)
    pause = (longest - 1) / np.log(longest) * (1 - share) / share
    at = int(rng.exponential(pause))
    while at < steps:
        length = int(np.exp(rng.uniform(0, np.log(longest))) + 0.5)
        factor[at : at + length] = np.exp(rng.uniform(np.log(1.5), np.log(10)))
        at += length + 1 + int(rng.exponential(pause))
    return slowed(factor)


def stopped(seed: int, rarest: int = 200, steps: int = 20_000) -> Disturbed:
    """A process that is stopped for 6 to 59 plain steps, every 20 to ``rarest`` steps, and then has cold caches."""
    rng, factor, extra, at = np.random.default_rng(seed), np.ones(steps), np.zeros(steps), 10
    while at < steps:
        extra[at] = np.exp(rng.uniform(np.log(6), np.log(59)))
        factor[at : at + 6] = np.linspace(1.8, 1.1, 6)[: steps - at]
        at += int(rng.uniform(20, rarest))
    return slowed(factor, extra)


def loaded(seed: int, swing: float = 0.08, steps: int = 20_000) -> Disturbed:
    """Four busy processes beside two threads, as measured (docs/notebook.md): in a plain step's work others take the
    processor 1.5 times for about a plain step, and more or less often for some 50 steps (``swing``: in logs a step)."""
    rng = np.random.default_rng(seed)
    often = np.log(1.5) + np.convolve(swing * rng.standard_normal(steps), 0.98 ** np.arange(300))[:steps]

    def seen(step: int, work: float) -> float:
        return work + float(rng.lognormal(0.0, 0.6, rng.poisson(np.exp(often[step]) * work)).sum())

    return lambda step, draft, body: (seen(step, draft), seen(step, body))


@dataclass(frozen=True)
class Text:
    """What a drafter has to offer at each position of a row's text: T positions."""

    offer: list[int]  # nodes that are proposed
    good: list[int]  # of them, how many in a row are right
    said: list[float]  # what the drafter says that a node's chance is, given the one before it
    chance: list[float]  # what it is


def text(seed: int, length: int = 600, *, high: float = 0.85, low: float = 0.2, found: float = 0.6, burst: float = 25.0,
         share: float = 0.4, bias: float = 0.0, levels: bool = False) -> Text:  # fmt: skip
    """Bursts of about ``burst`` positions, ``share`` of the text, where nodes are right with chance ``high``, elsewhere
    ``low`` (and proposed at a share ``found`` of the positions, unless by ``levels``). ``bias``: of what is said."""
    rng = np.random.default_rng(seed)
    inside = rng.random() < share
    offer, good, said, chance = [], [], [], []
    for _ in range(length):
        if rng.random() < 1 / (burst if inside else burst * (1 - share) / max(share, 1e-9)):
            inside = not inside
        p = high if inside else low
        n = MOST if levels or inside or rng.random() < found else 0
        right = 0
        while right < n and rng.random() < p:
            right += 1
        offer.append(n)
        good.append(right)
        said.append(float(np.clip(p + bias + 0.1 * rng.standard_normal(), 0.02, 0.98)))
        chance.append(p)
    return Text(offer, good, said, chance)


def steady(seed: int, chance: float, length: int = 600, said: float | None = None) -> Text:
    """Every node is right with the same chance; the drafter says ``said``."""
    made = text(seed, length, high=chance, low=chance, found=1.0)
    return made if said is None else replace(made, said=[said] * length)


def view(row: int = 0, request: int | None = None, *, cost: DraftCost | None = None, t: float = 0.0,
         adaptive: bool = True, drafter: str = "toy", acceptance: str = "coupled") -> RowView:  # fmt: skip
    chooser = Chooser(SamplingParams(temperature=t), Noise(0), 0)
    return RowView(
        row, row if request is None else request, np.array([1, 2], np.int32), 9999, chooser, acceptance, adaptive,  # type: ignore[arg-type]
        drafter=drafter, cost=cost or DraftCost(),
    )  # fmt: skip


def chains(widths: Sequence[int], said: Sequence[float], *sources: str) -> Drafts:
    """Of one source, or of as many as there are rows."""
    width = max(widths, default=0)
    confidence = np.power(np.array(said, np.float32)[:, None], np.arange(1, width + 1, dtype=np.float32)[None])
    source = np.repeat(np.arange(len(sources), dtype=np.uint8)[:, None], width, 1) if len(sources) > 1 else None
    return Drafts(
        np.zeros((len(widths), width), np.int32), np.array(widths, np.int32),
        confidence=confidence.astype(np.float32), source=source, sources=sources or ("toy",),
    )  # fmt: skip


def deep(nodes: int, levels: int, floor: float, said: float) -> int:
    """Levels of a chain whose every node is said to be so likely: those that are allowed, or, by the floor, as EAGLE
    and draft models go."""
    if not floor:
        return min(nodes, levels)
    return next((n for n in range(1, min(nodes, DEEPEST)) if said**n < floor), min(nodes, DEEPEST))


def verdicts(accepted: Sequence[int]) -> Verdicts:
    depth = max(accepted, default=0)
    path = np.tile(np.arange(depth, dtype=np.int32), (len(accepted), 1))
    return Verdicts(np.zeros((len(accepted), depth + 1), np.int32), np.array(accepted, np.int32), path)


class Sizes(NamedTuple):
    """Nodes to ask for, drafting forwards to allow, and the chance a path needs to be drafted further (0: it goes as
    far as is allowed), [B] each."""

    nodes: list[int]
    levels: list[int]
    floors: list[float]


class Driven(Adaptive):
    """The policy in an ``_native.Rows`` whose drafters and model are simulated: ``plan`` before drafting, ``trim``
    after, ``learn`` after the verdicts, once a step in this order. A step that fails in between is planned again."""

    def __init__(self, cost: Cost, *, stretch: float | None = None, explain: bool = False, vocab: int = AUTO_SIZE + 1,
                 names: Sequence[str] = ()) -> None:  # fmt: skip
        super().__init__(cost, stretch=stretch, explain=explain)
        self._step, self._names = _native.Rows(vocab, [], "target"), tuple(names)
        self._rows: dict[int, tuple[RowView, _native.Row]] = {}
        self._tokens = np.zeros(100_001, np.int32)
        self._left: list[int] = []  # rows that were to draft
        self.prompts: dict[int, int] = {}  # tokens, by row; else 1

    def _row(self, v: RowView) -> _native.Row:
        known = self._rows.get(v.row)
        if known is None or known[0] is not v:
            cost, chooser = v.cost, describe(v.chooser, [])
            self._rows[v.row] = known = v, self._step.row(
                v.row, v.request, self.prompts.get(v.row, 1), v.adaptive, v.drafter, None, self._names, False, True,
                False, False, v.acceptance, False, chooser, cost.levels, cost.nodes, cost.trims, cost.reads, v.limit,
            )  # fmt: skip
        return known[1]

    def read(self, v: RowView, at: int, count: int, token: float, body: float) -> tuple[int, int]:
        """A step of the next ``count`` tokens of the row's prompt alone, which takes ``body`` seconds. From where on
        its drafter reads (-1: not), and how many of these tokens it has read, in ``token`` seconds each."""
        row, end = self._row(v), at + count
        self._step.begin(self.native, [], [(row, self._tokens, at, count, False)])
        start = self._step.reads(row)
        new = end - max(at, start) if 0 <= start < end else 0
        if new:
            self._step.has_read([(row, start, end, new)], token * new, body)
        return start, new

    def plan(self, rows: Sequence[RowView], most: Sequence[int], contexts: Sequence[float], prefill: int = 0) -> Sizes:
        """``contexts``: cached positions of each row; ``prefill``: tokens of prompts beside them."""
        given: list[tuple[Any, ...]] = [
            (self._row(v), self._tokens, int(context) + 1, n)
            for v, n, context in zip(rows, most, contexts, strict=True)
        ]
        chunks = [(given[0][0], self._tokens, 0, prefill, False)] if prefill else []
        self._step.begin(self.native, given, chunks)
        self._left, _ = self._step.propose()
        *sizes, self.starts = self._step.sizes
        return Sizes(*sizes)

    def asked(self, rows: Sequence[RowView]) -> list[RowView]:
        """The planned rows, as drafters are asked for them."""
        sizes = zip(rows, *self._step.sizes, strict=True)
        return [
            v._replace(depth=levels, floor=floor, start=start, in_step=self._step.in_step(i))
            for i, (v, _, levels, floor, start) in enumerate(sizes)
        ]

    def trim(self, drafts: Drafts) -> tuple[Drafts, Sequence[Decision]]:
        """What is to be verified, and each row's decision."""
        if self._left:
            self._step.put(list(range(len(drafts.widths))), drafts)
        self._step.trim()
        return Drafts(*self._step.drafts(True)), [Decision(*fields) for fields in self._step.decisions() or ()]

    def learn(self, verdicts: Verdicts, draft: float, body: float, experts: float = 0.0) -> None:
        """``draft``, ``body``: seconds of drafting and of all else; ``experts``: that were read."""
        self._step.decide_all(verdicts)
        self._step.learn(draft, body, experts)


@dataclass
class Tally:
    """What became of a row's request. ``seconds``: true, prompts aside; ``plain``: had all steps been so."""

    tokens: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    steps: int = 0

    @property
    def speedup(self) -> float:
        return self.plain / self.seconds


@dataclass
class Outcome:
    """A run: tokens over true seconds against plain decoding's, in all and by request."""

    whole: Tally = field(default_factory=Tally)
    requests: list[Tally] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)  # nodes verified, by step
    asked: int = 0  # steps in which somebody was asked
    stretches: list[float] = field(default_factory=list)  # by step: how long it was, in plain steps of its rows
    trues: list[float] = field(default_factory=list)  # the same without prompts
    decisions: list[Sequence[Decision]] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)  # tokens a row, by step

    def worst(self, window: int = 100) -> float:
        """The least speed in so many steps one after the other."""
        window = min(window, len(self.gains))
        tokens, took = np.cumsum([0.0, *self.gains]), np.cumsum([0.0, *self.trues])
        return float(np.min((tokens[window:] - tokens[:-window]) / (took[window:] - took[:-window])))

    @property
    def speedup(self) -> float:
        return self.whole.speedup


def run(policy: Driven, machine: Machine, texts: Sequence[Text], *, rows: int = 1, steps: int | None = None,
        seed: int = 0, views: Callable[[int, int], RowView] = view, prompt: int | Sequence[int] = 0,
        chunk: int | None = None, context: float = 300.0) -> Outcome:  # fmt: skip
    """Decode ``texts``, at most ``rows`` at once, each until its end; ``prompt``: tokens of prefill when one begins (by
    text), at most ``chunk`` of them in a step, beside the rows whose prompts were read."""
    rng = np.random.default_rng(seed)
    prompts = [prompt] * len(texts) if isinstance(prompt, int) else prompt
    found = Outcome()
    waiting = list(range(len(texts)))
    live: list[tuple[RowView, int, int, Tally]] = []  # view, text, position, tally
    free = list(range(rows))
    reading: list[tuple[int, int, int]] = []  # row, text, prompt tokens left
    step = 0
    while (live or waiting or reading) and (steps is None or step < steps):
        fresh = 0
        while waiting and free:
            reading.append((free.pop(0), waiting[0], prompts[waiting.pop(0)]))
        while reading and (chunk is None or fresh < chunk):
            row, which, left = reading.pop(0)
            read = left if chunk is None else min(left, chunk - fresh)
            fresh += read
            if read < left:
                reading.insert(0, (row, which, left - read))
            else:
                found.requests.append(Tally())
                live.append((views(row, which), which, 0, found.requests[-1]))
        if not live:
            step += 1
            continue
        its = [entry[0] for entry in live]
        room = [min(MOST, len(texts[w].offer) - at - 1) for _, w, at, _ in live]
        sizes = policy.plan(its, room, [context] * len(live), fresh)
        stepwise = [v.cost.levels is not None for v in its]
        asked = [
            deep(*size, texts[w].said[at]) if s else size[0]
            for size, s, (_, w, at, _) in zip(zip(*sizes, strict=True), stepwise, live, strict=True)
        ]
        offers = [min(n, texts[w].offer[at]) for n, (_, w, at, _) in zip(asked, live, strict=True)]
        drafts = chains(offers, [texts[w].said[at] for _, w, at, _ in live], *(v.cost.levels or "toy" for v in its))
        if any(sizes.floors):
            drafts = replace(drafts, levels=np.array(asked, np.int32))
        kept, decisions = policy.trim(drafts)
        widths = kept.widths.tolist()
        accepted = [min(n, texts[w].good[at]) for n, (_, w, at, _) in zip(widths, live, strict=True)]
        many, depth = sum(n > 0 for n in asked), max((m for m, s in zip(asked, stepwise, strict=True) if s), default=0)
        draft, body = machine.draft(many, depth), machine.body(len(live), sum(widths), context, step, fresh)
        plain, unit = machine.body(len(live), 0, context, step), machine.cost.width(1)
        true = plain + body - machine.body(len(live), 0, context, step, fresh) + draft
        seen = machine.disturbed(step, *(machine.seen(part, rng) / unit for part in (draft, body)))
        policy.learn(
            verdicts(accepted), *(unit * part for part in seen), machine.experts(len(live) + sum(widths), step)
        )
        found.widths.append(sum(widths))
        found.asked += any(asked)
        found.stretches.append((body + draft) / plain)
        found.trues.append(true / plain)
        found.decisions.append(decisions)
        gained = sum(accepted) + len(live)
        found.gains.append(gained / len(live))
        found.whole.tokens += gained
        found.whole.seconds += true
        found.whole.plain += plain * gained / len(live)
        found.whole.steps += 1
        after = []
        for (v, w, at, tally), n in zip(live, accepted, strict=True):
            tally.tokens += n + 1
            tally.seconds += true
            tally.plain += plain * (n + 1)
            tally.steps += 1
            if at + n + 1 < len(texts[w].offer) - 1:
                after.append((v, w, at + n + 1, tally))
            else:
                policy.release(v.row)
                free.append(v.row)
        live = after
        step += 1
    return found


def fixed(machine: Machine, texts: Sequence[Text], size: int, context: float = 300.0) -> float:
    """Speed over plain decoding of always drafting ``size``, one row at a time."""
    seconds = plain_seconds = 0.0
    step = 0
    for one in texts:
        at = 0
        while at < len(one.offer) - 1:
            n = min(size, one.offer[at], len(one.offer) - at - 1)
            levels = min(size, MOST) if machine.level else 0
            took = machine.body(1, n, context, step) + (machine.draft(1, levels) if size else 0.0)
            gained = min(n, one.good[at]) + 1
            seconds += took
            plain_seconds += gained * machine.body(1, 0, context, step)
            at += gained
            step += 1
    return plain_seconds / seconds


def best_fixed(machine: Machine, texts: Sequence[Text]) -> float:
    return max(fixed(machine, texts, k) for k in range(MOST + 1))


def best_known(machine: Machine, texts: Sequence[Text], context: float = 300.0) -> float:
    """Of the policy that knows every node's chance and every cost: in each step the most of tokens - rate x seconds."""
    rate = 1.0
    plain = machine.body(1, 0, context, 0)
    seconds = [machine.body(1, n, context, 0) / plain for n in range(MOST + 1)]
    for _ in range(8):
        tokens = took = 0.0
        for one in texts:
            at = 0
            while at < len(one.offer) - 1:
                p, most = one.chance[at], min(one.offer[at], len(one.offer) - at - 1)
                ask = machine.draft(1, 0) / plain if most else 0.0
                worth = [sum(p**i for i in range(n + 1)) - rate * (seconds[n] + ask) for n in range(most + 1)]
                n = worth.index(max(worth))
                gained = min(n, one.good[at]) + 1
                tokens += gained
                took += seconds[n] + ask
                at += gained
        rate = tokens / took
    return rate


def scaled(cost: Cost, whole: float = 1.0, slope: float = 1.0) -> Cost:
    """A table that is wrong: as a whole, or in what width adds."""
    seconds = tuple(whole * (cost.seconds[0] + slope * (s - cost.seconds[0])) for s in cost.seconds)
    rest = (whole * cost.row, whole * cost.position, whole * slope * cost.position_width)
    return Cost(cost.widths, seconds, *rest)


def one_wrong(cost: Cost, width: int, factor: float) -> Cost:
    """A table one entry of which was measured at a noisy moment; monotone again, as every table is."""
    seconds = [s * (factor if w == width else 1.0) for w, s in zip(cost.widths, cost.seconds, strict=True)]
    monotone = tuple(float(s) for s in np.maximum.accumulate(seconds))
    return Cost(cost.widths, monotone, cost.row, cost.position, cost.position_width)


WRONG: dict[str, Callable[[Cost], Cost]] = {
    "right": lambda c: c,
    "4 times too dear": lambda c: scaled(c, 4.0),
    "4 times too cheap": lambda c: scaled(c, 0.25),
    "width 4 times too dear": lambda c: scaled(c, slope=4.0),
    "width 4 times too cheap": lambda c: scaled(c, slope=0.25),
    "width 1 too dear": lambda c: one_wrong(c, 1, 4.0),
    "width 1 too cheap": lambda c: one_wrong(c, 1, 0.25),
    "width 4 too dear": lambda c: one_wrong(c, 4, 4.0),
    "width 4 too cheap": lambda c: Cost(c.widths, tuple(float(s) for s in np.minimum.accumulate(
        [s * (0.25 if w == 4 else 1.0) for w, s in zip(c.widths, c.seconds, strict=True)][::-1])[::-1]),
        c.row, c.position, c.position_width),
}  # fmt: skip
