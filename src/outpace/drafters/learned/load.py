"""From a checkpoint's path to a drafter beside a target: does it fit, and what computes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outpace.common.files import StrPath
from outpace.drafters.learned import shipped
from outpace.drafters.learned.checkpoint import (
    Checkpoint,
    EagleConfig,
    MedusaConfig,
    ParallelConfig,
    fit,
    read,
    stranger,
)
from outpace.drafters.learned.drafter import BRANCH, LearnedDrafter, Network
from outpace.drafters.learned.medusa import Path as TreePath
from outpace.drafters.learned.medusa import tree_of
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError
from outpace.models.fingerprint import fingerprint_of

if TYPE_CHECKING:
    from outpace.drafters.base import DraftContext
    from outpace.models.base import Model

log = logging.getLogger(__name__)

MOST_BRANCH, MOST_LEVELS = 16, 63


def eagle(spec: DrafterSpec, context: DraftContext) -> LearnedDrafter:
    """``eagle:PATH``, or the drafter that comes with Outpace. Raises as ``load_eagle``."""
    path: StrPath = _path(spec)
    if path in shipped.NAMES:
        path = shipped.located(context.target.info, context.options)
    options = {name: spec.integer(name, None) for name in ("branch", "levels")}
    return load_eagle(path, context, name=f"eagle:{spec.argument}", quantize=spec.options.get("quantize"), **options)


def load_eagle(
    path: StrPath,
    context: DraftContext,
    *,
    name: str | None = None,
    branch: int | None = None,
    levels: int | None = None,
    quantize: str | None = None,
) -> LearnedDrafter:
    """``eagle:PATH``. ``name``: what it is called, if not that. ``quantize``: int8 or int4 for its weights, beside a
    native target.

    Raises ModelError for what cannot be read, DrafterError for what does not fit ``context.target`` or is out of range.
    """
    name = name or f"eagle:{path}"
    for option, value, most in (("branch", branch, MOST_BRANCH), ("levels", levels, MOST_LEVELS)):
        if value is not None and not 1 <= value <= most:
            raise DrafterError(f"{name}: {option}={value} is out of range: give 1 to {most}")
    checkpoint, notes = _fitting("eagle", path, context)
    config = checkpoint.config
    assert isinstance(config, EagleConfig)
    if config.decoder.layers != 1:
        raise DrafterError(f"{name} has {config.decoder.layers} layers: use a drafter of one layer")
    network, wide = eagle_for(checkpoint, context, quantize, name), BRANCH if branch is None else branch
    return _made(network, config.hidden_layers, name, context, notes, branch=wide, most_levels=levels)


def _path(spec: DrafterSpec) -> str:
    assert spec.argument is not None, f"{spec.name} has an argument: the catalogue says so"
    return spec.argument


def parallel(spec: DrafterSpec, context: DraftContext) -> LearnedDrafter:
    """``parallel:PATH``. Raises as ``load_eagle``."""
    path = _path(spec)
    checkpoint, notes = _fitting("parallel", path, context)
    assert isinstance(checkpoint.config, ParallelConfig)
    return _made(
        parallel_for(checkpoint, context.target), checkpoint.config.hidden_layers, f"parallel:{path}", context, notes
    )


def medusa(spec: DrafterSpec, context: DraftContext) -> LearnedDrafter:
    """``medusa:PATH``. Raises as ``load_eagle``."""
    path = _path(spec)
    checkpoint, notes = _fitting("medusa", path, context)
    config = checkpoint.config
    assert isinstance(config, MedusaConfig)
    network = medusa_for(checkpoint, context.target, tree_of(f"medusa:{path}", config.tree, config.heads))
    return _made(network, (context.target.info.layers - 1,), f"medusa:{path}", context, notes)


def _made(
    network: Network, layers: Sequence[int], name: str, context: DraftContext, notes: tuple[str, ...], **options: Any
) -> LearnedDrafter:
    made = LearnedDrafter(network, layers, name, context.target.info.vocab_size, **options)
    made.notes = notes
    return made


def _fitting(method: str, path: StrPath, context: DraftContext) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint in a folder, as it is used beside the target; what its user should know of it."""
    name, info = f"{method}:{path}", context.target.info
    checkpoint = read(path)
    if checkpoint.method != method:
        raise DrafterError(f"{name} is a drafter of method {checkpoint.method}: name it {checkpoint.method}:{path}")
    fingerprint = fingerprint_of(info.name, context.options) if checkpoint.target else None
    checkpoint = fit(checkpoint, info, fingerprint)
    difference = stranger(checkpoint, info, fingerprint)
    if difference is None:
        return checkpoint, ()
    note = f"{name}: {difference}, so its drafts may rarely be accepted: train one beside this target"
    log.warning("%s", note)
    return checkpoint, (note,)


def parallel_for(checkpoint: Checkpoint, target: Model) -> Network:
    """What computes a parallel drafter's network: a native target's runtime, torch beside one of transformers."""
    from outpace.models.native.model import NativeModel

    if isinstance(target, NativeModel):
        from outpace.drafters.learned.native import NativeParallel

        return NativeParallel(target, checkpoint)
    from outpace.drafters.learned.torch_runtime import TorchParallel

    return TorchParallel(target, checkpoint)


def medusa_for(checkpoint: Checkpoint, target: Model, tree: Sequence[TreePath]) -> Network:
    """What computes Medusa's heads: a native target's runtime, torch beside one of transformers."""
    from outpace.models.native.model import NativeModel

    if isinstance(target, NativeModel):
        from outpace.drafters.learned.native import NativeMedusa

        return NativeMedusa(target, checkpoint, tree)
    from outpace.drafters.learned.torch_runtime import TorchMedusa

    return TorchMedusa(target, checkpoint, tree)


def eagle_for(checkpoint: Checkpoint, context: DraftContext, quantize: str | None, name: str) -> Network:
    """What computes EAGLE's network: the target's own backend. Raises DrafterError."""
    from outpace.models.native.model import QUANTIZE, NativeModel

    if quantize is not None and quantize not in QUANTIZE:
        raise DrafterError(f"{name}: quantize={quantize} is not known: use one of {', '.join(QUANTIZE)}")
    if isinstance(context.target, NativeModel):
        from outpace.drafters.learned.native import NativeEagle

        return NativeEagle(context.target, checkpoint, quantize)
    if quantize is not None:
        raise DrafterError(f"{name}: quantize={quantize} needs a target on the native backend: leave it out")
    from outpace.drafters.learned.torch_eagle import TorchEagle

    return TorchEagle(context.target, checkpoint)
