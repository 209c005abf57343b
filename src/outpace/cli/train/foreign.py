"""``outpace train import``: answers that something else had the target give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common, Load
from outpace.cli.train.shared import kept, say, summary, writer_for
from outpace.common.parameter import argument, option
from outpace.common.progress import progress
from outpace.errors import ParameterError


def run(
    load: Load,
    common: Common,
    files: Annotated[
        list[Path], argument('JSON lines: {"id": ..., "prompt": [ids], "answer": [ids], "finish": "stop"}.')
    ],
    out: Annotated[Path, option("The folder to make, or to add to.")],
    temperature: Annotated[
        float, option("Of the answers, where a line does not have it.", "--temperature", "-T")
    ] = 0.0,
    shard: Annotated[int, option("Answers a file.", metavar="N")] = 512,
) -> int:
    """Take over answers of the same target, token by token. What the folder has already is not added again."""
    from outpace.training import foreign

    for path in files:
        if not path.is_file():
            raise ParameterError(f"{path} is not there: give files of JSON lines")
    with load.engine("none") as engine:
        writer = writer_for(out, engine, load, foreign.OPTIONS, shard)
        room = engine.model.info.max_length
    with kept(writer), progress("bytes", sum(path.stat().st_size for path in files)) as advance:
        new, known = foreign.import_answers(
            files, writer, temperature=temperature, max_length=room, done=advance, say=say
        )
    found = {"out": str(out), "new": new, "known": known, **writer.counts}
    if not common.emit(found):
        print(f"{summary(out, writer.counts)}; {new:,} of them new, {known:,} known already")
    return 0


COMMAND = Command("import", run, "outpace train import answers.jsonl --model demo --out DIR")
