"""A tiny EAGLE beside random target parts: what its tests share."""

import numpy as np
import torch

from outpace.drafters.learned.config import Decoder, EagleConfig
from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.training.objective import TrainBatch
from outpace.training.objectives.eagle import EagleObjective
from outpace.training.target import DraftVocabulary, TargetParts

HIDDEN, VOCAB = 16, 40


def config(**changes):
    decoder = Decoder(
        hidden=HIDDEN, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=24, eps=1e-5, rope_theta=1e4, max_length=64
    )
    flags = {"norm_before_residual": False, "fc_norm": True, "norm_output": True, "norm_before_fc": False}
    return EagleConfig(decoder=decoder, vocab=VOCAB, draft_vocab=24, hidden_layers=(0, 1, 2), **{**flags, **changes})


def network(seed=0, **changes):
    made = EagleNetwork(config(**changes))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * 0.3 + (p.ndim == 1))
    return made


def parts(seed=1):
    draw = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCAB, HIDDEN, generator=draw)
    return TargetParts(
        torch.randn(VOCAB, HIDDEN, generator=draw), 1.0, head, torch.rand(HIDDEN, generator=draw) + 0.5, 1e-5
    )


def batch(lengths=(12, 5, 9), first=None, seed=2):
    draw = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (n,), generator=draw).numpy().astype(np.int32) for n in lengths]
    states = [torch.randn(n, 4, HIDDEN, generator=draw) for n in lengths]
    return TrainBatch.pack(tokens, states, first or [0] * len(lengths), seed)


def objective(options, net=None):
    vocabulary = DraftVocabulary.by_frequency(np.arange(VOCAB)[::-1].copy(), 24)
    return EagleObjective(net or network(), parts(), vocabulary, options)
