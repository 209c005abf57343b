"""Tensors of GGUF and safetensors files by what they are for, whatever their family calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from outpace.common.arrays import F32
from outpace.errors import ModelError
from outpace.models.decoder import Decoder
from outpace.models.families import MATRICES, NORMS, OUTER, SPELLINGS, text_name
from outpace.models.weights import safetensors
from outpace.models.weights.file_bytes import StoredTensor
from outpace.models.weights.gguf import GGUFFile

_BESIDE = ({"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}, set[str]())  # the decoder's
_DERIVED = ".rotary_emb.inv_freq"  # what old checkpoints keep although it follows from the description


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
        self.interleaved = spelling == 0 and decoder.family.interleaved  # rows of q and k are in GGUF's order

    def unused(self) -> list[str]:
        """Tensors that are not read: with them the decoder would compute something else."""
        left = self._tensors.keys() - {full for full, *_ in self._every()} - _BESIDE[self._spelling]
        return sorted(name for name in left if not name.endswith(_DERIVED))

    def originals(self) -> dict[str, F32]:
        """All values by Hugging Face's names, as their files have them. Raises ModelError."""
        found: dict[str, F32] = {}
        for full, place, part in self._every():
            if full in self._tensors and place not in found:
                values = self._unpack(full)
                if part in NORMS or part == "final_norm":
                    values = values + np.float32(0 if self._spelling else -self._decoder.family.norm_offset)
                found[place] = np.ascontiguousarray(self._in_order(part, values))
        return found

    def matrix(self, layer: int | None, name: str) -> StoredTensor:
        """Raises ModelError when it is missing, or fused with others and of another size than they have."""
        full, first, rows = self._place(layer, name)
        stored = self._found(full)
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
        if layer is not None and part not in self._decoder.family.layer:
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
        return np.ascontiguousarray(found, np.float32)

    def _found(self, full: str) -> StoredTensor:
        if full not in self._tensors:
            raise ModelError(f"{self.name} has no tensor {full!r}, so the model is incomplete: get all of its files")
        return self._tensors[full]

    def _place(self, layer: int | None, part: str, kind: str = "weight") -> tuple[str, int, int]:
        """The tensor's name; the part's first row in it and how many it has, where it holds others, too, else 0."""
        if layer is None:
            return f"{OUTER[part][self._spelling]}.{kind}", 0, 0
        names = self._decoder.family.layer
        full = f"{SPELLINGS[self._spelling].format(layer, names[part][self._spelling])}.{kind}"
        together = [other for other in MATRICES if names[other] == names[part]]
        if len(together) < 2:
            return full, 0, 0
        rows = self._decoder.rows
        return full, sum(rows[other] for other in together[: together.index(part)]), rows[part]

    def _check_fused(self, full: str, shape: tuple[int, ...], layer: int | None, part: str) -> None:
        names, rows = self._decoder.family.layer, self._decoder.rows
        total = sum(rows[other] for other in MATRICES if names[other] == names[part])
        if shape[0] != total:
            raise ModelError(f"{self.name}: {full} has {shape[0]} rows, but must have {total}")

    def _in_order(self, part: str, rows: F32) -> F32:
        if not self.interleaved or part not in ("q", "k"):
            return rows
        heads = self._decoder.heads if part == "q" else self._decoder.kv_heads
        if len(rows) % (2 * heads):
            raise ModelError(f"{self.name}: {part} has {len(rows)} rows, which {heads} heads cannot share")
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    def _every(self) -> Iterator[tuple[str, str, str]]:
        """Every tensor that may be read: its name, Hugging Face's name, the part."""
        column, family = self._spelling, self._decoder.family
        for part, names in OUTER.items():
            yield f"{names[column]}.weight", f"{names[1]}.weight", part
        for layer in range(self._decoder.layers):
            for part in family.layer:
                for kind in ("weight", "bias") if part in self._decoder.biases else ("weight",):
                    ours, place = (SPELLINGS[i].format(layer, family.layer[part][i]) for i in (column, 1))
                    yield f"{ours}.{kind}", f"{place}.{kind}", part


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
