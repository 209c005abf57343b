"""``outpace chat``: a conversation in the terminal that keeps its KV."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command
from outpace.cli.options import SYSTEM, Common, Draft, Load, Sampling, system_message
from outpace.common.files import write_json
from outpace.common.option import option
from outpace.errors import OutpaceError, ParameterError

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result

_ALWAYS = ("ngram", "suffix")  # drafters that cost nothing until they are chosen
_HELP = """\
/help            these lines
/reset           start over, with the same system message
/system [TEXT]   show the system message, or start over with another (/system -: with none)
/drafter [NAME]  show who drafts and who could, or choose; the answers stay the same
/stats           figures of the last answer and of all
/quit            leave; Ctrl-C stops an answer, twice leaves"""


def run(
    load: Load,
    draft: Draft,
    sampling: Sampling,
    common: Common,
    system: Annotated[str | None, SYSTEM] = None,
    more_drafter: Annotated[
        list[str] | None, option("--more-drafter", help="A drafter that /drafter may choose. Repeatable.")
    ] = None,
) -> int:
    """Talk to a model. /help lists what else can be typed, Ctrl-C stops an answer. --json prints a JSON line a turn."""
    params = sampling.params()
    alone = not common.prints_json and sys.stdin.isatty()  # a person, not a pipe
    more = [name for name in (*_ALWAYS, *(more_drafter or ())) if name != draft.drafter]
    with load.engine(draft.drafter, more=more, size=draft.size, acceptance=draft.acceptance, prefix_rows=1) as engine:
        chat = Chat(engine, system)
        turns: list[dict[str, Any]] = []
        if alone:
            print(f"{load.model}: /help lists commands, Ctrl-C stops an answer, twice leaves")
        while (text := _read("> " if alone else "")) is not None and text.strip() != "/quit":
            if not text.strip():
                continue
            try:
                if chat.command(text):
                    continue
                result = chat.talk.say(text, params, show=not common.prints_json, drafter=chat.drafter)
            except OutpaceError as error:  # the turn was refused; the conversation goes on without it
                print(f"outpace: {error.spelled(COMMAND.spell)} (or /reset)", file=sys.stderr)
                continue
            chat.last = result
            turns.append(_report(result))
            if common.prints_json:
                print(json.dumps(turns[-1], ensure_ascii=False), flush=True)
            elif common.json is not None:
                write_json(common.json, turns)  # also of a conversation that is killed
            if result.error and not common.prints_json:
                print(f"outpace: {result.error}", file=sys.stderr)
    return 0


class Chat:
    """A conversation and what can be typed beside it. What commands say goes to standard error."""

    def __init__(self, engine: Engine, system: str | None) -> None:
        from outpace.cli.conversation import Conversation

        self._engine, self._system = engine, system
        self._begin: Callable[[], Conversation] = lambda: Conversation(engine, system_message(self._system))
        self.drafter = engine.drafter.name
        self.last: Result | None = None
        self.talk = self._begin()

    def command(self, text: str) -> bool:
        """Whether ``text`` is a command, which was carried out. Raises ParameterError."""
        word, _, rest = text.strip().partition(" ")
        if not re.fullmatch(r"/[a-z]+", word):
            return False
        known = {"help": self.help, "reset": self.reset, "system": self.system, "drafter": self.choose,
                 "stats": self.stats}  # fmt: skip
        if word[1:] not in known:
            raise ParameterError(f"there is no {word}: /help lists what there is")
        print(known[word[1:]](rest.strip()), file=sys.stderr)
        return True

    def help(self, _: str) -> str:
        return _HELP

    def reset(self, _: str) -> str:
        self.talk = self._begin()
        return "started over"

    def system(self, text: str) -> str:
        if not text:
            return f"system message: {self._system}" if self._system is not None else "no system message"
        self._system = None if text == "-" else text
        return self.reset("")

    def choose(self, name: str) -> str:
        there = [*self._engine.drafters, "none"]
        if name and name not in there:
            raise ParameterError(
                f"{name} is not loaded: choose one of {', '.join(there)}, or start with --more-drafter"
            )
        self.drafter = name or self.drafter
        return f"{self.drafter} drafts; there are {', '.join(there)}"

    def stats(self, _: str) -> str:
        if self.last is None:
            return "no answer yet"
        return f"last answer, {self.last.drafter}: {self.last.stats.summary}\nall: {self._engine.stats.summary}"


def _read(prompt: str) -> str | None:
    """One line from the user; None at the end of the input."""
    try:
        return input(prompt)
    except EOFError:
        return None


def _report(result: Result) -> dict[str, Any]:
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
