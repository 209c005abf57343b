"""Random texts and chats through vocabularies of every family: ids are those of sentencepiece, tokenizers, transformers
and mistral-common, from folders and from GGUF files."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece

from outpace.errors import ModelError
from outpace.models.text.tokenizer import Tokenizer
from tests.small_tokenizers import random_texts

CONTROL, USER = ["<|im_start|>", "<|im_end|>", "[INST]"], ["<tool>", "<tool_call>", "==", "a_b"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BPE = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
LLAMA = BPE | {"remove_extra_whitespaces": False}  # as Llama 2, Mistral and TinyLlama are
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-user": LLAMA | {"user_defined_symbols": USER},
    "gemma": LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": USER},
    "squeezed": BPE | {"user_defined_symbols": USER},
    "no-bytes": {"model_type": "bpe"},  # NFKC, too
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
}


@cache
def trained(kind: str) -> bytes:
    """A ``tokenizer.model`` of about 600 pieces."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(random_texts(1500, 7)),
        model_writer=content,
        **{"vocab_size": 700, "hard_vocab_limit": False, "character_coverage": 0.99, "control_symbols": CONTROL},
        **KINDS[kind],
        minloglevel=2,
        num_threads=1,
    )
    return content.getvalue()


def processor(kind: str) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=trained(kind))


def in_parts(processor: Any, text: str, marks: list[str]) -> list[int]:
    """What sentencepiece has for each stretch between ``marks``, which stand for their own ids."""
    pattern = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    ids: list[int] = []
    for part in re.split(f"({pattern})", text):
        ids += [processor.piece_to_id(part)] if part in marks else processor.encode(part)
    return ids


def as_folder(path: Path, kind: str, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "tokenizer.model").write_bytes(trained(kind))
    facts = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(facts | config))
    return path


def as_gguf(model: Any, prefix: bool, **more: Any) -> Any:
    """What a GGUF file of ``model`` holds, a sentencepiece processor; user-defined spaces are stored as such."""
    count = range(model.get_piece_size())
    kinds = [
        (model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6),
    ]  # fmt: skip
    types = [next((number for is_kind, number in kinds if is_kind(i)), 1) for i in count]
    user = {i for i in count if model.id_to_piece(i) in USER}
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in count],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in count], np.float32),
        "tokenizer.ggml.token_type": np.array([4 if i in user else types[i] for i in count], np.int32),
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.chat_template": TEMPLATE,
    }
    return opened(metadata | more)


def opened(metadata: dict[str, Any]) -> Any:
    return SimpleNamespace(
        path=Path("model.gguf"),
        metadata=metadata,
        architecture=metadata["general.architecture"],
        text=lambda key, default: metadata.get(key, default),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentencepiece_folder_is_read_as_sentencepiece_reads_it(tmp_path: Path, kind: str) -> None:
    model, ours = processor(kind), Tokenizer.from_folder(as_folder(tmp_path / "m", kind))
    for text in random_texts(150, 1, [*CONTROL, *USER]):
        if kind == "unigram-bytes" and "<0x" in text:
            continue  # tokenizers has no way to tell the text from the byte's piece
        plain = model.encode(text)
        assert ours.encode(text).tolist() == plain, text
        assert ours.encode(text, parse_special=True).tolist() == in_parts(
            model, text, [*CONTROL, "<s>", "</s>", "<unk>"]
        )
        if model.unk_id() not in plain:
            assert ours.decode(plain).lstrip(" ") == model.decode(plain).lstrip(" "), text
    assert [ours.token(i) for i in range(ours.vocab_size)] == [model.id_to_piece(i) for i in range(ours.vocab_size)]
    assert (ours.bos_id, ours.eos_ids) == (1, (2,))


@pytest.mark.parametrize("kind", ["llama", "llama-user", "gemma"])
def test_a_sentencepiece_gguf_is_read_as_llama_cpp_reads_it(kind: str) -> None:
    """Its rule: user-defined tokens, and special ones where they count, are cut out; the prefix follows each."""
    model = processor(kind)
    ours = Tokenizer.from_gguf(as_gguf(model, kind != "gemma"))
    user = USER if kind != "llama" else []
    for text in random_texts(150, 2, [*CONTROL, *USER]):
        assert ours.encode(text).tolist() == [1, *in_parts(model, text, user or ["\0"])], text
        parsed = ours.encode(text, add_special=False, parse_special=True).tolist()
        assert parsed == in_parts(model, text, [*user, *CONTROL, "<s>", "</s>", "<unk>"]), text
    assert ours.special_ids == {model.piece_to_id(text) for text in [*CONTROL, "<s>", "</s>", "<unk>"]}
