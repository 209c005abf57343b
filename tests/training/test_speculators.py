"""Our block-parallel network against speculators' own, where that is installed: the same weights, the same logits."""

from __future__ import annotations

import pytest
import torch

from outpace.drafters.learned.configs import tensor_shapes
from outpace.drafters.learned.networks.parallel import ParallelNetwork
from tests.training import small


def test_logits_and_confidence_are_those_of_speculators() -> None:
    pytest.importorskip("speculators")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    config, length = small.parallel_config(), 30
    its, slots = config.decoder, config.block
    layer = Qwen3Config(
        vocab_size=config.vocab, hidden_size=its.hidden, intermediate_size=its.ffn, num_hidden_layers=its.layers,
        num_attention_heads=its.heads, num_key_value_heads=its.kv_heads, head_dim=its.head_dim, rms_norm_eps=its.eps,
        rope_parameters={"rope_type": "default", "rope_theta": its.rope_theta}, attention_bias=False,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=slots)
    theirs = DSparkDraftModel(
        DSparkSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config.draft_vocab,
            block_size=slots,
            aux_hidden_state_layer_ids=[tap + 1 for tap in config.taps],
            mask_token_id=config.mask_token,
            markov_rank=config.markov_rank,
            speculators_config=SpeculatorsConfig(
                algorithm="dspark",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
    ).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * 0.2)
    ours = ParallelNetwork(config)
    ours.load_state_dict({name: theirs.state_dict()[name] for name in tensor_shapes(config)})
    tokens = torch.randint(config.vocab, (length,), generator=draw)
    taps = torch.randn(length, len(config.taps), its.hidden, generator=draw)
    blocks = length - 1 - slots  # one at each position but the first and the last few
    with torch.no_grad():
        normed, logits, _, _, index = theirs._backbone_forward(
            taps.flatten(1)[None], tokens[None], (torch.arange(length) > 0).float()[None],
            torch.zeros(1, length, its.hidden), torch.zeros(1, length, dtype=torch.long), None, max_anchors=blocks,
        )  # fmt: skip
        anchors, normed = index.view(blocks, slots)[:, 0], normed.view(blocks, slots, -1)
        before = tokens[index].view(blocks, slots)
        bias = theirs.markov_head.block_bias(prev_token_ids=before, hidden_states=normed)
        sure = theirs.confidence_head(torch.cat((normed, theirs.markov_head.prev_embeddings(before)), -1))
        embedded = theirs.embed_tokens.weight[ours.inputs(tokens[anchors])]
        own = ours.blocks(embedded, anchors, [ours.context(taps, torch.arange(length))], [anchors])
        assert ours.markov_head is not None
        mine = own @ theirs.lm_head.weight.T + ours.markov_head.markov_w2(ours.before(before))
        torch.testing.assert_close(mine, logits.view(blocks, slots, -1) + bias, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.confidence(own, ours.before(before)), sure, atol=1e-5, rtol=1e-4)
