"""Names that are no model's: a misspelt folder is not sent to a hub, a model of images is refused as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.errors import ModelError
from outpace.models import load as loading
from outpace.models.load import resolve
from outpace.models.options import LoadOptions


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models, and hubs that must not be asked."""

    def asked(name: str, **_: object) -> Path:
        raise AssertionError(f"a hub was asked for {name}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "from_hub", asked)
    monkeypatch.setattr(loading, "from_name", asked)
    for name in ("models/llama-3b", "Qwen/Qwen3-0.6B"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "smol-360M.gguf").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("models/lama-3b", "did you mean models/llama-3b?"),
        ("modles/llama-3b", "did you mean models/llama-3b?"),
        ("./models/llama3b", "does not exist: "),
        ("models/other", "does not exist, but the folder models does"),
        ("smol-360m.gguf", "did you mean smol-360M.gguf?"),
        ("models/x-gguf", "does not exist, but the folder models does"),
        ("Qwen/Qwen3-1.7B", "revision='main'"),  # another model of a hub: its numbers differ
    ],
)
def test_a_misspelt_folder_stays_here(here: Path, name: str, says: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve(name)
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["demmo", "demo-gema"])
def test_a_misspelt_built_in_model_stays_here(here: Path, name: str) -> None:
    with pytest.raises(ModelError, match="did you mean demo"):
        resolve(name)


def test_a_hubs_models_are_asked_for(here: Path) -> None:
    for name, options in (
        ("Qwen/Qwen3-1.7B", LoadOptions(revision="main")),
        ("somebody/models", LoadOptions()),
        ("gpt2", LoadOptions()),
        ("Qwen/x:Q4_K_M", LoadOptions()),
    ):
        with pytest.raises(AssertionError, match=f"a hub was asked for {name}"):
            resolve(name, options)


@pytest.mark.parametrize("backend", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        ("config.json", {"model_type": "llava", "architectures": ["Llava"], "vision_config": {}}, "Llava"),
        ("config.json", {"model_type": "vit", "image_size": 224}, "vit"),
        ("model_index.json", {"_class_name": "StableDiffusionPipeline"}, "StableDiffusionPipeline"),
    ],
)  # fmt: skip
def test_an_image_model_is_refused_as_one(
    tmp_path: Path, file: str, content: dict[str, object], kind: str, backend: str
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"is an image model \({kind}\), and only text is decoded here"):
        loading.load(str(tmp_path), LoadOptions(backend=backend))
