"""Text to token ids and back, for GGUF files and Hugging Face folders alike, without importing transformers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from outpace.common.arrays import I32
from outpace.common.files import StrPath, cache_dir, write_bytes, write_json
from outpace.errors import Argument, ParameterError
from outpace.models.weights.gguf import GGUFFile
from outpace.text import byte_level, middle
from outpace.text import folder as folders
from outpace.text import gguf as gguf_tokenizer
from outpace.text.chat_template import DEFAULT, ChatTemplates
from outpace.text.folder import read_json

LONG = 4096  # characters, from which on a text is encoded without holding the interpreter: it takes milliseconds


class Tokenizer:
    """A model's tokenizer and its chat templates, by name ("default", "tool_use").

    ``eos_ids``: every id that ends a turn, the main one first. ``bos_id``: what a text starts with, if anything.
    ``special_ids``: ids that stand for no text; ``added_ids``: those, and others that stand for their own spelling.
    ``spelling``: how the rest is spelled: "bytes" (GPT-2's alphabet), "pieces" (SentencePiece's) or None (otherwise).
    ``middle``: tokens for filling in the middle, if it has them. ``other_template``: what was put in place of its own.
    ``texts``: what single tokens decode to, by whether special ones are skipped, kept for whoever decodes; None where a
    token's bytes depend on its neighbours. ``normalizes``: texts may become others before they become tokens.
    Methods may be called from several threads.
    """

    def __init__(
        self,
        fast: Any,  # tokenizers.Tokenizer
        *,
        name: str = "",
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        add_bos: bool | None = None,  # None: its post-processor says what texts begin and end with
        add_eos: bool = False,
        chat_templates: Mapping[str, str] | None = None,
        template_tokens: dict[str, str] | None = None,
        middle_ids: Mapping[str, int] | None = None,
    ) -> None:
        fast.no_padding()
        fast.no_truncation()
        if add_bos is not None:
            ends = (bos_id if add_bos else None, next(iter(eos_ids), None) if add_eos else None)
            folders.add_ends(fast, *(None if i is None else fast.id_to_token(i) for i in ends))
        self._fast = fast  # for which special tokens' names are those tokens, and for which they are plain text:
        self._plain = _twin(fast)  # a setting, not an argument, and changed by nobody once threads share it
        fast.encode_special_tokens, self._plain.encode_special_tokens = False, True
        self.name = name
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        added = fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self.spelling, independent = _spelling(fast)
        self.texts: dict[bool, dict[int, str]] | None = {False: {}, True: {}} if independent else None
        self.normalizes = fast.normalizer is not None
        self.middle = middle.found(fast.token_to_id, middle_ids or {})
        size = fast.get_vocab_size(with_added_tokens=True)
        self.vocab_size: int = max(size, max(added, default=-1) + 1)
        tokens = dict(template_tokens or {})
        if bos_id is not None:
            tokens.setdefault("bos_token", fast.id_to_token(bos_id) or "")
        if self.eos_ids:
            tokens.setdefault("eos_token", fast.id_to_token(self.eos_ids[0]) or "")
        self._template_tokens = tokens
        self.other_template: str | None = None
        self._templates = ChatTemplates(chat_templates, tokens) if chat_templates else None

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> Tokenizer:
        """Raises ModelError when the file's tokenizer cannot be built."""
        meta = gguf.metadata
        kind, pre = gguf.text("tokenizer.ggml.model", ""), gguf.text("tokenizer.ggml.pre", "default")
        bos, eos = gguf_tokenizer.token_id(gguf, "bos"), gguf_tokenizer.token_id(gguf, "eos")
        fast = gguf_tokenizer.build(gguf, cache_dir())
        starts = kind in ("llama", "gemma4") or pre in byte_level.STARTS
        tokens = {f"{n}_token": fast.id_to_token(i) for n, i in (("bos", bos), ("eos", eos)) if i is not None}
        return cls(
            fast,
            name=gguf.path.name,
            eos_ids=gguf_tokenizer.eos_ids(gguf),
            bos_id=bos,
            add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", starts)),
            add_eos=bool(meta.get("tokenizer.ggml.add_eos_token", False)),
            chat_templates=gguf_tokenizer.chat_templates(gguf),
            template_tokens=tokens,
            middle_ids=gguf_tokenizer.middle_ids(gguf),
        )

    @classmethod
    def from_folder(cls, folder: StrPath, *, trust_remote_code: bool = False) -> Tokenizer:
        """From a Hugging Face folder: tokenizer.json, or older files that can be converted. Raises ModelError."""
        folder = Path(folder)
        fast, texts = folders.load(folder, trust_remote_code=trust_remote_code)
        bos = texts.get("bos_token")
        return cls(
            fast,
            name=str(folder),
            eos_ids=_eos_ids(folder, fast, texts.get("eos_token")),
            bos_id=None if bos is None else fast.token_to_id(bos),
            chat_templates=_folder_templates(folder, read_json(folder / "tokenizer_config.json")),
            template_tokens=texts,
        )

    @classmethod
    def from_transformers(cls, tokenizer: Any, generation_config: Any = None) -> Tokenizer:
        """From a PreTrainedTokenizer in memory; ``generation_config``: of its model, for ids that end a turn. Raises
        ModelError."""
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            if generation_config is not None:
                generation_config.save_pretrained(folder)
            own = cls.from_folder(folder)
        own.name = tokenizer.name_or_path or type(tokenizer).__name__
        return own

    def save(self, folder: StrPath) -> None:
        """Write the files from which ``from_folder`` makes this tokenizer again. Raises OSError."""
        folder = Path(folder)
        write_bytes(folder / "tokenizer.json", self._fast.to_str().encode("utf-8"))
        config: dict[str, Any] = dict(self._template_tokens)
        if self._templates is not None:
            sources = self._templates.sources
            config["chat_template"] = (
                sources[DEFAULT]
                if sources.keys() == {DEFAULT}
                else [{"name": name, "template": source} for name, source in sources.items()]
            )
        write_json(folder / "tokenizer_config.json", config)
        write_json(folder / "generation_config.json", {"eos_token_id": list(self.eos_ids)})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> I32:
        """Token ids int32 [n].

        ``add_special``: put the start (and end) tokens around the text that the model expects. ``parse_special``: let
        text such as ``<|im_end|>`` become special tokens; off, it stays plain text. Raises ParameterError for text
        with half a surrogate pair, which stands for bytes that were not UTF-8.
        """
        return np.array(_encoded(self._fast if parse_special else self._plain, text, add_special), np.int32)

    def encode_raw(self, text: str, *, add_special: bool = True) -> I32:
        """Token ids int32 [n] of a text that the model is to go on with: special tokens where it spells them, as a
        rendered conversation does, and one start token, also where the text has it already."""
        ids = self.encode(text, add_special=add_special, parse_special=True)
        twice = add_special and len(ids) > 1 and ids[0] == ids[1] == self.bos_id
        return ids[1:] if twice else ids

    def respelled(self, spell: Callable[[str], str]) -> Callable[[str], I32]:
        """Encodes texts in which special tokens are spelled as ``spell`` says, and their own names are plain text.

        What it gives is token ids int32 [n], with no start or end tokens. Raises ParameterError as ``encode`` does.
        """
        twin = _twin(self._fast, spell)
        added = self._fast.get_added_tokens_decoder()
        spelled = {i: spell(token.content) if token.special else token.content for i, token in added.items()}
        own = {twin.token_to_id(text): i for i, text in spelled.items()}
        return lambda text: np.array([own.get(i, i) for i in _encoded(twin, text, False)], np.int32)

    def decode(self, ids: Sequence[int] | I32, *, skip_special: bool = True) -> str:
        """Text of token ids. Never raises: an id beyond the vocabulary is no text, a broken character is U+FFFD."""
        try:
            numbers = np.asarray(ids, np.int64)
        except OverflowError:
            numbers = np.asarray(ids, object)  # numpy would make floats of them
        known = [i for i in numbers.ravel().tolist() if 0 <= i < self.vocab_size]
        text: str = self._fast.decode(known, skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None beyond the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return None
        text: str | None = self._fast.id_to_token(int(token_id))
        return text

    @property
    def has_chat_template(self) -> bool:
        return self._templates is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template for conversations without tools, if there is one."""
        return self.chat_template_of(tools=False)

    def chat_template_of(self, *, tools: bool) -> str | None:
        """The source of the chat template that writes a conversation with or without tools, if there is one."""
        template = None if self._templates is None else self._templates.get(tools=tools)
        return None if template is None else template.source

    def use_chat_template(self, source: str) -> None:
        """Have all conversations written by this template, in place of the model's own."""
        self._templates, self.other_template = ChatTemplates({DEFAULT: source}, self._template_tokens), source

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kw: Any
    ) -> str:
        """A conversation as the model expects it. ``kw``: variables of the template, such as ``tools``. Raises
        ParameterError when there is no template or it refuses."""
        if self._templates is None:
            whose = self.name or "this model"
            raise ParameterError(f"{whose} has no chat template: give plain text with ", Argument("raw", True))
        return self._templates.render(messages, add_generation_prompt=add_generation_prompt, **kw)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kw: Any) -> I32:
        """Token ids int32 [n] of a rendered conversation; the template itself writes the start token."""
        return self.encode(self.render_chat(messages, **kw), add_special=False, parse_special=True)


