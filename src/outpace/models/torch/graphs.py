"""Work in fixed shapes, which a card replays as CUDA graphs: one launch in place of a thousand.

The first time that a shape comes it is captured; from then on its inputs are written where the graph reads them. Where
there is no card, a graph calls and does not replay. A forward of B rows with up to W new tokens each is padded to a
bucket of rows, width and slots, with tokens that are written behind the pool's last block and that no row sees.

``strict`` knows one shape alone: so many tokens, each a row of its own. Every product is then of the same sizes and
attention adds up the same blocks of slots, whatever runs together: a token's bits cannot depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.models.base import Batch
from outpace.models.torch.attention import I64, Group, Plan, Row, laid_out, row_plans
from outpace.models.torch.kv import Seen, TorchKV
from outpace.models.torch.upload import uploaded

VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "item", "bincount")  # come to the host
COPIES = ("Tensor.cpu", "Tensor.tolist", "Tensor.__bool__", "Tensor.__float__", "Tensor.__int__")


class Waits(TorchDispatchMode):  # type: ignore[misc]
    """Notes operations that bring values, shapes that depend on values, or copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._copies = _Copies(self.seen)

    def __enter__(self) -> Any:
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexed = [i for i in args[1] if i is not None] if name == "index" else []
        if name in VALUES or any(i.dtype == torch.bool for i in indexed):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(func) or "").split(".", 1)[-1]
        if name in COPIES:
            self._seen.append(name)
        return func(*args, **(kwargs or {}))


Forward = Callable[[Plan, int, Tensor | None, Sequence[int]], tuple[Tensor, dict[int, Tensor]]]
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SLOTS = 256  # times powers of two; few rows have at least FEW together: fewer shapes come, and nobody reads the rest
FEW = 1024
TOKENS = 256  # of a bucket, at most: beyond, launches cost little beside the work
WASTE = 2  # a bucket has at most so many times the tokens that there are, and WIDTHS' first few
MOST = 64  # graphs; more buckets run without
STRICT = {"cpu": 16}  # tokens of a strict forward; elsewhere 64, which takes a card little longer than one


class Bucket(NamedTuple):
    rows: int
    width: int
    slots: int
    layers: int
    kept: tuple[int, ...]  # layers whose outputs are needed


def fitting(rows: list[Row], layers: int, kept: tuple[int, ...]) -> Bucket | None:
    """None: the rows are too large for a bucket, or too unlike."""
    each = [row.end - row.begin for row in rows]
    n, most = sum(each), max(each, default=0)
    if not 0 < n <= TOKENS or most > WIDTHS[-1]:
        return None
    count, width = 1 << (len(rows) - 1).bit_length(), next(w for w in WIDTHS if w >= most)
    if count * width > max(WASTE * n, 8) or count * width > TOKENS:
        return None
    return Bucket(count, width, padded(max(len(row.places) for row in rows), count), layers, kept)


