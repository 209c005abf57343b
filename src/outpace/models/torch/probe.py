"""The proof at load: the model's own full forward against ours, in chunks, with two rows and a tree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outpace.common.arrays import F32, I32
from outpace.errors import ModelError
from outpace.models.base import Batch, KVCache, Output
from outpace.models.torch.anatomy import Anatomy
from outpace.models.torch.attention import counts, plan
from outpace.models.torch.decoder import OwnDecoder
from outpace.models.torch.kv import TorchKV
from outpace.models.torch.mixers import attending_layers, mixers, state_shape
from outpace.models.torch.output import TorchOutput

ROWS = 256  # of the vocabulary, in a copy
LENGTH, FORK = 12, 9  # tokens of a trunk; where its other branch leaves it
# The largest difference of a logit that is rounding, relative to the largest logit (at least 1). A wrong mask, position
# or cache gives differences of the order of the logits themselves.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class Reference:
    """Three token lists [3, LENGTH] and the model's own logits float32 [3, LENGTH, V] for them.

    The second leaves the first after FORK tokens; the third shares nothing with them.
    """

    tokens: torch.Tensor
    logits: F32

    @staticmethod
    def of(module: Any, vocab_size: int, device: torch.device) -> Reference:
        ids = (np.arange(3 * LENGTH, dtype=np.int64).reshape(3, LENGTH) * 7919 + 11) % max(1, vocab_size - 4) + 4
        ids[1, :FORK] = ids[0, :FORK]
        tokens = torch.from_numpy(ids % vocab_size).to(device)
        positions = torch.arange(LENGTH, device=device)[None]
        logits = [module(input_ids=row[None], position_ids=positions, use_cache=False).logits[0] for row in tokens]
        return Reference(tokens, torch.stack(logits).float().cpu().numpy())


def agree(
    forward: Callable[[Batch], Output], kv: KVCache, reference: Reference, dtype: torch.dtype, strict: bool = False
) -> None:
    """Serve the reference's tokens through ``forward``, of weights in ``dtype``, and its empty ``kv``. Raises
    ModelError on a difference; ``strict``: of a bit, too, from the same tokens one by one."""
    tokens = reference.tokens.cpu().numpy().astype(np.int32)
    trunk, other = kv.alloc(), kv.alloc()

    def run(chunks: dict[int, I32], parents: I32 | None = None) -> F32:
        rows = list(chunks)
        batch = Batch.pack(
            rows,
            list(chunks.values()),
            [kv.length(row) for row in rows],
            [True] * len(rows),
            [parents if row == trunk else None for row in rows],
        )
        return forward(batch).logits(batch.wanted)

    found = [run({trunk: tokens[0, :5], other: tokens[2, :2]})]
    found.append(run({trunk: tokens[0, 5:6], other: tokens[2, 2:9]}))
    found.append(run({trunk: tokens[0, 6:FORK]}))
    # Both branches as one tree, one node of each in turn.
    tree = np.stack([tokens[0, FORK:], tokens[1, FORK:]], axis=1).ravel()
    parents = np.arange(-2, len(tree) - 2, dtype=np.int32).clip(-1)
    parents[1] = -1
    found.append(run({trunk: tree, other: tokens[2, 9:]}, parents))

    def served(logits: F32) -> F32:
        """Of [3, LENGTH, V], in the order of ``found``."""
        both = logits[:2, FORK:].swapaxes(0, 1).reshape(len(tree), -1)
        return np.concatenate(
            [logits[0, :5], logits[2, :2], logits[0, 5:6], logits[2, 2:9], logits[0, 6:FORK], both, logits[2, 9:]]
        )

    ours, reference_scores = np.concatenate(found), served(reference.logits)
    scale = max(1.0, float(np.abs(reference_scores).max()))
    worst = float(np.abs(ours - reference_scores).max()) / scale
    if not worst <= TOLERANCE.get(dtype, 1e-3):
        raise ModelError(
            f"in chunks, side by side and as a tree its logits differ from its own forward by {worst:.2g} of their "
            f"size, so something besides attention couples its tokens (recurrent state, perhaps)"
        )
    if strict:
        alone = [np.concatenate([run({row: each[None]}) for each in own]) for own in tokens for row in [kv.alloc()]]
        if served(np.stack(alone)).tobytes() != ours.tobytes():
            raise ModelError("one by one, its tokens' logits have other bits than together")


def prove_in_float32(module: Any, anatomy: Anatomy) -> None:
    """Let ``OwnDecoder`` and ``module``, of 16 bits, agree where rounding hides nothing: in a copy in float32 that has
    one layer of each kind and the first ``ROWS`` tokens. Raises ModelError where they do not."""
    attends, places = attending_layers(module), iter(range(len(anatomy.windows)))
    place = [next(places) if each else None for each in attends]  # among the layers that attend
    small, chosen = small_copy(module, [None if at is None else anatomy.windows[at] for at in place])
    attend = [at for i in chosen if (at := place[i]) is not None]
    windows = [anatomy.windows[at] for at in attend]
    own = OwnDecoder(small, windows, [anatomy.scales[at] for at in attend])
    device = next(small.parameters()).device
    reference = Reference.of(small, small.get_input_embeddings().weight.shape[0], device)
    states = state_shape(small, mixers(small))
    kv = TorchKV([anatomy.shapes[at] for at in attend], torch.float32, device, recurrent=states)

    def forward(batch: Batch) -> Output:
        with kv.writing(counts(batch)):
            logits, _ = own(plan(batch, kv, tuple(dict.fromkeys(windows)), device), len(chosen), None, ())
        return TorchOutput(batch, logits, [], None, 0.0)

    agree(forward, kv, reference, torch.float32)


def small_copy(module: Any, windows: Sequence[int | None]) -> tuple[Any, list[int]]:
    """``module`` in float32 with one layer of each kind and the first ``ROWS`` tokens, and which layers these are.
    ``windows``: by layer."""
    lists = [getattr(module.config, name, None) or [None] * len(windows) for name in ("layer_types", "no_rope_layers")]
    kinds = list(zip(windows, *lists, strict=True))
    layers = sorted({kinds.index(kind) for kind in kinds})
    done: dict[int, Any] = {}  # what is not copied as a whole
    for outer in (module.get_input_embeddings(), module.get_output_embeddings()):
        done[id(outer.weight)] = torch.nn.Parameter(outer.weight[:ROWS].float(), requires_grad=False)
    every = module.model.layers
    done[id(every)] = torch.nn.ModuleList([copy.deepcopy(every[i], done) for i in layers])
    small = copy.deepcopy(module, done).float()
    small.get_input_embeddings().padding_idx = None  # it may lie beyond
    small.config.num_hidden_layers = len(layers)
    for name in ("layer_types", "no_rope_layers"):
        if getattr(small.config, name, None):
            setattr(small.config, name, [getattr(small.config, name)[i] for i in layers])
    return small, layers
