"""``outpace chat``: a conversation in the terminal that keeps its KV."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command
from outpace.cli.options import SYSTEM, Common, Draft, Load, Unbounded, system_message
from outpace.cli.summary import cautions
from outpace.cli.terminal import Colours, coloured, folded, has_colours, interruptible, line_editing, reading_text
from outpace.common.files import cache_dir, write_json
from outpace.common.parameter import option
from outpace.errors import OutpaceError, ParameterError

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.results import Delta, Result
    from outpace.params import SamplingParams

_ALWAYS = ("ngram", "suffix")  # drafters that cost nothing until they are chosen
_LEAVE = ("/bye", "/exit", "/quit", "exit", "quit")
_BLOCK = '"""'  # begins and ends a message of several lines
_HELP = """\
/help, /?        these lines
/clear, /reset   start over, with the same system message
/system [TEXT]   show the system message, or start over with another (/system -: with none)
/drafter [NAME]  show who drafts and who could, or choose; the answers stay the same
/stats           figures of the last answer and of all
/bye             leave, as exit, quit and Ctrl-D do
\"""             begin a message of several lines, which ends with \"""
Ctrl-C           stop an answer; what was written of it stays"""


def run(
    load: Load,
    draft: Draft,
    sampling: Unbounded,
    common: Common,
    system: Annotated[str | None, SYSTEM] = None,
    more_drafter: Annotated[
        list[str] | None, option("A drafter that /drafter may choose. Repeatable.", group="drafting")
    ] = None,
) -> int:
    """Talk to a model. /help lists what else can be typed, Ctrl-C stops an answer. --json prints a JSON line a turn."""
    params = sampling.params()
    person = sys.stdin.isatty()
    shown = not common.prints_json
    more = [name for name in (*_ALWAYS, *(more_drafter or ())) if name != draft.drafter]
    with (
        load.engine(draft.drafter, more=more, size=draft.size, acceptance=draft.acceptance, prefix_rows=1) as engine,
        line_editing(cache_dir() / "chat_history"),
    ):
        chat = Chat(engine, system)
        turns: list[dict[str, Any]] = []
        if person and shown:
            print(folded(f"{load.model}: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves"))
            if has_colours() and chat.drafter != "none":
                print(folded(chat.colours.legend))
        while (text := _next("> " if person and shown else "", person)) is not None:
            with interruptible() as stopped:
                result = _turn(chat, text, params, stopped, shown=shown, person=person)
                if result is None:
                    continue
                turns.append(_report(result))
                if not shown:
                    print(json.dumps(turns[-1], ensure_ascii=False), flush=True)
                elif common.json is not None:
                    write_json(common.json, turns)  # also of a conversation that is killed
    return 0


def _turn(
    chat: Chat, text: str, params: SamplingParams, stopped: Callable[[], bool], *, shown: bool, person: bool
) -> Result | None:
    """Carry out a command, or answer and show the answer; None where there is none. A turn that is refused leaves the
    conversation as it was."""
    try:
        if not text.strip() or chat.command(text):
            return None
    except OutpaceError as error:
        print(f"outpace: {error.spelled(COMMAND.spell)}", file=sys.stderr)
        return None
    written = chat.written(params) if shown else _ignored
    try:
        result = chat.talk.say(
            text, params, drafter=chat.drafter, on_delta=written, stopped=stopped,
            watched=shown and person and sys.stderr.isatty(),
        )  # fmt: skip
    except OutpaceError as error:
        print(f"outpace: {error.spelled(COMMAND.spell)} (or /clear)", file=sys.stderr)
        return None
    chat.last = result
    if shown:
        print(flush=True)
        for line in [*([_speed(result)] if person else []), *_notes(result, params)]:
            print(coloured(folded(f"[{line}]", sys.stderr), "dim", sys.stderr), file=sys.stderr)
        if result.error:
            print(f"outpace: {result.error}", file=sys.stderr)
    return result


class Written:
    """Prints an answer as it comes, each piece in the colour of the drafter that wrote it."""

    def __init__(self, engine: Engine, params: SamplingParams, colours: Colours) -> None:
        from outpace.text.answer import TextReader, TextState

        self._reader = TextReader(engine.tokenizer, skip_special=params.skip_special_tokens)
        self._state, self._colours = TextState(), colours
        self._waiting: deque[tuple[str, str]] = deque()  # text by source that may be part of a stop string

    def __call__(self, delta: Delta) -> None:
        for token, source in zip(delta.token_ids, delta.sources, strict=True):
            self._state, text = self._reader.add(self._state, token)
            self._waiting.append((text, source))
        left, pieces = delta.text, list[tuple[str, str]]()  # who wrote it, and what
        while left:
            text, source = self._waiting.popleft() if self._waiting else (left, "target")
            piece, left, later = left[: len(text)], left[len(text) :], text[len(left) :]
            if later:
                self._waiting.appendleft((later, source))
            pieces.append((source, piece))
        for source, found in groupby(pieces, key=itemgetter(0)):
            print(self._colours.written("".join(piece for _, piece in found), source), end="")
        sys.stdout.flush()


