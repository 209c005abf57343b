"""``outpace train cache``: keep the target's hidden states beside its answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command, Interrupted
from outpace.cli.options import Common
from outpace.cli.train.shared import say
from outpace.common.parameter import argument, option
from outpace.common.progress import progress


def run(
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


COMMAND = Command("cache", run, "outpace train cache DIR")
