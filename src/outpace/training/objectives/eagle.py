"""What EAGLE is trained for: to say what its target would, for some entries ahead of what the target has computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.checkpoint import Checkpoint, read
from outpace.drafters.learned.config import EagleConfig
from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.drafters.learned.networks.layers import rotate
from outpace.errors import ParameterError
from outpace.training.hidden_states import default_layers
from outpace.training.objective import HeadObjective, NetworkT, Simulated, TrainBatch, walk
from outpace.training.objectives.losses import (
    expected_length,
    frozen_head_loss,
    head_acceptance,
    length_slope,
    sequence_weights,
    widened,
)
from outpace.training.options import LENGTH, EagleOptions, MtpOptions
from outpace.training.setup import Setup, shaped_as
from outpace.training.target import Candidates, DraftVocabulary, TargetParts, TargetWeights

# -- unroll -----------------------------------------------------------------------------------------------------------
# EAGLE unrolled for training: attention of a training-time test, written out with its gradient.
# Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2) unrolls a drafter: at step s the entry that follows
# anchor a by s sees the real entries up to a and the predicted entries 1 .. s of this anchor. Everything is indexed by
# anchor, so step s's own keys are a diagonal, and hidden states are never shifted.

Span = tuple[int, int, int, int]  # a sequence's anchors [m0, m1) and real entries [n0, n1)


class AnchoredAttention(torch.autograd.Function):
    """One sequence after the other, each a few batched products; nothing is padded."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [M, H, d]
        k: Tensor,  # [N, KV, d] of real entries
        v: Tensor,
        own_k: Tensor,  # [M, s, KV, d] of the anchor's predicted entries, oldest first
        own_v: Tensor,
        spans: Sequence[Span],
        anchors: Tensor,  # int64 [M]: packed index of each anchor
    ) -> Tensor:
        _, heads, dim = q.shape
        kv_heads, own = k.shape[1], own_k.shape[1]
        group, scale = heads // kv_heads, dim**-0.5
        out = torch.empty_like(q)
        probabilities = []
        for m0, m1, n0, n1 in spans:
            m, n = m1 - m0, n1 - n0
            if m == 0:
                probabilities.append(q.new_zeros(0))
                continue
            queries = (q[m0:m1].view(m, kv_heads, group, dim).permute(1, 2, 0, 3) * scale).reshape(kv_heads, -1, dim)
            scores = q.new_empty(kv_heads, group, m, n + own)
            seen = torch.matmul(queries, k[n0:n1].permute(1, 2, 0)).view(kv_heads, group, m, n)
            later = torch.arange(n0, n1, device=q.device) > anchors[m0:m1, None]
            scores[..., :n] = seen.masked_fill_(later, float("-inf"))
            if own:
                keys = own_k[m0:m1].permute(2, 0, 1, 3).unsqueeze(1)  # [KV, 1, m, s, d]
                scores[..., n:] = (queries.view(kv_heads, group, m, 1, dim) * keys).sum(-1)
            p = torch.softmax(scores, -1).to(q.dtype)  # a card's autocast makes float32 of it
            mixed = torch.matmul(p[..., :n].reshape(kv_heads, -1, n), v[n0:n1].transpose(0, 1))
            if own:
                values = own_v[m0:m1].permute(2, 0, 1, 3).unsqueeze(1)
                mixed = mixed + (p[..., n:, None] * values).sum(-2).view(kv_heads, -1, dim)
            out[m0:m1] = mixed.view(kv_heads, group, m, dim).permute(2, 0, 1, 3).reshape(m, heads, dim)
            probabilities.append(p)
        ctx.save_for_backward(q, k, v, own_k, own_v, *probabilities)
        ctx.spans = spans
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        q, k, v, own_k, own_v, *probabilities = ctx.saved_tensors
        _, heads, dim = q.shape
        kv_heads, own = k.shape[1], own_k.shape[1]
        group, scale = heads // kv_heads, dim**-0.5
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        down_k, down_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
        for (m0, m1, n0, n1), p in zip(ctx.spans, probabilities, strict=True):
            m, n = m1 - m0, n1 - n0
            if m == 0:
                continue
            g = grad[m0:m1].view(m, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
            queries = (q[m0:m1].view(m, kv_heads, group, dim).permute(1, 2, 0, 3) * scale).reshape(kv_heads, -1, dim)
            dp = torch.empty_like(p)
            dp[..., :n] = torch.matmul(g, v[n0:n1].permute(1, 2, 0)).view(kv_heads, group, m, n)
            if own:
                keys, values = own_k[m0:m1].permute(2, 0, 1, 3), own_v[m0:m1].permute(2, 0, 1, 3)
                dp[..., n:] = (g.view(kv_heads, group, m, 1, dim) * values.unsqueeze(1)).sum(-1)
            ds = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p)
            ds_seen = ds[..., :n].reshape(kv_heads, -1, n)
            dqueries = torch.matmul(ds_seen, k[n0:n1].transpose(0, 1))
            dk[n0:n1] = torch.matmul(ds_seen.transpose(1, 2), queries).transpose(0, 1)
            dv[n0:n1] = torch.matmul(p[..., :n].reshape(kv_heads, -1, n).transpose(1, 2), g).transpose(0, 1)
            if own:
                ds_own = ds[..., n:, None]  # [KV, G, m, s, 1]
                dqueries = dqueries + (ds_own * keys.unsqueeze(1)).sum(-2).view(kv_heads, -1, dim)
                down_k[m0:m1] = (ds_own * queries.view(kv_heads, group, m, 1, dim)).sum(1).permute(1, 2, 0, 3)
                down_v[m0:m1] = (p[..., n:, None] * g.view(kv_heads, group, m, 1, dim)).sum(1).permute(1, 2, 0, 3)
            dq[m0:m1] = (dqueries.view(kv_heads, group, m, dim) * scale).permute(2, 0, 1, 3).reshape(m, heads, dim)
        return dq, dk, dv, down_k, down_v, None, None


