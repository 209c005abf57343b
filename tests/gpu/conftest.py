"""The Transformers backend on one CUDA card, or on the CPU where there is none: the tests are the same.

./scripts/test tests/gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.card import shapes
from outpace.models.torch.model import TransformersModel


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def llama() -> Any:
    """A Llama of random weights that follows ``shapes.follows`` most of the time, and else whatever noise says."""
    module = shapes.llama(shapes.TINY, torch.device("cpu"), torch.float32, margin=12.0)
    for name, weight in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 100  # what attention finds counts
    return module


@pytest.fixture(scope="session")
def target(device: str) -> Iterator[TransformersModel]:
    """In float32; nothing is read or downloaded."""
    model = TransformersModel(llama().to(device), name="random")
    yield model
    model.close()
