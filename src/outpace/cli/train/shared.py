"""What the commands that make data share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.command import Interrupted

if TYPE_CHECKING:
    from outpace.cli.options import Load
    from outpace.engine.engine import Engine
    from outpace.training.writer import Writer


def writer_for(out: Path, engine: Engine, load: Load, options: Mapping[str, Any], shard: int) -> Writer:
    """A folder for the answers of the engine's target. Raises DataError."""
    from outpace.models.fingerprint import identity
    from outpace.models.options import LoadOptions
    from outpace.training.writer import Writer

    given = load.load_options()
    own = {
        n: v for n, v in asdict(given).items() if v != getattr(LoadOptions(), n) and n not in ("threads", "kv_memory")
    }
    target = identity(engine.model, given)
    return Writer(out, model=load.model, target=target, load=own, options=options, shard=shard)


@contextmanager
def kept(writer: Writer) -> Iterator[None]:
    """Ctrl-C reports how many answers were kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted: {len(writer):,} answers are in {writer.path}; the same command goes on"
        ) from error


def say(what: str) -> None:
    print(f"outpace: {what}", file=sys.stderr)


def summary(out: Path, counts: Mapping[str, int]) -> str:
    answers, tokens, own = counts["answers"], counts["tokens"], counts["answer_tokens"]
    return f"{out}: {answers:,} answers, {tokens:,} tokens, {own:,} of them the answers' own"
