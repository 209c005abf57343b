"""The seam between the engine and whatever computes: Model, Batch, Output, KVCache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.common.fair_lock import FairLock
from outpace.exact.drafts import Drafts, Verdicts, depths
from outpace.exact.sampling import Chooser, TokenLogprob, token_logprob


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the drafters need to know of a model.

    ``name``: as it was loaded; ``backend``: "transformers" or "native". ``vocab_size``: rows of the output head;
    ``hidden_size``, ``layers``: its sizes; ``max_length``: most positions a row can have; ``eos_ids``: tokens that end
    an answer. ``dtype`` and ``device``: of the weights, which take ``weight_bytes``; ``kv_bytes_per_position`` and
    ``kv_dtype``: of a row's keys and values; the type is empty where the model's own decides. ``experts``: of a
    mixture's layer, of which a token goes to ``used_experts``, and one of which has ``expert_bytes`` in all layers; 0:
    there is none, or the backend does not count what its forwards read.
    """

    name: str
    backend: str
    vocab_size: int
    hidden_size: int
    layers: int
    max_length: int
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    weight_bytes: int
    kv_bytes_per_position: int
    kv_dtype: str = ""
    experts: int = 0
    used_experts: int = 0
    expert_bytes: int = 0

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a forward of ``tokens`` reads, where a mixture's choose their experts independently."""
        if not self.experts:
            return float(self.weight_bytes)
        untouched = self.experts * (1 - self.used_experts / self.experts) ** tokens
        return self.weight_bytes - untouched * self.expert_bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of B rows, packed one row after the other: N tokens in all.

    ``token``, ``row``, ``position``, ``parent`` int32 [N]; ``starts`` int32 [B + 1] bounds the rows. ``parent`` is the
    index, within the row's own new tokens, of the token that this one follows; -1 follows everything the row has
    cached. A chain is -1, 0, 1, ...; in a tree, siblings share a parent and a position. A token attends to the row's
    cached positions, its ancestors and itself. ``wanted`` int32 [M]: packed indices whose logits are needed, ascending.
    ``hidden_layers``: layers whose outputs are needed, of the rows in ``hidden_rows`` bool [B] (None: of all).
    ``features``: hidden states [N, H] that enter beside the tokens, added to their embeddings: float32 on the
    host, or a backend's own array (``HiddenStates.native``). ``layers``: run only the first so many (None: all).
    """

    token: I32
    row: I32
    position: I32
    parent: I32
    starts: I32
    wanted: I32
    hidden_layers: tuple[int, ...] = ()
    hidden_rows: npt.NDArray[np.bool_] | None = None
    features: Any = None
    layers: int | None = None

    @staticmethod
    def of(rows: _fast.native.Rows) -> Batch:
        """The batch that checks the drafts of ``rows``."""
        rows.pack()
        hidden_rows = np.array(rows.hidden_rows, np.bool_)
        layers = rows.hidden_layers if hidden_rows.any() else ()
        token, row, position, parent, starts, wanted = rows.batch
        return Batch(token, row, position, parent, starts, wanted, layers, hidden_rows if layers else None)

    @staticmethod
    def pack(
        rows: Sequence[int],
        tokens: Sequence[I32],
        starts_at: Sequence[int],
        wanted: Sequence[bool],
        parents: Sequence[I32 | None] | None = None,
        *,
        last_only: bool = False,
        hidden_layers: tuple[int, ...] = (),
        hidden_rows: npt.NDArray[np.bool_] | None = None,
        features: Any = None,
        layers: int | None = None,
    ) -> Batch:
        """Pack ``tokens[b]`` int32 [n_b] for ``rows[b]``; the row's first new token stands at ``starts_at[b]``.

        ``wanted[b]``: whether the logits of the row's new tokens are needed, with ``last_only`` those of its last one.
        ``parents[b]`` as in the class (None: a chain).
        """
        trees = [None] * len(rows) if parents is None else parents
        counts = [len(new) for new in tokens]
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        none = np.zeros(0, np.int32)  # so that there may be no rows
        parent, position = [none], [none]
        for n, first, tree in zip(counts, starts_at, trees, strict=True):
            chain = np.arange(n, dtype=np.int32)
            parent.append(chain - 1 if tree is None else tree)
            position.append(first + (chain if tree is None else depths(tree)))
        asked = np.repeat(np.asarray(wanted, np.bool_), counts)
        if last_only:
            asked &= np.isin(np.arange(starts[-1]), starts[1:] - 1)
        return Batch(
            np.concatenate([none, *tokens]).astype(np.int32),
            np.repeat(np.asarray(rows, np.int32), counts),
            np.concatenate(position).astype(np.int32),
            np.concatenate(parent).astype(np.int32),
            starts,
            np.flatnonzero(asked).astype(np.int32),
            hidden_layers,
            hidden_rows,
            features,
            layers,
        )

    def __len__(self) -> int:
        return len(self.token)

    def is_chain(self, b: int) -> bool:
        """Whether the new tokens of row ``b`` follow one another."""
        parent = self.parent[self.starts[b] : self.starts[b + 1]]
        return bool((parent == np.arange(-1, len(parent) - 1)).all())


class HiddenStates(Protocol):
    """Hidden states of n packed tokens, where they were computed: nothing is copied until it is asked for."""

    def __len__(self) -> int:
        """n."""

    def at(self, indices: I32) -> HiddenStates:
        """Those of some of these tokens, by ``indices`` int32 [m] among them."""

    def layers(self, columns: Sequence[int]) -> HiddenStates:
        """Those of some of the layers, by ``columns``: their indices in ``Batch.hidden_layers``."""

    @property
    def native(self) -> Any:
        """[n, T, H] as the backend's own array (numpy, or a torch tensor on its device), for ``Batch.features``."""

    def numpy(self) -> F32:
        """float32 [n, T, H] on the host."""


