"""Notes what a host would wait for a card for, where there is none as well."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "item", "bincount")  # come to the host
COPIES = ("Tensor.cpu", "Tensor.tolist", "Tensor.__bool__", "Tensor.__float__", "Tensor.__int__")


class Waits(TorchDispatchMode):  # type: ignore[misc]
    """Notes operations that bring values, shapes that depend on values, or copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._copies = _Copies(self.seen)

    def __enter__(self) -> Any:
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexed = [i for i in args[1] if i is not None] if name == "index" else []
        if name in VALUES or any(i.dtype == torch.bool for i in indexed):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(func) or "").split(".", 1)[-1]
        if name in COPIES:
            self._seen.append(name)
        return func(*args, **(kwargs or {}))
