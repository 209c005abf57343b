"""EAGLE-3 on its target's native runtime: a whole draft, chain or tree, in one call; see native/model/eagle.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import EagleConfig
from outpace.drafters.learned.eagle import Ask
from outpace.drafters.learned.native_runtime import PLAIN, Packing, check_cache, fitting, noise_of, own_type, refusals
from outpace.errors import Argument, DrafterError, ParameterError
from outpace.exact.drafts import Draft, Drafts
from outpace.models.native.model import KV_DTYPES, QUANTIZE, NativeModel

_native = _fast.native


class _Network(NamedTuple):
    model: _native.Model
    eagle: _native.Eagle


class NativeEagle:
    """See ``EagleRuntime``. ``checkpoint``: one of method "eagle" that fits the target (``checkpoint.fit``).

    ``quantize``: int8 or int4, in groups of 32; None keeps weights as ``dtype`` says: float32 or bfloat16; "auto" is
    int4 beside a target of 4 bits, int8 beside another quantised one, else the target's own type. Rows of the head that
    are the target's stay as they are stored, but for int4. ``limit``: hard bound in bytes on the KV.
    Raises ParameterError for options, DrafterError for what does not fit.
    """

    stops = True

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
            model, eagle, self.ids = _build(target, checkpoint, to, kv_dtype, limit)
        self._network: _Network | None = _Network(model, eagle)
        config = _eagle(checkpoint)
        self.max_length = config.decoder.max_length
        self.weight_bytes = eagle.bytes
        self._last = config.decoder.layers - 1
        self._norm_output = config.norm_output
        self._predicted: dict[
            int, F32
        ] = {}  # what follows the last entries of rows that are extended reads, float32 [1, H]

    def native_rows(
        self,
        layers: Sequence[int],
        branch: int,
        most_levels: int | None,
        fixed_levels: int,
        deepest: int,
        catch_up: int,
    ) -> _native.EagleRows:
        """The entries of an ``EagleDrafter`` with these options, and how native steps draft from them."""
        most = -1 if most_levels is None else most_levels
        return _native.EagleRows(
            self._live().eagle, layers, branch, most, fixed_levels, deepest, catch_up, self.max_length
        )

    def feed(self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any]) -> None:
        each = zip(rows, tokens, hidden_states, strict=True)
        self._draft([Ask(row, own, states, nodes=0, levels=0, branch=0) for row, own, states in each])

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        """See ``EagleRuntime.draft``. A request's filters and rules are ignored; its temperature and noise are not.

        Under noise, ``confidence`` is made of each child's share of e^score (logit / T + g) among its parent's 16
        largest or so: what the target will choose depends on the same noise, and q alone says little of it.
        """
        drafted = self._draft(asks)
        trees = [Draft(tokens, parents, chances, [0] * len(tokens)) for tokens, parents, chances, _ in drafted]
        return replace(Drafts.of(trees), levels=np.array([levels for *_, levels in drafted], np.int32))

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any]) -> F32:
        """See ``EagleRuntime.extend``. float32 [B, D]."""
        features = []
        for row, each, states in zip(rows, tokens, hidden_states, strict=True):
            if states is None and (row not in self._predicted or len(each) != 1):
                raise ValueError(f"row {row}: a predicted entry is one, and follows what was extended")
            features.append(self._predicted[row] if states is None else self._live().eagle.fuse(_states(states)))
        (model, eagle), starts = self._live(), [self.length(row) for row in rows]
        fresh = [row for row in dict.fromkeys(rows) if eagle.take(row)]
        counts = [len(each) for each in tokens]
        ends = np.cumsum([0, *counts]).astype(np.int32)
        last = ends[1:] - 1
        try:
            with refusals():
                result = model.forward(
                    np.concatenate([np.asarray(each, np.int32) for each in tokens]),
                    np.repeat(np.array([eagle.row(row) for row in rows], np.int32), counts),
                    np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)]),
                    np.concatenate([np.arange(-1, n - 1, dtype=np.int32) for n in counts]),
                    ends, last, (self._last,), self._last + 1, None, np.concatenate(features),
                )  # fmt: skip
        except BaseException:
            for row in fresh:
                eagle.drop(row)
            raise
        outputs = np.ascontiguousarray(result.hidden_states()[result.hidden_places(last), 0])
        if self._norm_output:
            outputs = _native.final_norm(model, outputs)
        self._predicted |= {row: outputs[i : i + 1] for i, row in enumerate(rows)}
        return result.logits(last)

    def _draft(self, asks: Sequence[Ask]) -> list[tuple[list[int], list[int], list[float], int]]:
        with refusals():
            drafted = self._live().eagle.draft(
                [
                    (
                        ask.row, np.ascontiguousarray(ask.tokens, np.int32), _states(ask.hidden_states), ask.nodes,
                        min(ask.levels, ask.nodes), ask.branch, noise_of(ask.chooser), ask.floor,
                    )
                    for ask in asks
                ]
            )  # fmt: skip
        for ask in asks:
            self._predicted.pop(ask.row, None)
        return drafted

    def _place(self, row: int) -> int:
        """The row in our cache; -1: it is not there."""
        return -1 if self._network is None else self._network.eagle.row(row)

    def length(self, row: int) -> int:
        place = self._place(row)
        return self._live().model.kv_length(place) if place >= 0 else 0

    def truncate(self, row: int, n: int) -> None:
        """See ``EagleRuntime.truncate``. Raises ValueError where the row has fewer."""
        self._predicted.pop(row, None)
        if (place := self._place(row)) >= 0:
            self._live().model.kv_truncate(place, n)
        elif n:
            raise ValueError(f"row {row} has no entries, so {n} cannot be kept")

    def fork(self, src: int, dst: int, n: int) -> None:
        """Entries are shared. Raises ValueError where ``dst`` is there, or ``src`` shorter."""
        if self._place(dst) >= 0 or n > self.length(src):
            raise ValueError(
                f"cannot fork {n} entries of row {src}, which has {self.length(src)}, into row {dst}: "
                "it must not be there"
            )
        model, eagle = self._live()
        eagle.take(dst)
        if n:
            model.kv_fork(self._place(src), self._place(dst), n)

    def release(self, row: int) -> None:
        self._predicted.pop(row, None)
        if self._network is not None:
            self._network.eagle.drop(row)

    def growth(self, row: int, positions: int) -> int:
        """See ``EagleRuntime.growth``. What a draft takes for as long as it grows is not in it."""
        more = min(positions, self.max_length) - self.length(row)
        place, (model, _) = self._place(row), self._live()
        return model.kv_bytes_for(more) if place < 0 else model.kv_growth(place, max(0, more))

    @property
    def bytes(self) -> int:
        return 0 if self._network is None else self._network.model.kv_bytes

    def check(self, rows: Sequence[int]) -> None:
        model, eagle = self._live()
        own = eagle.rows
        assert set(own) <= set(rows), f"rows {sorted(set(own) - set(rows))} were not released"
        assert set(self._predicted) <= set(own), "an output is kept of a row that is gone"
        check_cache(model, own.values())

    def close(self) -> None:
        """See ``EagleRuntime.close``. The threads are the target's."""
        self._network = None
        self._predicted.clear()

    def _live(self) -> _Network:
        if self._network is None:
            raise ValueError("this drafter is closed: build it again")
        return self._network


