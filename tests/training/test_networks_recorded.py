"""The networks as they are trained compute what speculators computed from the same weights (tests/recorded)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.drafters.learned.checkpoint import Checkpoint, read
from outpace.drafters.learned.config import EagleConfig, ParallelConfig
from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.drafters.learned.networks.parallel import ParallelNetwork
from outpace.training.objectives.eagle import unroll

RECORDED = Path(__file__).parents[1] / "recorded"


def loaded(name: str) -> tuple[Checkpoint, dict[str, Any]]:
    return read(RECORDED / name), json.loads((RECORDED / name / "seen.json").read_text())


def filled(network: Any, its: Checkpoint) -> Any:
    network.load_state_dict({name: tensor(its.tensors[name]) for name in network.state_dict()})
    return network.eval()


def tensor(values: Any) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float32)


def close(found: Tensor, wanted: Any) -> None:
    torch.testing.assert_close(found, tensor(wanted), atol=1e-5, rtol=0)


def test_eagle() -> None:
    its, seen = loaded("eagle-3.1")
    assert isinstance(its.config, EagleConfig)
    network = filled(EagleNetwork(its.config), its)
    embedding, head = tensor(its.tensors["embed_tokens.weight"]), tensor(its.tensors["lm_head.weight"])
    hidden_states, tokens = tensor(seen["hidden_states"]), torch.tensor(seen["tokens"])
    n = len(tokens)
    # The record's entry i reads its token i; an entry of ours reads the token after its own.
    embedded, padded = torch.cat([embedding[:1], embedding[tokens]]), torch.cat([hidden_states, hidden_states[:1]])
    with torch.no_grad():
        real, predicted = unroll(
            network, padded, embedded, torch.arange(n + 1), [0, n + 1], [torch.arange(n), torch.arange(n - 1)]
        )
        close(real @ head.T, seen["logits"])
        close(predicted @ head.T, seen["predicted"])


def test_parallel() -> None:
    its, seen = loaded("dspark")
    assert isinstance(its.config, ParallelConfig)
    assert (its.config.hidden_layers, its.config.block, its.config.sample_from_anchor) == ((0, 2, 4), 4, True)
    network = filled(ParallelNetwork(its.config), its)
    embedding = tensor(seen["embed_tokens.weight"])
    head, hidden_states = tensor(its.tensors["lm_head.weight"]), tensor(seen["hidden_states"])
    tokens = torch.tensor(seen["tokens"])
    with torch.no_grad():
        context = network.context(hidden_states, torch.arange(len(tokens)))
        for i, anchor in enumerate(seen["anchors"]):
            embedded = embedding[network.inputs(tokens[anchor : anchor + 1])]
            hidden = network.blocks(embedded, torch.tensor([anchor]), [context], [torch.tensor([anchor])])[0]
            before = network.before(torch.tensor(seen["before"][i]))
            close(hidden, seen["hidden"][i])
            close(hidden @ head.T, seen["logits"][i])
            close(network.markov_head.markov_w2(before), seen["bias"][i])
            close(network.confidence(hidden, before), seen["sure"][i])
