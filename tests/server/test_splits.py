"""Several tokens at once, correctly: an answer is the same, byte for byte, however steps cut its tokens.

Recorded answers go through the classes that serve them (sequence, text reader, parser) under every split into steps of
1 to 8 tokens where they are short, and in every stretch of a few tokens and under random splits where they are long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outpace.engine.request import Request
from outpace.engine.sequence import Sequence
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.load import resolve
from outpace.models.weights.gguf import GGUFFile
from outpace.params import SamplingParams
from outpace.server.conversation.formats import parser_for
from outpace.text.answer import TextReader
from outpace.text.token_bytes import TokenBytes
from outpace.text.tokenizer import Tokenizer
from tests.server.formats import BOTH, NAMES, PYTHON, TEMPLATES, Read, read

WIDEST = 8  # tokens a step
EXHAUSTIVE = 9  # tokens whose splits are all tried: 2 ** 8
RANDOM = 30
EOS = 2  # of the demo model


def ids(text: str) -> list[int]:
    return [int(token) for token in text.split()]


# What the demo model said, greedily, about a greeting and about JSON.
GREETING = ids("""
57 5248 18948 346 2316 11904 260 11743 30 339 5248 1535 288 724 351 750 1694 346 6737 702 549 288 4237 351 30
1812 416 339 4237 346 351 1834 47 2
""")
BLOCK = ids("""
3725 5518 198 107 472 476 1245 1799 476 9682 1002 472 476 473 1799 216 35 32 28 472 476 13184 1799 476 40716
18 198 109 198 3725 198 198 1348 314 253 20110 1569 338 3593 253
""")


@dataclass
class Answer:
    """Tokens as a model might have gone on writing them, and how they are served. Splits may cut behind its end."""

    text: str
    kind: str | None = None  # of tool calls; None: plain text
    params: dict[str, Any] = field(default_factory=dict)
    limit: int = 10_000
    spelled: str = "tokens"  # "bytes": a token for each; "both": by turns
    tokens: list[int] = field(default_factory=list)
    ends: str = "stop"


ANSWERS = {
    "greeting, EOS last": Answer("", tokens=GREETING),
    "greeting, EOS in the middle": Answer("", tokens=[*GREETING[:5], EOS, *GREETING[5:9]]),
    "greeting, EOS ignored": Answer(
        "", tokens=[*GREETING[:5], EOS, *GREETING[5:9]], params={"ignore_eos": True}, ends="length"
    ),
    "greeting, EOS too early": Answer("", tokens=[57, EOS, *GREETING[1:6], EOS, 57], params={"min_tokens": 4}),
    "greeting, EOS shown": Answer(
        "", tokens=[*GREETING[:4], EOS, 57], params={"skip_special_tokens": False, "include_stop": True}
    ),
    "a block of JSON, stopped": Answer("", tokens=BLOCK, params={"stop": ["}\n```", "`\n\nThis"]}),
    "characters of several tokens": Answer("é日😀", spelled="bytes", ends="length"),
    "a family": Answer("x 👩‍👩‍👧 naïve 日本語 🇫🇷!", spelled="both", ends="length"),
    "broken characters": Answer("", tokens=[57, 240, 188, 57, 240, 188, 223, 57], ends="length"),
    "cut in a character": Answer("日本", spelled="bytes", limit=5, ends="length"),
    "a stop string over tokens": Answer("one two END three", spelled="bytes", params={"stop": ["o END t"]}),
    "a stop string that nearly comes": Answer(
        "aab aaab aaaab!", spelled="both", params={"stop": ["aaaab", "ab aaaa!"]}
    ),
    "a stop string in a character": Answer("a 日本語", spelled="bytes", params={"stop": ["本"]}),
    "a stop string kept": Answer("well, stop. it", params={"stop": ["op."], "include_stop": True}),
    "a stop string too early": Answer("ab ab ab ab", spelled="bytes", params={"stop": ["b a"], "min_tokens": 5}),
    "a limit in a stop string": Answer("x stop", spelled="bytes", limit=4, params={"stop": ["stop"]}, ends="length"),
    "thoughts": Answer("<think>\nWell, 日.\n</think>\n\nYes 😀.", "qwen3", spelled="both", ends="length"),
    "thoughts cut off": Answer("<think>\nWell\n</thi", "qwen3", spelled="bytes", ends="length"),
    "a stop string in a call": Answer(BOTH["qwen3"], "qwen3", params={"stop": ['"days"']}),
    "a call cut off": Answer(BOTH["llama3"], "llama3", limit=17, ends="length"),
    "a call, EOS, and more": Answer(BOTH["smollm2"] + "<|im_end|>" + "more", "smollm2"),
    "a call that is none": Answer(
        '<tool_call>{"name": "now", "args": 1}</tool_call>', "qwen3", spelled="both", ends="length"
    ),
    **{f"calls of {kind}": Answer(text, kind, spelled="both", ends="length") for kind, text in BOTH.items()},
    "calls in Python": Answer(PYTHON, "gemma3", spelled="both", ends="length"),
}


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(resolve("demo").path))


@pytest.fixture(scope="module")
def single(demo: Tokenizer) -> dict[int, int]:
    """The token of each byte that has one."""
    code = TokenBytes(demo)
    return {code.of(token)[0]: token for token in range(demo.vocab_size) if len(code.of(token)) == 1}


def tokens_of(answer: Answer, demo: Tokenizer, single: dict[int, int]) -> list[int]:
    if answer.tokens:
        return answer.tokens
    usual: list[int] = demo.encode(answer.text, add_special=False, parse_special=True).tolist()
    if answer.spelled == "tokens":
        return usual
    code, found = TokenBytes(demo), []
    for i, token in enumerate(usual):
        apart = answer.spelled == "bytes" or i % 3 == 1
        found += [single[byte] for byte in code.of(token)] if apart else [token]
    return found


def streamed(answer: Answer, tokens: list[int], sizes: list[int], demo: Tokenizer) -> tuple[Read, Any, Any, Any, Any]:
    """What is streamed, joined, and the result, when the tokens come in steps of these sizes."""
    params = SamplingParams(**answer.params)
    prompt = np.array([1, 2], np.int32)
    limit = min(answer.limit, len(tokens)) + len(prompt)
    request = Request(0, prompt, params, 0, limit, 0, False, "coupled", "none", added=time.perf_counter())
    reader = TextReader(
        demo, params.stop_strings, include_stop=params.include_stop, skip_special=params.skip_special_tokens
    )
    chooser = Chooser.start(params, Noise(0), (), prompt)
    sequence = Sequence(request, 0, chooser, reader, eos_ids=demo.eos_ids)
    template = TEMPLATES[answer.kind] if answer.kind else None
    parser = parser_for(template, tools=True, reasoning=True, tool_id="c{}".format, schemas=NAMES)
    texts, at = list[str](), 0
    for size in sizes:
        extension = sequence.extended(tokens[at : at + size])
        sequence.commit(extension, ["x"] * len(extension.tokens))
        delta = sequence.delta()
        texts.append(delta.text)
        at += size
        if delta.finish_reason:
            break
    result = delta.result
    assert result is not None
    assert "".join(texts) == result.text
    joined = read(parser, texts)
    assert joined == read(
        parser_for(template, tools=True, reasoning=True, tool_id="c{}".format, schemas=NAMES), [result.text]
    )
    return joined, result.text, result.token_ids, result.finish_reason, result.stopped_by


def splits_of(n: int) -> Iterator[list[int]]:
    """All ways to write n as a sum of 1 to 8, in order."""
    if n == 0:
        yield []
    for first in range(1, min(n, WIDEST) + 1):
        for rest in splits_of(n - first):
            yield [first, *rest]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_under_every_split(name: str, demo: Tokenizer, single: dict[int, int]) -> None:
    answer = ANSWERS[name]
    tokens = tokens_of(answer, demo, single)
    n = len(tokens)
    expected = streamed(answer, tokens, [1] * n, demo)
    assert expected[3] == answer.ends
    if n <= EXHAUSTIVE:
        splits = list(splits_of(n))
    else:
        chance = random.Random(name)
        splits = [[chance.randint(1, WIDEST) for _ in range(n)] for _ in range(RANDOM)]
        splits += [[size] * n for size in range(1, WIDEST + 1)]
        # a wide step at every place, alone
        splits += [[1] * i + [size] + [1] * n for size in (2, 3, 5, 8) for i in range(n)]
    for sizes in splits:
        assert streamed(answer, tokens, sizes, demo) == expected, sizes


def test_recorded_answers_say_what_they_should(demo: Tokenizer, single: dict[int, int]) -> None:
    """The answers are no empty ones: what they were written to show is in them."""

    def said(name: str) -> Read:
        tokens = tokens_of(ANSWERS[name], demo, single)
        return streamed(ANSWERS[name], tokens, [1] * len(tokens), demo)[0]

    assert said("greeting, EOS in the middle").text == said("greeting, EOS last").text[:15]
    assert said("greeting, EOS shown").text.endswith("<|im_end|>")
    assert said("a block of JSON, stopped").text.endswith('"Male"\n')
    assert said("a family").text == ANSWERS["a family"].text
    assert said("cut in a character").text == "日\ufffd"
    assert said("a stop string over tokens").text == "one tw"
    assert said("a stop string that nearly comes").text == "aab aaab "
    assert said("a stop string in a character").text == "a 日"
    assert said("a stop string kept").text == "well, stop."
    assert said("a limit in a stop string").text == "x st"
    assert said("thoughts") == Read("Yes 😀.", "Well, 日.")
    assert said("thoughts cut off").thoughts == "Well\n</thi"
    assert said("a stop string in a call").calls[0].arguments == '{"city": "Zürich 日本", '
    assert said("a call cut off").calls[0].name == "get_weather"
    assert said("a call that is none").text == ANSWERS["a call that is none"].text
    for name in (*(f"calls of {kind}" for kind in BOTH), "calls in Python", "a call, EOS, and more"):
        assert [call.name for call in said(name).calls] == ["get_weather", "now"]
        assert not said(name).text


def test_all_splits_are_all_splits() -> None:
    counts = [len(list(splits_of(n))) for n in range(11)]
    assert counts[:9] == [1, 1, 2, 4, 8, 16, 32, 64, 128]
    assert counts[9:] == [255, 509]  # but the one step that is too wide, or contains one
