"""The loop: it goes on after a kill as if nothing had been, several processes are one, and it says what is wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace.drafters.learned import checkpoint
from outpace.errors import ParameterError, TrainingError
from outpace.models.weights import q4_1
from outpace.training import loop
from outpace.training.data import Answer
from outpace.training.loop import in_four_bits, orthogonal, rounded, schedule
from outpace.training.objective import Packing, TrainBatch
from outpace.training.options import EagleOptions, LoopOptions
from tests.training import eagle_helpers, tiny_loop


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Folders of a training that was killed at its sixth step and of one by two processes."""
    killed, two = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    jobs = [{"out": str(killed), "steps": 10, "gather": 2, "dies_at": 6, "env": {}}] + [
        {"out": str(two), "steps": 5, "gather": 2, "env": {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}}
        for rank in range(2)
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.tiny_loop", *map(json.dumps, jobs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [-signal.SIGKILL, 0, 0], done.stderr
    return killed, two


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes longer than all else here; the trainings in processes of their own do it."""
    monkeypatch.setattr(loop, "draw", lambda path, rows: None)


@pytest.mark.parametrize("options", [{"optimiser": "muon"}, {"optimiser": "adamw"}, {"average": 0.9}], ids=str)
def test_state_is_all_there_is(tmp_path, options):
    """Stopped and gone on in another loop: the same bits."""
    whole = tiny_loop.loop(tmp_path, 9, **options)
    whole.run()
    (tmp_path / loop.SNAPSHOT).unlink()
    first = tiny_loop.loop(tmp_path, 9, **options)
    for _ in range(5):
        first._step()
    first._snapshot()
    second = tiny_loop.loop(tmp_path, 9, **options)
    assert second.resume()
    second.run()
    assert tiny_loop.digest(second) == tiny_loop.digest(whole)
    assert bool(second.average) == ("average" in options)
    assert all(torch.equal(*means) for means in zip(second.average, whole.average, strict=True))
    assert second.rows == [
        {**row, "seconds": its["seconds"]} for row, its in zip(whole.rows[1:], second.rows, strict=True)
    ]


def test_killed_and_resumed(ended, tmp_path):
    out, _ = ended
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "curve.json", "curve.png", "model.safetensors", "snapshot.pt",
    ]  # fmt: skip
    again = tiny_loop.loop(out, 10, 2)
    assert again.resume()
    assert again.at.step == 5
    again.run()
    whole = tiny_loop.loop(tmp_path, 10, 2)
    whole.run()
    assert tiny_loop.digest(again) == tiny_loop.digest(whole)
    assert whole.at.step == 10
    assert whole.at.epoch > 0


@pytest.mark.parametrize(("short", "long"), [({"steps": 10}, {"steps": 20}), ({"epochs": 2}, {"epochs": 4})], ids=str)
def test_goes_on_to_a_greater_length(tmp_path, short, long):
    """From before the rate fell: the bits of a whole training of that length. Once over, it takes no step."""

    def made(out, steps=None, **options):
        return tiny_loop.loop(tmp_path / out, steps, fall=0.2, **options)

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = made("whole", **long)
    whole.run()
    first = made("parts", **short)
    for _ in range(5):
        first._step()
    first._snapshot()
    second = made("parts", **long)
    assert second.resume()
    assert not second.over
    second.run()
    assert second.at.total == whole.at.total == whole.at.step
    assert tiny_loop.digest(second) == tiny_loop.digest(whole)
    for length in (short, long):
        again = made("parts", **length)
        assert again.resume()
        assert again.over
        assert again.run().step == whole.at.step
        assert tiny_loop.digest(again) == tiny_loop.digest(whole)


def test_two_processes_are_one(ended, tmp_path):
    _, out = ended
    one = tiny_loop.loop(tmp_path, 5, 2)
    one.run()
    theirs = torch.load(out / "weights.pt", weights_only=True)
    for mine, other in zip(one.objective.network.parameters(), theirs, strict=True):
        torch.testing.assert_close(mine.detach(), other, atol=1e-5, rtol=1e-4)


def test_averaged_weights_are_judged_and_kept(tmp_path, monkeypatch):
    """Each step keeps 0.6 of them, but the first ones less: there the average is a mean."""
    made = tiny_loop.loop(tmp_path, 3, average=0.6)
    params = list(made.objective.network.parameters())
    seen = [[p.detach().clone() for p in params]]
    for _ in range(3):
        made._step()
        seen.append([p.detach().clone() for p in params])
    for mean, *weights in zip(made.average, *seen, strict=True):
        first = sum(weights[:2]) / 2
        torch.testing.assert_close(mean, 0.6 * (0.6 * first + 0.4 * weights[2]) + 0.4 * weights[3])
    judged, simulate = [], made.objective.simulate

    def spy(batch):
        judged.append([p.detach().clone() for p in params])
        return simulate(batch)

    monkeypatch.setattr(made.objective, "simulate", spy)
    made._evaluate()
    assert all(torch.equal(*pair) for weights in judged for pair in zip(weights, made.average, strict=True))
    assert all(torch.equal(*pair) for pair in zip(params, seen[3], strict=True))
    kept = checkpoint.read(tmp_path).tensors
    for (name, _), mean in zip(made.objective.network.named_parameters(), made.average, strict=True):
        torch.testing.assert_close(torch.from_numpy(kept[name]), mean.bfloat16().float())


def test_an_average_begins_where_a_snapshot_has_none(tmp_path):
    tiny_loop.loop(tmp_path, 2)._snapshot()
    made = tiny_loop.loop(tmp_path, 2, average=0.5)
    assert made.resume()
    assert all(torch.equal(*pair) for pair in zip(made.average, made.objective.network.parameters(), strict=True))


@pytest.mark.parametrize(
    ("answer", "finish", "start"),
    [
        ([5, 6, 7, 8] + [1, 2] * 6, "length", 6),  # the first time is no repetition
        ([5, 6] + [1, 2] * 6, "stop", 14),
        ([5, 6, 1, 2, 3] * 2, "length", 10),  # twice is no loop
        ([5, 6] + [9] * 11, "length", 13),  # nor are eleven tokens
        ([5, 6] + [9] * 12, "length", 3),
        ([*range(10, 30)] * 3 + [10, 11], "length", 20),
        ([1, 2] * 15 + [3], "length", 31),
    ],
)
def test_a_tail_that_repeats_itself_is_found_and_weighs_what_it_is_given(answer, finish, start):
    made = Answer("0", "test", np.array([0, 1, 0, *answer], np.int32), 3, finish=finish)
    assert made.loop_start() == 3 + start
    answers = tiny_loop.Said(0, 0)
    answers.all = [made]
    packing = Packing(answers, tiny_loop.Random(answers), 99, 99, 0.25, 0, loop_weight=0.125)
    # A position's weight is that of the token after it; the last one has none.
    weights = [0.25] * 2 + [1.0] * start + [0.125] * (len(answer) - start)
    assert packing.batch([0]).weight.tolist() == [*weights[: len(answer) + 2], 0.0]


def test_numbers_that_are_not_finite(tmp_path):
    made = tiny_loop.loop(tmp_path, 30, spoilt=7)
    with pytest.raises(TrainingError, match=r"the loss is nan at step .*give a smaller lr than 0.001"):
        made.run()
    if made.rows:
        assert (tmp_path / loop.SNAPSHOT).exists()
    assert all(torch.isfinite(p).all() for p in made.objective.network.parameters())


@pytest.mark.parametrize("name", ["data", "target", "lr"])
def test_a_snapshot_of_something_else_is_refused(tmp_path, name):
    identity = {"data": "a", "target": "b", "lr": 0.001}
    tiny_loop.loop(tmp_path, 2, identity=identity)._snapshot()
    with pytest.raises(
        TrainingError, match=rf"was made with {name} {identity[name]}, not other: give what .*steps.* may"
    ):
        tiny_loop.loop(tmp_path, 2, identity={**identity, name: "other"}).resume()
    path = tmp_path / loop.SNAPSHOT
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TrainingError, match=r"cannot be read .*remove it, and train again"):
        tiny_loop.loop(tmp_path, 2, identity=identity).resume()


def test_a_snapshot_that_does_not_tell_all_is_refused(tmp_path):
    """Before steps_ttt was recorded, the loop's steps stood in its place."""
    tiny_loop.loop(tmp_path, 2, identity={"method": "eagle", "steps": 9})._snapshot()
    with pytest.raises(TrainingError, match="does not record its steps_ttt, which may not be 3: begin with"):
        tiny_loop.loop(tmp_path, 2, identity={"method": "eagle", "steps": 9, "steps_ttt": 3}).resume()


def test_a_training_goes_on_with_the_optimisers_state_of_another(tmp_path):
    """Where the other one's folder has it, and it is of the same optimiser."""
    identity, said = {"method": "eagle", "data": "a"}, []

    def begun(folder, **options):
        made = tiny_loop.loop(tmp_path / "second", 6, identity={**identity, "data": "other"}, **options)
        made._say = said.append
        made.continue_from(tmp_path / folder)
        return made

    first = tiny_loop.loop(tmp_path / "first", 6, identity=identity)
    first.run()
    (tmp_path / "medusa").mkdir()
    tiny_loop.loop(tmp_path / "medusa", 6, identity={"method": "medusa"})._snapshot()
    made = begun("first")
    for own, other in zip(made.optimiser.state(), first.optimiser.state(), strict=True):
        assert own["state"].keys() == other["state"].keys()
        for i, values in own["state"].items():
            assert all(torch.equal(value, other["state"][i][name]) for name, value in values.items())
    assert (made.at.step, made.at.continued) == (0, True)
    for folder, options in (("nothing", {}), ("medusa", {}), ("first", {"optimiser": "adamw"})):
        other = begun(folder, **options)
        assert not other.at.continued
        assert not any(part["state"] for part in other.optimiser.state())
    has = [line.removeprefix(f"beginning with {tmp_path}/") for line in said]
    assert has == [
        "first, with its optimiser's state", "nothing, without its optimiser's state: there is none",
        "medusa, without its optimiser's state: there is none",
        "first, without its optimiser's state: it is another optimiser's",
    ]  # fmt: skip
    assert not made.optimiser.fits([{"state": {0: {"momentum": torch.zeros(1, 2)}}}, {"state": {}}])


def test_stops_without_gains(tmp_path):
    made = tiny_loop.loop(tmp_path, 400, patience=2)
    made.at.best = 99.0
    assert made.run().step == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "by one of steps, epochs, minutes"),
        ({"steps": 1, "minutes": 2}, "by one of steps, epochs, minutes"),
        ({"epochs": 0}, "epochs=0 is out of range"),
        ({"steps": 1, "lr": 1.0}, "lr=1.0 is out of range"),
        ({"steps": 1, "gather": 0}, r"gather=0 is out of range: give a number in \[1, inf\)"),
        ({"steps": 1, "optimiser": "sgd"}, "optimiser='sgd' is not known: use one of muon, adamw"),
    ],
)
def test_options(options, said):
    with pytest.raises(ParameterError, match=said):
        LoopOptions(**options).check()


