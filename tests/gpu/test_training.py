"""Training on a card against training on the CPU: the same draws, so the same losses up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outpace.training.objective import CPU
from tests.training.test_devices import METHODS, loop

STEPS = 4


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_the_cpu_s(device: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.training.loop.draw", lambda path, rows: None)
    losses, weights = [], []
    for where in (CPU, torch.device(device)):
        made = loop(tmp_path / where.type, method, "adamw", where)
        (tmp_path / where.type).mkdir(exist_ok=True)
        found = []
        for _ in range(STEPS):
            made.at.loss = float("nan")  # smoothed from here on: this step's own
            made._step()
            found.append(made.at.loss)
        made._snapshot()
        losses.append(found)
        weights.append({name: its.detach().cpu() for name, its in made.objective.network.state_dict().items()})
        assert all(its.device.type == where.type for its in made.objective.network.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, its in weights[0].items():
        torch.testing.assert_close(weights[1][name], its, atol=2e-2, rtol=0.0)
    there = loop(tmp_path / torch.device(device).type, method, "adamw", CPU)  # goes on where there is no card
    assert there.resume()
    for name, its in there.objective.network.state_dict().items():
        assert torch.equal(its, weights[1][name])
