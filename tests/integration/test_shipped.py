"""The drafter that comes for the demo model: found, refused or left out, and what ``auto`` makes of it.

A tiny model stands for the demo one, by its fingerprint; the drafter beside it has random weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import Engine, SamplingParams, _native
from outpace.cli import app
from outpace.control.cost import Cost
from outpace.drafters import measured
from outpace.drafters.auto import Choice, choose
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.catalogue import AUTO
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.learned import shipped
from outpace.drafters.learned.checkpoint import read
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.registry import build, parse
from outpace.errors import DrafterError
from outpace.models.base import Model
from outpace.models.fingerprint import fingerprint
from outpace.models.native import model as native
from outpace.models.options import LoadOptions
from tests import eagles
from tests.driving import finished
from tests.integration.conftest import SIZES, VOCAB
from tests.integration.test_cli import outpace
from tests.native.native_helpers import Tiny


@pytest.fixture(scope="module")
def gguf(tiny: Tiny) -> Path:
    return tiny.path("F32", **SIZES, layers=4)


@pytest.fixture
def model(gguf: Path) -> Iterator[Model]:
    loaded = native.load_native(gguf, threads=1, kv_dtype="float32")
    loaded.info = replace(loaded.info, name=str(gguf))
    yield loaded
    loaded.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the drafter lies; the real one is out of sight."""
    monkeypatch.setattr(shipped, "folder", lambda: tmp_path / "demo-eagle")
    return tmp_path / "demo-eagle"


def put(place: Path, model: Model, *, default: bool, trained_for: str | None = None) -> None:
    made = eagles.random(model, range(VOCAB), (0, 1, 2))
    target = {"fingerprint": trained_for or fingerprint(Path(model.info.name)), "vocab_size": model.info.vocab_size}
    write_checkpoint(place, "eagle", made.config, made.tensors, target, {})
    edit(place, default=default)


def edit(place: Path, **own: Any) -> None:
    config = json.loads((place / "config.json").read_text())
    config["outpace"] |= own
    (place / "config.json").write_text(json.dumps(config))


def built(text: str, model: Model) -> Drafter:
    return build(parse(text), DraftContext(model, None, LoadOptions(), 7))


def chosen(model: Model) -> Choice:
    return choose(model.info, LoadOptions())


@pytest.mark.parametrize("name", shipped.NAMES)
def test_its_names_lead_to_it(name: str, model: Model, place: Path) -> None:
    put(place, model, default=False)
    drafter = built(f"eagle:{name},branch=1", model)
    assert isinstance(drafter, LearnedDrafter)
    assert drafter.name == f"eagle:{name}"  # not where it happens to lie
    assert drafter.needs.hidden_layers == (0, 1, 2)
    drafter.close()


def test_a_folder_of_that_name_is_one_by_its_path(
    model: Model, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "demo", model, default=False)
    monkeypatch.chdir(tmp_path)
    drafter = built("eagle:./demo", model)
    assert drafter.name == "eagle:./demo"
    drafter.close()


def test_it_is_refused_beside_another_model(model: Model, place: Path) -> None:
    put(place, model, default=True, trained_for="0123456789abcdef")
    with pytest.raises(DrafterError, match=r"trained for the demo model \(0123456789abcdef\).*outpace train eagle"):
        built("eagle:demo", model)


def test_auto_uses_it_where_its_card_says_so(model: Model, place: Path) -> None:
    put(place, model, default=True)
    assert chosen(model).spec == shipped.BESIDE == "suffix+eagle:demo"
    drafter = built("auto", model)
    assert isinstance(drafter, ComposedDrafter)
    assert drafter.name == "suffix+eagle:demo"
    flat = Cost((1, 8, 16), (1e-3, 1e-3, 1e-3))  # nothing is measured
    with Engine(model, drafter=drafter, cost=flat) as engine:
        params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
        request = [1, 2, 3, 1, 2]
        engine.add(request, params)
        (drafted,) = finished(engine).values()
        assert drafted.drafter == "suffix+eagle:demo"
        assert drafted.token_ids == engine.generate(request, params, drafter=False).token_ids


