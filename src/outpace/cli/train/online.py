"""``outpace train online``: tune a drafter on what is recorded while it serves, when nobody needs the processor."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command, Interrupted
from outpace.cli.options import Common
from outpace.cli.train.shared import say
from outpace.common.option import option
from outpace.training import packages
from outpace.training.options import OnlineOptions


def run(
    common: Common,
    options: OnlineOptions,
    drafter: Annotated[Path, option("--drafter", help="An eagle drafter's folder, to begin with.")],
    data: Annotated[Path, option("--data", help="What an engine records: --record DIR.")],
    out: Annotated[Path, option("--out", help="Where the tuned drafter is; serve eagle:OUT once it is there.")],
    model: Annotated[
        str | None, option("--model", "-m", help="The target; checked against the data. Default: the data's.")
    ] = None,
    replay: Annotated[
        Path | None, option("--replay", help="Older answers (outpace train data), so that they stay known.")
    ] = None,
    rounds: Annotated[int | None, option("--rounds", help="End after so many. Default: go on.")] = None,
    threads: Annotated[int, option("--threads", "-t", help="CPU threads.")] = 1,
) -> int:
    """Tune an eagle drafter on recorded answers while others serve: niced, on an idle machine, and with a share of a
    core. It is replaced, at once or not at all, where simulated tokens a step rise on held-out recorded answers.
    """
    with packages():
        from outpace.training.online import watch

    if hasattr(os, "nice"):
        os.nice(19)
    try:
        done = watch(data, drafter, out, options, rounds=rounds, say=say, replay=replay, model=model, threads=threads)
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted: {out} has the best drafter, if a round has ended with a gain") from error
    if not common.emit([asdict(each) for each in done]):
        print(f"{out}: {len(done)} rounds, {sum(each.kept for each in done)} of them with a gain")
    return 0


COMMAND = Command("online", run, "outpace train online --drafter drafters/mine --data recorded --out drafters/tuned")
