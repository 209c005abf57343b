"""What a forward of the Transformers backend hands out: logits and hidden states, on the device until asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outpace.common.arrays import F32, I32
from outpace.exact.drafts import Drafts, Verdicts, depths
from outpace.exact.sampling import Chooser, judged
from outpace.exact.verify import walk
from outpace.models.base import Batch, Output
from outpace.models.torch.choose import LEFT, Asked, greedy, sampled
from outpace.models.torch.upload import Upload, uploaded


@dataclass(frozen=True, slots=True)
class TorchHiddenStates:
    """See ``HiddenStates``: tokens ``index`` int32 [n] of T layers' outputs, each [N, H] on the model's device."""

    tensors: tuple[torch.Tensor, ...]
    index: I32

    def __len__(self) -> int:
        return len(self.index)

    def at(self, indices: I32) -> TorchHiddenStates:
        return TorchHiddenStates(self.tensors, self.index[indices])

    def layers(self, columns: Sequence[int]) -> TorchHiddenStates:
        return TorchHiddenStates(tuple(self.tensors[column] for column in columns), self.index)

    @property
    def native(self) -> torch.Tensor:
        (index,) = uploaded(self.tensors[0].device, self.index)
        return torch.stack([layer.index_select(0, index) for layer in self.tensors], dim=1)

    def numpy(self) -> F32:
        values: F32 = self.native.float().cpu().numpy()
        return values


class TorchOutput(Output):
    """A forward's result where it was computed; what is asked for comes to the host in one copy."""

    def __init__(
        self,
        batch: Batch,
        logits: torch.Tensor,
        hidden_states: Sequence[torch.Tensor] = (),
        where: npt.NDArray[np.int64] | None = None,
        rounding: float = 0.0,
        experts: torch.Tensor | None = None,
    ) -> None:
        """``where`` int64 [N]: the packed tokens' rows of ``logits`` and ``hidden_states``; None: logits are those of
        wanted tokens, hidden states of all, in their order. ``rounding``: of ``sampling.judged``.
        ``experts``: how many were read; see ``Output.experts``."""
        self._batch, self._where, self._rounding = batch, where, rounding
        self._near: set[int] = set()  # rows of the logits whose choices are near-ties
        self._logits, self._experts = logits, experts  # [M, V]
        self._hidden_states = tuple(hidden_states)  # each [N, H]
        self._host: F32 | None = None
        self._on_device = logits.device.type != "cpu"  # so that every look at it is a copy

    @property
    def experts(self) -> float:
        return 0.0 if self._experts is None else float(self._experts)

    @property
    def on_device(self) -> torch.Tensor:
        """The logits [M, V] where they were computed."""
        return self._logits

    def verify(self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None]) -> Verdicts | None:
        """See ``Output.verify``; rows with rules are left to the caller. On a card every node's choice is made there,
        and all come in one copy; on the host, where nothing is copied, the caller asks for those of visited nodes."""
        if not self._on_device:
            return None
        mine = np.array([chooser is not None and not chooser.rules for chooser in choosers], np.bool_)
        after = np.arange(drafts.tokens.shape[1] + 1)  # the pending token, then the nodes
        rows, nodes = np.nonzero(mine[:, None] & (after <= drafts.widths[:, None]))
        levels = np.tile(after, (len(mine), 1))
        if drafts.parents is not None:
            for level, parents, n in zip(levels, drafts.parents, drafts.widths, strict=True):
                level[1 : n + 1] = 1 + depths(parents[:n])
        each = [chooser for i in rows.tolist() if (chooser := choosers[i]) is not None]
        table = np.full(levels.shape, LEFT, np.int32)
        table[rows, nodes] = self._choices(self._found(starts)[rows] + nodes, each, levels[rows, nodes])
        found = walk(lambda rows, nodes: table[rows, nodes + 1], drafts)
        left = found.tokens[np.arange(len(mine)), found.accepted] == LEFT  # which agrees with no draft
        return replace(found, accepted=np.where(left, np.int32(-1), found.accepted))

    def _choices(self, at: npt.NDArray[np.int64], choosers: Sequence[Chooser], levels: npt.NDArray[np.int64]) -> I32:
        """The choices int32 [n] of ``choosers``, so many ``levels`` further on, from rows ``at`` [n] of the logits, or
        LEFT: one copy up, one down."""
        kinds = np.array([0 if c.params.greedy else 2 if c.params.filtered else 1 for c in choosers], np.int64)
        order = [np.flatnonzero(kinds == kind) for kind in range(3)]
        upload = Upload()
        where = [upload.add(at[each]) for each in order]
        asked = [upload.add(Asked.packed([choosers[j] for j in each.tolist()], levels[each])) for each in order]
        device = self._logits.device
        sent = upload.send(device)
        parts = []
        for kind, each in enumerate(order):
            if len(each):
                whole = len(each) == len(self._logits) and bool((at[each] == np.arange(len(each))).all())
                logits = self._logits if whole else self._logits.index_select(0, sent[where[kind]])
                given = Asked.of(sent[asked[kind]].view(-1, len(each)))
                rounding = self._rounding
                parts.append(greedy(logits, rounding) if kind == 0 else sampled(logits, given, kind == 2, rounding))
        found = np.full((2, len(at)), LEFT, np.int32)
        if parts:
            found[:, np.concatenate(order)] = torch.cat(parts, -1).cpu().numpy()
            self._near |= set(at[(found[1] > 0) & (found[0] != LEFT)].tolist())  # the host judges the others again
        chosen: I32 = found[0]
        return chosen

    def near_ties(self, at: I32) -> int:
        return len(self._near.intersection(self._found(at).tolist()))

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        if self._on_device and not any(chooser.rules for chooser in choosers):
            found = self._choices(self._found(at), choosers, np.zeros(len(at), np.int64))
            if (found != LEFT).all():
                return found
        chosen = []
        for i, c in zip(self._found(at).tolist(), choosers, strict=True):
            token, near = judged(c.apply_rules(self._everything()[i]), c.params, c.noise, c.index, self._rounding)
            chosen.append(token)
            if near:
                self._near.add(i)
        return np.array(chosen, np.int32)

    def logits(self, at: I32) -> F32:
        logits: F32 = self._everything()[self._found(at)]
        return logits

    def hidden_states(self, at: I32) -> TorchHiddenStates:
        if not self._hidden_states:
            raise ValueError("no hidden states were asked for: name the layers in Batch.hidden_layers")
        hidden_rows = self._batch.hidden_rows
        if hidden_rows is not None:
            rows = np.searchsorted(self._batch.starts, at, side="right") - 1
            if not hidden_rows[rows].all():
                unread = sorted(set(rows[~hidden_rows[rows]].tolist()))
                raise ValueError(f"rows {unread} of the batch keep no hidden states: name them in Batch.hidden_rows")
        index = np.asarray(at, np.int32) if self._where is None else self._where[at].astype(np.int32)
        return TorchHiddenStates(self._hidden_states, index)

    def _everything(self) -> F32:
        if self._host is None:
            self._host = self._logits.float().cpu().numpy()
        return self._host

    def _found(self, at: I32) -> np.ndarray[Any, np.dtype[np.intp]]:
        return np.searchsorted(self._batch.wanted, at) if self._where is None else self._where[at]
