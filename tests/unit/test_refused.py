"""Names that are no model's: a misspelt folder is not sent to a hub, a model of images is refused as one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import pytest

from outpace import _native
from outpace.common.installing import install
from outpace.errors import ModelError
from outpace.models import load as loading
from outpace.models.load import resolve
from outpace.models.native import build
from outpace.models.options import LoadOptions
from outpace.models.refused import TEXT_ALONE
from outpace.models.weights.gguf import TYPES, UNREAD
from tests.exported import WORDS, export
from tests.unit.test_gguf import raw_file
from tests.unit.test_gguf_others import bare


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


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer.model", "m.gguf", "sha256-4d7a"])
def test_a_pointer_of_git_is_named_as_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(POINTER)
    folder = "." in name and not name.endswith(".gguf")
    with pytest.raises(ModelError, match=rf"{re.escape(name)} is a Git LFS pointer, .*git lfs pull"):
        loading.load(str(tmp_path if folder else tmp_path / name))


@pytest.mark.parametrize("backend", ["auto", "native", "transformers"])
def test_a_missing_shard_is_named(tmp_path: Path, backend: str) -> None:
    saved_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"model-00001-of-00002.safetensors is missing, one of the 2 shards"):
        loading.load(str(tmp_path), LoadOptions(backend=backend))


def saved_llama(folder: Path, **fields: object) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_blob_of_ollama_is_the_gguf_file_that_it_is(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), head_dim=16, **sizes))
    path = export(model, "llama", tmp_path / "sha256-0123abcd", tokenizer=True)
    for backend in ("native", "transformers"):
        assert loading.load(str(path), LoadOptions(backend=backend))[0].info.backend == backend
    loading.estimate(str(path))


def test_types_of_tensors_are_named(tmp_path: Path) -> None:
    for number, name in UNREAD.items():
        kinds = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
        assert kinds.get(number, name) == name
        path = raw_file(tmp_path, tensors=[("blk.0.attn_q.weight", (256, 1), number, 0)], data=b"\0" * 400)
        with pytest.raises(ModelError, match=rf"of type {name}, which is not supported: use a file with another"):
            loading.load(str(path))
    for name in TYPES.values():
        try:
            _native.packed_bytes(build._TYPE_IDS[name[0]], 1, 256, "keep")
        except ValueError:
            assert name[0] not in build.READ
        else:
            assert name[0] in build.READ


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("backend", ["auto", "native", "transformers"])
@pytest.mark.parametrize("architecture", ["mamba", "kimi-linear", "plamo2", "rwkv7"])
def test_recurrent_models_are_refused_without_a_remedy_that_refuses(
    tmp_path: Path, architecture: str, backend: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
    kinds = {"model_type": "mamba"} if architecture == "mamba" else {"layer_types": ["linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], **kinds}))
    for path in (bare(tmp_path, architecture), tmp_path):
        with pytest.raises(ModelError, match="recurrent layers") as error:
            loading.load(str(path), LoadOptions(backend=backend))
        assert not re.search("backend=|install", str(error.value))


@pytest.mark.parametrize("installed", [True, False])
def test_a_hint_names_a_backend_that_serves(tmp_path: Path, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the native backend refuses and the other serves; and what both refuse."""
    if not installed:
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
    saved_llama(tmp_path, hidden_act="gelu")
    with pytest.raises(ModelError, match="'gelu' is not supported") as error:
        loading._backend_for(loading.resolve(str(tmp_path)), None, LoadOptions(backend="native"))
    hint = "use backend='transformers'" if installed else install("outpace[torch]")
    assert hint in str(error.value)
    if installed:
        model = loading._served(
            loading._folder_module(loading.resolve(str(tmp_path)), LoadOptions()), "x", (), LoadOptions()
        )
        assert model.info.backend == "transformers"
    path = bare(tmp_path, "llama")
    with pytest.raises(ModelError) as error:
        loading.load(str(path), LoadOptions(backend="native"))
    assert not re.search("backend=|install", str(error.value))


def test_types_with_text_alone_are_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= TEXT_ALONE
