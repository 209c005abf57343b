"""One page from what benchmarks wrote as JSON: figures, machine, versions, commands; several machines side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.common.files import StrPath
from outpace.errors import ParameterError
from outpace.measure.page import Bar, Line, Section, bars, curves

NAMES = {
    "llamacpp-q4_1": "llama.cpp Q4_1",
    "llamacpp-q4_0": "llama.cpp Q4_0",
    "llamacpp-q4_1-built": "llama.cpp Q4_1, built here",
    "llamacpp-q4_0-built": "llama.cpp Q4_0, built here",
    "openvino": "OpenVINO",
    "outpace": "Outpace",
}
FAMILIES = {"llamacpp": "llama.cpp", "ik": "ik_llama.cpp", "openvino": "OpenVINO", "outpace": "Outpace"}
_FASTEST = "Decode speed of one answer, tokens/s: each engine drafting at its fastest, and plain (the mark)"
_PLAIN = ("plain", "paged", "paged-f32", "none")  # modes
DETAILS = ("answers", "prefill", "runs", "plain")  # of single answers: no part of a report


@dataclass(frozen=True, slots=True)
class Result:
    """A benchmark's file. ``figures``: text by row; ``bars``: what is drawn of it, ``counts`` what they count."""

    kind: str
    path: Path
    value: Mapping[str, Any]
    figures: Mapping[str, str]
    counts: str = ""
    bars: Sequence[Bar] = ()

    @property
    def machine(self) -> str:
        machine = self.value.get("machine", {})
        cores = f", {machine['cores']} cores" if "cores" in machine else ""
        return f"{machine.get('model', 'unknown machine')}{cores}"

    @property
    def day(self) -> str:
        """When it was measured."""
        return str(self.value.get("time", "day not recorded"))[:10]

    @property
    def about(self) -> str:
        """The setting in a line."""
        value = self.value
        prompts = {row["prompts"] for row in value.get("table", ())}
        parts = [value.get("model"), *(f"{n} prompts" for n in prompts)]
        parts += [f"at most {value['max_tokens']} tokens each"] if value.get("max_tokens") else []
        parts += [f"{value['threads']} threads"] if value.get("threads") else []
        return ", ".join(str(part) for part in parts if part)

    @property
    def made(self) -> str:
        """With which version, when, and the file's name."""
        version = f"outpace {self.value['outpace']}" if "outpace" in self.value else "version not recorded"
        return ", ".join([version, *([str(self.value["time"])] if "time" in self.value else []), self.path.name])

    @property
    def commands(self) -> list[str]:
        """The benchmark's, then those of the servers that it started."""
        found = [str(self.value["command"])] if "command" in self.value else []
        for name, started in self.value.get("commands", {}).items():
            found += [f"{name}: {command}" for command in ([started] if isinstance(started, str) else started)]
        return found


def _peers(value: Mapping[str, Any]) -> tuple[dict[str, str], str, list[Bar]]:
    figures, drawn = {}, []
    for row in sorted(value["table"], key=lambda row: float(row["decode_tokens_per_second"])):
        engine, _, mode = row["config"].partition(" ")
        plain = row["changed"] is None or mode in _PLAIN
        label = f"{NAMES.get(engine, engine)}, {'plain' if mode == 'none' else mode}"
        note = "" if plain else f"{row['changed']} of {row['prompts']} answers changed"
        drawn.append(Bar(label, row["decode_tokens_per_second"], note, engine == "outpace"))
        figures[label] = f"{row['decode_tokens_per_second']:.0f} tokens/s{f' ({note})' if note else ''}"
    return figures, "Decode speed, tokens/s", drawn


def fastest(value: Mapping[str, Any]) -> list[Bar]:
    """What ``peers`` measured, in a bar an engine: its fastest setting, and the fastest without drafts."""
    best: dict[str, Bar] = {}
    for row in sorted(value["table"], key=lambda row: float(row["decode_tokens_per_second"])):
        engine, _, mode = row["config"].partition(" ")
        name, speed = FAMILIES.get(engine.split("-")[0], engine), float(row["decode_tokens_per_second"])
        plain = speed if mode in _PLAIN else best[name].mark if name in best else 0.0
        changed = {None: "not compared", 0: "no answer changed"}.get(
            row["changed"], f"{row['changed']} of {row['prompts']} answers changed"
        )
        weights = next((f", {part.upper()}" for part in engine.split("-") if re.fullmatch(r"q\d_\w+", part)), "")
        drafts = f"{f'{plain:.0f} plain; ' if plain else ''}{mode}{weights}; {changed}"
        note = "plain, faster than drafting" if mode in _PLAIN else drafts
        best[name] = Bar(name, speed, note, engine == "outpace", plain)
    return sorted(best.values(), key=lambda bar: bar.value)


def picture(results: Sequence[Result], theme: str) -> str:
    """The README's of what ``peers`` or ``forward`` measured, as SVG. Raises ParameterError."""
    first = results[0]
    machine = f"{first.machine}, {first.day}"
    if "table" in first.value:
        rows: list[Bar | str] = []
        for result in (each for each in results if "table" in each.value):
            here = f"{result.machine}, {result.day}"
            rows += [f"{result.about}{'' if here == machine else f'; {here}'}", *fastest(result.value)]
        return bars(rows, _FASTEST, machine, theme)
    if not first.value.get("checks"):
        raise ParameterError(f"{first.path} has no chart: give what peers wrote, or forward beside llama-bench")
    checks: Mapping[str, Any] = first.value["checks"]
    lines = [Line(name, [e["ms"] for e in found], name == "Outpace") for name, found in checks.items()]
    widths = [entry["width"] for entry in next(iter(checks.values()))]
    return curves(
        lines,
        widths,
        f"Milliseconds to check {widths[0]} to {widths[-1]} tokens in one forward: less is better",
        f"{first.about}. {machine}",
        theme,
    )


