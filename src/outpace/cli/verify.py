"""``outpace verify``: plain against speculative decoding on the user's own prompts, here or on servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command
from outpace.cli.options import LIMIT, PROMPTS_OR_OURS, Common, Draft, Load, Sampling
from outpace.cli.summary import seed_of
from outpace.common.parameter import option
from outpace.errors import Argument, ParameterError

if TYPE_CHECKING:
    from outpace.measure.same import Difference

_KEY = "OUTPACE_API_KEY"


def run(
    load: Load,
    draft: Draft,
    sampling: Sampling,
    common: Common,
    prompts: Annotated[Path | None, PROMPTS_OR_OURS] = None,
    limit: Annotated[int | None, LIMIT] = None,
    url: Annotated[
        str | None,
        option(
            "An OpenAI-compatible server: alone against crowded, its speculation off and on. Its key is "
            f"{_KEY}; --model names one that it serves, --drafter and what loads a model have no meaning."
        ),
    ] = None,
    against: Annotated[str | None, option("With --url: another server, compared with it.")] = None,
    concurrency: Annotated[int, option("With --url: requests at once in a crowd.")] = 16,
) -> int:
    """Check that drafting, or a server, changes no token. Exit code 1 when one does: here more than by a near-tie."""
    from outpace.exact.noise import fresh_seed
    from outpace.measure.prompts import read_prompts
    from outpace.measure.same import require_tokens

    if against is not None and url is None:
        raise ParameterError(Argument("against", against), " needs another server: give it as ", Argument("url"))
    if concurrency < 1:
        raise ParameterError(Argument("concurrency", concurrency), " is out of range: give at least 1")
    params = sampling.params()
    params = params.with_(seed=fresh_seed() if params.seed is None else params.seed)
    rows = read_prompts(prompts, limit)
    if url is not None:
        return _servers(
            url, against, None if load.model == Load().model else load.model, concurrency, rows, params, common
        )
    require_tokens(draft.acceptance, params)
    return _here(load, draft, rows, params, common)


def _servers(
    url: str, against: str | None, model: str | None, concurrency: int, rows: list[Any], params: Any, common: Common
) -> int:
    from outpace.measure.remote import Remote, answers, difference, ways

    key = os.environ.get(_KEY) or None
    other = None if against is None else Remote(against, key)
    compared, notes = ways(Remote(url, key), other, model, concurrency)
    first, *others = compared
    expected, note = answers(rows, params, first)
    notes += [note] if note else []
    listed, changed = [], 0
    for way in others:
        now, note = answers(rows, params, way)
        notes += [note] if note and note not in notes else []
        differences = [difference(a, b) for a, b in zip(expected, now, strict=True)]
        counts = _counts(differences)
        for row, part in zip(rows, differences, strict=True):
            # two servers compute in two ways: that their logprobs' bits differ is no fault
            if part is not None and not common.prints_json and (part.what != "logprob" or against is None):
                print(f"{row.id}: {first.name} / {way.name}: {part}", flush=True)
        changed += counts["near_ties"] + counts["different"] + (counts["other_logprobs"] if against is None else 0)
        each = [
            {"id": row.id, "difference": None if part is None else part.to_dict("a", "b")}
            for row, part in zip(rows, differences, strict=True)
        ]
        listed.append({"a": first.name, "b": way.name, **counts, "prompts": each})
        if not common.prints_json:
            summary = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items() if count)
            print(f"{first.name} / {way.name}: {summary}", flush=True)
    if not common.emit({"seed": params.seed, "notes": notes, "compared": listed}):
        for note in notes:
            print(f"note: {note}")
        print("; ".join([f"{changed} changed", *seed_of(params)]))
    return 1 if changed else 0


def _here(load: Load, draft: Draft, rows: list[Any], params: Any, common: Common) -> int:
    from outpace.measure.bench import Bench, Configuration

    with load.engine(draft.drafter, size=draft.size, acceptance=draft.acceptance) as engine:
        bench = Bench([Configuration("plain", engine, {"drafter": False}), Configuration("drafted", engine)], params)

        def show(_: int) -> None:
            run = bench.runs[-1]
            if not common.prints_json:
                verdict = "identical" if run.difference is None else str(run.difference)
                print(f"{run.prompt.id}: {verdict} ({run.result.completion_tokens} tokens)", flush=True)

        bench.run(rows, 1, show)
    runs = [run for run in bench.runs if run.configuration == "drafted"]
    counts = _counts([run.difference for run in runs])
    del counts["other_logprobs"]  # only tokens are compared
    names = ("id", "category", "identical", "difference", "tokens")
    prompts = [{name: value for name, value in run.to_dict().items() if name in names} for run in runs]
    if not common.emit({**counts, "seed": params.seed, "prompts": prompts}):
        figures = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in counts.items())
        print("; ".join([figures, *seed_of(params)]))
    return 1 if counts["different"] else 0


def _counts(differences: Sequence[Difference | None]) -> dict[str, int]:
    """How many answers are identical, and how many differ in which way."""
    counts = {"identical": 0, "other_logprobs": 0, "near_ties": 0, "different": 0}
    for part in differences:
        if part is None:
            counts["identical"] += 1
        elif part.what == "logprob":
            counts["other_logprobs"] += 1
        else:
            counts["near_ties" if part.near_tie else "different"] += 1
    return counts


COMMAND = Command(
    "verify",
    run,
    "outpace verify --drafter suffix\n"
    "outpace verify --prompts prompts.jsonl --drafter ngram -T 0.8 --seed 1\n"
    "outpace verify --url http://127.0.0.1:8000",
)
