"""From a checkpoint's path to a drafter beside a target: does it fit, and what computes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.common.files import expanded
from outpace.drafters.learned import shipped
from outpace.drafters.learned.assistant_files import is_assistant
from outpace.drafters.learned.checkpoint import Checkpoint, beyond, fit, read, stranger
from outpace.drafters.learned.config import EagleConfig, MedusaConfig
from outpace.drafters.learned.drafter import LearnedDrafter, Network
from outpace.drafters.learned.medusa import tree_of
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError
from outpace.models.fingerprint import fingerprint_of
from outpace.models.weights.hub import from_hub

if TYPE_CHECKING:
    from outpace.drafters.base import DraftContext
    from outpace.models.base import Model

log = logging.getLogger(__name__)

MOST_BRANCH, MOST_LEVELS = 16, 63
# Names under which others publish our methods.
METHODS_OF = {"peagle": "eagle", "dflash": "parallel", "dspark": "parallel"}
_NETWORKS: Mapping[str, Mapping[bool, str]] = {  # by method, then whether the target is native
    "eagle": {True: "native:NativeEagle", False: "networks.eagle:TorchEagle"},
    "peagle": {True: "native:NativeEagle", False: "networks.peagle:TorchPeagle"},
    "parallel": {True: "native:NativeParallel", False: "networks.parallel:TorchParallel"},
    "medusa": {True: "native:NativeMedusa", False: "networks.medusa:TorchMedusa"},
}


def build(spec: DrafterSpec, context: DraftContext) -> LearnedDrafter:
    """``eagle:PATH`` (or the drafter that comes with Outpace), ``parallel:PATH``, ``medusa:PATH``, the names in
    ``METHODS_OF``; ``drafter:PATH``, whose method its config.json tells. PATH: a folder, or a repository of a hub; of
    Gemma 4's assistant a GGUF file, too.

    Raises ModelError for what cannot be read, DrafterError for what does not fit ``context.target`` or is out of range.
    """
    assert spec.argument is not None, f"{spec.name} has an argument: the catalogue says so"
    name, path = f"{spec.name}:{spec.argument}", spec.argument
    if spec.name == "eagle" and path in shipped.NAMES:
        path = str(shipped.located(context.target.info, context.options))
    options = _options(spec, name)
    folder = located(path, spec.options.get("revision"), context.options.offline)
    if spec.name == "drafter" and is_assistant(folder):
        return _assistant(name, folder, context.target, options)
    checkpoint, notes = _fitting(spec, folder, context)
    network = network_for(checkpoint, context.target, spec.options.get("quantize"), name)
    layers, vocab = layers_of(checkpoint, context.target), context.target.info.vocab_size
    made = LearnedDrafter(network, layers, name, vocab, **options)
    made.notes = notes
    return made


def _assistant(name: str, folder: Path, target: Model, options: dict[str, int]) -> LearnedDrafter:
    from outpace.models.native.model import NativeModel

    if not isinstance(target, NativeModel):
        raise DrafterError(f"{name}: Gemma 4's assistant drafts on the native backend alone: use suffix")
    if options.pop("branch", 1) != 1:
        raise DrafterError(f"{name}: the assistant drafts chains: leave branch out")
    from outpace.drafters.learned.assistant import NativeAssistant

    info = target.info
    return LearnedDrafter(
        NativeAssistant(target, folder), (info.layers - 1,), name, info.vocab_size, branch=1, **options
    )


def build_mtp(spec: DrafterSpec, context: DraftContext) -> LearnedDrafter:
    """``mtp``: the layer of the target's own files that drafts. Raises DrafterError where there is none, ModelError."""
    from outpace.models.native.model import NativeModel

    target = context.target
    if not isinstance(target, NativeModel):
        raise DrafterError("mtp: the layer that drafts is read on the native backend alone: use suffix")
    from outpace.drafters.learned.native import NativeMtp

    network = NativeMtp(target)
    layers, vocab = (target.info.layers - 1,), target.info.vocab_size
    return LearnedDrafter(network, layers, spec.name, vocab, **_options(spec, spec.name))


def _options(spec: DrafterSpec, name: str) -> dict[str, int]:
    options: dict[str, int] = spec.given(branch="branch", most_levels="levels")
    for option, most in (("branch", MOST_BRANCH), ("levels", MOST_LEVELS)):
        if (value := spec.integer(option, None)) is not None and not 1 <= value <= most:
            raise DrafterError(f"{name}: {option}={value} is out of range: give 1 to {most}")
    return options


def network_for(checkpoint: Checkpoint, target: Model, quantize: str | None = None, name: str = "") -> Network:
    """What computes a checkpoint that fits the target: the target's own backend. ``quantize``: int8 or int4 for its
    weights, beside a native target. Raises DrafterError."""
    from outpace.models.native.model import QUANTIZE, NativeModel

    config, native, name = checkpoint.config, isinstance(target, NativeModel), name or checkpoint.method
    if quantize is not None and quantize not in QUANTIZE:
        raise DrafterError(f"{name}: quantize={quantize} is not known: use one of {', '.join(QUANTIZE)}")
    if quantize is not None and not native:
        raise DrafterError(f"{name}: quantize={quantize} needs a target on the native backend: leave it out")
    kind = "peagle" if isinstance(config, EagleConfig) and config.mask_token is not None else checkpoint.method
    if isinstance(config, EagleConfig) and kind == "eagle" and config.decoder.layers != 1:
        raise DrafterError(f"{name} has {config.decoder.layers} layers: use a drafter of one layer")
    given: list[Any] = [] if quantize is None else [quantize]
    if isinstance(config, MedusaConfig):
        given.append(tree_of(name, config.tree, config.heads))
    module, _, made = _NETWORKS[kind][native].partition(":")
    network: Network = getattr(import_module(f"outpace.drafters.learned.{module}"), made)(target, checkpoint, *given)
    return network


def layers_of(checkpoint: Checkpoint, target: Model) -> Sequence[int]:
    """The target's layers whose outputs the network of a checkpoint that fits reads, in its order."""
    config = checkpoint.config
    return (target.info.layers - 1,) if isinstance(config, MedusaConfig) else config.hidden_layers


def located(name: str, revision: str | None = None, offline: bool = False) -> Path:
    """The folder of a drafter: as it is, or one of a hub, "organisation/name", downloaded where it is not in the cache.
    Raises ModelError."""
    path = expanded(name)
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1 or "\\" in name:
        return path
    return from_hub(name, revision=revision, allow_pickle=True, offline=offline)  # of which only tensors are read


def _fitting(spec: DrafterSpec, path: Path, context: DraftContext) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint in a folder, as it is used beside the target; what its user should know of it."""
    name, info = f"{spec.name}:{spec.argument}", context.target.info
    checkpoint = read(path)
    method = checkpoint.method
    if METHODS_OF.get(spec.name, spec.name) not in ("drafter", method):
        raise DrafterError(f"{name} is a drafter of method {method}: name it {method}:{spec.argument}")
    if (longer := beyond(checkpoint, info)) is not None:
        log.warning("%s: %s", name, longer)
    fingerprint = fingerprint_of(info.name, context.options) if checkpoint.target else None
    checkpoint = fit(checkpoint, info, fingerprint)
    difference = stranger(checkpoint, info, fingerprint)
    if difference is None:
        return checkpoint, ()
    note = f"{name}: {difference}, so its drafts may rarely be accepted: train one beside this target"
    log.warning("%s", note)
    return checkpoint, (note,)
