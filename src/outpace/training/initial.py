"""Where an EAGLE network begins: at random, from the target's last layer, with ``fc`` fitted to what it stands for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.errors import ParameterError
from outpace.training.target import TargetParts, TargetWeights

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
