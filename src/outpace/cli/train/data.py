"""``outpace train data``: let the target answer prompts, for drafters to learn from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import LIMIT, PROMPTS, Common, Load
from outpace.cli.train.shared import kept, say, summary, writer_for
from outpace.common.parameter import option
from outpace.common.progress import progress
from outpace.errors import ParameterError


def run(
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
    shard: Annotated[int, option("Answers a file.", metavar="N")] = 512,
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


COMMAND = Command(
    "data", run, "outpace train data --prompts prompts.jsonl --out DIR -T 0 -T 0.8 --samples 2 --limit 500"
)
