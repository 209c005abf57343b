"""The training loop: steps of packed batches, evaluations on held-out answers, snapshots, and when to stop."""

from __future__ import annotations

import io
import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from outpace.common.files import StrPath, replacing, write_bytes, write_json
from outpace.common.installing import install
from outpace.errors import Argument, ParameterError, TrainingError
from outpace.models.load import torch_device
from outpace.models.weights.q4_1 import BLOCK
from outpace.training import packages
from outpace.training.objective import CPU, Objective, Packing, Simulated
from outpace.training.options import MAY_CHANGE, LoopOptions

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


# -- optimisers -------------------------------------------------------------------------------------------------------
# torch.optim.Muon computes in bfloat16 alone: 4 times slower than float32 on AVX-512 without such products, 73 times on
# AVX2. Making any torch.optim.Optimizer imports torch's compiler: a second, or eight from a cold disk.

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
TOKEN_ROWS = ("embed_tokens", "lm_head")  # a row a token, of which a batch has few: not for Muon
State = dict[int, dict[str, Tensor]]  # by the parameter's number


def orthogonal(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Near U V^T of ``matrix`` = U S V^T: singular values come to 0.7 .. 1.2, which is what Muon wants. Products are in
    ``dtype``."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / (x.norm() + 1e-7)).to(dtype)
    for _ in range(5):
        a = x @ x.T
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    x = x.to(matrix.dtype)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon:
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al., 2024), sized as AdamW's steps are (arXiv 2502.16982).

    ``dtype``: of the iteration. torch.optim.Muon's is bfloat16, which is slow where the processor has no such products.
    """

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float, dtype: torch.dtype) -> None:
        self.params, self._decay, self._dtype = list(matrices), weight_decay, dtype
        self.state: State = {}

    def step(self, lr: float) -> None:
        for i, matrix in enumerate(self.params):
            if matrix.grad is None:
                continue
            if i not in self.state:
                self.state[i] = {"momentum": torch.zeros_like(matrix)}
            momentum = self.state[i]["momentum"]
            momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
            update = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM), self._dtype)
            matrix.mul_(1 - lr * self._decay)
            matrix.add_(update, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))


class AdamW:
    """AdamW (arXiv 1711.05101): torch's own step. ``groups``: parameters, and how their weights decay."""

    def __init__(self, groups: Sequence[tuple[Sequence[Tensor], float]]) -> None:
        self.params = [p for params, _ in groups for p in params]
        self._sizes = [(len(params), decay) for params, decay in groups]
        self.state: State = {}

    def step(self, lr: float) -> None:
        start = 0
        for size, decay in self._sizes:
            here = [i for i in range(start, start + size) if self.params[i].grad is not None]
            start += size
            for i in here:
                if i not in self.state:
                    param = self.params[i]
                    zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[i] = {"step": torch.zeros((), device=param.device), **zeros}
            first, second, steps = ([self.state[i][n] for i in here] for n in ("exp_avg", "exp_avg_sq", "step"))
            adamw(
                [self.params[i] for i in here], [grad for i in here if (grad := self.params[i].grad) is not None],
                first, second, [], steps, fused=True, amsgrad=False, beta1=_BETAS[0], beta2=_BETAS[1], lr=lr,
                weight_decay=decay, eps=1e-8, maximize=False,
            )  # fmt: skip


class Optimiser:
    """One or two optimisers as one. ``kind``: "adamw", or "muon" (of matrices; AdamW has vectors, embedding, head)."""

    def __init__(
        self, network: nn.Module, kind: str, lr: float, weight_decay: float, dtype: torch.dtype = torch.float32
    ) -> None:
        self.lr = lr
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        matrices = [p for _, p in named if p.ndim == 2]
        vectors = [p for _, p in named if p.ndim != 2]
        self._parts: list[Muon | AdamW] = []
        if kind == "muon":
            tokens = [p for name, p in named if name in TOKEN_ROWS]
            matrices = [p for name, p in named if p.ndim == 2 and name not in TOKEN_ROWS]
            self._parts = [Muon(matrices, weight_decay, dtype), AdamW([(vectors, 0.0), (tokens, 0.0)])]
        else:
            self._parts = [AdamW([(vectors, 0.0), (matrices, weight_decay)])]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step at ``scale`` times the learning rate."""
        for part in self._parts:
            part.step(self.lr * scale)

    def state(self) -> list[dict[str, Any]]:
        return [{"state": part.state} for part in self._parts]

    def fits(self, state: Sequence[Mapping[str, Any]]) -> bool:
        """Whether ``state`` is of these optimisers, and of parameters of these numbers and shapes."""
        if len(state) != len(self._parts):
            return False
        for part, saved in zip(self._parts, state, strict=True):
            for i, own in saved["state"].items():
                names = {"momentum"} if isinstance(part, Muon) else {"step", "exp_avg", "exp_avg_sq"}
                if i >= len(part.params) or {*own} != names:
                    return False
                if any(v.ndim and v.shape != part.params[i].shape for v in own.values()):
                    return False
        return True

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        for part, saved in zip(self._parts, state, strict=True):
            part.state = {
                i: {name: value.to(part.params[i].device) for name, value in own.items()}
                for i, own in saved["state"].items()
            }


def schedule(step: int, total: int, warm_up: int, least: float = 0.05, fall: float = 1.0) -> float:
    """What the learning rate is multiplied with at ``step`` of ``total``, from 0: a linear rise, a constant, then half
    a cosine over the last ``fall`` of the steps (1: all after the rise; 0: none)."""
    if step < warm_up:
        return (step + 1) / warm_up
    begin = max(warm_up, total - round(fall * total))
    done = min(max(step - begin, 0) / max(total - begin, 1), 1.0)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


# -- snapshots --------------------------------------------------------------------------------------------------------
# Complete or not there, and refused beside anything else than what made them.

SNAPSHOT = "snapshot.pt"
_FORMAT = 1
_HIDDEN = "steps_ttt"  # had a say in every snapshot of EAGLE's; in older ones another option of its name hid it


def save_snapshot(folder: Path, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write ``state`` (tensors and plain values). ``identity``: what has to be the same to go on. Raises OSError."""
    buffer = io.BytesIO()
    torch.save({"format": _FORMAT, "identity": dict(identity), "state": dict(state)}, buffer)
    with replacing(folder / SNAPSHOT) as file:
        file.write(buffer.getbuffer())


