"""``outpace verify``: plain against speculative decoding on the user's own prompts, here or on servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from outpace.cli.command import Command, option
from outpace.cli.options import Common, Draft, Load, Sampling
from outpace.errors import Argument, ParameterError

_KEY = "OUTPACE_API_KEY"


def run(
    load: Load,
    draft: Draft,
    sampling: Sampling,
    common: Common,
    prompts: Annotated[Path, option("--prompts", help="JSON lines with turns or prompt, id, category.")],
    limit: Annotated[int | None, option("--limit", help="So many rows, spread evenly over the file.")] = None,
    url: Annotated[
        str | None,
        option(
            "--url",
            help="An OpenAI-compatible server: alone against crowded, its speculation off and on. Its key is "
            f"{_KEY}; --model names one that it serves, --drafter and what loads a model have no meaning.",
        ),
    ] = None,
    against: Annotated[str | None, option("--against", help="With --url: another server, compared with it.")] = None,
    concurrency: Annotated[int, option("--concurrency", help="With --url: requests at once in a crowd.")] = 16,
) -> int:
    """Check that drafting, or a server, changes no token. Exit code 1 when one does: here more than by a near-tie."""
    from outpace.exact.noise import fresh_seed
    from outpace.measure.compare import require_tokens
    from outpace.measure.prompts import read_prompts

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
    from outpace.measure.remote import Remote
    from outpace.measure.verify import answers, difference, ways

    key = os.environ.get(_KEY) or None
    other = None if against is None else Remote(against, key)
    compared, notes = ways(Remote(url, key), other, model, concurrency)
    first, *others = compared
    expected, note = answers(rows, params, first)
    notes += [note] if note else []
    listed, changed = [], 0
    for way in others:
        found, note = answers(rows, params, way)
        notes += [note] if note and note not in notes else []
        told = [difference(a, b) for a, b in zip(expected, found, strict=True)]
        # two servers compute in two ways: that their logprobs' bits differ is no fault
        counts = {"identical": 0, "other_logprobs": 0, "near_ties": 0, "different": 0}
        for row, its in zip(rows, told, strict=True):
            kind = "identical" if its is None else "near_ties" if its.near_tie else "different"
            kind = "other_logprobs" if its is not None and its.what == "logprob" else kind
            counts[kind] += 1
            if its is not None and not common.json and (its.what != "logprob" or against is None):
                print(f"{row.id}: {first.name} / {way.name}: {its}", flush=True)
        wrong = counts["near_ties"] + counts["different"] + (counts["other_logprobs"] if against is None else 0)
        changed += wrong
        each = [
            {"id": row.id, "difference": None if its is None else its.to_dict()}
            for row, its in zip(rows, told, strict=True)
        ]
        listed.append({"a": first.name, "b": way.name, **counts, "prompts": each})
        if not common.json:
            said = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items() if count)
            print(f"{first.name} / {way.name}: {said}", flush=True)
    if common.json:
        print(json.dumps({"seed": params.seed, "notes": notes, "compared": listed}))
    else:
        for note in notes:
            print(f"note: {note}")
        print(f"{changed} changed; seed {params.seed}")
    return 1 if changed else 0


def _here(load: Load, draft: Draft, rows: list[Any], params: Any, common: Common) -> int:
    from outpace.measure.compare import compare
    from outpace.measure.prompts import encode_turns

    checked = []
    with load.engine(draft.drafter, size=draft.size, acceptance=draft.acceptance) as engine:
        encoded = [encode_turns(engine, row) for row in rows]  # what cannot be answered is refused before the run
        for row, tokens in zip(rows, encoded, strict=True):
            plain = engine.generate(tokens.tolist(), params, drafter=False)
            drafted = engine.generate(tokens.tolist(), params)
            difference = compare(engine, tokens, params, plain, drafted)
            checked.append((row, drafted, difference))
            if not common.json:
                verdict = "identical" if difference is None else str(difference)
                print(f"{row.id}: {verdict} ({plain.completion_tokens} tokens)", flush=True)
    identical = sum(d is None for _, _, d in checked)
    ties = sum(d is not None and d.near_tie for _, _, d in checked)
    different = len(checked) - identical - ties
    if common.json:
        listed = [
            {
                "id": row.id,
                "category": row.category,
                "identical": difference is None,
                "difference": None if difference is None else difference.to_dict(),
                "tokens": result.completion_tokens,
            }
            for row, result, difference in checked
        ]
        counts = {"identical": identical, "near_ties": ties, "different": different, "seed": params.seed}
        print(json.dumps({**counts, "prompts": listed}))
    else:
        print(f"{identical} identical, {ties} near-ties, {different} different; seed {params.seed}")
    return 1 if different else 0


COMMAND = Command("verify", run, "outpace verify --prompts prompts.jsonl --drafter ngram --temperature 0.8 --seed 1")
