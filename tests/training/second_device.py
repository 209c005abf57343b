"""A second device where there is no card: tensors are computed on the CPU, and marked as lying on a card.

torch's own pretence, FakeTensorMode, has no values, which packed batches need at every turn, and its backward aborts
in a build without CUDA. Here everything has its value, so that a training can be compared to the bit; and what a card
would refuse is refused: tensors of both places in one operation (but for numbers), numpy of what lies on the card, the
CPU's random numbers drawn there. An index has to lie where what it picks from does, which costs a card no wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


class SecondDevice(TorchFunctionMode):
    """While it is entered, ``CARD`` is a device. Marks are of storages, kept alive so that none is used again."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: dict[int, tuple[bool, Any]] = {}
        self.operations = set[str]()  # done on the card

    def on_card(self, tensor: torch.Tensor) -> bool | None:
        """None: the engine of autograd made it, so its place is not known. What else has no mark came from numpy."""
        known = self._marks.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None if torch._C._current_autograd_node() is not None else False
        return known[0]

    def _mark(self, value: Any, card: bool) -> None:
        for its in tree_leaves(value):
            if isinstance(its, torch.Tensor):
                storage = its.untyped_storage()
                self._marks.setdefault(storage._cdata, (card, storage))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = (resolve_name(func) or func.__name__).split(".", 1)[-1].removeprefix("Tensor.")
        given = [its for its in tree_leaves((args, kwargs)) if isinstance(its, torch.Tensor)]
        if name == "device.__get__":
            return CARD if self.on_card(args[0]) else CPU
        if name == "pin_memory":
            return args[0]
        if name in ("to", "cpu"):
            return self._moved(name, *args, **kwargs)
        if name == "backward":
            with self:  # what is written out by hand is looked at, too
                one = torch.ones_like(args[0])
                engine = torch.autograd.Variable._execution_engine
                return engine.run_backward((args[0],), (one,), False, False, (), True, accumulate_grad=True)
        asked = kwargs.pop("device", None)
        if name in ("copy_", "data.__set__", "grad.__get__", "_has_compatible_shallow_copy_type"):
            out = func(*args, **kwargs)
            if name == "grad.__get__" and out is not None:
                self._mark(out, bool(self.on_card(args[0])))
            return out
        numbers = "fused" in name  # a fused optimiser wants its counts there, too
        places = {place for its in given if (its.ndim or numbers) and (place := self.on_card(its)) is not None}
        if len(places) > 1:
            raise RuntimeError(f"two devices in {name}: {[(tuple(its.shape), self.on_card(its)) for its in given]}")
        every = places or {place for its in given if (place := self.on_card(its)) is not None}
        card = any(every) if asked is None else torch.device(asked).type == "cuda"
        if card and name in ("numpy", "__array__"):
            raise TypeError("numpy cannot read the card: copy it to the host first")
        if card and kwargs.get("generator") is not None:
            raise RuntimeError(f"a generator of the CPU draws for the card in {name}")
        out = func(*args, **kwargs)
        if card:
            self.operations.add(name)
        if every or asked is not None or not given:
            self._mark(out, card)
        return out

    def _moved(self, name: str, tensor: torch.Tensor, *wanted: Any, **more: Any) -> torch.Tensor:
        """Of a device that is not its own, a copy."""
        here = bool(self.on_card(tensor))
        there, dtype = here if name == "to" else False, tensor.dtype
        for its in (*wanted, *(value for key, value in more.items() if key in ("device", "dtype"))):
            if isinstance(its, torch.Tensor):
                there, dtype = bool(self.on_card(its)), its.dtype
            elif isinstance(its, torch.dtype):
                dtype = its
            elif isinstance(its, (str, torch.device)):
                there = torch.device(its).type == "cuda"
        out = tensor.to(dtype, copy=there != here)
        self._mark(out, there)
        return out
