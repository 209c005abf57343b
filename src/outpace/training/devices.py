"""Where a training computes. What is drawn is drawn on the CPU everywhere, so that a device changes rounding only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outpace.errors import Argument, ParameterError
from outpace.models.load import torch_device

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
