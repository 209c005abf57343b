"""From names to a running engine: target, tokenizer, drafter, and the memory they may take."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from outpace.common.files import StrPath
from outpace.common.habits import HOMES
from outpace.common.units import format_bytes, parse_bytes
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.registry import build, parse
from outpace.drafters.spec import draft_models
from outpace.engine.intake import EngineOptions
from outpace.engine.keywords import EngineKeywords, OwnKeywords
from outpace.errors import Argument, ParameterError
from outpace.models.load import Source, estimate, live, load, resolve, unwrapped
from outpace.models.memory import spare_memory
from outpace.models.options import LoadKeywords, LoadOptions
from outpace.params import check_keywords

E = TypeVar("E")

log = logging.getLogger(__name__)


def load_engines(
    make: Callable[..., E],
    model: Any,
    drafters: Sequence[StrPath],
    options: Mapping[str, Any],
    more: Sequence[StrPath] = (),
) -> list[E]:
    """One engine a drafter spec, over one target; used in turn, not at once. ``more``: specs that requests may choose.
    ``model``: a name, or a transformers model in memory; then ``options`` may have its ``tokenizer``.

    Raises ModelError, DrafterError, ParameterError or MemoryLimitError; then nothing stays loaded.
    """
    options = dict(options)
    tokenizer = options.pop("tokenizer", None)
    if options.get("kv_memory") is not None:
        options = {**options, "kv_memory": parse_bytes(options["kv_memory"])}
    check_keywords(options, HOMES["Engine.load"], "Engine.load")
    engine_options = {name: options[name] for name in EngineKeywords.__annotations__ if name in options}
    load_options = LoadOptions(**{name: options[name] for name in LoadKeywords.__annotations__ if name in options})
    if isinstance(more, (str, os.PathLike)):
        raise ParameterError(Argument("drafters", more), " is a single one: give a list")
    specs, others = [parse(drafter) for drafter in drafters], [parse(drafter) for drafter in more]
    sized = [engine_options if s.size is None else {**engine_options, "size": s.size} for s in specs]
    checked = [EngineOptions(**own) for own in sized]
    beside = [draft_model for s in (*specs, *others) for draft_model in draft_models(s, load_options)]
    if isinstance(model, (str, os.PathLike)):
        if tokenizer is not None:
            raise ParameterError("a tokenizer goes with a model in memory: one that is loaded by name has its own")
        found = resolve(model, load_options)
        source: Source | None = found
        device, weights = _announce(found, beside, load_options)
    else:
        model = unwrapped(model)
        source, device, weights = None, str(getattr(model, "device", "cpu")), 0
    limit = load_options.kv_memory if load_options.kv_memory is not None else spare_memory(device, weights)
    load_options = replace(load_options, kv_memory=limit)
    if len(specs) > 1:  # used in turn: what one keeps would be another's loss
        sized = [{"prefix_rows": 0, **own} for own in sized]
    target, tokenizer = live(model, tokenizer, load_options) if source is None else load(source, load_options)
    with ExitStack() as undo:
        undo.callback(target.close)
        engines: list[E] = []
        for spec, own, one in zip(specs, sized, checked, strict=True):
            context = DraftContext(target, tokenizer, load_options, one.nodes, one.acceptance)
            built = [_closed_by(undo, build(each, context)) for each in (spec, *others)]
            named = {drafter.name: drafter for drafter in built[1:] if drafter.name != "none"}
            rest = {name: options[name] for name in OwnKeywords.__annotations__ if name in options}
            engine = make(target, tokenizer, drafter=built[0], drafters=named, kv_memory=limit, **own, **rest)
            engines.append(engine)
        undo.pop_all()
    return engines


def _closed_by(undo: ExitStack, drafter: Drafter) -> Drafter:
    undo.callback(drafter.close)
    return drafter


def _announce(model: Source, beside: Sequence[tuple[str, LoadOptions]], options: LoadOptions) -> tuple[str, int]:
    """Log what loading will take; the target's device, and the bytes of all weights there. ``beside``: draft models."""
    target = estimate(model, options)
    parts = [f"target {format_bytes(target.weights)}"]
    per_position, weights = target.kv_bytes_per_position, target.weights
    for draft_model, draft_options in beside:
        drafter = estimate(draft_model, draft_options)
        parts.append(f"drafter {format_bytes(drafter.weights)}")
        per_position += drafter.kv_bytes_per_position
        weights += drafter.weights if drafter.device == target.device else 0
    bound = "half of the free memory" if options.kv_memory is None else format_bytes(options.kv_memory)
    log.info("memory: %s, KV %s a position, bounded by %s", ", ".join(parts), format_bytes(per_position), bound)
    return target.device, weights