def differences(a: Tokenizer, b: Tokenizer, limit: int = 5) -> list[tuple[int, str | None, str | None]]:
    """Ids up to the shorter vocabulary that mean different tokens: ``(id, in a, in b)``, at most ``limit``."""
    found: list[tuple[int, str | None, str | None]] = []
    for i in range(min(a.vocab_size, b.vocab_size)):
        left, right = a.token(i), b.token(i)
        if left != right:
            found.append((i, left, right))
            if len(found) == limit:
                break
    return found


def _encoded(fast: Any, text: str, add_special: bool) -> list[int]:
    """Raises ParameterError for half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ParameterError(f"the text is not valid Unicode at character {error.start}: write it in UTF-8") from error
    if len(text) < LONG:
        ids: list[int] = fast.encode(text, add_special_tokens=add_special).ids
    else:
        ids = fast.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    return ids


def _twin(fast: Any, spell: Callable[[str], str] | None = None) -> Any:
    """Another tokenizer that encodes alike, over the same vocabulary in memory: added tokens have ids in order.
    ``spell``: other names of its special tokens, which get other ids; no normalizer makes them something else."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    model, unspelled = _model(fast)
    twin = Fast(model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(fast, part) is not None:
            setattr(twin, part, getattr(fast, part))

    def named(token: Any) -> Any:
        if spell is None or not token.special:
            return token
        return AddedToken(**token.__getstate__() | {"content": spell(token.content), "normalized": False})

    added = fast.get_added_tokens_decoder()
    kept = [added[i] for i in sorted(added) if spell is not None or i not in unspelled]
    for special, tokens in groupby(kept, key=lambda token: token.special):
        (twin.add_special_tokens if special else twin.add_tokens)([named(token) for token in tokens])
    return twin


def _model(fast: Any) -> tuple[Any, frozenset[int]]:
    """The model, without those of its own pieces that spell special tokens, and their ids: Unigram, WordPiece and
    WordLevel give a text such a piece's id, whoever wrote it, and BPE that looks words up (``ignore_merges``) gives it
    to a word. Other BPE has no merge that makes one."""
    model, added = fast.model, fast.get_added_tokens_decoder()
    bpe = type(model).__name__ == "BPE"

    def reached(text: str) -> bool:
        words = [text] if fast.pre_tokenizer is None else [w for w, _ in fast.pre_tokenizer.pre_tokenize_str(text)]
        return not bpe or (model.ignore_merges and words == [text])

    found = {i for i, token in added.items() if token.special and model.token_to_id(token.content) == i}
    own = {i: added[i].content for i in found if reached(added[i].content)}
    if not own:
        return model, frozenset()
    state = json.loads(model.__getstate__())
    secret = secrets.token_hex(16)  # a name that nobody can write
    if type(model).__name__ == "Unigram":
        for i in own:
            state["vocab"][i][0] = f"{secret}{i}"
    else:
        state["vocab"] = {f"{secret}{i}" if i in own else piece: i for piece, i in state["vocab"].items()}
        unknown = model.token_to_id(state["unk_token"] or "")
        state["unk_token"] = f"{secret}{unknown}" if unknown in own else state["unk_token"]
    other = type(model)()
    other.__setstate__(json.dumps(state).encode())
    return other, frozenset(own)


def _spelling(fast: Any) -> tuple[Literal["bytes", "pieces"] | None, bool]:
    """What the decoder undoes, and whether it turns tokens into bytes one by one."""
    state = {} if fast.decoder is None else json.loads(fast.decoder.__getstate__())
    kinds = [part.get("type") for part in state.get("decoders", [state])]
    if "ByteLevel" in kinds:
        return "bytes", kinds == ["ByteLevel"]
    return ("pieces" if {"ByteFallback", "Metaspace"} & set(kinds) else None), False


def _eos_ids(folder: Path, fast: Any, eos_token: str | None) -> list[int]:
    """As in vLLM: what the generation_config names, and the tokenizer's own. As in transformers, the config stands in
    for a generation_config that names none."""
    config = read_json(folder / "config.json")
    ids: list[int] = []
    for source in (read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        if value is not None:
            ids.extend(value if isinstance(value, list) else [value])
            break
    if eos_token is not None and fast.token_to_id(eos_token) is not None:
        ids.append(fast.token_to_id(eos_token))
    return [i for i in ids if isinstance(i, int) and i >= 0]


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name: in files of their own, or in one of two JSON files as text, a list or an object."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = path
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    listed = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(listed, list):
        listed = {each.get("name"): each.get("template") for each in listed if isinstance(each, dict)}
    if not isinstance(listed, dict):
        listed = {DEFAULT: listed}
    return {str(name): source for name, source in listed.items() if isinstance(source, str)}