def load_snapshot(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that ``save_snapshot`` wrote last; None where there is none.

    Raises TrainingError for a snapshot of other data, another target or another recipe (but for the options in
    ``MAY_CHANGE``), and for one that is damaged.
    """
    path = folder / SNAPSHOT
    if not path.exists():
        return None
    known, state = _read_snapshot(path)
    if _HIDDEN in identity and _HIDDEN not in known:
        raise TrainingError(
            f"{path} does not record its {_HIDDEN}, which may not be {identity[_HIDDEN]}: begin with "
            "its best drafter (", Argument("start"), f" {folder}), and give another folder as ", Argument("out"),
        )  # fmt: skip
    # An option that came after the snapshot was made had no say in it; older snapshots have some that are free now.
    others = [name for name in sorted(known) if name not in MAY_CHANGE and known[name] != identity.get(name)]
    if others:
        what = ", ".join(f"{name} {known[name]}, not {identity.get(name)}" for name in others)
        free = [part for name in MAY_CHANGE for part in (Argument(name), ", ")][:-1]
        raise TrainingError(
            f"{path} was made with {what}: give what it was made with (", *free, " may change), or another folder as ",
            Argument("out"),
        )  # fmt: skip
    return dict(state)


def optimiser_state(folder: Path, method: str) -> list[dict[str, Any]] | None:
    """The optimiser's state at the end of the training of ``method`` that made the drafter in ``folder``; None where no
    snapshot of one stayed. Raises TrainingError for one that is damaged."""
    path = folder / SNAPSHOT
    if not path.exists():
        return None
    known, state = _read_snapshot(path)
    return list(state["optimiser"]) if known.get("method") == method else None


def _read_snapshot(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Identity and state."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        known, state = found["identity"], found["state"]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"{path} cannot be read ({error}): remove it, and train again or go on without it"
        ) from error
    if found.get("format") != _FORMAT:
        raise TrainingError(f"{path} is of format {found.get('format')}, not {_FORMAT}: remove it and train again")
    return known, state


# -- processes --------------------------------------------------------------------------------------------------------
# Where a training computes: the device, and the processes that ``accelerate launch`` or ``torchrun`` started. What is
# drawn is drawn on the CPU everywhere, so that a device changes rounding only.


def device_named(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:N``. Raises ParameterError for others, and for a card that torch cannot use."""
    remedy = "give cpu, or cuda where torch was built for the card"
    device: torch.device = torch_device(torch, name, remedy)
    if device.type not in ("cpu", "cuda"):
        raise ParameterError(Argument("device", name), f": nothing is trained there, {remedy}")
    return device


def on_cpu(state: Any) -> Any:
    """Mappings and lists with all of their tensors on the CPU; what is there already is not copied."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, Mapping):
        return {name: on_cpu(value) for name, value in state.items()}
    return [on_cpu(value) for value in state] if isinstance(state, list) else state


class Team:
    """``rank`` of ``size`` processes. Alone unless the environment says otherwise. ``device``: where this one computes:
    of several cards, each process has its own."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._accelerator: Any = None
        self.device = device
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            with packages():
                from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=device.type == "cpu")
            if device.type != "cpu":
                self.device = self._accelerator.device

    @property
    def rank(self) -> int:
        return 0 if self._accelerator is None else int(self._accelerator.process_index)

    @property
    def size(self) -> int:
        return 1 if self._accelerator is None else int(self._accelerator.num_processes)

    def add_gradients(self, network: nn.Module) -> None:
        """Every process gets the sum of all gradients."""
        if self._accelerator is None:
            return
        params = [p for p in network.parameters() if p.requires_grad]
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params])
        flat = self._accelerator.reduce(flat, "sum")
        for p, gradient in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = gradient.view_as(p).clone()

    def add(self, numbers: Iterable[float]) -> list[float]:
        """Sums over the processes."""
        values: Tensor = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        if self._accelerator is not None:
            values = self._accelerator.reduce(values, "sum")
        return [float(value) for value in values]

    def close(self) -> None:
        """End the processes' group."""
        if self._accelerator is not None:
            self._accelerator.end_training()
            if torch.distributed.is_initialized():  # some versions of accelerate end it themselves
                torch.distributed.destroy_process_group()
            self._accelerator = None


# -- loop -------------------------------------------------------------------------------------------------------------

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
    ``say`` is called with a line now and then.
    """

    def __init__(
        self,
        objective: Objective[Any, Any],
        train: Packing,
        held_out: Packing,
        out: StrPath,
        options: LoopOptions,
        identity: Mapping[str, Any],
        target: Mapping[str, Any],
        team: Team,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.objective, self.train, self.held_out = objective, train, held_out
        self.out, self.options, self.identity, self.target = Path(out), options, dict(identity), dict(target)
        self.team, self._say = team, say if team.rank == 0 else lambda line: None
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
        state = optimiser_state(Path(folder), self.identity["method"])
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
        state = load_snapshot(self.out, self.identity)
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
        save_snapshot(self.out, self.identity, {**on_cpu(state), "at": asdict(self.at), "rows": self.rows})

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
