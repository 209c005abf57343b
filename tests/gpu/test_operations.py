"""How many operations a step launches on a card, counted where there is none: each costs its launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch
from outpace.models.torch import attention, between, decoder
from outpace.models.torch.model import TransformersModel
from outpace.params import SamplingParams
from tests.gpu.conftest import llama


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """Counts operations that compute or move something: neither views nor new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self._one = 0, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = function._schema.returns
        view = returns and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if not (self._one or view or "empty" in function.overloadpacket.__name__):
            self.count += 1
        return function(*args, **kwargs or {})

    @contextmanager
    def as_kernels(self, count: int) -> Iterator[None]:
        """What is called here is so many kernels on a card, whatever stands for them on the CPU."""
        self.count, self._one = self.count + count, True
        try:
            yield
        finally:
            self._one = False


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()

    def fused(function: Callable[..., Any], kernels: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with found.as_kernels(kernels):
                return function(*args, **kwargs)

        return call

    names = ("added", "gated", "placed")
    operations = SimpleNamespace(**{name: fused(getattr(between, name), 1) for name in names})
    monkeypatch.setattr(decoder, "_operations", lambda *_: operations)
    monkeypatch.setattr(attention, "_mixture", lambda *_: fused(attention.mixture, 2))
    return found


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7},
    "filtered": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "top_n_sigma": 3.0},
}


def test_a_layer_launches_few_operations_and_so_does_a_step(launches: Launches) -> None:
    model = TransformersModel(llama(), name="counted", graphs=False)
    row = model.kv.alloc()
    model.forward(Batch.pack([row], [np.arange(5, 25, dtype=np.int32)], [0], [True]))

    def step(layers: int, kind: str) -> int:
        launches.count = 0
        batch = Batch.pack([row], [np.array([7, 8, 9, 10], np.int32)], [20], [True], layers=layers)
        with launches:
            output = model.forward(batch)
            output._on_device = True  # type: ignore[attr-defined]  # where there is no card, the same way
            output.choose(batch.wanted, [Chooser(SamplingParams(**KINDS[kind]), Noise(1), i) for i in range(4)])
        model.kv.truncate(row, 20)
        return launches.count

    shallow, deep = (step(layers, "greedy") for layers in (2, 4))
    layer = (deep - shallow) / 2
    without = {kind: step(4, kind) - 4 * layer for kind in KINDS}
    model.close()
    assert 5 <= layer <= 12
    assert without["greedy"] <= 40, without
    assert 100 < without["sampled"] <= 200, without
    assert without["filtered"] <= 250, without
