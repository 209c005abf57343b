"""AdamW, and Muon for matrices; how the learning rate goes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ParameterError

OPTIMISERS = ("adamw", "muon")
_BETAS = (0.9, 0.95)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al., 2024), sized as AdamW's steps are (arXiv 2502.16982).

    float32 throughout: torch.optim.Muon iterates in bfloat16, which is slow where the processor has no such products.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(state["momentum"], group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Near U V^T of ``matrix`` = U S V^T: singular values come to 0.7 .. 1.2, which is what Muon wants."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Optimiser:
    """One or two optimisers as one. ``kind``: "adamw", or "muon" (of matrices; AdamW has the vectors)."""

    def __init__(self, network: nn.Module, kind: str, lr: float, weight_decay: float) -> None:
        if kind not in OPTIMISERS:
            raise ParameterError(f"the optimiser {kind!r} is not known: use one of {', '.join(OPTIMISERS)}")
        self.lr = lr
        params = [p for p in network.parameters() if p.requires_grad]
        matrices = [p for p in params if p.ndim == 2]
        vectors = [p for p in params if p.ndim != 2]
        by_adam = [{"params": vectors, "weight_decay": 0.0}]
        self._parts: list[torch.optim.Optimizer] = []
        if kind == "muon":
            self._parts.append(Muon(matrices, lr, weight_decay=weight_decay))
        else:
            by_adam.append({"params": matrices, "weight_decay": weight_decay})
        self._parts.append(torch.optim.AdamW(by_adam, lr, betas=_BETAS, fused=True))

    def step(self, scale: float) -> None:
        """One step at ``scale`` times the learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.lr * scale
            part.step()

    def state(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def restore(self, state: list[dict[str, Any]]) -> None:
        for part, its in zip(self._parts, state, strict=True):
            part.load_state_dict(its)


def schedule(step: int, total: int, warm_up: int, least: float = 0.05) -> float:
    """What the learning rate is multiplied with at ``step`` of ``total``, from 0: a linear rise, then half a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = min((step - warm_up) / max(total - warm_up, 1), 1.0)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))
