"""``outpace chat``: a conversation in the terminal that keeps its KV."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import typer

from outpace.cli.options import Common, Draft, Load, Sampling, flatten
from outpace.errors import OutpaceError

if TYPE_CHECKING:
    from outpace.engine import Engine
    from outpace.types import I32, Result, SamplingParams


def register(app: typer.Typer) -> None:
    app.command("chat", epilog="Example: outpace chat --model demo --drafter ngram --temperature 0.7")(flatten(run))


def run(load: Load, draft: Draft, sampling: Sampling, common: Common) -> int:
    """Talk to a model. /reset starts over, /quit leaves, Ctrl-C stops an answer. --json prints a JSON line a turn."""
    params = sampling.params()
    with load.engine(draft.drafter, size=draft.size, acceptance=draft.acceptance, prefix_rows=1) as engine:
        talk = Conversation(engine)
        if not common.json and sys.stdin.isatty():
            print(f"{load.model}: /reset starts over, /quit leaves, Ctrl-C stops an answer")
        while (text := _read(prompt="" if common.json else "> ")) is not None:
            if text == "/quit":
                break
            if text == "/reset":
                talk = Conversation(engine)
                continue
            if not text.strip():
                continue
            try:
                result = talk.say(text, params, show=not common.json)
            except OutpaceError as error:  # the turn was refused; the conversation goes on without it
                print(f"outpace: {error}", file=sys.stderr)
                continue
            if common.json:
                line = {
                    "text": result.text,
                    "finish_reason": result.finish_reason,
                    "prompt_tokens": result.prompt_tokens,
                    "reused_tokens": result.stats.reused_tokens,
                    "stats": result.stats.to_dict(),
                }
                print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0


def _read(prompt: str) -> str | None:
    """One line from the user; None at the end of the input."""
    try:
        return input(prompt)
    except EOFError:
        return None


class Conversation:
    """Messages, and the token ids that stand for them, so that a new turn is tokenised alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._messages: list[dict[str, str]] = []
        self._text = ""  # rendered text that ``_ids`` stands for
        self._ids: I32 = np.zeros(0, np.int32)

    def say(self, text: str, params: SamplingParams, *, show: bool) -> Result:
        """Add a user's turn and return the answer. Raises ParameterError; then the turn is forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        rendered, ids = self._encode(messages)
        result = self._answer(ids, params, show)
        self._messages = [*messages, {"role": "assistant", "content": result.text}]
        self._text, self._ids = rendered + result.text, np.concatenate([ids, _spoken(result)])
        return result

    def _encode(self, messages: list[dict[str, str]]) -> tuple[str, I32]:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        if not tokenizer.has_chat_template:
            rendered = "\n\n".join(message["content"] for message in messages) + "\n\n"
        else:
            rendered = tokenizer.render_chat(messages)
        if self._text and rendered.startswith(self._text):
            rest = tokenizer.encode(rendered[len(self._text) :], add_special=False, parse_special=True)
            return rendered, np.concatenate([self._ids, rest]).astype(np.int32)
        special = tokenizer.has_chat_template  # the template writes its own
        return rendered, tokenizer.encode(rendered, add_special=not special, parse_special=special)

    def _answer(self, ids: I32, params: SamplingParams, show: bool) -> Result:
        request = self._engine.add(ids.tolist(), params)
        result = None
        try:
            while result is None:
                for delta in self._engine.step():
                    result = self._shown(delta.text, show, delta.result) or result
        except KeyboardInterrupt:
            for delta in self._engine.cancel(request):
                result = self._shown(delta.text, show, delta.result) or result
            if result is None:
                raise
        finally:
            self._engine.cancel(request)
        if show:
            print()
        return result

    @staticmethod
    def _shown(text: str, show: bool, result: Result | None) -> Result | None:
        if show:
            print(text, end="", flush=True)
        return result


def _spoken(result: Result) -> I32:
    """The answer's ids without the stop token: the template writes that itself, when the next turn is rendered."""
    ids = result.token_ids
    if result.finish_reason == "stop" and isinstance(result.stopped_by, int):
        ids = ids[:-1]
    return np.array(ids, np.int32)
