"""Drafters that others have published, by the model that each was trained for, and small models of the same family.

Looked up on ``DATE``: which model each is for in the lists of their makers; parameters and licences on the page that
``source`` names or on the drafter's own page in the hub, "unknown" where neither could be seen. Layouts that are not
read here are left out. A drafter fits that very model alone: beside a fine-tune of it fewer drafts are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

DATE = "2026-11-28"
UNKNOWN = "unknown"
_ZLAB = "https://huggingface.co/collections/z-lab/dflash"
_VLLM = "https://docs.vllm.ai/en/latest/features/speculative_decoding/draft_model/"
_DEEPSPEC = "https://github.com/deepseek-ai/DeepSpec"
_RADIXARK = "https://huggingface.co/RadixArk/Qwen3.8-27B-DSpark"
_UNSTATED = "none stated"  # the page in the hub has no model card


class Published(NamedTuple):
    """``model``: what it drafts for, as hubs call it; ``spec``: what ``--drafter`` takes; ``source``: who says so;
    ``parameters``: as the hub rounds them."""

    model: str
    spec: str
    source: str
    parameters: str = UNKNOWN
    license: str = UNKNOWN

    @property
    def repository(self) -> str:
        return self.spec.partition(":")[2]


def _zlab(*found: tuple[str, str, str, str]) -> Iterator[Published]:
    for model, name, parameters, licence in found:
        yield Published(model, f"dflash:z-lab/{name}", _ZLAB, parameters, licence)


def _deepspec(found: Iterable[tuple[str, str, str]]) -> Iterator[Published]:
    for size, method, parameters in found:
        model, family = ("gemma-4-12B-it", "gemma4") if size == "12B" else (f"Qwen3-{size}", "qwen3")
        stem, end = ("eagle3", "ttt7") if method == "eagle" else (method, "block7")
        name = f"{method}:deepseek-ai/{stem}_{family}_{size.lower()}_{end}"
        yield Published(model, name, _DEEPSPEC, parameters, UNKNOWN if parameters == UNKNOWN else _UNSTATED)


PUBLISHED: tuple[Published, ...] = (
    *_zlab(
        ("Qwen3.5-4B", "Qwen3.5-4B-DFlash", "0.5B", "apache-2.0"),
        ("Qwen3.5-9B", "Qwen3.5-9B-DFlash", "1B", UNKNOWN),
        ("Qwen3.5-27B", "Qwen3.5-27B-DFlash", UNKNOWN, UNKNOWN),  # 4B in March; copies of it have 2B since
        ("Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B-DFlash", "0.5B", UNKNOWN),
        ("Qwen3.5-122B-A10B", "Qwen3.5-122B-A10B-DFlash", UNKNOWN, UNKNOWN),
        ("Qwen3.6-27B", "Qwen3.6-27B-DFlash", "2B", UNKNOWN),
        ("Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-DFlash", "0.4B", UNKNOWN),
        ("Qwen3.8-27B", "Qwen3.8-27B-DFlash2", "2B", UNKNOWN),  # incoai/Qwen3.8-27B-DFlash2 is the same
        ("gemma-4-12B-it", "gemma4-12B-it-DFlash", UNKNOWN, UNKNOWN),
        ("gemma-4-26B-A4B-it", "gemma-4-26B-A4B-it-DFlash", UNKNOWN, UNKNOWN),
        ("gemma-4-31B-it", "gemma-4-31B-it-DFlash", "2B", UNKNOWN),
        ("Qwen3-Coder-Next", "Qwen3-Coder-Next-DFlash", "0.5B", "mit"),
        ("Qwen3-Coder-30B-A3B", "Qwen3-Coder-30B-A3B-DFlash", "0.5B", UNKNOWN),
        ("Qwen3-4B", "Qwen3-4B-DFlash-b16", "0.5B", UNKNOWN),
        ("Qwen3-8B", "Qwen3-8B-DFlash-b16", "1B", UNKNOWN),
        ("Llama-3.1-8B-Instruct", "LLaMA3.1-8B-Instruct-DFlash-UltraChat", "1B", UNKNOWN),
    ),
    *_deepspec(
        [
            *(("4B", "dspark", "1B"), ("4B", "dflash", "1B"), ("8B", "dspark", "2B"), ("8B", "dflash", UNKNOWN)),
            *(("14B", "dspark", "3B"), ("14B", "dflash", "3B")),
            *((size, "eagle", UNKNOWN) for size in ("4B", "8B", "14B", "12B")),
            *(("12B", "dspark", UNKNOWN), ("12B", "dflash", UNKNOWN)),
        ]
    ),
    Published("Qwen3.8-27B", "dspark:RadixArk/Qwen3.8-27B-DSpark", _RADIXARK, "1B"),
    *(Published(f"Qwen3-{size}", "model:Qwen/Qwen3-0.6B", _VLLM, "0.6B", "apache-2.0") for size in ("4B", "8B")),
)


def known_for(name: str) -> list[Published]:
    """Those of the model that a path or a name in a hub is of: "unsloth/Qwen3-8B-GGUF:Q4_K_M" is of Qwen3-8B."""
    spelled = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    fits = [
        each for each in PUBLISHED if re.search(rf"(?<![a-z0-9.]){re.escape(each.model.lower())}(?![a-z0-9])", spelled)
    ]
    longest = max((len(each.model) for each in fits), default=0)
    return [each for each in fits if len(each.model) == longest]
