"""Training data with the demo model: its hidden states, kept and computed, and the commands, killed and run again."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from outpace.errors import DataError, ParameterError
from outpace.models.base import Batch
from outpace.models.fingerprint import identity
from outpace.models.load import load
from outpace.models.native.model import NativeModel
from outpace.models.options import LoadOptions
from outpace.training import data as folders
from outpace.training import hidden_states
from outpace.training.data import Answer, Answers, Writer
from outpace.training.hidden_states import HiddenStateSource
from tests.integration.test_cli import outpace

LENGTHS = (5, 31, 64, 2, 300, 17)
LAYERS = (1, 14, 26, 29)


@pytest.fixture(scope="module")
def model() -> Iterator[NativeModel]:
    found, _ = load("demo", LoadOptions(backend="native"))
    assert isinstance(found, NativeModel)
    yield found
    found.close()


@pytest.fixture
def folder(tmp_path: Path, model: NativeModel) -> Path:
    rng = np.random.default_rng(0)
    target = identity(model, LoadOptions(backend="native"))
    out = tmp_path / "answers"
    with Writer(out, model="demo", target=target, load={"backend": "native"}, options={}, shard=4) as writer:
        for i, n in enumerate(LENGTHS):
            writer.add(Answer(str(i), "s", rng.integers(0, 49152, n).astype(np.int32), 1))
    return out


def states(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("states-*"))}


def test_kept_states_are_the_computed_ones(folder: Path, model: NativeModel) -> None:
    """Bit for bit, in any order, planned or not; and those of one forward a sequence, rounded by torch."""
    answers = Answers.open(folder)
    rest, held = answers.split(0.34)
    with HiddenStateSource(rest, model=model, ahead=40) as source, HiddenStateSource(held, model=model) as other:
        assert not source.cached
        order = [2, 0, 3, 1, 1]
        source.plan(order)
        computed = [source.states(i) for i in order]
        unplanned = [other.states(1), other.states(0)]
        source.plan([0, 1, 2, 3])
        assert torch.equal(source.states(3), computed[2]), "out of order, as soon as it is wanted"
        assert torch.equal(source.states(0), computed[1])
    assert model.kv.rows == []
    cache = hidden_states.Cache(folder)
    assert cache.layers == LAYERS
    assert cache.bytes == cache.missing == sum(LENGTHS) * 4 * 576 * 2
    assert cache.fill(model) == sum(LENGTHS)
    assert cache.complete
    answers = Answers.open(folder)
    rest, held = answers.split(0.34)
    with (
        HiddenStateSource(rest) as source,
        HiddenStateSource(held) as other,
        HiddenStateSource(answers, [26, 1]) as fewer,
    ):
        assert source.cached
        assert fewer.cached
        assert all(torch.equal(source.states(i), found) for i, found in zip(order, computed, strict=True))
        assert all(torch.equal(other.states(1 - i), found) for i, found in enumerate(unplanned))
        whole = fewer.states(4)
    row = model.kv.alloc()
    batch = Batch.pack([row], [answers[4].tokens], [0], [False], hidden_layers=(26, 1, 29))
    one = model.forward(batch).hidden_states(np.arange(300, dtype=np.int32)).numpy()
    model.kv.free(row)
    assert whole.shape == (300, 3, 576)
    assert torch.equal(whole, torch.from_numpy(one).to(torch.bfloat16))


def test_states_that_were_cut_short_go_on_to_the_same_bytes(
    folder: Path, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(answers: int, tokens: int) -> None:
        if tokens == LENGTHS[2]:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match="No space left"):
        hidden_states.Cache(folder).fill(model, full)
    assert hidden_states.Cache(folder).missing == sum(LENGTHS[3:]) * 4608
    hidden_states.Cache(folder).fill(model)
    right = states(folder)
    assert [len(its) for its in right.values()] == [sum(LENGTHS[:4]) * 4608, sum(LENGTHS[4:]) * 4608]
    first, second = folder / "states-00000.bin", folder / "states-00001.bin"
    for cut in (0, 1, 36 * 4608 - 1, 36 * 4608, 40 * 4608 + 7):  # by a kill
        os.truncate(first.rename(first.with_suffix(".part")), cut)
        hidden_states.Cache(folder).fill(model)
        assert states(folder) == right
    os.truncate(second, 300 * 4608)  # as if its shard had grown by an answer since
    answers = Answers.open(folder)
    with HiddenStateSource(answers, model=model) as source:
        assert not source.cached
    hidden_states.Cache(folder).fill(model)
    assert states(folder) == right
    with pytest.raises(DataError, match=r"keeps the outputs of layers \[1, 14, 26\], not \[3\]"):
        hidden_states.Cache(folder, [3])
    with second.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="larger than its answers' states"):
        HiddenStateSource(answers)
    second.unlink()
    usage = namedtuple("usage", "free")(200 * 4608)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"would take 1.4 MiB, and 900.0 KiB are free .*: 526.5 KiB are missing"):
        hidden_states.Cache(folder).fill(model)
    assert not second.with_suffix(".part").exists()


def test_states_come_from_the_answers_own_target(folder: Path, model: NativeModel) -> None:
    answers = Answers.open(folder)
    with HiddenStateSource(answers) as source, HiddenStateSource(answers, model=model) as given:
        assert torch.equal(source.states(1), given.states(1))
    with pytest.raises(ValueError, match="is closed"):
        source.states(0)
    other = Answers(
        folder, {**answers.meta, "load": {"backend": "native", "kv_dtype": "int8"}}, answers.columns, answers.index
    )
    with pytest.raises(DataError, match="kv dtype is auto, that of demo is int8"):
        HiddenStateSource(other)
    with pytest.raises(ParameterError, match="it has 0 to 29"):
        HiddenStateSource(answers, [30], model=model)


def test_a_disk_that_cannot_hold_the_states_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Name a colour.\n")
    common = ("train", "data", "--prompts", prompts, "-n", "4", "--backend", "native", "--cache", "--json")
    with monkeypatch.context() as patched:
        usage = namedtuple("usage", "free")(1000)
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        code, _, err = outpace(capsys, *common, "--out", tmp_path / "a")
    assert code == 2
    assert "are missing" in err
    assert not list((tmp_path / "a").glob("answers*"))
    code, out, err = outpace(capsys, *common, "--out", tmp_path / "a")
    assert code == 0, err
    assert json.loads(out)["states_bytes"] == (tmp_path / "a" / "states-00000.bin").stat().st_size
    assert "the states of at most" in err
    code, out, _ = outpace(capsys, "train", "cache", tmp_path / "a", "--json")
    assert code == 0
    assert json.loads(out)["tokens"] == 0
