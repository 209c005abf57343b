"""Tuning while serving: what is recorded is bounded, a shift of domain is learnt, a kill leaves a whole drafter."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import Engine, SamplingParams
from outpace.drafters.learned.checkpoint import read
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.configs import tensor_shapes
from outpace.errors import DataError, ParameterError
from outpace.models.options import LoadOptions
from outpace.training import curves, online
from outpace.training.data import Answers
from outpace.training.online import Pace, run_round, watch
from outpace.training.options import OnlineOptions
from outpace.training.record import Recorder, recording
from outpace.training.versions import Versions
from tests.training import eagle_helpers
from tests.training.commands import outpace
from tests.training.conftest import VOCAB
from tests.training.test_train_eagle import OPTIONS


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr(curves, "draw", lambda path, rows: None)


def recorder(path, answers, **options):
    meta = Answers.open(answers).meta
    return Recorder(path, model=meta["model"], load=meta["load"], target=meta["target"], **options)


def add(its, prompt, said):
    its.add(np.array(prompt, np.int32), tuple(said), temperature=0.0, seed=1, finish="stop")


def test_recorder_is_bounded(answers, tmp_path):
    its = recorder(tmp_path / "r", answers, most=40, every=0.0)
    for i in range(1, 9):
        add(its, [i, 2, 3], [4, 5, 6, 7, i])
        kept = Answers.open(tmp_path / "r")
        assert int(kept.lengths().sum()) <= 40
        assert kept[len(kept) - 1].tokens.tolist() == [i, 2, 3, 4, 5, 6, 7, i]
    add(its, [5, 2, 3], [4, 5, 6, 7, 5])  # is there already: it is the newest now
    add(its, [1] * 20, [2] * 30)  # would push all others out
    assert [a.tokens[0] for a in Answers.open(tmp_path / "r")] == [4, 6, 7, 8, 5]
    assert (tmp_path / "r").stat().st_mode & 0o077 == 0
    add(recorder(tmp_path / "r", answers, most=16, every=0.0), [9], [9])  # goes on, with less room
    assert [a.tokens[0] for a in Answers.open(tmp_path / "r")] == [5, 9]
    with pytest.raises(DataError, match="has other answers than recorded ones: name another folder"):
        recorder(answers, answers)


def test_records_what_an_engine_says(model, tmp_path):
    """What it was asked and answered, and nothing that was not the target's own choice."""
    folder = tmp_path / "r"
    load = LoadOptions(backend="native")
    with Engine.load(str(model), drafter=None, backend="native") as engine:
        with recording(engine, folder, model=str(model), load=load):
            said = [engine.generate([7, i], SamplingParams(max_tokens=5)) for i in (1, 2, 1)]
            engine.cancel(engine.add([3, 3], SamplingParams(max_tokens=5)))
            engine.generate([5, 5], SamplingParams(max_tokens=5, rules=[Free()]))
        engine.generate([9, 9], SamplingParams(max_tokens=5))
    found = {tuple(answer.tokens.tolist()) for answer in Answers.open(folder)}
    assert found == {(7, i, *its.token_ids) for i, its in zip((1, 2), said[:2], strict=True)}


class Free:
    """A rule that allows everything."""

    def start(self, prompt):
        return None

    def advance(self, state, token):
        return state

    def apply(self, state, logits):
        pass


def test_a_full_disk_ends_the_recording_and_no_request(model, tmp_path, monkeypatch, caplog):
    def full(*given):
        raise OSError(28, "No space left on device")

    with Engine.load(str(model), drafter=None, backend="native") as engine:
        load = LoadOptions(backend="native")
        with recording(engine, tmp_path / "r", model=str(model), load=load) as its:
            its._every = 0.0
            monkeypatch.setattr(online.folders, "write_shard", full)
            for i in (1, 2):
                assert engine.generate([7, i], SamplingParams(max_tokens=5)).finish_reason == "length"
    assert caplog.text.count("nothing more is recorded") == 1


@pytest.fixture(scope="module")
def follower(model, tmp_path_factory):
    """A target that says a fixed token after each: its layers add nothing, its head has the embedding's rows moved."""
    folder = tmp_path_factory.mktemp("follower")
    for path in model.iterdir():
        shutil.copy(path, folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCAB, 64, generator=draw)
    follows = torch.randperm(VOCAB, generator=draw)
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = torch.empty_like(embedding)
    tensors["lm_head.weight"][follows] = embedding / 4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


