"""Indices on their way to a device: one pinned copy for all, for which nobody waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Upload:
    """Arrays of whole numbers that go up together."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []
        self._at = 0

    def add(self, values: npt.NDArray[Any]) -> slice:
        """Where they will be in what ``send`` gives, as int64, flattened."""
        self._parts.append(values.reshape(-1).astype(np.int64, copy=False))
        self._at += values.size
        return slice(self._at - values.size, self._at)

    def send(self, device: torch.device) -> torch.Tensor:
        """int64 [all of them]."""
        host = torch.from_numpy(np.concatenate(self._parts))
        return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def uploaded(device: torch.device, *arrays: npt.ArrayLike) -> list[torch.Tensor]:
    """The arrays as int64 tensors of their shapes."""
    upload, given = Upload(), [np.asarray(each) for each in arrays]
    where = [upload.add(each) for each in given]
    sent = upload.send(device)
    return [sent[at].view(each.shape) for at, each in zip(where, given, strict=True)]