class PickRows(torch.autograd.Function):
    """``values[index]`` for distinct indices: backward is a copy, not a sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(values)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        full = grads[0].new_zeros(ctx.rows, *grads[0].shape[1:])
        return full.index_copy_(0, index, grads[0]), None


def pick(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` [m, ...] for distinct ``index`` int64 [m]."""
    picked: Tensor = PickRows.apply(values, index)
    return picked


def unroll(
    network: EagleNetwork,
    hidden_states: Tensor,  # [N, T, h] of the target
    embedded: Tensor,  # [N, h]: the tokens' embeddings
    position: Tensor,  # int64 [N]
    starts: Sequence[int],
    anchors: Sequence[Tensor],  # of each step, int64 [M_s] ascending, each within the one before
) -> list[Tensor]:
    """The normed outputs [M_s, h] of each step; at step s, ``anchors[s]`` + s is an entry and reads token + 1.

    Step 0 has all real entries that a later query may see, so ``anchors[0]`` is every position but the sequences' last.
    Later ones may be fewer.
    """
    layer, shape = network.layer, network.config.decoder
    weight = torch.cat([p.weight for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)])
    of_token, of_state = weight[:, : shape.hidden], weight[:, shape.hidden :]
    read = F.linear(layer.input_layernorm(embedded), of_token)  # [N, q + 2 kv]: once, not once a step
    bounds = torch.tensor(starts, device=position.device)
    real = anchors[0]
    inner = torch.searchsorted(real, bounds).tolist()
    g = network.fuse(pick(hidden_states, real))
    outputs: list[Tensor] = []
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []  # of the steps after the first, by anchor
    first_k = first_v = g
    for s, at in enumerate(anchors):
        if s:
            kept = torch.searchsorted(anchors[s - 1], at)
            g = pick(g, kept)
            own_k, own_v = [pick(k, kept) for k in own_k], [pick(v, kept) for v in own_v]
        normed = layer.hidden_norm(g)
        q, k, v = _project(network, pick(read, at + s + 1) + F.linear(normed, of_state), position[at] + s)
        if s:
            own_k.append(k)
            own_v.append(v)
        else:
            first_k, first_v = k, v
        outer = torch.searchsorted(at, bounds).tolist()
        spans: list[Span] = list(zip(outer, outer[1:], inner, inner[1:], strict=False))
        places = torch.searchsorted(real, at)
        mixed = AnchoredAttention.apply(q, first_k, first_v, _stack(own_k, k), _stack(own_v, v), spans, places)
        output, g = network.leave(network.residual(g, normed), mixed)
        outputs.append(output)
    return outputs


