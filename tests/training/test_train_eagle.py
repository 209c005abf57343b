"""``outpace train eagle``: a drafter comes out, another target's answers do not go in."""

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outpace.cli.app import parse
from outpace.common.installing import install
from outpace.drafters.learned import checkpoint
from outpace.drafters.learned import checkpoint as checkpoints
from outpace.drafters.learned.config import MedusaConfig, ParallelConfig
from outpace.errors import DataError, MissingExtraError, ParameterError, TrainingError
from outpace.models.base import Batch
from outpace.models.load import load, resolve
from outpace.models.options import LoadOptions
from outpace.text.tokenizer import Tokenizer
from outpace.training.loop import Loop
from outpace.training.target import TargetWeights
from tests.training.commands import outpace

OPTIONS = (
    "--draft-vocab", 48, "--tokens", 64, "--longest", 64, "--held-out", 0.2, "--judged", 40, "--evaluate", 3,
    "--warm-up", 2, "--depth", 2, "--threads", 1, "--lr", 3e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(answers, tmp_path_factory):
    """A drafter of six steps, and what the command said of it."""
    out = tmp_path_factory.mktemp("drafter")
    return out, json.loads(outpace("train", "eagle", "--data", answers, "--out", out, "--steps", 6, *OPTIONS, "--json"))


def test_trains_and_goes_on(answers, trained):
    out, said = trained
    assert said["steps"] == 6
    rows = json.loads((out / "curve.json").read_text())
    assert [row["step"] for row in rows] == [3, 6]
    made = checkpoint.read(out)
    assert made.method == "eagle"
    assert made.config.hidden_layers == (1, 3, 4)
    assert made.target["fingerprint"] == made.recipe["target"]
    assert made.tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert int(made.tensors["t2d"].sum()) == len(made.tensors["d2t"]) == 48
    with pytest.raises(ParameterError, match="give --resume, or another folder"):
        outpace("train", "eagle", "--data", answers, "--out", out, "--steps", 6, *OPTIONS)
    assert made.recipe["steps_ttt"] == 3
    best = max(rows, key=lambda row: row["tokens_per_step"])  # the first of equals
    kept = [made.recipe[name] for name in ("tokens", "steps_taken", "tokens_seen", "tokens_per_step")]
    assert kept == [64, best["step"], best["tokens"], best["tokens_per_step"]]
    with pytest.raises(TrainingError, match="was made with steps_ttt 3, not 2"):
        outpace("train", "eagle", "--data", answers, "--out", out, "--steps", 6, *OPTIONS, "--steps-ttt", 2, "--resume")


def test_resumed_with_more_steps(answers, trained, tmp_path, capsys):
    out = shutil.copytree(trained[0], tmp_path / "more")

    def resumed(*options):
        said = outpace("train", "eagle", "--data", answers, "--out", out, *OPTIONS, *options, "--resume", "--json")
        return json.loads(said)["steps"], capsys.readouterr().err

    assert resumed("--steps", 8, "--evaluate", 4)[0] == 8
    assert [row["step"] for row in json.loads((out / "curve.json").read_text())] == [3, 6, 8]
    steps, err = resumed("--steps", 8)
    assert (steps, "this training is finished, 8 of 8 steps are taken: greater --steps" in err) == (8, True)


def test_what_is_not_installed_is_said_before_the_first_step(answers, tmp_path, capsys, monkeypatch):
    """A picture can be missing; without the others no work begins."""
    begun = []
    step = Loop._step

    def watched(loop):
        begun.append(capsys.readouterr())
        return step(loop)

    monkeypatch.setattr(Loop, "_step", watched)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    given = ("train", "eagle", "--data", answers, *OPTIONS)
    said = outpace(*given, "--out", tmp_path / "out", "--steps", 2)
    assert parse(shlex.split(said.splitlines()[-1].removeprefix("try it: "))[1:])
    assert f"-d eagle:{tmp_path / 'out'} " in said
    assert "no matplotlib: curve.json will have the figures" in begun[0].err
    assert (tmp_path / "out" / "curve.json").exists()
    assert not (tmp_path / "out" / "curve.png").exists()
    begun.clear()
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MissingExtraError, match="training needs accelerate, which is not installed"):
        outpace(*given, "--out", tmp_path / "two", "--steps", 2)
    assert not begun
    where = ("--data", "x", "--out", "y")
    commands = [("data", "--prompts", "x", "--out", "y"), ("import", "x", "--out", "y"), ("cache", "x"),
                *((kind, *where, "--steps", "1") for kind in ("eagle", "parallel", "medusa", "distil"))]  # fmt: skip
    program = """
import json, sys
from outpace.cli.app import parse
from outpace.errors import MissingExtraError
sys.modules[sys.argv[1]] = None
for command in json.loads(sys.argv[2]):
    try:
        parse(["train", *command])()
    except MissingExtraError as error:
        print(error)
"""
    for package, all_of_them in (("pyarrow", commands), ("torch", commands[3:])):
        done = subprocess.run(
            [sys.executable, "-c", program, package, json.dumps(all_of_them)],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        missing = f"training needs {package}, which is not installed: {install('outpace[train]')}"
        assert done.stdout.count(missing) == len(all_of_them), done.stdout


def test_begins_with_a_drafter(answers, trained, tmp_path):
    """Its weights and its words: a step of no size leaves both as they were."""
    start, _ = trained
    tiny = ("--steps", 1, "--lr", 1e-12, "--start", start)
    outpace("train", "eagle", "--data", answers, "--out", tmp_path / "out", *OPTIONS, *tiny)
    given, made = checkpoint.read(start), checkpoint.read(tmp_path / "out")
    assert made.recipe["continued"], "the optimiser's state of the one it begins with"
    assert made.config == given.config
    for name, values in given.tensors.items():
        np.testing.assert_array_equal(made.tensors[name], values, err_msg=name)
    assert made.recipe["start"] == str(start)
    with pytest.raises(ParameterError, match=r"is EagleConfig.*begin with one of the same shape"):
        outpace("train", "eagle", "--data", answers, "--out", tmp_path, *OPTIONS, *tiny, "--hidden-layer", 2)
    outpace("train", "eagle", "--data", answers, "--out", tmp_path / "words", *OPTIONS, *tiny, "--draft-vocab", 32)
    fewer = checkpoint.read(tmp_path / "words")
    assert fewer.config == replace(given.config, draft_vocab=32)
    np.testing.assert_array_equal(fewer.tensors["fc.weight"], given.tensors["fc.weight"])
    assert set(np.flatnonzero(fewer.tensors["t2d"])) < set(np.flatnonzero(given.tensors["t2d"]))
    config = json.loads((start / "config.json").read_text())
    config["outpace"]["target"]["fingerprint"] = "another"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((start / "model.safetensors").read_bytes())
    with pytest.raises(ParameterError, match="was trained beside another target: begin with one of this target"):
        outpace("train", "eagle", "--data", answers, "--out", tmp_path / "no", *OPTIONS, *tiny, "--start", tmp_path)


def test_another_target_is_refused(answers, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(DataError, match="make answers of this one, or give theirs as model"):
        outpace("train", "eagle", "--data", answers, "--model", other, "--out", tmp_path, "--steps", 1, *OPTIONS)


def test_parts_are_the_native_model_s():
    """Embedding, head and last layer in torch, against the forward that serves."""
    weights = TargetWeights(resolve("demo"))
    parts = weights.parts()
    model, _ = load("demo")
    try:
        tokens = np.arange(50, 62, dtype=np.int32)
        row = model.kv.alloc()
        last = model.info.layers - 1
        output = model.forward(Batch.pack([row], [tokens], [0], [True], hidden_layers=(last,)))
        every = np.arange(len(tokens), dtype=np.int32)
        state = torch.from_numpy(output.hidden_states(every).numpy()[:, 0])
        ids = torch.arange(0, parts.vocab, 7)
        wanted = torch.from_numpy(output.logits(every))
        # The native head rounds activations to 8 bits; the plain head's choice is nearly always the same.
        found = parts.logits(state)
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
        assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9
        torch.testing.assert_close(parts.logits(state, ids), found[:, ids])
        np.testing.assert_allclose(parts.embed(torch.from_numpy(tokens).long()), model.parts.embed(tokens), atol=1e-6)
        np.testing.assert_allclose(parts.norm(state), model.parts.norm(state.numpy()), rtol=1e-4, atol=1e-4)
    finally:
        model.close()
    layer = weights.layer(last)
    assert {name: tuple(its.shape) for name, its in layer.items() if name in "qk"} == {"q": (576, 576), "k": (192, 576)}


def train(method: str, answers: Path, out: Path, *more: object) -> dict[str, Any]:
    basics = ("--steps", 3, "--tokens", 200, "--longest", 100, "--held-out", 0.2, "--warm-up", 1, "--draft-vocab", 48)
    said = outpace("train", method, "--data", answers, "--out", out, "--threads", 1, *basics, *more, "--json")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_parallel(answers: Path, tmp_path: Path) -> None:
    found = train("parallel", answers, tmp_path / "out", "--layers", 1, "--block", 3, "--markov-rank", 4)
    assert found["steps"] == 3
    assert 1 <= found["cut_tokens_per_step"] <= 4
    made = checkpoints.read(tmp_path / "out")
    assert (made.method, made.config.draft_vocab) == ("parallel", 48)
    assert made.recipe["block"] == 3
    counted = set(range(1, 41))
    assert isinstance(made.config, ParallelConfig)
    assert made.config.mask_token not in counted
    assert np.isfinite(made.tensors["fc.weight"]).all()


def test_medusa_keeps_the_tree_it_found(answers: Path, tmp_path: Path) -> None:
    found = train("medusa", answers, tmp_path / "out", "--heads", 2, "--nodes", 5, "--ranks", 48, "--lr", 0.01)
    made = checkpoints.read(tmp_path / "out")
    assert made.method == "medusa"
    assert isinstance(made.config, MedusaConfig)
    tree = made.config.tree
    assert 1 <= len(tree) <= 5
    assert all(len(path) == 1 or path[:-1] in tree for path in tree)
    assert 1 <= found["tree_tokens_per_step"] <= 3


@pytest.mark.parametrize("more", [(), ("--init", "scratch", "--free", "--all-tokens")], ids=["layers", "scratch"])
def test_a_student_is_a_model(answers: Path, model: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    found = train("distil", answers, out, "--layers", 2, "--on-policy", 0.5, "--on-policy-tokens", 4, *more)
    assert found["steps"] == 3
    own, target = Tokenizer.from_folder(out), Tokenizer.from_folder(model)
    assert own.eos_ids == target.eos_ids == (0,)
    assert own.encode("Hello, wörld").tolist() == target.encode("Hello, wörld").tolist()
    assert own.render_chat([{"role": "user", "content": "x"}]) == "x"
    served, _ = load(str(out), LoadOptions(backend="native", threads=1))
    reference, _ = load(str(out), LoadOptions(backend="transformers"))
    tokens = np.arange(1, 12, dtype=np.int32)
    try:
        logits = []
        for each in (served, reference):
            batch = Batch.pack([each.kv.alloc()], [tokens], [0], [True])
            logits.append(each.forward(batch).logits(np.arange(len(tokens), dtype=np.int32)))
        np.testing.assert_allclose(*logits, atol=0.02, rtol=0.02)
    finally:
        served.close()
        reference.close()
