"""Random texts and chats through vocabularies of every family: ids are those of sentencepiece, tokenizers, transformers
and mistral-common, from folders and from GGUF files."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece

from outpace.errors import ModelError
from outpace.text import byte_level as byte_level_rules
from outpace.text.byte_level import RULES
from outpace.text.tokenizer import Tokenizer
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
    trainer: Any = sentencepiece.SentencePieceTrainer
    trainer.train(
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
    model, ours = processor(kind), Tokenizer.from_folder(as_folder(tmp_path / "m", kind, legacy=True))
    for text in random_texts(150, 1, [*CONTROL, *USER]):
        if kind == "unigram-bytes" and "<0x" in text:
            continue  # tokenizers has no way to tell the text from the byte's piece
        plain = model.encode(text)
        assert ours.encode(text).tolist() == plain, text
        assert ours.encode(text, parse_special=True).tolist() == in_parts(
            model, text, [*CONTROL, "<s>", "</s>", "<unk>"]
        )
        if model.unk_id() not in plain:
            assert ours.decode(plain) == model.decode(plain), text
    assert [ours.token(i) for i in range(ours.vocab_size)] == [model.id_to_piece(i) for i in range(ours.vocab_size)]
    assert (ours.bos_id, ours.eos_ids) == (1, (2,))


@pytest.mark.parametrize("listed", [True, False])
def test_tokens_beside_a_sentencepiece_model_are_found_in_the_text_itself(tmp_path: Path, listed: bool) -> None:
    """As in transformers 5.24, though they are marked as found in normalized text, which has a space before it."""
    model = processor("llama")
    first = model.get_piece_size()
    config = {"added_tokens_decoder": {f"{first}": token("<new>", normalized=True, special=False)}} if listed else {}
    path = as_folder(tmp_path / "m", "llama", legacy=True, **config)
    if not listed:
        (path / "added_tokens.json").write_text(json.dumps({"<new>": first}))
    ours = Tokenizer.from_folder(path)
    for text in random_texts(50, 17, ["<new>"]):
        parts = [model.encode(part) for part in text.split("<new>")]
        assert ours.encode(text).tolist() == [i for part in parts for i in [*part, first]][:-1], text


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
    for text in random_texts(20, 16, CONTROL):
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": f" {text}"}]
        turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat)
        rendered = f"<s>{turns}<|im_start|>assistant\n"
        assert ours.encode_chat(chat).tolist() == in_parts(model, rendered, [*user, *CONTROL, "<s>", "</s>", "<unk>"])


@pytest.mark.parametrize("kind", [1, 4, None])
def test_a_gguf_s_control_tokens_are_known_by_name_too(kind: int | None) -> None:
    """As llama.cpp has it for the ends of turns and of fill-in-the-middle; whatever type the file gives them."""
    file = as_gguf(processor("llama"), True)
    end = file.metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    file.metadata["tokenizer.ggml.token_type"][end] = kind or 1
    if kind is None:
        del file.metadata["tokenizer.ggml.token_type"]
    ours = Tokenizer.from_gguf(file)
    assert end in ours.special_ids
    assert end in ours.encode("a<|im_end|>", parse_special=True)
    assert end not in ours.encode("a<|im_end|>")


def test_phi_3_tokens_take_the_white_space_after_them() -> None:
    """llama.cpp knows such models by their names: all marked tokens but three, and "</s>"."""
    model = processor("llama-user")
    ours = Tokenizer.from_gguf(as_gguf(model, True, **{"general.name": "Phi-3 mini"}))
    strips = [*CONTROL, *USER, "</s>"]
    pattern = re.compile("(" + "|".join(map(re.escape, strips)) + r")\s+")
    for text in [*random_texts(100, 3, [*strips, "<|im_end|>\n", "</s>  \n"]), "<s> a", "<unk> a"]:
        parsed = ours.encode(text, add_special=False, parse_special=True).tolist()
        assert parsed == in_parts(model, pattern.sub(r"\1", text), [*strips, "<s>", "<unk>"]), text


def test_mistral_s_own_vocabulary(tmp_path: Path) -> None:
    content = (files("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3").read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    (tmp_path / "tokenizer.model").write_bytes(content)
    control = [model.id_to_piece(i) for i in range(3, 10)]
    for ours in (Tokenizer.from_folder(tmp_path), Tokenizer.from_gguf(as_gguf(model, True))):
        for text in random_texts(100, 4, control):
            assert ours.encode(text).tolist() in ([1, *model.encode(text)], model.encode(text)), text
            parsed = ours.encode(text, add_special=False, parse_special=True).tolist()
            assert parsed == in_parts(model, text, [*control, "<s>", "</s>", "<unk>"]), text


def byte_level(path: Path, config: dict[str, Any], ends: bool = False, words: int = 500) -> Path:
    """A folder with a tokenizer.json, trained here, which puts a start token before a text if ``ends``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(random_texts(500, 8), trainer)
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "<end>")])
    fast.add_tokens([AddedToken("<plain>", special=False, normalized=False)])
    if ends:
        fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", words)])
    path.mkdir(parents=True)
    fast.save(str(path / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(facts | config))
    return path


def word_piece(path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    fast = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer()
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", *CONTROL], show_progress=False)
    fast.train_from_iterator(random_texts(500, 9), trainer)
    path.mkdir(parents=True)
    fast.save(str(path / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    return path


def vocab_and_merges(path: Path, kind: str, **config: Any) -> Path:
    """The same vocabulary as vocab.json and merges.txt."""
    byte_level(path, {})
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]) + "\n")
    facts = {"tokenizer_class": kind, "chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "<end>"}
    (path / "tokenizer_config.json").write_text(json.dumps(facts | config))
    return path


def token(content: str, **facts: Any) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **facts}


FIRST = 503  # the first id that tokenizer.json leaves free
ADDED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {
    # tokenizer_config.json, special_tokens_map.json, added_tokens.json
    "decoder": ({"added_tokens_decoder": {
        f"{FIRST}": token("<a>", rstrip=True), f"{FIRST + 1}": token("<b>", special=False, normalized=True),
    }}, {}, {}),
    "changed": ({"added_tokens_decoder": {"502": token("<plain>", lstrip=True)}}, {}, {}),
    "list": ({"extra_special_tokens": ["<a>", "<plain>", "<b>"]}, {}, {}),
    "dict": ({"extra_special_tokens": {"image_token": "<a>", "other_token": "<plain>"}}, {}, {}),
    "additional": ({"additional_special_tokens": ["<a>", "<end>"]}, {}, {}),
    "both": ({"additional_special_tokens": ["<a>"], "extra_special_tokens": ["<b>"]}, {}, {}),
    "map": ({}, {"additional_special_tokens": ["<a>", "<b>"], "bos_token": "<n>"}, {}),
    "map unread": ({"added_tokens_decoder": {f"{FIRST}": token("<a>")}}, {"bos_token": "<n>"}, {"<b>": 504}),
    "added": ({"eos_token": "<n>"}, {}, {"<b>": FIRST, "<a>": FIRST + 1, "<n>": FIRST + 2}),
    "named": ({"bos_token": "<n>", "image_token": "<a>", "pad_token": {"__type": "AddedToken"} | token("<b>")}, {}, {}),
    "plain made special": ({"bos_token": "<plain>", "mask_token": "he"}, {}, {}),
}  # fmt: skip
NAMES = ["<a>", "<b>", "<n>", "<plain>", "<s>", "<end>", " <a> ", " <plain>\n", "he"]


@pytest.mark.parametrize("case", ADDED)
def test_tokens_that_stand_beside_tokenizer_json_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    config, named, legacy = ADDED[case]
    path = byte_level(tmp_path / "m", config)
    for name, content in (("special_tokens_map.json", named), ("added_tokens.json", legacy)):
        if content:
            (path / name).write_text(json.dumps(content))
    theirs, ours = transformers_own(path), Tokenizer.from_folder(path)
    added = theirs.added_tokens_decoder
    assert {i: repr(t) for i, t in ours._fast.get_added_tokens_decoder().items()} == {i: repr(added[i]) for i in added}
    for text in random_texts(30, 11, NAMES):
        ids = theirs.encode(text)
        assert ours.encode(text, parse_special=True).tolist() == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), text