def _project(network: EagleNetwork, qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, [n, heads, d], of [n, q + 2 kv]."""
    shape, attention = network.config.decoder, network.layer.self_attn
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    both, v = heads.split([shape.heads + shape.kv_heads, shape.kv_heads], 1)
    if attention.q_norm is not None and attention.k_norm is not None:
        both = torch.cat((attention.q_norm(both[:, : shape.heads]), attention.k_norm(both[:, shape.heads :])), 1)
    turned = rotate(both, *network.rope(position))
    return turned[:, : shape.heads], turned[:, shape.heads :], v


def _stack(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(parts, 1) if parts else like.new_zeros(len(like), 0, *like.shape[1:])


# -- initial ----------------------------------------------------------------------------------------------------------
# Where an EAGLE network begins: at random, from the target's last layer, with ``fc`` fitted to what it stands for.

_RIDGE = 1e-3  # of the mean square of the inputs


def initialise(
    network: EagleNetwork, init: str, weights: TargetWeights, parts: TargetParts, states: Iterable[Tensor], seed: int
) -> None:
    """``layer``: the last layer's matrices read the features, and ``fc`` passes the top layer through. ``now``: ``fc``
    is the linear map from hidden states to what the target's head reads at that position, ``next``: at the one after,
    which is what the entry has to say; the network's norm scales it evenly then. ``states`` [L, T + 1, h]: a sample.
    Raises ParameterError for layers of other shapes.
    """
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5, generator=draw)
        for matrix in (network.layer.self_attn.o_proj, network.layer.mlp.down_proj):
            matrix.weight.mul_(0.5)  # what is added to the features begins small beside them
        network.norm.weight.copy_(parts.final_norm)
        if init == "fresh":
            return
        sequences = [sequence.float() for sequence in states]
        sample = torch.cat([sequence[:-1] for sequence in sequences])
        if init.startswith("layer"):
            _from_layer(network, weights, sample)
        if init.endswith("now"):
            _fit(network, sample[:, :-1], parts.norm(sample[:, -1]))
        elif init.endswith("next"):
            _fit(network, sample[:, :-1], parts.norm(torch.cat([sequence[1:, -1] for sequence in sequences])))


def _from_layer(network: EagleNetwork, weights: TargetWeights, sample: Tensor) -> None:
    hidden, layer = network.config.decoder.hidden, network.layer
    last = weights.layer(weights.decoder.layers - 1)
    attention, mlp = layer.self_attn, layer.mlp
    targets = {
        "q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj,
        "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj,
    }  # fmt: skip
    for name, matrix in targets.items():
        if matrix.weight[:, -last[name].shape[1] :].shape != last[name].shape:
            raise ParameterError(f"the drafter's {name} has another shape than the target's: initialise it fresh")
        if name in "qkv":
            matrix.weight[:, :hidden] *= 0.1
        matrix.weight[:, -last[name].shape[1] :] = last[name]
    layer.hidden_norm.weight.copy_(last["attn_norm"])
    layer.post_attention_layernorm.weight.copy_(last["ffn_norm"])
    top = sample[:, -2]
    size = top.square().mean(-1).sqrt().median() if network.fc_norm is not None else 1.0
    network.fc.weight.mul_(0.1)
    network.fc.weight[:, -hidden:] += torch.eye(hidden) * size


def _fit(network: EagleNetwork, hidden_states: Tensor, wanted: Tensor) -> None:
    """Ridge regression of ``wanted`` [n, h], each at unit size, on ``hidden_states`` [n, T, h] as ``fc`` reads them.

    ``wanted`` is behind the target's final norm, whose weights undo what differs between numbers: before it, a few are
    a hundred times the others in some targets, and what the layer adds at random would drown these.
    """
    x = network.fused_input(hidden_states)
    sizes = wanted.square().mean(-1, keepdim=True).sqrt()
    x, y = x.double(), (wanted / sizes).double()
    squares = x.T @ x
    squares.diagonal().add_(_RIDGE * squares.diagonal().mean())
    network.fc.weight.copy_(torch.linalg.solve(squares, x.T @ y).T.float())
    network.norm.weight.fill_(sizes.mean())


_SAMPLE = 20_000  # tokens whose states the initialisation is fitted to


UnrolledOptionsT = TypeVar("UnrolledOptionsT", bound=EagleOptions | MtpOptions)


class UnrolledObjective(HeadObjective[NetworkT, UnrolledOptionsT]):
    """Of one layer that reads its own output for what the target has not computed: see ``Objective``."""

    @abstractmethod
    def outputs(
        self, batch: TrainBatch, anchors: Sequence[Tensor], draw: torch.Generator | None = None
    ) -> list[Tensor]:
        """What the head reads [M_s, h] at each step's ``anchors``, as ``unroll`` has them; ``draw``: of what disturbs
        the target's states in training (None: nothing does)."""

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
        outputs = self.outputs(batch, anchors, draw)
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
    def simulate(self, batch: TrainBatch) -> Simulated:
        right = torch.zeros(len(batch), self.options.depth, dtype=torch.bool, device=batch.device)
        tried = torch.zeros_like(right)
        for s, (kept, normed) in enumerate(self._chain(batch)):
            best = torch.cat([(part @ self.draft_head.head.T).argmax(-1) for part in normed.split(256)] or [kept])
            right[kept, s] = self.draft_head.ids[best] == batch.tokens[kept + s + 2]
            tried[kept, s] = True
        return walk(batch, right.cpu().numpy(), tried.cpu().numpy())

    def _chain(self, batch: TrainBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each step s: the entries [m] after which the answer has a token s, and what is put out there [m, h]."""
        ends = batch.ends
        every = torch.arange(len(batch), device=batch.device)
        # A draft beyond the answer's end is neither right nor wrong: it is not tried.
        anchors = [every[every + s + 2 <= ends] for s in range(self.options.depth)]
        outputs = self.outputs(batch, anchors)
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


class EagleObjective(UnrolledObjective[EagleNetwork, EagleOptions]):
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

    def outputs(
        self, batch: TrainBatch, anchors: Sequence[Tensor], draw: torch.Generator | None = None
    ) -> list[Tensor]:
        states = batch.states[:, :-1].float()
        return unroll(
            self.network, states if draw is None else self._disturbed(states, draw), self.target.embed(batch.tokens),
            batch.position, batch.starts, anchors,
        )  # fmt: skip

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
