"""What a forward of the Transformers backend hands out: logits and hidden states, on the device until asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outpace.common.arrays import F32, I32
from outpace.errors import NoTokenAllowedError
from outpace.exact.drafts import Drafts, Verdicts, depths
from outpace.exact.sampling import Chooser, TokenLogprob, judged
from outpace.exact.verify import walk
from outpace.models.base import Batch, Output, logprobs_on_host
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

    def verify(self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None]) -> Verdicts:
        """See ``Output.verify``; rows with rules are left to the caller. On a card every node's choice is made there,
        and all come in one copy; on the host, where nothing is copied, only those of visited nodes are made."""
        mine = [i for i, chooser in enumerate(choosers) if chooser is not None and not chooser.rules]
        left = np.ones(len(choosers), np.bool_)
        left[mine] = False
        say = self._chosen_there(drafts, starts, choosers, mine) if self._on_device else self._chosen(starts, choosers)
        level = 0

        def after(rows: I32, nodes: I32) -> I32:
            nonlocal level
            found = np.full(len(rows), LEFT, np.int32)  # agrees with no draft
            for j, (i, node) in enumerate(zip(rows.tolist(), nodes.tolist(), strict=True)):
                if not left[i]:
                    found[j] = say(i, node, level)
                    left[i] = found[j] == LEFT
            level += 1
            return found

        verdicts = walk(after, drafts)
        return Verdicts(verdicts.tokens, np.where(left, np.int32(-1), verdicts.accepted), verdicts.path)

    def _chosen(self, starts: I32, choosers: Sequence[Chooser | None]) -> Callable[[int, int, int], int]:
        """The choice of row i after a node at some level, from logits on the host."""
        logits = self._everything()
        first = self._found(starts)  # a row's wanted tokens stand together

        def say(i: int, node: int, level: int) -> int:
            chooser = choosers[i]
            assert chooser is not None
            at = int(first[i]) + 1 + node
            try:
                return self._judged(at, logits[at], replace(chooser, index=chooser.index + level))
            except (NoTokenAllowedError, FloatingPointError):
                return LEFT

        return say

    def _chosen_there(
        self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None], rows: Sequence[int]
    ) -> Callable[[int, int, int], int]:
        """As ``_chosen``, of ``rows``: made where the logits are."""
        first, widths = self._found(starts), drafts.widths
        at = np.concatenate([np.zeros(0, np.int64), *(np.arange(first[i], first[i] + 1 + widths[i]) for i in rows)])
        begins = dict(zip(rows, np.cumsum([0, *(1 + widths[i] for i in rows)]).tolist(), strict=False))
        chain = np.arange(drafts.tokens.shape[1], dtype=np.int32)
        level = [
            np.append(0, 1 + (chain if drafts.parents is None else depths(drafts.parents[i, : widths[i]])))[
                : 1 + widths[i]
            ]
            for i in rows
        ]
        each = [chooser for i in rows if (chooser := choosers[i]) is not None for _ in range(1 + widths[i])]
        found = self._choices(at, each, np.concatenate([np.zeros(0, np.int64), *level]))
        return lambda i, node, level: int(found[begins[i] + 1 + node])

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

    def _judged(self, at: int, logits: F32, chooser: Chooser) -> int:
        """The choice from row ``at`` of the logits, on the host."""
        ruled = chooser.apply_rules(logits)
        token, near = judged(ruled, chooser.params, chooser.noise, chooser.index, self._rounding)
        if near:
            self._near.add(at)
        return token

    def near_ties(self, at: I32) -> int:
        return len(self._near.intersection(self._found(at).tolist()))

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        plain = not any(chooser.rules for chooser in choosers)
        if plain and (self._on_device or (self._host is None and all(c.params.greedy for c in choosers))):
            found = self._choices(self._found(at), choosers, np.zeros(len(at), np.int64))
            if (found != LEFT).all():
                return found
        logits, rows = self._everything(), self._found(at).tolist()
        return np.array([self._judged(i, logits[i], c) for i, c in zip(rows, choosers, strict=True)], np.int32)

    def logits(self, at: I32) -> F32:
        logits: F32 = self._everything()[self._found(at)]
        return logits

    def logprobs(self, at: I32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
        return logprobs_on_host(self.logits(at), tokens, top)

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
