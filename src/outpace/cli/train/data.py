"""``outpace train data|cache|import``: what drafters learn from."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command, Interrupted
from outpace.cli.options import LIMIT, PROMPTS, Common, Load
from outpace.common.parameter import argument, option
from outpace.common.progress import progress
from outpace.errors import ParameterError

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.training.data import Writer

SHARD = option("Answers a file.", metavar="N")


def generate(
    load: Load,
    common: Common,
    prompts: Annotated[Path, PROMPTS],
    out: Annotated[Path, option("The folder to make, or to go on with.")],
    samples: Annotated[int, option("Answers a prompt where it samples.", metavar="N")] = 1,
    temperature: Annotated[
        list[float] | None, option("Repeatable; 0 is greedy, one answer. Default: 0.", "--temperature", "-T")
    ] = None,
    max_tokens: Annotated[int, option("Most tokens an answer.", "--max-tokens", "-n")] = 256,
    rows: Annotated[int, option("Answers that are written together.", metavar="N")] = 16,
    limit: Annotated[int | None, LIMIT] = None,
    cache: Annotated[bool, option("Keep the hidden states, too, as outpace train cache.")] = False,
    shard: Annotated[int, SHARD] = 512,
    drafter: Annotated[str, option("Who drafts; it cannot change an answer.", "--drafter", "-d")] = "none",
) -> int:
    """Let the model answer prompts, with the weights it is served with. Run it again to go on after any end."""
    from outpace.common.units import format_bytes
    from outpace.measure.prompts import read_prompts
    from outpace.training import generate as answers
    from outpace.training import hidden_states
    from outpace.training.data import Answers

    if rows < 1:
        raise ParameterError(f"--rows {rows} is out of range: give at least 1")
    plan = answers.Plan(samples, tuple([0.0] if temperature is None else temperature), max_tokens)
    asked = read_prompts(prompts, limit)
    options = plan.options(asked)
    begun = time.perf_counter()
    with load.engine(drafter, max_rows=rows) as engine:
        writer = writer_for(out, engine, load, options, shard)
        before = writer.counts
        todo = answers.jobs(asked, plan, writer)
        info = engine.model.info
        if cache:
            layers = len(hidden_states.with_last(hidden_states.default_layers(info.layers), info.layers))
            most = before["tokens"] + answers.most_tokens(engine, todo, max_tokens)
            size = most * hidden_states.state_bytes(layers, info.hidden_size)
            say(f"the states of at most {most:,} tokens take {format_bytes(size)}")
            hidden_states.check_room(out, size, "the states")
        with kept(writer), progress("answers", len(todo), speed=True) as advance:
            left_out = answers.generate(engine, todo, writer, max_tokens, done=advance, say=say)
        seconds = time.perf_counter() - begun
        found = {"out": str(out), "new": len(writer) - before["answers"], "left_out": left_out, **writer.counts}
        generated = writer.counts["answer_tokens"] - before["answer_tokens"]
        found |= {"seconds": round(seconds, 1), "tokens_per_second": round(generated / seconds, 1)}
        if cache:
            kept_states = hidden_states.Cache(out)
            with progress("states", len(writer), speed=True) as advance:
                kept_states.fill(engine.model, advance)
            found["states_bytes"] = kept_states.bytes
    if len(writer):
        found["hash"] = Answers.open(out).hash
    if common.emit(found):
        return 0
    print(summary(out, writer.counts))
    print(f"  {found['new']:,} new, {left_out:,} left out, {generated / seconds:,.0f} tokens/s")
    if cache:
        print(f"  states: {format_bytes(kept_states.bytes)}")
    return 0


def cache(
    common: Common,
    folder: Annotated[Path, argument("A folder that outpace train data or import made.", metavar="DIR")],
    layer: Annotated[
        list[int] | None, option("Layers whose outputs are kept, from 0. Default: EAGLE-3's three.")
    ] = None,
    threads: Annotated[int | None, option("CPU threads. Default: the cores.", "--threads", "-t")] = None,
) -> int:
    """Compute the hidden states that a drafter reads, once for all training. Run it again to go on after any end."""
    from outpace.common.units import format_bytes
    from outpace.training import hidden_states

    cache = hidden_states.Cache(folder, layer)
    missing = cache.missing
    say(f"{folder}: states take {format_bytes(cache.bytes)}, of which {format_bytes(missing)} are to be written")
    cache.check_room()
    begun = time.perf_counter()
    model = hidden_states.open_target(cache.answers.meta, threads) if not cache.complete else None
    try:
        with progress("answers", len(cache.answers), speed=True) as advance:
            tokens = 0 if model is None else cache.fill(model, advance)
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted: what was computed is kept; the same command goes on") from error
    finally:
        if model is not None:
            model.close()
    seconds = time.perf_counter() - begun
    found = {"out": str(folder), "layers": list(cache.layers[:-1]), "bytes": cache.bytes, "tokens": tokens}
    found |= {"seconds": round(seconds, 1), "tokens_per_second": round(tokens / seconds, 1)}
    if not common.emit(found):
        print(
            f"{folder}: {format_bytes(cache.bytes)} of states; {tokens:,} tokens now, {tokens / seconds:,.0f} a second"
        )
    return 0


def import_(
    load: Load,
    common: Common,
    files: Annotated[
        list[Path], argument('JSON lines: {"id": ..., "prompt": [ids], "answer": [ids], "finish": "stop"}.')
    ],
    out: Annotated[Path, option("The folder to make, or to add to.")],
    temperature: Annotated[
        float, option("Of the answers, where a line does not have it.", "--temperature", "-T")
    ] = 0.0,
    shard: Annotated[int, SHARD] = 512,
) -> int:
    """Take over answers of the same target, token by token. What the folder has already is not added again."""
    from outpace.training.data import IMPORTED, import_answers

    for path in files:
        if not path.is_file():
            raise ParameterError(f"{path} is not there: give files of JSON lines")
    with load.engine("none") as engine:
        writer = writer_for(out, engine, load, IMPORTED, shard)
        room = engine.model.info.max_length
    with kept(writer), progress("bytes", sum(path.stat().st_size for path in files)) as advance:
        new, known = import_answers(files, writer, temperature=temperature, max_length=room, done=advance, say=say)
    found = {"out": str(out), "new": new, "known": known, **writer.counts}
    if not common.emit(found):
        print(f"{summary(out, writer.counts)}; {new:,} of them new, {known:,} known already")
    return 0


def writer_for(out: Path, engine: Engine, load: Load, options: Mapping[str, Any], shard: int) -> Writer:
    """A folder for the answers of the engine's target. Raises DataError."""
    from outpace.models.fingerprint import identity
    from outpace.models.options import LoadOptions
    from outpace.training.data import Writer

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


COMMANDS = (
    Command(
        "data",
        generate,
        "outpace train data --prompts prompts.jsonl --out answers\n"
        "outpace train data --prompts prompts.jsonl --out answers -T 0.8 --samples 2\n"
        "outpace train data --prompts prompts.csv --out answers -m model.gguf",
    ),
    Command(
        "cache",
        cache,
        "outpace train cache answers\n"
        "outpace train cache answers --threads 4\n"
        "outpace train cache answers --layer 2 --layer 15 --layer 27",
    ),
    Command(
        "import",
        import_,
        "outpace train import answers.jsonl --out answers\n"
        "outpace train import part1.jsonl part2.jsonl --out answers\n"
        "outpace train import answers.jsonl --model model.gguf -T 0.8 --out answers",
    ),
)
