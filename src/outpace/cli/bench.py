"""``outpace bench``: drafters side by side on the user's prompts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command, Interrupted
from outpace.cli.options import ACCEPTANCE, LIMIT, PROMPTS_OR_OURS, SIZE, Common, Load
from outpace.cli.terminal import bar, columns, folded, table
from outpace.common.parameter import option
from outpace.errors import OutpaceError, ParameterError

if TYPE_CHECKING:
    from outpace.measure.bench import Bench
    from outpace.measure.prompts import PromptRow

_COLUMNS = ("decode", "end-to-end", "tokens/step", "accepted", "speedup (95 %)", "identical")
_LESS = ("end-to-end", "accepted")  # columns that a narrow terminal does without
_NAME = 24  # characters of a name beside a bar
_MOVED = "!"  # beside a ratio that drafting cannot explain


def run(
    load: Load,
    common: Common,
    prompts: Annotated[Path | None, PROMPTS_OR_OURS] = None,
    drafter: Annotated[
        list[str] | None, option("Repeatable: the first is compared with. Default: none, then auto.", "--drafter", "-d")
    ] = None,
    size: Annotated[Any, SIZE] = None,
    acceptance: Annotated[str, ACCEPTANCE] = "coupled",
    limit: Annotated[int | None, LIMIT] = None,
    max_tokens: Annotated[int, option("Most tokens an answer.", "--max-tokens", "-n")] = 512,
    temperature: Annotated[float, option("0 is greedy.", "--temperature", "-T")] = 0.0,
    seed: Annotated[int, option("The same for every prompt and configuration.")] = 0,
    concurrency: Annotated[int, option("Prompts that run together.")] = 1,
    all_turns: Annotated[bool, option("Run whole conversations, not only first turns.")] = False,
    plot: Annotated[
        Path | None, option("Draw speeds by category and acceptance by position: a .png or .svg.", metavar="FILE")
    ] = None,
) -> int:
    """Run every prompt under every configuration in turn, and compare speeds and tokens."""
    from outpace.measure import plot as plots
    from outpace.measure.bench import Bench, Configuration
    from outpace.measure.prompts import read_prompts
    from outpace.measure.same import promises_tokens
    from outpace.params import SamplingParams

    if concurrency < 1:
        raise ParameterError(f"--concurrency {concurrency} is out of range: give at least 1")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    rows = read_prompts(prompts, limit)
    if plot is not None:
        plots.check(plot)
    names = drafter or ["none", "auto"]
    if len(set(names)) < len(names):
        raise ParameterError(f"--drafter {max(names, key=names.count)} is there twice: name each configuration once")
    # No prompt is found again in the KV: a warm-up, or a turn before, would favour one configuration.
    engines = load.engines(names, size=size, acceptance=acceptance, max_rows=concurrency, prefix_rows=0)
    configurations = [Configuration(name, engine) for name, engine in zip(names, engines, strict=True)]
    bench = Bench(configurations, params, all_turns, control=True)
    more = {"concurrency": concurrency, "all_turns": all_turns}
    found, stopped = measured(bench, rows, common, more)
    if found is not None:
        if plot is not None:
            plots.draw(plot, found)
        if not common.emit(found):
            show(found, promised=promises_tokens(acceptance, params))
    end(stopped, found)
    return 0


def measured(
    bench: Bench, rows: Sequence[PromptRow], common: Common, more: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, BaseException | None]:
    """Run the prompts, ``more["concurrency"]`` together, and close the engines. What ``--json`` writes, also where
    Ctrl-C or an error ended it (None: before there was anything), and what ended it."""
    from outpace.common.progress import progress
    from outpace.measure.bench import CONTROL

    head = {**_head(bench), **more}

    def value(interrupted: bool) -> dict[str, Any]:
        runs = [run.to_dict() for run in bench.runs]
        figures = {"configs": bench.report(), "control": bench.figures(CONTROL)}
        return {**head, "interrupted": interrupted, **figures, "runs": runs}

    stopped: KeyboardInterrupt | OutpaceError | None = None
    try:
        with progress("prompts", len(rows)) as advance:

            def done(n: int) -> None:
                advance(n)
                if common.json is not None and not common.prints_json:
                    common.emit(value(interrupted=True))  # also for a run that is killed

            bench.run(rows, more["concurrency"], done)
    except (KeyboardInterrupt, OutpaceError) as error:
        stopped = error
    finally:
        for configuration in bench.configurations:
            configuration.engine.close()
    return value(interrupted=stopped is not None) if bench.runs else None, stopped


def end(stopped: BaseException | None, found: Mapping[str, Any] | None) -> None:
    """Raise what ended a measurement, if anything did; after Ctrl-C, with how much was kept."""
    if isinstance(stopped, KeyboardInterrupt):
        kept = 0 if found is None else found["configs"][0]["prompts"]
        raise Interrupted(f"interrupted: kept {kept} answers of each configuration") from stopped
    if stopped is not None:
        raise stopped


def _head(bench: Bench) -> dict[str, Any]:
    from outpace.common.version import __version__
    from outpace.measure import machine

    model = bench.configurations[0].engine.model
    return {
        "outpace": __version__,
        "command": shlex.join(["outpace", *sys.argv[1:]]),
        "model": model.info.name,
        "backend": model.info.backend,
        "dtype": model.info.dtype,
        "instruction_set": model.isa,
        "threads": model.threads,
        "machine": machine.cpu(),
        "max_tokens": bench.params.max_tokens,
        "temperature": bench.params.temperature,
        "seed": bench.params.seed,
        "acceptance": bench.configurations[0].engine.options.acceptance,
    }


def show(value: dict[str, Any], *, promised: bool) -> None:
    """Print the table of ``value`` (what ``--json`` writes), bars of its speeds, then every difference.

    ``promised``: whether identical tokens were (not under rejection, unless greedy).
    """
    from outpace.measure.bench import about_loops, about_whole, doubt, written
    from outpace.measure.same import Difference

    configs = value["configs"]
    about = (
        f"{value['model']}, {value['backend']} {value['dtype']}, {value['threads']} threads, "
        f"{configs[0]['prompts']} answers of at most {value['max_tokens']} tokens, "
        f"temperature {value['temperature']:g}, {value['acceptance']}"
    )
    print(folded(about))
    categories = list(configs[0]["by_category"])
    rows = []
    for category in [None, *(categories if len(categories) > 1 else [])]:
        for i, entry in enumerate(configs):
            figures = entry if category is None else entry["by_category"][category]
            cells = _cells(figures, promised, drafts=entry["size"] != 0)
            rows.append(["" if i else category or "all", entry["name"], *cells])
    print(_fitting(("category", "drafter", *_COLUMNS), rows))
    print("\n" + "\n".join(_bars(configs, categories, columns())) + "\n")
    first, control = configs[0]["name"], value["control"]["speedup"]
    notes = [
        f"decode, end-to-end, bars: tokens/s; speedup: decode over {first}'s; in brackets and -|-: 95 % over prompts",
        f"{first} against {first}, as a control: {written(control)}; 1.00x would be a machine of constant speed",
        *about_whole(configs),
        *about_loops(configs),
    ]
    if any(cells[-2].endswith(_MOVED) for cells in rows):
        notes.append(f"{_MOVED} more than its tokens a step can give: the machine's speed changed between the runs")
    notes += filter(None, (doubt(entry["name"], entry) for entry in configs))
    if not promised:
        notes.append(f"{value['acceptance']} does not promise the same tokens: see docs/exactness.md")
    for note in notes:
        print(folded(note))
    if not promised:
        return
    for run in value["runs"]:
        if (parted := run["difference"]) is not None:
            found = Difference(parted["what"], parted["index"], tuple(parted["tokens"]), parted["gap"])
            print(folded(f"{run['config']}, prompt {run['id']}, turn {run['turn'] + 1}: {found}"))


def _fitting(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table, on a terminal without what it has no room for."""
    whole = table(head, rows, left=2)
    if not sys.stdout.isatty() or len(whole.splitlines()[1]) <= columns():
        return whole
    kept = [i for i, name in enumerate(head) if name not in _LESS]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows], left=2)


