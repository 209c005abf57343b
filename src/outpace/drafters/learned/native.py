"""Learned drafters' networks on their target's native runtime; see native/model/draft_network.h.

A network shares the target's threads, working memory, embedding and, where the checkpoint has no head of its own, the
stored values of the head's rows. Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import Decoder, EagleConfig, MedusaConfig, ParallelConfig, draft_ids, mix_of
from outpace.drafters.learned.drafter import DEEPEST, KV, LEVELS, Ask, Network, Predicted
from outpace.drafters.learned.medusa import HeadsNetwork, Path, parents
from outpace.drafters.learned.parallel import Block, BlockNetwork, next_slots
from outpace.errors import Argument, DrafterError, MemoryLimitError, NotFiniteError, ParameterError
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.sampling import Chooser
from outpace.models.native.model import KV_DTYPES, QUANTIZE, NativeModel
from outpace.models.native.output import describe

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
        layer: dict[str, Any] = {"window": decoder.window(i), "rope": 0}
        matrices = {name: tensor for name, tensor in _MATRICES.items() if name != "v" or decoder.values}
        layer |= {name: self.matrix(self.tensors[f"{at}{tensor}.weight"]) for name, tensor in matrices.items()}
        layer["attn_norm"] = self.vector(at + "input_layernorm.weight")
        layer["ffn_norm"] = self.vector(at + "post_attention_layernorm.weight")
        if decoder.qk_norm:
            layer |= {name: self.vector(f"{at}self_attn.{name}.weight") for name in ("q_norm", "k_norm")}
        if decoder.gemma:
            layer["post_attn_norm"] = layer["ffn_norm"]
            layer["ffn_norm"] = self.vector(at + "pre_feedforward_layernorm.weight")
            layer["post_ffn_norm"] = self.vector(at + "post_feedforward_layernorm.weight")
            layer["v_norm"] = np.ones(decoder.head_dim, np.float32)
            layer["output_scale"] = float(self.vector(at + "layer_scalar")[0])
        return layer

    def convolutions(self, i: int, decoder: Decoder, block: int) -> dict[str, Any]:
        """Of a layer over ``block`` slots: DFlash2's."""
        taps, group = decoder.conv
        own = {}
        for name, stored in (("attn_conv", "attention_conv"), ("ffn_conv", "mlp_conv")) if taps else ():
            at = f"layers.{i}.{stored}"
            project = self.matrix(self.tensors[f"{at}.kernel_projection.weight"])
            base = self.vector(f"{at}.base_kernel").ravel()
            own[name] = {"taps": taps, "group": group, "block": block, "project": project, "base": base}
        return own

    def model(self, decoder: Decoder, layers: list[dict[str, Any]], kv_dtype: str, limit: int | None) -> _native.Model:
        """Of such layers, with a cache of its own."""
        handle = self._target.native
        embedding, scale = handle.embedding, handle.embedding_scale
        if "embed_tokens.weight" in self.tensors:
            embedding, scale = self.matrix(self.tensors["embed_tokens.weight"]), 1.0
        if decoder.embedding_scale is not None:
            scale = decoder.embedding_scale
        sizes = {
            "vocab": embedding.rows, "outputs": len(self.ids), "hidden": decoder.hidden, "heads": decoder.heads,
            "kv_heads": decoder.kv_heads, "head_dim": decoder.head_dim, "ffn": decoder.ffn, "eps": decoder.eps,
            "attention_scale": 1.0 if decoder.gemma else decoder.head_dim**-0.5, "embedding_scale": scale,
            "activation": "gelu_tanh" if decoder.gemma else "silu", "max_length": decoder.max_length,
            "logit_cap": decoder.logit_cap,
        }  # fmt: skip
        rope = decoder.rope
        ropes = [(rope.frequencies, rope.scale, 0.0, 1)]
        weights = _native.Weights(sizes, layers, embedding, self.head(), self.vector("norm.weight"), ropes)
        runtime, isa = self._target.runtime, self._target.isa
        return _native.Model(weights, runtime, isa, kv_dtype, -1 if limit is None else limit, False)

    def head(self, name: str = "lm_head.weight") -> _native.Matrix:
        """The checkpoint's own output rows, or the target's, which stay as they are stored but for int4."""
        if name in self.tensors:
            return self.matrix(self.tensors[name])
        head = _native.gather(self._arena, self._target.native.head, self.ids)
        return self.matrix(head.unpack()) if self._to == "int4" and head.format not in _FOUR_BITS else head


