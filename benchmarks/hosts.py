"""Replicas on two hosts, namespaces of this machine's network: one is killed, or its link is cut, in mid-stream.

Ray's head is here, a second node in a namespace behind a link (Linux, root, Debian's iproute2); each has one replica.
``--rounds`` streams of the node's replica lose it, in turn because all of the node's processes get SIGKILL and because
the link goes down; then another is asked for whose prompt the lost replica knows, and the node starts again, or the
link comes up. It needs an environment with Ray (``scripts/scale`` makes .venv/scale).
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

from benchmarks.figures import Measuring, add_json, at_least_one, emit
from benchmarks.scale import KINDS, Asked, Cluster, busy, request, same, servers, stream

NAME, HERE, THERE = "outpace-node", "10.213.7.1", "10.213.7.2"
OPTIONS = ("--max-length", "1024", "--drafter", "ngram", "--threads", "1")
BACK = 180.0  # seconds that a lost node may take until its replica writes again


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
        """From now on what this host sends there is lost without an error."""
        _ip("-n", NAME, "link", "set", "eth0", "down")

    def heal(self) -> None:
        """Bring the link back, and the node, if it has ended: Ray ends one that it has given up."""
        _ip("-n", NAME, "link", "set", "eth0", "up")
        self._join()

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
    parser.add_argument("--rounds", type=at_least_one, default=10)
    parser.add_argument("--cut", type=float, default=0.0, metavar="SECONDS", help="how long a link stays down at least")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Raises OSError, CalledProcessError."""
    rounds: list[dict[str, Any]] = []
    numbers = itertools.count()
    with closing(Hosts(given.python)) as running, Measuring() as measuring:
        running.serve("2", *OPTIONS)
        for number in range(given.rounds):
            how = ("killed", "cut")[number % 2]
            found = lost(running, how, list(KINDS)[number % len(KINDS)], numbers, given.cut)
            rounds.append(found)
            end = "the same" if found["same"] else "NOT THE SAME"
            print(f"{how}, {found['kind']}: {end}, gap {found['gap']:.1f} s; a new stream began after "
                  f"{found['new']:.1f} s; back after {found['back']:.1f} s", flush=True)  # fmt: skip
    for how in ("killed", "cut"):
        these = [each for each in rounds if each["how"] == how]
        if these:
            gaps = [each["gap"] for each in these]
            print(f"{how}: {sum(each['same'] for each in these)} of {len(these)} streams the same, longest gap: "
                  f"median {statistics.median(gaps):.1f} s, most {max(gaps):.1f} s")  # fmt: skip
    emit(given, {"hosts": rounds})
    return measuring.end(int(not all(each["same"] for each in rounds)))


def lost(running: Hosts, how: str, kind: str, numbers: itertools.count[int], cut: float) -> dict[str, Any]:
    """A stream that the node's replica writes loses it: whether it was the same, and seconds. Then another is asked
    for whose prompt that replica has read: whether it was, too, and seconds to its first chunk. A link that is cut
    stays down for ``cut`` seconds at least: Ray gives a node up after about a minute."""
    known, whole = written_there(running, kind, numbers)
    hit: list[int] = []

    def act() -> None:
        if (pid := busy(live)) in theirs:
            hit.append(pid)
            running.kill() if how == "killed" else running.cut()

    while not hit:  # else it has been written, but not read
        asked, wanted = written_there(running, kind, numbers)
        live, theirs = running.servers(), running.there()
        found, gap = stream(running.url, asked, wanted["chunks"] // 4, act)
    began, first = time.monotonic(), list[float]()
    new, _ = stream(running.url, known, 0, lambda: first.append(time.monotonic() - began))
    both = same(found, wanted) and same(new, whole)
    if not both:
        print(f"{found}\n{wanted}\n{new}\n{whole}")
    if how == "cut":
        time.sleep(max(0.0, began + cut - time.monotonic()))
    began = time.monotonic()
    written_there(running, kind, numbers)
    return {
        "how": how, "kind": kind, "same": both, "gap": gap, "new": first[0], "back": time.monotonic() - began,
    }  # fmt: skip


def written_there(running: Hosts, kind: str, numbers: itertools.count[int]) -> tuple[Asked, dict[str, Any]]:
    """The next request that the node's replica answers, and its stream. Raises OSError."""
    seen: set[int | None] = set()
    began = time.monotonic()

    def look() -> None:
        seen.add(busy(running.servers()))

    while time.monotonic() < began + BACK:
        running.heal()
        asked, theirs = request(kind, next(numbers)), running.there()
        seen.clear()
        wanted, _ = stream(running.url, asked, 1, look)
        if seen and seen <= theirs:
            return asked, wanted
    raise OSError(f"for {BACK:.0f} s the node's replica has written nothing")
