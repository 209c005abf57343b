"""``outpace chat`` as a person meets it: the real command on a pseudo-terminal, with the demo model."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from outpace.cli import chat, terminal
from outpace.engine.engine import Engine
from outpace.params import Message, SamplingParams

UP, LEFT, CTRL_C, CTRL_D = "\x1b[A", "\x1b[D", "\x03", "\x04"
PROMPT = "> "
GREEN = "\x1b[32m"


class Terminal:
    """A command on a terminal of its own. ``shown``: what it has written, of which ``wait`` has seen a part."""

    def __init__(self, *arguments: str | Path, **env: str) -> None:
        self._ours, theirs = os.openpty()

        def own() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job inherits it ignored
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "outpace", "chat", *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm", **env}, start_new_session=True, preexec_fn=own,
        )  # fmt: skip
        os.close(theirs)
        self.shown, self._seen = "", 0

    def keys(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once more after a time: Python misses one between readline's prompt and its wait for keys."""
        self.keys(CTRL_C)
        if not select.select([self._ours], [], [], 20)[0]:
            self.keys(CTRL_C)

    def wait(self, pattern: str) -> str:
        """Read until something matches; what was written up to its end since the last call."""
        end = time.monotonic() + 120
        while (found := re.compile(pattern).search(self.shown, self._seen)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.shown[self._seen :]!r}"
            if not self._read():
                raise AssertionError(f"it ended without {pattern!r}: {self.shown[self._seen :]!r}")
        before, self._seen = self._seen, found.end()
        return self.shown[before : found.end()]

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self.process.wait(120)

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 120)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # Linux's end of a terminal whose program has gone
            data = b""
        self.shown += data.decode(errors="replace")
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the command, with a history of the test's own, and waits for its first prompt."""
    running: list[Terminal] = []

    def begun(*arguments: str | Path, **env: str) -> Terminal:
        running.append(Terminal(*arguments, **{"OUTPACE_CACHE": str(tmp_path), **env}))
        running[-1].wait(PROMPT)
        return running[-1]

    yield begun
    for each in running:
        each.close()


def test_lines_are_edited_and_found_again(start: Start) -> None:
    """Arrow keys edit and walk the history, also that of the last conversation."""
    first = start(NO_COLOR="1")
    first.keys("/stas" + LEFT + "t\r")
    assert "/clear" not in first.wait("no answer yet")
    first.wait(PROMPT)
    first.keys(UP + "\r")
    first.wait("no answer yet")
    first.wait(PROMPT)
    first.keys(CTRL_D)
    assert first.end() == 0
    second = start(NO_COLOR="1")
    second.keys(UP + "\r")
    second.wait("no answer yet")
    second.wait(PROMPT)
    second.keys("exit\r")
    assert second.end() == 0
    assert "\x1b[3" not in first.shown + second.shown, "no colours where nobody wants them"


