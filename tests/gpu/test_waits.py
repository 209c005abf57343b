"""How often the host waits for the card in a step, counted where there is none as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.card import shapes
from benchmarks.card.shapes import Oracle
from outpace import Engine, SamplingParams
from outpace.drafters.base import Drafter
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.learned.networks.eagle import TorchEagle
from outpace.engine.request import StepRecord
from outpace.models.base import Model
from outpace.models.torch.graphs import Waits
from outpace.models.torch.output import TorchOutput
from tests import eagles

KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7},
    "filtered": {"temperature": 0.7, "top_p": 0.9},
}


@pytest.mark.parametrize("kind", ["plain", "oracle", "eagle"])
def test_a_step_waits_once_for_its_choices_and_once_for_a_learned_draft(
    target: Model, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of every kind of choice in one batch, chunks of a prompt beside them."""
    made = TorchOutput.__init__

    def on_device(output: TorchOutput, *given: Any) -> None:
        made(output, *given)
        output._on_device = True  # where there is no card, the same way

    monkeypatch.setattr(TorchOutput, "__init__", on_device)
    drafter: Drafter | None = Oracle(target.info.vocab_size, 0.7) if kind == "oracle" else None
    if kind == "eagle":
        checkpoint = eagles.random(target, range(0, target.info.vocab_size, 16), (1, 2, 4), fc_norm=True)
        drafter = LearnedDrafter(TorchEagle(target, checkpoint), (1, 2, 4), "eagle", target.info.vocab_size)
    waits = Waits()
    counts: list[tuple[int, StepRecord]] = []
    engine = Engine(
        target, drafter=drafter, size=5, prefix_rows=0, prefill_chunk=16,
        on_step=lambda record: counts.append((len(waits.seen), record)),
    )  # fmt: skip
    for i, given in enumerate(KINDS.values()):
        engine.add(shapes.text(i, 20 + 12 * i, 4000), SamplingParams(max_tokens=24, seed=i, **given))
    ended: list[Any] = []
    with waits:
        while len(ended) < len(KINDS):
            ended += [delta for delta in engine.step() if delta.result is not None]
    seen = [0, *(n for n, _ in counts)]
    decoding = [len(record.rows) for _, record in counts]
    drafted = [sum(len(row.kept) for row in record.rows) for _, record in counts]
    assert max(decoding) == 3
    for i, rows in enumerate(decoding):
        most = 1 + (kind == "eagle" and drafted[i] > 0)
        assert seen[i + 1] - seen[i] <= (most if rows else 0), (i, waits.seen[seen[i] : seen[i + 1]])
    assert (sum(drafted) > 0) == (kind != "plain")


def test_what_waits_is_counted() -> None:
    with Waits() as waits:
        x = torch.arange(4)
        assert int(x.sum()) == 6
        x[x > 1].cpu()
    assert waits.seen == ["Tensor.__int__", "_local_scalar_dense", "index", "Tensor.cpu"]
