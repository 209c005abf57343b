"""``/infill`` and completions with a ``suffix``: prompts are what llama.cpp makes of them, answers those of plain
decoding. The demo model has no tokens for filling in: here its file has keys that make some of its own such."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from outpace import Engine
from outpace.common.arrays import I32
from outpace.models.weights.gguf import GGUFFile
from outpace.text.middle import Middle
from tests.server.serving import Running, serving
from tests.small_tokenizers import of_pieces

KEYS = {"fim_pre": 7, "suffix": 8, "fim_mid": 9, "fim_sep": 5}  # the second by its old name; <reponame> by its own
PREFIX, SUFFIX, BEGUN = "def add(a, b):\n    <|im_end|>", "\n\nprint(add(1, 2))\n", "return"
FILES = [{"filename": "other.py", "text": "X = 1\n"}, {"text": "Y = 2\n"}]
NAMED = "<reponame>myproject\n<file_sep>other.py\nX = 1\n<file_sep>tmp\nY = 2\n<file_sep>filename\n"
PROMPT = f"<gh_stars>{PREFIX}{BEGUN}<issue_start>{SUFFIX}<issue_comment>"
ASKED = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": BEGUN}


@pytest.fixture(scope="module")
def coder() -> Iterator[Running]:
    opened = GGUFFile.open

    def keyed(*given: Any, **more: Any) -> GGUFFile:
        file = opened(*given, **more)
        file.metadata.update({f"tokenizer.ggml.{name}_token_id": token for name, token in KEYS.items()})
        return file

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GGUFFile, "open", keyed)
        engine = Engine.load("demo", drafter="ngram+suffix", max_length=512)
    with serving(engine) as running:
        yield running


def ids(running: Running, text: str) -> list[int]:
    """Of a text in which nothing is a special token."""
    tokens: list[int] = running.answer("/tokenize", {"content": text, "parse_special": False})["tokens"]
    return tokens


@pytest.mark.parametrize(("extra", "before"), [(FILES, NAMED), (None, "<reponame>myproject\n<file_sep>filename\n")])
@pytest.mark.parametrize("more", [{"temperature": 0}, {"seed": 3, "n_probs": 1}])
def test_middles_are_those_of_plain_decoding(coder: Running, extra: Any, before: str, more: dict[str, Any]) -> None:
    asked = {**ASKED, "input_extra": extra, "n_predict": 16, "return_tokens": True, **more}
    answer = coder.answer("/infill", asked)
    assert answer["prompt"] == before + PROMPT
    spelled = [7, *ids(coder, PREFIX), *ids(coder, BEGUN), 8, *ids(coder, SUFFIX), 9]
    beside = coder.answer("/tokenize", {"content": before})["tokens"]
    whole = {"prompt": [*beside, *spelled], "n_predict": 16, "return_tokens": True, **more}
    plainly = coder.answer("/completion", {**whole, "speculation": {"off": True}})
    names = ("content", "tokens", "stop_type", "tokens_evaluated", "tokens_predicted", "completion_probabilities")
    assert [answer.get(name) for name in names] == [plainly.get(name) for name in names]
    *parts, last = coder.events("/infill", asked)
    assert "".join(part["content"] for part in parts) == answer["content"]
    assert (last["stop"], last["prompt"], last["stop_type"]) == (True, answer["prompt"], answer["stop_type"])


def test_completions_take_a_suffix(coder: Running) -> None:
    asked = {"prompt": [PREFIX, PREFIX[:9]], "suffix": SUFFIX, "max_tokens": 12, "seed": 5}
    both = coder.answer("/v1/completions", asked)["choices"]
    for prompt, choice in zip(asked["prompt"], both, strict=True):
        spelled = [7, *ids(coder, prompt), 8, *ids(coder, SUFFIX), 9]
        whole = coder.answer("/v1/completions", {**asked, "prompt": prompt, "return_token_ids": True})
        same = coder.answer("/v1/completions", {"prompt": spelled, "max_tokens": 12, "seed": 5, "stop_token_ids": [5]})
        assert whole["prompt_token_ids"] == spelled
        assert choice["text"] == whole["choices"][0]["text"] == same["choices"][0]["text"]
        events = coder.events("/v1/completions", {**asked, "prompt": prompt})
        assert "".join(each["choices"][0]["text"] for each in events if each["choices"]) == choice["text"]
        options = {"num_predict": 12, "seed": 5}
        theirs = {"model": "demo", "prompt": prompt, "suffix": SUFFIX, "options": options, "stream": False}
        assert coder.answer("/api/generate", theirs)["response"] == choice["text"]
    refused = coder.answer("/v1/completions", {**asked, "echo": True}, 400)
    assert refused["error"]["param"] == "echo"


def test_the_middle_ends_where_another_file_would_begin(coder: Running) -> None:
    answer = coder.answer("/infill", {**ASKED, "logit_bias": [[5, 100]], "return_tokens": True})
    assert (answer["content"], answer["tokens"], answer["stop_type"]) == ("", [5], "eos")


def test_what_is_too_much_goes_from_far_away(coder: Running) -> None:
    """The context holds 512 tokens, of which the answer gets 100."""
    asked = {"input_prefix": "p" * 5 + " one" * 400, "input_suffix": " two" * 400 + "s" * 5, "n_predict": 100}
    beside = [{"filename": "a", "text": "A" + " three" * 400}]
    answer = coder.answer("/infill", {**asked, "ignore_eos": True, "input_extra": beside, "temperature": 0})
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (412, 100)
    before, _, after = answer["prompt"].removesuffix("<issue_comment>").partition("<issue_start>")
    assert before == "<gh_stars>" + " one" * 307
    assert after == " two" * 102
    short = coder.answer("/infill", {**asked, **ASKED, "input_extra": beside, "temperature": 0})
    assert short["prompt"].endswith(f" three<file_sep>filename\n{PROMPT}")
    assert short["prompt"].startswith(" three three")
    assert short["tokens_evaluated"] == 412


def test_files_that_would_go_are_not_encoded() -> None:
    """In whatever room, the same as cut from all of them."""
    encoded = list[str]()

    def encode(text: str) -> I32:
        encoded.append(text)
        return np.array([100 + ord(each) for each in text], np.int32)

    nothing, files = np.zeros(0, np.int32), [("a", "one"), ("b", "two" * 9), ("c", "")]
    for middle in (Middle(1, 2, 3, repository=4, file=5), Middle(1, 2, 3)):
        whole = middle.prompt(encode, nothing, nothing, files=files, most=500).tolist()
        assert [text for text in encoded if text in dict(files).values()] == ["", "two" * 9, "one"]
        for most in range(3, len(whole) + 2):
            cut = middle.prompt(encode, nothing, nothing, files=files, most=most).tolist()
            assert cut == [*whole[max(len(whole) - most, 0) : -3], *whole[-3:]]
        encoded.clear()
        middle.prompt(encode, nothing, nothing, files=files, most=40)
        assert ("two" * 9 in encoded, "one" in encoded) == (True, False)
        encoded.clear()


def test_a_prompt_is_read_ahead_of_time(coder: Running) -> None:
    """As llama.vim asks, before the text around the middle is known."""
    beside = [{"filename": "ahead.py", "text": " seven" * 200, "time": 1}]
    ahead = {
        "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": beside, "prompt": "", "n_predict": 0,
        "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1,
    }  # fmt: skip
    assert coder.answer("/infill", {**ahead, "response_fields": [""]}) == {}
    answer = coder.answer("/infill", {**ASKED, "input_extra": beside, "n_predict": 4, "temperature": 0})
    assert answer["timings"]["cache_n"] > 200
    for path, asked in (("/infill", ahead), ("/completion", {"prompt": PREFIX, "n_predict": 0})):
        (event,) = coder.events(path, asked)
        for last in (coder.answer(path, asked), event):
            assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "limit")
            assert (last["tokens_predicted"], last["generation_settings"]["n_predict"]) == (0, 0)
            assert last["tokens_evaluated"] == last["tokens_cached"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", ASKED, "input_suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_a_model_without_the_tokens_says_so(demo: Running, path: str, body: dict[str, Any], param: str) -> None:
    error = demo.answer(path, body, 400)["error"]
    assert error["param"] == param
    assert "cannot fill in the middle" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_prefix": "a"}, "input_suffix"),
        ({**ASKED, "input_extra": [{"filename": "x"}]}, "input_extra.0.text"),
        ({**ASKED, "input_extra": {"text": "x"}}, "input_extra"),
        ({**ASKED, "prompt": 5}, "prompt"),
        ({"input_prefix": " " * 200_000, "input_suffix": " " * 200_000}, "input_prefix"),
        ({**ASKED, "input_extra": [{"text": " " * 200_000}] * 2}, "input_extra"),
    ],
)
def test_what_is_no_such_request_is_refused(coder: Running, body: dict[str, Any], param: str) -> None:
    assert coder.answer("/infill", body, 400)["error"]["param"] == param


NAMES = {  # as published: Qwen 2.5 Coder, StarCoder and Granite, CodeLlama, DeepSeek Coder, GLM 4.5, CodeGemma
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"),
    "granite": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", None, "<fim_pad>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", None, None, None),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None, None, None),
    "glm": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", None, None, None),
    "gemma": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", None, "<|file_separator|>", None),
}


@pytest.mark.parametrize("model", NAMES)
def test_tokens_are_known_by_their_published_names(model: str) -> None:
    special = tuple(name for name in NAMES[model] if name)
    middle = of_pieces(("a", "b"), special).middle
    assert middle is not None
    found = (middle.prefix, middle.suffix, middle.middle, middle.repository, middle.file, middle.pad)
    expected = [None if name is None else special.index(name) for name in NAMES[model]]
    if model == "gemma":  # llama.cpp does not know that one of its tokens
        expected[4] = None
    assert list(found) == expected
