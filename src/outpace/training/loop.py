"""The training loop: steps of packed batches, evaluations on held-out answers, snapshots, and when to stop."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outpace.common.files import StrPath, write_bytes, write_json
from outpace.common.installing import install
from outpace.errors import Argument, TrainingError
from outpace.models.weights.q4_1 import BLOCK
from outpace.training import snapshots
from outpace.training.devices import Team, on_cpu
from outpace.training.objective import Objective, Simulated
from outpace.training.optimisers import Optimiser, schedule
from outpace.training.options import LoopOptions
from outpace.training.packing import Packing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- curves -----------------------------------------------------------------------------------------------------------
# How a training went: a line of blocks for a terminal, a picture for a person.

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """``values`` as a line of at most ``width`` blocks, each a mean of its stretch, from the least to the greatest."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in means)


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Loss, simulated tokens per step and acceptance by position against tokens trained, as a PNG. Raises OSError.

    ``rows`` as the loop keeps them: "tokens", "loss", "tokens_per_step", "acceptance".
    """
    buffer = io.BytesIO()
    drawn(rows).savefig(buffer, format="png", dpi=110)
    write_bytes(path, buffer.getvalue())


def drawn(rows: Sequence[dict[str, Any]]) -> Figure:
    """The picture. A line through a single point would show nothing, so points are marked while they are few."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    marker = "o" if len(rows) < 10 else None
    at = [row["tokens"] / 1e6 for row in rows]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loss, gained, accepted = figure.subplots(1, 3)
    loss.plot(at, [row["loss"] for row in rows], marker=marker)
    loss.set_ylabel("loss")
    gained.plot(at, [row["tokens_per_step"] for row in rows], marker=marker)
    gained.set_ylabel("simulated tokens per step, held out")
    for position in range(len(rows[0]["acceptance"]) if rows else 0):
        shares = [row["acceptance"][position] for row in rows]
        accepted.plot(at, shares, marker=marker, label=f"token {position + 1}")
    accepted.set_ylabel("acceptance")
    if rows:
        accepted.legend(fontsize="small")
    for axes in (loss, gained, accepted):
        axes.set_xlabel("million tokens trained")
        axes.grid(alpha=0.3)
    return figure


# -- four bits --------------------------------------------------------------------------------------------------------
# Training through 4-bit weights: a network computes with what Q4_1 keeps of its matrices, yet learns all of them.

_STEPS = 15.0  # between a block's least and its greatest value


def rounded(matrix: Tensor) -> Tensor:
    """float32 [rows, cols] as Q4_1 keeps it: the values of ``q4_1.decode(q4_1.encode(matrix))``. Other tensors, and
    matrices whose columns are no whole blocks, come back as they are."""
    if matrix.ndim != 2 or matrix.shape[1] % BLOCK:
        return matrix
    blocks = matrix.detach().reshape(len(matrix), -1, BLOCK)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    least, step = low.half().float(), ((high - low) / _STEPS).half().float()
    q = ((blocks - least) / torch.where(step > 0, step, 1.0)).round_().clamp_(0, _STEPS)
    return (least + q * step).view_as(matrix)


@contextmanager
def in_four_bits(network: nn.Module, wanted: bool) -> Iterator[None]:
    """Inside, the network computes with rounded weights if ``wanted``. Gradients are of these values and stay: a step
    by them is the straight-through estimator's (arXiv 1308.3432)."""
    params = list(network.parameters()) if wanted else []
    with replaced(params, [rounded(p.data) for p in params]):
        yield


