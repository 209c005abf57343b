"""Models by name from a hub on loopback: the right file, whole and checked, whatever the network does."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from outpace.cli.main import main
from outpace.cli.options import Load
from outpace.errors import ModelError, ParameterError
from outpace.models import download, downloads, hub
from outpace.models.fingerprint import fingerprint_of
from outpace.models.hub import from_name, is_name
from outpace.models.load import resolve
from outpace.models.options import LoadOptions
from tests.fake_hub import FakeHub, plain, send, serving

REPO = "someone/Tiny-GGUF"
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    its = FakeHub()
    its.files[REPO] = {"README.md": b"read", "tiny.Q4_K_M.gguf": CONTENT, "tiny.Q8_0.gguf": CONTENT[::-1]}
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(download.Web.__init__, "__defaults__", (None, lambda seconds: None))  # nobody waits
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
    assert not list(path.parent.glob("*.part"))


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


def cut(most: int) -> Callable[..., None]:
    return lambda request: send(request, CONTENT, most=most)


def test_a_cut_download_goes_on(fake: FakeHub) -> None:
    fake.faults.extend([cut(1000), cut(0), cut(3000), lambda r: plain(r, 503), None])
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT
    ranges = [headers.get("Range") for method, path, headers in fake.asked if "resolve" in path]
    assert ranges == [None, "bytes=1000-", "bytes=1000-", "bytes=4000-", "bytes=4000-"]


def test_a_killed_download_goes_on(fake: FakeHub) -> None:
    fake.faults.extend([cut(2000), *[lambda r: plain(r, 503)] * download.ATTEMPTS])
    assert "try again" in failure(f"{REPO}:Q4_K_M")
    told: list[int] = []

    @contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
        assert total == len(CONTENT)
        yield told.append

    assert from_name(f"{REPO}:Q4_K_M", progress=progress).read_bytes() == CONTENT
    assert told[0] == 2000
    assert sum(told) == len(CONTENT)
    assert fake.asked[-1][2]["Range"] == "bytes=2000-"


def test_a_server_without_ranges_begins_anew(fake: FakeHub) -> None:
    fake.faults.extend([cut(2000), lambda r: send(r, CONTENT, whole=True)])
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT


def test_damage_in_what_was_left_is_mended(fake: FakeHub) -> None:
    fake.faults.append(lambda r: send(r, CONTENT, most=2000, bad=True))
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT
    assert [h.get("Range") for _, p, h in fake.asked if "resolve" in p] == [None, "bytes=2000-", None]


def test_a_wrong_checksum_leaves_nothing(fake: FakeHub) -> None:
    fake.lies["tiny.Q4_K_M.gguf"] = b"other"
    assert "checksum" in failure(f"{REPO}:Q4_K_M")
    cache = Path(os.environ["OUTPACE_CACHE"])
    assert not list(cache.rglob("tiny*"))


def test_no_checksum_is_refused_and_one_in_a_header_is_used(fake: FakeHub) -> None:
    fake.tells_digests = False
    assert "gives no checksum" in failure(f"{REPO}:Q4_K_M")
    with serving(lambda r: send(r, CONTENT)) as elsewhere:
        fake.content_at = elsewhere
        assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT
    fake.lies["tiny.Q8_0.gguf"] = b"other"
    with serving(lambda r: send(r, CONTENT[::-1])) as elsewhere:
        fake.content_at = elsewhere
        assert "checksum" in failure(f"{REPO}:Q8_0")


def test_the_token_stays_with_its_host(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fake.files["closed/Tiny-GGUF"] = fake.files[REPO]
    assert "HF_TOKEN" in failure("closed/Tiny-GGUF:Q4_K_M")
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    seen: list[str | None] = []

    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        seen.append(request.headers.get("Authorization"))
        send(request, CONTENT)

    with serving(elsewhere) as url:
        fake.content_at = url
        assert from_name("closed/Tiny-GGUF:Q4_K_M").read_bytes() == CONTENT
    assert seen == [None]
    assert all(
        headers["Authorization"] == "Bearer secret-token" for _, path, headers in fake.asked if "resolve" in path
    )
    monkeypatch.setenv("HF_TOKEN", "wrong-token")
    assert "wrong-token" not in failure("closed/Tiny-GGUF:Q8_9")
    assert "secret-token" not in caplog.text
    assert "wrong-token" not in caplog.text


def test_a_renamed_repository_is_followed_with_the_token(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    to = f"{fake.url}/{REPO}/resolve/main/tiny.Q4_K_M.gguf"
    fake.faults.append(lambda r: plain(r, 307, headers={"Location": to}))
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT
    assert fake.asked[-1][2]["Authorization"] == "Bearer secret-token"


def test_busy_and_missing(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(download.Web.__init__, "__defaults__", (None, waited.append))
    fake.faults.append(lambda r: plain(r, 429, headers={"Retry-After": "7"}))
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT
    assert waited == [7.0]
    fake.faults.append(lambda r: plain(r, 429, headers={"Retry-After": "86400"}))
    assert "later" in failure(f"{REPO}:Q8_0")
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
    path = from_name(f"{REPO}:Q4_0")
    assert tmp_path / "cache" in path.resolve().parents


def test_retry_after_as_a_date() -> None:
    def said(text: str) -> float | None:
        headers: Message = Message()
        headers["Retry-After"] = text
        return download.retry_after(headers)

    assert said("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert (said("Wed, 21 Oct 2099 07:28:00 GMT") or 0) > 1e9
    assert said("soon") is said("") is download.retry_after(Message()) is None


def test_offline(fake: FakeHub) -> None:
    assert "nothing of this repository" in failure(f"{REPO}:Q4_K_M", offline=True)
    assert not fake.asked
    from_name(f"{REPO}:Q8_0")
    assert "(Q8_0)" in failure(f"{REPO}:Q4_K_M", offline=True)


def test_a_download_that_another_has_begun_is_waited_for(fake: FakeHub) -> None:
    """Two processes and two threads at once: the content is sent once."""
    begun, go = threading.Event(), threading.Event()

    def slow(request: BaseHTTPRequestHandler) -> None:
        begun.set()
        assert go.wait(20)
        send(request, CONTENT)

    fake.faults.append(slow)
    context = multiprocessing.get_context("spawn")
    found: list[Path] = []
    others = [context.Process(target=from_name, args=(f"{REPO}:Q4_K_M",))]
    others[0].start()
    assert begun.wait(30)
    threads = [threading.Thread(target=lambda: found.append(from_name(f"{REPO}:Q4_K_M"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while sum("/api/" in path for path in fake.paths()) < 3:
        threading.Event().wait(0.01)
    go.set()
    for waiting in (*others, *threads):
        waiting.join(30)
    assert others[0].exitcode == 0
    assert [path.read_bytes() for path in found] == [CONTENT] * 2
    assert sum("/resolve/" in path for path in fake.paths()) == 1


def test_resolve_and_the_command_line_take_names(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{REPO}:q8_0"
    with pytest.raises(ModelError, match="local cache"):
        Load(model=name, offline=True).fetch()
    Load(model=name).fetch()
    source = resolve(name, LoadOptions(offline=True))
    assert (source.kind, source.name) == ("gguf", name)
    assert fingerprint_of(name, LoadOptions()) is not None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Load(model=name).load_options().offline
    assert hub.from_name(name, offline=True) == source.path


def test_downloads_are_listed_and_removed_by_name(
    fake: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = from_name(f"{REPO}:Q8_0"), from_name(f"{REPO}:q4_k_m")
    fake.files["other/a--b"] = {"a-F16.gguf": CONTENT * 2}
    cut = from_name("other/a--b:F16")
    cut.rename(cut.with_name("a-F16.gguf.part"))
    names = [(its.name, its.bytes, its.whole) for its in downloads.found()]
    assert names == [
        ("other/a--b:F16", 2 * len(CONTENT), False),
        (f"{REPO}:Q4_K_M", len(CONTENT), True),
        (f"{REPO}:Q8_0", len(CONTENT), True),
    ]
    with pytest.raises(ParameterError, match=r"nobody/x.*was not downloaded: there is other/a--b:F16, someone"):
        downloads.remove([f"{REPO}:Q4_K_M", "nobody/x"])
    assert gone.is_file()
    asked = ["outpace", "cache", "--remove", f"{REPO.lower()}:Q4_K_M", "--remove", "other/a--b", "--json"]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    told = json.loads(capsys.readouterr().out)
    assert told["removed"] == 3 * len(CONTENT)
    assert [its["name"] for its in told["downloads"]] == [f"{REPO}:Q8_0"]
    assert (gone.parent.exists(), cut.parent.exists(), kept.is_file()) == (False, False, True)
    assert from_name(f"{REPO}:Q4_K_M").read_bytes() == CONTENT  # it comes again when it is asked for
