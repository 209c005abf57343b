"""``outpace datastore``: make what ``--drafter retrieval:PATH`` searches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command, Group
from outpace.cli.options import LIMIT, PROMPTS, Load
from outpace.common.parameter import argument, option
from outpace.common.progress import progress
from outpace.errors import ParameterError


def build(
    load: Load,
    out: Annotated[Path, argument("The folder to make.")],
    corpus: Annotated[list[Path], option("Text, or JSON lines with token_ids, text or turns. Repeatable.")],
    add: Annotated[bool, option("Add to a datastore that is there.")] = False,
    segment: Annotated[
        int, option("Tokens indexed at once; memory is about 40 bytes each.", "--segment-tokens")
    ] = 4_000_000,
) -> int:
    """Index files for --drafter retrieval:OUT, with the model's tokenizer. A corpus may be larger than memory."""
    from outpace.drafters.lookup import datastore
    from outpace.measure.prompts import sequences

    if not 1000 <= segment <= 1 << 30:
        raise ParameterError(f"--segment-tokens {segment} is out of range: give 1,000 to {1 << 30:,}")
    size = sum(path.stat().st_size for path in corpus if path.exists())
    with load.engine("none") as engine, progress("bytes", size) as advance:
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise ParameterError(f"{load.model} has no tokenizer: a datastore needs one")

        def read() -> Iterator[list[int]]:
            for sequence in sequences(corpus, tokenizer, engine.model.info.vocab_size):
                advance(4 * len(sequence))  # about what a token takes in a text
                yield sequence

        made = datastore.build(
            out,
            read(),
            vocabulary=datastore.fingerprint(tokenizer),
            model=engine.model.info.name,
            add=add,
            segment=segment,
        )
    print(f"{out}: {len(made):,} tokens; use it with --drafter retrieval:{out}")
    return 0


def answers(
    load: Load,
    out: Annotated[Path, argument("JSON lines to write, or to go on with.")],
    prompts: Annotated[Path, PROMPTS],
    limit: Annotated[int | None, LIMIT] = None,
    max_tokens: Annotated[int, option("Most tokens an answer.", "--max-tokens", "-n")] = 200,
    concurrency: Annotated[int, option("Prompts that run together.")] = 16,
) -> int:
    """Let the model answer prompts, greedily: its own words are the best corpus to draft its words from."""
    from outpace.common.files import check_writable
    from outpace.measure.prompts import read_prompts, write_answers
    from outpace.params import SamplingParams

    if concurrency < 1:
        raise ParameterError(f"--concurrency {concurrency} is out of range: give at least 1")
    params = SamplingParams(max_tokens=max_tokens)
    check_writable(out, "JSON lines")
    rows = read_prompts(prompts, limit)
    with load.engine("auto", max_rows=concurrency) as engine, progress("prompts", len(rows)) as advance:
        count = write_answers(engine, rows, out, params, concurrency, advance, _say)
    print(f"{out}: {count} answers")
    return 0


def _say(what: str) -> None:
    print(f"outpace: {what}", file=sys.stderr)


COMMAND = Group(
    "datastore",
    "Make and fill the datastore that --drafter retrieval:PATH searches.",
    "outpace datastore answers --prompts prompts.jsonl answers.jsonl\n"
    "outpace datastore build --corpus answers.jsonl --corpus notes.txt STORE\n"
    "outpace generate 'Hello?' -d retrieval:STORE",
    (
        Command(
            "build",
            build,
            "outpace datastore build --corpus notes.txt STORE\n"
            "outpace datastore build --corpus answers.jsonl -m model.gguf STORE\n"
            "outpace datastore build --corpus more.txt --add STORE",
        ),
        Command(
            "answers",
            answers,
            "outpace datastore answers --prompts prompts.jsonl answers.jsonl\n"
            "outpace datastore answers --prompts prompts.jsonl --limit 500 answers.jsonl\n"
            "outpace datastore answers --prompts prompts.txt -m model.gguf answers.jsonl",
        ),
    ),
)
