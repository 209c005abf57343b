"""A Hugging Face folder's ``tokenizers.Tokenizer``: from tokenizer.json or, without transformers, from older files."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.files import cache_dir
from outpace.common.installing import install
from outpace.errors import ModelError
from outpace.text import byte_level, sentencepiece

_ENDS = ("bos", "eos")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FACTS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

# Classes whose ids are those of the files, and which cut texts as the files, or one of these rules, say.
_SENTENCEPIECE = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
_BYTE_LEVEL = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_CLASSES = {"gpt2": "GPT2Tokenizer", "opt": "GPT2Tokenizer", "gpt_bigcode": "GPT2Tokenizer"}
_CLASSES |= dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer")
_CLASSES |= dict.fromkeys(("llama", "mistral", "mixtral", "phi3"), "LlamaTokenizer")
_CLASSES |= dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer")
_SPECIAL = {  # what a class adds where the configuration names nothing else
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}

_FILES = ("tekken.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tiktoken.model")

# The first special tokens of a tekken.json that lists none, as mistral-common has them.
_TEKKEN = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
_TEKKEN += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"]
_TEKKEN += ["[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]


def load(folder: Path, *, trust_remote_code: bool) -> tuple[Any, dict[str, str]]:
    """The tokenizer, and its special tokens by name ("bos_token", ...).

    Texts begin and end as transformers has it: tokenizer.json says so itself, ``add_bos_token`` and ``add_eos_token``
    of tokenizer_config.json speak for other files. Raises ModelError.
    """
    from tokenizers import Tokenizer

    config = read_json(folder / "tokenizer_config.json")
    if not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens", None)
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")
    path = folder / "tokenizer.json"
    legacy = read_json(folder / "added_tokens.json")
    try:
        if path.is_file():
            fast = Tokenizer.from_file(str(path))
            _add_tokens(fast, config, legacy)
        elif (found := _converted(folder, config)) is not None:
            fast = found
            _add_tokens(fast, config, legacy, normalized=False)
            ends = [_texts(config).get(f"{end}_token") if config.get(f"add_{end}_token") else None for end in _ENDS]
            if any(ends):
                add_ends(fast, *ends)
        else:
            fast = _by_transformers(folder, config, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{path if path.is_file() else folder} cannot be read ({error}): download it again") from error
    return fast, _texts(config)


def _converted(folder: Path, config: dict[str, Any]) -> Any:
    """For folders without tokenizer.json; None where transformers has to convert. ``config`` gets the special tokens
    that the files or the class name."""
    model = str(read_json(folder / "config.json").get("model_type") or "")
    kind = str(config.get("tokenizer_class") or _CLASSES.get(model, "")).removesuffix("Fast")
    tekken, pieces = folder / "tekken.json", folder / "tokenizer.model"
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if tekken.is_file():
        return _tekken(tekken, config)
    if kind == "CodeLlamaTokenizer":
        config |= {"legacy": False, "add_bos_token": config.get("add_bos_token", True)}
    if pieces.is_file() and (kind in _SENTENCEPIECE or not (kind or model)):
        # Of a class of transformers as there, where false is the default; else as sentencepiece reads the file.
        found = sentencepiece.read(pieces, legacy=bool(config.get("legacy", not (kind or model))))
        if found is not None:
            return _sentencepiece(found, pieces, config)
    if kind in _BYTE_LEVEL and vocabulary.is_file() and merges.is_file():
        return _byte_level(kind, vocabulary, merges, config)
    files = [name for name in _FILES if (folder / name).is_file()]
    if not files:
        raise ModelError(f"{folder} has no tokenizer that can be read ({', '.join(_FILES)}): add its tokenizer.json")
    if find_spec("transformers") is None:
        needed = install("outpace[torch]", "sentencepiece", "protobuf", "tiktoken")
        raise ModelError(
            f"{folder} has no tokenizer.json, and its {' and '.join(files)} ({kind or model or 'of an unknown kind'}) "
            f"need transformers: {needed}, or add its tokenizer.json"
        )
    return None


def _sentencepiece(pieces: sentencepiece.Pieces, path: Path, config: dict[str, Any]) -> Any:
    for i, value in (config.get("added_tokens_decoder") or {}).items():  # names for what was kept free
        text = _token(value).content
        if int(i) < len(pieces.texts) and text not in pieces.texts:
            pieces.texts[int(i)] = text
    fast = sentencepiece.build(pieces, str(path), cache_dir())
    sentencepiece.add_tokens(fast, pieces.texts, np.where(pieces.types == sentencepiece.USER_DEFINED, 0, pieces.types))
    for name, i in pieces.ends.items():
        config.setdefault(name, pieces.texts[i])
    return fast


def _byte_level(kind: str, vocabulary: Path, merges: Path, config: dict[str, Any]) -> Any:
    from tokenizers import normalizers

    for name, text in _SPECIAL[kind].items():
        config.setdefault(name, text)
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [(left, right) for left, _, right in (line.rstrip("\r").partition(" ") for line in lines) if right]
    pairs = pairs[1:] if pairs and pairs[0][0] == "#version:" else pairs
    rule, prefix = byte_level.RULES[_BYTE_LEVEL[kind]], bool(config.get("add_prefix_space", False))
    fast = byte_level.build(str(vocabulary), read_json(vocabulary), pairs, rule, prefix=prefix)
    if kind == "Qwen2Tokenizer":
        fast.normalizer = normalizers.NFC()
    return fast


def _tekken(path: Path, config: dict[str, Any]) -> Any:
    """Mistral's format: bytes by rank, after a number of special tokens. Texts begin with the start token."""
    from tokenizers import AddedToken

    try:
        content = read_json(path)
        facts = content["config"]
        count = facts["default_num_special_tokens"]
        listed = {entry["rank"]: entry["token_str"] for entry in content.get("special_tokens") or []}
        special = [listed.get(i, f"<SPECIAL_{i}>") for i in range(count)]
        if not listed:
            special[: len(_TEKKEN)] = _TEKKEN
        letters = {byte: letter for letter, byte in byte_level.alphabet().items()}
        ranked = content["vocab"][: facts["default_vocab_size"] - count]
        words = ["".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"])) for entry in ranked]
        pattern = facts["pattern"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again") from error
    texts, types = [*special, *words], np.full(len(special) + len(words), sentencepiece.NORMAL, np.int32)
    types[: len(special)] = sentencepiece.CONTROL
    pairs = sentencepiece.merges(words, -np.arange(len(words), dtype=np.float64), types[len(special) :], cache_dir())
    fast = byte_level.build(str(path), {text: i for i, text in enumerate(texts)}, pairs, (pattern,), whole=True)
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")):
        config.setdefault(name, text)
    config.setdefault("add_bos_token", True)
    return fast


def _by_transformers(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{folder} has no tokenizer that can be read ({reason}): add its tokenizer.json") from error
    fast = getattr(slow, "backend_tokenizer", None)
    if fast is None:
        raise ModelError(
            f"{folder} has only a {type(slow).__name__}, which cannot be converted: add its tokenizer.json"
        )
    config |= {name: str(text) for name, text in slow.special_tokens_map.items() if isinstance(text, str)}
    return fast


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is none. Raises ModelError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again") from error
    return value if isinstance(value, dict) else {}


def add_ends(fast: Any, bos: str | None, eos: str | None) -> None:
    """Have texts begin with the token ``bos`` and end with ``eos``, where they are not None, and with no other."""
    from tokenizers import processors

    ids = [(text, fast.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text is not None]
    before, after = ([] if text is None else [text] for text in (bos, eos))
    fast.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; they are stored as text or as an object with ``content``."""
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: text for key, text in contents.items() if key.endswith("_token") and isinstance(text, str)}


def _add_tokens(fast: Any, config: Mapping[str, Any], legacy: Mapping[str, int], **facts: bool) -> None:
    """Add the tokens that stand beside the vocabulary, in transformers' order: those listed by id, the named ones, the
    other special ones. ``legacy``: ids by token, read where ``config`` lists none; ``facts`` that hold for all listed:
    not ``normalized`` ones are found in the text itself, whatever a normalizer puts before it."""
    extra = config.get("extra_special_tokens") or []
    named = {key: config[key] for key in _texts(config)} | (extra if isinstance(extra, dict) else {})
    values = {_token(named[key]).content: named[key] for key in [*_NAMED, *named] if key in named}
    unnamed = list(extra) if isinstance(extra, list) else []
    if "added_tokens_decoder" in config:
        by_id = {int(i): _token(value) for i, value in config["added_tokens_decoder"].items()}
    else:
        marked = values.keys() | {_token(value).content for value in unnamed}
        by_id = {i: _token(text, special=text in marked, normalized=text not in marked) for text, i in legacy.items()}
    listed = [by_id[i] for i in sorted(by_id)]
    fast.add_tokens([_token(t, special=t.special or t.content in values, **facts) for t in listed])
    known = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    fast.add_special_tokens([_token(known.get(text, value), special=True) for text, value in values.items()])
    if not extra:  # those of special_tokens_map.json
        unnamed += config.get("additional_special_tokens") or []
    others = [_token(value, special=True) for value in unnamed]
    fast.add_special_tokens([token for token in others if token.content not in known.keys() | values.keys()])


def _token(value: Any, **facts: Any) -> Any:
    """An added token from a text, the object that stores one, or another; ``facts`` of it that differ."""
    from tokenizers import AddedToken

    stored = {"content": value} if isinstance(value, str) else value
    if isinstance(stored, AddedToken):
        stored = stored.__getstate__()
    return AddedToken(**{key: stored[key] for key in _TOKEN_FACTS if key in stored} | facts)
