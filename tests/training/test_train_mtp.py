"""``outpace train mtp``: the target comes out with a layer of its own that drafts, as transformers computes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpLayer

from outpace import Engine, SamplingParams
from outpace.drafters.learned.native import NativeMtp
from outpace.errors import ParameterError
from outpace.models.base import Batch
from outpace.models.load import resolve
from outpace.models.native.model import load_native
from outpace.training.objectives.mtp import MtpNetwork, unroll
from outpace.training.setup import shaped_as
from outpace.training.target import TargetWeights
from tests.training.commands import outpace
from tests.training.conftest import VOCAB

OPTIONS = (
    "--tokens", 96, "--longest", 64, "--held-out", 0.2, "--judged", 40, "--evaluate", 15, "--warm-up", 2, "--depth", 3,
    "--threads", 1, "--lr", 3e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 3.5 with random weights, and the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def trained(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the target itself says is learned."""
    folder = tmp_path_factory.mktemp("mtp")
    out, prompts = folder / "out", folder / "prompts.txt"
    prompts.write_text("".join(f"{'abcdefgh'[i % 8] * 3}{i}\n" for i in range(24)))
    given = ("--prompts", prompts, "--backend", "native", "--max-tokens", 40, "-T", 0, "--threads", 1)
    outpace("train", "data", "--model", hybrid, "--out", folder / "data", *given)
    said = outpace("train", "mtp", "--data", folder / "data", "--out", out, "--steps", 30, *OPTIONS, "--json")
    return out, json.loads(said)


def test_the_model_drafts_with_it(hybrid: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    out, said = trained
    rows = json.loads((out / "curve.json").read_text())
    assert (said["steps"], len(rows)) == (30, 2)
    prompt, params = list(range(3, 20)), SamplingParams(max_tokens=24)
    with Engine.load(str(hybrid), backend="native", drafter="none", threads=1) as engine:
        plain = engine.generate(prompt, params)
    with Engine.load(str(out), backend="native", drafter="mtp", size=3, threads=1) as engine:
        drafted = engine.generate(prompt, params)
    assert drafted.token_ids == plain.token_ids
    assert said["tokens_per_step"] > 2
    assert drafted.stats.accepted > 10


@torch.no_grad()
def test_transformers_and_the_runtime_compute_what_was_trained(
    hybrid: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    """A draft's first entries and the ones that read its own output."""
    out, _ = trained
    weights = TargetWeights(resolve(str(out)))
    target, parts, stored = weights.decoder, weights.parts(), load_file(out / "mtp.safetensors")
    own = {name.removeprefix("mtp."): values for name, values in stored.items()}
    shape = shaped_as(weights, 1, qk_norm=True)
    network = MtpNetwork(target, shape)
    network.load_state_dict({name: each + 1 if "norm" in name else each for name, each in own.items()})
    module = Qwen3_5ForCausalLM.from_pretrained(out).eval()
    assert shape.rope_theta == module.config.rope_parameters["rope_theta"], "though a part of each head turns"
    last = module.model.layers[-1]
    layer = MtpLayer(module.config, type(last), type(last.input_layernorm), 3).eval()
    renamed = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    layer.load_state_dict(
        {
            f"mtp_block.{name.removeprefix('layers.0.')}"
            if name.startswith("layers")
            else f"{renamed[name.removesuffix('.weight')]}.weight": values
            for name, values in own.items()
        }
    )
    tokens, n = torch.arange(20) % 40 + 1, 20
    hidden = module.model(tokens[None]).last_hidden_state[0]
    anchors = [torch.arange(n - 1), torch.arange(n - 2)]
    found = unroll(network, hidden, parts.embed(tokens), torch.arange(n), (0, n), anchors)

    def theirs(ids: Any, read: Any) -> Any:
        m = len(ids)
        embedded, positions = module.model.embed_tokens(ids)[None], torch.arange(m)[None]
        mask = torch.full((m, m), -torch.inf).triu(1)[None, None]
        rotations = module.model.rotary_emb(embedded, position_ids=positions)
        return layer(embedded, read[None], rotations, mask, positions, None)[0]

    first = theirs(tokens[1:], hidden[:-1])
    torch.testing.assert_close(found[0], first, atol=1e-4, rtol=1e-4)
    for at in (4, 17):  # of an anchor: the real entries up to it, then its own output
        second = theirs(tokens[1 : at + 3], torch.cat([hidden[: at + 1], first[at : at + 1]]))[-1]
        torch.testing.assert_close(found[1][at], second, atol=1e-4, rtol=1e-4)
    model = load_native(out, dtype="float32", kv_dtype="float32", threads=1)
    batch = Batch.pack([model.kv.alloc()], [tokens.numpy().astype(np.int32)], [0], [False], hidden_layers=(3,))
    before = model.forward(batch).hidden_states(np.arange(n - 1, dtype=np.int32)).numpy()
    ours, _ = NativeMtp(model).extend([0], [tokens[1:].numpy().astype(np.int32)], [before])
    torch.testing.assert_close(torch.from_numpy(ours[0]), module.lm_head(first[-1]), atol=1e-3, rtol=1e-3)


def test_other_targets_are_refused(answers: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"of the family llama: mtp is trained for folders of dense Qwen 3\.5"):
        outpace("train", "mtp", "--data", answers, "--out", tmp_path / "out", "--steps", 2, *OPTIONS)
