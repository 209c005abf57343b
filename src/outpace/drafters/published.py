"""Drafters that others have published, by the model that each was trained for, and small models of the same family.

Looked up on ``DATE`` in the lists of their makers, who say which model each is for; sizes and licences stand on the
pages that the names lead to. Layouts that are not read here are left out. A drafter fits that very model alone: beside
a fine-tune of it fewer drafts are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

DATE = "2026-11-28"
_ZLAB = "https://github.com/z-lab/dflash"
_VLLM = "https://docs.vllm.ai/en/latest/features/speculative_decoding/draft_model/"
_DEEPSPEC = "https://github.com/deepseek-ai/DeepSpec"


class Published(NamedTuple):
    """``model``: what it drafts for, as hubs call it; ``spec``: what ``--drafter`` takes; ``source``: who says so."""

    model: str
    spec: str
    source: str


def _zlab(models: Iterable[tuple[str, str]]) -> Iterator[Published]:
    for model, name in models:
        yield Published(model, f"dflash:z-lab/{name}", _ZLAB)


def _deepspec(sizes: Iterable[str]) -> Iterator[Published]:
    for size in sizes:
        for method in ("dspark", "dflash"):
            yield Published(f"Qwen3-{size}", f"{method}:deepseek-ai/{method}_qwen3_{size.lower()}_block7", _DEEPSPEC)


PUBLISHED: tuple[Published, ...] = (
    *_zlab((f"Qwen3.5-{size}", f"Qwen3.5-{size}-DFlash") for size in ("4B", "9B", "27B", "35B-A3B", "122B-A10B")),
    *_zlab((f"Qwen3.6-{size}", f"Qwen3.6-{size}-DFlash") for size in ("27B", "35B-A3B")),
    *_zlab((model, f"{model}-DFlash") for model in ("Qwen3-Coder-Next", "Qwen3-Coder-30B-A3B")),
    *_zlab((f"Qwen3-{size}", f"Qwen3-{size}-DFlash-b16") for size in ("4B", "8B")),
    *_zlab([("Llama-3.1-8B-Instruct", "LLaMA3.1-8B-Instruct-DFlash-UltraChat")]),
    *_deepspec(("4B", "8B", "14B")),
    *(Published(f"Qwen3-{size}", "model:Qwen/Qwen3-0.6B", _VLLM) for size in ("4B", "8B")),
)


def known_for(name: str) -> list[Published]:
    """Those of the model that a path or a name in a hub is of: "unsloth/Qwen3-8B-GGUF:Q4_K_M" is of Qwen3-8B."""
    spelled = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    fits = [
        each for each in PUBLISHED if re.search(rf"(?<![a-z0-9.]){re.escape(each.model.lower())}(?![a-z0-9])", spelled)
    ]
    longest = max((len(each.model) for each in fits), default=0)
    return [each for each in fits if len(each.model) == longest]
