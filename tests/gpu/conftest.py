"""The Transformers backend on one CUDA card. Without a card all of it is skipped, and says so.

./scripts/test tests/gpu -rs
OUTPACE_GPU_TESTS=cpu ./scripts/test tests/gpu      # the tests themselves, where there is no card
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from outpace.models.base import Model
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer

DEVICE = os.environ.get("OUTPACE_GPU_TESTS", "cuda")


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA card: torch.cuda.is_available() is false")
    return DEVICE


@pytest.fixture(scope="session")
def demo(device: str) -> Iterator[tuple[Model, Tokenizer]]:
    """The demo model in float32: a GGUF file, so no network is needed."""
    model, tokenizer = load("demo", LoadOptions(backend="transformers", device=device, dtype="float32"))
    yield model, tokenizer
    model.close()
