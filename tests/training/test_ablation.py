"""Variants at one budget: what T = 1 is expected to bring against plain sums, and a study that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import ablation
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.drafters.learned.networks.parallel import ParallelNetwork
from outpace.training.loop import Loop
from outpace.training.objectives.distil import DistilObjective, DistilOptions
from outpace.training.objectives.eagle import EagleOptions
from outpace.training.objectives.medusa import MedusaObjective, MedusaOptions
from outpace.training.objectives.parallel import ParallelObjective, ParallelOptions
from outpace.training.simulate import expected_steps, walk
from outpace.training.target import TargetParts
from tests.training import eagle_helpers as tiny
from tests.training import small
from tests.training.test_distil import student
from tests.training.test_eagle_network import served

PARTS = small.target()
# A target that is not sure, so that p and q overlap in part.
UNSURE = TargetParts(PARTS.embedding, 1.0, PARTS.head * 0.4, PARTS.final_norm, PARTS.eps)


def plain(logits: torch.Tensor, ids: torch.Tensor, state: torch.Tensor, parts: TargetParts) -> float:
    """sum min(p, q) over all of the target's tokens."""
    q = torch.zeros(parts.vocab).index_copy(0, ids, torch.softmax(logits, -1))
    return float(torch.minimum(q, torch.softmax(parts.logits(state[None])[0], -1)).sum())


@pytest.mark.parametrize("seed", range(4))
def test_expected_steps_are_those_of_every_path(seed: int) -> None:
    draw = np.random.default_rng(seed)
    given = small.batch([9, 4, 5, 12], PARTS, prompt=3)
    flags = draw.random((len(given), 3)) < 0.7
    for b in range(given.sequences):  # what the answer does not have is not right
        for at in range(given.starts[b], given.starts[b + 1]):
            flags[at, max(given.starts[b + 1] - at - 2, 0) :] = False
    overlap = draw.random(flags.shape) * flags

    def steps(at: int, end: int) -> float:
        if at + 2 >= end:
            return 0.0
        found, reached = 1.0, 1.0
        for k in range(4):  # exactly k are accepted
            more = overlap[at, k] if k < 3 else 0.0
            found += reached * (1 - more) * steps(min(at + k + 1, end - 2), end)
            reached *= more
        return found

    bounds = [(start + 2, given.starts[b + 1]) for b, start in enumerate(given.starts[:-1])]
    found, tokens = expected_steps(given, overlap)
    assert found == pytest.approx(sum(steps(*its) for its in bounds), abs=1e-12)
    certain, same = expected_steps(given, flags.astype(float))
    its = walk(given, flags, flags)
    assert (certain, same, tokens) == (its.steps, its.tokens, its.tokens)


@torch.no_grad()
def test_overlaps_are_those_of_what_is_drafted() -> None:
    """Every method's, by the path that serves or the plainest there is; nothing where the answer ends."""
    made, given = tiny.objective(EagleOptions(depth=2)), tiny.batch((9, 7), first=[2, 3])
    found, ids = made.overlaps(given), made.words.ids
    for b in range(2):
        for i in range(given.starts[b + 1] - given.starts[b] - 3):
            at = given.starts[b] + i
            depth = min(2, given.starts[b + 1] - at - 2)
            outputs = served(made.network, made.target, given, b, i, depth) @ made.words.head.T
            wanted = [plain(outputs[s], ids, given.states[at + s + 1, -1], made.target) for s in range(depth)]
            np.testing.assert_allclose(found[at], wanted + [0] * (2 - depth), atol=1e-5)
    given = small.batch([9, 8], PARTS)
    spans = [(given.starts[b], given.starts[b + 1]) for b in range(2)]

    network = MedusaNetwork(small.medusa_config(2))
    for p in network.parameters():
        p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    heads = MedusaObjective(network, UNSURE, small.WORDS, MedusaOptions())
    found, states = heads.overlaps(given), network(UNSURE.norm(given.states[:, -1]))
    for start, stop in spans:
        for i in range(start, stop):
            for k in range(2):
                there = i + 2 + k < stop
                logits = states[i, k] @ heads.words.head.T
                wanted = plain(logits, small.IDS, given.states[i + 1 + k, -1], UNSURE) if there else 0
                assert found[i, k] == pytest.approx(wanted, abs=1e-5)

    learner = DistilObjective(student(), UNSURE, DistilOptions(depth=3))
    found = learner.overlaps(given)
    logits = learner.network(given.tokens, given.position, given.starts) @ learner.network.lm_head.T
    every = torch.arange(small.VOCAB)
    for start, stop in spans:
        for i in range(start, stop):
            for s in range(3):
                there = i + 2 + s < stop
                wanted = plain(logits[i + 1 + s], every, given.states[i + 1 + s, -1], UNSURE) if there else 0
                assert found[i, s] == pytest.approx(wanted, abs=1e-5)

    blocks = ParallelObjective(ParallelNetwork(small.parallel_config(), 3), UNSURE, small.WORDS, ParallelOptions())
    found, compared = blocks.overlaps(given), 0
    for start, stop in spans:
        for at in range(start + 3, stop):  # anchors that were said
            said = [int(small.WORDS.place[t]) for t in given.tokens[at + 1 : stop].tolist()]
            one = torch.tensor([at])
            normed = blocks._normed(given, one)
            draft = blocks.network.decide(  # as it serves, with the answer's own words before each slot
                given.tokens[one], normed, normed @ blocks.words.head.T, small.IDS,
                lambda logits, slot, said=said: torch.tensor([said[slot] if slot < len(said) else 0]),
            )  # fmt: skip
            for k in range(4):
                there = at + k + 1 < stop
                wanted = plain(draft.logits[0, k], small.IDS, given.states[at + k, -1], UNSURE) if there else 0
                assert found[at - 1, k] == pytest.approx(wanted, abs=1e-5)
                compared += there
    assert compared > 20


