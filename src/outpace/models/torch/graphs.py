"""Work in fixed shapes, which a card replays as CUDA graphs: one launch in place of a thousand.

A shape that comes often is captured; from then on its inputs are written where the graph reads them. Where there is no
card, a graph calls and does not replay. A forward of B rows with up to W new tokens each is padded to a bucket of rows,
width and slots, with tokens that are written behind the pool's last block and that no row sees. Until that one has a
graph, a bucket of tokens that are a row each stands in: few of those cover every mixture of rows.

``strict`` knows one shape alone: so many tokens, each a row of its own. Every product is then of the same sizes and
attention adds up the same blocks of slots, whatever runs together: a token's bits cannot depend on it.
"""

from __future__ import annotations

from collections import Counter
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
AFTER = 8  # a shape is captured when it has come so often: that takes 50 to 100 ms, a step without saves 3 to 8
APART = 2 << 30  # bytes of keys and values that tokens read which are a row each, at most: half a millisecond of a card
MOST = 64  # graphs; the one that was not used for longest makes way
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
    """What ``run`` gives for inputs of one shape, for each shape that comes often: at most ``MOST`` of them.

    ``warn`` is called with why there are none from then on; None: this is a trial, where a shape is captured at its
    first sight, and what cannot be captured raises RuntimeError.
    """

    def __init__(self, device: torch.device, warn: Callable[[str], None] | None = None) -> None:
        self._device, self._warn = device, warn
        self.graphs: dict[Hashable, _Graph] = {}  # the latest last
        self._most = MOST
        self._at: tuple[int, ...] = ()  # addresses of what else they read
        self._sights: Counter[Hashable] = Counter()  # of shapes without a graph
        # One stream for all captures: libraries keep a workspace for each.
        self._beside = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)) if device.type == "cuda" else None

    def wants(self, shape: Hashable, at: tuple[int, ...]) -> bool:
        """Whether ``shape`` has a graph or is to get one, once its inputs are there; counts that it came. Where
        addresses ``at`` are others than before, all is captured anew."""
        if at != self._at:
            self.graphs.clear()
            self._at = at
        if shape in self.graphs or not self._most:
            return shape in self.graphs
        self._sights[shape] += 1
        return self._warn is None or self._sights[shape] >= AFTER

    def __call__(self, shape: Hashable, inputs: Sequence[Tensor], run: Callable[..., Any]) -> Any | None:
        """``run(*inputs)`` of a ``shape`` that ``wants`` was asked for, which says what else ``run`` depends on; the
        next call overwrites it. None: it could not be captured."""
        graph = self.graphs.pop(shape, None)
        try:
            if graph is None:
                if len(self.graphs) >= self._most:
                    self.graphs.pop(next(iter(self.graphs)))
                del self._sights[shape]  # also where it fails: each try costs another shape its graph
                graph = _Graph(self._device, self._beside, inputs, run)
        except RuntimeError as error:
            if self._warn is None:
                raise
            self._most = len(self.graphs) if isinstance(error, torch.OutOfMemoryError) else 0
            if not self._most:
                self.graphs.clear()
                self._warn(f"CUDA graphs are off, which costs speed: {error}")
            return None
        self.graphs[shape] = graph
        return graph(inputs)

    def close(self) -> None:
        """Forget the graphs, which hold what they run, and with it the weights."""
        self.graphs.clear()


class _Graph:
    def __init__(self, device: torch.device, beside: Any, inputs: Sequence[Tensor], run: Callable[..., Any]) -> None:
        self.inputs = [each.to(device, copy=True) for each in inputs]
        call = partial(run, *self.inputs)
        if beside is None:
            _watched(call)
            self._again: Callable[[], Any] = call
            return
        pool, stream = beside
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _watched(call)  # libraries choose and allocate in the first call
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads, with an engine of their own, may allocate and copy meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
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
    """Forwards in fixed shapes over one pool of keys and values; ``captures``: as graphs."""

    def __init__(
        self,
        forward: Forward,
        kv: TorchKV,
        windows: Sequence[int | None],
        device: torch.device,
        strict: bool = False,
        captures: Captures | None = None,
    ) -> None:
        self._forward, self._kv, self._windows, self._device = forward, kv, tuple(windows), device
        self.strict, self.captures = strict, captures

    def __call__(
        self, batch: Batch, layers: int, kept: tuple[int, ...], features: Tensor | None
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None, I64 | None] | None:
        """As ``run``, of all tokens of a bucket, and the packed tokens' places among them (None: their own); None: the
        batch fits none that has a graph. What is returned is overwritten by the next forward."""
        if self.strict and len(batch):
            return *self._strictly(batch, layers, kept, features), None, None
        if features is not None:
            return None
        for apart in (False, True):  # a shape of tokens alone stands in for shapes of rows that are rare or too unlike
            rows = row_plans(batch, self._kv, apart)
            if apart and sum(len(row.places) for row in rows) * self._kv.bytes_per_position > APART:
                return None
            bucket = fitting(rows, layers, kept)
            found = None if bucket is None else self._computed(batch, rows, bucket)
            if bucket is not None and found is not None:
                places = [np.arange(row.end - row.begin) + b * bucket.width for b, row in enumerate(rows)]
                return (*found, np.concatenate(places))
            if all(row.end - row.begin == 1 for row in rows):  # the other shape is the same
                return None
        return None

    def _strictly(
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
        """As ``run``; None, unless it is strict: there is no graph of it."""
        captures = None if features is not None else self.captures
        if captures is not None and not captures.wants(bucket, self._kv.place):
            captures = None
        if captures is None and not self.strict:
            return None
        inputs = frame(batch, rows, self._kv, self._windows, bucket)
        found = None if captures is None else captures(bucket, inputs, partial(self.run, bucket))
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
