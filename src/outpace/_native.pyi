"""The C++ runtime (native/bindings/). ``_fast`` loads it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_I32 = npt.NDArray[np.int32]
_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]
_U8 = npt.NDArray[np.uint8]
_Chooser = dict[str, Any]  # see describe in models/native/output.py

INTERFACE: int
ARITHMETIC: int  # raised with every change that alters a bit of an answer
KV_BLOCK: int

_Lists = tuple[list[int], list[int], list[float], list[int]]  # a draft's tokens, parents, gains and sources

class MemoryLimit(RuntimeError): ...
class NotFinite(ArithmeticError): ...

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
    @property
    def packed(self) -> _U8:
        """Its bytes as they lie in memory, uint8 [bytes]; not copied, not to be written to."""

    def unpack(self) -> _F32:
        """float32 [rows, cols], the exact values."""

    def row_is(self, row: int, stored: _U8, source: int, target: str = "keep") -> bool:
        """Whether a row has the values that packing ``stored``, a row of a model's file, would give it."""

    def product(self, x: _F32, isa: str = "") -> _F32:
        """float32 [n, cols] -> [n, rows] by one path's kernels, on one thread."""

class PackedFile:
    """A file of packed weights, mapped read-only; see native/weights/packed_file.h. Raises ValueError, RuntimeError."""

    def __init__(self, file: int, bytes: int) -> None: ...
    @property
    def huge(self) -> float:
        """The share of it that the system maps in huge pages; 0 where it does not tell."""

    def copy(self, threads: int) -> None:
        """Into memory of this process alone, before any matrix is taken from it. Raises MemoryError."""

    def checksums(self, begin: int, piece: int, threads: int) -> list[int]:
        """Of each ``piece`` bytes from ``begin`` on, by so many threads."""

class Result:
    """One forward's logits, best tokens and hidden states. Indices are packed ones. Raises IndexError for others."""

    def best(self, at: _I32) -> _I32:
        """Argmax int32 [n]; -1: all are -inf; -2: NaN or infinity."""

    @staticmethod
    def of(logits: _F32, wanted: _I32, isa: str = "") -> Result:
        """As if a forward had computed ``logits`` float32 [n, V] of packed indices ``wanted``."""

    def verify(
        self, tokens: _I32, widths: _I32, parents: _I32 | None, starts: _I32, rows: list[_Chooser | None]
    ) -> tuple[_I32, _I32, _I32]:
        """The arrays of Verdicts. ``rows``: None is left out, () is greedy without rules. Accepted -1: not decided."""

    def choose(self, at: int, chooser: _Chooser) -> int:
        """A token; -1: none is allowed; -2: NaN or infinity; -3: too close to top-p's edge to decide here."""

    def logits(self, at: _I32) -> _F32: ...
    def logprobs(self, at: _I32, tokens: _I32, top: Sequence[int]) -> list[tuple[float, list[tuple[int, float]]]]:
        """Of each of ``tokens`` [n], and of the ``top`` [n] likeliest: see exact.sampling.token_logprob."""

    def hidden_places(self, at: _I32) -> _I32:
        """Where packed indices stand among the tokens of ``hidden_states``. Raises IndexError, ValueError without."""

    def hidden_states(self) -> _F32:
        """float32 [n, T, H] of all tokens whose rows keep them, not copied; not to be written to."""

class Weights:
    """A decoder's packed weights; any number of models can share them. Raises ValueError for what does not fit."""

    def __init__(
        self,
        config: dict[str, Any],
        layers: list[dict[str, Any]],
        embedding: Matrix,
        head: Matrix,
        final_norm: _F32,
        ropes: list[_F32],
    ) -> None: ...
    @property
    def bytes(self) -> int: ...

