"""What EAGLE is trained for: to say what its target would, for some entries ahead of what the target has computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.drafters.learned.checkpoint import Checkpoint, read
from outpace.drafters.learned.configs import EagleConfig
from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.errors import ParameterError
from outpace.training.hidden_states import default_layers
from outpace.training.initial import initialise
from outpace.training.losses import (
    expected_length,
    frozen_head_loss,
    head_acceptance,
    length_slope,
    sequence_weights,
    widened,
)
from outpace.training.methods.base import HeadMethod
from outpace.training.networks.unroll import unroll
from outpace.training.objective import Simulated, TrainBatch
from outpace.training.options import LENGTH, EagleOptions
from outpace.training.setup import Setup, shaped_as
from outpace.training.simulate import walk
from outpace.training.vocabulary import Candidates, DraftVocabulary

_SAMPLE = 20_000  # tokens whose states the initialisation is fitted to


class EagleObjective(HeadMethod[EagleNetwork, EagleOptions]):
    """See ``Objective``."""

    @classmethod
    def layers(cls, options: EagleOptions, count: int) -> tuple[int, ...]:
        return tuple(options.hidden_layers or default_layers(count))

    @classmethod
    def vocabulary(cls, options: EagleOptions) -> DraftVocabulary | None:
        if options.start is None:
            return None
        start = _start(options.start)
        return DraftVocabulary.of(start.tensors["d2t"] + np.arange(len(start.tensors["d2t"])), start.config.vocab)

    @classmethod
    def begin(cls, setup: Setup, options: EagleOptions) -> EagleObjective:
        """Raises ParameterError for a drafter to begin with that is another target's or has another shape."""
        config = EagleConfig(
            decoder=shaped_as(setup.weights, 1), vocab=setup.parts.vocab, draft_vocab=len(setup.vocabulary),
            hidden_layers=setup.hidden_layers, norm_before_residual=False, fc_norm=True, norm_output=True,
            norm_before_fc=False,
        )  # fmt: skip
        network = EagleNetwork(config)
        if options.start is None:
            initialise(network, options.init, setup.weights, setup.parts, _sample(setup), setup.run.options.seed)
        else:
            _begin_with(options.start, network, setup.answers.target)
        network.to(setup.device)
        return cls(network, setup.parts.to(setup.device), setup.vocabulary, options, setup.counts)

    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        draw = torch.Generator().manual_seed(batch.seed)
        options = self.options
        counts = self._counts(batch)
        # Where the target's p is used: p at position i is of token i + 1.
        anchors = self._anchors(batch, counts, draw)
        rows = self.draft_head.draw(batch.tokens, draw)
        positions = torch.nonzero(counts).flatten()
        with torch.no_grad():
            logits = widened(self.target.norm(batch.states[positions, -1]) @ rows.head.T)
            p = torch.softmax(logits if rows.offset is None else logits.add_(rows.offset), -1)
        row = torch.full((len(batch),), -1, device=batch.device)
        row[positions] = torch.arange(len(positions), device=batch.device)
        outputs = unroll(
            self.network,
            self._disturbed(batch.states[:, :-1].float(), draw),
            self.target.embed(batch.tokens),
            batch.position,
            batch.starts,
            anchors,
        )
        # Of each step: the anchors that count, what was put out there, and the row of the target's p.
        steps = list[tuple[Tensor, Tensor, Tensor]]()
        for s, (at, normed) in enumerate(zip(anchors, outputs, strict=True)):
            counted = torch.nonzero(counts[at + s + 1]).flatten()
            steps.append((at[counted], normed[counted], row[at[counted] + s + 1]))
        weights, whole = self._weights(batch, steps, p, rows)
        name = "tv" if options.loss == LENGTH else options.loss
        total = outputs[0].new_zeros(())
        figures: dict[str, float] = {}
        for s, ((_, normed, rows_of_p), weight) in enumerate(zip(steps, weights, strict=True)):
            if len(normed):
                step_loss, step_figures = frozen_head_loss(normed, rows.head, rows.offset, p[rows_of_p], weight, name)
                total = total + step_loss
                figures[f"accept{s}"], figures[f"agree{s}"] = step_figures.mean(0).tolist()
        return total if whole is None else total + (whole - total.detach()), figures

    def _weights(
        self, batch: TrainBatch, steps: list[tuple[Tensor, Tensor, Tensor]], p: Tensor, rows: Candidates
    ) -> tuple[list[Tensor], Tensor | None]:
        """What each anchor's loss weighs at each step; and what the whole loss is, where that is not their sum.

        With ``LENGTH``, step s of an anchor weighs what its acceptance adds to the expected length, as things are: so
        the gradient is that of the share of unrolled steps that is not kept. A chain ends where a step does not count.
        """
        options, sequence, count = self.options, batch.sequence, len(steps)
        if options.loss != LENGTH:
            whole = sum(options.decay**s for s in range(count))
            return [
                sequence_weights(batch.weight[at + s + 1], sequence[at], batch.sequences, options.decay**s / whole)
                for s, (at, _, _) in enumerate(steps)
            ], None
        accepted = torch.zeros(len(batch), count, device=batch.device)
        for s, (at, normed, rows_of_p) in enumerate(steps):
            accepted[at, s] = head_acceptance(normed, rows.head, rows.offset, p[rows_of_p])
        first = steps[0][0]
        each = torch.zeros(len(batch), device=batch.device)
        each[first] = sequence_weights(batch.weight[first + 1], sequence[first], batch.sequences) / count
        slope = length_slope(accepted) * each[:, None]
        kept = expected_length(accepted[first])
        return [slope[at, s] for s, (at, _, _) in enumerate(steps)], torch.dot(each[first], count - kept)

    @torch.no_grad()
    def simulate(self, batch: TrainBatch, depth: int | None = None) -> Simulated:
        right = torch.zeros(len(batch), self.options.depth, dtype=torch.bool, device=batch.device)
        tried = torch.zeros_like(right)
        for s, (kept, normed) in enumerate(self._chain(batch)):
            best = torch.cat([(part @ self.draft_head.head.T).argmax(-1) for part in normed.split(256)] or [kept])
            right[kept, s] = self.draft_head.ids[best] == batch.tokens[kept + s + 2]
            tried[kept, s] = True
        return walk(batch, right[:, :depth].cpu().numpy(), tried[:, :depth].cpu().numpy())

    @torch.no_grad()
    def overlaps(self, batch: TrainBatch) -> np.ndarray:
        p = self.target.probabilities(batch.states[:, -1], self.draft_head.ids)
        found = torch.zeros(len(batch), self.options.depth, device=batch.device)
        for s, (kept, normed) in enumerate(self._chain(batch)):
            found[kept, s] = head_acceptance(normed, self.draft_head.head, None, p[kept + s + 1])
        overlaps: np.ndarray = found.double().cpu().numpy()
        return overlaps

    def _chain(self, batch: TrainBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each step s: the entries [m] after which the answer has a token s, and what is put out there [m, h]."""
        depth = self.options.depth
        ends = batch.ends
        every = torch.arange(len(batch), device=batch.device)
        # A draft beyond the answer's end is neither right nor wrong: it is not tried.
        anchors = [every[every + s + 2 <= ends] for s in range(depth)]
        outputs = unroll(
            self.network, batch.states[:, :-1].float(), self.target.embed(batch.tokens), batch.position, batch.starts,
            anchors,
        )  # fmt: skip
        for s, (at, normed) in enumerate(zip(anchors, outputs, strict=True)):
            inside = at + s + 2 < ends[at]
            yield at[inside], normed[inside]

    def _counts(self, batch: TrainBatch) -> Tensor:
        """bool [N]: positions whose p is learned: the token after them is in the draft vocabulary.

        The answer's own token stands for the target's likeliest one: all logits cost more than the whole network.
        """
        following = torch.cat([batch.tokens[1:], batch.tokens[:1]])
        return batch.loss_mask & (self.draft_head.place[following] >= 0)

    def _anchors(self, batch: TrainBatch, counts: Tensor, draw: torch.Generator) -> list[Tensor]:
        every, ends = torch.arange(len(batch), device=batch.device), batch.ends
        anchors = [every[every + 2 <= ends]]
        kept = torch.ones(len(batch), dtype=torch.bool, device=batch.device)
        if self.options.share < 1:
            kept = torch.rand(len(batch), generator=draw).to(batch.device) < self.options.share
        # An anchor goes on while any of its later predictions counts.
        useful = torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
        later: list[Tensor] = []
        for s in range(self.options.steps_ttt - 1, 0, -1):
            reach = every[every + s + 2 <= ends]
            useful[reach] |= counts[reach + s + 1]
            later.append(reach[(useful & kept)[reach]])
        return anchors + later[::-1]

    def _disturbed(self, hidden_states: Tensor, draw: torch.Generator) -> Tensor:
        """Hidden states [N, T, h] with noise, some of them left out and the others of that position scaled up."""
        if self.options.noise:
            size = hidden_states.square().mean(-1, keepdim=True).sqrt_() * self.options.noise
            hidden_states = hidden_states + size * torch.randn(hidden_states.shape, generator=draw).to(
                hidden_states.device
            )
        if self.options.dropout:
            kept = torch.rand(hidden_states.shape[:2], generator=draw).to(hidden_states.device) >= self.options.dropout
            hidden_states = hidden_states * (kept / (1 - self.options.dropout))[..., None]
        return hidden_states


def _start(path: str) -> Checkpoint:
    start = read(Path(path))
    if start.method != "eagle":
        raise ParameterError(f"{path} is a drafter of the method {start.method}: begin with one of eagle")
    return start


def _begin_with(path: str, network: EagleNetwork, target: Mapping[str, Any]) -> None:
    """Give the network the weights of a drafter of the same shape beside the same target. Raises ParameterError."""
    start = _start(path)
    if start.target.get("fingerprint") != target["fingerprint"]:
        raise ParameterError(f"{path} was trained beside another target: begin with one of this target")
    if replace(start.config, draft_vocab=network.config.draft_vocab) != network.config:
        raise ParameterError(f"{path} is {start.config}, not {network.config}: begin with one of the same shape")
    network.load_state_dict({name: torch.from_numpy(start.tensors[name]) for name in network.state_dict()})


def _sample(setup: Setup) -> Iterator[Tensor]:
    """The hidden states that the initialisation is fitted to: of answers drawn at random."""
    answers, states = setup.train.answers, setup.states
    order = np.random.default_rng(setup.run.options.seed).permutation(len(answers))
    chosen = order[: int(np.searchsorted(np.cumsum(answers.lengths()[order]), _SAMPLE)) + 1].tolist()
    states.plan(chosen)
    return (states.states(i) for i in chosen)