def test_ctrl_c_stops_an_answer_drops_a_line_and_leaves_at_last(start: Start, tmp_path: Path) -> None:
    turns = tmp_path / "turns.json"
    talk = start("-d", "ngram", "--size", "3", "--ignore-eos", "--json", turns)
    talk.keys("Repeat after me: a b c a b c a b c\r")
    talk.wait(re.escape(GREEN))  # some of it is there, and a drafter wrote a part
    talk.interrupt()
    assert re.search(r"[\d.]+ tokens/s; [\d.]+ tokens a step", talk.wait("stopped: what was written stays"))
    talk.wait(PROMPT)
    talk.keys("half a line")
    talk.wait("half a line")
    talk.interrupt()
    talk.wait("Ctrl-C once more leaves")
    talk.wait(PROMPT)
    talk.keys("Go on.\r")
    talk.wait(re.escape(GREEN))
    talk.interrupt()
    talk.wait("stopped")
    talk.wait(PROMPT)
    talk.interrupt()
    talk.wait("Ctrl-C once more leaves")
    talk.wait(PROMPT)
    talk.interrupt()
    assert talk.end() == 0
    first, second = json.loads(turns.read_text())
    assert (first["finish_reason"], second["finish_reason"]) == ("cancelled", "cancelled")
    # The conversation goes on from what was said: all but the last token is found in the KV.
    assert second["reused_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 2


def test_what_is_typed_beside_questions_never_reaches_the_model(start: Start, tmp_path: Path) -> None:
    turns = tmp_path / "turns.json"
    talk = start("-n", "4", "--ignore-eos", "--json", turns)
    for typed, answer in (
        ("/?", "these lines"),
        ("/HELP", "these lines"),
        ("/clear", "started over"),
        ("/set", "there is no /set: /help lists what there is\r"),
        ("Say hello.", "cut off after 4 tokens: --max-tokens allows more"),
        ('"""Say\rhello.\r"""', "cut off after 4 tokens"),
    ):
        talk.keys(typed + "\r")
        talk.wait(re.escape(answer))
        talk.wait(f"\n[^\n]*{PROMPT}")
    talk.keys("/bye\r")
    assert talk.end() == 0
    assert len(json.loads(turns.read_text())) == 2


@pytest.mark.parametrize("word", ["exit", "/quit"])
def test_an_answer_of_a_script_is_as_long_as_the_context_and_that_is_said(tmp_path: Path, word: str) -> None:
    turns = tmp_path / "turns.json"
    done = subprocess.run(
        [sys.executable, "-m", "outpace", "chat", "--ignore-eos", "--max-length", "400", "--json", turns],
        input=f"Count.\n{word}\nnever read\n", env={**os.environ, "OUTPACE_CACHE": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (turn,) = json.loads(turns.read_text())
    assert (turn["finish_reason"], turn["prompt_tokens"] + turn["completion_tokens"]) == ("length", 400)
    assert done.stdout == turn["text"] + "\n", "neither prompts nor codes"
    assert "the context is full: /clear starts over" in done.stderr


@pytest.mark.parametrize("stop", [(), ("fox",)], ids=str)
def test_each_piece_has_the_colour_of_who_wrote_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: tuple[str, ...]
) -> None:
    """As the result tells it afterwards, also where a stop string holds text back."""
    monkeypatch.setattr(terminal, "coloured", lambda text, colour: f"<{colour} {text}>")
    asked: list[Message] = [{"role": "user", "content": "Repeat three times: the quick brown fox, the quick red fox."}]
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=stop, min_tokens=16)
    with Engine.load("demo", drafter="suffix", size=3) as engine:
        written = chat.Written(engine, params, terminal.Colours("recycle+suffix"))
        for delta in engine.stream(asked, params):
            written(delta)
            result = delta.result
    assert result is not None
    assert {source for _, source in result.pieces} == {"suffix", "target"}
    expected = "".join(text if source == "target" else f"<cyan {text}>" for text, source in result.pieces)
    assert capsys.readouterr().out.replace("><cyan ", "") == expected.replace("><cyan ", "")


def test_colours_tell_drafters_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Mock(isatty=lambda: True))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colours = terminal.Colours("suffix+eagle:demo")
    shown = [colours.written("a", source) for source in ("target", "suffix", "eagle:demo", "ngram")]
    assert shown == ["a", f"{GREEN}a\x1b[0m", "\x1b[36ma\x1b[0m", "\x1b[35ma\x1b[0m"]
    assert re.sub(r"\x1b\[\d+m", "", colours.legend) == (
        "green: drafted by suffix; cyan: drafted by eagle:demo; magenta: drafted by ngram; the rest: the model's own"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert colours.written("a", "suffix") == "a"


def test_a_bar_moves_while_a_long_prompt_is_read(start: Start) -> None:
    """As far as the KV that is written; what is known already is not counted, and short prompts draw none."""
    talk = start("-n", "4", "--ignore-eos", "--threads", "1")
    talk.keys("Say hello.\r")
    assert "reading" not in talk.wait("cut off after 4 tokens")
    talk.wait(f"\n[^\n]*{PROMPT}")
    talk.keys("/system " + "The sky is wide and blue. " * 150 + "\r")  # a terminal's line has up to 4,096 bytes
    talk.wait("started over")
    talk.wait(f"\n[^\n]*{PROMPT}")
    talk.keys("Say hello.\r")
    shown = talk.wait("cut off after 4 tokens")
    shares = [int(share) for share in re.findall(r"reading [#-]{30} +(\d+)%", shown)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert any(0 < share < 100 for share in shares), shares
    assert shown.rindex("\r\x1b[K") > shown.rindex("reading"), "the bar is gone before the answer"
    talk.wait(f"\n[^\n]*{PROMPT}")
    talk.keys(CTRL_D)
    assert talk.end() == 0
