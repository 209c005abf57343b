"""The models of a server: one that is always there, what requests need of a loaded one, and its fingerprint."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from outpace.common.arrays import I32
from outpace.common.version import __version__
from outpace.engine.aio import AsyncEngine
from outpace.errors import ModelError
from outpace.models.base import ModelInfo
from outpace.models.fingerprint import arithmetic, fingerprint_of
from outpace.models.options import BACKENDS, LoadOptions
from outpace.server.admission import Admission
from outpace.server.conversation.control import ControlTokens
from outpace.server.errors import APIError
from outpace.server.settings import ServerSettings
from outpace.text.grammar import Grammars
from outpace.text.token_bytes import TokenBytes, token_texts
from outpace.text.tokenizer import Tokenizer

_CHARACTERS = 3  # a value: 384 Ki characters take half a second to be made tokens, where they are the worst


class Models(Protocol):
    """The models of a server, by name. The first name is the one that requests get who name none."""

    def names(self) -> list[str]: ...
    def lease(self, name: str) -> Any:
        """``async with`` it: the model's AsyncEngine, which stays loaded meanwhile."""

    async def unload(self, name: str) -> bool:
        """Unload a model unless it is in use or always there; whether it is gone."""

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """By name, what is known of each; "state" is "loaded" or another."""

    async def close(self) -> None: ...


class SingleModel:
    """``engine`` under ``name``; it is closed with this."""

    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self._name, self._engine = name, engine

    def names(self) -> list[str]:
        return [self._name]

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AsyncEngine]:
        yield self._engine

    async def unload(self, name: str) -> bool:
        return False

    def state(self) -> dict[str, dict[str, Any]]:
        return {self._name: {"state": "loaded"}}

    async def close(self) -> None:
        await self._engine.__aexit__(None, None, None)


class Served:
    """A model as requests need it: engine, tokenizer, grammars, admission.

    Raises ModelError.
    """

    def __init__(self, name: str, serving: AsyncEngine, settings: ServerSettings, *, fingerprint: str) -> None:
        engine = serving.engine
        if engine.tokenizer is None:
            raise ModelError(f"{name} has no tokenizer, which a server needs: add its tokenizer.json")
        self.name, self.serving, self.fingerprint = name, serving, fingerprint
        self.tokenizer: Tokenizer = engine.tokenizer
        self.info: ModelInfo = engine.model.info
        self.created = int(time.time())
        shared = len(settings.api_keys) > 1 if settings.api_keys else not settings.loopback  # by key; by address
        self.admission = Admission(engine.options.max_rows, settings.queue, shared=shared)
        self.most_text = _CHARACTERS * settings.max_values  # characters of any text that is made tokens
        self.close_schemas = not settings.open_schemas
        self.control = ControlTokens(self.tokenizer, allowed=settings.control_tokens)

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars for this model's tokens, made when the first is asked for."""
        return Grammars(self.tokenizer, self.info.vocab_size, self.info.eos_ids, close=self.close_schemas, loose=True)

    @cached_property
    def most_characters(self) -> int:
        """A longer text has more tokens than the context holds (none has more characters than its spelling, and
        normalizers join a few at most), or takes long to be made tokens."""
        longest = max(len(self.tokenizer.token(token) or "") for token in range(self.tokenizer.vocab_size))
        joined = 4 if self.tokenizer.normalizes else 1
        return min(joined * longest * self.info.max_length, self.most_text)

    def ids(self, given: Sequence[int], param: str) -> I32:
        """Token ids int32 [n]. Raises APIError for one that the model does not have."""
        for its in given:
            if not 0 <= its < self.info.vocab_size:
                most = self.info.vocab_size - 1
                raise APIError(400, f"{param} has token id {its}, but this model's go from 0 to {most}", param=param)
        return np.array(given, np.int32)

    @cached_property
    def text_of(self) -> Callable[[int], str]:
        """A token's own text."""
        return token_texts(self.tokenizer)

    @cached_property
    def bytes_of(self) -> Callable[[int], list[int] | None]:
        """A token's bytes as JSON has them; None where the tokenizer's tokens have none of their own."""
        if self.tokenizer.spelling is None:
            return lambda token: None
        code = TokenBytes(self.tokenizer)
        return lambda token: list(code.of(token))


def system_fingerprint(serving: AsyncEngine, load: LoadOptions | None = None) -> str:
    """What an answer's bits depend on beside its request: the model's files, what computes with them, and in what.

    ``load``: how the model was loaded, where a revision matters. As in
    ``fp_5f2a...-a1-0.1.0-bfloat16-kvbfloat16``: 16 digits of the model ("none": it has no files), the version of the
    native backend's arithmetic (elsewhere the device, and whether it is strict), that of Outpace, the weights' type and
    the keys' and values' type (elsewhere their bytes a position); 8 digits of a template of chats that is not the
    model's. Reads pieces of the model's files: not for the event loop. Raises OSError.
    """
    model = serving.engine.model
    info = model.info
    files = fingerprint_of(info.name, load or LoadOptions()) if info.backend in BACKENDS else None
    version = arithmetic(info.backend)
    device = f"{info.device}{'-strict' if model.strict else ''}"
    computed = device if version is None else f"a{version}"
    found = (
        f"fp_{files or 'none'}-{computed}-{__version__}-{info.dtype}-kv{info.kv_dtype or info.kv_bytes_per_position}"
    )
    template = None if serving.engine.tokenizer is None else serving.engine.tokenizer.other_template
    return found if template is None else f"{found}-t{hashlib.sha256(template.encode()).hexdigest()[:8]}"
