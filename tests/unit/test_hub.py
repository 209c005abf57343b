"""Models by name from a hub on loopback: the right file, whole and checked, whatever the network does."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.cli.main import main
from outpace.cli.options import Load
from outpace.errors import ModelError, ParameterError
from outpace.models.fingerprint import fingerprint_of
from outpace.models.load import resolve
from outpace.models.options import LoadOptions
from outpace.models.weights import downloads
from outpace.models.weights.hub import from_hub, from_name, is_name
from tests.fake_hub import FakeHub, plain, serving

REPO = "someone/Tiny-GGUF"
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    its = FakeHub()
    its.files[REPO] = {"README.md": b"read", "tiny.Q4_K_M.gguf": CONTENT, "tiny.Q8_0.gguf": CONTENT[::-1]}
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with serving(its.answer) as url:
        its.url = url
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield its


def failure(name: str, **options: Any) -> str:
    with pytest.raises(ModelError) as error:
        from_name(name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("wanted", [":Q4_K_M", ":q4_k_m", "", ":tiny.Q4_K_M", ":tiny.q4_k_m.gguf"])
def test_finds_the_file_once(fake: FakeHub, wanted: str) -> None:
    path = from_name(REPO + wanted)
    assert path.name == "tiny.Q4_K_M.gguf"
    assert path.read_bytes() == CONTENT
    asked = len(fake.asked)
    assert from_name(REPO + wanted, offline=True) == from_name(REPO + wanted) == path
    assert len(fake.asked) == asked, "what is in the cache was asked for again"


FILES = [
    "a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-UD-Q4_K_XL.gguf", "a-IQ4_XS.gguf", "a.f16.gguf", "mmproj-f16.gguf",
    "BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf", "Q6_K/a-Q6_K-00001-of-00002.gguf",
    "x/b-Q8_0.gguf", "y/b-Q8_0.gguf", "a-Q5_0-imat.gguf", "odd.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("q4_k_m", "a-Q4_K_M.gguf"),
        ("Q4_K", None),  # no prefix of another counts
        ("Q4_XS", None),
        ("IQ4_XS", "a-IQ4_XS.gguf"),
        ("Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        ("ud-q4_k_xl", "a-UD-Q4_K_XL.gguf"),
        ("F16", "a.f16.gguf"),  # what goes with a model is no model
        ("bf16", "BF16/a-BF16-00001-of-00002.gguf"),
        ("Q6_K", None),  # a shard is missing
        ("Q8_0", None),  # which?
        ("y/b-Q8_0", "y/b-Q8_0.gguf"),
        ("Q5_0", "a-Q5_0-imat.gguf"),
        ("odd", "odd.gguf"),
    ],
)
def test_which_file_is_meant(fake: FakeHub, wanted: str, found: str | None) -> None:
    fake.files[REPO] = {name: name.encode() for name in FILES}
    if found is None:
        said = failure(f"{REPO}:{wanted}")
        assert "IQ4_XS" in said or "y/b-Q8_0" in said
        assert "mmproj" not in said
        return
    path = from_name(f"{REPO}:{wanted}")
    assert path.read_bytes() == found.encode()
    if "00001" in found:
        assert path.with_name("a-BF16-00002-of-00002.gguf").read_bytes() == found.replace("00001", "00002", 1).encode()


def test_names() -> None:
    assert all(map(is_name, ["a/b:Q4_0", "a/b-GGUF", "TheBloke/x.y-1B:q8_0"]))
    assert not any(
        map(is_name, ["demo", "a/b", "C:/models/b", "./a/b:c", "a/b/c", "a:b", "/a/b:Q4_0", "a/b:", "../b:Q4"])
    )


def test_a_wrong_checksum_leaves_nothing(fake: FakeHub) -> None:
    fake.lies["tiny.Q4_K_M.gguf"] = b"other"
    assert "checksum" in failure(f"{REPO}:Q4_K_M")
    assert downloads.found() == []
    fake.lies.clear()
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT


def test_what_is_not_public_wants_a_token_which_no_message_has(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fake.files["closed/Tiny-GGUF"] = fake.files[REPO]
    assert "set HF_TOKEN" in failure("closed/Tiny-GGUF:Q4_K_M")
    monkeypatch.setenv("HF_TOKEN", "wrong-token")
    assert "HF_TOKEN does not open it" in failure("closed/Tiny-GGUF:Q4_K_M")
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    assert from_name("closed/Tiny-GGUF:Q4_K_M").read_bytes() == CONTENT
    assert "secret-token" not in caplog.text
    assert "wrong-token" not in caplog.text


def test_busy_and_missing(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fake.faults.append(lambda r: plain(r, 429))
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT
    fake.faults.extend([lambda r: plain(r, 503)] * 9)
    assert "try again" in failure(f"{REPO}:Q8_0")
    assert "is not there" in failure("someone/nothing:Q8_0")
    fake.files[REPO] = {"README.md": b""}
    assert "no GGUF files" in failure(f"{REPO}:F16")
    fake.files["open/Empty-GGUF"] = {"a.Q4_0.gguf": b"1", "a.Q5_0.gguf": b"2"}
    assert "more than one other" in failure("open/Empty-GGUF")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"siblings": [{}]}', b'{"siblings": 3}', b"\xff"])
def test_a_listing_that_is_none(monkeypatch: pytest.MonkeyPatch, fake: FakeHub, body: bytes) -> None:
    with serving(lambda r: plain(r, 200, body)) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert "HF_ENDPOINT" in failure(f"{REPO}:Q4_0")


def test_names_cannot_leave_the_cache(fake: FakeHub, tmp_path: Path) -> None:
    fake.files[REPO] = {"../../../../outside-Q4_0.gguf": b"1"}
    assert "could not be downloaded" in failure(f"{REPO}:Q4_0")
    assert not list(tmp_path.rglob("outside*"))


def test_offline(fake: FakeHub) -> None:
    assert "nothing of this repository" in failure(f"{REPO}:Q4_K_M", offline=True)
    assert not fake.asked
    from_name(f"{REPO}:Q8_0")
    assert "(Q8_0)" in failure(f"{REPO}:Q4_K_M", offline=True)


def test_resolve_and_the_command_line_take_names(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{REPO}:q8_0"
    with pytest.raises(ModelError, match="local cache"):
        resolve(name, LoadOptions(offline=True))
    resolve(name)
    source = resolve(name, LoadOptions(offline=True))
    assert (source.kind, source.name) == ("gguf", name)
    assert fingerprint_of(name, LoadOptions()) is not None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Load(model=name).load_options().offline
    assert from_name(name, offline=True) == source.path


def test_downloads_are_listed_and_removed_by_name(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = from_name(f"{REPO}:Q8_0"), from_name(f"{REPO}:q4_k_m")
    fake.files["other/a-b"] = {f"a-F16-0000{i}-of-00002.gguf": CONTENT * i for i in (1, 2)}
    first = from_name("other/a-b:F16")
    first.unlink()
    names = [(its.name, its.bytes, its.whole) for its in downloads.found()]
    assert names == [
        ("other/a-b:F16", 2 * len(CONTENT), False),
        (f"{REPO}:Q4_K_M", len(CONTENT), True),
        (f"{REPO}:Q8_0", len(CONTENT), True),
    ]
    with pytest.raises(ParameterError, match=r"nobody/x.*was not downloaded: there is other/a-b:F16, someone"):
        downloads.remove([f"{REPO}:Q4_K_M", "nobody/x"])
    assert gone.is_file()
    asked = ["outpace", "cache", "--remove", f"{REPO.lower()}:Q4_K_M", "--remove", "other/a-b", "--json"]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    told = json.loads(capsys.readouterr().out)
    assert told["removed"] == 3 * len(CONTENT)
    assert [its["name"] for its in told["downloads"]] == [f"{REPO}:Q8_0"]
    assert (gone.exists(), gone.is_symlink(), kept.is_file()) == (False, False, True)
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT  # it comes again when it is asked for


def test_a_link_whose_file_is_gone_and_a_download_that_has_not_ended_are_named_and_removed(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's own scan skips such repositories."""
    from huggingface_hub import scan_cache_dir

    kept, broken = from_name(f"{REPO}:Q8_0"), from_name(f"{REPO}:Q4_K_M")
    broken.resolve().unlink()
    fake.files["other/plain"] = {"config.json": b"{}", "model.safetensors": CONTENT}
    assert ran(capsys, monkeypatch, "pull", "other/plain")[0] == 0
    plain = next(each for each in downloads.found() if each.name == "other/plain")
    next(path for path in plain.paths if path.suffix == ".safetensors").resolve().unlink()
    begun = kept.parents[3] / "models--other--begun" / "blobs" / "abc.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(CONTENT)
    (kept.parents[2] / "refs").mkdir()
    (kept.parents[2] / "refs" / "gone").write_text("3" * 40)  # a name of a revision that is not there
    assert not scan_cache_dir(downloads.folder()).repos
    rows = [re.split("  +", line)[:3] for line in ran(capsys, monkeypatch, "list")[1].splitlines()[2:]]
    assert sorted(row for row in rows if not row[0].startswith("demo")) == [
        ["other/begun", "download, cut off", "10.0 KiB"],
        ["other/plain", "safetensors, cut off", "2 B"],
        [f"{REPO}:Q4_K_M", "Q4_K_M, cut off", "0 B"],
        [f"{REPO}:Q8_0", "Q8_0", "10.0 KiB"],
    ]
    assert from_hub("other/plain", revision=None, allow_pickle=False, offline=False) is not None
    assert next(each for each in downloads.found() if each.name == "other/plain").whole, "it did not come again"
    assert ran(capsys, monkeypatch, "rm", f"{REPO}:Q4_K_M", "other/begun", "other/plain")[0] == 0
    assert [each.name for each in downloads.found()] == [f"{REPO}:Q8_0"]
    assert (broken.is_symlink(), begun.exists(), kept.is_file()) == (False, False, True)


