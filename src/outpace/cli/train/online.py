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


def run(
    common: Common,
    drafter: Annotated[Path, option("--drafter", help="An eagle drafter's folder, to begin with.")],
    data: Annotated[Path, option("--data", help="What an engine records: --record DIR.")],
    out: Annotated[Path, option("--out", help="Where the tuned drafter is; serve eagle:OUT once it is there.")],
    model: Annotated[
        str | None, option("--model", "-m", help="The target; checked against the data. Default: the data's.")
    ] = None,
    replay: Annotated[
        Path | None, option("--replay", help="Older answers (outpace train data), so that they stay known.")
    ] = None,
    replay_share: Annotated[
        float, option("--replay-share", help="Tokens of these, as a share of the recorded ones.")
    ] = 0.5,
    rounds: Annotated[int | None, option("--rounds", help="End after so many. Default: go on.")] = None,
    share: Annotated[float, option("--share", help="CPU seconds a second, over all threads.")] = 0.1,
    most_load: Annotated[
        float, option("--most-load", help="Load average a core up to which it works. inf: any.")
    ] = 0.5,
    least: Annotated[int, option("--least", help="New tokens that a round waits for.")] = 5_000,
    steps: Annotated[int, option("--steps", help="Most steps a round.")] = 40,
    evaluate: Annotated[int, option("--evaluate", help="Steps between two evaluations.")] = 20,
    lr: Annotated[float, option("--lr", help="Greatest learning rate.")] = 5e-4,
    held_out: Annotated[float, option("--held-out", help="Share of recorded prompts it is judged on.")] = 0.2,
    gain: Annotated[float, option("--gain", help="Tokens a step more, to replace the drafter.")] = 0.01,
    tokens: Annotated[int, option("--tokens", help="Tokens a batch.")] = 1024,
    longest: Annotated[int, option("--longest", help="Tokens an answer is cut at, its prompt included.")] = 1024,
    seed: Annotated[int, option("--seed", help="Of all that is drawn.")] = 0,
    threads: Annotated[int, option("--threads", "-t", help="CPU threads.")] = 1,
    poll: Annotated[float, option("--poll", help="Seconds between two looks at folder and machine.")] = 10.0,
) -> int:
    """Tune an eagle drafter on recorded answers while others serve: niced, on an idle machine, and with a share of a
    core. It is replaced, at once or not at all, where simulated tokens a step rise on held-out recorded answers.
    """
    from outpace.training.online import OnlineOptions, watch

    options = OnlineOptions(
        share=share, most_load=most_load, least=least, steps=steps, evaluate=evaluate, lr=lr, replay_share=replay_share,
        held_out=held_out, gain=gain, tokens=tokens, longest=longest, seed=seed, poll=poll,
    )  # fmt: skip
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
