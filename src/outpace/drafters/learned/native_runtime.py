"""Learned drafters' networks on their target's native runtime: how checkpoints are packed; ``parallel`` and ``medusa``.

A network shares the target's threads, working memory, embedding and, where the checkpoint has no head of its own, the
stored values of the head's rows. EAGLE's is native_eagle.py. Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import Decoder, MedusaConfig, ParallelConfig, draft_ids
from outpace.drafters.learned.medusa import Path, parents
from outpace.drafters.learned.parallel import BlockDrafts, Picker
from outpace.errors import DrafterError, MemoryLimitError, NotFiniteError
from outpace.exact.sampling import Chooser
from outpace.models.native.model import NativeModel
from outpace.models.rope import inverse_frequencies

_native = _fast.native
_F32_TYPE = 0  # as GGUF counts types
_GROUP = 32  # inputs that share a scale where weights are quantised
_FOUR_BITS = ("I4S", "I4M", "I4C", "K4", "K4C")
PLAIN = {"float32": "f32", "bfloat16": "bf16"}
_MATRICES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def own_type(target: NativeModel) -> str:
    """Which type a drafter's weights take: int4 beside a target of 4 bits, int8 beside another quantised one, else the
    target's own (float16's: bf16)."""
    dtype = "bfloat16" if target.info.dtype == "float16" else target.info.dtype
    return PLAIN.get(dtype, "int4" if "4" in dtype else "int8")


@contextmanager
def fitting() -> Iterator[None]:
    """What the runtime refuses becomes a DrafterError."""
    try:
        yield
    except (KeyError, ValueError, TypeError, MemoryError) as error:
        problem = f"has no tensor {error}" if isinstance(error, KeyError) else f"does not fit: {error}"
        raise DrafterError(
            f"the drafter {problem}: export it again, or use one that was trained for this target"
        ) from error


@contextmanager
def refusals() -> Iterator[None]:
    """The runtime's own errors become the library's."""
    try:
        yield
    except _native.MemoryLimit as error:
        raise MemoryLimitError(str(error)) from error
    except _native.NotFinite as error:
        raise NotFiniteError(str(error)) from error


def noise_of(chooser: Chooser | None) -> tuple[float, int, int, int] | None:
    """Temperature, seed, sample and output index, as the extension takes them; None: greedy."""
    if chooser is None or chooser.params.greedy:
        return None
    return float(chooser.params.temperature), chooser.noise.seed, chooser.noise.sample, chooser.index


class Packing:
    """The tensors of a checkpoint, packed as ``to`` says: f32, bf16, int8 or int4."""

    def __init__(self, target: NativeModel, checkpoint: Checkpoint, to: str) -> None:
        self.tensors: Mapping[str, Any] = dict(checkpoint.tensors)  # each is read once
        self.ids: I32 = draft_ids(checkpoint.config, self.tensors)
        self._target, self._to, self._arena = target, to, _native.Arena()

    def matrix(self, values: Any, kind: str | None = None) -> _native.Matrix:
        """[rows, cols]; what has too few inputs for groups stays as it is."""
        raw = np.ascontiguousarray(values, np.float32)
        plain = self._to.startswith("int") and raw.shape[1] % _GROUP
        rows, cols = raw.shape
        return _native.pack(
            self._arena, raw.view(np.uint8).reshape(-1), _F32_TYPE, rows, cols, 0,
            kind or ("f32" if plain else self._to), self._target.threads,
        )  # fmt: skip

    def looked_up(self, name: str) -> _native.Matrix:
        """A matrix whose rows are looked up: quantising it would save no time."""
        return self.matrix(self.tensors[name], "bf16" if self._to.startswith("int") else None)

    def vector(self, name: str) -> F32:
        return np.ascontiguousarray(self.tensors[name], np.float32)

    def layer(self, i: int, decoder: Decoder) -> dict[str, Any]:
        at = f"layers.{i}."
        layer: dict[str, Any] = {"window": 0, "rope": 0}
        layer |= {name: self.matrix(self.tensors[f"{at}{tensor}.weight"]) for name, tensor in _MATRICES.items()}
        layer["attn_norm"] = self.vector(at + "input_layernorm.weight")
        layer["ffn_norm"] = self.vector(at + "post_attention_layernorm.weight")
        if decoder.qk_norm:
            layer |= {name: self.vector(f"{at}self_attn.{name}.weight") for name in ("q_norm", "k_norm")}
        return layer

    def model(self, decoder: Decoder, layers: list[dict[str, Any]], kv_dtype: str, limit: int | None) -> _native.Model:
        """Of such layers, with a cache of its own."""
        handle = self._target.native
        embedding, scale = handle.embedding, handle.embedding_scale
        if "embed_tokens.weight" in self.tensors:
            embedding, scale = self.matrix(self.tensors["embed_tokens.weight"]), 1.0
        sizes = {
            "vocab": embedding.rows, "outputs": len(self.ids), "hidden": decoder.hidden, "heads": decoder.heads,
            "kv_heads": decoder.kv_heads, "head_dim": decoder.head_dim, "ffn": decoder.ffn, "eps": decoder.eps,
            "attention_scale": decoder.head_dim**-0.5, "embedding_scale": scale, "activation": "silu",
            "max_length": decoder.max_length,
        }  # fmt: skip
        ropes = [inverse_frequencies(decoder.rope_theta, decoder.head_dim)]
        weights = _native.Weights(sizes, layers, embedding, self.head(), self.vector("norm.weight"), ropes)
        runtime, isa = self._target.runtime, self._target.isa
        return _native.Model(weights, runtime, isa, kv_dtype, -1 if limit is None else limit)

    def head(self, name: str = "lm_head.weight") -> _native.Matrix:
        """The checkpoint's own output rows, or the target's, which stay as they are stored but for int4."""
        if name in self.tensors:
            return self.matrix(self.tensors[name])
        head = _native.gather(self._arena, self._target.native.head, self.ids)
        return self.matrix(head.unpack()) if self._to == "int4" and head.format not in _FOUR_BITS else head


class _Network(NamedTuple):
    model: _native.Model
    parallel: _native.Parallel
    rows: _native.ParallelRows


class NativeParallel:
    """See ``ParallelRuntime``. The checkpoint fits the target.

    Weights take the type that ``own_type`` says, keys and values float32 beside a float32 target, else bfloat16. A
    whole draft is one call; rows that rules or filters choose for, and those that draw from a q that must be known, get
    their logits here, slot by slot. Raises DrafterError for what does not fit.
    """

    def __init__(self, target: NativeModel, checkpoint: Checkpoint) -> None:
        config, to = checkpoint.config, own_type(target)
        assert isinstance(config, ParallelConfig)
        shape = config.decoder
        with fitting():
            packing = Packing(target, checkpoint, to)
            layers = [packing.layer(i, shape) for i in range(shape.layers)]
            model = packing.model(shape, layers, "float32" if to == "f32" else "bfloat16", None)
            markov = confidence = None
            if config.markov_rank:
                after = packing.matrix(packing.tensors["markov_head.markov_w2.weight"])
                markov = packing.looked_up("markov_head.markov_w1.weight"), after
            if config.confidence:
                weight, bias = (packing.vector(f"confidence_head.proj.{name}") for name in ("weight", "bias"))
                confidence = weight.reshape(-1), float(bias[0])
            network = _native.Parallel(
                model, packing.matrix(packing.tensors["fc.weight"]), packing.vector("hidden_norm.weight"),
                packing.ids, config.block, config.mask_token, config.sample_from_anchor, markov, confidence,
            )  # fmt: skip
            rows = _native.ParallelRows(network, config.hidden_layers, shape.max_length)
        self._network: _Network | None = _Network(model, network, rows)
        self.ids, self.max_length = packing.ids, shape.max_length
        self.slots = config.block - (not config.sample_from_anchor)
        self._markov = markov is not None

    @property
    def rows(self) -> _native.ParallelRows | None:
        return None if self._network is None else self._network.rows

    def end(self, row: int) -> int:
        return self._live().rows.end(row)

    def read(self, rows: Sequence[int], hidden_states: Sequence[Any], positions: Sequence[I32]) -> None:
        states = [np.ascontiguousarray(each, np.float32) for each in hidden_states]
        at = [np.ascontiguousarray(each, np.int32) for each in positions]
        self._live().rows.read(list(zip(rows, states, at, strict=True)))

    def draft(
        self, rows: Sequence[int], anchors: I32, positions: I32, pickers: Sequence[Picker | None], counts: I32
    ) -> BlockDrafts:
        network = self._live().parallel
        noises = [noise_of(None if pick is None else pick.noise) for pick in pickers]
        asks = list(zip(rows, anchors.tolist(), positions.tolist(), counts.tolist(), noises, strict=True))
        shape = len(asks), int(counts.max())
        drafts = BlockDrafts(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        here = [i for i, pick in enumerate(pickers) if pick is not None and pick.noise is None]
        there = [i for i in range(len(asks)) if i not in here]
        if there:
            with refusals():
                found = network.draft([asks[i] for i in there])
            for i, (places, chances) in zip(there, found, strict=True):
                drafts.places[i, : len(places)], drafts.chance[i, : len(places)] = places, chances
        for i, pick in enumerate(pickers):
            if pick is not None and pick.noise is not None:
                pick.took(drafts.chance[i, : counts[i]].tolist())
        if here:
            _, logits = network.states([asks[i] for i in here])
            for i, own in zip(here, np.split(logits, np.cumsum(counts[here])[:-1]), strict=True):
                self._pick(int(anchors[i]), own, pickers[i], drafts.places[i])
                drafts.chance[i] = 1.0  # its picker's word is asked for
        return drafts

    def _pick(self, token: int, logits: F32, pick: Picker | None, places: I32) -> None:
        """A row's tokens, slot by slot, from logits float32 [n, D] without the Markov head's share."""
        assert pick is not None
        for slot, found in enumerate(logits):
            if self._markov:
                found = found + self._live().parallel.bias(np.array([token], np.int32))[1][0]
            places[slot] = pick(found)
            token = int(self.ids[places[slot]])

    def fork(self, src: int, dst: int, end: int) -> None:
        self._live().rows.fork(src, dst, end)

    def release(self, row: int) -> None:
        if self.rows is not None:
            self.rows.release(row)

    def growth(self, row: int, positions: int) -> int:
        """See ``ParallelRuntime.growth``. What a draft takes for as long as it lasts is not in it."""
        model, network, rows = self._live()
        cached = network.rows.get(row)
        if cached is None:
            return model.kv_bytes_for(positions)
        return model.kv_growth(cached, max(0, positions - len(rows.positions.get(row, ()))))

    @property
    def bytes(self) -> int:
        return 0 if self._network is None else self._network.model.kv_bytes

    def check(self, rows: Sequence[int]) -> None:
        model, network, known = self._live()
        own, positions = network.rows, known.positions
        assert set(own) <= set(rows), f"rows {set(own) - set(rows)} were never released"
        assert set(own) == set(positions), "a row has keys, but no positions"
        for row, at in positions.items():
            assert (np.diff(at) > 0).all(), f"row {row} has a position twice"
            assert model.kv_length(own[row]) == len(at), f"row {row} has keys of other positions"
        check_cache(model, own.values())

    def close(self) -> None:
        """The threads are the target's."""
        self._network = None

    def _live(self) -> _Network:
        if self._network is None:
            raise ValueError("this drafter is closed: build it again")
        return self._network