def _states(states: Any) -> F32:
    return np.ascontiguousarray(states, np.float32)


def _eagle(checkpoint: Checkpoint) -> EagleConfig:
    if not isinstance(checkpoint.config, EagleConfig):
        raise DrafterError(f"a drafter of method {checkpoint.method} is not EAGLE's: name it {checkpoint.method}:PATH")
    return checkpoint.config


def _build(
    target: NativeModel, checkpoint: Checkpoint, to: str, kv_dtype: str, limit: int | None
) -> tuple[_native.Model, _native.Eagle, I32]:
    """The runtime's model and drafter, and the draft vocabulary int32 [D]."""
    config, packing = _eagle(checkpoint), Packing(target, checkpoint, to)
    layers = [packing.layer(i, config.decoder) for i in range(config.decoder.layers)]
    layers[0] |= {
        "attn_norm": packing.vector("layers.0.hidden_norm.weight"),
        "embed_norm": packing.vector("layers.0.input_layernorm.weight"),
        "norm_first": config.norm_before_residual,
    }
    model = packing.model(config.decoder, layers, kv_dtype, limit)
    norms = [packing.vector(f"fc_norm.{t}.weight") for t in range(len(config.hidden_layers))] if config.fc_norm else []
    if config.norm_before_fc:
        norms = [packing.vector("input_norm.weight")]
    fuse = packing.matrix(packing.tensors["fc.weight"])
    return model, _native.Eagle(model, fuse, norms, packing.ids, config.norm_output), packing.ids