def _bars(configs: Sequence[Mapping[str, Any]], categories: Sequence[str], wide: int) -> Iterator[str]:
    """Decode speeds of all prompts, then by category, as bars in lines of at most ``wide`` characters."""
    from outpace.measure.bench import interval

    names = [entry["name"] if len(entry["name"]) <= _NAME else entry["name"][: _NAME - 2] + ".." for entry in configs]
    groups = [("all", configs)]
    if len(categories) > 1:
        groups += [(name, [entry["by_category"][name] for entry in configs]) for name in categories]
    intervals = [[interval(figures) for figures in entries] for _, entries in groups]
    most = max(max(each) for entries in intervals for each in entries)
    label, name = max(len(title) for title, _ in groups), max(map(len, names))
    room = max(wide - label - name - 13, 8)
    for (title, _), entries in zip(groups, intervals, strict=True):
        for i, (value, low, high) in enumerate(entries):
            drawn = bar(value, low, high, most, room).ljust(room)
            yield f"{'' if i else title:<{label}}  {names[i]:<{name}}  {drawn} {value:7.1f}"


def _cells(figures: dict[str, Any], promised: bool, *, drafts: bool) -> list[str]:
    from outpace.measure.bench import written

    ties = f" ({figures['near_ties']} near-ties)" if promised and figures["near_ties"] else ""
    return [
        f"{figures['decode_tokens_per_second']:.1f}",
        f"{figures['end_to_end_tokens_per_second']:.1f}",
        f"{figures['tokens_per_step']:.2f}",
        f"{figures['acceptance_rate']:.0%}" if drafts else "-",
        written(figures["speedup"]) + (_MOVED if figures["moved"] else ""),
        f"{figures['identical']}/{figures['prompts']}{ties}",
    ]


COMMAND = Command(
    "bench",
    run,
    "outpace bench --limit 6\n"
    "outpace bench --prompts prompts.jsonl -d none -d ngram --json out.json\n"
    "outpace bench -m model.gguf -d none -d suffix -d auto -T 0.8 --plot speeds.svg",
)
