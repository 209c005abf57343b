"""Tiny random models of both backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outpace.models.base import Model
from outpace.models.weights.gguf import GGUFFile
from tests.native.native_helpers import Tiny

VOCAB = 12  # small, so that drafts that mean nothing are accepted sometimes
SIZES = {"vocab": VOCAB, "hidden": 64, "context": 2048}
Load = Any  # (layers) -> Model


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    with Tiny() as made:
        yield made


@pytest.fixture(params=["transformers", "native"])
def load(request: pytest.FixtureRequest, tiny: Tiny) -> Load:
    def make(layers: int, limit: int | None = None, **more: int) -> Model:
        sizes = SIZES | more | {"layers": layers}
        if request.param == "native":
            return tiny.load("F32", sizes=sizes, threads=1, kv_dtype="float32", kv_memory=limit)
        import torch

        from outpace.models.torch.gguf import build
        from outpace.models.torch.model import TransformersModel

        module = build(GGUFFile.open(tiny.path("F32", **sizes)), torch.float32, torch.device("cpu"))
        return TransformersModel(module, name=f"tiny-{layers}", kv_memory=limit)

    return make
