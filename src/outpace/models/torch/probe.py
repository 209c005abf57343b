"""The proof at load: the model's own full forward against ours, in chunks, with two rows and a tree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outpace.common.arrays import F32
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

    # Both branches as one tree, one node of each in turn.
    nodes = np.arange(2 * (LENGTH - FORK), dtype=np.int32)
    parents, tree = np.where(nodes < 2, -1, nodes - 2).astype(np.int32), (nodes % 2, FORK + nodes // 2)
    steps: list[dict[int, Any]] = [  # by row, which of the tokens
        {trunk: np.s_[0, :5], other: np.s_[2, :2]},
        {trunk: np.s_[0, 5:6], other: np.s_[2, 2:9]},
        {trunk: np.s_[0, 6:FORK]},
        {trunk: tree, other: np.s_[2, 9:]},
    ]

    def run(chunks: dict[int, Any]) -> F32:
        rows, trees = list(chunks), [parents if at is tree else None for at in chunks.values()]
        starts = [kv.length(row) for row in rows]
        batch = Batch.pack(rows, [tokens[at] for at in chunks.values()], starts, [True] * len(rows), trees)
        return forward(batch).logits(batch.wanted)

    def served(logits: F32) -> F32:
        """Of [3, LENGTH, V], in the order of the steps."""
        return np.concatenate([logits[at] for step in steps for at in step.values()])

    ours, reference_scores = np.concatenate([run(step) for step in steps]), served(reference.logits)
    scale = max(1.0, float(np.abs(reference_scores).max()))
    worst = float(np.abs(ours - reference_scores).max()) / scale
    if not worst <= TOLERANCE.get(dtype, 1e-3):
        raise ModelError(
            f"in chunks, side by side and as a tree its logits differ from its own forward by {worst:.2g} of their "
            f"size, so something besides attention couples its tokens (recurrent state, perhaps)"
        )
    if strict:
        each = [[{row: np.s_[line, i : i + 1]} for i in range(LENGTH)] for line in range(3) for row in [kv.alloc()]]
        alone = [np.concatenate([run(step) for step in line]) for line in each]
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
    states = state_shape(mixers(small))
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