class HostHiddenStates:
    """HiddenStates that are on the host already: float32 [n, T, H]."""

    def __init__(self, values: F32) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def at(self, indices: I32) -> HostHiddenStates:
        return HostHiddenStates(self._values[indices])

    def layers(self, columns: Sequence[int]) -> HostHiddenStates:
        return HostHiddenStates(self._values[:, list(columns)])

    @property
    def native(self) -> F32:
        return self._values

    def numpy(self) -> F32:
        return self._values


class Parts(Protocol):
    """What a learned drafter shares with its target, in the backend's own arrays: numpy, or torch tensors."""

    def embed(self, tokens: I32) -> Any:
        """What enters the first layer for token ids ``tokens`` int32 [n]: [n, H], scaled as the model scales it."""

    def norm(self, hidden: Any) -> Any:
        """The final norm of states ``hidden`` [n, H]: [n, H]."""

    def logits(self, normed: Any, ids: I32 | None = None) -> Any:
        """The head's logits of states ``normed`` [n, H]: [n, V], or of rows ``ids`` int32 [m] only: [n, m]."""


class Output(Protocol):
    """A forward's result, lazy. Indices ``at`` are packed indices that were ``wanted``."""

    @property
    def threads(self) -> int:
        """How many threads the forward ended with; 0 where that is not known."""
        return 0

    @property
    def experts(self) -> float:
        """Distinct experts that the forward's tokens went to in a mixture's layer, on average; 0: not known."""
        return 0.0

    def decide(self, rows: _fast.native.Rows, choosers: Callable[[], Sequence[Chooser | None]]) -> None:
        """Put the verdicts of ``rows`` into them, as far as ``verify`` finds them.

        ``choosers``: as in ``verify``.
        """
        if len(rows.starts) > 1 and any(given := choosers()):
            found = self.verify(Drafts(*rows.drafts(True)), rows.starts[: len(given)], given)
            if found is not None:
                rows.decide_all(found)

    def verify(self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None]) -> Verdicts | None:
        """``verify.walk`` of ``drafts`` for a whole batch, where the logits lie: one call and at most one copy.

        Row i's pending token is packed at ``starts[i]`` (int32 [B]), its node n at ``starts[i] + 1 + n``. A row whose
        entry in ``choosers`` is None, or which cannot be decided there (no token is allowed, NaN, too near a filter's
        edge), gets ``accepted`` -1: the engine walks it node by node. None: this output has no such path.
        """

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        """The target's choice int32 [n] after each token ``at`` int32 [n], under ``choosers[i]``."""

    def near_ties(self, at: I32) -> int:
        """How many of the choices that were made ``at`` int32 [n] another order of sums might have made otherwise; 0
        where the arithmetic has one order."""

    def logits(self, at: I32) -> F32:
        """After packed indices ``at`` int32 [n]: float32 [n, V] on the host."""

    def logprobs(self, at: I32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
        """Raw log-softmax at ``tokens[i]`` after ``at[i]``, with ``top[i]`` alternatives."""
        rows = zip(self.logits(at), tokens, top, strict=True)
        return [token_logprob(row, int(token), k) for row, token, k in rows]

    def hidden_states(self, at: I32) -> HiddenStates:
        """Of the batch's hidden layers, at packed indices of the rows that keep them. A handle: no copy."""


_NOT_EXPORTED = "this cache exports nothing: see KVCache.layout"


class KVLayout(NamedTuple):
    """What exported keys, values and states are.

    ``block_bytes``, ``window_bytes``, ``state_bytes``: of an exported block, of one of windowed layers and of recurrent
    states (0: there are none). ``window``: positions that windowed layers see, at most, the token itself among them.
    ``made``: everything beside the model's files that their bytes depend on.
    """

    block_bytes: int
    window_bytes: int
    window: int
    state_bytes: int
    made: tuple[str, ...]


class KVCache(Protocol):
    """Keys and values of rows, in blocks that rows take as they grow and share by reference.

    A row's slots 0 .. length - 1 are in use; what lies beyond is never read. A block that several rows share is copied
    before one of them writes into it.
    """

    @property
    def block(self) -> int:
        """Positions a block."""

    def alloc(self) -> int:
        """An empty row's index. Takes no memory yet."""

    def free(self, row: int) -> None:
        """Give ``row`` back; blocks that no other row shares are free again."""

    def length(self, row: int) -> int:
        """Positions of ``row`` in use."""

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent layers, so that rows can be cut in some places only."""
        return False

    @property
    def windowed(self) -> bool:
        """Whether rows give back what windows have passed, so that they can be cut in some places only."""
        return False

    def reachable(self, row: int, n: int) -> int:
        """The longest beginning of ``row``, of at most ``n`` positions, at which it can be cut or forked.

        Anywhere, unless the model has recurrent layers, whose states go forward only, or gives back what windows have
        passed.
        """
        return min(max(n, 0), self.length(row))

    def keep(self, row: int) -> None:
        """Where ``row`` ends now stays reachable when it is read on or written, if memory allows."""
        return

    def truncate(self, row: int, n: int) -> None:
        """Keep the first ``n`` positions of ``row``, which can be cut there (``reachable``).

        Arithmetic: nothing is copied or cleared; blocks beyond are given back.
        """

    def compact(self, row: int, start: int, keep: I32) -> None:
        """Keep slots ``start + keep[i]`` (ascending) as ``start + i`` and end ``row`` there: a tree's kept path."""

    def settle(self, rows: _fast.native.Rows) -> list[tuple[int, str]]:
        """Every decoding row of ``rows`` keeps what its verdict says: all but the last token.
        Returns the rows of the batch whose positions are in doubt, with the reason."""
        lost = []
        for i, row, start, slots, straight, cut in rows.paths:
            try:
                if not straight:
                    self.compact(row, start, slots)
                elif cut:
                    self.truncate(row, start + len(slots))
            except Exception as error:
                lost.append((i, repr(error)))
        return lost

    def fork(self, src: int, dst: int, n: int) -> None:
        """Make ``dst``'s first ``n`` positions those of ``src``, by reference; ``dst``, which was empty, ends there."""

    @property
    def layout(self) -> KVLayout | None:
        """What is exported of rows; None: nothing can be."""
        return None

    def export_block(self, row: int, block: int, windowed: bool = False) -> bytes | None:
        """The keys and values of ``block`` of ``row``, of layers that see every position or of ``windowed`` ones, for
        ``import_block`` of a cache with the same layout; None: the row has given it back."""
        raise ValueError(_NOT_EXPORTED)

    def import_block(self, row: int, data: memoryview, positions: int, window: memoryview | None = None) -> None:
        """Lengthen ``row``, whose blocks are full, by the first ``positions`` of a block: its ``data``, and ``window``,
        that of windowed layers, where windows at the end of what is imported reach it. The row is of no use before it
        has all of those and, with recurrent layers, for which it was empty, before ``import_state``. Raises
        MemoryLimitError."""
        raise ValueError(_NOT_EXPORTED)

    def state_ends(self, row: int) -> list[int]:
        """Numbers of positions, ascending, after which recurrent states of ``row`` can be exported."""
        return []

    def export_state(self, row: int, positions: int) -> bytes:
        """The recurrent states of ``row`` after so many ``positions``, one of ``state_ends``."""
        raise ValueError(_NOT_EXPORTED)

    def import_state(self, row: int, data: memoryview) -> None:
        """Give ``row``, which has just taken blocks, the states at its end, ``data``. Raises MemoryLimitError."""
        raise ValueError(_NOT_EXPORTED)

    def growth(self, row: int, n: int, settled: int = 0) -> int:
        """Bytes that ``n`` more positions of ``row`` would take now, a copy of a shared block included, without those
        that it gives back for them. ``settled``: of these positions, how many recurrent layers go over for good, as
        they do of a prompt of which one output is wanted."""

    def bytes_for(self, positions: int) -> int:
        """What a row of so many ``positions`` takes when it shares nothing; reading more than a few at once may take
        more for a while, where layers have windows."""

    def exclusive(self, rows: Sequence[int]) -> int:
        """Bytes that would be free if ``rows`` were: their blocks that no other row shares."""

    @property
    def bytes(self) -> int:
        """What all rows take now; a shared block counts once."""

    @property
    def limit(self) -> int | None:
        """The hard bound on ``bytes`` (None: unbounded). A forward that would pass it raises MemoryLimitError."""

    @property
    def rows(self) -> list[int]:
        """Rows in use, ascending."""

    def check(self) -> None:
        """Assert the cache's own invariants."""


class Model(Protocol):
    """A decoder-only language model; target and draft model alike."""

    info: ModelInfo
    kv: KVCache
    strict: bool = False  # whether the torch backend was asked for bits that depend on nothing computed beside them
    drafts: bool = False  # whether its files have a layer that drafts, which `mtp` uses
    path: Path | None = None  # its files: a folder or a .gguf file, where it was loaded from such
    lock: FairLock  # engines over the model take it for a step, so that they may run in several threads

    @property
    def native(self) -> _fast.native.Model | None:
        """The decoder in C++ that computes; None: another backend does. ValueError once it is closed."""
        return None

    @property
    def runtime(self) -> _fast.native.Runtime | None:
        """Threads and working memory of ``native``. ValueError once the model is closed."""
        return None

    @property
    def threads(self) -> int | None:
        """The CPU threads it computes with; None where that is not known, or on a GPU."""
        return None

    @property
    def isa(self) -> str | None:
        """The native runtime's instruction-set path, which sets its speed alone."""
        return None

    @property
    def card(self) -> str | None:
        """The GPU's name; None on a CPU."""
        return None

    @property
    def parts(self) -> Parts:
        """Embedding, final norm and head, which a learned drafter shares."""

    def run(self, rows: _fast.native.Rows) -> Output:
        """``forward`` of the batch that checks the drafts of ``rows``."""
        return self.forward(Batch.of(rows))

    def forward(self, batch: Batch) -> Output:
        """Run the batch, write its KV at each row's end, and lengthen the rows by their new tokens.

        With ``batch.layers`` set, only those layers' KV is written. When it raises, every row is as long as it was.
        Raises ValueError for a malformed batch, MemoryLimitError when the cache is full.
        """

    def require_unchanged(self) -> None:
        """Raise ModelError when weights that it was made of have changed since."""
        return

    def close(self) -> None:
        """Give back memory and threads. Calling twice is allowed."""


class HostOutput(Output):
    """An Output over logits that are already on the host: float32 [M, V], in the order of ``wanted`` [M]."""

    def __init__(self, wanted: I32, logits: F32) -> None:
        self._wanted = wanted
        self._logits = logits

    def verify(self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None]) -> Verdicts | None:
        return None

    def logits(self, at: I32) -> F32:
        found = np.searchsorted(self._wanted, at)
        logits: F32 = self._logits[found]
        return logits

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        return choose_on_host(self.logits(at), choosers)

    def near_ties(self, at: I32) -> int:
        return 0

    def hidden_states(self, at: I32) -> HiddenStates:
        raise ValueError("this model keeps no hidden states, so it cannot serve a drafter that reads them")


def choose_on_host(logits: F32, choosers: Sequence[Chooser]) -> I32:
    """Choices int32 [n] from float32 ``logits`` [n, V]."""
    return np.array([c.choose(row) for c, row in zip(choosers, logits, strict=True)], np.int32)
