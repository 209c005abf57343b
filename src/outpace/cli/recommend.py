"""``outpace recommend``: which drafter, and in what size, for the user's prompts, model and machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.bench import end, measured
from outpace.cli.command import Command
from outpace.cli.options import PROMPTS_OR_OURS, Common, Load
from outpace.cli.terminal import table
from outpace.common.parameter import option
from outpace.errors import ParameterError

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.measure.prompts import PromptRow
    from outpace.measure.recommend import Prediction

_ADAPTIVE = " --size auto"  # ends the name of a setting whose sizes the policy chooses
_MEASURED = 3  # settings that --measure runs
_FEWEST = 6  # rows
_MACHINE, _RUN = "another machine", "measuring"  # headings
_DRAFTERS = ("ngram", "suffix", "recycle", "suffix+recycle", "auto")


def run(
    load: Load,
    common: Common,
    prompts: Annotated[Path | None, PROMPTS_OR_OURS] = None,
    drafter: Annotated[
        list[str] | None, option(f"Repeatable. Default: {', '.join(_DRAFTERS)}.", "--drafter", "-d")
    ] = None,
    limit: Annotated[
        int | None, option("So many rows, spread evenly over the file. Default: 6, or more readers.")
    ] = None,
    max_tokens: Annotated[int, option("Most tokens an answer.", "--max-tokens", "-n")] = 128,
    temperature: Annotated[float, option("0 is greedy.", "--temperature", "-T")] = 0.0,
    readers: Annotated[int, option("Answers that are decoded at once.")] = 1,
    cores: Annotated[int | None, option("Predict for so many cores of this kind.", group=_MACHINE)] = None,
    bandwidth: Annotated[
        float | None, option("Predict for memory that is read so fast.", group=_MACHINE, metavar="GB/s")
    ] = None,
    card: Annotated[str | None, option("Predict for a card: A100, H100, H200, L4 or L40S.", group=_MACHINE)] = None,
    measure: Annotated[bool, option("Run the best three, and say how good the predictions were.", group=_RUN)] = False,
    every: Annotated[bool, option("With --measure: run every drafter, each in its best size.", group=_RUN)] = False,
    price: Annotated[
        float | None,
        option("Of the machine: gives the price of tokens.", "--price-per-hour", metavar="X", group="output"),
    ] = None,
    html: Annotated[Path | None, option("Write a page with a chart, too.", metavar="FILE", group="output")] = None,
) -> int:
    """Predict how fast each drafter is on your prompts from one plain pass over them, and which size of drafts pays."""
    from outpace.common.files import check_writable
    from outpace.measure.prompts import encode_turns, read_prompts
    from outpace.measure.recommend import Machine, plain, predictions
    from outpace.params import SamplingParams

    machine = Machine(cores, bandwidth, card)
    if readers < 1:
        raise ParameterError(f"--readers {readers} is out of range: give at least 1")
    if price is not None and not price > 0:
        raise ParameterError(f"--price-per-hour {price} is out of range: give more than 0")
    if measure and machine != Machine():
        raise ParameterError("--measure runs on this machine: leave out --cores, --bandwidth and --card")
    if every and not measure:
        raise ParameterError("--every needs --measure: give both")
    if html is not None:
        check_writable(html)
    rows = read_prompts(prompts, limit or -(-_FEWEST // readers) * readers)
    if len(rows) < readers:
        raise ParameterError(f"--readers {readers} needs as many prompts, and there are {len(rows)}: give more")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    names = list(dict.fromkeys(["none", *(drafter or _DRAFTERS)]))
    loaded = load.engines(names, max_rows=readers, prefix_rows=0)
    engines = _distinct(names, loaded)
    try:
        encoded = [encode_turns(loaded[0], row) for row in rows]
        drafters = [engine.drafter for engine in engines.values()]
        recorded = plain(loaded[0], encoded, params, readers, drafters)
        found, missing = predictions(engines, recorded, machine)
        model = loaded[0].model.info
        value: dict[str, Any] = {
            "model": model.name,
            "backend": model.backend,
            "dtype": model.dtype,
            "machine": _described(machine, loaded[0]),
            "prompts": len(rows),
            "readers": readers,
            "temperature": temperature,
            "tokens": sum(len(answer.tokens) - answer.prompt for answer in recorded.answers),
            "cost": machine.cost(recorded.cost, loaded[0].model).to_dict(),
            "settings": [_entry(each, readers, price) for each in found],
            "not_predicted": missing,
        }
        stopped = None
        if measure:
            most = len(found) if every else _MEASURED
            stopped = _measure(value, found, engines, rows, params, readers, common, most)
        _recommend(value, found, engines)
    finally:
        for engine in loaded:
            engine.close()
    if html is not None:
        _write(html, value)
    if not common.emit(value):
        _show(value)
    end(stopped, value.get("bench"))
    return 0


def _distinct(names: Sequence[str], engines: Sequence[Engine]) -> dict[str, Engine]:
    """Engines by spec, without ``auto`` where it stands for another of them."""
    others = {engine.drafter.name for name, engine in zip(names, engines, strict=True) if name != "auto"}
    return {n: e for n, e in zip(names, engines, strict=True) if n != "auto" or e.drafter.name not in others}


def _described(machine: Any, engine: Engine) -> dict[str, Any]:
    from outpace.measure import machine as here

    asked = {name: value for name, value in asdict(machine).items() if value is not None}
    return asked or {**here.cpu(), "threads": engine.model.threads}


def _entry(found: Prediction, readers: int, price: float | None) -> dict[str, Any]:
    cost = None if price is None else price / 3600 / (found.speed * readers) * 1e6
    return {"name": found.name, **asdict(found), "price_per_million_tokens": cost}


def _measure(
    value: dict[str, Any], found: Sequence[Prediction], engines: Mapping[str, Engine], rows: Sequence[PromptRow],
    params: Any, readers: int, common: Common, most: int,
) -> BaseException | None:  # fmt: skip
    """Run the best settings of at most ``most`` drafters beside plain decoding, in turn; what ended it early, if
    anything did. Each setting that ran has ``measured`` and ``error``, the prediction's, as a share."""
    from outpace.measure.bench import Bench, Configuration

    chosen: dict[str, Prediction] = {}
    for each in found:
        if each.size:
            chosen.setdefault(each.drafter, each)
    ways = [Configuration("none", engines["none"])]
    best = list(chosen.values())[:most]
    ways += [Configuration(each.name, engines[each.drafter], {"size": each.size}) for each in best]
    if best and engines[best[0].drafter].options.size == "auto":
        ways.append(Configuration(best[0].drafter + _ADAPTIVE, engines[best[0].drafter]))
    bench = Bench(ways, params, control=True)
    ran, stopped = measured(bench, rows, common, {"concurrency": readers})
    if ran is not None:
        value["bench"] = {name: ran[name] for name in ("configs", "control", "interrupted")}
        speeds = {config["name"]: config for config in ran["configs"]}
        for entry in value["settings"]:
            config = speeds.pop(entry["name"], None)
            if config is not None:
                speed = config["decode_tokens_per_second"]
                entry |= {"measured": speed, "error": entry["speed"] / speed - 1, "joules": config["joules_per_token"]}
                entry["measured_tokens_per_step"] = config["tokens_per_step"]
                if entry["price_per_million_tokens"] is not None:
                    entry["price_per_million_tokens"] *= entry["speed"] / speed
        (bare,) = (entry for entry in value["settings"] if entry["name"] == "none")
        value["speedups"] = {config["name"]: config["speedup"] for config in ran["configs"]}
        for name, config in speeds.items():  # the policy's sizes, which nothing predicts
            speed, cost = config["decode_tokens_per_second"], bare["price_per_million_tokens"]
            cost = None if cost is None else cost * bare["measured"] / speed
            value["settings"].append({"name": name, "measured": speed, "price_per_million_tokens": cost})
    return stopped


