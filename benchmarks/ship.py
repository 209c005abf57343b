"""A trained drafter made ready to ship: its files, its figures, and the model card that tells both.

    python -m benchmarks ship RUN drafters/demo-eagle --evaluation OUT.json --data DATA [--bench BENCH.json] [--default]
        [--package]

RUN: what ``outpace train`` wrote. OUT.json: what ``benchmarks.acceptance`` measured of this very drafter. BENCH.json:
``outpace bench --json`` with plain decoding first, for speeds. ``--default``: ``auto`` uses it beside its target; give
it where that was measured to be faster than ``auto`` without. Nothing is written where an answer was not plain
decoding's, or the folder would take more than 16 MB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.common.files import write_bytes, write_json
from outpace.drafters.learned.checkpoint import WEIGHTS, checksum, read, write
from outpace.drafters.learned.shipped import folder
from outpace.errors import ParameterError
from outpace.models.weights.facts import read_config
from outpace.training.data import Answers

LIMIT = 16 * 1000 * 1000  # bytes of the folder
LICENCE = "Its licence is this repository's."
_CURVE = ("curve.json", "curve.png")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="what it was trained on, for its size")
    parser.add_argument("--bench", type=Path, action="append", default=[], help="repeatable")
    parser.add_argument("--licence", default=LICENCE, help="a sentence for its card; targets may ask for their own")
    parser.add_argument("--default", action="store_true", help="auto uses it beside its target")
    parser.add_argument("--package", action="store_true", help="it is the one that comes with Outpace, too")


def run(given: argparse.Namespace) -> int:
    ship(given.run, given.out, given.evaluation, given.data, given.bench, default=given.default, licence=given.licence)
    if given.package:
        package(given.out, folder())
    return 0


def ship(
    run: Path, out: Path, evaluation: Path, data: Path | None = None, benches: Sequence[Path] = (), *, default: bool,
    licence: str = LICENCE,
) -> None:  # fmt: skip
    """Raises OutpaceError or OSError; then ``out`` is as it was, or incomplete and refused when it is read."""
    checkpoint, measured = read(run), _json(evaluation)
    if measured.get("drafter") != checksum(run / WEIGHTS):
        raise ParameterError(f"{evaluation} was measured with other weights than {run / WEIGHTS}: measure these")
    wrong = [figures for figures in measured["figures"] if figures["identical"] < figures["prompts"]]
    if wrong:
        raise ParameterError(f"{evaluation}: {wrong[0]['configuration']} did not give plain decoding's answers")
    answers = "" if data is None else _data(data, checkpoint.recipe)
    config = read_config(run)
    config["outpace"] = {**config["outpace"], "default": default}
    summary = {name: value for name, value in measured.items() if name != "runs"}
    files = {WEIGHTS: (run / WEIGHTS).read_bytes(), **{name: (run / name).read_bytes() for name in _CURVE}}
    if (size := sum(map(len, files.values()))) > LIMIT:
        raise ParameterError(f"{run} takes {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}: store it as bfloat16")
    curve = json.loads(files["curve.json"])
    card = _card(config["outpace"], curve[-1], measured, answers, [_json(path) for path in benches], licence)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_bytes(out / name, content)
    write_json(out / "evaluation.json", summary)
    write_bytes(out / "README.md", card.encode("utf-8"))
    write_json(out / "config.json", config)  # last: it has the checksum of the weights


def package(out: Path, folder: Path) -> None:
    """What comes with the package: the drafter in ``out`` with 4-bit weights. Raises OutpaceError or OSError."""
    made = read(out)
    write(folder, made.method, made.config, made.tensors, made.target, made.recipe, dtype="q4_1")
    config = read_config(folder)
    config["outpace"]["default"] = read_config(out)["outpace"]["default"]
    write_json(folder / "config.json", config)


def _card(
    own: Mapping[str, Any], last: Mapping[str, Any], measured: Mapping[str, Any], answers: str,
    benches: Sequence[Mapping[str, Any]], licence: str,
) -> str:  # fmt: skip
    """The model card. ``own``: the object ``outpace`` of config.json; ``last``: the curve's last row."""
    target, recipe, figures = own["target"], own["recipe"], measured["figures"]
    kept = "tokens_seen" in recipe
    categories = list(dict.fromkeys(name for row in figures for name in row["by_category"]))
    parts = [
        f"# A drafter for {target['name']}, method {own['method']}",
        "It drafts; the target decides every token. `python -m benchmarks ship` wrote this from recipe and figures.",
        f"- Target: {target['name']}, {target['dtype']}, fingerprint `{target['fingerprint']}`.\n"
        f"- `--drafter auto` {'uses it' if own['default'] else 'does not use it: name it'}.\n"
        f"- Weights: bfloat16, checksum `{own['weights']}`; the embedding and the rows of the head are the target's.\n"
        f"- It was trained on the target's own answers. {licence}",
        "## Recipe",
        f"{last['step']} steps over {last['tokens']:,} tokens in {last['seconds'] / 3600:.1f} hours; "
        f"data `{recipe['data']}`{answers}.\nSimulated on held-out answers at its end: "
        f"{last['tokens_per_step']:.2f} tokens a step, by position {_shares(last['acceptance'], ', ')}."
        + (f"\nKept is the best of it, after {recipe['steps_taken']} steps and {recipe['tokens_seen']:,} tokens."
           if kept else ""),
        "![The training's curve](curve.png)",
        "```json\n" + json.dumps({k: v for k, v in recipe.items() if k != "loop"}, indent=1) + "\n```",
        "## Acceptance",
        f"Tokens a step (95 % interval over prompts), native backend, at most {measured['max_tokens']} an answer. "
        f"All {sum(row['prompts'] for row in figures)} answers were plain decoding's, token by token.\n"
        "Command: `python -m benchmarks acceptance`; sizes are fixed, so that no figure depends on a machine's speed.",
        _table(("", "T", "prompts", "all", *categories), (
            (row["configuration"], f"{row['temperature']:g}", row["prompts"],
             f"{row['tokens_per_step']:.2f} ({row['low']:.2f}-{row['high']:.2f})",
             *(f"{row['by_category'][name]['tokens_per_step']:.2f}" if name in row["by_category"] else ""
               for name in categories))
            for row in figures
        )),
        "Acceptance by depth of a draft, where it had that depth:",
        _table(("", "T", "1 to 6"), (
            (row["configuration"], f"{row['temperature']:g}", _shares(row["acceptance_by_position"][:6], " "))
            for row in figures
        )),
    ]  # fmt: skip
    for bench in benches:
        parts += [
            "## Speed",
            f"Decode tokens/s over plain decoding's (95 % over prompts). {bench['model']} on "
            f"{bench['machine']['model']}, {bench['threads']} threads, T = {bench['temperature']:g}, "
            f"{bench['max_tokens']} tokens. Command: `outpace bench`.",
            _table(("drafter", "size", "prompts", "identical", "tokens a step", "tokens/s", "speed"), (
                (row["name"], row["size"], row["prompts"], row["identical"], f"{row['tokens_per_step']:.2f}",
                 f"{row['decode_tokens_per_second']:.0f}", _ratio(row["speedup"]))
                for row in bench["configs"]
            )),
        ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _shares(values: Sequence[float], between: str) -> str:
    return between.join(f"{value:.2f}" for value in values)


def _ratio(speedup: Mapping[str, float | None]) -> str:
    if speedup["ratio"] is None:
        return ""
    return f"{speedup['ratio']:.2f} ({speedup['low']:.2f}-{speedup['high']:.2f})"


def _data(folder: Path, recipe: Mapping[str, Any]) -> str:
    answers = Answers.open(folder)
    if answers.hash != recipe.get("data"):
        raise ParameterError(f"{folder} has data {answers.hash}, and it was trained on {recipe.get('data')}")
    return f": {len(answers):,} answers, {int(answers.lengths().sum()):,} tokens with their prompts"


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ParameterError(f"{path} is no JSON ({error}): measure again") from error
    if not isinstance(value, dict):
        raise ParameterError(
            f"{path} is no measurement: give the file that benchmarks.acceptance or outpace bench wrote"
        )
    return value