class NativeKV(KV):
    """Rows of ``model``'s cache, which ``network`` names by the target's. After ``close`` it raises ValueError."""

    def __init__(self, model: _native.Model, network: _native.DraftNetwork) -> None:
        self._live: tuple[_native.Model, _native.DraftNetwork] | None = model, network

    @property
    def model(self) -> _native.Model:
        return self._both()[0]

    @property
    def network(self) -> Any:
        return self._both()[1]

    def _both(self) -> tuple[_native.Model, _native.DraftNetwork]:
        if self._live is None:
            raise ValueError("this drafter is closed: build it again")
        return self._live

    def length(self, row: int) -> int:
        place = -1 if self._live is None else self.network.row(row)
        return self.model.kv_length(place) if place >= 0 else 0

    def truncate(self, row: int, n: int) -> None:
        """Raises ValueError where the row has fewer."""
        if (place := self.network.row(row)) >= 0:
            self.model.kv_truncate(place, n)
        elif n:
            raise ValueError(f"row {row} has no entries, so {n} cannot be kept")

    def fork(self, src: int, dst: int, n: int) -> None:
        """Positions are shared. Raises ValueError where ``dst`` is there, or ``src`` shorter."""
        if self.network.row(dst) >= 0 or n > self.length(src):
            raise ValueError(
                f"cannot fork {n} entries of row {src}, which has {self.length(src)}, into row {dst}: "
                "it must not be there"
            )
        if n:
            self.network.take(dst)
            try:
                self.model.kv_fork(self.network.row(src), self.network.row(dst), n)
            except BaseException:
                self.network.drop(dst)
                raise

    def release(self, row: int) -> None:
        if self._live is not None:
            self.network.drop(row)

    def growth(self, row: int, positions: int) -> int:
        """What a draft takes for as long as it lasts is not in it."""
        model, place = self.model, self.network.row(row)
        more = max(0, positions - self.length(row))
        return model.kv_bytes_for(more) if place < 0 else model.kv_growth(place, more)

    @property
    def bytes(self) -> int:
        return 0 if self._live is None else self.model.kv_bytes

    def check(self, rows: Sequence[int]) -> None:
        cached = self.network.rows
        assert set(cached) <= set(rows), f"rows {sorted(set(cached) - set(rows))} were never released"
        assert sorted(cached.values()) == self.model.kv_rows, "the cache's rows are not the drafter's"
        try:
            self.model.kv_check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        """The threads are the target's."""
        self._live = None


def described(chooser: Chooser | None) -> dict[str, Any] | None:
    """How tokens are chosen, its rules apart; None: greedily."""
    return None if chooser is None or chooser.params.greedy else describe(chooser, [])


def _states(states: Any) -> F32:
    return np.ascontiguousarray(states, np.float32)


