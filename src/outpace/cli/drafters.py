"""``outpace drafters``: which drafters there are for a model, and how fast each is on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.bench import end, measured
from outpace.cli.command import Command
from outpace.cli.options import PROMPTS_OR_OURS, Common, Load
from outpace.cli.terminal import table
from outpace.common.parameter import argument, option
from outpace.errors import Argument, OutpaceError, ParameterError

if TYPE_CHECKING:
    from outpace.drafters.published import Published
    from outpace.engine.engine import Engine
    from outpace.measure.prompts import PromptRow
    from outpace.measure.recommend import Prediction

_FEWEST, _OWN = 6, 8  # rows of a file; of those that come with Outpace
_STEADY = 1.25  # plain decoding against itself: what was measured on a machine that moves more is not kept
_MACHINE, _RUN = "another machine", "measuring"  # headings
_LOOKUPS = ("ngram", "suffix", "recycle", "suffix+recycle")
_SHIPPED = ("demo", "demo-draft", "demo-gemma")  # whatever a folder is called
_BESIDE = ("suffix+mtp", "suffix+eagle:demo")  # for models that have one


@dataclass(frozen=True, slots=True)
class Named(Load):
    """The target, named as an argument."""

    model: str = field(
        default="",
        metadata={"definition": argument("A model, as --model of other commands takes it.", metavar="MODEL")},
    )


def run(
    load: Named,
    common: Common,
    prompts: Annotated[Path | None, PROMPTS_OR_OURS] = None,
    measure: Annotated[
        bool, option("Run each drafter beside plain decoding, and have auto take the fastest.", group=_RUN)
    ] = False,
    sizes: Annotated[
        bool, option("With --measure: run each in its best fixed size, too, beside its prediction.", group=_RUN)
    ] = False,
    drafter: Annotated[
        list[str] | None,
        option("Only these. Repeatable. Default: those that fit the model and are here.", "--drafter", "-d"),
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
    price: Annotated[
        float | None,
        option("Of the machine: gives the price of tokens.", "--price-per-hour", metavar="X", group="output"),
    ] = None,
    html: Annotated[Path | None, option("Write a page with a chart, too.", metavar="FILE", group="output")] = None,
) -> int:
    """List drafters for a model, or say how fast each is here.

    Without --measure and --prompts it lists those that others published; nothing is loaded. With --prompts it predicts
    the speed of each from one plain pass over your prompts; with --measure it runs each.
    """
    from outpace.common.files import check_writable
    from outpace.drafters.published import DATE, known_for
    from outpace.measure.recommend import Machine

    if not load.model.strip():
        raise ParameterError(Argument("model", load.model), " is no name: give a model's, ORG/NAME or a path")
    machine = Machine(cores, bandwidth, card)
    if readers < 1:
        raise ParameterError(f"--readers {readers} is out of range: give at least 1")
    if price is not None and not price > 0:
        raise ParameterError(f"--price-per-hour {price} is out of range: give more than 0")
    if measure and machine != Machine():
        raise ParameterError("--measure runs on this machine: leave out --cores, --bandwidth and --card")
    if sizes and not measure:
        raise ParameterError("--sizes needs --measure: give both")
    asked: dict[str, Any] = {"--drafter": drafter, "--html": html, "--price-per-hour": price, "--limit": limit}
    asked |= {"--cores": cores, "--bandwidth": bandwidth, "--card": card}
    if not measure and prompts is None:
        for name, given in asked.items():
            if given is not None:
                raise ParameterError(f"{name} is for figures: add --measure, or --prompts for a prediction")
    if html is not None:
        check_writable(html, "HTML")
    published = known_for(load.model)
    value: dict[str, Any] = {
        "date": DATE,
        "model": load.model,
        "drafters": [
            {**each._asdict(), "drafter": each.spec, "command": _command(load.model, each)} for each in published
        ],
    }
    if not measure and prompts is None:
        if not common.emit(value):
            _list(load.model, published, DATE)
        return 0
    rows = _rows(prompts, limit, readers)
    names = list(dict.fromkeys(["none", *(map(_absolute, drafter) if drafter else _applicable(published))]))
    unfit: dict[str, str] = {}

    def left_out(name: str, error: OutpaceError) -> bool:
        unfit[name] = str(error)
        return not drafter  # what was asked for by name is an error

    loaded = load.engines(names, unfit=left_out, max_rows=readers, prefix_rows=0)
    engines = dict(zip([name for name in names if name not in unfit], loaded, strict=True))
    try:
        stopped = _figures(
            value, engines, rows, machine, load, common, measure, sizes, max_tokens, temperature, readers, price
        )
    finally:
        for engine in loaded:
            engine.close()
    value["unfit"] = unfit
    any_figures = bool(value["settings"])  # none: it was interrupted before there was one
    if html is not None and any_figures:
        _write(html, value)
    if not common.emit(value) and any_figures:
        _show(value)
    end(stopped, value.get("bench"))
    return 0


def _list(model: str, published: Sequence[Published], date: str) -> None:
    if published:
        cells = [[e.spec, e.model, e.parameters, e.license, e.source] for e in published]
        print(table(["drafter", "for", "parameters", "licence", "source"], cells, 5))
        print(f"\nAs of {date}. Beside a fine-tune of that model fewer drafts are accepted. To try one:")
        print(f"    {_command(model, published[0])}")
    else:
        print(f"None is known for {model} as of {date}. What needs none: suffix, a smaller model of the same family")
        print("(model:ID), and the layer that drafts in the model's own files, which auto takes where there is one.")
    print(f"What each brings here, of those that are on this machine:\n    outpace drafters {model} --measure")


def _command(model: str, each: Published) -> str:
    return f"outpace generate -m {model} -d suffix+{each.spec} 'Hello'"


def _applicable(published: Sequence[Published]) -> list[str]:
    """Lookups, what may come with the model, and those of the published ones that were downloaded."""
    from outpace.errors import ModelError
    from outpace.models.weights.hub import from_hub

    here = []
    for each in published:
        try:
            from_hub(each.repository, revision=None, allow_pickle=True, offline=True)
        except ModelError:
            continue
        here.append(f"suffix+{each.spec}")
    return [*_LOOKUPS, *_BESIDE, *here]


def _absolute(spec: str) -> str:
    """A spec whose relative path, if it has one, is found from any folder: for ``auto``, which remembers it."""

    def path(found: re.Match[str]) -> str:
        its = found[0]
        return str(Path(its).resolve()) if its not in _SHIPPED and Path(its).exists() else its

    return re.sub(r"(?<=:)[^,+]+", path, spec)


def _rows(prompts: Path | None, limit: int | None, readers: int) -> list[PromptRow]:
    from outpace.measure.prompts import read_prompts

    default = _OWN if prompts is None else _FEWEST
    rows = read_prompts(prompts, -(-default // readers) * readers if limit is None else limit)
    if len(rows) < readers:
        raise ParameterError(f"--readers {readers} needs as many prompts, and there are {len(rows)}: give more")
    return rows


def _figures(
    value: dict[str, Any], engines: Mapping[str, Engine], rows: Sequence[PromptRow], machine: Any, load: Load,
    common: Common, measure: bool, sizes: bool, max_tokens: int, temperature: float, readers: int, price: float | None,
) -> BaseException | None:  # fmt: skip
    """Add what was predicted and measured, and what is to be used; what ended measuring early, if anything did."""
    from outpace.measure.prompts import encode_turns
    from outpace.measure.recommend import plain, predictions
    from outpace.params import SamplingParams

    bare = engines["none"]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    missing: dict[str, str] = {}
    found: list[Prediction] = []
    if sizes or not measure:
        encoded = [encode_turns(bare, row) for row in rows]
        recorded = plain(bare, encoded, params, readers, [engine.drafter for engine in engines.values()])
        found, missing = predictions(engines, recorded, machine)
        value["cost"] = machine.cost(recorded.cost, bare.model).to_dict()
        value["tokens"] = sum(len(answer.tokens) - answer.prompt for answer in recorded.answers)
    info = bare.model.info
    value |= {
        "model": info.name,
        "backend": info.backend,
        "dtype": info.dtype,
        "machine": _described(machine, bare),
        "prompts": len(rows),
        "readers": readers,
        "temperature": temperature,
        "settings": [_entry(each, readers, price) for each in found],
        "not_predicted": missing,
    }
    stopped = None
    if measure:
        stopped = _measure(value, found, engines, rows, params, readers, common, price)
    _recommend(value, found, engines)
    if measure and stopped is None:
        _keep(value, engines, load)
    return stopped


def _described(machine: Any, engine: Engine) -> dict[str, Any]:
    from outpace.measure import machine as here

    asked = {name: value for name, value in asdict(machine).items() if value is not None}
    return asked or {**here.cpu(), "threads": engine.model.threads}


def _entry(found: Prediction, readers: int, price: float | None) -> dict[str, Any]:
    return {"name": found.name, **asdict(found), "price_per_million_tokens": _price(found.speed * readers, price)}


def _price(speed: float, price: float | None) -> float | None:
    return None if price is None else price / 3600 / speed * 1e6


def _measure(
    value: dict[str, Any], found: Sequence[Prediction], engines: Mapping[str, Engine], rows: Sequence[PromptRow],
    params: Any, readers: int, common: Common, price: float | None,
) -> BaseException | None:  # fmt: skip
    """Run every drafter beside plain decoding, in turn, and the best size of each that was predicted; what ended it
    early, if anything did. A setting that ran has ``measured`` (tokens/s) and ``over_plain``; one that was predicted
    ``error``, of its speedup, as a share."""
    from outpace.measure.bench import Bench, Configuration

    chosen: dict[str, Prediction] = {}
    for each in found:
        if each.size:
            chosen.setdefault(each.drafter, each)
    own = [name for name in engines if name not in chosen or _adaptive(name, engines)]
    ways = [Configuration(name, engines[name]) for name in own]
    ways += [Configuration(each.name, engines[each.drafter], {"size": each.size}) for each in chosen.values()]
    bench = Bench(ways, params, control=True)
    ran, stopped = measured(bench, rows, common, {"concurrency": readers})
    if ran is None:
        return stopped
    value["bench"] = {name: ran[name] for name in ("configs", "control", "interrupted")}
    value["speedups"] = {config["name"]: config["speedup"] for config in ran["configs"]}
    entries = {entry["name"]: entry for entry in value["settings"]}
    for config in ran["configs"]:
        name, speed, ratio = config["name"], config["decode_tokens_per_second"], config["speedup"]["ratio"]
        entry = entries.setdefault(name, {"name": name})
        if ratio and "speedup" in entry:
            entry["error"] = entry["speedup"] / ratio - 1
        entry |= {
            "measured": speed,
            "over_plain": config["speedup"],
            "measured_tokens_per_step": config["tokens_per_step"],
            "joules": config["joules_per_token"],
            "price_per_million_tokens": _price(speed * readers, price) if speed else None,
        }
    value["settings"] = list(entries.values())
    return stopped


def _recommend(value: dict[str, Any], found: Sequence[Prediction], engines: Mapping[str, Engine]) -> None:
    """Add ``recommended``, the setting to use, or None: no setting is faster than plain decoding for sure; and
    ``expected``, its speedup, as measured where there is a measurement.

    A prediction alone recommends a drafter, no size: the policy drafts nothing where the prediction was wrong.
    """
    from outpace.measure.recommend import best_predicted

    name, expected = None, None
    if "speedups" not in value:
        predicted = best_predicted(found)
        if predicted is not None:
            adaptive = engines[predicted.drafter].options.size == "auto"
            name = predicted.drafter if adaptive else predicted.name
            expected = {"ratio": predicted.speedup, "low": predicted.least, "size": predicted.size}
    else:
        ratios = {name: ratio for name, ratio in value["speedups"].items() if name != "none"}
        name = _best(ratios, value, engines)
        expected = None if name is None else ratios[name]
    value |= {"recommended": name, "expected": expected}


def _keep(value: dict[str, Any], engines: Mapping[str, Engine], load: Load) -> None:
    """Have ``auto`` take the fastest of the drafters whose sizes the policy chooses; ``kept``: where that stands."""
    from outpace.drafters import measured as memory
    from outpace.drafters.registry import parse

    ratios = {name: each for name, each in value["speedups"].items() if _adaptive(name, engines)}
    best = _best(ratios, value, engines)
    spec, numbers = "", None
    if best is not None:
        spec = engines[best].drafter.name if parse(best).auto else best
        (config,) = (each for each in value["bench"]["configs"] if each["name"] == best)
        numbers = {**config["speedup"], "tokens_per_step": config["tokens_per_step"]}
    again = value["bench"]["control"]["speedup"]["ratio"] or 0.0
    if ratios and 1 / _STEADY < again < _STEADY:
        path = memory.keep(load.model, load.load_options(), numbers, spec, value["prompts"])
        value["kept"] = None if path is None else {"auto": spec or "suffix", "file": str(path)}


def _adaptive(name: str, engines: Mapping[str, Engine]) -> bool:
    """Whether the policy chooses the sizes in that setting."""
    return name in engines and name != "none" and engines[name].options.size == "auto"


def _best(ratios: Mapping[str, Any], value: Mapping[str, Any], engines: Mapping[str, Engine]) -> str | None:
    """The name of the setting to use, of those that were measured."""
    from outpace.measure.recommend import Ran, best_measured

    best = best_measured(
        [Ran(name, r["ratio"], r["low"], _adaptive(name, engines)) for name, r in ratios.items() if r["ratio"]],
        value["bench"]["control"]["speedup"]["ratio"] or 1.0,
    )
    return None if best is None else best.name


def _columns(value: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: what was measured, the fastest first; else plain decoding and each drafter in its best size."""
    priced = any(entry.get("price_per_million_tokens") for entry in value["settings"])
    return _measured_columns(value, priced) if "bench" in value else _predicted_columns(value, priced)


