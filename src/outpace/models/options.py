"""How a model is to be loaded: what a user may ask for, checked before any file is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, TypedDict, get_args

from outpace.common.parameter import Flag
from outpace.errors import Argument, ParameterError

Backend = Literal["auto", "native", "transformers"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "bfloat16", "float32", "int8"]
Quantize = Literal["int8", "int4"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
DTYPES: tuple[DType, ...] = get_args(DType)
KV_DTYPES: tuple[KVDType, ...] = get_args(KVDType)
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model. Raises ParameterError that names the option.

    ``backend``: auto, native or transformers. ``dtype``: auto is what the file has on the native backend; elsewhere
    float32 on a CPU, where identical tokens are promised, and the checkpoint's own type on a GPU. ``device``: auto is
    the GPU if there is one. ``threads``: of the CPU (None: all). ``max_length``: most positions of a row.
    ``kv_memory``: hard bound in bytes. ``kv_dtype`` and ``quantize`` concern the native backend: bfloat16, float32 or
    int8 keys and values; int8 or int4 for weights that are not quantised yet. ``strict``: on the Transformers backend,
    too, a token's bits depend on nothing that is computed beside it, as they never do on the native one.
    ``revision``: a branch, tag or commit on Hugging Face; ``offline``: download nothing. ``trust_remote_code``: run
    code that comes with the model; ``allow_pickle``: read weights that are not safetensors, which can run code.
    """

    backend: Backend = "auto"
    dtype: DType = "auto"
    device: str = "auto"
    threads: int | None = None
    max_length: int | None = None
    kv_memory: int | None = field(default=None, metadata={"keyword": "int | str | None"})  # "2GiB" is parsed
    kv_dtype: KVDType = "auto"
    quantize: Quantize | None = None
    strict: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    offline: bool = field(default_factory=_offline)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("backend", self.backend, BACKENDS),
            ("dtype", self.dtype, DTYPES),
            ("kv_dtype", self.kv_dtype, KV_DTYPES),
            ("quantize", self.quantize or "int8", QUANTIZE),
        ):
            if value not in known:
                raise ParameterError(Argument(name, value), f" is not known: use one of {', '.join(known)}")
        for name in ("strict", "trust_remote_code", "allow_pickle", "offline"):
            Flag().checked(name, getattr(self, name))  # a text such as "no" would be true
        for name in ("device", "revision"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name, value) != ("revision", None):
                raise ParameterError(Argument(name, value), " is no text: give one, or leave it out")
        for name, least in (("threads", 1), ("max_length", 2), ("kv_memory", 1)):  # a prompt's token and an answer's
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
                limits = f" is out of range: give a whole number of at least {least}, or leave it out"
                raise ParameterError(Argument(name, number), limits)


class LoadKeywords(TypedDict, total=False):
    """Fields of ``LoadOptions`` as keywords. Written by scripts/tables.py."""

    backend: Backend
    dtype: DType
    device: str
    threads: int | None
    max_length: int | None
    kv_memory: int | str | None
    kv_dtype: KVDType
    quantize: Quantize | None
    strict: bool
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    offline: bool
