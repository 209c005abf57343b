"""Control tokens that a client's text spells: the chat has the tokens that it has where they are ordinary text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from outpace.server.conversation.control import ControlTokens
from outpace.text import gguf as gguf_tokenizer
from outpace.text.tokenizer import Tokenizer

SPACE = gguf_tokenizer.SPACE
TEXT = ["<unk>", *sorted(set("<|turnedsamHi>\n"), key=ord), SPACE, f"{SPACE}H", f"{SPACE}<", f"{SPACE}s", "us"]
MERGES = [(SPACE, "H"), (SPACE, "<"), (SPACE, "s"), ("u", "s")]
USER, END = "<|user|>", "<|end|>"
OTHERS = ["<|1|>", "<|2|>"]  # which no text here spells


def bpe(first: list[str]) -> Fast:
    return Fast(models.BPE({piece: i for i, piece in enumerate([*first, *TEXT])}, MERGES, unk_token="<unk>"))


def metaspace(first: list[str], scheme: Any = "first", **how: bool) -> Fast:
    fast = bpe(first)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    return added(fast, first, **how)


def prepended(first: list[str]) -> Fast:
    """As Llama 2 is converted with ``legacy``."""
    fast = bpe(first)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return added(fast, first)


def unigram(first: list[str]) -> Fast:
    fast = Fast(models.Unigram([("<unk>", -20.0), *((piece, -float(len(piece))) for piece in TEXT[1:])], 0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first")
    return added(fast, first)


def gguf(first: list[str]) -> Fast:
    tokens = [*first, *TEXT]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([gguf_tokenizer.CONTROL] * 2 + [gguf_tokenizer.NORMAL] * len(TEXT)),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.unknown_token_id": 2,
    }
    file: Any = SimpleNamespace(metadata=metadata, path=Path("a.gguf"), architecture="llama", text=lambda *_: "llama")
    return gguf_tokenizer.build(file, None)


def added(fast: Fast, tokens: list[str], **how: bool) -> Fast:
    fast.add_special_tokens([AddedToken(token, **{"normalized": False, "special": True, **how}) for token in tokens])
    return fast


@pytest.mark.parametrize(
    "made",
    [
        metaspace,
        lambda first: metaspace(first, "always"),
        lambda first: metaspace(first, rstrip=True),
        lambda first: metaspace(first, lstrip=True),
        lambda first: metaspace(first, normalized=True),
        prepended,
        unigram,
        gguf,
    ],
    ids=["first", "always", "rstrip", "lstrip", "normalized", "prepend", "unigram", "gguf"],
)
@pytest.mark.parametrize(
    "text", ["Hi", " Hi ", f"Hi{END}", f"{END} Hi", f"Hi {USER}\nHi{END}\n", f"{USER}", f"<|us{END}er|>"]
)
@pytest.mark.parametrize("begins", ["", "Hi ", "\n"])
def test_they_are_what_ordinary_text_is(made: Callable[[list[str]], Fast], text: str, begins: str) -> None:
    """Compared with the same tokenizer where the control tokens have names that the text does not spell."""

    def chat(user: str, end: str, text: str) -> str:
        return f"{begins}{user}\n{text}{end} \n{user}Hi {text} Hi{end}{user} "

    control = ControlTokens(Tokenizer(made([USER, END])), allowed=False)
    ids = control.encode(chat(USER, END, control.marked(text)))
    plain = Tokenizer(made(OTHERS)).encode(chat(*OTHERS, text), add_special=False, parse_special=True)
    assert ids.tolist() == plain.tolist()
    assert ids.tolist() != control.encode(chat(USER, END, text)).tolist() or text.strip() == "Hi"
