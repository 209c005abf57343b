"""Work in fixed shapes, which a card replays as CUDA graphs: one launch in place of a thousand.

The first time that a shape comes it is captured; from then on its inputs are written where the graph reads them. Where
there is no card, a graph calls and does not replay. A forward of B rows with up to W new tokens each is padded to a
bucket of rows, width and slots, with tokens that are written behind the pool's last block and that no row sees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.models.base import Batch
from outpace.models.torch.attention import I64, Group, Plan, Seen, row_plans
from outpace.models.torch.kv import TorchKV
from outpace.models.torch.waits import Waits

Forward = Callable[[Plan, int, Tensor | None, Sequence[int]], tuple[Tensor, dict[int, Tensor]]]
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SLOTS = 256  # times powers of two
TOKENS = 256  # of a bucket, at most: beyond, launches cost little beside the work
WASTE = 2  # a bucket has at most so many times the tokens that there are, and WIDTHS' first few
MOST = 64  # graphs; more buckets run without


class Bucket(NamedTuple):
    rows: int
    width: int
    slots: int
    layers: int
    kept: tuple[int, ...]  # layers whose outputs are needed


@dataclass(frozen=True, slots=True)
class Frame:
    """A batch in its bucket's shape: ``tokens``, ``positions``, ``write`` [B * W], ``slots`` [B * L] one after the
    other, and who sees which slots, bool [windows, B, 1, W, L]. ``where`` [N]: the packed tokens' places in B * W."""

    bucket: Bucket
    indices: I64
    sees: npt.NDArray[np.bool_]
    where: I64


def frame(batch: Batch, kv: TorchKV, windows: Sequence[int | None], layers: int, kept: tuple[int, ...]) -> Frame | None:
    """None: the batch is too large for a bucket, or its rows are too unlike. ``kv`` has room for the new tokens."""
    n = len(batch)
    most = int(np.diff(batch.starts).max(initial=0))
    if not 0 < n <= TOKENS or most > WIDTHS[-1]:
        return None
    rows = row_plans(batch, kv)
    count, width = 1 << (len(rows) - 1).bit_length(), next(w for w in WIDTHS if w >= most)
    if count * width > max(WASTE * n, 8) or count * width > TOKENS:
        return None
    longest = max(len(row.places) for row in rows)
    length = SLOTS << max(0, (-(-longest // SLOTS) - 1).bit_length())
    bucket = Bucket(count, width, length, layers, kept)
    tokens, positions = np.zeros((2, count, width), np.int64)
    write = np.broadcast_to(kv.spare + np.arange(width) % kv.block, (count, width)).copy()
    slots = np.full((count, length), kv.spare, np.int64)
    sees = np.zeros((len(windows), count, 1, width, length), np.bool_)
    sees[..., 0] = True  # of padding: so that its softmax is a number
    where = np.zeros(n, np.int64)
    for b, row in enumerate(rows):
        new, end = row.end - row.begin, len(row.places)
        tokens[b, :new], positions[b, :new] = batch.token[row.begin : row.end], row.positions
        write[b, :new], slots[b, :end] = row.places[row.start :], row.places
        where[row.begin : row.end] = b * width + np.arange(new)
        for seen, window in zip(sees, windows, strict=True):
            seen[b, 0, :new, :end] = row.sees(window)
    return Frame(bucket, np.concatenate([each.reshape(-1) for each in (tokens, positions, write, slots)]), sees, where)


class Captures:
    """What ``run`` gives for inputs of one shape, for each shape that has come: at most ``MOST`` of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graphs: dict[Hashable, _Graph] = {}
        self._most = MOST
        self._at: tuple[int, ...] = ()  # addresses of what else they read
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(
        self, shape: Hashable, at: tuple[int, ...], inputs: Sequence[Tensor], run: Callable[..., Any]
    ) -> Any | None:
        """``run(*inputs)``, which the next call overwrites; None: there are graphs enough without this ``shape``, which
        says what else ``run`` depends on. Where addresses ``at`` are others than before, all is captured anew. Raises
        RuntimeError for what cannot be captured."""
        if at != self._at:
            self.graphs.clear()
            self._at = at
        graph = self.graphs.get(shape)
        if graph is None:
            if len(self.graphs) >= self._most:
                return None
            try:
                graph = self.graphs[shape] = _Graph(self._device, self._pool, inputs, run)
            except torch.OutOfMemoryError:
                self._most = len(self.graphs)
                return None
        return graph(inputs)

    def close(self) -> None:
        """Forget the graphs, which hold what they run, and with it the weights."""
        self.graphs.clear()


class _Graph:
    def __init__(self, device: torch.device, pool: Any, inputs: Sequence[Tensor], run: Callable[..., Any]) -> None:
        self.inputs = [each.to(device, copy=True) for each in inputs]
        call = partial(run, *self.inputs)
        if device.type != "cuda":
            _watched(call)
            self._again: Callable[[], Any] = call
            return
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            _watched(call)  # libraries choose and allocate in the first call
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = call()

        def replay() -> Any:
            graph.replay()
            return out

        self._again = replay

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        for own, values in zip(self.inputs, inputs, strict=True):
            there = own.is_cuda and not values.is_cuda
            own.copy_(values.pin_memory() if there else values, non_blocking=True)
        return self._again()


def _watched(run: Callable[[], Any]) -> None:
    """The first run. Raises RuntimeError for what a capture refuses."""
    with Waits() as waits:
        run()
    if waits.seen:
        raise RuntimeError(f"it brings values to the host ({', '.join(dict.fromkeys(waits.seen))})")


class Graphs:
    """The graphs of one forward over one pool of keys and values."""

    def __init__(self, forward: Forward, kv: TorchKV, windows: Sequence[int | None], device: torch.device) -> None:
        self._forward, self._kv, self._windows = forward, kv, tuple(windows)
        self.captures = Captures(device)

    def __call__(
        self, batch: Batch, layers: int, kept: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor], I64] | None:
        """As ``OwnDecoder.__call__``, of all tokens of a bucket, and the packed tokens' places among them; None: the
        batch fits none. What is returned is overwritten by the next forward."""
        framed = frame(batch, self._kv, self._windows, layers, kept)
        if framed is None:
            return None
        at = self._kv.keys[0].data_ptr(), self._kv.values[-1].data_ptr()
        inputs = torch.from_numpy(framed.indices), torch.from_numpy(framed.sees)
        found = self.captures(framed.bucket, at, inputs, partial(self.run, framed.bucket))
        return None if found is None else (*found, framed.where)

    def run(self, bucket: Bucket, indices: Tensor, sees: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The bucket's forward: no value comes to the host, no shape depends on one."""
        n, rest = bucket.rows * bucket.width, bucket.rows * bucket.slots
        tokens, positions, write, slots = indices.split([n, n, n, rest])
        masks = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, -torch.inf)
        seen = {window: Seen(slots, mask, 0) for window, mask in zip(self._windows, masks, strict=True)}
        group = Group(bucket.rows, tokens, None, tokens, seen)
        plan = Plan(self._kv, tokens, positions, write, None, [group])
        return self._forward(plan, bucket.layers, None, bucket.kept)
