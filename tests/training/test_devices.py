"""Training on a second device: every tensor is where it belongs, and what comes out is the CPU's to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.drafters.learned.networks.parallel import ParallelNetwork
from outpace.errors import ParameterError
from outpace.training.loop import Loop, Team, device_named, save_snapshot
from outpace.training.objective import Packing
from outpace.training.objectives.distil import DistilObjective
from outpace.training.objectives.eagle import EagleObjective
from outpace.training.objectives.medusa import MedusaObjective
from outpace.training.objectives.parallel import ParallelObjective
from outpace.training.options import DistilOptions, EagleOptions, LoopOptions, MedusaOptions, ParallelOptions
from tests.training import eagle_helpers as tiny
from tests.training import small
from tests.training.commands import outpace
from tests.training.second_device import CARD, CPU, SecondDevice
from tests.training.test_distil import Counting, student
from tests.training.tiny_loop import Random, Said


class Host(Counting):
    """A teacher that reads numpy, as the native one does."""

    def states(self, sequences: Any) -> list[torch.Tensor]:
        return super().states([torch.from_numpy(its.cpu().numpy()) for its in sequences])


def eagle(device: torch.device, **options: Any) -> EagleObjective:
    given = EagleOptions(**{"share": 0.7, "noise": 0.1, "dropout": 0.1, "candidates": 12, **options})
    made = tiny.objective(given)
    return EagleObjective(made.network.to(device), made.target.to(device), made.draft_head.vocabulary, given)


def parallel(device: torch.device) -> ParallelObjective:
    network = ParallelNetwork(small.parallel_config(), 1).to(device)
    options = ParallelOptions(candidates=12, length=0.2)
    return ParallelObjective(network, small.target().to(device), small.WORDS, options)


def medusa(device: torch.device) -> MedusaObjective:
    network = MedusaNetwork(small.medusa_config()).to(device)
    return MedusaObjective(network, small.target().to(device), small.WORDS, MedusaOptions(candidates=12, nodes=4))


def distil(device: torch.device) -> DistilObjective:
    options = DistilOptions(on_policy=0.6, on_policy_tokens=3)
    made = student(frozen=False).to(device)
    return DistilObjective(made, small.target().to(device), options, small.WORDS, Host())


METHODS: dict[str, Callable[[torch.device], Any]] = {
    "eagle": eagle,
    "length": lambda device: eagle(device, loss="length", candidates=0),
    "parallel": parallel,
    "medusa": medusa,
    "distil": distil,
}


def loop(out: Path, method: str, optimiser: str, device: torch.device, **options: Any) -> Loop:
    train, held_out = Said(12, 0), Said(3, 1)
    objective = METHODS[method](device)
    objective.write = lambda *given: None
    return Loop(
        objective,
        Packing(train, Random(train), 40, 40, 1.0, 0, device),
        Packing(held_out, Random(held_out), 40, 40, 0.0, 0, device),
        out,
        LoopOptions(
            **{"steps": 4, "gather": 2, "evaluate": 2, "warm_up": 1, "lr": 0.01, "optimiser": optimiser, **options}
        ),
        {"method": method},
        {"name": "tiny"},
        Team(device),
    )


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_near(method: str, tmp_path: Path) -> None:
    """Products alone are rounded, and weights stay what they are."""
    losses = []
    for rounded in (False, True):
        made = loop(tmp_path, method, "adamw", CPU, bfloat16=rounded)
        for _ in range(3):
            made.at.loss = float("nan")  # else it is smoothed
            made._step()
        losses.append(made.at.loss)
        assert all(its.dtype == torch.float32 for its in made.objective.network.parameters())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("eagle", ("--share", 0.5, "--noise", 0.1, "--candidates", 16)),
        ("parallel", ("--layers", 1, "--block", 3, "--markov-rank", 4, "--candidates", 16)),
        ("medusa", ("--heads", 2, "--nodes", 5, "--candidates", 16)),
        ("distil", ("--layers", 1, "--on-policy", 0.5, "--on-policy-tokens", 3)),
    ],
)
def test_commands_train_there(
    method: str, more: tuple[object, ...], answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the target's files to the checkpoint: the same file."""
    monkeypatch.setattr("outpace.training.loop.draw", lambda path, rows: None)
    basics = (
        "--data", answers, "--steps", 2, "--tokens", 64, "--longest", 64, "--held-out", 0.2, "--judged", 40,
        "--warm-up", 1, "--draft-vocab", 48, "--threads", 1,
    )  # fmt: skip
    given = ("train", method, *basics, *more)
    outpace(*given, "--out", tmp_path / "cpu")
    with SecondDevice() as second:

        def saved(folder: Path, identity: Any, state: Any) -> None:
            kept = [its for part in state["optimiser"] for own in part["state"].values() for its in own.values()]
            assert not any(second.on_card(its) for its in (*kept, *state["network"].values()))
            save_snapshot(folder, identity, state)

        monkeypatch.setattr("outpace.training.loop.save_snapshot", saved)
        outpace(*given, "--out", tmp_path / "card", "--device", "cuda")
        with pytest.raises(RuntimeError, match="two devices in"):
            torch.arange(3) + torch.arange(3, device=CARD)
    assert len(second.operations) > 20
    outpace(*given, "--out", tmp_path / "card", "--resume")  # a card's snapshot where there is none
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "card" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()


def test_a_device_that_is_not_there(answers: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="device='cuda:77' cannot be used"):
        outpace("train", "medusa", "--data", answers, "--out", tmp_path, "--steps", 1, "--device", "cuda:77")
    assert device_named("cpu") == CPU
    with pytest.raises(ParameterError, match=r"device=.*cannot be used .*give cpu, or cuda where torch was built"):
        device_named("cuda:77")
    with pytest.raises(ParameterError, match="nothing is trained there"):
        device_named("meta")
