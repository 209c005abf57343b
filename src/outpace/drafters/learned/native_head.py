"""EAGLE-3 on its target's native runtime: a whole draft, chain or tree, in one call; see native/model/eagle.h.

The network shares the target's threads, working memory, embedding and, where the checkpoint has no head of its own, the
stored values of the head's rows. Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace import _fast
from outpace.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import EagleConfig
from outpace.drafters.learned.head import Ask
from outpace.drafters.learned.native_weights import PLAIN, Packing, fitting, own_type
from outpace.errors import Argument, DrafterError, MemoryLimitError, NotFiniteError, ParameterError
from outpace.exact.drafts import Drafts
from outpace.exact.sampling import Chooser
from outpace.models.native.model import KV_DTYPES, QUANTIZE, NativeModel

_native = _fast.native


class NativeHead:
    """See ``Head``. ``checkpoint``: one of method "eagle" that fits the target (``checkpoint.fit``).

    ``quantize``: int8 or int4, in groups of 32; None keeps weights as ``dtype`` says: float32 or bfloat16; "auto" is
    int4 beside a target of 4 bits, int8 beside another quantised one, else the target's own type. Rows of the head that
    are the target's stay as they are stored, but for int4. ``limit``: hard bound in bytes on the KV.
    Raises ParameterError for options, DrafterError for what does not fit.
    """

    def __init__(
        self,
        target: NativeModel,
        checkpoint: Checkpoint,
        quantize: str | None = None,
        *,
        dtype: str = "auto",
        kv_dtype: str = "bfloat16",
        limit: int | None = None,
    ) -> None:
        for name, value, known in (
            ("quantize", quantize, (None, *QUANTIZE)), ("dtype", dtype, ("auto", *PLAIN)),
            ("kv_dtype", kv_dtype, KV_DTYPES),
        ):  # fmt: skip
            if value not in known:
                raise ParameterError(Argument(name, value), f" is not known: use one of {', '.join(map(str, known))}")
        if quantize is not None and dtype != "auto":
            raise ParameterError(Argument("quantize", quantize), " and ", Argument("dtype", dtype), ": give one")
        to = quantize or (own_type(target) if dtype == "auto" else PLAIN[dtype])
        with fitting():
            self._model, self._eagle, self.ids = _build(target, checkpoint, to, kv_dtype, limit)
        config = _eagle(checkpoint)
        self.max_length = config.decoder.max_length
        self.weight_bytes: int = self._eagle.bytes
        self._last = config.decoder.layers - 1
        self._norm_output = config.norm_output
        self._said: dict[int, F32] = {}  # what follows the last entries of rows that are extended reads, float32 [1, H]

    def entries(
        self, taps: Sequence[int], branch: int, most_levels: int | None, fixed_levels: int, catch_up: int
    ) -> Any:
        """An ``_native.EagleRows``: the entries of an ``EagleDrafter`` with these options, and how whole steps in C++
        draft from them with this network. ``taps``: layers in the network's order."""
        most = -1 if most_levels is None else most_levels
        return _native.EagleRows(self._live(), list(taps), branch, most, fixed_levels, catch_up, self.max_length)

    def feed(self, rows: Sequence[int], tokens: Sequence[I32], taps: Sequence[Any]) -> None:
        """See ``Head.feed``."""
        self._call([(row, its, states, 0, 0, 0, None) for row, its, states in zip(rows, tokens, taps, strict=True)])

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        """See ``Head.draft``. A request's filters and rules are ignored; its temperature and noise are not.

        Under noise, ``confidence`` is made of each child's share of e^score (logit / T + g) among its parent's 16
        largest or so: what the target will choose depends on the same noise, and q alone says little of it.
        """
        tokens, widths, parents, confidence = self._call(
            [(a.row, a.tokens, a.taps, a.nodes, min(a.levels, a.nodes), a.branch, noise_of(a.chooser)) for a in asks]
        )
        return Drafts(tokens, widths, parents, confidence=confidence)

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], taps: Sequence[Any]) -> F32:
        """See ``Head.extend``. float32 [B, D]."""
        features = []
        for row, its, states in zip(rows, tokens, taps, strict=True):
            if states is None and (row not in self._said or len(its) != 1):
                raise ValueError(f"row {row}: a predicted entry is one, and follows what was extended")
            features.append(self._said[row] if states is None else self._live().fuse(_states(states)))
        fresh = self._take(rows)
        starts = [self.length(row) for row in rows]
        counts = [len(its) for its in tokens]
        ends = np.cumsum([0, *counts]).astype(np.int32)
        last = ends[1:] - 1
        try:
            result = self._model.forward(
                np.concatenate([np.asarray(its, np.int32) for its in tokens]),
                np.repeat(np.array([self._live().row(row) for row in rows], np.int32), counts),
                np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)]),
                np.concatenate([np.arange(-1, n - 1, dtype=np.int32) for n in counts]),
                ends, last, (self._last,), self._last + 1, None, np.concatenate(features),
            )  # fmt: skip
        except _native.MemoryLimit as error:
            self._drop(fresh)
            raise MemoryLimitError(str(error)) from error
        except BaseException:
            self._drop(fresh)
            raise
        outputs = np.ascontiguousarray(result.tapped()[result.tap_places(last), 0])
        if self._norm_output:
            outputs = _native.final_norm(self._model, outputs)
        self._said |= {row: outputs[i : i + 1] for i, row in enumerate(rows)}
        logits: F32 = result.logits(last)
        return logits

    def _call(self, asks: list[tuple[Any, ...]]) -> Any:
        eagle, fresh = self._live(), self._take([ask[0] for ask in asks])
        try:
            drafted = eagle.draft(
                [(eagle.row(row), np.ascontiguousarray(tokens, np.int32), _states(taps), *plan)
                 for row, tokens, taps, *plan in asks]
            )  # fmt: skip
        except _native.MemoryLimit as error:
            self._drop(fresh)
            raise MemoryLimitError(str(error)) from error
        except _native.NotFinite as error:
            self._drop(fresh)
            raise NotFiniteError(str(error)) from error
        except BaseException:
            self._drop(fresh)
            raise
        for ask in asks:
            self._said.pop(ask[0], None)
        return drafted

    def _take(self, rows: Sequence[int]) -> list[int]:
        """Make those rows that are not there; which they were."""
        return [row for row in dict.fromkeys(rows) if self._live().take(row)]

    def _drop(self, rows: Sequence[int]) -> None:
        for row in rows if self._eagle is not None else ():
            self._eagle.drop(row)

    def _place(self, row: int) -> int:
        """The row in our cache; -1: it is not there."""
        found: int = -1 if self._eagle is None else self._eagle.row(row)
        return found

    def length(self, row: int) -> int:
        """See ``Head.length``."""
        its = self._place(row)
        n: int = self._model.kv_length(its) if its >= 0 else 0
        return n

    def truncate(self, row: int, n: int) -> None:
        """See ``Head.truncate``. Raises ValueError where the row has fewer."""
        self._said.pop(row, None)
        if (its := self._place(row)) >= 0:
            self._model.kv_truncate(its, n)
        elif n:
            raise ValueError(f"row {row} has no entries, so {n} cannot be kept")

    def fork(self, src: int, dst: int, n: int) -> None:
        """See ``Head.fork``. Entries are shared. Raises ValueError where ``dst`` is there, or ``src`` shorter."""
        if self._place(dst) >= 0 or n > self.length(src):
            raise ValueError(
                f"cannot fork {n} entries of row {src}, which has {self.length(src)}, into row {dst}: "
                "it must not be there"
            )
        self._take([dst])
        if n:
            self._model.kv_fork(self._place(src), self._place(dst), n)

    def release(self, row: int) -> None:
        """See ``Head.release``."""
        self._said.pop(row, None)
        self._drop([row])

    def growth(self, row: int, positions: int) -> int:
        """See ``Head.growth``. What a draft takes for as long as it grows is not in it."""
        more = min(positions, self.max_length) - self.length(row)
        its = self._place(row)
        n: int = self._model.kv_bytes_for(more) if its < 0 else self._model.kv_growth(its, max(0, more))
        return n

    def exchange(self, other: NativeHead) -> None:
        """See ``Head.exchange``."""
        try:
            self._live().exchange(other._live())
        except _native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error
        except ValueError as error:
            raise DrafterError(f"the drafter's weights cannot be exchanged: {error}") from error
        self._model, other._model = other._model, self._model
        self.weight_bytes, other.weight_bytes = other.weight_bytes, self.weight_bytes

    @property
    def bytes(self) -> int:
        """See ``Head.bytes``."""
        n: int = 0 if self._eagle is None else self._model.kv_bytes
        return n

    def check(self, rows: Sequence[int]) -> None:
        """See ``Head.check``."""
        own = self._live().rows
        assert set(own) <= set(rows), f"rows {sorted(set(own) - set(rows))} were not released"
        assert set(self._said) <= set(own), "an output is kept of a row that is gone"
        assert sorted(own.values()) == self._model.kv_rows, "the cache's rows are not the drafter's"
        try:
            self._model.kv_check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    def take_timings(self) -> dict[str, float]:
        """Seconds since the last call: of whole phases, and of those of ``levels`` where the model's are measured."""
        return {**self._live().take_timings(), **self._model.take_timings()}

    def time_phases(self, on: bool = True) -> None:
        """Measure the phases of ``levels``, too."""
        self._live()
        self._model.time_phases(on)

    def close(self) -> None:
        """See ``Head.close``. The threads are the target's."""
        self._eagle = self._model = None
        self._said.clear()

    def _live(self) -> Any:
        if self._eagle is None:
            raise ValueError("this drafter is closed: build it again")
        return self._eagle


