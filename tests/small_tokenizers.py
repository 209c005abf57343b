"""Small tokenizers with real code behind them, and random texts that try them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from outpace.text.tokenizer import Tokenizer

END, MARK = "<|end|>", "<|mark|>"  # tokens 0 and 1


@cache
def byte_level() -> Tokenizer:
    """450 tokens, trained on some JSON and reasoning."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=[END, MARK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (
        '{"name": "Ada", "age": 36, "tags": ["red", "blue"], "ok": true, "none": null} I think </think>\n {"a": -1.5}'
    )
    fast.train_from_iterator([text] * 4, trainer)
    return Tokenizer(fast, eos_ids=[0])


@cache
def of_pieces(pieces: tuple[str, ...], special: tuple[str, ...] = (END,)) -> Tokenizer:
    """Byte-level, with these tokens and no merges: ``special`` come first, and ``pieces`` after them."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    fast = Fast(models.BPE({piece: i for i, piece in enumerate((*special, *pieces))}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(fast, eos_ids=[0])


_FRAGMENTS = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u2581", "\x7f", "hello", "Hello",
    " world", "the ", "under_score", "it's", "I'LL", "don't ", "def f(x):\n    return x", "1234567", "3.14", "1,000",
    "na\u00efve", "cafe\u0301", "\u65e5\u672c\u8a9e", "\u4e2d\u6587", "\u0639\u0631\u0628\u064a", "\u0401\u0436",
    "\ud55c\uad6d\uc5b4", "\u0e44\u0e17\u0e22", "\U0001f44d\U0001f3fd", "\U0001f468\u200d\U0001f467", "\U0001d518",
    "\ufb01", "\uff28\uff49", "\u2460", "\u0130", "<", ">", "|", "/", "[", "]", "{", "}", '"', "'", "...", "!?",
    "<s>", "</s>", "<unk>", "<0x41>", "<0x0A>", "<|im_start|>", "<|im_end|>", "[INST]", "a", "b", "e", "t", "Z",
)  # fmt: skip


def random_texts(count: int, seed: int, fragments: Sequence[str] = ()) -> list[str]:
    """Words, spaces, scripts, emoji and names of special tokens in disorder, some cut in the middle.

    ``fragments``: others to mix in, such as a vocabulary's special tokens.
    """
    chance = random.Random(seed)
    texts = ["", " ", "\n", *fragments]
    while len(texts) < count:
        parts = [
            chance.choice(fragments if fragments and chance.random() < 0.15 else _FRAGMENTS)
            for _ in range(chance.randint(1, 12))
        ]
        if chance.random() < 0.3:
            cut = chance.randrange(len(parts))
            parts[cut] = parts[cut][: chance.randint(0, len(parts[cut]))]
        texts.append("".join(parts))
    return texts[:count]
