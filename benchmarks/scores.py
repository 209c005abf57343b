"""Scores of evaluations from a plain and a drafted server of ours: lm-eval on a local file, and JSON schemas.

    python -m benchmarks scores --lm-eval ENV/bin/python --schemas FOLDER --json results/scores.json

lm-eval (package ``lm_eval[api]``, in an environment of its own) asks questions made here, of sums and of copying, whose
answers are known: nothing is downloaded. FOLDER has JSON schemas, one a file, as JSONSchemaBench has them; an answer
counts when it is JSON that its schema accepts. Exit code 1 when a drafted answer differs from the plain one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema

from benchmarks.figures import Measuring, add_json, at_least_one, emit
from benchmarks.servers import OURS, started
from outpace.errors import ParameterError
from outpace.measure.remote import Remote, RemoteError

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: {tokens}, temperature: 0}}
filter_list: [{{name: said, filter: [{{function: regex, regex_pattern: '{pattern}'}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jade"]
_SAME = {True: "the same", False: "DIFFER", None: "not compared"}
COPY = f"((?:{'|'.join(WORDS)})(?: (?:{'|'.join(WORDS)}))+)"  # the first run of words


def questions(count: int) -> dict[str, list[dict[str, str]]]:
    """Of each task, from a fixed seed: what is asked and the answer."""
    draw = random.Random(0)
    sums, copies = [], []
    for _ in range(count):
        a, b = draw.randint(1, 20), draw.randint(1, 20)
        sums.append({"question": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)})
        words = " ".join(draw.choices(WORDS, k=8))
        copies.append({"question": f"Repeat these words exactly, and nothing else: {words}", "answer": words})
    return {"sums": sums, "copies": copies}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lm-eval", type=Path, metavar="PYTHON", help="of an environment that has lm_eval[api]")
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="JSON schemas, one a file")
    parser.add_argument(
        "--limit", type=at_least_one, default=40, help="questions of a task, and schemas, spread over the files"
    )
    parser.add_argument("--tokens", type=int, default=256, help="of an answer by a schema, at most")
    parser.add_argument("--options", default="", help="more arguments of both servers, such as '-m demo-gemma'")
    parser.add_argument("--drafter", default="auto", help="of the drafted server")
    parser.add_argument("--log", type=Path, default=Path("scores.log"), help="what the servers and lm-eval say")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    if given.lm_eval is None and given.schemas is None:
        raise ParameterError("there is nothing to score: give --lm-eval, --schemas or both")
    commands = {name: f"{OURS} {given.options} --drafter {name}" for name in ("none", given.drafter)}
    answers: dict[str, dict[str, Any]] = {name: {} for name in commands}
    with Measuring() as measuring, ExitStack() as stack:
        for name, command in commands.items():
            remote = stack.enter_context(started(command, given.log)).remote
            if given.lm_eval is not None:
                answers[name] |= _lm_eval(remote, given)
            if given.schemas is not None:
                answers[name] |= _schemas(remote, given)
    plain, drafted = (answers[name] for name in commands)
    tasks = {
        task: {
            "scores": found["scores"],
            "drafted": drafted[task]["scores"] if task in drafted else None,
            "answers": len(found["texts"]),
            "same": found == drafted[task] if task in drafted else None,  # None: Ctrl-C came before
        }
        for task, found in plain.items()
    }
    for task, found in tasks.items():
        print(f"{task}: plain {found['scores']}, drafted {found['drafted']}, "
              f"{found['answers']} answers {_SAME[found['same']]}")  # fmt: skip
    emit(given, {"tasks": tasks, "commands": commands})
    return measuring.end(1 if any(found["same"] is False for found in tasks.values()) else 0)


def _lm_eval(remote: Remote, given: argparse.Namespace) -> dict[str, Any]:
    """Scores and texts by task."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        tasks = questions(given.limit)
        for task, rows in tasks.items():
            data, pattern = folder / f"{task}.jsonl", r"([0-9]+)[^0-9]*$" if task == "sums" else COPY
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            text = TASK.format(name=task, data=data, tokens=48, pattern=pattern)
            (folder / f"{task}.yaml").write_text(text, encoding="utf-8")
        model = f"base_url={remote.base}/chat/completions,model={remote.model(None)},num_concurrent=4"
        command = [
            str(given.lm_eval), "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", model,
            "--tasks", ",".join(tasks), "--include_path", name, "--apply_chat_template", "--log_samples",
            "--output_path", str(folder / "out"),
        ]  # fmt: skip
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": name, "OPENAI_API_KEY": "none"}
        with given.log.open("ab") as out:
            subprocess.run(command, env=os.environ | offline, stdout=out, stderr=out, check=True)
        (written,) = (folder / "out").rglob("results_*.json")
        results = json.loads(written.read_text(encoding="utf-8"))["results"]
        return {task: {"scores": _numbers(results[task]), "texts": _texts(folder / "out", task)} for task in tasks}


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name.partition(",")[0]: value for name, value in found.items() if name.startswith("exact_match,")}


def _texts(folder: Path, task: str) -> list[str]:
    """What was answered, in the order of the questions."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = sorted(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda row: int(row["doc_id"]))
    return [row["resps"][0][0] for row in rows]


def _schemas(remote: Remote, given: argparse.Namespace) -> dict[str, Any]:
    paths = sorted(given.schemas.rglob("*.json"))
    chosen = [paths[i * len(paths) // given.limit] for i in range(given.limit)] if given.limit < len(paths) else paths
    texts, counts = [], {"valid": 0, "cut short": 0, "refused": 0}
    for path in chosen:
        schema = json.loads(path.read_text(encoding="utf-8"))
        asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        question = f"Give an example of JSON that this schema describes: {json.dumps(schema)[:1000]}"
        body = {
            "model": remote.model(None), "messages": [{"role": "user", "content": question}],
            "response_format": asked, "temperature": 0, "max_tokens": given.tokens,
        }  # fmt: skip
        try:
            answer = remote.chat(body)
        except RemoteError as error:  # a keyword that cannot be kept is refused, and says so
            counts["refused"] += 1
            texts.append(str(error).partition("refuses")[2])
            continue
        texts.append(answer.text)
        if answer.finish == "length":
            counts["cut short"] += 1
        else:
            counts["valid"] += valid(answer.text, schema)
    asked_of = len(chosen) - counts["refused"] - counts["cut short"]
    scores = {name: float(n) for name, n in counts.items()} | {"whole": float(asked_of)}
    return {"JSON schemas": {"scores": scores, "texts": texts}}


def valid(text: str, schema: Any) -> bool:
    exact = json.loads(json.dumps(schema), parse_float=Decimal)  # 0.03 is a multiple of 0.01, but not as floats
    try:
        jsonschema.validators.validator_for(exact)(exact).validate(json.loads(text, parse_float=Decimal))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
