"""A newcomer's walk in a real terminal, tmux's: README's lines pasted one after the other, a chat, a race, a benchmark.
What stands on the screen is what a person reads: nothing wider than the pane, no traceback, keys that work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.test_docs import ROOT, blocks

COLUMNS = 80
SGR = re.compile(r"\x1b\[[\d;]*m")
SHORT = {"--compare": " -n 24", "Translate": " -n 12", "outpace bench": " --limit 2 -n 12", "outpace race": " -n 40"}
pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: apt-get install tmux")


class Pane:
    """A shell in a tmux of its own, whose prompt is the last command's exit code."""

    def __init__(self, folder: Path, lines: int = 24) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "OUTPACE_CACHE": str(folder / "cache"), "OUTPACE_WEIGHT_CACHE": "0", "BROWSER": "true"}
        (folder / "rc").write_text("PS1='$?> '\n")
        size = ["-x", str(COLUMNS), "-y", str(lines)]
        self._do("new-session", "-d", *size, "-c", str(folder), f"bash --rcfile {folder}/rc", env=os.environ | own)
        self._do("set-option", "-g", "history-limit", "5000")
        self.wait(r"^0> *\Z")

    def _do(self, *words: str, **how: object) -> str:
        done = subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True, timeout=60, **how)  # type: ignore[call-overload]
        return str(done.stdout)

    def screen(self, *options: str) -> str:
        return self._do("capture-pane", "-p", *options)

    def keys(self, *names: str) -> None:
        self._do("send-keys", *names)

    def paste(self, text: str) -> None:
        self._do("set-buffer", text)
        self._do("paste-buffer")
        self.keys("Enter")

    def wait(self, pattern: str) -> str:
        """The screen as soon as something on it, colours left out, matches."""
        for _ in range(1200):  # looks, not seconds: a machine may hold everything up
            if re.search(pattern, shown := SGR.sub("", self.screen("-e")).rstrip("\n"), re.M):
                return shown
            time.sleep(0.1)
        raise AssertionError(f"no {pattern!r} in\n{shown}")

    def run(self, line: str, code: int = 0) -> list[str]:
        """Paste a command, wait for its end; what it wrote, lines that the pane has wrapped joined again."""
        self.keys("C-l")
        self.wait(r"\A\d+> *\Z")
        self._do("clear-history")
        self.paste(line)
        self.wait(rf"(?s)\S.*\n{code}> *\Z")
        whole = self.screen("-J", "-S", "-").rstrip()
        assert "Traceback" not in whole
        return [each.rstrip() for each in whole.splitlines()[1:-1]]

    def close(self) -> None:
        self._do("kill-server")


@pytest.fixture
def pane(tmp_path: Path) -> Iterator[Callable[[int], Pane]]:
    made: list[Pane] = []

    def begun(lines: int) -> Pane:
        made.append(Pane(tmp_path, lines))
        return made[-1]

    yield begun
    for each in made:
        each.close()


def fits(lines: list[str]) -> bool:
    return max(map(len, lines)) <= COLUMNS


def test_the_readmes_lines_do_what_they_say_in_a_terminal(pane: Callable[[int], Pane]) -> None:
    """Pasted with their comments; answers are made shorter, and a person's own lines (plan, list) follow."""
    shell = pane(24)
    (use,) = [body for body in blocks(ROOT / "README.md", "bash") if "outpace generate" in body]
    for line in [line for line in use.splitlines() if not re.search("serve|drafters|race", line)]:
        command, _, comment = line.partition("  # ")
        short = next((option for part, option in SHORT.items() if part in command), "")
        shown = shell.run(f"{command.rstrip()}{short}  # {comment.strip()}")
        if "--compare" in command:
            at = next(i for i, each in enumerate(shown) if each.startswith("green: drafted by suffix; cyan: "))
            assert fits(shown[at:])
            assert shown[-1] == "identical: 24 tokens"
            assert re.search("\x1b\\[3[26]m.*\x1b\\[1?;?32m", shell.screen("-e", "-S", "-"), re.S)
        elif "Translate" in command:
            assert re.search(r"^\[12 tokens.* tokens/s", "\n".join(shown), re.M)
            assert "(stop: length)" not in shown
        elif "bench" in command:
            assert fits(shown)
            bars = [each for each in shown if re.search(r"\|-* +[\d.]+$", each)]
            assert len(bars) == 2 * 3  # all, and two categories
            assert re.search(r"^ +suffix\+eagle:demo|^ +auto ", "\n".join(shown), re.M)
        else:
            assert re.fullmatch(r"outpace-learn\.html: \d+ kB, open it in a browser", "".join(shown))
    shown = shell.run("outpace plan -a 0.7 --costs 1:1,8:1.25,16:2.1")
    assert fits(shown)
    assert sum("#" in each for each in shown) == 13
    shown = shell.run("outpace list")
    assert any(re.match(r"demo +Q4_1 +93\.8 MiB +\d+ \w+ ago$", each) for each in shown)


def test_a_chat_and_a_question_are_left_by_keys(pane: Callable[[int], Pane]) -> None:
    shell = pane(24)
    shell.paste("outpace run demo -n 40")
    assert "demo: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves" in shell.wait(r"^> \Z|^>\Z")
    shell.paste("Repeat after me: one two three, one two three.")
    shown = shell.wait(r"tokens/s; [\d.]+ tokens a step, suffix\+eagle:demo drafted\][^>]*\n> *\Z")
    assert fits(shown.splitlines())
    assert re.search("\x1b\\[3[26]m", shell.screen("-e"))
    shell.keys("q")  # a letter as any other: no pager, no menu
    shell.keys("C-c")
    shell.wait("Ctrl-C once more leaves, as /bye and Ctrl-D do")
    shell.keys("C-c")
    shell.wait(r"^0> *\Z")
    shell.keys("C-l")
    shell.wait(r"\A0> *\Z")
    shell.paste("outpace 'Tell me a long story.' --ignore-eos -n none --json out.json")
    shell.wait(r"> outpace .*\n+(.+\n)+.{10}")  # some of it is there
    shell.keys("C-c")
    shown = shell.wait(r"^130> *\Z")
    assert "Traceback" not in shown


def test_a_race_stays_in_its_place_on_a_low_terminal(pane: Callable[[int], Pane]) -> None:
    """Ten lines: what is drawn again is drawn over, so that each column's head stands once in all that was scrolled."""
    shown = pane(10).run("outpace race 'Why is the sky blue?' -n 60")
    assert fits(shown)
    assert sum(bool(re.match(r"plain: \d+ tokens, [\d.]+ s, \d+/s +\| suffix", each)) for each in shown) == 1
    assert re.search(r"\w+ took [\d.]+ s; [\w+:]+ took [\d.]+ s, [\d.]+ times as long", " ".join(shown))
    assert shown[-1].startswith("identical: ")