def transformers_own(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


FLAGS = [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda path, **config: byte_level(path, config),
        lambda path, **config: byte_level(path, config, ends=True),
        lambda path, **config: vocab_and_merges(path, "GPT2Tokenizer", **config),
        lambda path, **config: as_folder(path, "llama", **config, unk_token="<unk>"),
        lambda path, **config: as_folder(path, "gemma", **config, tokenizer_class="GemmaTokenizer", unk_token="<unk>"),
        lambda path, **config: as_folder(path, "llama", **config, tokenizer_class="CodeLlamaTokenizer", legacy=True),
    ],
    ids=["tokenizer.json", "post-processor", "vocab.json", "Llama", "Gemma", "CodeLlama"],
)
def test_texts_begin_and_end_as_transformers_has_them(
    tmp_path: Path, make: Callable[..., Path], flags: dict[str, bool]
) -> None:
    path = make(tmp_path / "m", bos_token="<s>", eos_token="<end>", **flags)
    theirs, ours = transformers_own(path), Tokenizer.from_folder(path)
    saved = tmp_path / "saved"
    saved.mkdir()
    ours.save(saved)
    for text in ("hello world", "", "<s>hello"):
        expected = theirs.encode(text)
        assert ours.encode(text, parse_special=True).tolist() == expected
        assert Tokenizer.from_folder(saved).encode(text, parse_special=True).tolist() == expected
        assert ours.encode(text, add_special=False, parse_special=True).tolist() == theirs.encode(
            text, add_special_tokens=False
        )


