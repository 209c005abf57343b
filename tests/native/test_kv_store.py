"""KV on the disk: a hit gives the bits of recomputation, after a restart too, and nothing else is ever used."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_helpers import Tiny, feed
from test_architectures import saved

from outpace.common import files
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine import kv_files
from outpace.engine.engine import Engine
from outpace.errors import MemoryLimitError, ParameterError
from outpace.models.base import Batch, KVLayout
from outpace.models.fingerprint import fingerprint
from outpace.models.native.model import NativeModel, load_native
from outpace.params import SamplingParams
from tests.driving import finished
from tests.toy import ToyModel

HYBRIDS = ["qwen3_5", "lfm2", "nemotron_h-experts"]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=3)


@pytest.fixture(scope="module", params=["dense", "int8", "gemma3", *HYBRIDS])
def load(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: Tiny
) -> Callable[..., NativeModel]:
    """Loads a model again: attention alone, in two types of keys and values, and with windows; gated delta nets,
    convolutions, state spaces beside it."""
    if request.param == "gemma3":
        path = tmp_path_factory.mktemp("windows")
        saved(request.param, path, sliding_window=32)
    elif request.param in HYBRIDS:
        path = tmp_path_factory.mktemp("hybrid")
        saved(request.param, path)
    else:
        path = tiny.path("Q4_1", context=2048)
    kind = "int8" if request.param == "int8" else "bfloat16"
    return lambda **options: load_native(path, threads=1, kv_dtype=kind, **options)


@pytest.fixture
def text(rng: np.random.Generator) -> list[int]:
    return rng.integers(0, 100, 330).tolist()


def served(engine: Engine, prompt: Any, params: SamplingParams = PARAMS, **options: Any) -> Any:
    engine.add([int(token) for token in prompt], params, **options)
    (result,) = finished(engine).values()
    return result


def test_exported_rows_go_on_with_the_same_bits(load: Callable[..., NativeModel], text: list[int]) -> None:
    first, second = load(), load()
    layout = first.kv.layout
    assert isinstance(layout, KVLayout)
    assert layout == second.kv.layout
    row, other = first.kv.alloc(), second.kv.alloc()
    for at in (0, 130):  # states settle, as they do in prompts
        part = np.array(text[at : min(at + 130, 200)], np.int32)
        first.forward(Batch.pack([row], [part], [at], [True], last_only=True))
    ends = first.kv.state_ends(row)
    n = ends[-1] if layout.state_bytes else 200
    seen = (n - layout.window + 1) // 64 if layout.window_bytes else n  # the first block that windows reach
    for block in range(-(-n // 64)):
        window = memoryview(exported(first, row, block, windowed=True)) if block >= seen else None
        assert not seen <= block < n or second.kv.reachable(other, n) in (0, 64 * block)
        second.kv.import_block(other, memoryview(exported(first, row, block)), min(64, n - 64 * block), window)
        second.kv.check()
    if layout.state_bytes:
        assert second.kv.reachable(other, n) == 0
        with pytest.raises(ValueError, match="recurrent state"):
            feed(second, other, text[n:230])
        second.kv.import_state(other, memoryview(first.kv.export_state(row, n)))
        assert second.kv.export_state(other, n) == first.kv.export_state(row, n)
    second.kv.check()
    assert second.kv.reachable(other, n) == n == second.kv.length(other)
    fork = first.kv.alloc()
    first.kv.fork(row, fork, n)
    assert feed(second, other, text[n:230]).tobytes() == feed(first, fork, text[n:230]).tobytes()
    for block in range(230 // 64 + 1):
        assert exported(second, other, block) == exported(first, fork, block)
        if block >= seen:
            assert exported(second, other, block, windowed=True) == exported(first, fork, block, windowed=True)


def exported(model: NativeModel, row: int, block: int, windowed: bool = False) -> bytes:
    data = model.kv.export_block(row, block, windowed)
    assert data is not None
    return data


def test_a_row_without_its_window_is_of_no_use_yet(tmp_path: Path, text: list[int]) -> None:
    saved("gemma3", tmp_path, sliding_window=32)
    model, other = load_native(tmp_path, threads=1), load_native(tmp_path, threads=1)
    row = model.kv.alloc()
    feed(model, row, text[:192])
    feed(model, row, text[192:193])
    assert model.kv.export_block(row, 0, windowed=True) is None  # given back
    row, taken = model.kv.alloc(), other.kv.alloc()
    feed(model, row, text[:128])
    other.kv.import_block(taken, memoryview(exported(model, row, 0)), 64)
    other.kv.check()
    assert other.kv.reachable(taken, 64) == 0
    with pytest.raises(ValueError, match="has not taken its window"):
        feed(other, taken, text[64:65])
    window = memoryview(exported(model, row, 1, windowed=True))
    other.kv.import_block(taken, memoryview(exported(model, row, 1)), 64, window)
    other.kv.check()
    assert other.kv.reachable(taken, 128) == 128
    assert feed(other, taken, text[128:]).tobytes() == feed(model, row, text[128:]).tobytes()


def test_only_the_windows_of_its_end_are_needed(tmp_path: Path, text: list[int]) -> None:
    """A restart far past a window, what windows have passed gone from the disk; then what they need; then a row in
    memory that begins alike, behind which is read."""
    folder, params = tmp_path / "model", PARAMS.with_(max_tokens=150)
    saved("gemma3", folder, sliding_window=32)
    plain = Engine(load_native(folder, threads=1), prefix_rows=0)
    prompt = text[:260]
    cache = tmp_path / "cache"
    with Engine(load_native(folder, threads=1), cache_dir=cache, prefill_chunk=100) as engine:
        prompt = [*prompt, *served(engine, prompt, params).token_ids, 5]
    expected = plain.generate(prompt, PARAMS).token_ids
    for reused, kept in ((384, 2), (384, 0), (0, 9)):
        with Engine(load_native(folder, threads=1), cache_dir=cache, prefill_chunk=100) as engine:
            found = served(engine, prompt)
            wait(engine)
            assert (found.token_ids, found.stats.reused_tokens) == (expected, reused)
            assert counts(engine).damaged == 0
        windows = sorted(cache.rglob("*.window"), key=lambda path: path.stat().st_mtime_ns)
        for path in windows[: max(len(windows) - kept, 0)]:  # those that the two ends need served last
            path.unlink()
    with Engine(load_native(folder, threads=1), cache_dir=cache, prefix_rows=1, prefill_chunk=100) as engine:
        assert served(engine, prompt).token_ids == expected
        wait(engine)
        served(engine, [*prompt[:150], *text[:100]])
        found = served(engine, prompt)
        assert (found.token_ids, found.stats.reused_tokens) == (expected, 384)


def test_what_does_not_fit_a_row_is_refused(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    block = len(exported(model, filled(model), 0))
    row = model.kv.alloc()
    for data, positions in ((bytes(block - 1), 64), (bytes(block), 65), (bytes(block), 0)):
        with pytest.raises(ValueError, match="block"):
            model.kv.import_block(row, memoryview(data), positions)
    model.kv.import_block(row, memoryview(bytes(block)), 10)
    with pytest.raises(ValueError, match="of length 10 cannot take a block"):
        model.kv.import_block(row, memoryview(bytes(block)), 64)
    with pytest.raises(ValueError, match="awaits no recurrent state"):
        model.kv.import_state(row, memoryview(b""))
    with pytest.raises(ValueError, match="none 7"):
        model.kv.export_block(row, 7)
    small = tiny.load("Q4_1", threads=1, kv_memory=block)
    row = small.kv.alloc()
    small.kv.import_block(row, memoryview(bytes(block)), 64)
    with pytest.raises(MemoryLimitError, match="kv_memory"):
        small.kv.import_block(row, memoryview(bytes(block)), 64)
    small.kv.check()


def filled(model: NativeModel) -> int:
    row = model.kv.alloc()
    feed(model, row, range(70))
    return row


def test_conversations_read_only_what_is_new_after_restarts(
    load: Callable[..., NativeModel], text: list[int], tmp_path: Path
) -> None:
    """Turn after turn in an engine of its own: tokens and log-probabilities of one that keeps nothing."""
    params = PARAMS.with_(top_logprobs=4)
    plain = Engine(load(), prefix_rows=0)
    prompt, before, spare = text, 0, 8 if plain.model.kv.recurrent else 64
    for turn in range(3):
        model = load()
        drafting = {"drafter": NgramDrafter(), "size": 5} if turn else {}
        with Engine(model, cache_dir=tmp_path, prefill_chunk=100, **drafting) as engine:
            found = served(engine, prompt, params)
            assert counts(engine).tokens == found.stats.reused_tokens
        expected = plain.generate(prompt, params)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == expected.logprobs
        assert max(before - spare, 0) <= found.stats.reused_tokens <= before
        prompt = [*prompt, *found.token_ids, 5, 6, 7]
        before = len(prompt) - 3


def test_an_agents_conversation_of_30000_tokens(tmp_path: Path) -> None:
    """Turn after turn, in the same engine and in one that was started again, with recurrent layers."""
    folder, rng, spare = tmp_path / "model", np.random.default_rng(3), 8
    saved("qwen3_5", folder, max_position_embeddings=32768)
    prompt, params = rng.integers(0, 100, 30_000).tolist(), PARAMS.with_(ignore_eos=True)
    before = 0
    for _ in range(2):
        with Engine(load_native(folder, threads=1), cache_dir=tmp_path / "cache") as engine:
            for _ in range(2):
                asked, found = prompt, engine.generate(prompt, params)
                assert before - spare < found.stats.reused_tokens <= before
                before = len(prompt) + len(found.token_ids)
                prompt = [*prompt, *found.token_ids, *rng.integers(0, 100, 30).tolist()]
    with Engine(load_native(folder, threads=1), prefix_rows=0) as engine:
        assert engine.generate(asked, params).token_ids == found.token_ids


@pytest.mark.parametrize("drafter", ["suffix+eagle:demo", "layers:2"])
def test_drafters_go_on_behind_what_they_have_not_seen(drafter: str, tmp_path: Path) -> None:
    """Neither hidden states nor a cache of their own come with what is read from the disk."""
    prompt = "Repeat after me: one two three four five six seven eight nine ten. " * 4
    found = []
    for given in (None, drafter, drafter):
        with Engine.load("demo", drafter=given, size=4, threads=1, max_length=512, cache_dir=tmp_path) as engine:
            engine.add(prompt, SamplingParams(max_tokens=48, ignore_eos=True))
            found += finished(engine).values()
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    assert found[0].stats.reused_tokens == 0 < 64 <= found[1].stats.reused_tokens
    assert found[1].stats.accepted > 0


def test_another_process_finds_what_this_one_left(tmp_path: Path, text: list[int]) -> None:
    script = (
        "import sys, json; from outpace import Engine\n"
        "with Engine.load('demo', drafter=None, threads=1, cache_dir=sys.argv[1], max_length=512) as engine:\n"
        "    result = engine.generate(json.loads(sys.argv[2]), max_tokens=16)\n"
        "    print(json.dumps([result.stats.reused_tokens, *result.token_ids]))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script, tmp_path, str(text[:300])], capture_output=True, check=True)
        for _ in range(2)
    ]
    (none, *first), (reused, *second) = (map(int, run.stdout.decode().strip("[]\n").split(",")) for run in runs)
    assert (none, reused) == (0, 256)
    assert first == second
    assert {oct(path.stat().st_mode & 0o077) for path in tmp_path.rglob("*.block")} == {"0o0"}


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "gone"])
def test_a_damaged_file_is_never_used(
    load: Callable[..., NativeModel], text: list[int], tmp_path: Path, damage: str, rng: np.random.Generator,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with Engine(load(), cache_dir=tmp_path) as engine:
        expected = served(engine, text).token_ids
    files = sorted((path for path, _ in kv_files.files(tmp_path)), key=lambda path: (path.suffix != ".block", path))
    ends = [path for path in files if path.suffix != ".block"]  # states, or windows
    for path in ends if ends and damage != "flip" else files[:1]:
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
        elif damage == "cut":
            del data[-1:]
        path.write_bytes(b"" if damage == "empty" else files[1].read_bytes() if damage == "other" else data)
        if damage == "gone":
            path.unlink()
    with Engine(load(), cache_dir=tmp_path) as engine, caplog.at_level(logging.WARNING):
        assert served(engine, text).token_ids == expected
        disk = counts(engine)
        assert (disk.damaged > 0) == (damage != "gone") == ("is damaged" in caplog.text)
        assert served(engine, text).token_ids == expected
    with Engine(load(), cache_dir=tmp_path) as engine:  # what was damaged was written again
        assert served(engine, text).stats.reused_tokens >= 5 * 64
        assert counts(engine).damaged == 0


def test_every_byte_of_a_file_is_checked(tmp_path: Path, rng: np.random.Generator) -> None:
    store = kv_files.KVFiles(tmp_path, "m", 1 << 30, {})
    contents = rng.integers(0, 256, 90, np.uint8).tobytes()
    store.write("a.block", [contents])
    store.close()
    path = tmp_path / "m/a.block"
    whole = path.read_bytes()
    assert store.read("a.block", 90) == contents
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        assert store.read("a.block", 90) is None
        assert not path.exists()
    path.with_name("b.block").write_bytes(whole)
    assert store.read("b.block", 90) is None  # whole, but of another name
    os.mkfifo(path)
    assert store.read("a.block", 90) is None  # a pipe without a writer is not waited for


def test_what_was_not_used_for_longest_goes_first(tiny: Tiny, tmp_path: Path, rng: np.random.Generator) -> None:
    path, params = tiny.path("Q4_1", context=2048), SamplingParams(max_tokens=2)
    texts = [rng.integers(0, 100, 321).tolist() for _ in range(4)]
    size = load_native(path, threads=1).kv.layout.block_bytes + 32
    limit = 16 * size  # three texts of five blocks, and some room
    with Engine(load_native(path, threads=1), cache_dir=tmp_path, cache_size=limit, prefix_rows=0) as engine:
        for i in (0, 1, 2, 0, 3):
            served(engine, texts[i], params)
            wait(engine)
            assert sum(stat.st_size for _, stat in kv_files.files(tmp_path)) <= limit
        assert counts(engine).evicted > 0
        reused = [served(engine, texts[i], params).stats.reused_tokens for i in (3, 0, 1)]
    assert reused[:2] == [320, 320]
    assert reused[2] < 320


def test_files_of_others_stay(tiny: Tiny, text: list[int], tmp_path: Path) -> None:
    """A folder that has more than KV: neither the bound nor ``clear`` nor the search for half-written files."""
    others = [
        tmp_path / name for name in ("game/a.block", "game/states/b.state", "mail/deep/.draft.tmp", "game/.x.tmp")
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1 << 20))
        os.utime(path, (0, 0))
    (tmp_path / "game/model.json").write_text('{"model": "chess"}')
    path = tiny.path("Q4_1", context=2048)
    limit = 4 * load_native(path, threads=1).kv.layout.block_bytes
    with Engine(load_native(path, threads=1), cache_dir=tmp_path, cache_size=limit, prefix_rows=0) as engine:
        served(engine, text)
        wait(engine)
        disk = counts(engine)
        assert disk.evicted > 0
        home, *more = kv_files.models(tmp_path)
        assert not more
        half = home[0] / f".{next(home[0].glob('*.block')).name}.x.tmp"
        half.touch()
        os.utime(half, (0, 0))
    Engine(load_native(path, threads=1), cache_dir=tmp_path).close()
    assert not half.exists()
    assert 0 < kv_files.clear(tmp_path) <= limit
    assert all(path.exists() for path in others)


def counts(engine: Engine) -> kv_files.Counts:
    disk = engine.snapshot().disk
    assert disk is not None
    return disk


def wait(engine: Engine) -> None:
    """Until what is to be written is."""
    store = engine._core.scheduler.store
    assert store is not None
    store.close()
    store.files._closing = False


def test_engines_that_share_a_folder(
    load: Callable[..., NativeModel], tmp_path: Path, rng: np.random.Generator
) -> None:
    texts = [rng.integers(0, 100, 200).tolist() for _ in range(3)]
    plain = Engine(load(), prefix_rows=0)
    expected = [plain.generate(text, PARAMS).token_ids for text in texts]
    with (
        Engine(load(), cache_dir=tmp_path, prefix_rows=0, prefill_chunk=64) as one,
        Engine(load(), cache_dir=tmp_path, prefix_rows=0, prefill_chunk=50) as two,
    ):
        for _ in range(2):
            for engine in (one, two):
                for text in texts:
                    engine.add(text, PARAMS)
            for engine in (one, two):
                results = finished(engine).values()
                assert [result.token_ids for result in results] == expected
                wait(engine)
        assert min(result.stats.reused_tokens for result in results) >= 192


def test_scopes_and_requests_that_share_nothing(tiny: Tiny, text: list[int], tmp_path: Path) -> None:
    path = tiny.path("Q4_1", context=2048)
    with Engine(load_native(path, threads=1), cache_dir=tmp_path, prefix_rows=0) as engine:
        served(engine, text, reuse_prefix=False)
        wait(engine)
        assert not list(kv_files.files(tmp_path))
        served(engine, text, cache_scope="a")
        wait(engine)
        scopes = ("b", "a", "", "\ud800")  # the last is no text in UTF-8
        found = [served(engine, text, cache_scope=scope) for scope in scopes]
        assert [result.error for result in found] == [None] * 4
        assert [result.stats.reused_tokens for result in found] == [0, 320, 0, 0]
        assert served(engine, text, cache_scope="a", reuse_prefix=False).stats.reused_tokens == 0
        assert served(engine, text, PARAMS.with_(prompt_logprobs=0), cache_scope="a").stats.reused_tokens == 0


def test_other_models_and_types_find_nothing(tiny: Tiny, text: list[int], tmp_path: Path) -> None:
    paths = tiny.path("Q4_1", context=2048), tiny.path("Q8_0", context=2048)
    others: list[tuple[int, dict[str, Any]]] = [(0, {}), (1, {}), (0, {"kv_dtype": "int8"}), (0, {"max_length": 512})]
    for i, options in others:
        with Engine(load_native(paths[i], threads=1, **options), cache_dir=tmp_path) as engine:
            assert served(engine, text).stats.reused_tokens == 0
    assert len({path.parent for path, _ in kv_files.files(tmp_path)}) == 4


def test_an_edit_that_the_fingerprint_does_not_see_is_another_model(tmp_path: Path, text: list[int]) -> None:
    """A row of the embedding, as where a special token is added, between the pieces of a large file."""
    folder, cache = tmp_path / "model", tmp_path / "cache"
    saved("llama", folder, hidden_size=256, intermediate_size=4096)
    with Engine(load_native(folder, threads=1), cache_dir=cache) as engine:
        before = served(engine, text).token_ids
    (path,) = folder.glob("*.safetensors")
    unedited, data = fingerprint(folder), bytearray(path.read_bytes())
    lead = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:lead])
    at = lead + header["model.embed_tokens.weight"]["data_offsets"][0]
    for token in sorted(set(text)):
        edited = data.copy()
        edited[at + 1024 * token : at + 1024 * (token + 1)] = np.linspace(-3, 3, 256, dtype=np.float32).tobytes()
        path.write_bytes(edited)
        if fingerprint(folder) == unedited:
            break
    assert fingerprint(folder) == unedited
    with Engine(load_native(folder, threads=1), cache_dir=cache) as engine:
        found = served(engine, text)
    assert found.stats.reused_tokens == 0
    assert found.token_ids == Engine(load_native(folder, threads=1)).generate(text, PARAMS).token_ids != before


def test_a_full_disk_is_a_line_in_the_log(
    tiny: Tiny, text: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "SPARE", 1 << 62)
    path = tiny.path("Q4_1", context=2048)
    expected = Engine(load_native(path, threads=1)).generate(text, PARAMS).token_ids
    with Engine(load_native(path, threads=1), cache_dir=tmp_path) as engine, caplog.at_level(logging.WARNING):
        assert served(engine, text).token_ids == expected
        wait(engine)
        assert caplog.text.count("KV is not kept in") == 1
    assert not list(kv_files.files(tmp_path))


def test_memory_too_small_for_what_the_disk_has(
    load: Callable[..., NativeModel], text: list[int], tmp_path: Path
) -> None:
    """Rows that are read beside others in little memory give way and are read again, with the same tokens."""
    with Engine(load(), cache_dir=tmp_path) as engine:
        expected = served(engine, text).token_ids
        memory = engine.model.kv.bytes_for(len(text) + 41) * 3 // 2
    with Engine(load(kv_memory=memory), cache_dir=tmp_path, max_rows=3) as engine:
        for _ in range(3):
            engine.add(text, PARAMS)
        assert [result.token_ids for result in finished(engine).values()] == [expected] * 3


def test_refusals(tmp_path: Path, tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match=r"cache_dir=.*file' cannot be used .*writable"):
        Engine(model, cache_dir=tmp_path / "file")
    with pytest.raises(ParameterError, match="cache_size: 'many' is not an amount"):
        Engine(model, cache_dir=tmp_path, cache_size="many")
    with pytest.raises(ParameterError, match="cache_size=5 bounds a folder that is not given: add cache_dir"):
        Engine(model, cache_size=5)
    with pytest.raises(ParameterError, match=r"cache_dir=.* is of the native backend alone"):
        Engine(ToyModel(6), cache_dir=tmp_path)
    assert os.listdir(tmp_path) == ["file"]