class Runtime:
    """Threads, working memory and a lock for models that compute in turn. Raises ValueError, RuntimeError.

    A child of ``os.fork`` gets threads of its own when it first computes; the fork waits for a forward under way.
    """

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def team(self) -> int: ...
    @property
    def drops(self) -> tuple[int, int]:
        """Runs that went on with fewer threads since others used the cores; slow ones that kept theirs: nobody did."""

    claims: bool
    """Whether threads claim a half of every product, since cores differ: measured when they began, or as it was set."""

    def late_run(self, seconds: float, sleeps: bool, away: float, after: float = 0.0) -> int:
        """For tests: a run whose last thread is late, asleep or at work. ``away``: see Pool::pretend. The team then."""

    @property
    def wake_seconds(self) -> float: ...
    @property
    def hand_over_seconds(self) -> float: ...

class Model:
    def __init__(self, weights: Weights, runtime: Runtime, isa: str, kv_dtype: str, kv_limit: int) -> None: ...
    def forward(
        self,
        token: _I32,
        row: _I32,
        position: _I32,
        parent: _I32,
        starts: _I32,
        wanted: _I32,
        hidden_layers: tuple[int, ...],
        layers: int,
        hidden_rows: npt.NDArray[np.bool_] | None,
        features: _F32 | None,
    ) -> Result: ...
    @property
    def isa(self) -> str: ...
    @property
    def embedding(self) -> Matrix: ...
    @property
    def head(self) -> Matrix: ...
    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by when they enter."""

    @property
    def threads(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def time_phases(self, on: bool) -> None: ...
    def take_timings(self) -> dict[str, float]: ...
    def kv_alloc(self) -> int: ...
    def kv_free(self, row: int, /) -> None: ...
    def kv_length(self, row: int, /) -> int: ...
    def kv_truncate(self, row: int, n: int, /) -> None: ...
    def kv_compact(self, row: int, start: int, keep: _I32, /) -> None: ...
    def kv_fork(self, src: int, dst: int, n: int, /) -> None: ...
    def kv_growth(self, row: int, n: int, /) -> int: ...
    def kv_bytes_for(self, positions: int, /) -> int: ...
    def kv_exclusive(self, rows: list[int], /) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_held(self) -> int: ...
    @property
    def kv_rows(self) -> list[int]: ...
    def kv_check(self) -> None: ...
    def kv_poison(self) -> None: ...

_Ask = tuple[int, _I32, _F32, int, int, int, tuple[float, int, int, int] | None]

_BlockAsk = tuple[int, int, int, int, tuple[float, int, int, int] | None]

class Eagle:
    """An EAGLE-3 drafter's network; see native/model/eagle.h. Raises ValueError, IndexError, MemoryLimit, NotFinite."""

    def __init__(self, model: Model, fuse: Matrix, norms: list[_F32], tokens: _I32, norm_output: bool) -> None:
        """``model``: its first layer has an ``embed_norm``. ``tokens`` int32 [D]: the target's ids, ascending."""

    @property
    def bytes(self) -> int:
        """Of its weights, the embedding aside."""

    def draft(self, asks: list[_Ask]) -> list[tuple[list[int], list[int], list[float]]]:
        """Append entries to the target's rows and draft after each one's last: (row, tokens [n], hidden states [n, T,
        H], nodes (0: none), levels, branch, None or temperature, seed, sample and output index). Tokens, parents and
        path probabilities of each ask's nodes."""

    def fuse(self, states: _F32) -> _F32:
        """Features [n, H] of hidden states [n, T, H]."""

    def row(self, of: int) -> int:
        """The model's row of a row of the target; -1: it is not there."""

    def take(self, of: int) -> bool:
        """Make it where it is not there; whether that was so."""

    def drop(self, of: int) -> None: ...
    @property
    def rows(self) -> dict[int, int]: ...

