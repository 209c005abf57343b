"""A trained drafter made ready to ship: its files, its figures, and the model card that tells both.

    python -m benchmarks.ship RUN drafters/demo-eagle --evaluation OUT.json --data DATA [--bench BENCH.json] [--default]
        [--package]

RUN: what ``outpace train`` wrote. OUT.json: what ``benchmarks.acceptance`` measured of this very drafter. BENCH.json:
``outpace bench --json`` with plain decoding first, for speeds. ``--default``: ``auto`` uses it beside its target; give
it where that was measured to be faster than ``auto`` without. Nothing is written where an answer was not plain
decoding's, or the folder would take more than 16 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.common.files import write_bytes, write_json
from outpace.drafters.learned.checkpoint import WEIGHTS, checksum, read, write
from outpace.drafters.learned.shipped import folder
from outpace.errors import OutpaceError, ParameterError
from outpace.models.weights.facts import read_config
from outpace.training.data import Answers

LIMIT = 16 * 1000 * 1000  # bytes of the folder
_CURVE = ("curve.json", "curve.png")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="what it was trained on, to tell of it")
    parser.add_argument("--bench", type=Path, action="append", default=[], help="repeatable")
    parser.add_argument("--default", action="store_true", help="auto uses it beside its target")
    parser.add_argument("--package", action="store_true", help="it is the one that comes with Outpace, too")
    given = parser.parse_args(arguments)
    try:
        ship(given.run, given.out, given.evaluation, given.data, given.bench, default=given.default)
        if given.package:
            package(given.out, folder())
    except (OutpaceError, OSError) as error:
        print(f"ship: {error}", file=sys.stderr)
        return 2
    return 0


def ship(
    run: Path, out: Path, evaluation: Path, data: Path | None = None, benches: Sequence[Path] = (), *, default: bool
) -> None:
    """Raises OutpaceError or OSError; then ``out`` is as it was, or incomplete and refused when it is read."""
    checkpoint, measured = read(run), _json(evaluation)
    if measured.get("drafter") != checksum(run / WEIGHTS):
        raise ParameterError(f"{evaluation} was measured with other weights than {run / WEIGHTS}: measure these")
    wrong = [its for its in measured["figures"] if its["identical"] < its["prompts"]]
    if wrong:
        raise ParameterError(f"{evaluation}: {wrong[0]['configuration']} did not give plain decoding's answers")
    told = None if data is None else _data(data, checkpoint.recipe)
    config = read_config(run)
    config["outpace"] = {**config["outpace"], "default": default}
    summary = {name: value for name, value in measured.items() if name != "runs"}
    files = {WEIGHTS: (run / WEIGHTS).read_bytes(), **{name: (run / name).read_bytes() for name in _CURVE}}
    if (size := sum(map(len, files.values()))) > LIMIT:
        raise ParameterError(f"{run} takes {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}: store it as bfloat16")
    curve = json.loads(files["curve.json"])
    card = "\n".join(lines(config["outpace"], curve, measured, told, [_json(path) for path in benches]))
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


def lines(
    own: Mapping[str, Any],
    curve: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    benches: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    """The card, line by line. ``own``: the object ``outpace`` of config.json."""
    target, recipe = own["target"], own["recipe"]
    yield from (
        f"# A drafter for {target['name']}, method {own['method']}",
        "",
        "It drafts; the target decides every token. `python -m benchmarks.ship` wrote this from recipe and figures.",
        "",
        f"- Target: {target['name']}, {target['dtype']}, fingerprint `{target['fingerprint']}`.",
        f"- `--drafter auto` {'uses it' if own['default'] else 'does not use it: name it'}.",
        f"- Weights: bfloat16, checksum `{own['weights']}`; the embedding and the rows of the head are the target's.",
        "- It was trained on the target's own answers. Its licence is this repository's.",
        "",
        "## Recipe",
        "",
    )  # fmt: skip
    last = curve[-1]
    yield (
        f"{last['step']} steps over {last['tokens']:,} tokens in {last['seconds'] / 3600:.1f} hours; "
        f"data `{recipe['data']}`"
        + (f": {data['answers']:,} answers, {data['tokens']:,} tokens with their prompts." if data else ".")
    )
    said = ", ".join(f"{share:.2f}" for share in last["acceptance"])
    yield f"Simulated on held-out answers at its end: {last['tokens_per_step']:.2f} tokens a step, by position {said}."
    if "tokens_seen" in recipe:
        yield f"Kept is the best of it, after {recipe['steps_taken']} steps and {recipe['tokens_seen']:,} tokens."
    yield from (
        "",
        "![The training's curve](curve.png)",
        "",
        "```json",
        json.dumps({k: v for k, v in recipe.items() if k != "loop"}, indent=1),
        "```",
        "",
    )
    yield from ("## Acceptance", "")
    yield (
        f"Tokens a step (95 % interval over prompts), native backend, at most {measured['max_tokens']} an answer. "
        f"All {sum(its['prompts'] for its in measured['figures'])} answers were plain decoding's, token by token."
    )
    yield "Command: `python -m benchmarks.acceptance`; sizes are fixed, so that no figure depends on a machine's speed."
    categories = list(dict.fromkeys(name for its in measured["figures"] for name in its["by_category"]))
    yield from ("", f"| | T | prompts | all | {' | '.join(categories)} |", "| --- " * (4 + len(categories)) + "|")
    for its in measured["figures"]:
        cells = [its["by_category"].get(name) for name in categories]
        by = " | ".join("" if one is None else f"{one['tokens_per_step']:.2f}" for one in cells)
        yield (
            f"| {its['configuration']} | {its['temperature']:g} | {its['prompts']} | {its['tokens_per_step']:.2f} "
            f"({its['low']:.2f}-{its['high']:.2f}) | {by} |"
        )
    yield from ("", "Acceptance of a draft's levels, where it had them:", "", "| | T | 1 | 2 | 3 | 4 | 5 | 6 |",
                "| --- " * 8 + "|")  # fmt: skip
    for its in measured["figures"]:
        shares = [f"{share:.2f}" for share in its["acceptance_by_position"][:6]]
        yield f"| {its['configuration']} | {its['temperature']:g} | {' | '.join((shares + [''] * 6)[:6])} |"
    for bench in benches:
        machine = bench["machine"]
        yield from ("", "## Speed", "")
        yield (
            f"Over plain decoding, paired prompt by prompt: median (95 %). {bench['model']} on {machine['model']}, "
            f"{bench['threads']} threads, T = {bench['temperature']:g}, {bench['max_tokens']} tokens. "
            "Command: `outpace bench`."
        )
        yield from (
            "",
            "| drafter | size | prompts | identical | tokens a step | tokens/s | speed |",
            "| --- " * 7 + "|",
        )
        for its in bench["configs"]:
            ratio = its["speedup"]
            speed = "" if ratio["median"] is None else f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
            yield (
                f"| {its['name']} | {its['size']} | {its['prompts']} | {its['identical']} | "
                f"{its['tokens_per_step']:.2f} | {its['decode_tokens_per_second']:.0f} | {speed} |"
            )
    yield ""


def _data(folder: Path, recipe: Mapping[str, Any]) -> dict[str, int]:
    answers = Answers.open(folder)
    if answers.hash != recipe.get("data"):
        raise ParameterError(f"{folder} has data {answers.hash}, and it was trained on {recipe.get('data')}")
    return {"answers": len(answers), "tokens": int(answers.lengths().sum())}


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


if __name__ == "__main__":
    sys.exit(main())
