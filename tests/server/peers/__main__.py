"""``scripts/peers``: another server's own tests, from its source package, against ``outpace serve``."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from tests.server.peers.table import FOLDER, RUNS, Table, differences, read

Outcomes = dict[str, tuple[str, str]]


def main() -> int:
    """0: all that applies passed."""
    parser = argparse.ArgumentParser(prog="scripts/peers", description=__doc__)
    parser.add_argument("name", choices=["llama", "vllm"], help="whose tests")
    parser.add_argument("sources", nargs="?", type=Path, help="its unpacked source package; else PyPI's is fetched")
    parser.add_argument("--all", action="store_true", help="also those that do not apply: which of them pass")
    parser.add_argument("--short", action="store_true", help="some of those that apply")
    parser.add_argument("-k", metavar="EXPRESSION", help="as pytest has it")
    given = parser.parse_args()
    table = read(given.name)
    if given.short and not table.short:
        parser.error(f"--short: there is no short form of {given.name}: leave it out, or choose with -k")
    sources = given.sources or fetched(table)
    if sources is None:
        print(f"{table.package} {table.version} cannot be had from PyPI, so its tests are left out")
        return 0
    folder = sources / table.folder
    if not folder.is_dir():
        parser.error(f"{sources} has no {table.folder}: give the unpacked source package of {table.package}")
    wrong = differences(table, folder)
    chosen = table.short if given.short else [file for file, words in table.tests.items() if _any(words, given.all)]
    outcomes = run(given.name, table, folder, chosen, "all" if given.all else "runs", given.k)
    for test, (outcome, why) in sorted(outcomes.items()):
        word = table.word(*test.split("::", 1))
        if outcome == "failed" and word in RUNS:
            wrong.append(f"{test}: {why}")
        elif outcome == "passed" and word not in RUNS:
            print(f"{test} passes, though the table has it as {word!r}")
    passed = sum(outcome == "passed" for outcome, _ in outcomes.values())
    print("\n".join([*wrong, f"{passed} of {len(outcomes)} passed"]))
    return int(bool(wrong) or not outcomes)


def _any(words: dict[str, str], everything: bool) -> bool:
    return everything or any(word in RUNS for word in words.values())


def run(
    name: str, table: Table, folder: Path, tests: list[str], which: str, expression: str | None
) -> dict[str, tuple[str, str]]:
    """What came of each test, and why, by pytest's id."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "outcomes.json"
        path = os.pathsep.join([str(FOLDER), str(FOLDER.parents[2] / "src"), *_given_path()])
        environment = {**os.environ, "PYTHONPATH": path, "OUTPACE_PEERS": f"{name}:{which}:{out}"}
        empty = Path(made) / "pytest.ini"
        empty.write_text("[pytest]\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "choose", "-p", f"as_{name}", "-p", "no:cacheprovider"]
        command += [
            "-c",
            str(empty),
            "--rootdir",
            ".",
            "--confcutdir",
            table.conftests,
            "-q",
            "--tb",
            "short",
            "--timeout",
            "300",
            *tests,
        ]
        command += ["-k", expression] if expression else []
        subprocess.run(command, cwd=folder, env=environment, check=False)
        found: Outcomes = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        return found


def _given_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def fetched(table: Table) -> Path | None:
    """The unpacked source package of PyPI, which stays in the user's cache; None: it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outpace-peers"
    into = cache / f"{table.package}-{table.version}"
    if into.is_dir():
        return into
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    asked = urllib.request.Request(
        f"{index}/{table.package}/", headers={"accept": "application/vnd.pypi.simple.v1+json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            files = json.load(answer)["files"]
        name = f"{table.package.replace('-', '_')}-{table.version}.tar.gz"
        found = next(each for each in files if each["filename"] == name)
        with urllib.request.urlopen(found["url"], timeout=300) as answer:
            data = answer.read()
    except (OSError, ValueError, StopIteration) as error:
        print(f"{index}: {error!r}")
        return None
    if hashlib.sha256(data).hexdigest() != found["hashes"]["sha256"]:
        raise SystemExit(f"{found['url']} is not what {index} says: try again")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        archive = Path(made) / name
        archive.write_bytes(data)
        with tarfile.open(archive) as packed:
            packed.extractall(made, filter="data")
        (Path(made) / name.removesuffix(".tar.gz")).rename(into)
    return into


sys.exit(main())