class NativeEagle(Network):
    """EAGLE-3 or P-EAGLE: a whole draft, chain or tree, in one call. ``checkpoint``: one of method "eagle" that fits
    the target.

    ``quantize``: int8 or int4, in groups of 32; None keeps weights as ``dtype`` says: float32 or bfloat16; "auto" is
    int4 beside a target of 4 bits, int8 beside another quantised one, else the target's own type. Rows of the head that
    are the target's stay as they are stored, but for int4. ``limit``: hard bound in bytes on the KV. A request's
    filters are ignored. Raises ParameterError for options, DrafterError for what does not fit.
    """

    stops = True
    kv: NativeKV

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
        config = checkpoint.config
        if not isinstance(config, EagleConfig):
            raise DrafterError(
                f"a drafter of method {checkpoint.method} is not EAGLE's: name it {checkpoint.method}:PATH"
            )
        with fitting():
            packing = Packing(target, checkpoint, quantize or (own_type(target) if dtype == "auto" else PLAIN[dtype]))
            layers = [packing.layer(i, config.decoder) for i in range(config.decoder.layers)]
            layers[0] |= {
                "attn_norm": packing.vector("layers.0.hidden_norm.weight"),
                "embed_norm": packing.vector("layers.0.input_layernorm.weight"),
                "norm_first": config.norm_before_residual,
            }
            model = packing.model(config.decoder, layers, kv_dtype, limit)
            norm_names = [f"fc_norm.{t}.weight" for t in range(len(config.hidden_layers))] if config.fc_norm else []
            norm_names = ["input_norm.weight"] if config.norm_before_fc else norm_names
            fuse, ids = packing.matrix(packing.tensors["fc.weight"]), packing.ids
            norms = [packing.vector(norm) for norm in norm_names]
            self._mask = None
            if config.mask_token is not None:
                self._mask = config.mask_token, packing.vector("mask_hidden").ravel()
            eagle = _native.Eagle(model, fuse, norms, ids, config.norm_output, self._mask)
        self.kv, self.ids, self.max_length = NativeKV(model, eagle), ids, config.decoder.max_length
        self.weight_bytes = eagle.bytes
        self._last, self._norm_output = config.decoder.layers - 1, config.norm_output
        if self._mask is not None:
            self.stepwise, self.stops, self.most_levels = False, False, config.depths

    def native_rows(
        self, layers: Sequence[int], branch: int, most_levels: int | None, catch_up: int
    ) -> _native.LearnedRows | None:
        most = -1 if most_levels is None else most_levels
        return _native.EagleRows(self.kv.network, layers, branch, most, LEVELS, DEEPEST, catch_up, self.max_length)

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        each = zip(rows, tokens, hidden_states, strict=True)
        self._draft([Ask(row, ids, states, nodes=0, levels=0, branch=0) for row, ids, states in each])

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        """Under noise, ``confidence`` is made of each child's share of e^score (logit / T + g) among its parent's 16
        largest or so: what the target will choose depends on the same noise, and q alone says little of it.
        """
        drafted = self._draft(asks)
        trees = [Draft(tokens, parents, chances, [0] * len(tokens)) for tokens, parents, chances, _ in drafted]
        levels = np.array([levels for *_, levels in drafted], np.int32) if self.stepwise else None
        return replace(Drafts.of(trees), levels=levels)

    def _draft(self, asks: Sequence[Ask]) -> list[tuple[list[int], list[int], list[float], int]]:
        with refusals():
            return self.kv.network.draft(  # type: ignore[no-any-return]
                [
                    (
                        ask.row, np.ascontiguousarray(ask.tokens, np.int32), _states(ask.hidden_states), ask.nodes,
                        min(ask.levels, ask.nodes), ask.branch, described(ask.chooser), ask.floor,
                    )
                    for ask in asks
                ]
            )  # fmt: skip

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        if not self.stepwise:
            return next_slots(
                given, lambda new: [Block(self._slots(rows[b], tokens[b], _states(given[b]))) for b in new]
            )
        model, eagle, starts = self.kv.model, self.kv.network, [self.kv.length(row) for row in rows]
        features = [each.features if isinstance(each, Predicted) else eagle.fuse(_states(each)) for each in given]
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
        return result.logits(last), [Predicted(outputs[i : i + 1]) for i in range(len(rows))]

    def _slots(self, row: int, tokens: I32, states: F32) -> F32:
        """Logits [K, D] of all depths after a row's new entries, which are appended."""
        assert self._mask is not None
        model, eagle, start, n = self.kv.model, self.kv.network, self.kv.length(row), len(tokens)
        token, stands = self._mask
        masks = min(self.most_levels or 1, self.max_length - start - n + 1) - 1
        features = [eagle.fuse(states), *[eagle.fuse(stands.reshape(1, *states.shape[1:]))] * masks]
        at, fresh = np.arange(start, start + n + masks, dtype=np.int32), eagle.take(row)
        wanted = np.arange(n - 1, n + masks, dtype=np.int32)
        try:
            with refusals():
                result = model.forward(
                    np.concatenate([tokens, np.full(masks, token)]).astype(np.int32),
                    np.full(n + masks, eagle.row(row), np.int32), at, np.arange(-1, n + masks - 1, dtype=np.int32),
                    np.array([0, n + masks], np.int32), wanted, (), self._last + 1, None, np.concatenate(features),
                )  # fmt: skip
        except BaseException:
            if fresh:
                eagle.drop(row)
            raise
        self.kv.truncate(row, start + n)
        logits: F32 = result.logits(wanted)
        return logits


class NativeMtp(NativeEagle):
    """A layer of the target's own files that drafts (multi-token prediction, arXiv 2412.19437), with the target's head.

    It reads what the head reads of a position, and the embedding of the token after it; further tokens of a draft read
    its own output instead. Weights stay as they are stored. Raises DrafterError where the target has none.
    """

    def __init__(self, target: NativeModel) -> None:
        if target.head is None and target.lost:
            raise DrafterError(
                f"mtp: {target.info.name} came without its layer that drafts: llama.cpp's converter leaves out that of "
                "DeepSeek V3, and others' where it is asked to or does not know them yet: give the model's folder, or "
                "a file with nextn tensors, or use suffix"
            )
        if target.head is None:
            raise DrafterError(f"mtp: the files of {target.info.name} have no layer that drafts: use suffix, or auto")
        weights, norm = target.head()
        self.ids = np.arange(target.info.vocab_size, dtype=np.int32)
        with fitting():
            kv_dtype = "float32" if target.info.dtype == "float32" else "bfloat16"
            model = _native.Model(weights, target.runtime, target.isa, kv_dtype, -1, False)
            eagle = _native.Eagle(model, None, [norm], self.ids, True, None)
        self.kv, self.max_length = NativeKV(model, eagle), target.info.max_length
        self.weight_bytes = eagle.bytes
        self._last, self._norm_output = 0, True