def test_revisions_share_a_file_and_a_file_without_a_type_in_its_name_has_one(tmp_path: Path, fake: FakeHub) -> None:
    """Sizes as Hugging Face's own tool counts them, types as the gguf package writes them."""
    import gguf
    from huggingface_hub import scan_cache_dir

    repo = tmp_path / "hub" / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    writer = gguf.GGUFWriter(repo / "blobs" / "x", "llama")
    values = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for revision in ("1" * 40, "2" * 40):
        (repo / "snapshots" / revision).mkdir(parents=True)
        (repo / "snapshots" / revision / "model.gguf").symlink_to("../../blobs/x")
    size = scan_cache_dir(tmp_path / "hub").size_on_disk
    models = downloads.found()
    assert [(its.name, its.type) for its in models] == [("a/b:model", "Q8_0")] * 2
    assert downloads.size(models) == size
    assert downloads.remove(["a/b"]) == size
    assert not downloads.found()


def ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["outpace", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return (left.value.code, *capsys.readouterr())


def test_models_are_pulled_listed_and_removed_as_in_ollama(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the hub's door, each a line; Hugging Face's own tool finds the same files, of the same sizes."""
    from huggingface_hub import scan_cache_dir

    fake.files["other/plain"] = {"config.json": b"{}", "model.safetensors": CONTENT, "README.md": b"read"}
    for asked, name in ((f"hf.co/{REPO}:Q4_K_M", f"{REPO}:Q4_K_M"), ("other/plain", "other/plain")):
        code, out, _ = ran(capsys, monkeypatch, "pull", asked)
        assert code == 0
        assert f"to talk to it: outpace run {name}\n" in out
        assert re.match(rf"{re.escape(name)}: 10\.0 KiB in {tmp_path}/hub/models--", out)
    files = len([path for path in fake.paths() if "/resolve/" in path])
    ran(capsys, monkeypatch, "pull", f"{REPO}:Q4_K_M")
    assert len([path for path in fake.paths() if "/resolve/" in path]) == files, "what is there came again"
    code, out, _ = ran(capsys, monkeypatch, "list")
    rows = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert re.fullmatch(rf"{REPO}:Q4_K_M +Q4_K_M +10\.0 KiB +\d+ seconds? ago", rows[f"{REPO}:Q4_K_M"])
    assert re.fullmatch(r"other/plain +safetensors +10\.0 KiB +\d+ seconds? ago", rows["other/plain"])
    listed = {each["name"]: each["bytes"] for each in json.loads(ran(capsys, monkeypatch, "ls", "--json")[1])["models"]}
    scanned = {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir(tmp_path / "hub").repos}
    assert (listed[f"{REPO}:Q4_K_M"], listed["other/plain"]) == (scanned[REPO], scanned["other/plain"])
    address = f"https://huggingface.co/{REPO}:Q4_K_M"
    assert resolve(address, LoadOptions(offline=True)) == resolve(f"{REPO}:Q4_K_M", LoadOptions(offline=True))
    assert ran(capsys, monkeypatch, "rm", "hf.co/other/plain/", REPO)[0] == 0
    assert json.loads(ran(capsys, monkeypatch, "cache", "--json")[1])["downloads"] == []


def test_a_pulled_model_in_shards_is_counted_whole_and_run_as_it_was_pulled(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.files["other/parts"] = {f"a-Q8_0-0000{i}-of-00002.gguf": CONTENT[i:] for i in (1, 2)}
    pulled = json.loads(ran(capsys, monkeypatch, "pull", "other/parts:Q8_0", "--json")[1])
    assert pulled["bytes"] == 2 * len(CONTENT) - 3
    fake.files["other/pickled"] = {"config.json": b"{}", "pytorch_model.bin": CONTENT}
    options = ("--revision", "main", "--allow-pickle")
    pulled = json.loads(ran(capsys, monkeypatch, "pull", "other/pickled", *options, "--json")[1])
    assert pulled["run"] == "outpace run other/pickled --revision main --allow-pickle"


def test_without_a_network_a_pull_says_what_to_do(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name, says in (
        (f"{REPO}:Q4_K_M", "Connection refused): check the connection and HF_ENDPOINT, and try again"),
        ("other/plain", "Connection refused): check the name, --revision and the connection, or use a local folder or"),
        ("llama3.2:1b", "Ollama's own names are not known here: give user/repo:Q4_K_M"),
    ):
        code, out, err = ran(capsys, monkeypatch, "pull", name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert says in err
