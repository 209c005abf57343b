"""The drafting methods there are, in words: for specs, messages and help. Imports nothing, so that help is instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What ``auto`` stands for. Beside ``ngram`` it is as fast (docs/benchmarks.md: pooled 593 and 520 tokens/s in two runs,
# 587 and 524), with more tokens a step (2.12, 2.04 of 240 prompts).
AUTO = "suffix"


@dataclass(frozen=True, slots=True)
class Method:
    """``says``: one line for help. ``argument``: what stands after the colon, if anything; ``short``: so in help."""

    says: str
    options: tuple[str, ...] = ()
    argument: str = ""
    short: str = ""
    example: str = ""


COMMON = ("size", "fallback")  # options of every method: the engine's, and the composition's
METHODS: Mapping[str, Method] = {
    "auto": Method(f"what suits most text: {AUTO}, beside the demo model with its trained drafter if that pays"),
    "none": Method("plain decoding"),
    "ngram": Method("looks the last tokens up in the text so far", ("min", "max", "candidates")),
    "suffix": Method(
        "all earlier appearances vote; a history of answers if wanted", ("max", "memory", "tree", "history", "file")
    ),
    "lookahead": Method("n-grams from Jacobi iteration in the forward that verifies", ("window", "ngram", "guesses")),
    "retrieval": Method(
        "looks the last tokens up in a datastore",
        ("places", "min"),
        argument="a datastore (outpace datastore build)",
        short="PATH",
        example="/data/store",
    ),
    "layers": Method(
        "the target's own first layers", argument="how many of the target's layers draft", short="N", example="10"
    ),
    "model": Method(
        "a smaller model, of any tokenizer",
        ("revision", "trust", "pickle"),
        argument="a model: a name, folder or .gguf file",
        short="ID",
        example="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "eagle": Method(
        "a small layer that was trained on the target's hidden states",
        ("branch", "levels", "quantize"),
        argument="a trained drafter's folder, or demo: the one that comes for the demo model",
        short="PATH",
        example="/data/demo-eagle",
    ),
    "parallel": Method(
        "a block of tokens from one small forward, trained on the target's hidden states",
        argument="a trained drafter's folder",
        short="PATH",
        example="/data/demo-parallel",
    ),
    "medusa": Method(
        "heads that were trained on the target's last hidden state",
        argument="a trained drafter's folder",
        short="PATH",
        example="/data/demo-medusa",
    ),
}


def listed() -> list[tuple[str, str]]:
    """``(spelling, what it is)`` of each method."""
    return [(f"{name}:{its.short}" if its.short else name, its.says) for name, its in METHODS.items()]