def _states(taps: Any) -> F32:
    return np.ascontiguousarray(taps, np.float32)


def noise_of(chooser: Chooser | None) -> tuple[float, int, int, int] | None:
    """Temperature, seed, sample and output index, as the extension takes them; None: greedy."""
    if chooser is None or chooser.params.greedy:
        return None
    return float(chooser.params.temperature), chooser.noise.seed, chooser.noise.sample, chooser.index


def _eagle(checkpoint: Checkpoint) -> EagleConfig:
    if not isinstance(checkpoint.config, EagleConfig):
        raise DrafterError(f"a drafter of method {checkpoint.method} is not EAGLE's: name it {checkpoint.method}:PATH")
    return checkpoint.config


def _build(
    target: NativeModel, checkpoint: Checkpoint, to: str, kv_dtype: str, limit: int | None
) -> tuple[Any, Any, I32]:
    """The runtime's model and drafter, and the draft vocabulary int32 [D]."""
    config, packing = _eagle(checkpoint), Packing(target, checkpoint, to)
    layers = [packing.layer(i, config.decoder) for i in range(config.decoder.layers)]
    layers[0] |= {
        "attn_norm": packing.vector("layers.0.hidden_norm.weight"),
        "embed_norm": packing.vector("layers.0.input_layernorm.weight"),
        "norm_first": config.norm_before_residual,
    }
    model = packing.model(config.decoder, layers, kv_dtype, limit)
    norms = [packing.vector(f"fc_norm.{t}.weight") for t in range(len(config.taps))] if config.fc_norm else []
    if config.norm_before_fc:
        norms = [packing.vector("input_norm.weight")]
    fuse = packing.matrix(packing.tensors["fc.weight"])
    return model, _native.Eagle(model, fuse, norms, packing.ids, config.norm_output), packing.ids
