"""AdamW, and Muon for matrices; how the learning rate goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
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
    """One or two optimisers as one. ``kind``: "adamw", or "muon" (of matrices; AdamW has the vectors).

    None is a torch.optim.Optimizer: making one imports torch's compiler, which takes seconds.
    """

    def __init__(
        self, network: nn.Module, kind: str, lr: float, weight_decay: float, dtype: torch.dtype = torch.float32
    ) -> None:
        self.lr = lr
        params = [p for p in network.parameters() if p.requires_grad]
        matrices = [p for p in params if p.ndim == 2]
        vectors = [p for p in params if p.ndim != 2]
        self._parts: list[Muon | AdamW] = []
        if kind == "muon":
            self._parts = [Muon(matrices, weight_decay, dtype), AdamW([(vectors, 0.0)])]
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
