"""A text kept in another tokenizer's ids, whatever pieces it comes in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.common.arrays import I32
from outpace.drafters.forward.translated import KEEP, SyncedText
from outpace.models.load import resolve
from outpace.models.weights.gguf import GGUFFile
from outpace.text.token_bytes import TokenBytes
from outpace.text.tokenizer import Tokenizer
from tests.unit.test_token_bytes import llama
from tests.unit.test_tokenizer import TEXTS

PROSE = (
    "The sun rose over the quiet village, and Anna's café opened at 6:30; 1,024 croissants were sold. "
    "    for i in range(10):\n        print(i ** 2)\n\n"
    "日本語のテキストと中文字符，没有空格的一段话也要能切开。これは長い文章です。" * 4
)


def code(name: str) -> TokenBytes:
    if name == "llama":
        return TokenBytes(llama(prefix=True))
    return TokenBytes(Tokenizer.from_gguf(GGUFFile.open(resolve(name).path)))


@pytest.fixture(scope="module")
def codes() -> dict[str, TokenBytes]:
    return {name: code(name) for name in ("demo", "llama")}


def ends(tokens: I32, sizes: list[int]) -> list[int]:
    """Where the tokens are cut when they come in pieces of ``sizes``, in turn."""
    at = np.cumsum(np.resize(sizes, len(tokens) + 1))
    return [*at[at < len(tokens)].tolist(), len(tokens)]


@pytest.mark.parametrize("pair", [("demo", "llama"), ("llama", "demo"), ("demo", "demo"), ("llama", "llama")])
@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.sampled_from([*TEXTS, PROSE]), max_size=3), sizes=st.lists(st.integers(1, 99), min_size=1))
def test_ids_spell_what_was_read_and_say_what_has_changed(
    codes: dict[str, TokenBytes], pair: tuple[str, str], parts: list[str], sizes: list[int]
) -> None:
    source, own = codes[pair[0]], codes[pair[1]]
    tokens = source.tokenizer.encode("".join(parts))
    text = SyncedText(source, own)
    before = list(text.ids)
    for end in ends(tokens, sizes):
        same = text.read(tokens[:end])
        assert text.ids[:same] == before[:same]
        assert same == len(before) == len(text.ids) or text.ids[same : same + 1] != before[same : same + 1]
        before = list(text.ids)
        read = source.join(tokens[:end])
        assert read.endswith(text.fragment)
        complete = read.removesuffix(text.fragment).decode(errors="replace")
        assert "\ufffd" in complete or own.join(own.encode(complete, continued=False) or []) == own.join(text.ids)


def test_pieces_of_prose_have_the_ids_of_the_whole(codes: dict[str, TokenBytes]) -> None:
    demo = codes["demo"]
    tokens = codes["llama"].tokenizer.encode(PROSE, add_special=False)
    text = SyncedText(codes["llama"], demo)
    settled = 0
    for end in range(1, len(tokens) + 1):
        same = text.read(tokens[:end])
        assert same >= settled
        settled = max(settled, same - 4 * KEEP)
    assert text.ids == demo.tokenizer.encode(" " + PROSE).tolist()


def test_a_character_is_read_once_it_is_whole(codes: dict[str, TokenBytes]) -> None:
    demo, own = codes["demo"], codes["llama"]
    tokens = demo.tokenizer.encode("a👍b")
    text = SyncedText(demo, own)
    seen = []
    for end in range(1, len(tokens) + 1):
        text.read(tokens[:end])
        seen.append((len(own.join(text.ids)), text.fragment))
    assert seen[0] == (2, b"")
    assert [n for n, fragment in seen if fragment] == [2] * (len(seen) - 3)
    assert "👍".encode().startswith(seen[1][1])
    assert own.join(text.ids) == " a👍b".encode()


def test_special_tokens_add_nothing(codes: dict[str, TokenBytes]) -> None:
    demo = codes["demo"]
    tokens = demo.tokenizer.encode("<|im_start|>user\nHi<|im_end|>", parse_special=True)
    text = SyncedText(demo, demo)
    text.read(tokens)
    assert text.ids == demo.tokenizer.encode("user\nHi").tolist()


def test_the_oldest_ids_are_forgotten(codes: dict[str, TokenBytes]) -> None:
    own = codes["llama"]
    tokens = own.tokenizer.encode("a b " * 300)
    text = SyncedText(own, own)
    text.read(tokens)
    before = list(text.ids)
    assert text.shorten(10) is None  # the end may still change
    assert text.shorten(len(before)) is None
    assert text.shorten(len(before) + 5) is None
    assert text.ids == before
    assert text.shorten(300) == 1
    assert text.ids == [before[0], *before[-299:]]
    text.read(np.concatenate([tokens, own.tokenizer.encode(" a", add_special=False)]))
    assert own.join(text.ids) == own.join(before[-299:]) + b" a"