class Parallel:
    """A block-parallel drafter's network; see native/model/parallel.h. Raises ValueError, IndexError, MemoryLimit,
    NotFinite."""

    def __init__(
        self,
        model: Model,
        fuse: Matrix,
        norm: _F32,
        tokens: _I32,
        block: int,
        mask: int,
        from_anchor: bool,
        markov: tuple[Matrix, Matrix] | None,
        confidence: tuple[_F32, float] | None,
    ) -> None:
        """``tokens`` int32 [D]: the target's ids, ascending. ``markov``: [V, rank] and [D, rank]. ``confidence``: its
        head's weights, of a state or of that and the token before, and its bias."""

    @property
    def bytes(self) -> int:
        """Of its weights, the embedding and what is looked up of tokens aside."""

    @property
    def rows(self) -> dict[int, int]:
        """The model's row of each row of the target."""

    def draft(self, asks: list[_BlockAsk]) -> list[tuple[list[int], list[float]]]:
        """(row, pending token, where it stands, slots, None or temperature, seed, sample and output index). Of each
        ask's slots their places in the draft vocabulary and chances."""

    def states(self, asks: list[_BlockAsk]) -> tuple[_F32, _F32]:
        """Normed states [N, H] and logits [N, D] of all slots, ask after ask, without the Markov head's share."""

    def bias(self, tokens: _I32) -> tuple[_F32, _F32]:
        """What the Markov head knows of tokens [n, rank], and what that adds to logits [n, D]."""

class Medusa:
    """Medusa's heads beside a target; see native/model/medusa.h. Raises ValueError, NotFinite."""

    def __init__(
        self, target: Model, blocks: list[list[tuple[Matrix, _F32 | None]]], rows: list[Matrix], tokens: _I32
    ) -> None:
        """``blocks``: weight and bias of each block, by head. ``rows``: of each head, or one for all. ``tokens`` int32
        [D]: the target's ids, ascending."""