@contextmanager
def replaced(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, parameters have other values; what is done to these is lost."""
    own = [p.data for p in params]
    try:
        for p, value in zip(params, values, strict=True):
            p.data = value
        yield
    finally:
        for p, value in zip(params, own, strict=True):
            p.data = value


_MEASURED = (3, 10)  # steps from which and up to which the speed is measured for ``minutes``
CURVE = "curve.json"
PICTURE = "curve.png"


@dataclass(slots=True)
class Progress:
    """Where a training is; what a snapshot keeps beside weights and the optimiser's state."""

    step: int = 0
    epoch: int = 0
    inside: int = 0  # steps of it
    total: int | None = None  # steps; None until the speed is known
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    stale: int = 0  # evaluations since
    loss: float = math.nan  # smoothed
    continued: bool = False  # it began with the optimiser's state of another training


class Loop:
    """Trains ``objective`` on ``train``, keeps the best by simulated tokens per step on ``held_out`` in ``out``.

    ``identity``: data, target and recipe, which a snapshot has to share; ``target`` goes into the checkpoint.
    ``say`` is called with a line now and then, ``pace`` after every step, and may wait.
    """

    def __init__(
        self,
        objective: Objective,
        train: Packing,
        held_out: Packing,
        out: StrPath,
        options: LoopOptions,
        identity: Mapping[str, Any],
        target: Mapping[str, Any],
        team: Team,
        say: Callable[[str], None] = lambda line: None,
        pace: Callable[[], None] = lambda: None,
    ) -> None:
        self.objective, self.train, self.held_out = objective, train, held_out
        self.out, self.options, self.identity, self.target = Path(out), options, dict(identity), dict(target)
        self.team, self._say = team, say if team.rank == 0 else lambda line: None
        self._pace = pace
        self._draws = find_spec("matplotlib") is not None  # asked before the first step, used after the last
        self.optimiser = Optimiser(
            objective.network, options.optimiser, options.lr, options.weight_decay,
            torch.bfloat16 if options.bfloat16 else torch.float32,
        )  # fmt: skip
        # Weights of which an average is kept, none or all that are trained; and that average.
        self._averaging = [p for p in objective.network.parameters() if p.requires_grad and options.average]
        self.average = [p.detach().clone() for p in self._averaging]
        self.at = Progress()
        self.rows: list[dict[str, Any]] = []
        self._begun = 0  # the step at which this process began
        self._measured_from = 0.0
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        if options.steps is not None:
            self.at.total = options.steps
        elif options.epochs is not None:
            self.at.total = max(1, round(options.epochs * self._steps_in(0)))

    def continue_from(self, folder: StrPath) -> None:
        """Take up the optimiser's state of the training that made the drafter in ``folder``, if it is there and is of
        such an optimiser and such weights. Raises TrainingError."""
        state = snapshots.optimiser(Path(folder), self.identity["method"])
        self.at.continued = state is not None and self.optimiser.fits(state)
        if state is not None and self.at.continued:
            self.optimiser.restore(state)
        has = "with" if self.at.continued else "without"
        why = "" if self.at.continued else ": there is none" if state is None else ": it is another optimiser's"
        self._say(f"beginning with {folder}, {has} its optimiser's state{why}")

    def resume(self) -> bool:
        """Go on from the last snapshot, where there is one; whether there was. Raises TrainingError.

        The length is that of this loop's options, the steps before counted in; the learning rate goes on as a training
        of that length has it at this step. ``minutes`` become steps by the speed so far.
        """
        state = snapshots.load(self.out, self.identity)
        if state is None:
            return False
        self.objective.network.load_state_dict(state["network"])
        self.optimiser.restore(state["optimiser"])
        averaged = state.get("average") or [p.detach().clone() for p in self._averaging]  # older ones have none
        self.average = [value.to(self.team.device) for value in averaged]
        total = self.at.total
        self.at, self.rows = Progress(**state["at"]), state["rows"]
        self.at.total, self._begun = total, self.at.step
        if self.options.minutes is not None and self.at.step >= _MEASURED[1]:
            self._fit_minutes(self.at.seconds / self.at.step)
        return True

    @property
    def over(self) -> bool:
        """Whether all steps are taken."""
        return self.at.total is not None and self.at.step >= self.at.total

    def run(self) -> Progress:
        """Train to the end. Raises TrainingError when a loss is not finite: the last snapshot and the best stay."""
        since_report = since_snapshot = time.perf_counter()
        reported = self.at.tokens
        self._plan()
        if not self._draws and self.team.rank == 0:
            self._say(
                f"no matplotlib: {CURVE} will have the figures, and there will be no {PICTURE} ("
                f"{install('outpace[train]')})"
            )
        while not self.over:
            begun = time.perf_counter()
            figures = self._step()
            now = time.perf_counter()
            self.at.seconds += now - begun
            self._measure(begun, now)
            if now - since_report >= self.options.report:
                self._report(figures, (self.at.tokens - reported) / (now - since_report))
                since_report, reported = now, self.at.tokens
            if self.over or self.at.step % self.options.evaluate == 0:
                stop = self._evaluate()
                since_report = since_snapshot = time.perf_counter()
                reported = self.at.tokens
                if stop:
                    break
            elif self.team.rank == 0 and now - since_snapshot >= self.options.snapshot:
                self._snapshot()
                since_snapshot = time.perf_counter()
            self._pace()
        return self.at

    def _step(self) -> dict[str, float]:
        groups = self._batches()
        total = sum(len(members) for members in groups)
        network = self.objective.network
        network.train()
        for p in network.parameters():
            p.grad = None
        known = self.at.total if self.at.total is not None else 1 << 30
        rate = schedule(self.at.step, known, self.options.warm_up, fall=self.options.fall)
        loss, figures, tokens = 0.0, dict[str, float](), 0
        with in_four_bits(network, self.options.four_bits and self.at.step >= self.options.warm_up and rate < 1):
            for j, members in enumerate(groups):
                if j % self.team.size != self.team.rank:
                    continue
                batch = self.train.batch(members, self._seed(j))
                tokens += len(batch)
                with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.options.bfloat16):
                    own, figures = self.objective.loss(batch)
                share = len(members) / total
                if own.requires_grad:
                    (own * share).backward()
                loss += float(own.detach()) * share
        loss, tokens_all = self.team.add([loss, tokens])
        self._check_finite("loss", loss)
        self.team.add_gradients(network)
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), self.options.clip)
        self._check_finite("gradient", float(norm))
        self.optimiser.step(rate)
        with torch.no_grad():
            for mean, p in zip(self.average, self._averaging, strict=True):
                mean.lerp_(p, max(1 - self.options.average, 1 / (self.at.step + 2)))
        self.at.step, self.at.inside = self.at.step + 1, self.at.inside + 1
        self.at.tokens += int(tokens_all)
        self.at.loss = loss if math.isnan(self.at.loss) else 0.95 * self.at.loss + 0.05 * loss
        return figures

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                f"the {what} is {value} at step {self.at.step + 1}: give a smaller ", Argument("lr"),
                f" than {self.options.lr:g}; the best drafter so far and the last snapshot are in {self.out}",
            )  # fmt: skip

    def _measure(self, begun: float, now: float) -> None:
        """With ``minutes``: how many steps fit, once this process has taken enough of them to know its speed."""
        taken = self.at.step - self._begun
        if self.at.total is not None:
            return
        if taken == _MEASURED[0] + 1:
            self._measured_from = begun
        if taken == _MEASURED[1]:
            self._fit_minutes((now - self._measured_from) / (_MEASURED[1] - _MEASURED[0]))

    def _fit_minutes(self, each: float) -> None:
        """Set the number of steps, one taking ``each`` seconds. Every process sets the same."""
        assert self.options.minutes is not None
        (each,) = (value / self.team.size for value in self.team.add([each]))
        left = self.options.minutes * 60 - self.at.seconds
        self.at.total = self.at.step + max(0, int(left / each))

    def _evaluate(self) -> bool:
        """Simulate, keep what is best, and draw; whether it is time to stop."""
        with self._averaged():
            found = self.simulate()
        row = {
            "step": self.at.step, "tokens": self.at.tokens, "seconds": round(self.at.seconds, 1),
            "loss": self.at.loss, "tokens_per_step": found.tokens_per_step, "acceptance": found.acceptance,
        }  # fmt: skip
        self.rows.append(row)
        better = found.tokens_per_step > self.at.best
        self.at.stale = 0 if better else self.at.stale + 1
        self.at.best = max(self.at.best, found.tokens_per_step)
        stop = bool(self.options.patience) and self.at.stale >= self.options.patience
        if self.team.rank == 0:
            if better:
                with self._averaged():
                    self._keep()
            self._snapshot()
            write_json(self.out / CURVE, self.rows)
            if self._draws:
                draw(self.out / PICTURE, self.rows)
        by_position = " ".join(f"{value:.3f}" for value in found.acceptance)
        line = sparkline([row["tokens_per_step"] for row in self.rows])
        self._say(
            f"step {self.at.step}: {found.tokens_per_step:.3f} tokens a step on held-out answers (accepted "
            f"{by_position}) {line}{'' if better else ', no gain'}"
        )
        return stop

    def simulate(self) -> Simulated:
        """Held-out answers, shared among the processes."""
        self.objective.network.eval()
        batches = self.held_out.cut(range(len(self.held_out.answers)))
        own = batches[self.team.rank :: self.team.size]
        self.held_out.plan(own)
        found: Simulated | None = None
        with in_four_bits(self.objective.network, self.options.four_bits):
            for members in own:
                part = self.objective.simulate(self.held_out.batch(members))
                found = part if found is None else found + part
        # A process may have had none.
        count, depths = self.team.add([found is not None, 0 if found is None else len(found.tried)])
        nothing = [0.0] * (2 + 2 * round(depths / max(count, 1)))
        return Simulated.of(self.team.add(nothing if found is None else found.sums()))

    def _averaged(self) -> AbstractContextManager[None]:
        """Inside, the network has its averaged weights, where they are wanted."""
        return replaced(self._averaging, self.average)

    def _keep(self) -> None:
        method, config, tensors = self.objective.export()
        done = {
            "loop": asdict(self.options), "steps_taken": self.at.step, "tokens_seen": self.at.tokens,
            "tokens_per_step": self.at.best, "continued": self.at.continued,
        }  # fmt: skip
        assert not (hidden := {*done} & {*self.identity}), f"{hidden} means two things in a recipe"
        self.objective.write(self.out, method, config, tensors, self.target, {**self.identity, **done})

    def _snapshot(self) -> None:
        state = {"network": self.objective.network.state_dict(), "optimiser": self.optimiser.state()}
        state |= {"average": self.average} if self.average else {}
        snapshots.save(self.out, self.identity, {**on_cpu(state), "at": asdict(self.at), "rows": self.rows})

    def _report(self, figures: Mapping[str, float], speed: float) -> None:
        total = self.at.total
        seconds = 0.0 if total is None else (total - self.at.step) * self.at.seconds / self.at.step
        left = "" if total is None else f", {timedelta(seconds=round(seconds))} left"
        shown = " ".join(f"{name} {value:.3f}" for name, value in figures.items() if name.startswith("agree"))
        self._say(f"step {self.at.step}/{total or '?'}: loss {self.at.loss:.3f}, {shown}, {speed:,.0f} tokens/s{left}")

    def _steps_in(self, epoch: int) -> int:
        if self._epoch[0] != epoch:
            self._epoch = epoch, self.train.epoch(epoch)
        return -(-len(self._epoch[1]) // self.options.gather)

    def _batches(self) -> Sequence[list[int]]:
        """The batches of the next step, of all processes."""
        if self.at.inside == self._steps_in(self.at.epoch):
            self.at.epoch, self.at.inside = self.at.epoch + 1, 0
            self._plan()
        return self._epoch[1][self.at.inside * self.options.gather :][: self.options.gather]

    def _plan(self) -> None:
        """Say which states this process wants in the rest of the epoch."""
        self._steps_in(self.at.epoch)
        gather, size, rank = self.options.gather, self.team.size, self.team.rank
        rest = self._epoch[1][self.at.inside * gather :]
        self.train.plan([members for j, members in enumerate(rest) if (j % gather) % size == rank])

    def _seed(self, j: int) -> int:
        return (self.options.seed * 1_000_003 + self.at.step) * 4096 + j