def check_cache(model: _native.Model, rows: Iterable[int]) -> None:
    """Assert that these are the rows of a network's cache, and that the cache is in order."""
    assert sorted(rows) == model.kv_rows, "the cache's rows are not the drafter's"
    try:
        model.kv_check()
    except RuntimeError as error:
        raise AssertionError(str(error)) from error


class NativeMedusa:
    """See ``MedusaRuntime``. The checkpoint fits the target; ``tree``: what native steps draft.

    Weights take int8 beside a quantised target, else the target's own type. Raises DrafterError.
    """

    def __init__(self, target: NativeModel, checkpoint: Checkpoint, tree: Sequence[Path]) -> None:
        config, to = checkpoint.config, own_type(target)
        assert isinstance(config, MedusaConfig)
        with fitting():
            packing = Packing(target, checkpoint, "int8" if to == "int4" else to)
            biases = {name: packing.vector(name) for name in packing.tensors if name.endswith(".bias")}
            places = [[f"blocks.{k}.layers.{i}" for i in range(config.layers)] for k in range(config.heads)]
            blocks = [
                [(packing.matrix(packing.tensors[f"{at}.weight"]), biases.get(f"{at}.bias")) for at in head]
                for head in places
            ]
            own = config.own_heads and "lm_heads.0.weight" in packing.tensors
            names = [f"lm_heads.{k}.weight" for k in range(config.heads)] if own else ["lm_head.weight"]
            network = _native.Medusa(target.native, blocks, [packing.head(name) for name in names], packing.ids)
            nodes = [(above, len(path) - 1, path[-1]) for above, path in zip(parents(tree), tree, strict=True)]
            self.rows: _native.MedusaRows | None = _native.MedusaRows(network, target.info.layers - 1, nodes)
        self.ids = packing.ids

    def keep(self, row: int, position: int, state: Any) -> None:
        self._live().keep(row, position, np.ascontiguousarray(state, np.float32))

    def position(self, row: int) -> int:
        return -1 if self.rows is None else self.rows.position(row)

    def logits(self, rows: Sequence[int]) -> F32:
        return self._live().logits(rows)

    def fork(self, src: int, dst: int) -> None:
        self._live().fork(src, dst)

    def release(self, row: int) -> None:
        if self.rows is not None:
            self.rows.release(row)

    def known(self) -> list[int]:
        return [] if self.rows is None else self.rows.rows()

    def close(self) -> None:
        self.rows = None

    def _live(self) -> _native.MedusaRows:
        if self.rows is None:
            raise ValueError("this drafter is closed: build it again")
        return self.rows
