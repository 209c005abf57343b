"""Where a training computes: the device, and the processes that ``accelerate launch`` or ``torchrun`` started. What is
drawn is drawn on the CPU everywhere, so that a device changes rounding only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import Argument, ParameterError
from outpace.models.load import torch_device
from outpace.training import packages

CPU = torch.device("cpu")


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