class SuffixIndex:
    """The index of ``suffix``: at most ``capacity`` tokens. See native/drafting/suffix.h. Raises ValueError."""

    def __init__(
        self, capacity: int, most: int, nearest: int, few: int, weights: tuple[float, ...], doubt: float
    ) -> None: ...
    def __len__(self) -> int: ...
    def append(self, tokens: _I32) -> None: ...
    def shrink(self, n: int) -> None: ...
    def tokens(self) -> _I32: ...
    def propose(
        self, context: _I32, budget: int, others: list[SuffixIndex], wide: bool
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and gains of the tree."""

class Mapped:
    """A file's bytes in place, uint8 [n]. What the file loses meanwhile reads as zeros, and ``torn`` says so; without
    this, reading it would end the process. Raises OSError."""

    bytes: npt.NDArray[np.uint8]
    torn: bool
    def __init__(self, path: str) -> None: ...

class Datastore:
    """The search of ``retrieval``: tokens, order and keys of segments, which it keeps; ``files``: where they lie.
    Raises ValueError, and RuntimeError in a search where a file was cut short while it was open."""

    def __init__(
        self,
        segments: list[tuple[_I32, _I32, _I64]],
        weights: tuple[float, ...],
        doubt: float,
        vocab: int,
        files: list[Mapped] = ...,
    ) -> None: ...
    def propose(self, context: _I32, places: int, least: int, budget: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and gains of the tree."""

class NativeDrafter:
    """A drafter in C++; see native/drafting/lookups.h."""

    def trees(
        self, rows: list[tuple[int, int, int, _I32, int]]
    ) -> list[tuple[list[int], list[int], list[float], list[int]]]:
        """rows: row, request, tokens of its prompt, committed tokens int32 [L], most nodes. Tokens, parents, gains and
        sources of a tree for each. Raises ValueError, RuntimeError."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it hears of what became final."""

    @property
    def stepwise(self) -> bool:
        """Whether it takes a forward for every level."""

    @property
    def ranks(self) -> int:
        """How many of the target's likeliest tokens after each verified token ``rank`` takes in; 0: none."""

    def rank(self, row: int, tokens: _I32, ids: _I32) -> None:
        """tokens [n]: a row's pending token and its nodes; ids [n, ranks]: what the target finds likeliest after each,
        best first, -1: none. Raises ValueError."""

class RecyclingLookup(NativeDrafter):
    """See native/drafting/recycling.h. Raises ValueError."""

    def __init__(self, capacity: int, hit: Sequence[float], shared: bool) -> None: ...
    def release(self, row: int) -> None: ...
    @property
    def lists(self) -> int: ...
    def rows(self) -> list[int]: ...
    def after(self, row: int, token: int) -> list[int]: ...

class EagleRows(NativeDrafter):
    """What drafters/learned/eagle.py does with the entries of its rows, and those: see Entries in
    drafters/learned/entries.py. Levels: -1, as many as are asked for. Raises ValueError, KeyError."""

    def __init__(
        self,
        eagle: Eagle,
        layers: list[int],
        branch: int,
        most_levels: int,
        fixed_levels: int,
        deepest: int,
        catch_up: int,
        max_length: int,
    ) -> None: ...
    def __contains__(self, row: int) -> bool: ...
    def rows(self) -> list[int]: ...
    def append(self, row: int, first: int, tokens: _I32, states: _F32) -> None: ...
    def end(self, row: int) -> int: ...
    def read(self, row: int) -> int: ...
    def waiting(self, row: int) -> int: ...
    def unread(self, row: int, n: int) -> tuple[_I32, _F32]: ...
    def has_read(self, row: int, n: int) -> None: ...
    def unread_last(self, row: int) -> bool: ...
    def fork(self, src: int, dst: int, known: int) -> None: ...
    def retire(self, row: int) -> None: ...
    def release(self, row: int) -> None: ...

class ParallelRows(NativeDrafter):
    """What a ``Parallel`` has read of rows of the target, and how native steps draft from it. Raises ValueError,
    MemoryLimit."""

    def __init__(self, network: Parallel, layers: list[int], max_length: int) -> None: ...
    def end(self, row: int) -> int: ...
    def read(self, contexts: list[tuple[int, _F32, _I32]]) -> None:
        """Append to rows: (row, hidden states [n, T, H], positions [n])."""

    def fork(self, src: int, dst: int, end: int) -> None: ...
    def release(self, row: int) -> None: ...
    @property
    def positions(self) -> dict[int, list[int]]: ...

class MedusaRows(NativeDrafter):
    """The target's last state before each row's pending token, and how native steps draft from it. ``tree``: parent,
    head and rank of each node. Raises ValueError, IndexError."""

    def __init__(self, network: Medusa, layer: int, tree: list[tuple[int, int, int]]) -> None: ...
    def keep(self, row: int, position: int, state: _F32) -> None: ...
    def position(self, row: int) -> int: ...
    def rows(self) -> list[int]: ...
    def logits(self, rows: list[int]) -> _F32:
        """[n, heads, D]."""

    def fork(self, src: int, dst: int) -> None: ...
    def release(self, row: int) -> None: ...

class NgramLookup(NativeDrafter):
    """See native/drafting/lookups.h. Raises ValueError."""

    def __init__(self, least: int, most: int, candidates: int, hit: Sequence[float], older: float) -> None: ...

class DraftRows:
    """By the target's row: a row of a draft model's cache, and the tokens fed there. Raises KeyError."""

    def cached(self) -> dict[int, int]: ...
    def tokens(self, row: int) -> _I32:
        """All that were fed, a copy."""

    def put(self, row: int, cached: int, tokens: _I32) -> None: ...
    def release(self, row: int) -> None: ...

class ModelDrafter(NativeDrafter):
    """See native/drafting/draft_model.h."""

    def __init__(self, model: Model, rows: DraftRows, vocab: int, max_length: int, catch_up: int) -> None: ...

class RetrievalLookup(NativeDrafter):
    def __init__(self, datastore: Datastore, places: int, least: int) -> None: ...

class ComposedDrafter(NativeDrafter):
    """``sure``, ``deep``: see is_sure of drafters/composed.py. Raises ValueError where ``parts`` and ``fallback``
    differ in length, or more than one part is stepwise."""

    def __init__(self, parts: list[NativeDrafter], fallback: list[bool], sure: float, deep: int) -> None: ...

class SuffixRows(NativeDrafter):
    """The indexes of rows, with ``history`` at most ``capacity`` tokens. Raises ValueError."""

    def __init__(
        self,
        capacity: int,
        most: int,
        nearest: int,
        few: int,
        weights: Sequence[float],
        doubt: float,
        wide: bool,
        history: SuffixIndex | None,
    ) -> None: ...
    def bound(self) -> None: ...
    @property
    def places(self) -> int: ...
    def release(self, row: int) -> int: ...
    def rows(self) -> dict[int, tuple[int, int]]: ...

class Row:
    """A sequence while it has its row: what ``Rows.row`` gives."""

_Drafts = tuple[_I32, _I32, _I32 | None, None, _F32 | None, _U8 | None, tuple[str, ...], _I32 | None]
_Verdicts = tuple[_I32, _I32, _I32]
_Outcome = tuple[list[int], list[int], list[str], list[str], int, int, float | None]

class Rows:
    """The rows of a step, with their drafts and verdicts; see native/step/rows.h and engine/step.py. ``target``: the
    source of tokens that no draft had; ``hidden_layers``: layers whose outputs drafters read. What does not fit raises
    ValueError."""

    def __init__(self, vocab: int, hidden_layers: list[int], target: str) -> None: ...
    def row(
        self,
        row: int,
        request: int,
        prompt: int,
        adaptive: bool,
        drafter: str,
        native: NativeDrafter | None,
        names: tuple[str, ...],
        natively: bool,
        drafts: bool,
        reads: bool,
        ruled: bool,
        acceptance: str,
        watched: bool,
        chooser: _Chooser,
        levels: str | None,
        nodes: bool,
        trims: bool,
    ) -> Row:
        """``native``: the row's native drafter, which drafts for it where ``natively``; ``drafts``: whether any does.
        ``reads``: it reads hidden states; ``ruled``: rules may edit a draft; ``watched``: the caller looks at the row's
        logits; ``levels``, ``nodes``, ``trims``: see DraftCost."""

    def begin(
        self,
        policy: Policy | None,
        rows: list[tuple[Any, ...]],
        chunks: list[tuple[Row, _I32, int, int, bool]],
    ) -> None:
        """A new step: rows (row, its tokens, how many are committed, most nodes) and, for one with rules, those that
        are known here (None: not all that must be) and whether others can test a token; chunks (row, its tokens, where
        it begins, how many, whether logits are wanted)."""

    def end(self) -> None:
        """Keep nothing of the step."""

    def propose(self) -> tuple[list[int], list[tuple[list[int], str]]]:
        """Native drafters draft. Rows whose drafter is Python's; rows of native drafters that failed, and why."""

    @property
    def ruled(self) -> list[int]:
        """Rows with rules that may edit their draft."""

    def trim(self) -> None:
        """The policy drops nodes that do not pay."""

    def pack(self) -> None:
        """Make ``batch``, ``starts`` and ``hidden_rows``."""

    def forward(self, model: Model) -> Result:
        """``pack``, and the model's forward. Raises MemoryLimit, and what a forward raises."""

    def verify(self, result: Result) -> None:
        """Decide rows, as far as that is possible here; their drafters get the likeliest tokens."""

    @property
    def undecided(self) -> list[int]:
        """Rows that Python has to look at: not decided, or with rules that can test a token."""

    def settle(self, model: Model) -> list[tuple[int, str]]:
        """The rows' KV becomes what their verdicts say. Rows where that failed, and why."""

    @property
    def paths(self) -> list[tuple[int, int, int, _I32, bool, bool]]:
        """Of rows with drafts: number in the step and in the cache, where its slots begin, slots of the path, whether
        those are the first, and whether others follow."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose outputs drafters read."""

    @property
    def sizes(self) -> tuple[list[int], list[int], list[float]]:
        """Nodes to ask for, levels to draft and floors, by row."""

    def put(self, where: list[int], drafts: Any) -> None:
        """``Drafts`` of rows ``where``."""

    def drop(self, where: list[int]) -> None:
        """These rows have no drafts."""

    def lead(self, row: int, tokens: list[int], source: str) -> None:
        """Tokens that must follow come before what was drafted."""

    def keep(self, row: int, nodes: list[int]) -> None:
        """Nodes, ascending, that stay, with their parents."""

    def draft(self, row: int) -> tuple[list[int], list[int], list[float], list[int]]:
        """The fields of ``Draft``, of a row's draft as it stands."""

    def drafts(self, kept: bool) -> _Drafts: ...
    @property
    def batch(self) -> tuple[_I32, _I32, _I32, _I32, _I32, _I32]:
        """token, row, position, parent, starts and wanted of the packed ``Batch``."""

    @property
    def starts(self) -> _I32: ...
    @property
    def hidden_rows(self) -> list[int]: ...
    def decide_all(self, verdicts: Any) -> None:
        """``Verdicts`` of all rows (accepted below 0: undecided), by a model in Python."""

    def decide(self, row: int, tokens: list[int], path: list[int]) -> None: ...
    def verdict(self, row: int) -> tuple[list[int], list[int]]:
        """Tokens (none: undecided) and path."""

    def verdicts(self) -> _Verdicts: ...
    def decisions(self) -> list[Any] | None:
        """The native policy's; None: it was not asked."""

    def outcome(self) -> list[_Outcome]:
        """By row: tokens gained, path, the tokens' sources, those of all nodes, depth of the draft, nodes verified, the
        speed that the policy expected."""

    def observe(self, gains: list[tuple[int, int]]) -> None:
        """Native drafters hear what became final: (row of the step, how many tokens). Raises what a network's forward
        raises."""

    def learn(self, draft: float, body: float) -> None:
        """The policy, if it had a say, takes in what became of the step: seconds that drafting took, and all else."""

class Policy:
    """What is behind ``--size auto``; control/adaptive.py makes it, of a table of costs by new tokens and what lies
    beyond. ``stretch``: the longest step that holds others up, in plain steps. Raises ValueError."""

    explain: bool
    def __init__(
        self,
        table: list[float],
        last_width: float,
        last_seconds: float,
        slope: float,
        row: float,
        position: float,
        position_width: float,
        stretch: float,
    ) -> None: ...
    def release(self, row: int) -> None: ...
    def state(self) -> dict[str, Any]:
        """budget, advantage, curves: (rows, steps, plain seconds, ((nodes, plain steps, ratios), ...))."""

    def __len__(self) -> int: ...

def usable_isas() -> list[str]: ...
def built_isas() -> list[str]: ...
def left_out_isas() -> str:
    """What the compiler could not build, as "name (what it lacks), ..."; empty: nothing."""

def kernels(isa: str = "") -> str: ...
def amx() -> dict[str, Any]:
    """Intel's tiles: present (the processor has them), off (why they are not used, "" where they are), from (file type
    -> tokens from which its products use them, 0: never)."""

def dot_pairs(a: _I32, b: _I32, c: _F32, isa: str) -> _F32:
    """fma(even, even, fma(odd, odd, c)) of pairs of bfloat16, int32 [n], n a multiple of 16; for tests."""

def differing_product(a: str, b: str, spoiled: int = 0) -> str:
    """The first product of random matrices, of each integer format and 1 to 40 tokens, in which two instruction-set
    paths differ by a bit: "Q4_0 with 3 tokens"; "" where none does. ``spoiled``: products of so many tokens get a wrong
    bit, for tests."""

def row_bytes(source: int, cols: int) -> int: ...
def packed_bytes(source: int, rows: int, cols: int, target: str = "keep") -> int: ...
def source_types() -> dict[int, tuple[str, int, int]]:
    """GGUF's number -> name, values and bytes of a block, of what can be packed."""

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
def checksum(data: _U8) -> int:
    """64 bits of a file's piece."""

def mapped_matrix(file: PackedFile, offset: int, source: int, rows: int, cols: int, target: str = "keep") -> Matrix:
    """What ``pack`` would make of such a matrix, found in a file. Raises ValueError where it does not lie within it."""

def gather(arena: Arena, matrix: Matrix, ids: _I32) -> Matrix:
    """Rows ``ids`` of a matrix, with the same values, as a matrix. Raises ValueError."""

def embed(model: Model, tokens: _I32) -> _F32: ...
def final_norm(model: Model, states: _F32) -> _F32: ...
def head(model: Model, normed: _F32, ids: _I32 | None) -> _F32: ...
def gguf_strings(data: bytearray, at: int, count: int) -> tuple[list[str], int]: ...
def merge(proposals: Sequence[_Lists], budget: int) -> _Lists:
    """``merge`` of exact/drafts.py."""

def read_seconds(bytes: int, threads: int, repeats: int) -> float: ...