class NativeParallel(BlockNetwork):
    """Blocks. The checkpoint fits the target.

    Weights take the type that ``own_type`` says, keys and values float32 beside a float32 target, else bfloat16.
    Raises DrafterError for what does not fit.
    """

    kv: NativeKV

    def __init__(self, target: NativeModel, checkpoint: Checkpoint) -> None:
        config, to = checkpoint.config, own_type(target)
        assert isinstance(config, ParallelConfig)
        shape = config.decoder
        with fitting():
            packing = Packing(target, checkpoint, to)
            layers = [
                packing.layer(i, shape) | packing.convolutions(i, shape, config.block) for i in range(shape.layers)
            ]
            for layer in layers:
                if layer["window"]:
                    layer |= {"causal": config.causal, "anchored": config.anchored}
            model = packing.model(shape, layers, "float32" if to == "f32" else "bfloat16", None)
            markov = mix = confidence = None
            if config.markov_rank:
                after = packing.matrix(packing.tensors["markov_head.markov_w2.weight"])
                markov = packing.looked_up("markov_head.markov_w1.weight"), after
            if config.markov != "vanilla":
                name = mix_of(config)
                bias = packing.vector(f"{name}.bias") if f"{name}.bias" in packing.tensors else np.zeros(0, np.float32)
                mix = packing.matrix(packing.tensors[f"{name}.weight"]), bias
            if config.confidence:
                weight, bias = (packing.vector(f"confidence_head.proj.{name}") for name in ("weight", "bias"))
                confidence = weight.reshape(-1), float(bias[0])
            network = _native.Parallel(
                model, packing.matrix(packing.tensors["fc.weight"]), packing.vector("hidden_norm.weight"),
                packing.ids, config.block, config.mask_token, config.sample_from_anchor, markov, mix, confidence,
                config.candidates,
            )  # fmt: skip
        super().__init__(packing.ids, config)
        self.kv, self._markov = NativeKV(model, network), markov is not None

    def native_rows(
        self, layers: Sequence[int], branch: int, most_levels: int | None, catch_up: int
    ) -> _native.LearnedRows | None:
        most = self.most_levels if most_levels is None else min(most_levels, self.most_levels)
        return _native.ParallelRows(self.kv.network, layers, branch, most, self.max_length)

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        states = [_states(each) for each in hidden_states]
        with refusals():
            self.kv.network.read(list(zip(rows, states, positions, strict=True)))

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        with refusals():
            drafted = self.kv.network.draft(
                [
                    (ask.row, ask.pending, ask.position, ask.levels, described(ask.chooser), ask.nodes, ask.branch)
                    for ask in asks
                ]
            )
        trees = [Draft(tokens, parents, chances, [0] * len(tokens)) for tokens, parents, chances in drafted]
        return Drafts.of(trees)

    def block(self, rows: Sequence[int], anchors: Sequence[int], positions: Sequence[int]) -> tuple[F32, F32]:
        slots = self.most_levels
        asks = [(*each, slots, None) for each in zip(rows, anchors, positions, strict=True)]
        with refusals():
            states, logits = self.kv.network.states(asks)
        return states.reshape(len(rows), slots, -1), logits.reshape(len(rows), slots, -1)

    def bias(self, tokens: Sequence[int], states: F32, left: F32) -> tuple[F32 | float, F32]:
        if not self._markov:
            return 0.0, left
        _, bias, leaves = self.kv.network.bias(np.array(tokens, np.int32), _states(states), _states(left))
        return bias, leaves


class NativeMedusa(HeadsNetwork):
    """Heads. The checkpoint fits the target.

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
            heads = [packing.head(name) for name in names]
            self._network: _native.Medusa | None = _native.Medusa(target.native, blocks, heads, packing.ids)
        super().__init__(packing.ids, config.heads, tree)

    def native_rows(
        self, layers: Sequence[int], branch: int, most_levels: int | None, catch_up: int
    ) -> _native.LearnedRows | None:
        nodes = [(above, len(path) - 1, path[-1]) for above, path in zip(parents(self.tree), self.tree, strict=True)]
        return _native.MedusaRows(self._live(), layers[0], nodes)

    def logits(self, states: Sequence[Any]) -> F32:
        return self._live().logits(_states(np.stack(states)))

    def close(self) -> None:
        self._network = None

    def _live(self) -> _native.Medusa:
        if self._network is None:
            raise ValueError("this drafter is closed: build it again")
        return self._network
