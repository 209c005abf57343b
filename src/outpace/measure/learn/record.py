"""The runs that ``outpace learn`` shows: the reader's model, prompts that show something, and every kind of drafter."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.control import cost as costs
from outpace.measure.trace import facts, lines, tracing
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine

CODE = "Write a Python function that adds two numbers, then one that multiplies two numbers."
PROSE = "Describe the water cycle in a short paragraph."
SIZE = 4  # tokens drafted a step
TREE = 8  # nodes of a tree
TEMPERATURES = (0.4, 0.8, 1.2)
REPEATS = 3  # times that all is run
_KEYS = ("a", "t", "p", "v", "h", "k", "g", "P", "Q", "i")  # of a row, in a page


def record(engines: Mapping[str, Engine], progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run them. ``engines``: by drafter, "none" among them, over one model; the last one samples, and trees are of the
    last one that grows any. Nothing of a prompt is kept between runs that are compared."""
    plain, last = engines["none"], list(engines)[-1]
    greedy, sampled = {"temperature": 0.0, "max_tokens": 64}, {"temperature": 0.8, "max_tokens": 24, "seed": 3}
    texts: dict[int, str] = {}
    info = plain.model.info
    found: dict[str, Any] = {
        "about": facts(plain),
        "weights": info.weight_bytes,
        "cost": costs.of(plain.model).to_dict(),
        "last": last,
        "who": {},
        "rejection": {},
    }

    def run(engine: Engine, prompt: str, asked: Mapping[str, Any], probabilities: bool = False, **how: Any) -> Any:
        params = SamplingParams(**asked)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.trace"
            with tracing(engine, path, probabilities=probabilities):
                result = engine.generate(engine.encode(prompt).tolist(), params, **how)
            _, others, _ = lines(path)
        steps = [line for line in others if "step" in line and line["r"]]
        texts.update({token: text for line in others for token, text in line.get("texts", ())})
        return {
            "prompt": prompt,
            "pieces": next(line["result"]["pieces"] for line in others if "result" in line),
            "tokens": list(result.token_ids),
            "read": result.prompt_tokens,
            "prefill": result.stats.prefill_seconds,
            "steps": [_of(line) for line in steps],
        }

    for name, engine in engines.items():
        progress(f"{name}: greedy")
        found["who"][name] = run(engine, CODE, greedy, size=0 if name == "none" else SIZE)
    progress(f"{last}: with probabilities, sampling; trees")
    found["greedy"] = run(engines[last], CODE, {**greedy, "max_tokens": 40}, True, size=SIZE)
    for name in reversed(list(engines)[1:]):
        found |= {"trees": name, "tree": run(engines[name], CODE, {**greedy, "max_tokens": 40}, size=TREE)}
        if any("p" in step for step in found["tree"]["steps"]):
            break
    for temperature in TEMPERATURES:
        asked = {**sampled, "temperature": temperature}
        found["rejection"][str(temperature)] = run(engines[last], PROSE, asked, True, size=SIZE, acceptance="rejection")
    found["coupled"] = run(engines[last], PROSE, sampled, True, size=SIZE)
    found["sampled"] = run(plain, PROSE, sampled)
    used = {token for each in _runs(found) for token in _tokens(each)}
    found["texts"] = {str(token): text for token, text in sorted(texts.items()) if token in used}
    return found


def fastest(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first of ``records``, which are of the same engines, each step with the least time that a phase of it took in
    any of them: what disturbs a machine only adds."""
    found = deepcopy(records[0])
    for run, *others in zip(*map(_runs, (found, *records[1:])), strict=True):
        alike = [other for other in others if _untimed(other) == _untimed(run)]
        run["prefill"] = min(each["prefill"] for each in (run, *alike))
        for step, *again in zip(*(each["steps"] for each in (run, *alike)), strict=True):
            step["s"] = {
                phase: min(each["s"].get(phase, t) for each in (step, *again)) for phase, t in step["s"].items()
            }
    return found


def _untimed(run: Mapping[str, Any]) -> list[Any]:
    return [{key: value for key, value in step.items() if key != "s"} for step in run["steps"]]


def _of(line: Mapping[str, Any]) -> dict[str, Any]:
    """A step of one row."""
    (row,) = line["r"]
    return {key: row[key] for key in _KEYS if key in row} | {
        "s": {phase: round(t, 5) for phase, t in line["s"].items()}
    }


def _runs(found: Mapping[str, Any]) -> list[Any]:
    alone = (found[name] for name in ("greedy", "tree", "coupled", "sampled"))
    return [*found["who"].values(), *found["rejection"].values(), *alone]


def _tokens(run: Mapping[str, Any]) -> set[int]:
    named = set(run["tokens"])
    for step in run["steps"]:
        named |= {*step.get("t", ()), *step["v"]}
        for _, _, likeliest, _, residual, _ in step.get("i", ()):
            named |= {one[0] for one in (*likeliest, *residual)}
    return named
