"""Gemma 4's assistant: a chain is what transformers' own forwards give, and answers are plain decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_architectures import COMMON, FAMILIES, saved
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from outpace import Engine
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.learned.assistant import NativeAssistant
from outpace.drafters.learned.drafter import Predicted
from outpace.drafters.registry import build, parse
from outpace.errors import DrafterError, ModelError
from outpace.models.base import Batch
from outpace.models.native.model import NativeModel, load_native
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams
from tests.driving import finished
from tests.exported import add_gemma4, export

TARGETS = ("gemma4", "gemma4-inputs")  # each full layer's values are its keys; layers that share


@pytest.fixture(autouse=True)
def _sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses a decoder all of whose layers share, and stores nothing for one where none does."""
    own = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config: Any) -> list[str | None]:
        kinds, shared = config.layer_types, config.num_kv_shared_layers
        if shared not in (0, len(kinds)):
            return own(config)  # type: ignore[no-any-return]
        last = {kind: i for i, kind in enumerate(kinds)}
        return ["reuse" if shared else "store" if last[kind] == i else None for i, kind in enumerate(kinds)]

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))


def pair(name: str, folder: Path, **more: Any) -> tuple[Any, Any]:
    """A tiny target and an assistant for it, in folders below ``folder``."""
    target = saved(name, folder / "target")
    c, given = target.config, COMMON | FAMILIES[name][1]
    torch.manual_seed(5)
    text = Gemma4TextConfig(
        vocab_size=c.vocab_size, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=12, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=given.get("num_global_key_value_heads"),
        attention_k_eq_v=given.get("attention_k_eq_v", False),
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], num_kv_shared_layers=3,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, max_position_embeddings=512,
        rope_parameters=c.rope_parameters,
    )  # fmt: skip
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=c.hidden_size, **more)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
        if assistant.masked_embedding is not None:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(c.vocab_size))
    assistant.save_pretrained(folder / "assistant")
    return target, assistant