def _checks(value: Mapping[str, Any]) -> tuple[dict[str, str], str, list[Bar]]:
    figures, drawn = {}, []
    for name, entries in value["checks"].items():
        for entry in entries:
            label = f"{name}, {entry['width']} tokens"
            drawn.append(Bar(label, entry["ms"], ours=name == "Outpace"))
            figures[label] = f"{entry['ms']:.1f} ms, {entry['ms'] / entries[0]['ms']:.2f} of one token's"
    return figures, "Milliseconds of one forward", drawn


def _bench(value: Mapping[str, Any]) -> tuple[dict[str, str], str, list[Bar]]:
    figures, drawn = {}, []
    for row in value["configs"]:
        speed = row["decode_tokens_per_second"]
        note = f"{row['identical']} of {row['prompts']} identical"
        drawn.append(Bar(row["name"], speed, note))
        figures[row["name"]] = f"{speed:.0f} tokens/s, {row['tokens_per_step']:.2f} a step, {note}"
    return figures, "Decode speed, tokens/s", drawn


def _serving(value: Mapping[str, Any]) -> tuple[dict[str, str], str, list[Bar]]:
    figures, drawn = {}, []
    for name, server in value["servers"].items():
        for readers, row in server["concurrency"].items():
            label = f"{name}, {readers} at once"
            drawn.append(Bar(label, row["tokens_per_second"], ours=name == "outpace"))
            figures[label] = (
                f"{row['tokens_per_second']:.0f} tokens/s, first token {1e3 * row['first_p50']:.0f} ms (p50)"
            )
    return figures, "Throughput, tokens/s", drawn


def _invariance(value: Mapping[str, Any]) -> tuple[dict[str, str], str, list[Bar]]:
    scores = value["scores"].items()
    figures = {
        n: f"{f['changed']} of {f['answers']} answers changed, {f['bits']} more in bits alone" for n, f in scores
    }
    drawn = [
        Bar(n, 100 * f["changed"] / max(f["answers"], 1), f"{f['changed']} of {f['answers']}", n == "outpace")
        for n, f in scores
    ]  # fmt: skip
    return figures, "Answers changed, %", drawn


def _prove(value: Mapping[str, Any]) -> tuple[dict[str, str], str, list[Bar]]:
    """By drafter: its temperatures, sizes and batches together."""
    answers: dict[str, list[bool]] = {}
    for key, found in {**value["cases"], "generate of transformers": value.get("generate", [])}.items():
        answers.setdefault(key.partition(" T=")[0], []).extend(bool(answer["identical"]) for answer in found)
    return {name: f"{sum(same)} of {len(same)} answers identical" for name, same in answers.items() if same}, "", []


def _scores(value: Mapping[str, Any]) -> tuple[dict[str, str], str, list[Bar]]:
    figures = {}
    for task, found in value["tasks"].items():
        scores = ", ".join(f"{name} {score:g}" for name, score in found["scores"].items())
        same = {True: "the same", False: "DIFFER", None: "not compared"}[found["same"]]
        figures[task] = f"{scores}; plain and drafted {same} ({found['answers']})"
    return figures, "", []


_Reader = Callable[[Mapping[str, Any]], tuple[dict[str, str], str, list[Bar]]]
_READERS: Mapping[str, tuple[str, _Reader]] = {  # by a field that only this kind has
    "table": ("Beside other engines", _peers),
    "checks": ("What a check costs", _checks),
    "servers": ("Serving", _serving),
    "scores": ("Does an answer change with the load?", _invariance),
    "cases": ("Does drafting change a token?", _prove),
    "tasks": ("Scores of evaluations, plain and drafted", _scores),
    "configs": ("Drafters", _bench),
}


def read(path: StrPath) -> Result:
    """A file that a benchmark wrote. Raises ParameterError."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        kind, reader = next(found for field, found in _READERS.items() if field in value)
        return Result(kind, path, value, *reader(value))
    except StopIteration:
        raise ParameterError(
            f"{path} is no result of peers, serving, invariance, prove, scores or outpace bench, nor of forward or "
            "experts beside llama-bench"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "give what outpace bench --json or a benchmark wrote"
        raise ParameterError(f"{path} cannot be read ({error!r}): {remedy}") from error


def sections(results: Sequence[Result]) -> list[Section]:
    """Of each kind the results in a table, a column a machine, and each with its picture and how it was made."""
    found = []
    for kind, _ in _READERS.values():
        own = [result for result in results if result.kind == kind]
        if not own:
            continue
        rows = dict.fromkeys(row for result in own for row in result.figures)
        lines = [[row, *(result.figures.get(row, "-") for result in own)] for row in rows]
        found.append(Section(kind, "", heads=["", *(result.machine for result in own)], lines=lines))
        found += [
            Section(
                result.machine, result.about, result.counts, result.bars,
                notes=[result.made], commands=result.commands, part=True,
            )
            for result in own
        ]  # fmt: skip
    return found
