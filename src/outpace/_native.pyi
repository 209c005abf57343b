"""The C++ runtime (native/bindings/). Only models/native/model.py, tests and benchmarks use it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_I32 = npt.NDArray[np.int32]
_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]
_U8 = npt.NDArray[np.uint8]

class MemoryLimit(RuntimeError): ...

class Arena:
    """Memory for packed weights, in large mappings."""

    def __init__(self) -> None: ...

class Matrix:
    """A packed weight matrix [rows, cols]; see native/weights/matrix.h."""

    rows: int
    cols: int
    @property
    def bytes(self) -> int: ...
    @property
    def format(self) -> str: ...
    def unpack(self) -> _F32:
        """float32 [rows, cols], the exact values."""

    def product(self, x: _F32, isa: str = "") -> _F32:
        """float32 [n, cols] -> [n, rows] by one path's kernels, on one thread."""

class Result:
    """One forward's logits, best tokens and taps. Indices are packed ones. Raises IndexError for others."""

    def best(self, at: _I32) -> _I32:
        """Argmax int32 [n]; -1: all are -inf; -2: NaN."""

    def walk(
        self,
        start: int,
        tokens: _I32,
        parents: _I32 | None,
        temperature: float,
        top_k: int,
        top_p: float,
        log_min_p: float,
        seed: int,
        sample: int,
        index: int,
        stream: int,
    ) -> tuple[_I32, _I32] | None:
        """Tokens gained and nodes kept of a draft that starts after packed index ``start``; None: not decided here."""

    def choose(
        self,
        at: int,
        rules: list[tuple[Any, ...]],
        temperature: float,
        top_k: int,
        top_p: float,
        log_min_p: float,
        seed: int,
        sample: int,
        index: int,
        stream: int,
    ) -> int:
        """A token; -1: none is allowed; -2: NaN; -3: too close to top-p's edge to decide here."""

    def logits(self, at: _I32) -> _F32: ...
    def taps(self, at: _I32) -> _F32: ...

class Model:
    @staticmethod
    def build(
        config: dict[str, Any],
        layers: list[dict[str, Any]],
        embedding: Matrix,
        head: Matrix,
        final_norm: _F32,
        ropes: list[_F32],
        isa: str,
        threads: int,
        kv_f32: bool,
        kv_limit: int,
    ) -> Model: ...
    def forward(
        self,
        token: _I32,
        row: _I32,
        position: _I32,
        parent: _I32,
        starts: _I32,
        wanted: _I32,
        taps: tuple[int, ...],
        layers: int,
    ) -> Result: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def time_phases(self, on: bool) -> None: ...
    def take_timings(self) -> dict[str, float]: ...
    def kv_alloc(self, capacity: int, /) -> int: ...
    def kv_free(self, row: int, /) -> None: ...
    def kv_length(self, row: int, /) -> int: ...
    def kv_capacity(self, row: int, /) -> int: ...
    def kv_truncate(self, row: int, n: int, /) -> None: ...
    def kv_compact(self, row: int, start: int, keep: _I32, /) -> None: ...
    def kv_fork(self, src: int, dst: int, n: int, /) -> None: ...
    def kv_bytes_for(self, capacity: int, /) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_held(self) -> int: ...
    @property
    def kv_rows(self) -> list[int]: ...
    def kv_check(self) -> None: ...
    def kv_poison(self) -> None: ...

class SuffixIndex:
    """The index of ``suffix``; see drafters/lookup/suffix_index.py, the reference. Raises ValueError."""

    def __init__(
        self, capacity: int, most: int, nearest: int, few: int, weights: tuple[float, ...], doubt: float
    ) -> None: ...
    def __len__(self) -> int: ...
    def append(self, tokens: _I32) -> None: ...
    def shrink(self, n: int) -> None: ...
    def tokens(self) -> _I32: ...
    def places(self, context: _I32) -> list[tuple[int, int]]: ...
    def propose(
        self, context: _I32, budget: int, others: list[SuffixIndex], wide: bool
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and gains of the tree."""

class Datastore:
    """The search of ``retrieval``; drafters/lookup/datastore.py is the reference. Keeps its arrays. Raises ValueError."""

    def __init__(self, segments: list[tuple[_I32, _I32, _I64]], weights: tuple[float, ...], doubt: float) -> None: ...
    def propose(self, context: _I32, places: int, least: int, budget: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and gains of the tree."""

class Policy:
    """What is behind ``--size auto``; see control/adaptive.py, the reference. Raises ValueError."""

    def __init__(
        self,
        rules: dict[str, Any],
        table: list[float],
        last_width: float,
        last_seconds: float,
        slope: float,
        row: float,
        position: float,
        position_width: float,
    ) -> None: ...
    def plan(
        self, rows: list[tuple[int, int, bool]], most: list[int], contexts: Sequence[int], prefill: int
    ) -> list[int]:
        """``rows``: row, kind of sampling, whether the policy decides for it. Nodes to ask for; none at all while all
        rows wait: then ``waited`` ends the step."""

    def trim(
        self,
        widths: _I32,
        width: int,
        parents: _I32 | None,
        said: _F32 | None,
        source: _U8 | None,
        sources: list[int],
        sampled: list[bool],
    ) -> tuple[list[list[int]], float | None, list[bool]]:
        """Nodes to verify by row, the speed expected of the best draft, and by row whether the policy chose."""

    def learn(
        self, accepted: list[int], path: _I32, total: float, draft: float, target: float, rest: float
    ) -> None: ...
    def waited(self, seconds: float) -> None: ...
    def release(self, row: int) -> None: ...
    def __len__(self) -> int: ...

def usable_isas() -> list[str]: ...
def kernels(isa: str = "") -> str: ...
def row_bytes(source: int, cols: int) -> int: ...
def pack(
    arena: Arena,
    data: _U8,
    source: int,
    rows: int,
    cols: int,
    heads: int = 0,
    target: str = "keep",
    threads: int = 1,
) -> Matrix: ...
def choose(
    logits: _F32,
    rules: list[tuple[Any, ...]],
    temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
    seed: int,
    sample: int,
    index: int,
    stream: int,
    isa: str = "",
) -> int: ...
def merge(
    proposals: list[tuple[list[int], list[int], list[float], list[int]]], budget: int
) -> tuple[list[int], list[int], list[float], list[int]]:
    """See tree.py, the reference: tokens, parents, gains and sources."""

def newest_match(tokens: _I32, least: int, most: int) -> tuple[int, int] | None: ...
def read_seconds(bytes: int, threads: int, repeats: int) -> float: ...