def test_as_a_part_auto_is_what_it_is_beside_any_model(model: Model, place: Path) -> None:
    put(place, model, default=True)
    drafter = built("auto+ngram", model)
    assert drafter.name == f"{AUTO}+ngram"
    drafter.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"default": False}, "is no faster by its card"),
        ({"default": "yes"}, "is no faster by its card"),
        (
            {"target": {"vocab_size": VOCAB, "fingerprint": "0123456789abcdef"}},
            "",
        ),  # another model's, of one vocabulary
        ({"target": {"vocab_size": VOCAB + 1}}, ""),
        ({"target": {}}, ""),
        ({"weights": "00000000"}, "is not the file that config.json was written for"),
        ({"target": 3}, "has no object outpace"),
    ],
)
def test_auto_does_without_and_says_why(
    change: dict[str, Any], says: str, model: Model, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(place, model, default=True)
    edit(place, **change)
    with caplog.at_level(logging.WARNING):
        found = chosen(model)
        drafter = built("auto", model)
    assert (found.spec, drafter.name) == (AUTO, AUTO)
    assert says in found.why
    assert bool(found.why) == bool(says)
    assert ("cannot be used" in caplog.text) == ("weights" in change or change.get("target") == 3)
    drafter.close()


def test_on_the_other_backend_it_has_to_be_named(model: Model, place: Path) -> None:
    put(place, model, default=True)
    found = choose(replace(model.info, backend="transformers"), LoadOptions())
    assert found.spec == AUTO
    assert "native backend alone" in found.why


def test_auto_takes_what_was_measured(
    model: Model,
    gguf: Path,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Remembered by the model's fingerprint, whatever the file is called, said at load, and left where it is gone."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    put(place, model, default=True)
    numbers = {"ratio": 2.0, "low": 1.8, "high": 2.2, "tokens_per_step": 2.5}
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(gguf.read_bytes())
    caplog.set_level(logging.INFO)
    for spec in ("ngram:min=2", "", "model:/nowhere", "of_another_folder:Echo"):
        assert measured.keep(str(copy), LoadOptions(), numbers if spec else None, spec, 8) is not None
        with closing(built("auto", model)) as drafter:
            assert drafter.name == {"ngram:min=2": "ngram", "": AUTO}.get(spec, shipped.BESIDE)
        assert (chosen(model).spec, chosen(model).measured) == (spec or AUTO, True)
        assert f"auto stands for {spec or AUTO}: measured on " in caplog.text
    assert "2.00 times plain decoding (1.80 to 2.20), 2.50 tokens a step" in chosen(model).why
    assert "measure again with outpace drafters --measure" in caplog.text
    other = replace(LoadOptions(), backend="transformers")
    assert choose(model.info, other).spec == shipped.BESIDE, "measured beside another backend"


def test_a_model_loads_where_the_draft_model_that_was_measured_is_gone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    numbers = {"ratio": 2.0, "low": 1.8, "high": 2.2, "tokens_per_step": 2.5}
    assert measured.keep("demo", LoadOptions(), numbers, "model:/nowhere.gguf", 8) is not None
    with Engine.load("demo", threads=1) as engine:
        assert engine.drafter.name == AUTO
        assert "2.00 times" not in engine.drafter.why, "figures of a drafter that is not there"
        assert "model:/nowhere.gguf cannot be used: " in engine.drafter.why


def test_what_auto_remembers_is_listed_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    numbers = {"ratio": 2.0, "low": 1.8, "high": 2.2, "tokens_per_step": 2.5}
    measured.keep("demo", LoadOptions(), numbers, "ngram", 8)
    _, out, _ = outpace(capsys, "cache")
    assert "auto  ngram beside demo: measured on " in out
    _, out, _ = outpace(capsys, "cache", "--forget", "--json")
    assert (json.loads(out)["forgotten"], json.loads(out)["measured"]) == (1, [])
    assert measured.known("demo", LoadOptions()) is None


def test_four_bits_draft_what_the_original_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The package has the drafter of ``drafters/`` in 4 bits, and the native runtime makes the same of both."""
    source, weights = Path(__file__).parents[2] / "drafters" / "demo-eagle", "model.safetensors"
    assert app.parse(["export", "q4", str(source), "--out", str(tmp_path / "q4")])() == 0
    assert "3.3 MB" in capsys.readouterr().out
    assert (tmp_path / "q4" / weights).read_bytes() == (shipped.folder() / weights).read_bytes()
    original, packed = read(source), read(shipped.folder())
    assert (packed.config, packed.target, packed.recipe) == (original.config, original.target, original.recipe)
    assert packed.tensors.keys() == original.tensors.keys()

    def in_the_runtime(values: Any) -> Any:
        raw, arena = np.ascontiguousarray(values).view(np.uint8).reshape(-1), _native.Arena()
        return _native.pack(arena, raw, 0, *values.shape, 0, "int4", 1).unpack() if values.ndim == 2 else values

    for name, values in original.tensors.items():
        assert (in_the_runtime(packed.tensors[name]) == in_the_runtime(values)).all(), name
