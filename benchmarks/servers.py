"""Servers as processes: started from a command with its {port}, asked when they answer, ended with the block."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outpace.measure.remote import Remote, RemoteError

OURS = f"{shlex.quote(sys.executable)} -m outpace serve --port {{port}}"
STARTS = 300.0  # seconds that a server may take to start


@dataclass(frozen=True, slots=True)
class Started:
    """A server that runs."""

    remote: Remote
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid


@contextmanager
def started(command: str, log: Path, key: str | None = None) -> Iterator[Started]:
    """``command`` with its {port}, running, until the block ends. ``key``: where the server asks for one. Raises
    RemoteError when it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("ab") as out:
        arguments = shlex.split(command.replace("{port}", str(port)))
        # a group of its own: Ctrl-C in a terminal is for the benchmark, which ends the server
        process = subprocess.Popen(arguments, stdout=out, stderr=out, process_group=0)
    remote = Remote(f"http://127.0.0.1:{port}", key)
    try:
        begun = time.monotonic()
        while True:
            try:
                remote.models()
                break
            except RemoteError as error:
                if process.poll() is not None or time.monotonic() - begun > STARTS:
                    raise RemoteError(f"{command} does not answer; {log} has what it says: ", error) from error
                time.sleep(0.2)
        yield Started(remote, process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor seconds of a process and its descendants; ``loop``: of the process's first thread, in which an event
    loop runs."""

    all: float
    loop: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.all - other.all, self.loop - other.loop)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.all + other.all, self.loop + other.loop)


def spent(pid: int) -> Spent:
    """What it has used until now. Linux only; raises OSError elsewhere, or when it is gone."""
    return Spent(_tree(pid), _seconds(Path(f"/proc/{pid}/task/{pid}/stat")))


def _tree(pid: int) -> float:
    total = _seconds(Path(f"/proc/{pid}/stat"))
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        total += sum(_tree(int(child)) for child in children.read_text().split())
    return total


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
