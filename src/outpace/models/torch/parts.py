"""The embedding, final norm and head of a transformers model, found by watching one forward and proven on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from outpace.common.arrays import I32
from outpace.errors import ModelError
from outpace.models.torch.upload import uploaded

# How far apart two computations of the same may be, relative to the largest value: rounding, of another order of sums.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(slots=True)
class _Seen:
    """What one forward over [1, n] tokens showed; the calls are those of modules outside of the layers."""

    embedded: torch.Tensor | None = None
    entered: torch.Tensor | None = None  # the first layer
    left: torch.Tensor | None = None  # the last layer
    headed: torch.Tensor | None = None  # what the head was given
    calls: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TorchParts:
    """See ``Parts``. Gradients flow through, so a drafter can be trained against them."""

    name: str
    embedding: torch.nn.Module
    scale: float | None  # of the embedding, beyond what its module does; None: it depends on more than the token
    final_norm: torch.nn.Module | None
    head: Any
    after_head: Callable[[torch.Tensor], torch.Tensor] | None  # None: not known

    def embed(self, tokens: I32 | torch.Tensor) -> torch.Tensor:
        """[..., H] of ids, on the host or where the model is. Raises ModelError where positions or something else are
        mixed into the embeddings."""
        if self.scale is None:
            raise ModelError(f"what enters {self.name}'s first layer is not a multiple of the token's embedding alone")
        ids = tokens if isinstance(tokens, torch.Tensor) else uploaded(self.head.weight.device, tokens)[0]
        embedded: torch.Tensor = self.embedding(ids)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H]. Raises ModelError where no module turns the last layer's output into the head's input."""
        if self.final_norm is None:
            raise ModelError(f"{self.name}'s final norm was not found: no module leads from its last layer to its head")
        normed: torch.Tensor = self.final_norm(hidden)
        return normed

    def logits(self, normed: torch.Tensor, ids: I32 | None = None) -> torch.Tensor:
        """[n, V], or [n, m] of rows ``ids``. Raises ModelError where the model does something unknown to them."""
        return self.head_of(ids)(normed)

    def head_of(self, ids: I32 | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """``logits`` by rows ``ids``, which are copied here, once. Raises ModelError as it does."""
        after = self.after_head
        if after is None:
            raise ModelError(f"{self.name} changes its head's logits in a way that is not known here")
        weight, bias = self.head.weight.detach(), None if self.head.bias is None else self.head.bias.detach()
        if ids is not None and len(ids) < len(weight):
            (index,) = uploaded(weight.device, ids)
            weight, bias = weight[index], None if bias is None else bias[index]
        return lambda normed: after(torch.nn.functional.linear(normed, weight, bias))


def find(name: str, module: Any, layers: torch.nn.ModuleList, run: Callable[[], torch.Tensor]) -> TorchParts:
    """The parts of ``module``, watched while ``run`` gives its logits [n, V] for n tokens. Raises ModelError."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or embedding is None:
        raise ModelError(f"{name} has no embedding and linear head that a drafter could share")
    seen = _Seen()
    with ExitStack() as undo:
        _watch(module, embedding, head, layers, seen, undo)
        logits = run()
    if seen.embedded is None or seen.entered is None or seen.left is None or seen.headed is None:
        raise ModelError(f"{name} does not use its embedding, layers and head one after the other")
    tolerance = _ROUNDING.get(seen.left.dtype, 1e-5)
    norm = next(
        (m for m, given, gave in seen.calls if torch.equal(given, seen.left) and torch.equal(gave, seen.headed)), None
    )
    scale = _multiple(seen.embedded, seen.entered, tolerance)
    raw = head(seen.headed)[0]
    return TorchParts(name, embedding, scale, norm, head, _after_head(module, raw, logits, tolerance))


def _watch(module: Any, embedding: Any, head: Any, layers: torch.nn.ModuleList, seen: _Seen, undo: ExitStack) -> None:
    def embedded(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        seen.embedded = output

    def entered(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.entered = inputs[0] if inputs else named["hidden_states"]

    def left(_module: Any, _inputs: Any, output: Any) -> None:
        seen.left = output[0] if isinstance(output, tuple) else output

    def headed(_module: Any, inputs: tuple[Any, ...]) -> None:
        seen.headed = inputs[0]

    def called(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            seen.calls.append((module, inputs[0], output))

    inside = {id(m) for m in layers.modules()} | {id(head)}
    hooks = [
        embedding.register_forward_hook(embedded),
        layers[0].register_forward_pre_hook(entered, with_kwargs=True),
        layers[-1].register_forward_hook(left),
        head.register_forward_pre_hook(headed),
        *(m.register_forward_hook(called) for m in module.modules() if id(m) not in inside),
    ]
    for hook in hooks:
        undo.callback(hook.remove)


def _multiple(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> float | None:
    """The factor that makes ``b`` of ``a``; None where there is none."""
    if a.shape != b.shape:
        return None
    if torch.equal(a, b):
        return 1.0
    x, y = a.double(), b.double()
    factor = float((x * y).sum() / (x * x).sum())
    return factor if _close(x * factor, y, tolerance) else None


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def _after_head(
    module: Any, raw: torch.Tensor, logits: torch.Tensor, tolerance: float
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the model does to its head's output ``raw`` to give ``logits``; None where that is not known."""
    raw, logits = raw.double(), logits.double()
    if raw.shape != logits.shape:
        return None
    if _close(raw, logits, tolerance):
        return lambda x: x
    cap = getattr(module.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    if cap and _close(torch.tanh(raw / cap) * cap, logits, tolerance):
        return lambda x: torch.tanh(x / cap) * cap
    factor = _multiple(raw, logits, tolerance)
    return None if factor is None else lambda x: x * factor