def padded(slots: int, rows: int) -> int:
    """Slots of each of so many ``rows`` in a bucket, the longest of which has ``slots``."""
    least = max(SLOTS, FEW // rows)
    return least << max(0, (-(-slots // least) - 1).bit_length())


def frame(
    batch: Batch, rows: list[Row], kv: TorchKV, windows: Sequence[int | None], bucket: Bucket
) -> tuple[Tensor, Tensor]:
    """Some rows of the batch in a bucket's shape, on the host: int64 tokens, positions, ``write`` [B * W], slots
    [B * L] and bounds [windows * B * 2], one after the other, and who does not see which slots, bool
    [windows, B, 1, W, L]."""
    count, width, length = bucket[:3]
    tokens, positions = np.zeros((2, count, width), np.int64)
    write = kv.spare + np.arange(count * width).reshape(count, width) % kv.block
    for b, row in enumerate(rows):
        new = row.end - row.begin
        tokens[b, :new], positions[b, :new] = batch.token[row.begin : row.end], row.positions
        write[b, :new] = row.places[row.start :]
    laid = [laid_out(rows, [0] * len(rows), (count, width, length), window, kv.spare) for window in windows]
    bounds = np.zeros((len(windows), count, 2), np.int64)
    bounds[:, : len(rows)] = [[row.bounds(window) for row in rows] for window in windows]
    indices = np.concatenate([each.reshape(-1) for each in (tokens, positions, write, laid[0][0], bounds)])
    return torch.from_numpy(indices), torch.from_numpy(np.stack([hidden for _, hidden in laid]))


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
        with torch.cuda.device(device):
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                _watched(call)  # libraries choose and allocate in the first call
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=beside):  # its own is the first card's that captured
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
    """Forwards in fixed shapes over one pool of keys and values; ``captured``: as graphs."""

    def __init__(
        self,
        forward: Forward,
        kv: TorchKV,
        windows: Sequence[int | None],
        device: torch.device,
        strict: bool = False,
        captured: bool = True,
    ) -> None:
        self._forward, self._kv, self._windows, self._device = forward, kv, tuple(windows), device
        self.strict = strict
        self.captures = Captures(device) if captured else None

    def __call__(
        self, batch: Batch, layers: int, kept: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None, I64] | None:
        """As ``run``, of all tokens of a bucket, and the packed tokens' places among them; None: the batch fits none.
        What is returned is overwritten by the next forward."""
        rows = row_plans(batch, self._kv)
        bucket = fitting(rows, layers, kept)
        found = None if bucket is None else self._computed(batch, rows, bucket)
        if bucket is None or found is None:
            return None
        return (*found, np.concatenate([np.arange(r.end - r.begin) + b * bucket.width for b, r in enumerate(rows)]))

    def strictly(
        self, batch: Batch, layers: int, kept: tuple[int, ...], features: Tensor | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As ``OwnDecoder.__call__``, some tokens at a time."""
        rows, size = row_plans(batch, self._kv, apart=True), STRICT.get(self._device.type, 64)
        logits: list[Tensor] = []
        states: dict[int, list[Tensor]] = {layer: [] for layer in kept}
        for begin in range(0, len(rows), size):
            some = rows[begin : begin + size]
            n = len(some)
            own = None if features is None else F.pad(features[begin : begin + n], (0, 0, 0, size - n))
            slots = padded(max(len(row.places) for row in some), size)
            found = self._computed(batch, some, Bucket(size, 1, slots, layers, kept), own)
            (wanted,) = uploaded(self._device, [i for i in (batch.wanted - begin).tolist() if 0 <= i < n])
            logits.append(found[0].index_select(0, wanted))
            for layer in kept:
                states[layer].append(found[1][layer][:n].clone())
        return torch.cat(logits), {layer: torch.cat(parts) for layer, parts in states.items()}

    def _computed(self, batch: Batch, rows: list[Row], bucket: Bucket, features: Tensor | None = None) -> Any:
        """As ``run``; None, unless it is strict: there are graphs enough."""
        inputs = frame(batch, rows, self._kv, self._windows, bucket)
        found = None
        if self.captures is not None and features is None:
            found = self.captures(bucket, self._kv.place, inputs, partial(self.run, bucket))
        if found is None and self.strict:
            indices, hidden = (each.to(self._device) for each in inputs)
            found = self.run(bucket, indices, hidden, features)
        return found

    def close(self) -> None:
        if self.captures is not None:
            self.captures.close()

    def run(
        self, bucket: Bucket, indices: Tensor, hidden: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """The bucket's forward, as ``OwnDecoder.__call__``, and the experts that it read: no value comes to the host,
        no shape depends on one."""
        n, rest = bucket.rows * bucket.width, bucket.rows * bucket.slots
        tokens, positions, write, slots, bounds = indices.split([n, n, n, rest, 2 * bucket.rows * len(self._windows)])
        each = zip(self._windows, hidden, bounds.split(2 * bucket.rows), strict=True)
        seen = {w: Seen(slots, hides, 0, self.strict, ends) for w, hides, ends in each}
        spare, block = self._kv.spare, self._kv.block
        real = (write < spare) | (write >= spare + block)
        plan = Plan(self._kv, tokens, positions, write, None, [Group(bucket.rows, tokens, tokens, seen)], real)
        return *self._forward(plan, bucket.layers, features, bucket.kept), plan.experts
