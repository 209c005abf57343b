"""``outpace bench``: drafters side by side on the user's prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.options import ACCEPTANCE, BenchCommon, Load, flatten
from outpace.errors import ParameterError

if TYPE_CHECKING:
    from outpace.bench import Bench


def register(app: typer.Typer) -> None:
    app.command(
        "bench",
        epilog="Example: outpace bench --prompts prompts.jsonl --limit 24 -d none -d ngram --json out.json",
    )(flatten(run))


def run(
    load: Load,
    common: BenchCommon,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSON lines with turns or prompt, id, category.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", "-d", help="A configuration; repeatable. The first is compared with."),
    ] = None,
    size: Annotated[int | None, typer.Option("--size", "-s", help="Draft size, where a spec does not say.")] = None,
    acceptance: Annotated[str, ACCEPTANCE] = "coupled",
    limit: Annotated[int | None, typer.Option("--limit", help="So many rows, spread evenly over the file.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens an answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", "-T", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="The same for every prompt and configuration.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Prompts that run together.")] = 1,
    all_turns: Annotated[
        bool, typer.Option("--all-turns", help="Run whole conversations, not only first turns.")
    ] = False,
    json: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write everything to this file.")] = None,
) -> int:
    """Run every prompt under every configuration in turn, and compare speeds and tokens."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from outpace.bench import Bench, Configuration
    from outpace.files import check_writable, write_json
    from outpace.prompts import read_prompts
    from outpace.types import SamplingParams

    if concurrency < 1:
        raise ParameterError(f"--concurrency {concurrency} is out of range: give at least 1")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    rows = read_prompts(prompts, limit)
    if json is not None:
        check_writable(json)
    names = drafter or ["none", "ngram"]
    if len(set(names)) < len(names):
        raise ParameterError(f"--drafter {max(names, key=names.count)} is there twice: name each configuration once")
    engines = load.engines(names, size=size, acceptance=acceptance, max_rows=concurrency)
    configurations = [Configuration(name, engine) for name, engine in zip(names, engines, strict=True)]
    bench = Bench(configurations, params, all_turns)
    interrupted = False
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=_stderr(), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("", total=len(rows))
            bench.run(rows, concurrency, lambda n: progress.advance(task, n))
    except KeyboardInterrupt:
        interrupted = True
    value = _value(bench, load, max_tokens, temperature, seed, acceptance, concurrency, interrupted)
    for configuration in configurations:
        configuration.engine.close()
    if json is not None and bench.runs:
        write_json(json, value)
    if bench.runs:
        _print(value)
    if interrupted:
        kept = f"kept what {len(bench.runs) // len(configurations)} prompts gave"
        print(f"outpace: interrupted: {kept}", file=sys.stderr)
        return 130
    return 0


def _value(
    bench: Bench,
    load: Load,
    max_tokens: int,
    temperature: float,
    seed: int,
    acceptance: str,
    concurrency: int,
    cut: bool,
) -> dict[str, Any]:
    info = bench.configurations[0].engine.model.info
    return {
        "model": info.name,
        "backend": info.backend,
        "dtype": info.dtype,
        "threads": load.threads,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "acceptance": acceptance,
        "concurrency": concurrency,
        "interrupted": cut,
        "configs": bench.report(),
        "runs": [run.to_dict() for run in bench.runs],
    }


def _print(value: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    title = f"{value['model']}, {value['backend']} {value['dtype']}, {value['configs'][0]['prompts']} prompts"
    for category in (None, *value["configs"][0]["by_category"]):
        table = Table(title=title if category is None else category, title_justify="left")
        for column in (
            "drafter",
            "decode tok/s",
            "end-to-end tok/s",
            "tokens/step",
            "accepted",
            "speedup (95 %)",
            "identical",
        ):
            table.add_column(column, justify="left" if column == "drafter" else "right")
        for entry in value["configs"]:
            figures = entry if category is None else entry["by_category"][category]
            ratio = figures["speedup"]
            ties = f" ({figures['near_ties']} near-ties)" if figures["near_ties"] else ""
            table.add_row(
                entry["name"],
                f"{figures['decode_tokens_per_second']:.1f}",
                f"{figures['end_to_end_tokens_per_second']:.1f}",
                f"{figures['tokens_per_step']:.2f}",
                f"{figures['acceptance_rate']:.0%}",
                "-" if ratio["median"] is None else f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})",
                f"{figures['identical']}/{figures['prompts']}{ties}",
            )
        console.print(table)
    for run in value["runs"]:
        if run["difference"] is not None:
            d = run["difference"]
            kind = "near-tie" if d["near_tie"] else "DIFFERENT"
            console.print(
                f"{run['config']}, prompt {run['id']}: {kind} at token {d['index']}, score gap {d['gap']:.2g}"
            )


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)
