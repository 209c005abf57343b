"""How a model is to be loaded: what a user may ask for, checked before any file is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from outpace.common.parameter import Amount, Integer, Text, check, defined

Backend = Literal["auto", "native", "transformers"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "bfloat16", "float16", "float32", "int8", "int4"]
Quantize = Literal["int8", "int4"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
DTYPES: tuple[DType, ...] = get_args(DType)
KV_DTYPES: tuple[KVDType, ...] = get_args(KVDType)
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _at_least(least: int) -> Integer:
    return Integer(least, remedy=f"give a whole number of at least {least}, or leave it out")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model. Raises ParameterError that names the option.

    ``dtype``: auto is what the file has on the native backend; elsewhere float32 on a CPU, where identical tokens are
    promised, and the checkpoint's own type on a GPU. ``device``: auto is the GPU if there is one. ``kv_memory``: hard
    bound in bytes. ``kv_dtype`` and ``quantize`` concern the native backend. ``strict``: on the Transformers backend,
    too, a token's bits depend on nothing that is computed beside it, as they never do on the native one.
    """

    backend: Backend = defined("auto", "auto, native (C++ on the CPU) or transformers.")
    dtype: DType = defined("auto", "auto, float32, bfloat16 or float16.")
    device: str = defined("auto", "auto, cpu or cuda.", Text())
    threads: int | None = defined(
        None, "CPU threads. Default: the cores there are.", _at_least(1), option=("--threads", "-t")
    )
    kv_memory: int | None = defined(
        None, "Bound of the KV cache, such as 2GiB.", Amount(1, remedy=_at_least(1).remedy), keyword="int | str | None",
        metavar="SIZE", parser=str,
    )  # fmt: skip
    kv_dtype: KVDType = defined(
        "auto",
        "Of keys and values: bfloat16, float16, float32, int8, int4; auto: float16 for F16 weights, else bfloat16.",
    )
    quantize: Quantize | None = defined(None, "int8 or int4: weights that are not quantised yet, native.")
    strict: bool = defined(False, "Transformers backend: same bits at any batch, width and chunking (slower).")
    max_length: int | None = defined(
        None, "Most positions of a row. Default: the model's.", _at_least(2)  # a prompt's token and an answer's
    )  # fmt: skip
    chat_template: str | None = defined(
        None, "Of chats, in place of the model's: a file with a Jinja template, or its text.", Text(), metavar="FILE"
    )  # fmt: skip
    revision: str | None = defined(None, "Branch, tag or commit on Hugging Face.", Text())
    offline: bool = defined(_offline, "Download nothing: what is in the cache must do.")
    trust_remote_code: bool = defined(False, "Run code that comes with the model.")
    allow_pickle: bool = defined(False, "Read weights that are not safetensors; they can run code.")

    def __post_init__(self) -> None:
        check(self)


class LoadKeywords(TypedDict, total=False):
    """Fields of ``LoadOptions`` as keywords. Written by scripts/tables.py."""

    backend: Backend
    dtype: DType
    device: str
    threads: int | None
    kv_memory: int | str | None
    kv_dtype: KVDType
    quantize: Quantize | None
    strict: bool
    max_length: int | None
    chat_template: str | None
    revision: str | None
    offline: bool
    trust_remote_code: bool
    allow_pickle: bool
