"""Trained drafters from their specs."""

from __future__ import annotations

from pathlib import Path

from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.learned import shipped
from outpace.drafters.learned.load import load_eagle, load_medusa, load_parallel
from outpace.drafters.spec import DrafterSpec


def eagle(spec: DrafterSpec, context: DraftContext) -> Drafter:
    assert spec.argument is not None
    path: str | Path = spec.argument
    if path in shipped.NAMES:
        path = shipped.located(context.target.info, context.options)
    options = {name: spec.integer(name, None) for name in ("branch", "levels")}
    return load_eagle(path, context, name=f"eagle:{spec.argument}", quantize=spec.options.get("quantize"), **options)


def parallel(spec: DrafterSpec, context: DraftContext) -> Drafter:
    assert spec.argument is not None
    return load_parallel(spec.argument, context)


def medusa(spec: DrafterSpec, context: DraftContext) -> Drafter:
    assert spec.argument is not None
    return load_medusa(spec.argument, context)
