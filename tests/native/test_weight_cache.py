"""Kept weights are the packed ones to the bit, or are not used; whatever goes wrong with them is one line."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Tiny, feed

from outpace import _native
from outpace.cli.main import main
from outpace.errors import ParameterError
from outpace.models.native import build, packed, weight_cache
from outpace.models.native.model import load_native

KINDS = ("Q4_1", "Q8_0", "Q6_K", "Q4_K", "BF16", "F16", "F32")
SIZES = {"hidden": 256, "head_dim": 64, "inner": 512}
TOKENS = np.arange(40, dtype=np.int32) % 100


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that keeps models of any size."""
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("OUTPACE_WEIGHT_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(weight_cache, "SMALLEST", 0)
    return tmp_path / "kept"


def said(path: Path, **options: Any) -> Any:
    """Logits of a model that is loaded and closed."""
    model = load_native(path, threads=2, **options)
    logits = feed(model, model.kv.alloc(), TOKENS)
    model.close()
    weight_cache.settle()
    return logits


def files(cache: Path) -> list[Path]:
    weight_cache.settle()
    return sorted(cache.iterdir()) if cache.is_dir() else []


class Counted:
    """How often matrices were packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, whole = 0, packed.Packer.__call__

        def counted(packer: packed.Packer, name: str, its: packed.Source) -> Any:
            self.calls += 1
            return whole(packer, name, its)

        monkeypatch.setattr(packed.Packer, "__call__", counted)


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_from_kept_weights_are_those_of_the_file(
    kind: str, cache: Path, tiny: Tiny, packing: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.path(kind, **SIZES)
    with monkeypatch.context() as off:
        off.setenv("OUTPACE_WEIGHT_CACHE", "0")
        plain = said(path)
    assert not cache.exists()
    assert np.array_equal(said(path), plain)
    before = packing.calls
    assert np.array_equal(said(path), plain)
    assert packing.calls == before > 0
    assert [entry.name for entry in weight_cache.entries(cache)] == [path.name]


def test_a_model_answers_while_its_weights_are_written(
    cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, go, write = tiny.path("Q4_1", **SIZES), threading.Event(), packed.write

    def waiting(*arguments: Any) -> None:
        assert go.wait(60)
        write(*arguments)

    monkeypatch.setattr(packed, "write", waiting)
    model = load_native(path, threads=2)
    logits = feed(model, model.kv.alloc(), TOKENS)
    model.close()
    assert not list(cache.glob("*.packed"))
    assert re.search(r"of packed weights go to .*OUTPACE_WEIGHT_CACHE=0", caplog.text)
    threading.Timer(0.1, go.set).start()
    assert np.array_equal(said(path), logits)  # which waits for that file
    assert "packed weights mapped from" in caplog.text or "packed weights copied from" in caplog.text


@pytest.mark.parametrize(("huge", "how"), [(2.0, "copied"), (-1.0, "mapped")])
def test_weights_are_the_same_where_they_are_copied(
    huge: float, how: str, cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(weight_cache, "HUGE", huge)
    path = tiny.path("Q8_0", vocab=5000, **SIZES)
    plain = said(path)
    assert np.array_equal(said(path), plain)
    assert f"packed weights {how} from" in caplog.text


def test_options_have_files_of_their_own(cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.path("F32", **SIZES)
    for _ in range(2):
        kept = {quantize: said(path, quantize=quantize) for quantize in (None, "int8", "int4")}
    assert len(files(cache)) == 3
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE", "0")
    assert all(np.array_equal(kept[quantize], said(path, quantize=quantize)) for quantize in kept)


def test_a_model_that_changed_is_packed_anew(cache: Path, tiny: Tiny, tmp_path: Path) -> None:
    one, other, path = tiny.path("Q4_1", **SIZES), tiny.path("Q4_1", layers=3, **SIZES), tmp_path / "model.gguf"
    shutil.copy(one, path)
    first = said(path)
    shutil.copy(other, path)
    assert np.array_equal(said(path), said(other))
    assert not np.array_equal(first, said(path))
    names = [entry.name for entry in weight_cache.entries(cache)]
    assert sorted(names) == sorted(["model.gguf", other.name])  # what the first file left was superseded


@pytest.mark.parametrize("row", ["first", "last"])
def test_other_contents_under_the_same_name_size_and_time_are_found_out(
    row: str, cache: Path, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny.path("Q8_0", **SIZES), path)
    said(path)
    info = build.GGUFFile.open(path).info("blk.1.attn_k.weight")
    its = path.stat()
    with path.open("r+b") as file:
        file.seek(info.offset if row == "first" else info.offset + info.n_bytes - 34)
        file.write(b"\x00\x00")  # a scale
    os.utime(path, ns=(its.st_atime_ns, its.st_mtime_ns))
    changed = said(path)
    assert "layer 1's k is not what the model's file has" in caplog.text
    assert np.array_equal(changed, said(path))


def test_a_file_that_was_cut_or_altered_is_made_again(
    cache: Path, tiny: Tiny, caplog: pytest.LogCaptureFixture, packing: Counted
) -> None:
    path = tiny.path("Q4_1", **SIZES)
    plain = said(path)
    (kept,) = files(cache)
    whole = kept.read_bytes()
    kept.chmod(0o644)
    one_bit = bytearray(whole)
    one_bit[-70] ^= 4
    for damaged, why in (
        (whole[:-1], "cut off"),
        (whole[: packed.BLOCK], "cut off"),
        (whole[:100], "header is damaged"),
        (b"", "no file of packed weights"),
        (bytes(one_bit), "contents have changed"),
        (whole[:60] + b"?" + whole[61:], "header is damaged"),
        (whole[:8] + b"\xff" * 8 + whole[16:], "no file of packed weights"),
    ):
        caplog.clear()
        kept.write_bytes(damaged)
        before = packing.calls
        assert np.array_equal(said(path), plain)
        assert why in caplog.text
        assert packing.calls > before
        assert kept.read_bytes() == whole
        kept.chmod(0o644)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_changed_word_changes_the_checksum(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    values = rng.integers(0, 256, size, dtype=np.uint8)
    other = values.copy()
    other[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    assert _native.checksum(values) == _native.checksum(values.copy()) != _native.checksum(other)
    assert _native.checksum(values) != _native.checksum(np.append(values, np.uint8(0)))


def test_checksums_do_not_depend_on_threads(cache: Path, tiny: Tiny) -> None:
    said(tiny.path("F32", vocab=5000, **SIZES))
    (kept,) = files(cache)
    with kept.open("rb") as file:
        mapped = _native.PackedFile(file.fileno(), kept.stat().st_size)
        header = packed.read_header(file)
    assert len(header["checksums"]) > 3
    for threads in (1, 2, 5):
        assert mapped.checksums(packed.BLOCK, packed.BLOCK, threads) == header["checksums"]
    with pytest.raises(ValueError, match="not within it"):
        _native.mapped_matrix(mapped, header["end"] // 64 * 64, 0, 64, 64)
    with pytest.raises(ValueError, match="not within it"):
        _native.mapped_matrix(mapped, packed.BLOCK + 1, 0, 64, 64)
    with pytest.raises(ValueError, match="out of range"):
        mapped.checksums(1, packed.BLOCK, 1)


_WRITER = """
    import sys
    import numpy as np
    from native_helpers import feed
    from outpace.models.native import weight_cache
    from outpace.models.native.model import load_native

    weight_cache.SMALLEST = 0
    for _ in range(6):
        weight_cache.clear(weight_cache.folder())
        model = load_native(sys.argv[1], threads=1)
        np.save(sys.argv[2], feed(model, model.kv.alloc(), np.arange(40) % 100))
        model.close()
"""


def test_processes_that_write_and_clear_at_once(cache: Path, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny.path("Q4_1", **SIZES)
    plain = said(path)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WRITER), str(path), str(tmp_path / f"{i}.npy")],
            cwd=Path(__file__).parent,
            stderr=subprocess.PIPE,
        )
        for i in range(3)
    ]
    for i, child in enumerate(children):
        _, complaint = child.communicate(timeout=60)
        assert (child.returncode, b"Traceback" in complaint) == (0, False), complaint[-2000:]
        assert np.array_equal(np.load(tmp_path / f"{i}.npy"), plain)
    assert np.array_equal(said(path), plain)
    assert len(files(cache)) == 1  # no part of a file is left


def test_a_deleted_file_still_serves_who_mapped_it(cache: Path, tiny: Tiny) -> None:
    path = tiny.path("Q4_1", **SIZES)
    plain = said(path)
    model = load_native(path, threads=2)
    assert weight_cache.clear(cache) > 0
    assert files(cache) == []
    assert np.array_equal(feed(model, model.kv.alloc(), TOKENS), plain)
    model.close()


def test_the_least_recently_used_goes_first(cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tiny.path("Q4_1", layers=n, **SIZES) for n in (1, 2, 3)]
    for i, path in enumerate(paths[:2]):
        said(path)
        os.utime(max(files(cache), key=lambda file: file.stat().st_mtime), (i, i))
    said(paths[0])  # used again
    total = sum(file.stat().st_size for file in files(cache))
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE_LIMIT", str(total + (1 << 20)))
    said(paths[2])
    assert {entry.name for entry in weight_cache.entries(cache)} == {paths[0].name, paths[2].name}


@pytest.mark.parametrize("trouble", ["limit", "full", "folder", "abandoned"])
def test_what_cannot_be_kept_is_one_line(
    trouble: str, cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, usage = tiny.path("Q4_1", **SIZES), shutil.disk_usage
    expected = "not kept"
    if trouble == "limit":
        monkeypatch.setenv("OUTPACE_WEIGHT_CACHE_LIMIT", "1MB")
        expected = "the cache may take 976.6 KiB"
    elif trouble == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda where: usage(where)._replace(free=1 << 20))
        expected = "No space left on device"
    elif trouble == "folder":
        cache.write_text("a file where the folder should be")
    else:
        cache.mkdir()
        part = cache / ".x.packed.abc.tmp"
        part.write_bytes(b"what a killed process left")
        os.utime(part, (0, 0))
        expected = "packed weights kept in"
    first = said(path)
    assert expected in caplog.text
    assert np.array_equal(first, said(path))
    assert len(files(cache) if cache.is_dir() else []) == (trouble == "abandoned")


def test_the_command_lists_and_clears(
    cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def outpace(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["outpace", "cache", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
        return capsys.readouterr().out

    path = tiny.path("Q4_1", **SIZES)
    said(path)
    (cache / "old.packed").write_bytes(b"not this")
    told = json.loads(outpace("--json"))
    assert {(its["model"], its["made_of"] is None) for its in told["files"]} == {
        (path.name, False),
        ("old.packed", True),
    }
    assert told["folder"] == str(cache)
    assert re.search(rf"keep +{path.name}", outpace())
    assert "freed" in outpace("--clear")
    assert files(cache) == []
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE", "0")
    assert "no packed weights are kept" in outpace()


def test_a_small_model_is_not_kept(cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "SMALLEST", 1 << 30)
    said(tiny.path("Q4_1", **SIZES))
    assert not cache.exists()


def test_where_and_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.delenv("OUTPACE_WEIGHT_CACHE", raising=False)
    assert weight_cache.folder() == tmp_path / "weights"
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE", "off")
    assert weight_cache.folder() is None
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE_LIMIT", "3GB")
    assert weight_cache.limit() == 3_000_000_000
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE_LIMIT", "much")
    with pytest.raises(ParameterError, match="OUTPACE_WEIGHT_CACHE_LIMIT: 'much' is not an amount"):
        weight_cache.limit()


def test_a_writer_may_be_waited_for_before_it_runs(tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread that loads the same model may wait at any time."""
    start = threading.Thread.start

    def late(thread: threading.Thread) -> None:
        if thread.name == "outpace-weights":
            weight_cache.settle()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    load_native(tiny.path("Q8_0", **SIZES), threads=1).close()
    assert len(files(cache)) == 1


def test_a_limit_that_is_none_is_one_line(
    tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTPACE_WEIGHT_CACHE_LIMIT", "much")
    load_native(tiny.path("Q8_0", **SIZES), threads=1).close()
    assert files(cache) == []
    assert "are not kept: OUTPACE_WEIGHT_CACHE_LIMIT: 'much' is not an amount" in caplog.text
