"""From names to a running engine: target, tokenizer, drafter, and the memory they may take."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.errors import MemoryLimitError, ParameterError
from outpace.models.load import LoadOptions, estimate, load
from outpace.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from outpace.engine.engine import Engine

E = TypeVar("E", bound="Engine")

log = logging.getLogger(__name__)

ENGINE_OPTIONS = ("size", "acceptance", "max_rows", "prefill_chunk", "prefix_rows")


def load_engine(kind: type[E], model: str, drafter: str, options: dict[str, Any]) -> E:
    """What ``Engine.load`` does."""
    return load_engines(kind, model, [drafter], options)[0]


def load_engines(kind: type[E], model: str, drafters: Sequence[str], options: dict[str, Any]) -> list[E]:
    """One engine a drafter spec, over one target; used in turn, not at once.

    Raises ModelError, DrafterError, ParameterError or MemoryLimitError; then nothing stays loaded.
    """
    if options.get("kv_memory") is not None:
        options = {**options, "kv_memory": parse_bytes(options["kv_memory"])}
    known = {field.name for field in fields(LoadOptions)}
    for name in options:
        if name not in known and name not in ENGINE_OPTIONS:
            takes = ", ".join((*sorted(known), *ENGINE_OPTIONS))
            raise ParameterError(f"{name!r} is no option of Engine.load: it takes {takes}")
    engine_options = {name: value for name, value in options.items() if name in ENGINE_OPTIONS}
    load_options = LoadOptions(**{name: value for name, value in options.items() if name in known})
    specs = [parse(drafter) for drafter in drafters]
    sized = [engine_options if s.size is None else {**engine_options, "size": s.size} for s in specs]
    sizes = [kind.check_options(**own) for own in sized]
    weights = _announce(model, [id_ for s in specs for id_ in s.arguments_of("model")], load_options)
    limit = load_options.kv_memory if load_options.kv_memory is not None else _spare_memory(weights)
    target, tokenizer = load(model, load_options)
    engines: list[E] = []
    try:
        for spec, own, size in zip(specs, sized, sizes, strict=True):
            acceptance = own.get("acceptance", "coupled")
            drafter = build(spec, DraftContext(target, tokenizer, load_options, size, acceptance))
            engines.append(kind(target, tokenizer, drafter=drafter, kv_memory=limit, **own))
    except BaseException:
        for engine in engines:
            engine.close()
        target.close()
        raise
    return engines


def _announce(model: str, draft_models: Sequence[str], options: LoadOptions) -> int:
    """Log what loading will take, and return the weights' bytes."""
    target = estimate(model, options)
    parts = [f"target {format_bytes(target.weights)}"]
    per_position, weights = target.kv_bytes_per_position, target.weights
    for draft_model in draft_models:
        drafter = estimate(draft_model, options)
        parts.append(f"drafter {format_bytes(drafter.weights)}")
        per_position, weights = per_position + drafter.kv_bytes_per_position, weights + drafter.weights
    bound = "half of the free memory" if options.kv_memory is None else format_bytes(options.kv_memory)
    log.info("memory: %s, KV %s a position, bounded by %s", ", ".join(parts), format_bytes(per_position), bound)
    return weights


def _spare_memory(weights: int) -> int | None:
    """Half of what is free once the weights are loaded; None where the system does not say."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    with_cache = available_memory() or free
    if with_cache < weights:
        raise MemoryLimitError(
            f"the weights need {format_bytes(weights)}, but {format_bytes(with_cache)} are free: "
            "use a smaller model or --dtype bfloat16"
        )
    return (with_cache - weights) // 2


def available_memory() -> int | None:
    """Linux' own estimate of what can be had without swapping, in bytes."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
