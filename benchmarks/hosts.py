"""Replicas on two hosts, namespaces of this machine's network: one is killed, or its link is cut, in mid-stream.

Ray's head is here, a second node in a namespace behind a link (Linux, root, Debian's iproute2); each has one replica.
``--rounds`` streams of the node's replica lose it, in turn because all of the node's processes get SIGKILL and because
the link goes down; meanwhile a new stream is asked for. Then the node starts again, or the link comes up. It needs an
environment with Ray (``scripts/scale`` makes .venv/scale).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import statistics
import subprocess
import time
from contextlib import closing
from typing import Any

from benchmarks.figures import Measuring, add_json, emit
from benchmarks.scale import KINDS, Cluster, busy, request, same, servers, stream

NAME, HERE, THERE = "outpace-node", "10.213.7.1", "10.213.7.2"
OPTIONS = ("--max-length", "1024", "--drafter", "ngram", "--threads", "1")
BACK = 180.0  # seconds that a lost node may take until its replica answers again


class Hosts(Cluster):
    """A head here, and a node in a namespace. Raises OSError, CalledProcessError."""

    def __init__(self, python: str) -> None:
        _ip("netns", "add", NAME)
        _ip("link", "add", NAME, "type", "veth", "peer", "name", "eth0", "netns", NAME)
        _ip("address", "add", f"{HERE}/24", "dev", NAME)
        _ip("-n", NAME, "address", "add", f"{THERE}/24", "dev", "eth0")
        for words in (("link", "set", NAME, "up"), ("-n", NAME, "link", "set", "eth0", "up"),
                      ("-n", NAME, "link", "set", "lo", "up")):  # fmt: skip
            _ip(*words)
        super().__init__(python, HERE, cores=1)
        self.node: subprocess.Popen[bytes] | None = None

    def serve(self, count: str, *options: str) -> None:
        host, _, port = self.address.partition(":")
        while self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.2)
        self._join()
        super().serve(count, *options)

    def _join(self) -> None:
        """Start the node, unless it runs."""
        if self.node is None or self.node.poll() is not None:
            words = ("--address", self.address, "--node-ip-address", THERE, "--num-cpus", "1")
            self.node = self._start(*words, within=("ip", "netns", "exec", NAME))

    def there(self) -> set[int]:
        """Processes of the node."""
        listed = subprocess.run(["ip", "netns", "pids", NAME], capture_output=True, text=True, check=True)
        return set(map(int, listed.stdout.split()))

    def servers(self) -> dict[int, str]:
        return {**super().servers(), **servers(self.there())}

    def kill(self) -> None:
        """End all of the node at once."""
        for pid in self.there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """From now on what is sent is lost without an error."""
        _ip("-n", NAME, "link", "set", "eth0", "down")

    def heal(self) -> float:
        """Bring link and node back; seconds until both replicas are there. Raises OSError."""
        _ip("-n", NAME, "link", "set", "eth0", "up")
        began = time.monotonic()
        while time.monotonic() < began + BACK:
            self._join()  # Ray ends a node that it has given up
            theirs = self.there()
            found = self.servers()
            if any(pid in theirs for pid in found) and any(pid not in theirs for pid in found):
                return time.monotonic() - began
            time.sleep(0.2)
        raise OSError(f"after {BACK:.0f} s the node has no replica")

    def close(self) -> None:
        self.kill()
        if self.node is not None:
            self.node.wait()
        super().close()
        _ip("netns", "delete", NAME)  # with it goes its link


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", default=".venv/scale/bin/python", help="an environment with outpace[ray]")
    parser.add_argument("--rounds", type=int, default=10)
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Raises OSError, CalledProcessError."""
    rounds: list[dict[str, Any]] = []
    numbers = itertools.count()
    with closing(Hosts(given.python)) as running, Measuring() as measuring:
        running.serve("2", *OPTIONS)
        running.heal()
        for number in range(given.rounds):
            how = ("killed", "cut")[number % 2]
            found = lost(running, how, list(KINDS)[number % len(KINDS)], numbers)
            rounds.append(found)
            end = "the same" if found["same"] else "NOT THE SAME"
            print(f"{how}, {found['kind']}: {end}, gap {found['gap']:.1f} s; a new stream {found['new']:.1f} s; "
                  f"back after {found['back']:.1f} s", flush=True)  # fmt: skip
    for how in ("killed", "cut"):
        these = [each for each in rounds if each["how"] == how]
        if these:
            gaps = [each["gap"] for each in these]
            print(f"{how}: {sum(each['same'] for each in these)} of {len(these)} streams the same, longest gap: "
                  f"median {statistics.median(gaps):.1f} s, most {max(gaps):.1f} s")  # fmt: skip
    emit(given, {"hosts": rounds})
    return measuring.end(int(not all(each["same"] for each in rounds)))


def lost(running: Hosts, how: str, kind: str, numbers: itertools.count[int]) -> dict[str, Any]:
    """A stream that the node's replica writes loses it: whether it was the same, and seconds."""
    while True:  # until the node's replica is the one that answers
        asked, seen = request(kind, next(numbers)), set[int]()
        live, theirs = running.servers(), running.there()
        look = _looking(live, seen)
        wanted, _ = stream(running.url, asked, 1, look)
        if not seen or not seen <= theirs:
            continue
        hit: list[int] = []

        def act(live: dict[int, str] = live, theirs: set[int] = theirs, hit: list[int] = hit) -> None:
            if (pid := busy(live)) in theirs:
                hit.append(pid)
                running.kill() if how == "killed" else running.cut()

        found, gap = stream(running.url, asked, wanted["chunks"] // 4, act)
        if hit:
            break
    began = time.monotonic()
    other, _ = stream(running.url, asked)
    new = time.monotonic() - began
    both = same(found, wanted) and same(other, wanted)
    if not both:
        print(f"{found}\n{other}\n{wanted}")
    return {"how": how, "kind": kind, "same": both, "gap": gap, "new": new, "back": running.heal()}


def _looking(live: dict[int, str], seen: set[int]) -> Any:
    def look() -> None:
        if (pid := busy(live)) is not None:
            seen.add(pid)

    return look
