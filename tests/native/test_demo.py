"""The demo models against transformers in float32 on the dequantised weights: the same language, measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from native_helpers import feed

import outpace
from outpace.common.files import cache_dir
from outpace.errors import ModelError
from outpace.models import demo
from outpace.models.native.model import NativeModel, load_native
from outpace.models.torch import gguf as gguf_transformers
from outpace.models.weights.gguf import GGUFFile
from outpace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
TOKENS, WINDOW = 768, 256


def demo_path(name: str) -> Any:
    try:
        return demo.smollm2() if name == "smollm2" else demo.gemma(cache_dir())
    except ModelError as error:
        pytest.skip(str(error))


def some_text() -> str:
    """Prose that is certain to be there: the documentation strings of the standard library."""
    import argparse
    import asyncio
    import decimal
    import inspect
    import random
    import statistics

    modules = (statistics, decimal, random, argparse, asyncio, inspect)
    pages = []
    for module in modules:
        for _, member in inspect.getmembers(module):
            if inspect.isclass(member) or inspect.isfunction(member):
                pages.append(inspect.cleandoc(str(member.__doc__ or "")))
    return "\n\n".join(pages)


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[NativeModel, Any, Any]]:
    """The native model, float32 logits of the reference [T, V] and the tokens [T / WINDOW, WINDOW]."""
    gguf = GGUFFile.open(demo_path(request.param))
    tokenizer = Tokenizer.from_gguf(gguf)
    tokens = np.asarray(tokenizer.encode(some_text(), add_special=False), np.int64)[:TOKENS]
    assert len(tokens) == TOKENS
    windows = tokens.reshape(-1, WINDOW)
    if tokenizer.bos_id is not None:
        windows[:, 0] = tokenizer.bos_id
    theirs = gguf_transformers.build(gguf, torch.float32, torch.device("cpu"))
    model = load_native(gguf)
    yield model, theirs, windows
    model.close()


def test_perplexity_and_agreement(pair: tuple[NativeModel, Any, Any]) -> None:
    model, theirs, windows = pair
    ours_nll, theirs_nll, agreed, gaps = [], [], [], []
    for window in windows:
        with torch.inference_mode():
            expected = torch.log_softmax(theirs(torch.from_numpy(window)[None]).logits[0], -1).numpy()
        row = model.kv.alloc()
        got = torch.log_softmax(torch.from_numpy(feed(model, row, window, 128)), -1).numpy()
        model.kv.free(row)
        at = np.arange(WINDOW - 1)
        ours_nll.append(-got[at, window[1:]])
        theirs_nll.append(-expected[at, window[1:]])
        same = got.argmax(-1) == expected.argmax(-1)
        agreed.append(same)
        second, first = np.partition(expected[~same], (-2, -1), axis=-1)[:, -2:].T
        gaps.extend((first - second).tolist())
    ours, reference = np.exp(np.mean(ours_nll)), np.exp(np.mean(theirs_nll))
    agreement = np.mean(agreed)
    print(f"\n{model.info.name}: perplexity {ours:.4f}, reference {reference:.4f} ({ours / reference - 1:+.2%})")
    print(
        f"top-1 agreement {agreement:.2%}; where they differ the reference's gap is at most {max(gaps, default=0):.3f}"
    )
    assert abs(ours / reference - 1) < 0.01
    assert agreement > 0.96


def test_greedy_text(pair: tuple[NativeModel, Any, Any]) -> None:
    """Where a greedy text leaves the reference's, the reference saw two tokens of nearly the same score."""
    model, theirs, windows = pair
    for window in windows:
        prompt = window[:48]
        row = model.kv.alloc()
        logits, text = feed(model, row, prompt)[-1], []
        for _ in range(24):
            text.append(int(logits.argmax()))
            logits = feed(model, row, text[-1:])[-1]
        model.kv.free(row)
        with torch.inference_mode():
            expected = theirs(torch.from_numpy(np.concatenate([prompt, text]))[None]).logits[0, 47:-1].numpy()
        for token, scores in zip(text, expected, strict=True):
            gap = scores.max() - scores[token]
            if gap > 0:
                print(f"\n{model.info.name}: another token at a gap of {gap:.4f}")
            assert gap < 1.0
            if gap > 0:
                break


def test_the_package_imports_no_torch() -> None:
    import subprocess
    import sys

    demo_path("smollm2")
    code = (
        "import sys; from outpace.models.load import load; load('demo'); "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
    assert outpace.__name__ == "outpace"