def test_a_shift_of_domain_is_learnt(follower, tmp_path):
    """A drafter of other words serves, is tuned on what it served, and taken by the engine that still runs."""
    data, start, out, recorded = (tmp_path / name for name in ("data", "start", "tuned", "recorded"))
    params, load = SamplingParams(max_tokens=24, ignore_eos=True), LoadOptions(backend="native")
    with Engine.load(str(follower), drafter=None, backend="native") as engine:
        with recording(engine, data, model=str(follower), load=load):
            engine.generate_many([[t] for t in range(1, 40)], params)
        outpace("train", "eagle", "--data", data, "--out", start, "--steps", 6, *OPTIONS, "--draft-vocab", 320)
        with recording(engine, recorded, model=str(follower), load=load):
            engine.generate_many([[t, t] for t in range(200, 240)], params)
    options = OnlineOptions(
        share=1e3, most_load=float("inf"), least=100, steps=60, evaluate=20, lr=1e-2, tokens=256, longest=64, poll=0.01
    )
    (first,) = watch(recorded, start, out, options, rounds=1, replay=data, threads=1)
    assert first.after > first.before + 0.5
    assert (first.kept, first.answers) == (True, 40)
    assert 0 < first.replayed < 39
    made = read(out)
    assert made.config == read(start).config
    assert made.recipe["start"] == str(start)
    nothing = OnlineOptions(share=1e3, most_load=float("inf"), steps=1, lr=1e-12, tokens=256, longest=64)
    second = run_round(recorded, start, out, nothing, threads=1)
    assert not second.kept
    assert second.before == pytest.approx(first.after, abs=0.05)  # saved weights are rounded
    assert out.resolve().name == "1"
    assert sorted(path.name for path in (tmp_path / ".tuned.versions").iterdir()) == ["1", "lock", "online.json"]
    assert [row["kept"] for row in json.loads((tmp_path / ".tuned.versions/online.json").read_text())] == [True, False]
    with pytest.raises(DataError, match="is there and is no drafter that was tuned online"):
        run_round(recorded, out, start, options)


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from outpace.training.versions import Versions
link, made, left = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def dying(call):
    def before(*given, **options):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return call(*given, **options)
    return before
for name in ("rename", "symlink_to", "replace"):
    setattr(Path, name, dying(getattr(Path, name)))
shutil.rmtree = dying(shutil.rmtree)
Versions(link).publish(made)
"""


def test_a_kill_leaves_a_whole_drafter(tmp_path):
    link = tmp_path / "drafter"

    def made(value):
        config = eagle_helpers.config()
        tensors = {name: np.full(shape, value, np.float32) for name, shape in tensor_shapes(config).items()}
        words = {"d2t": np.zeros(24, np.int64), "t2d": np.arange(40) < 24}
        folder = Versions(link).folder / "made"
        write_checkpoint(folder, "eagle", config, tensors | words, {}, {})
        return folder

    def value():
        return float(read(link).tensors["norm.weight"][0])

    for number in (1, 2):
        Versions(link).publish(made(number))
    now = 2.0
    for point in range(12):  # a kill before each call that changes the disk, until there are no more
        folder = made(point + 3)
        done = subprocess.run([sys.executable, "-c", KILLED, str(link), str(folder), str(point)], check=False)
        assert value() == (now if point < 3 else point + 3.0)
        now = value()
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0
    assert point > 3
    Versions(link).publish(made(9))
    assert value() == 9.0
    kept = [path.name for path in Versions(link).folder.iterdir() if path.name.isdigit()]
    assert len(kept) == 2


def test_pace(monkeypatch):
    """By a clock of our own: after 2 CPU seconds at a tenth it waits until 20 are over, and then for the machine."""
    clock, load = {"wall": 0.0, "cpu": 0.0}, iter([3.0, 3.0, 0.1])
    monkeypatch.setattr(online.time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(online.time, "process_time", lambda: clock["cpu"])
    monkeypatch.setattr(online, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (next(load), 0.0, 0.0))
    slept = []
    pace = Pace(0.1, 0.5, 7.0, slept.append)
    clock.update(wall=3.0, cpu=2.0)
    pace()
    assert slept == [pytest.approx(17.0), 7.0, 7.0]


@pytest.mark.parametrize(("name", "value"), [("share", 0.0), ("steps", 0), ("held_out", 1.0), ("most_load", 0.0)])
def test_options(name, value):
    with pytest.raises(ParameterError, match=f"{name}={value} is out of range"):
        OnlineOptions(**{name: value}).check()
