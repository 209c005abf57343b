"""How many experts a forward of transformers' mixtures reads, seen where a layer's experts are given their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Mixtures:
    """A module's mixtures of experts; ``count``, ``used`` and ``bytes`` are what ``ModelInfo`` has of them.

    ``used`` is known once a forward was counted. Experts that are not given their tokens' choice are not counted.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._each = [part for part in module.modules() if _matrices(part)]
        self.used = 0

    @property
    def count(self) -> int:
        return int(self._each[0].num_experts) if self.used else 0

    @property
    def bytes(self) -> int:
        sizes = [p.numel() * p.element_size() // len(p) for part in self._each for p in _matrices(part)]
        return sum(sizes) if self.used else 0

    @contextmanager
    def counting(self, real: torch.Tensor | None = None) -> Iterator[list[torch.Tensor]]:
        """What is given fills with a number a mixture that runs inside: distinct experts that its tokens go to; of the
        ``real`` ones alone, bool [N], where some only pad."""
        found: list[torch.Tensor] = []

        def note(part: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            chosen = next((each for each in (*inputs, *named.values()) if _is_choice(each)), None)
            if chosen is None:
                return
            self.used, experts = chosen.shape[1], part.num_experts
            if real is not None:
                chosen = torch.where(real[:, None], chosen, experts)
            read = torch.zeros(experts + 1, device=chosen.device)
            found.append(read.scatter_(0, chosen.reshape(-1).long(), 1.0)[:experts].sum())

        with ExitStack() as undo:
            for part in self._each:
                undo.callback(part.register_forward_pre_hook(note, with_kwargs=True).remove)
            yield found


def _matrices(part: Any) -> list[torch.nn.Parameter]:
    """A module's own matrices of all experts; none: it is something else."""
    count = getattr(part, "num_experts", None)
    own = part.parameters(recurse=False) if isinstance(count, int) else ()
    return [each for each in own if each.dim() == 3 and len(each) == count]


def _is_choice(value: Any) -> bool:
    """Whether an argument says which experts [N, used] each token goes to."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)