@pytest.mark.parametrize(
    "kind",
    ["GPT2Tokenizer", "Qwen2Tokenizer", "byte-level", "WordPiece", "llama-first", "llama-unsaid", "llama-null"],
)
def test_folders_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    """Texts and chats. ``llama-first``: with ``legacy: false``, which writes a space before the whole text alone;
    without that key, or with null, it is the same."""
    make: dict[str, Callable[[], Path]] = {
        "byte-level": lambda: byte_level(tmp_path / "m", {"bos_token": "<s>", "extra_special_tokens": CONTROL}),
        "WordPiece": lambda: word_piece(tmp_path / "m"),
        "llama-first": lambda: as_folder(tmp_path / "m", "llama", legacy=False, unk_token="<unk>"),
        "llama-unsaid": lambda: as_folder(tmp_path / "m", "llama", unk_token="<unk>"),
        "llama-null": lambda: as_folder(tmp_path / "m", "llama", legacy=None, unk_token="<unk>"),
    }
    path = make.get(kind, lambda: vocab_and_merges(tmp_path / "m", kind, extra_special_tokens=CONTROL))()
    theirs, ours = transformers_own(path), Tokenizer.from_folder(path)
    for text in random_texts(100, 12, CONTROL):
        ids = theirs.encode(text)
        assert ours.encode(text, parse_special=True).tolist() == ids, text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False), text
    texts = iter(text.replace("<", "(").replace("[", "(") for text in random_texts(100, 13))
    for text in texts:
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": next(texts)}] * 2
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(chat).tolist() == expected


def test_a_byte_level_gguf_is_read_as_tokenizers_reads_its_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast

    path = byte_level(tmp_path / "m", {})
    theirs = Fast.from_file(str(path / "tokenizer.json"))
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    tokens = [theirs.id_to_token(i) for i in range(theirs.get_vocab_size())]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": np.array([1] * 500 + [3, 3, 4], np.int32),
    }
    ours = Tokenizer.from_gguf(opened(metadata))
    for text in random_texts(200, 14, ["<s>", "<end>", "<plain>"]):
        assert ours.encode(text, parse_special=True).tolist() == theirs.encode(text).ids, text


@pytest.mark.parametrize("name", sorted({patterns: name for name, patterns in RULES.items()}.values()))
def test_every_rule_cuts_a_text_as_another_engine_of_expressions_does(name: str) -> None:
    import regex

    letters = byte_level_rules.alphabet()
    fast = byte_level_rules.build("model", dict(letters), [], RULES[name])
    patterns = [regex.compile(_in_python(pattern), regex.V1 | regex.M) for pattern in RULES[name]]
    more = ["1234567 12 x1234", "  a\r\n\r\n b\t\t\tc   ", "don't 'LL I'VE", "한국어 漢字かなカナ ไทย", "ÀÉsŁaw 𝒜𝓑 ǅ"]
    for text in [*random_texts(150, 21), *more, "<sentinel:12>IMGIMGABZ"]:
        pieces = [text]
        for pattern in patterns:
            pieces = [part for piece in pieces for part in _cut(pattern, piece)]
        cuts = fast.pre_tokenizer.pre_tokenize_str(text)
        assert [bytes(letters[c] for c in piece) for piece, _ in cuts] == [piece.encode() for piece in pieces], text