SHARED = "--tokens 64 --longest 64 --held-out 0.2 --judged 60 --warm-up 1 --draft-vocab 48 --evaluate 2"


def study(answers: Path, out: Path, *variants: str) -> int:
    named = [it for variant in variants for it in ("--variant", variant)]
    return ablation.main([
        str(out), "--data", str(answers), "--budget", "200", "--depth", "2", "-t", "1", f"--shared={SHARED}", *named,
    ])  # fmt: skip


def test_a_study_goes_on(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, out = Loop._step, tmp_path / "study"

    def interrupted(loop: Loop) -> dict[str, float]:
        if loop.out.name == "few" and loop.at.step == 3:
            raise KeyboardInterrupt
        return step(loop)

    variants = ["base=", "few=--draft-vocab 20 --steps-ttt 1", "heads=--method medusa --heads 1"]
    monkeypatch.setattr(Loop, "_step", interrupted)
    assert study(answers, out, *variants) == 130
    assert list(json.loads((out / "ablation.json").read_text())["variants"]) == ["base"]
    taken: list[str] = []

    def counted(loop: Loop) -> dict[str, float]:
        taken.append(loop.out.name)
        return step(loop)

    monkeypatch.setattr(Loop, "_step", counted)
    variants += ["block=--method parallel --layers 1 --block 3", "student=--method distil --layers 1"]
    assert study(answers, out, *variants) == 0
    said = capsys.readouterr()
    assert "going on at step 2" in said.err
    assert "left of all" in said.err
    found = json.loads((out / "ablation.json").read_text())["variants"]
    steps = found["base"]["steps"]
    assert [taken.count(name) for name in ("base", "few", "heads")] == [0, steps - 2, steps]
    assert [its["length"] for its in found.values()] == [2, 2, 1, 2, 2]
    assert (
        len({its["tokens"] for its in found.values()}) == len({tuple(its["held_out"]) for its in found.values()}) == 1
    )
    for its in found.values():
        for kind in ("greedy", "sampled"):
            figure = its["figures"][kind]
            assert 1 <= figure["low"] <= figure["tokens_per_step"] <= figure["high"] <= 3
            assert figure["ratio_low"] <= figure["ratio"] <= figure["ratio_high"]
    assert found["base"]["figures"]["greedy"]["ratio_low"] == found["base"]["figures"]["greedy"]["ratio_high"] == 1
    curve = json.loads((out / "heads" / "curve.json").read_text())
    assert found["heads"]["figures"]["greedy"]["tokens_per_step"] == pytest.approx(curve[-1]["tokens_per_step"])
    assert (out / "ablation.md").read_text() == said.out.split("\n| variant", 1)[0] + "\n| variant" + said.out.split(
        "\n| variant", 1
    )[1].removesuffix("\n")


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        (["a=", "a="], "two variants have one name"),
        (["a=--draft-vocab 8 --sed 1"], "No such option: --sed"),
        (["a=--seed 1"], "sets seed, which is alike for all: give it in --shared"),
        (["a=--minutes 1"], "sets minutes, which is this command's"),
        (["a=--method magic"], "the method 'magic' of a is not known"),
        (["a"], "is no NAME=OPTIONS"),
    ],
)
def test_what_cannot_be_compared(
    variants: list[str], said: str, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(answers, tmp_path, *variants) == 2
    assert said in capsys.readouterr().err