def _recommend(value: dict[str, Any], found: Sequence[Prediction], engines: Mapping[str, Engine]) -> None:
    """Add ``recommended``, the setting to use, or None: no setting is faster than plain decoding for sure; and
    ``expected``, its speedup, as measured where there is a measurement.

    A prediction alone recommends a drafter, no size: the policy drafts nothing where the prediction was wrong.
    """
    from outpace.measure.recommend import Ran, best_measured, best_predicted

    name, expected = None, None
    if "speedups" not in value:
        predicted = best_predicted(found)
        if predicted is not None:
            adaptive = engines[predicted.drafter].options.size == "auto"
            name = predicted.drafter + _ADAPTIVE if adaptive else predicted.name
            expected = {"ratio": predicted.speedup, "low": predicted.least, "size": predicted.size}
    else:
        ratios = {name: ratio for name, ratio in value["speedups"].items() if name != "none"}
        best = best_measured(
            [Ran(name, r["ratio"], r["low"], name.endswith(_ADAPTIVE)) for name, r in ratios.items() if r["ratio"]],
            value["bench"]["control"]["speedup"]["ratio"] or 1.0,
        )
        if best is not None:
            name, expected = best.name, ratios[best.name]
    value |= {"recommended": name, "expected": expected}


def _columns(value: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: plain decoding, each drafter in its best size, and what was measured."""
    heads = ["setting", "predicted tokens/s", "speedup", "may err by", "tokens a step", "memory"]
    priced = any(entry.get("price_per_million_tokens") for entry in value["settings"])
    ran = "bench" in value
    heads += ["a million tokens"] * priced + ["measured", "error"] * ran
    lines, seen = [], set()
    for entry in value["settings"]:
        if "speed" not in entry:
            line = [entry["name"], *["-"] * 5]
            line += [f"{entry['price_per_million_tokens']:.3f}"] if priced else []
            line += [f"{entry['measured']:.1f}", "-"]
        elif entry["drafter"] in seen and "measured" not in entry:
            continue
        else:
            seen.add(entry["drafter"])
            line = [
                entry["name"], f"{entry['speed']:.1f}", f"{entry['speedup']:.2f}x",
                f"{entry['may_err']:.0%}" if entry["may_err"] else "-", f"{entry['tokens_per_step']:.2f}",
                f"{entry['memory'] / 1e6:.0f} MB",
            ]  # fmt: skip
            line += [f"{entry['price_per_million_tokens']:.3f}"] if priced else []
            line += (
                [f"{entry['measured']:.1f}", f"{entry['error']:+.0%}"] if "measured" in entry else ["-", "-"]
            ) * ran
        lines.append(line)
    return heads, lines


def _advice(value: Mapping[str, Any]) -> str:
    """What to use, and how sure that is."""
    from outpace.measure.bench import written

    best, expected = value["recommended"], value["expected"]
    if "speedups" in value:
        if best is None:
            return "measured: none of them is faster than plain decoding for sure: use --drafter none"
        return f"use --drafter {best}: measured, {written(expected)} plain decoding's speed"
    if best is not None:
        return (
            f"use --drafter {best}: predicted, not measured; with {expected['size']} drafted a step "
            f"{expected['ratio']:.2f}x plain decoding's speed, in 19 of 20 cases at least {expected['low']:.2f}x "
            "(--measure runs it)"
        )
    if all(entry["speedup"] < 1 - entry["may_err"] for entry in value["settings"] if entry["size"]):
        return "predicted: none of them pays here: use --drafter none"
    return (
        "predicted: none of them is faster than plain decoding by more than the prediction may err: leave --drafter "
        "auto, which drafts only where it pays, or give --measure to know"
    )


def _about(value: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{name} {each}" for name, each in value["machine"].items() if name != "features")
    many = f"{value['readers']} at once" if value["readers"] > 1 else "one at a time"
    return f"{value['model']}, {value['backend']} {value['dtype']}, {machine}; {value['prompts']} prompts, {many}"


def _notes(value: Mapping[str, Any]) -> list[str]:
    """What is to be known of the figures."""
    notes = [f"not predicted: {why}" for why in value["not_predicted"].values()]
    if "cores" not in value["machine"] or "model" not in value["machine"]:
        notes.append(
            "a bound, no measurement: a step takes there what reading its weights (16 bits on a card) takes, or the "
            "arithmetic; caches and the time to start a step are not known, and lookups take what they take here"
        )
    for entry in value["settings"]:
        if entry["name"] == "none" and "error" in entry:
            again = value["bench"]["control"]["decode_tokens_per_second"] / entry["measured"] - 1
            moved = 1 / (1 + entry["error"]) - 1
            notes.append(f"the machine moved: plain decoding by {moved:+.0%} up to the measurement, {again:+.0%} in it")
    return notes


def _show(value: Mapping[str, Any]) -> None:
    heads, lines = _columns(value)
    print(_about(value))
    print(table(heads, lines))
    for note in _notes(value):
        print(note)
    print(_advice(value))


def _write(path: Path, value: Mapping[str, Any]) -> None:
    from outpace.measure.page import Bar, Section, write

    heads, lines = _columns(value)
    shown = {line[0] for line in lines}
    bars = []
    for entry in value["settings"]:
        if entry["name"] in shown:
            speed, how = (entry["measured"], "measured") if "measured" in entry else (entry["speed"], "predicted")
            bars.append(Bar(entry["name"], speed, how, entry["name"] != "none"))
    bars.sort(key=lambda bar: -bar.value)
    write(
        path,
        "outpace recommend",
        [Section(_advice(value), _about(value), "tokens/s of each reader", bars, heads, lines, _notes(value))],
    )


COMMAND = Command(
    "recommend",
    run,
    "outpace recommend --measure\n"
    "outpace recommend -m model.gguf --prompts prompts.txt -d suffix -d model:small.gguf\n"
    "outpace recommend -m demo --prompts prompts.jsonl --readers 8 --price-per-hour 1.20 --html page.html",
)
