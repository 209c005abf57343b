"""What a forward of the Transformers backend hands out: logits and hidden states, on the device until asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outpace.common.arrays import F32, I32
from outpace.errors import NotFiniteError, NoTokenAllowedError
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.sampling import Chooser, TokenLogprob, choose
from outpace.exact.verify import walk
from outpace.models.base import Batch, choose_on_host, logprobs_on_host


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
        index = torch.from_numpy(self.index.astype(np.int64)).to(self.tensors[0].device)
        return torch.stack([layer.index_select(0, index) for layer in self.tensors], dim=1)

    def numpy(self) -> F32:
        values: F32 = self.native.float().cpu().numpy()
        return values


class TorchOutput:
    """A forward's result where it was computed; what is asked for comes to the host in one copy."""

    def __init__(self, batch: Batch, logits: torch.Tensor, hidden_states: Sequence[torch.Tensor] = ()) -> None:
        self._batch = batch
        self._logits = logits  # [M, V]
        self._hidden_states = tuple(hidden_states)  # each [N, H]
        self._host: F32 | None = None
        self._on_device = logits.device.type != "cpu"  # so that every look at it is a copy

    @property
    def on_device(self) -> torch.Tensor:
        """The logits [M, V] where they were computed."""
        return self._logits

    def verify(self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None]) -> Verdicts:
        """See ``Output.verify``. Rows with rules are left to the caller; a sampled row is chosen on the host always,
        since the choice is defined by its arithmetic."""
        say = self._fetched(drafts, starts, choosers) if self._on_device else self._chosen(starts, choosers)
        left = np.array([chooser is None or bool(chooser.rules) for chooser in choosers], np.bool_)
        level = 0

        def after(rows: I32, nodes: I32) -> I32:
            nonlocal level
            found = np.full(len(rows), -1, np.int32)  # agrees with no draft
            for j, (i, node) in enumerate(zip(rows.tolist(), nodes.tolist(), strict=True)):
                if not left[i]:
                    try:
                        found[j] = say(i, node, level)
                    except (NoTokenAllowedError, FloatingPointError):
                        left[i] = True
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
            return choose(logits[first[i] + 1 + node], chooser.params, chooser.noise, chooser.index + level)

        return say

    def _fetched(
        self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None]
    ) -> Callable[[int, int, int], int]:
        """As ``_chosen``, but what is needed comes in one copy: a greedy row's best ids, a sampled row's logits."""
        first, widths = self._found(starts), drafts.widths
        greedy = [i for i, c in enumerate(choosers) if c is not None and c.plain_greedy]
        sampled = [i for i, c in enumerate(choosers) if c is not None and not c.rules and not c.plain_greedy]
        device, vocab = self._logits.device, self._logits.shape[1]

        def nodes(rows: list[int]) -> tuple[torch.Tensor, dict[int, int]]:
            """The logits of all of these rows' nodes [n, V], and where each row's begin."""
            spans = [np.arange(first[i], first[i] + 1 + widths[i], dtype=np.int64) for i in rows]
            begins = np.cumsum([0, *(len(span) for span in spans)])
            index = np.concatenate([np.zeros(0, np.int64), *spans])
            whole = len(index) == len(self._logits) and bool((index == np.arange(len(index))).all())
            logits = self._logits if whole else self._logits[torch.from_numpy(index).to(device)]
            return logits, dict(zip(rows, begins.tolist(), strict=False))

        asked, asked_at = nodes(greedy)
        drawn, drawn_at = nodes(sampled)
        best = asked.argmax(-1) if len(asked) else asked.new_zeros(0, dtype=torch.int64)  # the lowest id on ties
        value = asked.gather(-1, best[:, None])[:, 0].float() if len(asked) else asked.new_zeros(0).float()
        # Ids travel as the bits of floats: copies leave bits alone.
        packed = torch.cat([drawn.float().reshape(-1), best.to(torch.int32).view(torch.float32), value]).cpu().numpy()
        logits = packed[: drawn.numel()].reshape(-1, vocab)
        ids = packed[drawn.numel() : drawn.numel() + len(best)].view(np.int32)
        finite = np.isfinite(packed[drawn.numel() + len(best) :])

        def say(i: int, node: int, level: int) -> int:
            chooser = choosers[i]
            assert chooser is not None
            if i in asked_at:
                at = asked_at[i] + 1 + node
                if not finite[at]:
                    raise NotFiniteError
                return int(ids[at])
            return choose(logits[drawn_at[i] + 1 + node], chooser.params, chooser.noise, chooser.index + level)

        return say

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        if self._host is None and all(chooser.plain_greedy for chooser in choosers):
            return self._greedy(self._found(at))
        return choose_on_host(self.logits(at), choosers)

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
        return TorchHiddenStates(self._hidden_states, np.asarray(at, np.int32))

    def _everything(self) -> F32:
        if self._host is None:
            self._host = self._logits.float().cpu().numpy()
        return self._host

    def _found(self, at: I32) -> np.ndarray[Any, np.dtype[np.intp]]:
        return np.searchsorted(self._batch.wanted, at)

    def _greedy(self, found: np.ndarray[Any, np.dtype[np.intp]]) -> I32:
        logits = self._logits
        if len(found) != len(logits) or (found != np.arange(len(found))).any():
            logits = logits[torch.from_numpy(found).to(logits.device)]
        best = logits.argmax(-1)  # the lowest id on ties
        value = logits.gather(-1, best[:, None])[:, 0]
        ids, values = torch.stack([best.double(), value.double()]).cpu().numpy()  # ids are exact in float64
        if not np.isfinite(values).all():
            raise NotFiniteError
        chosen: I32 = ids.astype(np.int32)
        return chosen
