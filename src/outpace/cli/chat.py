"""``outpace chat``: a conversation in the terminal that keeps its KV."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outpace.cli.command import Command
from outpace.cli.options import RECORD, SYSTEM, Common, Draft, Load, Sampling, recorded, spell, system_message
from outpace.errors import OutpaceError

if TYPE_CHECKING:
    from outpace.engine.results import Result


def run(
    load: Load,
    draft: Draft,
    sampling: Sampling,
    common: Common,
    system: Annotated[str | None, SYSTEM] = None,
    record: Annotated[Path | None, RECORD] = None,
) -> int:
    """Talk to a model. /reset starts over, /quit leaves, Ctrl-C stops an answer. --json prints a JSON line a turn."""
    from outpace.cli.conversation import Conversation

    params = sampling.params()
    alone = not common.json and sys.stdin.isatty()  # a person, not a pipe
    with (
        load.engine(draft.drafter, size=draft.size, acceptance=draft.acceptance, prefix_rows=1) as engine,
        recorded(engine, record, load),
    ):
        talk = Conversation(engine, system_message(system))
        if alone:
            print(f"{load.model}: /reset starts over, /quit leaves, Ctrl-C stops an answer, twice leaves")
        while (text := _read("> " if alone else "")) is not None:
            if text.strip() == "/quit":
                break
            if text.strip() == "/reset":
                talk = Conversation(engine, system_message(system))
                continue
            if not text.strip():
                continue
            try:
                result = talk.say(text, params, show=not common.json)
            except OutpaceError as error:  # the turn was refused; the conversation goes on without it
                print(f"outpace: {error.spelled(spell)} (or /reset)", file=sys.stderr)
                continue
            if common.json:
                print(json.dumps(_report(result), ensure_ascii=False), flush=True)
            elif result.error:
                print(f"outpace: {result.error}", file=sys.stderr)
    return 0


def _read(prompt: str) -> str | None:
    """One line from the user; None at the end of the input."""
    try:
        return input(prompt)
    except EOFError:
        return None


def _report(result: Result) -> dict[str, object]:
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "reused_tokens": result.stats.reused_tokens,
        "error": result.error,
        "stats": result.stats.to_dict(),
    }


COMMAND = Command("chat", run, "outpace chat --system 'Answer in one line.' -T 0.7")
