"""Matrices of small networks beside a native target: packed as it packs its own, multiplied by its kernels.

Products are the same whatever is multiplied beside them. They run in the calling thread: numpy's would start threads of
their own, which the target's, waiting, starve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from outpace import _fast
from outpace.arrays import F32, I32
from outpace.models.native.model import NativeModel

Product = Callable[[F32], F32]  # [n, cols] to [n, rows]

_F32_TYPE = 0  # as GGUF counts types
_GROUP = 32  # inputs that share a scale in int8


class Products:
    """Packs matrices: int8 beside a quantised target, else in the target's own type (float16's: bfloat16)."""

    def __init__(self, target: NativeModel) -> None:
        self._target, self._arena = target, _fast.native.Arena()
        kinds = {"float32": "f32", "bfloat16": "bf16", "float16": "bf16"}
        self._kind = kinds.get(target.info.dtype, "int8")

    def of(self, values: Any) -> Product:
        """The product with a matrix [rows, cols]."""
        raw = np.ascontiguousarray(values, np.float32)
        kind = "f32" if self._kind == "int8" and raw.shape[1] % _GROUP else self._kind
        return self._product(
            _fast.native.pack(
                self._arena, raw.view(np.uint8).reshape(-1), _F32_TYPE, *raw.shape, 0, kind, self._target.threads
            )
        )

    def head(self, tensors: Mapping[str, Any], ids: I32, name: str = "lm_head.weight") -> Product:
        """Of the output rows: the checkpoint's own, or the target's rows ``ids``, with the values that it stores."""
        if name in tensors:
            return self.of(tensors[name])
        return self._product(_fast.native.gather(self._arena, self._target.native.head, ids))

    def _product(self, matrix: Any) -> Product:
        isa, arena = self._target.isa, self._arena

        def product(x: F32) -> F32:
            assert arena is not None  # the matrix lies in it
            found: F32 = matrix.product(np.ascontiguousarray(x, np.float32), isa)
            return found

        return product
