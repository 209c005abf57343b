"""``outpace verify``: plain against speculative decoding on the user's own prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.command import flatten
from outpace.cli.options import Common, Draft, Load, Sampling


def register(app: typer.Typer) -> None:
    app.command(
        "verify", epilog="Example: outpace verify --prompts prompts.jsonl --drafter ngram --temperature 0.8 --seed 1"
    )(flatten(run))


def run(
    load: Load,
    draft: Draft,
    sampling: Sampling,
    common: Common,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSON lines with turns or prompt, id, category.")],
    limit: Annotated[int | None, typer.Option("--limit", help="So many rows, spread evenly over the file.")] = None,
) -> int:
    """Check that drafting changes no token. Exit code 1 when a difference is more than a near-tie."""
    from outpace.exact.noise import fresh_seed
    from outpace.measure.compare import compare, require_tokens
    from outpace.measure.prompts import encode_turns, read_prompts

    params = sampling.params()
    params = params.with_(seed=fresh_seed() if params.seed is None else params.seed)
    require_tokens(draft.acceptance, params)
    rows = read_prompts(prompts, limit)
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