def _ignored(delta: Delta) -> None:
    """The whole answer is printed when it is there."""


def _speed(result: Result) -> str:
    stats = result.stats
    speed = stats.decode_tokens_per_second or stats.end_to_end_tokens_per_second
    who = "decoded plainly" if result.drafter == "none" else f"{result.drafter} drafted"
    return f"{speed:.1f} tokens/s; {stats.tokens_per_step:.2f} tokens a step, {who}"


def _notes(result: Result, params: SamplingParams) -> list[str]:
    """How the answer ended, where the model did not end it, and what was turned off."""
    notes = [*cautions(result, params), *result.notes]
    if result.finish_reason == "cancelled":
        notes.append("stopped: " + ("what was written stays" if result.token_ids else "the question is forgotten"))
    if result.finish_reason == "length" and result.completion_tokens != params.max_tokens:
        notes.append("the context is full: /clear starts over")
    return notes


class Chat:
    """A conversation and what can be typed beside it. What commands say goes to standard error."""

    def __init__(self, engine: Engine, system: str | None) -> None:
        from outpace.cli.conversation import Conversation

        self._engine, self._system = engine, system
        self._begin: Callable[[], Conversation] = lambda: Conversation(engine, system_message(self._system))
        self.drafter = engine.drafter.name
        self.colours = Colours(self.drafter)
        self.last: Result | None = None
        self.talk = self._begin()

    def command(self, text: str) -> bool:
        """Whether ``text`` is a command, which was carried out. Raises ParameterError."""
        word, _, rest = text.strip().partition(" ")
        if not re.fullmatch(r"/(\?|[a-z]+)", word, re.IGNORECASE):
            return False
        known = {"help": self.help, "?": self.help, "clear": self.reset, "reset": self.reset, "system": self.system,
                 "drafter": self.choose, "stats": self.stats}  # fmt: skip
        carry_out = known.get(word[1:].lower())
        if carry_out is None:
            raise ParameterError(f"there is no {word}: /help lists what there is")
        print(carry_out(rest.strip()), file=sys.stderr)
        return True

    def written(self, params: SamplingParams) -> Written:
        """What shows the next answer."""
        return Written(self._engine, params, self.colours)

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
        self.colours = Colours(self.drafter)
        told = f"{self.drafter} drafts; there are {', '.join(there)}"
        return f"{told}\n{self.colours.legend}" if has_colours() and self.drafter != "none" else told

    def stats(self, _: str) -> str:
        if self.last is None:
            return "no answer yet"
        return f"last answer, {self.last.drafter}: {self.last.stats.summary}\nall: {self._engine.stats.summary}"


def _next(prompt: str, person: bool) -> str | None:
    """What is said next; None: nothing more, the conversation is left.

    A person's first Ctrl-C drops the line, and the second leaves; elsewhere the first is a KeyboardInterrupt.
    """
    interrupted = False
    while True:
        try:
            text = _message(prompt)
            return None if text.strip().lower() in _LEAVE else text
        except EOFError:
            if prompt:
                print()
            return None
        except ParameterError as error:  # a person may type that line again
            if not person:
                raise
            print(f"outpace: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not person:
                raise
            print(file=sys.stderr)
            if interrupted:
                return None
            interrupted = True
            print("Ctrl-C once more leaves, as /bye and Ctrl-D do", file=sys.stderr)


def _message(prompt: str) -> str:
    """A line, or the lines between two ``_BLOCK``. Raises EOFError at the end of the input, and
    ParameterError where it is no text."""
    with reading_text():
        text = input(prompt)
        if not text.lstrip().startswith(_BLOCK):
            return text
        text = text.lstrip()[len(_BLOCK) :]
        with suppress(EOFError):  # the end of the input ends the message, too
            while not text.rstrip().endswith(_BLOCK):
                text += "\n" + input(prompt and ". ")
        return text.rstrip().removesuffix(_BLOCK).strip("\n")


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


COMMAND = Command(
    "chat",
    run,
    "outpace chat --system 'Answer in one line.' -T 0.7\n"
    "outpace chat -m model.gguf -d suffix --more-drafter recycle\n"
    "outpace chat --json < questions.txt",
)
