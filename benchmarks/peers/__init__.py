"""Outpace beside llama.cpp, ik_llama.cpp and OpenVINO GenAI: the same GGUF file, prompts and limits, in turn.

    python -m benchmarks peers --prompts spec_bench_dev.jsonl --limit 48 --json results/peers.json

Each configuration is a process of its own with 2 threads, in its engine's own environment (made on first use, without
torch). Processes that wait are stopped (SIGSTOP), so that no thread pool spins beside the one that works. Prompts are
the same token ids everywhere; greedy; a delta's time is when its callback runs. The JSON is written after every prompt.
A prompt that an engine answers with a loop at the end counts in the second speed of no engine ("no loops").
Let the machine rest meanwhile: llama.cpp's threads spin, and lose far more than others when a core is taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import venv
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Measuring, add_json, emit
from benchmarks.peers.eagle import gguf_file, openvino_folder
from benchmarks.peers.requantise import q4_0
from outpace import Engine
from outpace.cli.terminal import table
from outpace.common.arrays import repeated_tail
from outpace.common.files import cache_dir
from outpace.common.progress import progress
from outpace.engine.intake import encoder
from outpace.errors import OutpaceError, ParameterError
from outpace.measure import machine
from outpace.measure.prompts import encode_turns, read_prompts
from outpace.models import demo

HERE = Path(__file__).parent
PACKAGES = {
    "llamacpp": ("xllamacpp==2026.10.11549", "numpy==2.4.6"),
    "openvino": (
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "openvino-telemetry==2025.2.0",
        "numpy==2.4.6",
    ),
}
LLAMACPP = ("plain", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
EAGLE3 = "draft-eagle3"  # a llama.cpp's that was built here
IK = ("plain", "suffix", "ngram-mod")
IK_DRAFTS = 3  # tokens that a small model drafts for it
OPENVINO = ("plain", "paged", "lookup-3", "lookup-5", "lookup-8")
OPENVINO_EAGLE = ("eagle-4", "eagle-5", "paged-f32", "eagle-4-f32", "eagle-5-f32")  # paged-f32: the latters' plain
OUTPACE = ("none", "ngram:size=3", "ngram:size=5", "ngram:size=7", "ngram", "suffix", "ngram+suffix")
PREFILL = 1000  # tokens
Row = dict[str, Any]  # an answer: config, prompt, tokens, first_tokens, first, rest, ids or text


@dataclass(frozen=True)
class Configuration:
    """``engine``: llamacpp-q4_1, llamacpp-q4_0 (-built: of a binary), ik-q4_1, ik-q4_0, openvino or outpace.

    ``plain``: whose outputs it should have.
    """

    engine: str
    mode: str
    plain: str
    binary: Path | None = None  # of llama.cpp, in place of its package
    drafter: Path | None = None  # what ``mode`` drafts with: an EAGLE-3 drafter's folder, or a GGUF file

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"


class Worker:
    """A configuration's process, stopped unless it is asked something. It is asked ``first`` untimed: first touches."""

    def __init__(self, configuration: Configuration, model: Path, log: Path, first: dict[str, Any]) -> None:
        self.configuration = configuration
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            _command(configuration, model), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._answer()
            self.ask(first)
        except BaseException:
            self.close()
            raise

    def ask(self, value: dict[str, Any]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ParameterError(f"{self.configuration.name} ended with {self._process.wait()}: see {self._log.name}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):  # a server of its own may outlive it
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()


def environment(engine: str) -> Path:
    """The Python of an engine's environment, made on first use. Raises ParameterError."""
    folder = cache_dir() / "peers" / engine
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join(PACKAGES[engine])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"making {folder}: {', '.join(PACKAGES[engine])}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES[engine]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ParameterError(f"{engine} could not be installed: {done.stderr.strip()[-400:]}")
        ready.write_text(wanted)
    return python


def _command(configuration: Configuration, path: Path) -> list[str]:
    engine, mode, drafter = configuration.engine, configuration.mode, configuration.drafter
    if engine == "outpace":
        return [sys.executable, "-m", "benchmarks.peers.worker_outpace", str(path), mode]
    if engine == "openvino":
        python = environment("openvino")
        path = openvino_folder(drafter, path, python) if drafter else path
        return [str(python), str(HERE / "worker_openvino.py"), str(path), mode]
    if drafter:
        drafter = gguf_file(drafter, path) if drafter.is_dir() else q4_0(drafter)
    path = q4_0(path) if "q4_0" in engine else path
    command = [str(HERE / "llamacpp.py"), str(path), mode, *(["--drafter", str(drafter)] if drafter else [])]
    if configuration.binary:
        ik = ["--ik"] if engine.startswith("ik") else []
        return [sys.executable, *command, "--binary", str(configuration.binary), *ik]
    return [str(environment("llamacpp")), *command]


def configurations(given: argparse.Namespace) -> list[Configuration]:
    found = []
    if "llamacpp" in given.engines:
        found.append(Configuration("llamacpp-q4_1", "plain", "llamacpp-q4_1 plain"))
        found += [Configuration("llamacpp-q4_0", mode, "llamacpp-q4_0 plain") for mode in given.llamacpp]
    if given.llama_server:
        built = "llamacpp-q4_0-built"
        found.append(Configuration("llamacpp-q4_1-built", "plain", "llamacpp-q4_1-built plain", given.llama_server))
        found += [Configuration(built, mode, f"{built} plain", given.llama_server) for mode in given.llamacpp]
        if given.eagle3:
            found.append(Configuration(built, EAGLE3, f"{built} plain", given.llama_server, given.eagle3))
        if given.draft_model:
            found.append(Configuration(built, "draft-simple", f"{built} plain", given.llama_server, given.draft_model))
    if given.ik_server:
        found.append(Configuration("ik-q4_1", "plain", "ik-q4_1 plain", given.ik_server))
        found += [Configuration("ik-q4_0", mode, "ik-q4_0 plain", given.ik_server) for mode in given.ik]
        if given.draft_model:
            draft = f"draft:n_max={IK_DRAFTS}"
            found.append(Configuration("ik-q4_0", draft, "ik-q4_0 plain", given.ik_server, given.draft_model))
    if "openvino" in given.engines:
        for mode in given.openvino or (*OPENVINO, *(OPENVINO_EAGLE if given.eagle3 else ())):
            drafts = mode.startswith("eagle")
            if drafts and not given.eagle3:
                raise ParameterError(f"--openvino {mode} drafts with a model: name its folder with --eagle3")
            plain = "plain" if mode == "plain" else "paged-f32" if mode.endswith("f32") else "paged"
            drafter = given.eagle3 if drafts else None
            found.append(Configuration("openvino", mode, f"openvino {plain}", drafter=drafter))
    if "outpace" in given.engines:
        found += [Configuration("outpace", spec, "outpace none") for spec in given.drafter or OUTPACE]
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as for outpace bench")
    parser.add_argument("--model", type=Path, help="a GGUF file that all engines read (the demo model)")
    parser.add_argument("--limit", type=int, default=48, help="so many prompts, spread evenly")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--engines", nargs="+", default=["llamacpp", "openvino", "outpace"])
    parser.add_argument("--llamacpp", nargs="+", default=LLAMACPP, choices=LLAMACPP, help="its modes on Q4_0")
    parser.add_argument("--llama-server", type=Path, help="a llama.cpp built here, measured beside its package")
    parser.add_argument("--ik-server", type=Path, help="ik_llama.cpp's llama-server, built here")
    parser.add_argument("--ik", nargs="+", default=IK, help="its modes on Q4_0, as its --spec-type takes them")
    parser.add_argument("--draft-model", type=Path, help="a small GGUF that the servers built here draft with, too")
    parser.add_argument(
        "--eagle3",
        type=Path,
        metavar="DRAFTER",
        help="a drafter's folder: OpenVINO and --llama-server draft with it, too",
    )
    parser.add_argument("--openvino", nargs="+", choices=(*OPENVINO, *OPENVINO_EAGLE), help="its modes")
    parser.add_argument("-d", "--drafter", action="append", help="of Outpace; repeatable; none should be among them")
    parser.add_argument("--prefill-rounds", type=int, default=5)
    add_json(parser, Path("results/peers.json"))


def run(given: argparse.Namespace) -> int:
    model = given.model or demo.smollm2()
    with Engine.load(str(model), threads=1) as engine:
        eos, encode = engine.model.info.eos_ids[0], encoder(engine.tokenizer)
        assert encode is not None
        prompts = [(row, encode_turns(engine, row).tolist()) for row in read_prompts(given.prompts, given.limit)]
    first = {"tokens": prompts[0][1][:64], "max_tokens": 8, "eos": eos}
    workers: list[Worker] = []
    value: dict[str, Any] = {
        "model": model.name, "machine": machine.cpu(), "max_tokens": given.max_tokens, "threads": 2,
        "answers": [], "prefill": [], "failed": {},
    }  # fmt: skip
    try:
        for configuration in configurations(given):
            try:
                workers.append(Worker(configuration, model, Path("peers.log"), first))
            except (OutpaceError, OSError) as error:
                value["failed"][configuration.name] = str(error)
        if not workers:
            raise ParameterError("; ".join(f"{name}: {why}" for name, why in value["failed"].items()) or "no engine")
        with Measuring() as measuring, progress("prompts", len(prompts) + given.prefill_rounds) as advance:
            for row, tokens in prompts:
                for worker in workers:
                    found = worker.ask({"tokens": tokens, "max_tokens": given.max_tokens, "eos": eos})
                    ids = found.get("ids")
                    if "text" in found:  # ik_llama.cpp counts some tokens twice
                        ids = encode(found["text"])
                        found["tokens"] = len(ids)
                    found["loop"] = 0 if ids is None else repeated_tail(ids)
                    value["answers"].append(
                        {"config": worker.configuration.name, "prompt": row.id, "category": row.category, **found}
                    )
                emit(given, value, partial=True)
                advance(1)
            _prefill(workers, prompts, eos, given.prefill_rounds, value, lambda: advance(1))
    finally:
        for worker in workers:
            worker.close()
    plain_of = {worker.configuration.name: worker.configuration.plain for worker in workers}
    complete = len(value["answers"]) // max(len(workers), 1) * len(workers)
    del value["answers"][complete:]  # of a prompt that Ctrl-C came in
    value["table"] = summary(value["answers"], plain_of) if complete else []
    emit(given, value)
    if complete:
        _show(value)
    return measuring.end(0)


def _prefill(
    workers: list[Worker], prompts: list[Any], eos: int, rounds: int, value: dict[str, Any], done: Any
) -> None:
    """Time to the first token of PREFILL tokens that no cache can know: each round begins with a token of its own."""
    text = [token for _, tokens in prompts for token in tokens if token > 16]
    for number in range(rounds):
        for worker in workers:
            if worker.configuration.mode in ("plain", "paged", "none"):
                tokens = [1000 + number, *text[: PREFILL - 1]]
                found = worker.ask({"tokens": tokens, "max_tokens": 2, "eos": eos})
                value["prefill"].append(
                    {"config": worker.configuration.name, "prompt_tokens": len(tokens), "first": found["first"]}
                )
        done()


def _show(value: dict[str, Any]) -> None:
    print(
        f"{value['model']}, {value['machine']['model']}, {value['threads']} threads, "
        f"at most {value['max_tokens']} tokens, greedy"
    )
    rows = []
    for row in value["table"]:
        ratios = (row[key] for key in ("tokens_per_step", "of_best_peer", "median_of_best_peer"))
        changed = "-" if row["changed"] is None else f"{row['changed']} of {row['prompts']}"
        speed, rest = f"{row['decode_tokens_per_second']:.1f}", row["without_loops"]
        calm = f"{rest['decode_tokens_per_second']:.1f}" if rest["prompts"] else "-"
        rows.append((row["config"], speed, *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios), calm, changed))
    head = (
        "engine and mode",
        "decode tok/s",
        "tokens/step",
        "of the best peer",
        "median",
        "no loops",
        "changed outputs",
    )
    print(table(head, rows))
    first = value["table"][0]
    print(
        f"no loops: decode tok/s of the {first['without_loops']['prompts']} of {first['prompts']} prompts that no "
        "engine answers with a loop at the end, which drafts far better than other text"
    )
    for name, rate in prefill_speeds(value["prefill"]).items():
        print(f"prefill of {PREFILL} tokens, {name}: {rate:.0f} tokens/s")
    for name, why in value["failed"].items():
        print(f"{name}: FAILED: {why}")


def speed(rows: list[Row]) -> float:
    """Pooled decode tokens/s: (tokens after the first delta) / (time after the first delta)."""
    seconds = sum(row["rest"] for row in rows)
    return sum(row["tokens"] - row.get("first_tokens", 1) for row in rows) / seconds if seconds else 0.0


def changed(rows: list[Row], plain: list[Row]) -> int:
    """How many outputs differ from those of the same engine without drafts."""
    before = {row["prompt"]: row.get("ids", row.get("text")) for row in plain}
    return sum(row.get("ids", row.get("text")) != before[row["prompt"]] for row in rows)


def ratios(rows: list[Row], other: list[Row]) -> list[float]:
    """Prompt by prompt, the speed of ``rows`` over that of ``other``."""
    by = {row["prompt"]: speed([row]) for row in other}
    return [speed([row]) / by[row["prompt"]] for row in rows if by.get(row["prompt"]) and row["rest"]]


def summary(answers: list[Row], plain_of: dict[str, str]) -> list[Row]:
    """One entry a configuration: pooled speed, ratio to the best configuration of the best peer, changed outputs."""
    by: dict[str, list[Row]] = {}
    for row in answers:
        by.setdefault(row["config"], []).append(row)
    peers = {name: speed(rows) for name, rows in by.items() if not name.startswith("outpace")}
    best = max(peers, key=peers.__getitem__) if peers else None
    looping = {row["prompt"] for row in answers if row.get("loop")}  # in one engine: left out for all
    calm = {name: [row for row in rows if row["prompt"] not in looping] for name, rows in by.items()}
    out = []
    for name, rows in by.items():
        steps = sum(row.get("steps") or 0 for row in rows)
        out.append(
            {
                "config": name,
                "prompts": len(rows),
                "tokens": sum(row["tokens"] for row in rows),
                "decode_tokens_per_second": speed(rows),
                "tokens_per_step": sum(row["tokens"] for row in rows) / steps if steps else None,
                "of_best_peer": speed(rows) / peers[best] if best and peers[best] else None,
                "median_of_best_peer": median(found) if best and (found := ratios(rows, by[best])) else None,
                "without_loops": {
                    "prompts": len(calm[name]),
                    "decode_tokens_per_second": speed(calm[name]),
                    "of_best_peer": speed(calm[name]) / other if best and (other := speed(calm[best])) else None,
                },
                "changed": changed(rows, by[plain_of[name]]) if plain_of.get(name) in by else None,
            }
        )
    return out


def prefill_speeds(answers: list[Row]) -> dict[str, float]:
    """Median tokens/s of reading a prompt, by configuration; the first delta comes with the prompt's end."""
    by: dict[str, list[float]] = {}
    for row in answers:
        by.setdefault(row["config"], []).append(row["prompt_tokens"] / row["first"])
    return {name: median(found) for name, found in by.items()}