def _measured_columns(value: Mapping[str, Any], priced: bool) -> tuple[list[str], list[list[str]]]:
    from outpace.measure.bench import written

    ran = sorted((e for e in value["settings"] if "measured" in e), key=lambda e: -(e["over_plain"]["ratio"] or 0.0))
    predicted = any("error" in entry for entry in ran)
    heads = ["setting", "over plain (95 %)", "tokens a step", "tokens/s"]
    heads += ["a million tokens"] * priced + ["predicted", "error"] * predicted
    lines = []
    for entry in ran:
        line = [entry["name"], written(entry["over_plain"])]
        line += [f"{entry['measured_tokens_per_step']:.2f}", f"{entry['measured']:.1f}"]
        line += [f"{entry['price_per_million_tokens'] or 0:.3f}"] * priced
        known = "error" in entry
        line += ([f"{entry['speedup']:.2f}x", f"{entry['error']:+.0%}"] if known else ["-", "-"]) * predicted
        lines.append(line)
    return heads, lines


def _predicted_columns(value: Mapping[str, Any], priced: bool) -> tuple[list[str], list[list[str]]]:
    heads = ["setting", "predicted tokens/s", "speedup", "may err by", "tokens a step", "memory"]
    heads += ["a million tokens"] * priced
    lines, seen = [], set()
    for entry in value["settings"]:
        if entry["drafter"] in seen:
            continue
        seen.add(entry["drafter"])
        line = [
            entry["name"], f"{entry['speed']:.1f}", f"{entry['speedup']:.2f}x",
            f"{entry['may_err']:.0%}" if entry["may_err"] else "-", f"{entry['tokens_per_step']:.2f}",
            f"{entry['memory'] / 1e6:.0f} MB",
        ]  # fmt: skip
        lines.append(line + ([f"{entry['price_per_million_tokens']:.3f}"] if priced else []))
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
    from outpace.measure.bench import about_loops

    notes = [f"not predicted: {why}" for why in value["not_predicted"].values()]
    if "cores" not in value["machine"] or "model" not in value["machine"]:
        notes.append(
            "a bound, no measurement: a step takes there what reading its weights (16 bits on a card) takes, or the "
            "arithmetic; caches and the time to start a step are not known, and lookups take what they take here"
        )
    if "bench" in value:
        again = value["bench"]["control"]["speedup"]["ratio"]
        if again:
            notes.append(f"plain decoding against itself, as a control: {again:.2f}x, so much is the machine's own")
        notes += about_loops(value["bench"]["configs"])
        (bare,) = (entry for entry in value["settings"] if entry["name"] == "none")
        if "speed" in bare and bare["measured"]:
            moved = bare["measured"] / bare["speed"] - 1
            notes.append(f"between prediction and measurement the machine's speed changed by {moved:+.0%}")
        if value["bench"]["interrupted"]:
            notes.append("nothing is kept for auto, since measuring was interrupted")
        elif "kept" not in value:
            notes.append("nothing is kept for auto, since the machine's speed changed too much, or no size was auto's")
    if value.get("kept"):
        notes.append(f"auto stands for {value['kept']['auto']} beside this model from now on ({value['kept']['file']})")
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
        "outpace drafters",
        [Section(_advice(value), _about(value), "tokens/s of each reader", bars, heads, lines, _notes(value))],
    )


COMMAND = Command(
    "drafters",
    run,
    "outpace drafters Qwen/Qwen3-8B\n"
    "outpace drafters demo --measure\n"
    "outpace drafters model.gguf --measure -d suffix -d suffix+model:small.gguf\n"
    "outpace drafters demo --prompts prompts.jsonl --readers 8 --html page.html",
)
