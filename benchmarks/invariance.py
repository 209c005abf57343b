"""Does a server say the same, whatever goes on around a request? A matrix of ways to ask, and a score.

    python -m benchmarks.invariance --prompts prompts.jsonl --limit 8
    python -m benchmarks.invariance --server "llama-server -m MODEL.gguf --port {port}" --limit 8

Starts the server, asks every prompt alone (greedy, and with noise), and then again in every way: crowded, streamed,
with its prefix cached and not, with speculation off and of other sizes, beside neighbours that go away in mid-stream,
after a restart, and as a server with other threads or chunks. An answer has changed if a token has; ``bits`` counts
those in which only a logprob has. What a server does not take is said, and not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers import OURS, started
from outpace.measure import machine
from outpace.measure.prompts import PromptRow, read_prompts
from outpace.measure.remote import Answer, Remote, RemoteError
from outpace.measure.verify import Way, bodies, difference
from outpace.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to ask. ``command``: more arguments of the server; ``more``: of the body; ``ours``: only this project's
    servers know it."""

    name: str
    command: str = ""
    concurrency: int = 1
    stream: bool = False
    neighbours: int = 0
    twice: bool = False
    more: Mapping[str, Any] | None = None
    ours: bool = False


VARIANTS = (
    Variant("again"),
    Variant("concurrency 4", concurrency=4),
    Variant("concurrency 16", concurrency=16),
    Variant("streamed", stream=True),
    Variant("streamed, concurrency 16", stream=True, concurrency=16),
    Variant("prefix hit", twice=True),
    Variant("prefix miss", more={"reuse_prefix": False}, ours=True),
    Variant("cancelled neighbours", concurrency=4, neighbours=4),
    Variant("speculation off", more={"speculation": {"off": True}}, ours=True),
    Variant("size 1", more={"speculation": {"size": 1}}, ours=True),
    Variant("size 8, crowded", concurrency=16, more={"speculation": {"size": 8}}, ours=True),
    Variant("restarted", command=" "),
    Variant("one thread", command="--threads 1", ours=True),
    Variant("drafter ngram", command="--drafter ngram", ours=True),
    Variant("drafter none, crowded", command="--drafter none", concurrency=16, ours=True),
    Variant("four rows, crowded", command="--max-rows 4", concurrency=16, ours=True),
    Variant("small chunks", command="--prefill-delay 0.001", concurrency=4, ours=True),
)
NOISES = (
    SamplingParams(seed=1000),
    SamplingParams(seed=1001, temperature=0.8, top_p=0.95),
    SamplingParams(seed=1002, temperature=1.0, presence_penalty=0.5),
)


@contextmanager
def server(command: str, log: Path) -> Iterator[Remote]:
    """``command``, running, until the block ends. Raises RemoteError when it does not start."""
    with started(command, log) as its:
        yield its.remote


def ask(remote: Remote, model: str, rows: Sequence[PromptRow], variant: Variant, tokens: int) -> list[Answer]:
    """All rows under all noises, in one order."""
    way = Way(variant.name, remote, model, variant.concurrency, variant.more)
    asked = []
    for noise in NOISES:
        asked += bodies(rows, noise.with_(max_tokens=tokens), way, logprobs=True)
    with _leaving(remote, asked, variant.neighbours):
        if variant.twice:
            remote.chats(asked, variant.concurrency)
        return remote.chats(asked, variant.concurrency, stream=variant.stream)


@contextmanager
def _leaving(remote: Remote, asked: Sequence[Mapping[str, Any]], neighbours: int) -> Iterator[None]:
    """Beside the block, clients that begin streams and go away after a little of each."""
    over = threading.Event()

    def neighbour(number: int) -> None:
        i = number
        while not over.is_set():
            body = {**asked[i % len(asked)], "seed": i, "max_tokens": 200, "stream": True}
            request = urllib.request.Request(
                remote.base + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read(300 + 97 * (i % 7))
            i += neighbours

    threads = [threading.Thread(target=neighbour, args=(i,)) for i in range(neighbours)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def takes(remote: Remote, model: str, more: Mapping[str, Any]) -> str | None:
    """None where the server takes these fields; else why the variant is left out."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **more}
    try:
        said = remote.chat(body)
    except RemoteError as error:
        return str(error)
    return None if said.speculation is not None else "it ignores unknown fields"


def run(
    command: str, ours: bool, rows: Sequence[PromptRow], tokens: int, log: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """The score of a server. Raises RemoteError when it cannot be started."""
    results: list[dict[str, Any]] = []
    expected: list[Answer] = []
    variants = [variant for variant in VARIANTS if ours or not variant.ours]
    commands = dict.fromkeys(variant.command for variant in variants)  # one start each
    fingerprint = None
    for arguments in commands:
        with server(f"{command} {arguments}".strip(), log) as remote:
            model = remote.model(None)
            if not expected:
                expected = ask(remote, model, rows, Variant("alone"), tokens)
                fingerprint = expected[0].fingerprint
            for variant in variants:
                if variant.command != arguments:
                    continue
                why = takes(remote, model, variant.more) if variant.more else None
                if why is not None:
                    results.append({"variant": variant.name, "skipped": why})
                    say(f"{variant.name:28} left out: {why}")
                    continue
                found = [
                    difference(a, b) for a, b in zip(expected, ask(remote, model, rows, variant, tokens), strict=True)
                ]
                changed = [its for its in found if its is not None and its.what != "logprob"]
                bits = sum(its is not None and its.what == "logprob" for its in found)
                first = changed[0] if changed else next((its for its in found if its is not None), None)
                told = {
                    "variant": variant.name,
                    "answers": len(found),
                    "changed": len(changed),
                    "bits": bits,
                    "near_ties": sum(its.near_tie for its in changed),
                    "first": None if first is None else first.to_dict(),
                }
                results.append(told)
                told_first = "" if first is None else f"; first: {first}"
                say(f"{variant.name:28} {len(found)} answers, {len(changed)} changed, {bits} in bits alone{told_first}")
    counted = [its for its in results if "skipped" not in its]
    total = {name: sum(its[name] for its in counted) for name in ("answers", "changed", "bits", "near_ties")}
    return {"command": command, "fingerprint": fingerprint, **total, "variants": results, "machine": machine.cpu()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="the command of another server, with {port} (default: ours)")
    parser.add_argument("--options", default="", help="more arguments of our server, such as '-m demo-gemma'")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as outpace bench takes them")
    parser.add_argument("--limit", type=int, help="so many of them")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--log", type=Path, default=Path("invariance.log"), help="what the servers say")
    given = parser.parse_args(arguments)
    rows = read_prompts(given.prompts, given.limit)
    command = given.server or f"{OURS} {given.options}".strip()
    found = run(command, given.server is None, rows, given.tokens, given.log, lambda line: print(line, flush=True))
    print(f"score: {found['changed']} of {found['answers']} answers changed, {found['bits']} more in bits alone")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found["changed"] or (given.server is None and found["bits"]) else 0


if __name__ == "__main__":
    sys.exit(main())
