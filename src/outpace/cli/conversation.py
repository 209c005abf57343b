"""A conversation that tokenises only what is new, so that the KV of all before is found again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outpace.common.arrays import I32
from outpace.common.progress import progress
from outpace.engine.engine import Engine
from outpace.engine.results import Delta, Result
from outpace.params import SamplingParams


class Conversation:
    """Messages, and the token ids that stand for them, so that a new turn is tokenised alone.

    The engine keeps the finished row (``prefix_rows=1``): known ids that begin a new prompt find their KV there.
    """

    def __init__(self, engine: Engine, begin: Sequence[dict[str, str]] = ()) -> None:
        self._engine = engine
        self._messages = list(begin)
        self._text = ""  # rendered text that ``_ids`` stands for; empty: encode everything anew
        self._ids: I32 = np.zeros(0, np.int32)

    def say(
        self,
        text: str,
        params: SamplingParams,
        *,
        drafter: str | None = None,
        on_delta: Callable[[Delta], None] = lambda delta: None,
        stopped: Callable[[], bool] = lambda: False,
        watched: bool = False,
    ) -> Result:
        """Add a user's turn and return the answer; ``drafter`` as in ``Engine.prepare``. ``on_delta`` is called with
        each part of the answer; ``stopped`` is asked before each step, and ends it. ``watched``: draw a bar while a
        long prompt is read. Raises ParameterError; then, and where it was stopped before its first token, the turn is
        forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        rendered, ids = self.encode(messages)
        result = self._answer(ids, params, drafter, on_delta, stopped, watched)
        if result.finish_reason == "cancelled" and not result.token_ids:
            return result
        self._messages = [*messages, {"role": "assistant", "content": result.text}]
        if isinstance(result.stopped_by, str):  # the ids say more than the text, which was cut before the stop string
            self._text, self._ids = "", np.zeros(0, np.int32)
        else:
            self._text, self._ids = rendered + result.text, np.concatenate([ids, _spoken(result)])
        return result

    def encode(self, messages: list[dict[str, str]]) -> tuple[str, I32]:
        """A conversation as rendered text and its token ids: those known already, and the rest encoded."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        templated = tokenizer.has_chat_template
        if templated:
            rendered = tokenizer.render_chat(messages)
        else:
            rendered = "\n\n".join(message["content"] for message in messages) + "\n\n"
        if self._text and rendered.startswith(self._text):
            rest = tokenizer.encode(rendered[len(self._text) :], add_special=False, parse_special=templated)
            return rendered, np.concatenate([self._ids, rest]).astype(np.int32)
        # A template writes the start token itself.
        return rendered, tokenizer.encode(rendered, add_special=not templated, parse_special=templated)

    def _answer(
        self, ids: I32, params: SamplingParams, drafter: str | None, on_delta: Callable[[Delta], None],
        stopped: Callable[[], bool], watched: bool,
    ) -> Result:  # fmt: skip
        prepared = self._engine.prepare(ids.tolist(), params, drafter=drafter)
        request, row = self._engine.submit(prepared), prepared.sequences[0]

        def step() -> list[Delta]:
            return self._engine.cancel(request) if stopped() else self._engine.step()

        known = len(self._ids) if np.array_equal(ids[: len(self._ids)], self._ids) else 0  # whose KV is there
        unread = len(ids) - known
        long = unread > self._engine.options.prefill_chunk  # more than one step
        try:
            deltas: list[Delta] = []
            with progress("reading", unread, speed=True, shown=watched and long) as advance:
                read = 0
                advance(0)  # the first step may take a while
                while not deltas:
                    deltas, before = step(), read
                    read = max(row.cached - row.stats.reused_tokens, 0)
                    advance(read - before, read - before)
            while True:
                for delta in deltas:
                    on_delta(delta)
                    if delta.result is not None:
                        return delta.result
                deltas = step()
        finally:
            self._engine.cancel(request)


def _spoken(result: Result) -> I32:
    """The answer's ids without the stop token: the template writes that itself, when the next turn is rendered."""
    ids = result.token_ids
    if result.finish_reason == "stop" and isinstance(result.stopped_by, int):
        ids = ids[:-1]
    return np.array(ids, np.int32)