def _in_python(pattern: str) -> str:
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda match: f"\\U{int(match[1], 16):08X}", pattern)


def _cut(pattern: Any, text: str) -> list[str]:
    """Matches and what stands between them, in order."""
    parts, at = list[str](), 0
    for match in pattern.finditer(text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [part for part in (*parts, text[at:]) if part]


def test_a_gguf_of_gemma_4_is_read_as_transformers_reads_its_vocabulary() -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = Fast(models.BPE(unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "\u2581")
    fast.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    fast.train_from_iterator(
        (text for text in random_texts(800, 17) if "<" not in text),
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, limit_alphabet=60, show_progress=False),
    )
    model = json.loads(fast.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    theirs = GemmaTokenizer(vocab=model["vocab"], merges=merges)
    metadata = {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": sorted(model["vocab"], key=model["vocab"].__getitem__),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 2] + [6] * 256 + [1] * (len(model["vocab"]) - 260), np.int32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    ours = Tokenizer.from_gguf(opened(metadata))
    for text in (text.replace("<", "(") for text in random_texts(300, 18)):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == [2, *ids], text
        assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize("listed", [True, False])
def test_tekken_is_read_as_mistral_common_reads_it(tmp_path: Path, listed: bool) -> None:
    """The first 5,000 of Mistral's own tokens. ``listed``: whether the file names its special tokens."""
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    content = json.loads((files("mistral_common") / "data" / "tekken_240718.json").read_text())
    content["vocab"] = content["vocab"][:6000]
    content["config"] |= {"default_vocab_size": 5100, "default_num_special_tokens": 100, "num_vocab_tokens": 6000}
    if listed:
        names = ["<unk>", "<s>", "</s>", "[INST]", "<pad>", "[END]"]
        content["special_tokens"] = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    theirs, ours = Tekkenizer.from_file(tmp_path / "tekken.json"), Tokenizer.from_folder(tmp_path)
    for text in random_texts(150, 15, ["[INST]", "<pad>", "[END]"]):
        ids = theirs.encode(text, bos=True, eos=False)
        assert ours.encode(text).tolist() == ids, text
        assert ours.decode(ids) == theirs.decode(ids, SpecialTokenPolicy.IGNORE), text
    control = [theirs.id_to_piece(i) for i in range(theirs.num_special_tokens)]
    assert [ours.token(i) for i in range(theirs.num_special_tokens)] == control
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (theirs.n_words, theirs.bos_id, (theirs.eos_id,))


@pytest.mark.parametrize("kind", ["llama", "GPT2Tokenizer", "vocab.txt", "tiktoken"])
def test_without_transformers_folders_are_converted_or_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    path = tmp_path / "m"
    if kind == "llama":
        ours = Tokenizer.from_folder(as_folder(path, kind))
        assert ours.decode(ours.encode("hello world")) == "hello world"
    elif kind == "GPT2Tokenizer":
        ours = Tokenizer.from_folder(vocab_and_merges(path, kind))
        assert ours.decode(ours.encode("hello world")) == "hello world"
    else:
        path.mkdir()
        name = "vocab.txt" if kind == "vocab.txt" else "tokenizer.model"
        (path / name).write_text("aGVsbG8= 0\nd29ybGQ= 1\n")
        with pytest.raises(ModelError, match=rf"its {name} .*need transformers: .*outpace.*torch.* sentencepiece"):
            Tokenizer.from_folder(path)


def test_damaged_vocabularies_are_refused_in_a_line(tmp_path: Path) -> None:
    path = as_folder(tmp_path / "m", "llama", added_tokens_decoder={"x": {}})
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_folder(path)
    (path / "tokenizer_config.json").unlink()
    for end in (1, 5, 100, 4000):
        (path / "tokenizer.model").write_bytes(trained("llama")[:end])
        with pytest.raises(ModelError, match=r"tokenizer.model cannot be read \(.*\): download it again$"):
            Tokenizer.from_folder(path)
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(ModelError, match=r"tekken.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
