"""From names to a running engine: target, tokenizer, drafter, and the memory they may take."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.errors import MemoryLimitError, ParameterError
from outpace.models.loader import LoadOptions, estimate, load
from outpace.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from outpace.engine import Engine

log = logging.getLogger(__name__)

ENGINE_OPTIONS = ("size", "acceptance", "max_rows", "prefill_chunk", "prefix_rows")


def load_engine(kind: type[Engine], model: str, drafter: str, options: dict[str, Any]) -> Engine:
    """What ``Engine.load`` does. Raises ModelError, DrafterError, ParameterError or MemoryLimitError."""
    if "kv_memory" in options and options["kv_memory"] is not None:
        options = {**options, "kv_memory": parse_bytes(options["kv_memory"])}
    known = {field.name for field in fields(LoadOptions)}
    for name in options:
        if name not in known and name not in ENGINE_OPTIONS:
            raise ParameterError(
                f"{name!r} is no option of Engine.load: it takes {', '.join(sorted(known))} and "
                f"{', '.join(ENGINE_OPTIONS)}"
            )
    engine_options = {name: value for name, value in options.items() if name in ENGINE_OPTIONS}
    load_options = LoadOptions(**{name: value for name, value in options.items() if name in known})
    spec = parse(drafter)
    if spec.size is not None:
        engine_options["size"] = spec.size
    size = kind.check_options(**engine_options)
    weights = _announce(model, spec.arguments_of("model"), load_options)
    limit = load_options.kv_memory if load_options.kv_memory is not None else _spare_memory(weights)
    target, tokenizer = load(model, load_options)
    try:
        acceptance = engine_options.get("acceptance", "coupled")
        built = build(spec, DraftContext(target, tokenizer, load_options, size, acceptance))
        return kind(target, tokenizer, drafter=built, kv_memory=limit, **engine_options)
    except BaseException:
        target.close()
        raise


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
    with_cache = _available() or free
    if with_cache < weights:
        raise MemoryLimitError(
            f"the weights need {format_bytes(weights)}, but {format_bytes(with_cache)} are free: "
            "use a smaller model or --dtype bfloat16"
        )
    return (with_cache - weights) // 2


def _available() -> int | None:
    """Linux' own estimate of what can be had without swapping, in bytes."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