@pytest.mark.parametrize(("tokens", "longest"), [(1024, 1024), (3072, 2048)])
def test_answers_are_cut_so_that_they_fit_into_a_batch(tokens: int, longest: int) -> None:
    options = LoopOptions(steps=1, tokens=tokens)
    options.check()
    assert options.longest == longest


def test_minutes_become_steps(tmp_path, monkeypatch):
    """By a clock of which a step takes a second: what comes before the tenth counts, too."""
    made = tiny_loop.loop(tmp_path, None, minutes=0.3)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(made.at.step))
    assert made.at.total is None
    at = made.run()
    assert (at.step, at.total, at.seconds) == (18, 18, 18.0)


@pytest.mark.parametrize("stopped", [5, 12])
@pytest.mark.parametrize(("minutes", "steps"), [(0.3, 18), (0.6, 36), (0.1, 12)])
def test_minutes_count_what_came_before(tmp_path, monkeypatch, stopped, minutes, steps):
    """Stopped before or after the speed was known; all steps of a second, by the clock."""
    made = tiny_loop.loop(tmp_path, None, minutes=0.3)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(made.at.step))

    step = made._step

    def stopping():
        if made.at.step == stopped:
            made._snapshot()
            raise KeyboardInterrupt
        return step()

    made._step = stopping
    with pytest.raises(KeyboardInterrupt):
        made.run()
    made = tiny_loop.loop(tmp_path, None, minutes=minutes)
    assert made.resume()
    at = made.run()
    # What cannot be known before ten steps more is not cut short by it.
    assert at.step == max(steps, 15 if stopped == 5 else 12)


