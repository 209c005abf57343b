"""An engine as a worker of NVIDIA Dynamo (``ai-dynamo`` 1.6): ``python -m outpace.integrations.dynamo --model demo``.

Dynamo's frontend tokenizes, routes and detokenizes. When a worker dies in mid-stream, the frontend asks another one:
with the delivered tokens appended to the prompt and taken off ``max_tokens``. Only such a request has a
``migration_link``, which the frontend copies from the first chunk that a worker sends (``worker_trace_link``): the
worker writes there where the prompt ends, and the seed. So the answer goes on with the tokens it would have had.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from pydantic import ValidationError

from outpace.cli.command import Parser, UsageError
from outpace.cli.serve import COMMAND
from outpace.common.files import cache_dir, write_json
from outpace.common.parameter import option
from outpace.engine.aio import AsyncEngine, Running
from outpace.engine.engine import Engine
from outpace.engine.results import Delta
from outpace.errors import OutpaceError
from outpace.models.load import Source, published_name, resolve
from outpace.params import SamplingParams
from outpace.server.errors import APIError
from outpace.text.grammar import Grammars
from outpace.text.tokenizer import Tokenizer

MARK = 0x6F757470616365_01  # the upper half of a trace id that stands for no trace: "outpace", and a version
RESUME = "outpace.resume:"  # an annotation (nvext.annotations): delivered token ids as JSON; n > 1: a list a choice
BLOCK = 16  # positions; Dynamo's routers count in blocks, and our cache knows none
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "include_stop_str_in_output",
)  # fmt: skip
STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
OURS = {"include_stop_str_in_output": "include_stop", "stop_token_ids": "stop_ids"}
ENGINE = ("drafter", "size", "threads", "kv_memory", "max_rows")  # options of outpace serve that a worker has
UNKNOWN = ("best_of", "use_beam_search", "length_penalty")


class Asked(NamedTuple):
    """What a request asks of ``Engine.prepare``."""

    prompt: list[int]
    params: SamplingParams
    resume: list[Any] | None  # delivered token ids; with n > 1 a list a choice


class Outpace(LLMEngine):
    """Dynamo's backend interface over an ``AsyncEngine``."""

    def __init__(self, model: str, served: str, options: Mapping[str, Any]) -> None:
        self._model, self._served, self._options = model, served, options
        self._engine: AsyncEngine | None = None
        self._grammars: Grammars | None = None
        self._running: dict[str, Running] = {}  # by Dynamo's request id

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Outpace, Any]:
        """The engine, not yet loaded, and how Dynamo registers it. Raises ModelError for a model that is not there,
        SystemExit for options that mean nothing."""
        parser = Parser("python -m outpace.integrations.dynamo", "A worker of NVIDIA Dynamo.", "... --model demo")
        for parameter in COMMAND.options():
            if parameter.name in ("model", "served_name", *ENGINE):
                parser.add(replace(parameter, group=""))
        for name, value in (
            ("namespace", "dynamo"),
            ("discovery_backend", os.environ.get("DYN_DISCOVERY_BACKEND", "etcd")),
            ("request_plane", os.environ.get("DYN_REQUEST_PLANE", "tcp")),
        ):
            parser.add(option("Dynamo's.", default=value).of(name, str))
        try:
            given = vars(parser.read(sys.argv[1:] if argv is None else argv))
        except UsageError as error:
            raise SystemExit(f"outpace.integrations.dynamo: {error}") from None
        options = {name: given[name] for name in ENGINE if given[name] is not None}
        served = given["served_name"] or published_name(given["model"])
        config = WorkerConfig(
            namespace=given["namespace"], component="outpace", model_name=str(card_of(resolve(given["model"]))),
            served_model_name=served, discovery_backend=given["discovery_backend"],
            request_plane=given["request_plane"], enable_kv_routing=False,
        )  # fmt: skip
        return cls(given["model"], served, options), config

    async def start(self, worker_id: int) -> Any:
        """Load the engine. Raises as ``Engine.load`` does."""
        self._engine = await AsyncEngine.load(self._model, **self._options)
        engine = self._engine.engine
        registered = LlmRegistration(
            context_length=engine.model.info.max_length, kv_cache_block_size=BLOCK, max_num_seqs=engine.options.max_rows
        )
        return EngineConfig(model=self._model, served_model_name=self._served, llm=registered)

    async def generate(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        """Chunks of the answer. Raises InvalidArgument for a request that cannot be, EngineShutdown where the engine
        is gone: Dynamo then asks another worker."""
        engine, name = self._engine, context.id()
        if engine is None:
            raise EngineShutdown("the engine is not loaded")
        try:
            asked = read(request)
            rules = self._rules(engine.engine, request["sampling_options"].get("guided_decoding"))
            params = asked.params.with_(rules=rules)
            prepared = await asyncio.to_thread(engine.engine.prepare, asked.prompt, params, resume=asked.resume)
        except OutpaceError as error:
            raise InvalidArgument(str(error)) from error
        first: dict[str, Any] = {"worker_trace_link": link(len(asked.prompt), prepared.request.seed)}
        left, written = params.n, 0  # choices that run, and tokens of those that have ended
        async with contextlib.aclosing(await engine.open([prepared])) as running:
            self._running[name] = running
            try:
                while running.left:
                    for delta in await running.get():
                        made = {**chunk(delta, params), **first}
                        if delta.result is not None:
                            delta.result.raise_for_error()
                            left, written = left - 1, written + delta.result.completion_tokens
                            if not left:  # Dynamo ends a request with the first reason that it gets
                                made |= end(delta.result.finish_reason, len(asked.prompt), written)
                        yield made
                        first = {}
            except OutpaceError as error:
                raise EngineShutdown(str(error)) from error
            finally:
                del self._running[name]

    def _rules(self, engine: Engine, guided: Mapping[str, Any] | None) -> list[Any]:
        """The grammar that ``guided_decoding`` asks for. Raises ParameterError."""
        given = {f"guided_{kind}": what for kind, what in (guided or {}).items() if what is not None}
        if not given:
            return []
        from outpace.server.api import formats

        if unknown := set(given) - set(formats.Formats.model_fields):
            raise InvalidArgument(f"{', '.join(sorted(unknown))} is not served by this worker: leave it out")
        try:
            found = formats.wanted(formats.Formats.model_validate(given), None)
        except (ValidationError, APIError) as error:
            raise InvalidArgument(str(error)) from error
        self._grammars = self._grammars or Grammars.of(engine)
        return [] if found is None else [formats.compiled(found[0], self._grammars)]

    async def abort(self, context: Any) -> None:
        """End a request whose client is gone."""
        running = self._running.get(context.id())
        if running is not None:
            running.close()

    async def is_quiescent(self) -> bool:
        return not self._running

    async def cleanup(self) -> None:
        """End what runs and give the memory back. Calling twice is allowed."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)


def card_of(source: Source) -> Path:
    """The folder from which Dynamo's frontend takes tokenizer, chat template and context: the model's own, or for a
    GGUF file one that is made in the cache. Raises ModelError or OSError."""
    if source.gguf is None:
        return source.path
    folder, tokenizer = cache_dir() / "dynamo" / source.path.stem, Tokenizer.from_gguf(source.gguf)
    family = source.gguf.text("general.architecture", "llama")
    longest = source.gguf.metadata.get(f"{family}.context_length", 2048)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    write_json(
        folder / "config.json",
        {
            "model_type": family, "architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.vocab_size,
            "eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id,
            "max_position_embeddings": longest,
        },
    )  # fmt: skip
    return folder


def read(request: Mapping[str, Any]) -> Asked:
    """What Dynamo's preprocessed ``request`` asks for. Raises ParameterError, or InvalidArgument for what Dynamo has
    and we do not."""
    sampling, stopping = request["sampling_options"], request["stop_conditions"]
    for name in UNKNOWN:
        if sampling.get(name) not in (None, False, 1, 1.0):
            raise InvalidArgument(f"{name}={sampling[name]} is not served by this worker: leave it out")
    given: dict[str, Any] = {"temperature": 1.0}
    for options, names in ((sampling, SAMPLING), (stopping, STOPPING)):
        given |= {OURS.get(name, name): decimal(options[name]) for name in names if options.get(name) is not None}
    if sampling.get("n") is not None:
        given["n"] = sampling["n"]
    if sampling.get("seed") is not None:
        given["seed"] = sampling["seed"] % 2**64
    wanted = (request.get("output_options") or {}).get("logprobs")
    if wanted is not None:
        given |= {"logprobs": True, "top_logprobs": wanted}
    tokens, resume = list(request["token_ids"]), annotated(request.get("annotations") or ())
    if request.get("migration_link") is not None:
        begin, seed = linked(request["migration_link"])
        tokens, resume = tokens[:begin], tokens[begin:]
        given["seed"] = seed
        if "max_tokens" in given:
            given["max_tokens"] += len(resume)
    return Asked(tokens, SamplingParams(**{"max_tokens": None, **given}), resume or None)


def annotated(annotations: Sequence[str]) -> list[Any] | None:
    """The token ids of an annotation ``outpace.resume``, if there is one. Raises InvalidArgument."""
    for each in annotations:
        if each.startswith(RESUME):
            try:
                return list(json.loads(each.removeprefix(RESUME)))
            except (ValueError, TypeError):
                raise InvalidArgument(f"the annotation {each!r} has no token ids: give JSON, such as [1, 2]") from None
    return None


def decimal(value: Any) -> Any:
    """Dynamo has numbers in float32: 0.8 arrives as 0.800000011920929, and is 0.8 again."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def link(prompt: int, seed: int) -> dict[str, str]:
    """Where an answer begins and what it is drawn with, as hexadecimal ids of a trace and a span."""
    return {"trace_id": f"{MARK:016x}{seed:016x}", "span_id": f"{prompt:016x}"}


def linked(found: Mapping[str, str]) -> tuple[int, int]:
    """``prompt`` and ``seed`` of ``link``. Raises InvalidArgument for a link that another program made."""
    mark, seed, prompt = (int(found[name][part], 16) for name, part in (
        ("trace_id", slice(16)), ("trace_id", slice(16, None)), ("span_id", slice(None)),
    ))  # fmt: skip
    if mark != MARK:
        raise InvalidArgument(
            "this request was begun by a worker that is no outpace, or whose tracing is on (OTEL_EXPORT_ENABLED), so "
            "where its answer began is not known: ask again from the beginning"
        )
    return prompt, seed


def chunk(delta: Delta, params: SamplingParams) -> dict[str, Any]:
    """A delta's tokens as Dynamo has them."""
    made: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": delta.sample}
    if params.wants_logprobs:
        made["log_probs"] = [each.logprob for each in delta.logprobs]
        made["top_logprobs"] = [
            [ranked(i, *a) for i, a in enumerate(each.top or [(each.token, each.logprob, each.text)], 1)]
            for each in delta.logprobs
        ]
    return made


def end(reason: str, prompt: int, written: int) -> dict[str, Any]:
    """How a request ends: ``written`` tokens of all its choices, after ``prompt`` ones."""
    usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    return {"finish_reason": {"deadline": "cancelled"}.get(reason, reason), "completion_usage": usage}


def ranked(rank: int, token: int, logprob: float, text: str | None) -> dict[str, Any]:
    """An alternative as Dynamo has it."""
    return {"rank": rank, "token_id": token, "token": text, "logprob": logprob}


if __name__ == "__main__":
    run(Outpace)
