"""The drafting methods there are: what builds each, for specs; in words, for messages, help and docs.

A method is registered here and nowhere else. Imports nothing of the package, so that help is instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What ``auto`` stands for. Beside ``ngram`` it is as fast (docs/benchmarks.md: pooled 593 and 520 tokens/s in two runs,
# 587 and 524), with more tokens a step (2.12, 2.04 of 240 prompts).
AUTO = "suffix"


@dataclass(frozen=True, slots=True)
class Method:
    """``says``: one line for help; ``costs`` of drafting and ``use``: for the table in the docs. ``build``: the module
    and function that make one of a DrafterSpec and a DraftContext. ``options``: what each means, with its default.
    ``argument``: what stands after the colon, if anything; ``short``: so in help."""

    says: str
    costs: str
    use: str
    build: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    argument: str = ""
    short: str = ""
    example: str = ""


COMMON = ("size", "fallback")  # options of every method: the engine's, and the composition's
_LOOKUP, _FORWARD, _LEARNED = (f"outpace.drafters.{floor}" for floor in ("lookup", "forward", "learned.load"))
_HISTORY = "1: what finished requests left serves later ones (0)"
_REVISION = {"revision": "of its repository"}
_CHAINS = {"branch": "1: chains, not the likeliest trees"}
_PUBLISHED = "a trained drafter: its folder, or its repository in a hub"
METHODS: Mapping[str, Method] = {
    "auto": Method(
        f"the fastest that was measured; else {AUTO}, with a layer of the model's that drafts",
        "",
        "the default",
    ),
    "none": Method("plain decoding", "nothing", "plain decoding", "outpace.drafters.none:build"),
    "ngram": Method(
        "looks the last tokens up in the text so far",
        "microseconds",
        "edits, summaries, translation, code",
        f"{_LOOKUP}.ngram:build",
        {
            "min": "shortest match in tokens (1)",
            "max": "longest match that counts (8)",
            "candidates": "matches that are merged into one tree (1: one chain)",
        },
    ),
    "suffix": Method(
        "all earlier appearances vote; a history of answers if wanted",
        "microseconds",
        "the same; the best lookup alone",
        f"{_LOOKUP}.suffix:build",
        {
            "max": "longest match that counts, 2 to 64 tokens (16)",
            "memory": "MiB for all rows and the history together (64)",
            "tree": "0: only the likeliest path, a chain (1)",
            "history": _HISTORY,
            "file": "where the history is loaded from, and saved at close",
        },
    ),
    "recycle": Method(
        "the target's likeliest tokens after each token, kept from its own forwards",
        "microseconds a node",
        "beside `suffix`, where wide forwards are cheap",
        f"{_LOOKUP}.recycling:build",
        {"memory": "MiB for all lists together (64)", "history": _HISTORY},
    ),
    "lookahead": Method(
        "n-grams from Jacobi iteration in the forward that verifies",
        "width of the forward",
        "GPUs with a large model",
        f"{_FORWARD}.lookahead:build",
        {"window": "columns (4)", "ngram": "tokens of an n-gram (3)", "guesses": "n-grams a step, at most (3)"},
    ),
    "retrieval": Method(
        "looks the last tokens up in a datastore",
        "microseconds",
        "answers that resemble known texts",
        f"{_LOOKUP}.retrieval:build",
        {"places": "places that vote, those with the longest matches (24)", "min": "shortest match in tokens (2)"},
        argument="a datastore (outpace datastore build)",
        short="PATH",
        example="/data/store",
    ),
    "layers": Method(
        "the target's own first layers",
        "N layers a token",
        "models trained for early exit",
        f"{_FORWARD}.layers:build",
        argument="how many of the target's layers draft",
        short="N",
        example="10",
    ),
    "model": Method(
        "a smaller model, of any tokenizer",
        "its forward a token",
        "a large target with a small sibling",
        f"{_FORWARD}.model:build",
        {
            "revision": "of its repository",
            "trust": "1: its repository's code may run (0)",
            "pickle": "1: weights in pickle files are read (0)",
        },
        argument="a model: a name, folder or .gguf file",
        short="ID",
        example="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "eagle": Method(
        "a small layer that was trained on the target's hidden states",
        "a small layer a depth",
        "any text, once it is trained",
        f"{_LEARNED}:build",
        {
            "branch": "candidates of a node",
            "levels": "most levels of a draft",
            "quantize": "int8 or int4: its weights in groups of 32",
            "revision": "of its repository",
        },
        argument="a trained drafter's folder or repository, or demo: the one that comes for the demo model",
        short="PATH",
        example="/data/demo-eagle",
    ),
    "peagle": Method(
        "the same, all depths at once from mask tokens, as AWS and speculators publish it (P-EAGLE)",
        "one small forward",
        "published P-EAGLE drafters",
        f"{_LEARNED}:build",
        {**_CHAINS, "quantize": "int8 or int4: its weights in groups of 32", **_REVISION},
        argument=_PUBLISHED,
        short="ID",
        example="amazon/gpt-oss-20b-p-eagle",
    ),
    "mtp": Method(
        "the layer that drafts in the target's own files (Qwen, GLM, DeepSeek)",
        "a layer and the head a depth",
        "models that come with one",
        f"{_LEARNED}:build_mtp",
        {"branch": "candidates of a node", "levels": "most levels of a draft"},
    ),
    "parallel": Method(
        "a block of tokens from one small forward, trained on the target's hidden states",
        "one small forward",
        "cheap wide drafts",
        f"{_LEARNED}:build",
        {**_CHAINS, **_REVISION},
        argument=_PUBLISHED,
        short="PATH",
        example="/data/demo-parallel",
    ),
    "dflash": Method(
        "a block of tokens from one small forward, as z-lab and speculators publish it",
        "one small forward",
        "published DFlash drafters",
        f"{_LEARNED}:build",
        {**_CHAINS, **_REVISION},
        argument=_PUBLISHED,
        short="ID",
        example="z-lab/Qwen3-8B-DFlash-b16",
    ),
    "dspark": Method(
        "the same with heads for the token before and for confidence, as DeepSpec publishes it",
        "one small forward",
        "published DSpark drafters",
        f"{_LEARNED}:build",
        {**_CHAINS, **_REVISION},
        argument=_PUBLISHED,
        short="ID",
        example="deepseek-ai/dspark_qwen3_8b_block7",
    ),
    "medusa": Method(
        "heads that were trained on the target's last hidden state",
        "one product",
        "published Medusa heads",
        f"{_LEARNED}:build",
        _REVISION,
        argument=_PUBLISHED,
        short="PATH",
        example="/data/demo-medusa",
    ),
    "drafter": Method(
        "a published drafter, whose method its config.json tells",
        "as that method",
        "a drafter that somebody trained for this model",
        f"{_LEARNED}:build",
        {"branch": "candidates of a node, where it drafts trees", "levels": "most levels of a draft", **_REVISION},
        argument=_PUBLISHED,
        short="ID",
        example="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ),
}


def listed() -> list[tuple[str, str]]:
    """``(spelling, what it is)`` of each method."""
    return [(f"{name}:{method.short}" if method.short else name, method.says) for name, method in METHODS.items()]