def as_gguf(assistant: Any, path: Path, kind: str = "F32") -> Path:
    """What llama.cpp's converter writes of it (conversion/gemma.py, Gemma4AssistantModel): no groups of tokens."""
    text, name = assistant.config.get_text_config(), "gemma4-assistant"
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_rope_freq_base(text.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(text.sliding_window)
    add_gemma4(writer, text)
    writer.add_uint32(f"{name}.embedding_length_out", assistant.config.backbone_hidden_size)
    writer.add_nextn_predict_layers(text.num_hidden_layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, text.num_hidden_layers)
    to = gguf.GGMLQuantizationType[kind]
    for full, values in assistant.state_dict().items():
        if full == "lm_head.weight" or "masked_embedding" in full:
            continue
        full = f"{full}.weight" if full.endswith("layer_scalar") else full
        place = f"nextn.{full}" if "_projection" in full else names.get_name(full, try_suffixes=(".weight",))
        if values.dim() == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(place, gguf.quants.quantize(values.numpy(), to), raw_dtype=to)
        else:
            writer.add_tensor(place, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.inference_mode()
def theirs(target: Any, assistant: Any, text: Any, steps: int) -> list[Any]:
    """Logits of a chain behind a text whose last token is pending."""
    ids = torch.from_numpy(np.asarray(text, np.int64))[None]
    out = target.model(ids[:, :-1], return_shared_kv_states=True, use_cache=False)
    hidden, last, found = out.last_hidden_state[:, -1:], ids[:, -1:], []
    at = torch.tensor([[len(text) - 1]])
    for _ in range(steps):
        read = torch.cat([target.model.embed_tokens(last), hidden], -1)
        made = assistant(inputs_embeds=read, position_ids=at, shared_kv_states=out.shared_kv_states, use_cache=False)
        last, hidden = made.logits.argmax(-1), made.last_hidden_state
        found.append(made.logits[0, 0].numpy())
    return found


@pytest.mark.parametrize(
    ("name", "more"),
    [(TARGETS[0], {}), (TARGETS[1], {}), (TARGETS[0], {"use_ordered_embeddings": True, "num_centroids": 12,
                                                      "centroid_intermediate_top_k": 4})],
)  # fmt: skip
def test_a_chain_is_transformers(name: str, more: dict[str, Any], tmp_path: Path, rng: np.random.Generator) -> None:
    target, assistant = pair(name, tmp_path, **more)
    model = load_native(tmp_path / "target", dtype="float32", kv_dtype="float32", threads=2)
    network = NativeAssistant(model, tmp_path / "assistant")
    for length in (2, 7, 40):  # within the window and beyond
        text = rng.integers(0, 120, length).astype(np.int32)
        row = model.kv.alloc()
        batch = Batch.pack([row], [text[:-1]], [0], [False], hidden_layers=(model.info.layers - 1,))
        given: Any = model.forward(batch).hidden_states(np.array([length - 2], np.int32)).numpy()
        token = text[-1:]
        for expected in theirs(target, assistant, text, 4):
            logits, (given,) = network.extend([row], [token], [given])
            kept = np.isfinite(logits[0])
            assert kept.sum() == (40 if more else 120)
            assert np.abs(logits[0] - expected)[kept].max() < 2e-3 * np.abs(expected).max()
            assert more == {} or (expected[~kept] < expected[kept].min()).all()
            token = np.array([int(expected.argmax())], np.int32)
            assert isinstance(given, Predicted)
        assert model.kv.length(row) == length - 1
        model.kv.free(row)
    network.close()


@pytest.mark.parametrize("name", TARGETS)
def test_a_gguf_file_is_the_folder(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    _, assistant = pair(name, tmp_path)
    model = load_native(tmp_path / "target", threads=2)
    text = rng.integers(0, 120, 30).astype(np.int32)
    row = model.kv.alloc()
    batch = Batch.pack([row], [text[:-1]], [0], [False], hidden_layers=(model.info.layers - 1,))
    first: Any = model.forward(batch).hidden_states(np.array([28], np.int32)).numpy()
    found = []
    for path in (tmp_path / "assistant", as_gguf(assistant, tmp_path / "a.gguf")):
        network, token, given = NativeAssistant(model, path), text[-1:], first
        found.append([])
        for _ in range(4):
            logits, (given,) = network.extend([row], [token], [given])
            token = logits.argmax(1).astype(np.int32)
            found[-1].append(logits)
    assert np.array_equal(*found)


def drafting(target: Path, spec: str) -> tuple[NativeModel, Drafter]:
    model = load_native(target, threads=2)
    return model, build(parse(spec), DraftContext(model, None, LoadOptions(), 8))


def test_drafted_answers_are_plain_decodings(tmp_path: Path) -> None:
    _, assistant = pair("gemma4", tmp_path)
    as_gguf(assistant, tmp_path / "a.gguf", "Q8_0")
    found = []
    for spec, size in (
        ("none", 0), ("drafter:P", 1), ("drafter:P", "auto"), ("suffix+drafter:P", 6), ("drafter:G", 4),
    ):  # fmt: skip
        spec = spec.replace("P", str(tmp_path / "assistant")).replace("G", str(tmp_path / "a.gguf"))
        model, drafter = drafting(tmp_path / "target", spec)
        with Engine(model, drafter=drafter, size=size, max_rows=3, prefill_chunk=17) as engine:
            results = {}
            for again in (False, True):  # then behind prompts that are still there
                for i, prompt in enumerate(([1, 2, 3], [7], [5, 1, 5, 2] * 9, [9, 8] * 30)):
                    params = SamplingParams(max_tokens=30, temperature=0.8 * (i % 2), seed=i, n=1 + i // 2)
                    engine.add(prompt, params.with_(allowed_tokens=tuple(range(4)) if i == 2 else None))
                results |= finished(engine)
                assert not again or engine.stats.reused_tokens > 0
        found.append([result.token_ids for result in results.values()])
        assert size in (0, "auto") or sum(result.stats.drafted for result in results.values()) > 100
    assert all(each == found[0] for each in found)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    pair("gemma4", tmp_path)
    other = export(saved("llama", tmp_path / "llama"), "llama", tmp_path / "other.gguf")
    saved("gemma4", tmp_path / "wider", hidden_size=96)
    for target, spec, problem in (
        ("llama", "drafter:P", "the target has no layers of a kind whose keys and values it reads"),
        ("wider", "drafter:P", "hidden states of 64 numbers and 120 tokens, and .* has 96 and 120: use its own"),
        ("target", "drafter:P,branch=2", "the assistant drafts chains: leave branch out"),
        ("target", "drafter:G", "is not a folder: .*of drafters in GGUF files Gemma 4's assistant alone is read"),
    ):
        spec = spec.replace("P", str(tmp_path / "assistant")).replace("G", str(other))
        with pytest.raises((DrafterError, ModelError), match=problem):
            drafting(tmp_path / target, spec)
