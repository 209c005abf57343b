"""A learned drafter's weights in torch: where they lie, and filling a network with them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.models.base import Model

N = TypeVar("N", bound=nn.Module)


def place_of(target: Model) -> tuple[torch.device, torch.dtype]:
    """Device and type of what the target embeds."""
    sample = target.parts.embed(np.zeros(1, np.int32))
    assert isinstance(sample, Tensor), "a target whose arrays are not torch's"
    return sample.device, sample.dtype


def filled(network: N, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> N:
    """The network with the checkpoint's weights, not to be trained."""
    its = {name: torch.tensor(np.asarray(checkpoint.tensors[name])) for name in network.state_dict()}
    network.load_state_dict(its)
    network.to(device, dtype).eval().requires_grad_(False)
    return network
