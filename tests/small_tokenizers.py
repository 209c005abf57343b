"""Small tokenizers with real code behind them: byte-level BPE that has seen JSON, and one with given tokens."""

from __future__ import annotations

from functools import cache

from outpace.models.text.tokenizer import Tokenizer

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