def test_schedule_and_muon():
    assert [schedule(s, 10, 2, 0.0) for s in (0, 1, 2, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert schedule(10, 10, 2, 0.05) == pytest.approx(0.05)
    # The last 4 of 10 steps fall; 0: none does.
    assert [schedule(s, 10, 2, 0.0, 0.4) for s in (2, 5, 6, 8, 10)] == pytest.approx([1, 1, 1, 0.5, 0])
    assert [schedule(s, 10, 2, 0.0, 0.0) for s in (2, 9)] == [1, 1]
    for shape in ((6, 30), (30, 6)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        sizes = torch.linalg.svdvals(orthogonal(matrix))
        assert 0.6 < float(sizes.min()) < float(sizes.max()) < 1.3
        torch.testing.assert_close(orthogonal(matrix, torch.bfloat16), orthogonal(matrix), atol=0.05, rtol=0)


def test_four_bits_are_what_is_kept_and_learned_through(tmp_path):
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 96, generator=draw) * torch.logspace(-3, 2, 7)[:, None]
    matrix[2, 32:64] = 0.25
    kept = torch.from_numpy(q4_1.decode(q4_1.encode(matrix.numpy())))
    assert torch.equal(rounded(matrix), kept)
    assert not torch.equal(matrix, kept)

    layer = torch.nn.Linear(96, 7, bias=False)
    layer.weight.data = matrix.clone()
    with in_four_bits(layer, True):
        out = layer(torch.ones(96))
        out.square().sum().backward()
    torch.testing.assert_close(out, kept.sum(1))
    assert torch.equal(layer.weight, matrix)  # only its gradient is the rounded one's
    torch.testing.assert_close(layer.weight.grad, (2 * kept.sum(1))[:, None].expand(7, 96))

    # In a training: through rounded weights while the rate falls, through its own before.
    digests = []
    for i, (fall, four_bits) in enumerate([(0.5, False), (0.5, True), (0.0, False), (0.0, True)]):
        made = tiny_loop.loop(tmp_path / str(i), 8, fall=fall, four_bits=four_bits)
        made.run()
        digests.append(tiny_loop.digest(made))
    assert digests[0] != digests[1]
    assert digests[2] == digests[3]


def test_a_prompt_weighs_what_it_is_given():
    tokens, states = [np.arange(6, dtype=np.int32)], [torch.zeros(6, 4, 2)]
    assert TrainBatch.pack(tokens, states, [3], before=0.25).weight.tolist() == [0.25, 0.25, 0.25, 1, 1, 0]
    made = eagle_helpers.objective(EagleOptions(candidates=0, steps_ttt=1))
    losses = []
    for first, before in ((0, 0.0), (7, 1.0), (7, 0.5), (7, 0.0)):
        batch = eagle_helpers.batch((12,), [first])
        weight = torch.where(batch.weight > 0, 1.0, before)
        weight[-1] = 0
        losses.append(float(made.loss(replace(batch, weight=weight))[0].detach()))
    assert losses[0] == losses[1]
    assert min(losses[1], losses[3]) < losses[2] < max(losses[1], losses[3])


def test_sparkline():
    assert loop.sparkline([]) == ""
    assert loop.sparkline([1, 2, 3]) == "▁▅█"
    assert len(loop.sparkline(list(range(100)), 10)) == 10


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_curve_shows_its_points(count):
    """A line through one point would show nothing."""
    rows = [{"tokens": 1000 * i, "loss": 2.0, "tokens_per_step": 1.5, "acceptance": [0.5, 0.2]} for i in range(count)]
    lines = [line for axes in loop.drawn(rows).axes for line in axes.get_lines()]
    assert [len(line.get_xdata()) for line in lines] == [count] * 4
    assert all((line.get_marker() != "None") == (count < 10) for line in lines)
