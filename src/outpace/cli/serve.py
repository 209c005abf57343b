"""``outpace serve``: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common, Draft, Load
from outpace.common.installing import install
from outpace.common.parameter import option
from outpace.errors import Argument, MissingExtraError, ParameterError
from outpace.server.settings import ServerSettings

_PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance")
_KEYS = "OUTPACE_API_KEYS"


def run(
    load: Load,
    draft: Draft,
    common: Common,
    *,
    max_rows: Annotated[int, option("Answers that are written at once.", group="limits")] = 16,
    settings: ServerSettings,
    more_drafter: Annotated[list[str] | None, option("A drafter that requests may choose. Repeatable.")] = None,
    also: Annotated[
        list[str] | None, option("Another model, loaded when it is asked for. Repeatable.", metavar="MODEL")
    ] = None,
    model_memory: Annotated[
        str | None, option("With --also: of all loaded models, such as 8GiB.", metavar="SIZE", group="limits")
    ] = None,
    served_name: Annotated[str | None, option("What requests call the model.")] = None,
    api_key_file: Annotated[Path | None, option(f"Keys, one a line; also from {_KEYS}, between commas.")] = None,
    prefill_delay: Annotated[
        float, option("Seconds by which prompts may hold up answers in a step.", group="limits")
    ] = 0.05,
    step_stretch: Annotated[
        float, option("Longest step that drafts in a batch may make, in plain steps.", group="limits")
    ] = 2.0,
    cache_dir: Annotated[
        Path | None, option("Keep the KV of prompts here, beyond memory and restarts (native).", metavar="DIR")
    ] = None,
    cache_size: Annotated[
        str | None, option("Most of it. Default: 8GiB, or a tenth of what is free.", metavar="SIZE", group="limits")
    ] = None,
    log_format: Annotated[str, option("text, or json: one object a line.", group="output")] = "text",
    otel: Annotated[bool, option("OpenTelemetry spans, as its environment variables say.", group="output")] = False,
    replicas: Annotated[
        str | None, option("How many servers answer at one address; 1-4: from one to four, as load asks.", metavar="N")
    ] = None,
    ray: Annotated[str | None, option("Of the cluster on which they run.", metavar="ADDRESS")] = None,
) -> int:
    """Serve a model with OpenAI's API."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"a server needs {', '.join(missing)}: {install('outpace[serve]')}")
    if common.json is not None:
        raise ParameterError(
            Argument("json", str(common.json)), " is for figures, of which a server has none: leave it out"
        )
    from outpace.common.allocator import few_arenas

    if settings.any_name and also:
        raise ParameterError(Argument("any_name"), " is of the only model: leave ", Argument("also"), " out")
    if model_memory is not None and not also:
        raise ParameterError(Argument("model_memory", model_memory), " bounds several models: name more with --also")
    settings = replace(settings, api_keys=_keys(api_key_file))
    if not settings.loopback and not settings.api_keys:
        print(
            f"warning: whoever reaches {settings.host} may ask, since there are no keys: give some with "
            f"--api-key-file or {_KEYS}", file=sys.stderr, flush=True,
        )  # fmt: skip
    if replicas is not None or ray is not None:
        if find_spec("ray") is None:
            raise MissingExtraError(f"replicas need Ray: {install('outpace[ray]')}")
        from outpace.integrations.ray.start import run as run_replicas

        return run_replicas(
            sys.argv[2:], replicas or "1", ray, host=settings.host, port=settings.port, threads=load.threads,
            device=load.device, max_rows=max_rows, max_body=settings.max_body, drain=settings.drain,
        )  # fmt: skip
    from outpace.server.engines.generation import Observer
    from outpace.server.observe.logs import RequestLog, configure
    from outpace.server.observe.metrics import Metrics
    from outpace.server.observe.spans import Spans, tracer

    observers: list[Observer] = [Metrics(), RequestLog(), *([Spans(tracer())] if otel else [])]
    configure(log_format)
    few_arenas()
    from outpace.common.units import format_bytes
    from outpace.engine.aio import AsyncEngine
    from outpace.engine.kv_files import checked_limit
    from outpace.models.load import published_name
    from outpace.server.api.completions import check_defaults
    from outpace.server.engines.models import Models, SingleModel, system_fingerprint
    from outpace.server.engines.pool import Pool, pooled
    from outpace.server.engines.runner import Server, bound, steady
    from outpace.server.engines.service import Service

    with ExitStack() as stack:
        listener = stack.enter_context(bound(settings))  # before a model is loaded for nothing
        given = [load.model, *(also or ())]
        names = [served_name or published_name(load.model), *map(published_name, also or ())]
        if len({*names}) < len(names):  # files of one name in several folders
            names = [served_name or load.model, *(also or ())]
        options = {"size": draft.size, "acceptance": draft.acceptance, "max_rows": max_rows}
        options |= {"prefill_delay": prefill_delay, "step_stretch": step_stretch}
        options |= {"cache_dir": cache_dir, "cache_size": cache_size}
        if cache_dir is not None:
            limit = format_bytes(checked_limit(cache_dir, cache_size))
            print(f"the KV of prompts is kept in {cache_dir}, in at most {limit}", file=sys.stderr, flush=True)

        def models() -> Models:
            if not also:
                engine = load.engine(draft.drafter, more=more_drafter or (), **options)
                return SingleModel(names[0], AsyncEngine(engine))
            shared = load.given(**options, drafter=draft.drafter, drafters=tuple(more_drafter or ()))
            first = pooled(names[0], given[0], **shared)
            shared.pop("chat_template", None)
            rest = [pooled(*each, **shared) for each in zip(names[1:], given[1:], strict=True)]
            return Pool([first, *rest], memory=model_memory)

        async def serve() -> None:
            served = models()
            try:
                await check_defaults(served, settings)
            except BaseException:
                await served.close()
                raise
            service = Service(
                served,
                settings,
                fingerprint=lambda model: system_fingerprint(model, load.load_options()),
                observers=observers,
                spellings=dict(zip(given, names, strict=True)),
            )
            server = Server(service, listener)
            steady()
            where, at = server.address
            url = f"http://{where}:{at}"
            print(f"{', '.join(service.names())} at {url}/v1, and a page at {url}/", file=sys.stderr, flush=True)
            await server.run_until_stopped()

        asyncio.run(serve())
    return 0


def _keys(path: Path | None) -> tuple[str, ...]:
    keys = [key.strip() for key in os.environ.get(_KEYS, "").split(",")]
    if path is not None:
        try:
            keys += [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError:
            raise ParameterError(f"{path} is not UTF-8: write one key a line") from None
    found = tuple(dict.fromkeys(key for key in keys if key))
    if path is not None and not found:
        raise ParameterError(f"{path} has no key, so that everybody would be let in: write one a line")
    return found


COMMAND = Command(
    "serve",
    run,
    "outpace serve -m demo --port 8000\n"
    "outpace serve -m model.gguf -d suffix --host 0.0.0.0 --api-key-file keys.txt\n"
    "outpace serve -m demo --replicas 2",
)
