"""Writes the checkpoints beside this file, with what speculators itself computes from them: run where it is installed.

    pip install speculators==0.9.0; python tests/recorded/record_speculators.py

Needs nothing of Outpace. ``seen.json`` has inputs and outputs: see ``of_eagle`` and ``of_dspark``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

HERE = Path(__file__).parent
TOKENS, VOCAB, DRAFT, HIDDEN, LAYERS = 9, 32, 12, 8, 3
LAYER = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip


def layer(kind: type[PretrainedConfig], layers: int) -> PretrainedConfig:
    config = kind(**LAYER, num_hidden_layers=layers)
    config._attn_implementation = "eager"  # the flexible one does not run everywhere
    return config


def common(algorithm: str) -> dict[str, Any]:
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    method = GreedyTokenProposalConfig(speculative_tokens=3)
    described = SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
    )
    return {"draft_vocab_size": DRAFT, "speculators_config": described}


def fill(model: Any) -> None:
    """Random numbers that bfloat16 holds exactly, and a random vocabulary of the draft."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.5).bfloat16().float())
    ids = torch.randperm(VOCAB)[:DRAFT].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(DRAFT))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [1, n, 3 h] and tokens [1, n]."""
    return torch.randn(1, TOKENS, LAYERS * HIDDEN), torch.randint(VOCAB, (1, TOKENS))


def of_eagle(model: Eagle3DraftModel, hidden_states: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """``logits`` [n][D] of real entries, ``predicted`` [n - 1][D] of a predicted one after each but the last."""
    logits: list[Any] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: logits.append(out[0].tolist()))
    with torch.no_grad():
        model(hidden_states, tokens, torch.zeros_like(tokens), ttt_steps=2)
    hook.remove()
    given = {"hidden_states": hidden_states[0].view(TOKENS, LAYERS, HIDDEN).tolist(), "tokens": tokens[0].tolist()}
    return {**given, "logits": logits[0], "predicted": logits[1][:-1]}


def of_dspark(
    model: DSparkDraftModel, hidden_states: torch.Tensor, tokens: torch.Tensor, anchors: int = 3
) -> dict[str, Any]:
    """Of each anchor, its block's normed ``hidden``, ``logits`` and ``bias`` [block][D], ``sure`` [block].

    ``before``: the token before each place, of which the bias and ``sure`` know.
    """
    ones = torch.ones_like(tokens)
    with torch.no_grad():
        hidden, logits, _, _, indices = model._backbone_forward(
            hidden_states, tokens, ones, torch.zeros(1, TOKENS, HIDDEN), torch.zeros_like(tokens), max_anchors=anchors
        )
        block = model.block_size
        before = tokens[0, indices].view(anchors, block)
        hidden = hidden.view(anchors, block, -1)
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        read = torch.cat([hidden, model.markov_head.prev_embeddings(before)], -1)
        sure = model.confidence_head(read)
    return {
        "hidden_states": hidden_states[0].view(TOKENS, LAYERS, HIDDEN).tolist(), "tokens": tokens[0].tolist(),
        "anchors": indices.view(anchors, block)[:, 0].tolist(), "before": before.tolist(), "hidden": hidden.tolist(),
        "logits": logits.view(anchors, block, -1).tolist(), "bias": bias.tolist(), "sure": sure.tolist(),
    }  # fmt: skip


def save(name: str, model: Any, seen: dict[str, Any]) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.bfloat16().save_pretrained(str(folder))
    (folder / "config.py").unlink()  # its own code, which it copies
    rounded = json.loads(json.dumps(seen), parse_float=lambda text: round(float(text), 6))
    (folder / "seen.json").write_text(json.dumps(rounded, separators=(",", ":")) + "\n")


def main() -> None:
    torch.manual_seed(11)
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    flags: dict[str, tuple[type[PretrainedConfig], dict[str, bool]]] = {
        "eagle-3.1": (LlamaConfig, {"fc_norm": True, "norm_output": True}),
        "eagle-qwen3": (Qwen3Config, {"norm_before_fc": True, "norm_before_residual": True}),
    }
    for name, (kind, its) in flags.items():
        config = Eagle3SpeculatorConfig(transformer_layer_config=layer(kind, 1), **common("eagle3"), **its, **ids)
        model = Eagle3DraftModel(config).eval()
        fill(model)
        save(name, model, of_eagle(model, *inputs()))
    spark = DSparkSpeculatorConfig(
        transformer_layer_config=layer(Qwen3Config, 2), **common("dspark"), aux_hidden_state_layer_ids=[1, 3, 5],
        block_size=4, mask_token_id=3, markov_rank=4,
    )  # fmt: skip
    drafter = DSparkDraftModel(spark).eval()
    fill(drafter)
    seen = of_dspark(drafter, *inputs())
    # It leaves the embedding to the target, so the record has it.
    seen["embed_tokens.weight"] = drafter.embed_tokens.weight.tolist()
    save("dspark", drafter, seen)


if __name__ == "__main__":
    main()
