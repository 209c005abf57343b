"""Tensors of GGUF and safetensors files by what they are for, whatever their family calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import F32
from outpace.errors import ModelError
from outpace.models import recurrent
from outpace.models.architecture import MATRICES, NORMS, SPELLINGS, Names, Places, ShortConv, StateSpace
from outpace.models.decoder import Decoder
from outpace.models.families import text_name
from outpace.models.weights import safetensors
from outpace.models.weights.file_bytes import JoinedTensor, StoredTensor
from outpace.models.weights.gguf import GGUFFile

_BESIDE = ({"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}, set[str]())  # the decoder's
_DERIVED = ".rotary_emb.inv_freq"  # what old checkpoints keep although it follows from the description
EXPERT_ROWS = 64  # experts' rows are padded to a multiple; native/model/weights.h
_BLOCKS = "_blocks"  # how names of MXFP4 tensors in folders end
_NUMBER = {0: re.compile(r"blk\.(\d+)\."), 1: re.compile(r"model\.layers\.(\d+)\.")}


def _scales(blocks: str) -> str:
    """The tensor beside one of ``_BLOCKS``."""
    return f"{blocks.removesuffix(_BLOCKS)}_scales"


class Weights:
    """A decoder's tensors. ``name``, ``files``: what they are read from."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        decoder: Decoder,
        spelling: int,
        tensors: Mapping[str, StoredTensor],
        unpack: Callable[[str], F32],
    ) -> None:
        self.name, self.files = name, list(files)
        self._decoder, self._spelling, self._tensors, self._unpack = decoder, spelling, tensors, unpack
        # Rows of q and k are in GGUF's order.
        self.interleaved = decoder.family.interleaved and (spelling == 0 or decoder.family.neighbours)

    def read_as(self, decoder: Decoder) -> Weights:
        """The same tensors, as those of a decoder that is described otherwise."""
        return Weights(self.name, self.files, decoder, self._spelling, self._tensors, self._unpack)

    @property
    def kind(self) -> str:
        """The type of a layer's up matrix, or of its experts', which is most of a model."""
        mixed = self._decoder.mixed
        if any(mixed):
            return self.experts(mixed.index(True), "up").type
        fed = self._decoder.fed
        return self.matrix(fed.index(True) if fed else 0, "up").type

    def unused(self) -> list[str]:
        """Tensors that are not read: with them the decoder would compute something else."""
        left = self._tensors.keys() - {full for full, *_ in self._every()} - _BESIDE[self._spelling]
        return sorted(
            name for name in left if not name.endswith(_DERIVED) and not self._drafts(name) and not self._idle(name)
        )

    def _idle(self, name: str) -> bool:
        """Whether a tensor makes keys and values of a layer that reads another's."""
        found = _NUMBER[self._spelling].match(name)
        if found is None or int(found[1]) >= self._decoder.layers or self._decoder.shape(int(found[1])).shares < 0:
            return False
        names = [self._decoder.family.layer[part][self._spelling] for part in ("k", "v", "k_norm")]
        return name in {f"{self._spelled(int(found[1]), each)}.weight" for each in names}

    def _drafts(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the last one, which only drafts."""
        if self._spelling and name.startswith(self._decoder.family.drafts):
            return True
        found, layers = _NUMBER[self._spelling].match(name), self._decoder.layers
        return found is not None and layers <= int(found[1]) < layers + self._decoder.beyond

    def originals(self) -> Iterator[tuple[str, F32]]:
        """All values with Hugging Face's names, as their files have them: one tensor after the other, so that a reader
        who converts each holds no second copy. Raises ModelError."""
        found = set[str]()
        for full, place, part in self._every():
            if full in self._tensors and place not in found:
                found.add(place)
                values = self._unpack(full)
                if part in NORMS or part == "final_norm":
                    values = values + np.float32(0 if self._spelling else -self._decoder.family.norm_offset)
                yield place, np.ascontiguousarray(self._in_order(part, values))

    def matrix(self, layer: int | None, name: str) -> StoredTensor | JoinedTensor:
        """Raises ModelError when it is missing, or fused with others and of another size than they have."""
        if layer is not None and name in ("k_up", "v_up"):
            return self._up(layer, name)
        full, first, rows = self._place(layer, name)
        stored = self._found(full)
        net = None if layer is None else self._decoder.state(layer)
        if isinstance(net, recurrent.DeltaNet) and self._woven_with(name):
            return self._of_rows(full, stored, *self._rows_of(net, name))
        if rows == 0:
            return stored
        self._check_fused(full, stored.shape, layer, name)
        size = stored.n_bytes // stored.shape[0]
        return replace(stored, shape=(rows, *stored.shape[1:]), start=stored.start + first * size, n_bytes=rows * size)

    def values(self, layer: int | None, name: str) -> F32:
        """A matrix dequantised, float32 [rows, cols], in Hugging Face's order of rows.

        Raises ModelError when it is missing or of a type that cannot be unpacked.
        """
        full, first, rows = self._place(layer, name)
        stored = self._found(full)
        found = self._unpack(full).reshape(stored.shape)
        if rows:
            self._check_fused(full, stored.shape, layer, name)
            found = found[first : first + rows]
        return self._in_order(name, found)

    def vector(self, layer: int | None, name: str) -> F32 | None:
        """A norm or bias ("q_bias"), float32 [n], as it is multiplied or added; None when the model has none.

        Raises ModelError for a norm that the family has and the files do not.
        """
        part, bias = name.removesuffix("_bias"), name.endswith("_bias")
        if layer is not None and part not in self._names(layer):
            return None
        full, first, rows = self._place(layer, part, "bias" if bias else "weight")
        if bias and part not in self._decoder.biases:
            return None
        self._found(full)
        found = self._unpack(full).reshape(-1)
        if bias:
            found = self._in_order(part, found[first : first + rows] if rows else found)
        else:
            found = found + np.float32(self._decoder.family.norm_offset if self._spelling else 0)
        if name == "final_norm":
            found = found / np.float32(self._decoder.logit_divisor)
        if name == "ffn_norm":  # both products read it: the other one's share is taken back behind them
            found = found * np.float32(self._decoder.multipliers.gate)
        return np.ascontiguousarray(found, np.float32)

    def _found(self, full: str) -> StoredTensor:
        if full not in self._tensors:
            raise ModelError(f"{self.name} has no tensor {full!r}, so the model is incomplete: get all of its files")
        return self._tensors[full]

    def _place(self, layer: int | None, part: str, kind: str = "weight") -> tuple[str, int, int]:
        """The tensor's name; the part's first row in it and how many it has, where it holds others, too, else 0."""
        if layer is None:
            return f"{self._decoder.family.outer[part][self._spelling]}.{kind}", 0, 0
        names = self._names(layer)
        full = self._spelled(layer, names[part][self._spelling])
        if self._spelling or part not in self._decoder.family.bare:
            full = f"{full}.{kind}"
        together = self._together(names, part)
        if len(together) < 2:
            return full, 0, 0
        rows = {other: shape[0] for other, shape in self._decoder.shapes(layer).items()}
        return full, sum(rows[other] for other in together[: together.index(part)]), rows[part]

    def _together(self, names: Names, part: str) -> list[str]:
        """Parts of a layer that one tensor has, in the order of its rows."""
        full = names[part][self._spelling]
        return [other for other in MATRICES if other in names and names[other][self._spelling] == full]

    def _check_fused(self, full: str, shape: tuple[int, ...], layer: int | None, part: str) -> None:
        assert layer is not None
        names, shapes = self._names(layer), self._decoder.shapes(layer)
        total = sum(shapes[other][0] for other in self._together(names, part))
        if shape[0] != total:
            raise ModelError(f"{self.name}: {full} has {shape[0]} rows, but must have {total}")

    def _in_order(self, part: str, rows: F32) -> F32:
        if not self.interleaved or part not in ("q", "k"):
            return rows
        heads = self._decoder.heads if part == "q" else self._decoder.kv_heads
        if len(rows) % (2 * heads):
            raise ModelError(f"{self.name}: {part} has {len(rows)} rows, which {heads} heads cannot share")
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    def _names(self, layer: int) -> Names:
        """Of a layer's parts, the experts' aside; of a mixture, the shared expert's in place of a dense one's."""
        family, absent = self._decoder.family, list[str]()
        if not self._decoder.norms:
            absent += ["q_norm", "k_norm"]
        if not self._decoder.input_width:
            absent += ["input_gate", "input_project", "input_norm"]
        if (shape := self._decoder.shape(layer)).shares >= 0:
            absent += ["k", "v", "k_norm"]
        elif not shape.values:
            absent.append("v")
        names = {part: both for part, both in family.layer.items() if part not in absent}
        if self._decoder.fed:
            other = ("up", "down", "ffn_norm") if self._decoder.mixes(layer) else ("q", "k", "v", "o", "attn_norm")
            names = {part: both for part, both in names.items() if part not in other}
        if family.recurrent is not None and self._decoder.state(layer) is not None:
            attends = self._decoder.attends(layer)
            for part in () if attends else ("q", "k", "v", "q_norm", "k_norm"):
                names.pop(part, None)
            matrices = dict(family.recurrent.matrices)
            if attends:
                matrices["state_o"] = matrices.pop("o")
            names |= matrices
        if family.latent is not None and self._decoder.latent is not None:
            if self._decoder.latent.q_rank:
                names["q_down"] = family.latent.q_down
            else:
                names["q"] = family.latent.q_alone
                del names["q_norm"]
        if family.mixture is None or self._decoder.mixture(layer) is None:
            return names
        dense = {part: names.pop(part) for part in ("gate", "up", "down") if part in names}
        return names | {part: family.mixture.shared[part] for part in dense if part in family.mixture.shared}

    # -- latent attention ---------------------------------------------------------------------------------------------

    def _up(self, layer: int, name: str) -> StoredTensor | JoinedTensor:
        """Of each head the rows that make values of latent vectors, or the columns that make latent vectors of queries:
        files have them as they are, or the rows of both together, of which keys' become columns.

        Raises ModelError when a tensor is missing or of another size.
        """
        rule, a, heads = self._decoder.family.latent, self._decoder.latent, self._decoder.heads
        assert rule is not None
        assert a is not None
        rows, columns, own = (a.rank, a.plain, rule.k_up) if name == "k_up" else (a.value, a.rank, rule.v_up)
        apart, both = (f"{self._spelled(layer, place)}.weight" for place in (own, rule.both_up[self._spelling]))
        if not self._spelling and apart in self._tensors:
            stored, shape = self._tensors[apart], (heads, rows, columns)
            if stored.shape != shape:
                raise ModelError(f"{self.name}: {apart} is {list(stored.shape)}, but must be {list(shape)}")
            return replace(stored, shape=(heads * rows, columns))
        stored, each = self._found(both), a.plain + a.value
        if stored.shape != (heads * each, a.rank):
            raise ModelError(f"{self.name}: {both} is {list(stored.shape)}, but must be {[heads * each, a.rank]}")
        size = stored.n_bytes // stored.shape[0]

        def turned(i: int) -> npt.NDArray[np.uint8]:
            values = stored.part(i * each * size, a.plain * size).view(f"u{size // a.rank}")
            return np.ascontiguousarray(values.reshape(a.plain, a.rank).T).view(np.uint8).reshape(-1)

        def unpacked(i: int) -> npt.NDArray[np.uint8]:
            values = self._unpack(both).reshape(heads, each, a.rank)[:, : a.plain].swapaxes(1, 2)
            return np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)

        if name == "v_up":
            return JoinedTensor(
                stored.type, columns, heads, rows, 0, lambda i: stored.part((i * each + a.plain) * size, rows * size)
            )
        if stored.type in safetensors.FLOATS:
            return JoinedTensor(stored.type, columns, heads, rows, 0, turned)
        return JoinedTensor("F32", columns, 1, heads * rows, 0, unpacked)

    def _of_latent(self, layer: int) -> Iterator[str]:
        """Every tensor that may be read for ``_up``."""
        rule = self._decoder.family.latent
        if rule is None:
            return
        apart = () if self._spelling else (rule.k_up, rule.v_up)
        for place in (rule.both_up[self._spelling], *apart):
            yield f"{self._spelled(layer, place)}.weight"

    # -- mixtures of experts ------------------------------------------------------------------------------------------

    @property
    def expert_parts(self) -> tuple[str, ...]:
        """What experts have of "gate", "up" and "down"."""
        mixture = self._decoder.family.mixture
        return () if mixture is None else tuple(mixture.experts)

    def experts(self, layer: int, part: str) -> JoinedTensor:
        """A part ("gate", "up", "down") of all of a layer's experts, each one's rows padded to ``EXPERT_ROWS``.

        Raises ModelError when a tensor is missing, or of another shape or type than the others.
        """
        mixture, experts = self._decoder.family.mixture, self._decoder.mixture(layer)
        assert mixture is not None
        assert experts is not None
        hidden, inner, count = self._decoder.hidden, experts.inner, experts.count
        rows, columns = (hidden, inner) if part == "down" else (inner, hidden)
        padding = -rows % EXPERT_ROWS
        full = self._first(layer, mixture.experts[part])
        if "{}" in full:
            each = [self._found(full.format(i)) for i in range(count)]
            if other := next((one for one in each if (one.type, one.shape) != (each[0].type, (rows, columns))), None):
                wanted = f"{[rows, columns]} of type {each[0].type}"
                raise ModelError(
                    f"{self.name}: an expert's {part} of layer {layer} is {list(other.shape)} of type {other.type}, "
                    f"but must be {wanted}"
                )
            return JoinedTensor(each[0].type, columns, count, rows, padding, lambda i: each[i].data)
        stored = self._found(full)
        halves = (
            part != "down"
            and "gate" in mixture.experts
            and len({self._first(layer, mixture.experts[each]) for each in ("gate", "up")}) == 1
        )
        size, first = (2 * rows, rows if part == "up" else 0) if halves else (rows, 0)
        if full.endswith(_BLOCKS):
            return self._mxfp4(full, stored, (count, size, columns), part, rows, padding)
        if mixture.woven and self._spelling:
            return self._woven(full, stored, (count, columns, size), part, rows, padding)
        if stored.shape != (count, size, columns):
            raise ModelError(f"{self.name}: {full} is {list(stored.shape)}, but must be {[count, size, columns]}")
        row = stored.n_bytes // (count * size)
        return JoinedTensor(
            stored.type, columns, count, rows, padding,
            lambda i: stored.part((i * size + first) * row, rows * row),
        )  # fmt: skip

    def _woven(
        self, full: str, stored: StoredTensor, shape: tuple[int, int, int], part: str, rows: int, padding: int
    ) -> JoinedTensor:
        """A part of experts that are stored [count, inputs, outputs], those of gate and up in turn."""
        count, inputs, outputs = shape
        if stored.shape != shape or stored.type not in safetensors.FLOATS:
            raise ModelError(
                f"{self.name}: {full} is {list(stored.shape)} of type {stored.type}, "
                f"but must be {list(shape)} of floats"
            )
        size = stored.n_bytes // (count * inputs * outputs)
        every = slice(int(part == "up"), None, outputs // rows)

        def read(i: int) -> npt.NDArray[np.uint8]:
            each = inputs * outputs * size
            values = stored.part(i * each, each).view(f"u{size}").reshape(inputs, outputs)
            return np.ascontiguousarray(values[:, every].T).view(np.uint8).reshape(-1)

        return JoinedTensor(stored.type, inputs, count, rows, padding, read)

    def _mxfp4(
        self, full: str, stored: StoredTensor, shape: tuple[int, int, int], part: str, rows: int, padding: int
    ) -> JoinedTensor:
        """A part of experts whose values stand two a byte beside an exponent for each 32 of them, rows of gate and up
        in turn: as GGUF's blocks of the same type, which have the exponent first and value i beside value 16 + i."""
        count, outputs, inputs = shape
        scales, blocks = self._found(_scales(full)), (count, outputs, inputs // 32, 16)
        for name, each, wanted in ((full, stored, blocks), (_scales(full), scales, blocks[:3])):
            if inputs % 32 or (each.type, each.shape) != ("U8", wanted):
                raise ModelError(
                    f"{self.name}: {name} is {list(each.shape)} of type {each.type}, "
                    f"but must be {list(wanted)} of type U8"
                )
        every = slice(int(part == "up"), None, outputs // rows)

        def read(i: int) -> npt.NDArray[np.uint8]:
            size = outputs * inputs // 32
            pairs = stored.part(i * size * 16, size * 16).reshape(outputs, -1, 2, 8)[every]
            values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, -1, 2, 16)
            exponents = scales.part(i * size, size).reshape(outputs, -1, 1)[every]
            together = values[:, :, 0] | values[:, :, 1] << 4
            return np.concatenate([exponents, together], axis=-1).reshape(-1)

        return JoinedTensor("MXFP4", inputs, count, rows, padding, read)

    def router(self, layer: int) -> JoinedTensor:
        """A layer's router, float32 [experts, hidden], and behind it the shared expert's gate, where it has one."""
        mixture, experts = self._decoder.family.mixture, self._decoder.mixture(layer)
        assert mixture is not None
        assert experts is not None
        hidden = self._decoder.hidden
        parts = [(mixture.router, experts.count)]
        if mixture.shared_gate is not None and experts.shared:
            parts.append((mixture.shared_gate, 1))
        for places, rows in parts:
            self._sized(layer, places, rows, hidden)

        def read(i: int) -> npt.NDArray[np.uint8]:
            values = np.concatenate([self._numbers(layer, places, rows, hidden) for places, rows in parts])
            return values.view(np.uint8).reshape(-1)

        return JoinedTensor("F32", hidden, 1, sum(rows for _, rows in parts), 0, read)

    def mixture_vectors(self, layer: int) -> dict[str, F32]:
        """The biases of a layer's mixture, float32 [n], by the runtime's names; those that the family has."""
        mixture, experts = self._decoder.family.mixture, self._decoder.mixture(layer)
        assert mixture is not None
        assert experts is not None
        count, inner, found = experts.count, experts.inner, {}
        if mixture.choice_bias is not None and experts.chosen_by_bias:
            found["choice_bias"] = self._numbers(layer, mixture.choice_bias, count)
        found |= {name: self._numbers(layer, places, self._decoder.hidden) for name, places in mixture.norms.items()}
        if mixture.router_scale is not None:
            scale = np.float32(self._decoder.hidden**-0.5)
            found["router_norm"] = self._numbers(layer, mixture.router_scale, self._decoder.hidden) * scale
        if mixture.expert_scale is not None:
            found["expert_scale"] = self._numbers(layer, mixture.expert_scale, count)
        for part, places in mixture.biases.items():
            if part == "router":
                values = self._numbers(layer, places, count)
            elif part == "down":
                values = self._numbers(layer, places, count, self._decoder.hidden)
            elif mixture.woven and self._spelling:
                values = self._numbers(layer, places, count, 2 * inner)[:, int(part == "up") :: 2]
            else:
                values = self._numbers(layer, places, count, inner)
            if part in ("gate", "up"):
                values = np.pad(values, ((0, 0), (0, -inner % EXPERT_ROWS)))
            found[f"{part}_bias"] = np.ascontiguousarray(values.reshape(-1))
        return found

    def sinks(self, layer: int) -> F32 | None:
        """A layer's sinks, float32 [heads]; None: its family has none. Raises ModelError when they are missing."""
        places = self._decoder.family.sinks
        return None if places is None else self._numbers(layer, places, self._decoder.heads)

    def output_scale(self, layer: int) -> float:
        """What a layer's output is multiplied by. Raises ModelError when a folder does not say it."""
        places = self._decoder.family.output_scale
        if places is None or (self._spelling == 0 and self._first(layer, places) not in self._tensors):
            return 1.0
        return float(self._numbers(layer, places, 1)[0])

    def _woven_with(self, name: str) -> bool:
        """Whether a recurrent layer's matrix has its tensor together with another one."""
        rule = self._decoder.family.recurrent
        if rule is None or name not in rule.matrices:
            return False
        return sum(both[self._spelling] == rule.matrices[name][self._spelling] for both in rule.matrices.values()) > 1

    @staticmethod
    def _rows_of(net: recurrent.DeltaNet, name: str) -> tuple[int, npt.NDArray[np.int64]]:
        """How many rows a tensor has in which a recurrent layer's matrices stand together, and a matrix's own of these,
        those of each of its letters together: by key head, or, of a state space, z, v, k, q, a; -1: a row of zeros."""
        if isinstance(net, recurrent.StateSpace):
            inner = net.value_heads * net.width
            parts = {"z": inner, "v": inner, "k": net.keys, "q": net.keys, "a": net.value_heads}
            first = dict(zip(parts, np.cumsum([0, *parts.values()])[:-1], strict=True))
            rows = {part: np.arange(size) + first[part] for part, size in parts.items()}
            for part in "zv":
                heads = rows[part].reshape(net.value_heads, net.width)
                rows[part] = np.pad(heads, ((0, 0), (0, net.value_dim - net.width)), constant_values=-1).reshape(-1)
            return sum(parts.values()), np.concatenate([rows[part] for part in name])
        shared = net.value_heads // net.key_heads
        sizes = {"q": net.key_dim, "k": net.key_dim, "v": shared * net.value_dim, "z": shared * net.value_dim}
        if name in ("b", "a"):
            sizes = {"b": shared, "a": shared}
        each = sum(sizes.values())
        begins = dict(zip(sizes, np.cumsum([0, *sizes.values()])[:-1], strict=True))
        return net.key_heads * each, np.concatenate(
            [np.arange(sizes[part]) + begins[part] + head * each for part in name for head in range(net.key_heads)]
        )

    def _of_rows(self, full: str, stored: StoredTensor, count: int, rows: npt.NDArray[np.int64]) -> JoinedTensor:
        """A matrix of some of the ``count`` rows of a tensor."""
        hidden = self._decoder.hidden
        if stored.shape != (count, hidden):
            raise ModelError(f"{self.name}: {full} is {list(stored.shape)}, but must be {[count, hidden]}")

        def read(i: int) -> npt.NDArray[np.uint8]:
            values = np.ascontiguousarray(stored.data.reshape(stored.shape[0], -1)[rows])
            values[rows < 0] = 0
            return values.reshape(-1)

        return JoinedTensor(stored.type, hidden, 1, len(rows), 0, read)

    def recurrent_vectors(self, layer: int) -> dict[str, F32]:
        """The numbers of a recurrent layer beside its matrices, float32 [n], by the runtime's names."""
        rule, net, hidden = self._decoder.family.recurrent, self._decoder.state(layer), self._decoder.hidden
        if isinstance(rule, ShortConv):
            assert isinstance(net, recurrent.ShortConv)
            taps = self._numbers(layer, rule.convolution, hidden, net.taps)
            return {"convolution": np.ascontiguousarray(taps.T).reshape(-1)}
        assert rule is not None
        assert isinstance(net, recurrent.DeltaNet)
        decay = self._numbers(layer, rule.decay, net.value_heads)
        channels = net.channels
        if isinstance(net, recurrent.StateSpace):
            channels -= net.value_heads * (net.value_dim - net.width)
        taps = self._numbers(layer, rule.convolution, channels, net.taps)
        found = {
            "decay": -np.exp(decay) if self._spelling else decay,
            "dt_bias": self._numbers(layer, rule.dt_bias, net.value_heads),
        }
        if isinstance(rule, StateSpace):
            assert isinstance(net, recurrent.StateSpace)
            values = net.value_heads * net.width
            order = self._rows_of(net, "qkv")[1] - values  # of the tensor's, where the gate comes first
            bias = self._numbers(layer, rule.convolution_bias, channels)
            taps, found["convolution_bias"] = (np.where(order < 0, 0, each[order].T).T for each in (taps, bias))
            _, v, k, q, _ = self._decoder.multipliers.scanned  # what the convolution reads has been multiplied
            taps = taps * np.repeat(np.array([q, k, v], np.float32), [net.keys, net.keys, net.values])[:, None]
            found["skip"] = self._numbers(layer, rule.skip, net.value_heads)
            if net.normed:
                shape = (values,) if self._spelling else (net.key_heads, values // net.key_heads)
                found["norm"] = self._numbers(layer, rule.norm, *shape).reshape(-1)
        else:
            found["norm"] = self._numbers(layer, rule.norm, net.value_dim)
        return found | {"convolution": np.ascontiguousarray(taps.T).reshape(-1)}

    def _numbers(self, layer: int, places: Places, *shape: int) -> F32:
        """A tensor's values, float32 in ``shape``. Raises ModelError when it is missing or of another size."""
        values: F32 = np.ascontiguousarray(self._unpack(self._sized(layer, places, *shape)).reshape(shape), np.float32)
        return values

    def _sized(self, layer: int, places: Places, *shape: int) -> str:
        """The name of a tensor that has as many values as ``shape``."""
        full = self._first(layer, places)
        stored = self._found(full)
        if [n for n in stored.shape if n != 1] != [n for n in shape if n != 1]:
            raise ModelError(f"{self.name}: {full} is {list(stored.shape)}, but must be {list(shape)}")
        return full

    def _spelled(self, layer: int, name: str) -> str:
        """The name of a layer's part in the files."""
        family, beyond = self._decoder.family, layer - self._decoder.layers
        if self._spelling and beyond >= 0 and name.startswith(family.drafts):
            return name
        if self._spelling and beyond >= 0 and family.heads is not None and family.heads.layer is not None:
            return family.heads.layer.format(beyond, name)
        return (family.layers if self._spelling else SPELLINGS[0]).format(layer, name)

    @property
    def drafts(self) -> bool:
        """Whether the files have a layer behind the last one that drafts."""
        heads, layers = self._decoder.family.heads, self._decoder.layers
        return heads is not None and self._decoder.beyond > 0 and self._first(layers, heads.join) in self._tensors

    @property
    def lost(self) -> bool:
        """Whether a GGUF file of a family that has such a layer came without it."""
        return not self._spelling and self._decoder.family.heads is not None and not self.drafts

    def join(self, layer: int) -> StoredTensor:
        """The matrix [hidden, 2 hidden] with which a layer that drafts begins."""
        heads = self._decoder.family.heads
        assert heads is not None
        return self._found(self._first(layer, heads.join))

    def head_norms(self, layer: int) -> dict[str, F32]:
        """The norms float32 [hidden] that a layer that drafts has beside those of any layer."""
        heads, hidden = self._decoder.family.heads, self._decoder.hidden
        assert heads is not None
        offset = np.float32(self._decoder.family.norm_offset if self._spelling else 0)
        places = {"embed_norm": heads.embed_norm, "features_norm": heads.features_norm, "norm": heads.norm}
        return {name: self._numbers(layer, each, hidden) + offset for name, each in places.items()}

    def _first(self, layer: int, places: Places) -> str:
        """The first of a part's names that the files have, or the first of all."""
        names = [self._spelled(layer, name) for name in places[self._spelling]]
        return next((name for name in names if name.format(0) in self._tensors), names[0])

    def _of_mixture(self, layer: int) -> Iterator[str]:
        """Every tensor that is read of a layer's mixture."""
        mixture, experts = self._decoder.family.mixture, self._decoder.mixture(layer)
        if mixture is None or experts is None:
            return
        for places in mixture.experts.values():
            full = self._first(layer, places)
            yield from (full.format(i) for i in range(experts.count if "{}" in full else 1))
            if full.endswith(_BLOCKS):
                yield _scales(full)
        sinks = self._decoder.family.sinks
        one = (mixture.router, mixture.shared_gate, mixture.choice_bias, mixture.router_scale, mixture.expert_scale)
        for place in (*one, *mixture.norms.values(), *mixture.biases.values(), sinks):
            if place is not None:
                yield self._first(layer, place)

    def _of_net(self, layer: int) -> Iterator[str]:
        """Every tensor that is read of a recurrent layer, its matrices aside."""
        rule, net = self._decoder.family.recurrent, self._decoder.state(layer)
        if rule is None or net is None:
            return
        others: tuple[Places, ...] = () if isinstance(rule, ShortConv) else (rule.decay, rule.dt_bias, rule.norm)
        if isinstance(rule, StateSpace) and isinstance(net, recurrent.StateSpace):
            others = (rule.decay, rule.dt_bias, rule.convolution_bias, rule.skip, *([rule.norm] if net.normed else []))
        for places in (rule.convolution, *others):
            yield self._first(layer, places)

    def _every(self) -> Iterator[tuple[str, str, str]]:
        """Every tensor that may be read: its name, Hugging Face's name, the part."""
        column = self._spelling
        for part, both in self._decoder.family.outer.items():
            yield f"{both[column]}.weight", f"{both[1]}.weight", part
        for layer in range(self._decoder.layers):
            names = self._names(layer)
            for part in names:
                for kind in ("weight", "bias") if part in self._decoder.biases else ("weight",):
                    spellings = (SPELLINGS[0], self._decoder.family.layers)
                    ours, place = (spellings[i].format(layer, names[part][i]) for i in (column, 1))
                    bare = column == 0 and part in self._decoder.family.bare
                    yield ours if bare else f"{ours}.{kind}", f"{place}.{kind}", part
            scale = self._decoder.family.output_scale
            beside = [] if scale is None else [self._first(layer, scale)]
            for full in (*self._of_mixture(layer), *self._of_net(layer), *self._of_latent(layer), *beside):
                yield full, full, "experts"


def of_gguf(gguf: GGUFFile, decoder: Decoder) -> Weights:
    """The weights of a GGUF file."""
    tensors = {name: gguf.stored(name) for name in gguf.tensors}
    return Weights(gguf.path.name, gguf.files, decoder, 0, tensors, gguf.dequantize)


def of_folder(folder: Path, decoder: Decoder) -> Weights:
    """The weights of a folder's safetensors files. Raises ModelError for shards that do not fit together."""
    files, tensors = safetensors.read_folder(folder)
    if decoder.wrapped:
        tensors = {name: tensor for full, tensor in tensors.items() if (name := text_name(full)) is not None}
    return Weights(folder.name, files, decoder, 1, tensors, lambda name: safetensors.plain(tensors[name], name))
