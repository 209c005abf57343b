"""Log-probabilities as OpenAI's clients read them: the target's own, before any rule or temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.exact.sampling import TokenLogprob
from outpace.server.served import Served


def of_chat(entries: Sequence[TokenLogprob], top: int, model: Served) -> dict[str, Any]:
    """``logprobs`` of a chat's choice, with the ``top`` likeliest alternatives a token."""
    content = [
        {
            **_told(entry.token, entry.text, entry.logprob, model),
            "top_logprobs": [_told(its.token, its.text, its.logprob, model) for its in entry.top[:top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _told(token: int, text: str | None, logprob: float, model: Served) -> dict[str, Any]:
    return {"token": text or "", "logprob": logprob, "bytes": model.bytes_of(token)}


class Listed:
    """``logprobs`` of completions, which count characters: ``offset`` is where the next token's text begins."""

    def __init__(self, top: int, model: Served, offset: int = 0) -> None:
        self._top, self._model, self._offset = top, model, offset

    def of(self, entries: Sequence[TokenLogprob | None], first: int | None = None) -> dict[str, Any]:
        """The next tokens. None stands for ``first``, the prompt's first token, which follows nothing."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token = entry.token if entry is not None else first
            assert token is not None
            text = self._model.text_of(token)
            tokens.append(text)
            logprobs.append(None if entry is None else entry.logprob)
            offsets.append(self._offset)
            self._offset += 0 if token in self._model.tokenizer.special_ids else len(text)
            if entry is None or not self._top:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for its in entry.top[: self._top]:
                top.setdefault(its.text or "", its.logprob)  # tokens may look alike: the likelier one stays
            top.setdefault(text, entry.logprob)
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
