"""A learned drafter for a target that was padded: the same drafts, at a larger model's cost.

    python -m benchmarks.grow_drafter DRAFTER OUT --hidden 2048 --ff 4096 --heads 30

For a target whose GGUF was padded with zero blocks so that it computes the same function: its hidden states are the
small one's, then zeros; its norms' weights are scaled by sqrt(small / large), their epsilon by small / large.
Acceptance is the small model's, cost the large one's; whoever quotes a figure says so. ``eagle`` and ``parallel``,
whose head must be the target's rows.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import numpy as np

from outpace.drafters.learned.checkpoint import Checkpoint, read
from outpace.drafters.learned.configs import Decoder, MedusaConfig, tensor_shapes
from outpace.errors import DrafterError
from outpace.training.export import write


def grow(small: Checkpoint, hidden: int, ffn: int, heads: int) -> Checkpoint:
    """``small`` beside a target of ``hidden`` numbers; ``ffn`` and ``heads`` are the drafter's.

    Raises DrafterError.
    """
    config = small.config
    if isinstance(config, MedusaConfig):
        raise DrafterError("a Medusa drafter is not padded: its residual blocks read all numbers alike")
    if "lm_head.weight" in small.tensors:
        raise DrafterError("the drafter has output rows of its own: pad those of one that shares the target's")
    old = config.decoder
    group = old.heads // old.kv_heads
    if heads % group or hidden < old.hidden or ffn < old.ffn or heads < old.heads:
        raise DrafterError(f"a drafter of {old} can only grow, and its heads by {group}")
    new = replace(old, hidden=hidden, ffn=ffn, heads=heads, kv_heads=heads // group, eps=old.eps * old.hidden / hidden)
    grown = replace(config, decoder=new)
    tensors: dict[str, Any] = {name: small.tensors[name] for name in ("d2t", "t2d")}
    for name, shape in tensor_shapes(grown).items():
        tensors[name] = _padded(name, small.tensors[name], shape, old, new)
    return Checkpoint(small.method, grown, tensors, {}, {**small.recipe, "grown_from": dict(small.target)})


def _padded(name: str, values: Any, shape: tuple[int, ...], old: Decoder, new: Decoder) -> Any:
    """Zeros around ``values``; hidden states that stand side by side are padded each by itself."""
    out = np.zeros(shape, np.float32)
    if values.ndim == 1 and "q_norm" not in name and "k_norm" not in name:  # norms see a mean over more values
        values = values * np.float32(math.sqrt(old.hidden / new.hidden)) if shape != values.shape else values
    states = values.shape[-1] // old.hidden
    if states and shape[-1] - values.shape[-1] == states * (new.hidden - old.hidden):
        rows = tuple(slice(n) for n in values.shape[:-1])
        for i in range(states):
            piece = values[..., i * old.hidden : (i + 1) * old.hidden]
            out[(*rows, slice(i * new.hidden, i * new.hidden + old.hidden))] = piece
        rest = values.shape[-1] - states * old.hidden  # what the confidence head reads beside a state
        if rest:
            out[(*rows, slice(-rest, None))] = values[..., -rest:]
    else:
        out[tuple(slice(n) for n in values.shape)] = values
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("drafter")
    parser.add_argument("out")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ff", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=30)
    args = parser.parse_args()
    grown = grow(read(args.drafter), args.hidden, args.ff, args.heads)
    write(args.out, grown.method, grown.config, grown.tensors, grown.target, grown.recipe)
    print(f"{args.out}: {grown.config}")


if __name__ == "__main__":
    main()
