"""Small GGUF files with random weights, and batches to run on them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from outpace.models import families
from outpace.models.architecture import MATRICES, DeltaNet, Mixture, StateSpace
from outpace.models.base import Batch
from outpace.models.native.model import NativeModel, load_native
from outpace.models.weights.gguf import TYPES

BLOCKS = {  # type -> (values, bytes) of a block
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "Q3_K": (256, 110), "IQ3_S": (256, 110),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "Q1_0": (128, 18),
}  # fmt: skip
IDS = {name: number for number, (name, _, _) in TYPES.items()}
# Where a block keeps its float16 scales: random bits there could be NaN or huge.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "Q3_K": [108], "IQ3_S": [0], "TQ1_0": [52],
    "TQ2_0": [64], "MXFP4": [], "Q1_0": [0],
}  # fmt: skip


def random_bytes(rng: np.random.Generator, kind: str, rows: int, cols: int, scale: float = 0.05) -> Any:
    """Raw bytes uint8 [rows, n] of a random matrix of type ``kind``: every bit pattern but for sane scales."""
    values, size = BLOCKS[kind]
    if kind in ("F32", "F16", "BF16"):
        w = rng.normal(0, scale, (rows, cols)).astype(np.float32)
        if kind == "F16":
            return w.astype(np.float16).view(np.uint8)
        if kind == "BF16":
            return (w.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return w.view(np.uint8)
    raw = rng.integers(0, 256, (rows * (cols // values), size), dtype=np.uint8)
    spread = {
        "Q8_0": 74, "Q6_K": 32 * 74, "Q5_K": 31 * 18, "Q4_K": 31 * 9, "Q5_0": 9, "Q5_1": 18, "IQ4_NL": 70,
        "IQ4_XS": 16 * 70, "Q3_K": 32 * 2, "IQ3_S": 16 * 8, "TQ1_0": 1, "TQ2_0": 1, "Q1_0": 1,
    }.get(kind, 5)  # fmt: skip
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(118, 124, len(raw))
    if kind == "TQ1_0":  # five of 243 values a byte, scaled to 256, as ggml writes them
        raw[:, :52] = (rng.integers(0, 243, (len(raw), 52)) * 256 + 242) // 243
    for at in HALVES[kind]:
        half = rng.normal(0, scale / spread, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = half.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def packed(raw: Any, kind: str, rows: int, cols: int, target: str = "keep", heads: int = 0) -> Any:
    """A matrix as kernels read it, of raw bytes of type ``kind``."""
    from outpace import _native

    return _native.pack(_native.Arena(), raw.reshape(-1), IDS[kind], rows, cols, heads, target, 2)


def dequantized(raw: Any, kind: str) -> Any:
    """float32 [rows, cols] by the gguf package, but for Q1_0, which it does not unpack: a scale, then signs."""
    if kind == "Q1_0":
        blocks = raw.reshape(-1, 18)
        signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
        return (signs * blocks[:, :2].copy().view(np.float16).astype(np.float32)).reshape(len(raw), -1)
    return gguf.quants.dequantize(raw, Type[kind])


class Tiny:
    """Writes models on demand and keeps the files until the end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Tiny:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def path(self, kind: str = "Q4_1", architecture: str = "llama", **sizes: int) -> Path:
        """A GGUF file; sizes: layers, hidden, heads, kv_heads, head_dim, inner, vocab, context, window.

        ``ffn_bias``, ``tokenizer``: with one; ``unpacked``: its matrices' values in float32.
        """
        name = "-".join([architecture, kind, *(f"{k}{v}" for k, v in sorted(sizes.items()))])
        path = Path(self._folder.name) / f"{name}.gguf"
        if not path.exists():
            write(path, kind, architecture, sizes)
        return path

    def load(
        self, kind: str = "Q4_1", architecture: str = "llama", sizes: dict[str, int] | None = None, **options: Any
    ) -> NativeModel:
        return load_native(self.path(kind, architecture, **(sizes or {})), **options)


def write(path: Path, kind: str, architecture: str, sizes: dict[str, int]) -> None:
    s = {
        "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 96, "vocab": 100,
        "context": 4096, "experts": 6, "used": 3, "expert_inner": 96,
    } | sizes  # fmt: skip
    inputs = max(32, BLOCKS[kind][0])  # width of Gemma 4's inputs for each layer
    single = architecture == "nemotron_h"  # scans, feeds, attends ...
    if single:
        s["layers"] = max(3, s["layers"])
    rng = np.random.default_rng(3)
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(s["layers"])
    out.add_context_length(s["context"])
    out.add_embedding_length(s["hidden"])
    feeds = [not single or i % 3 == 1 for i in range(s["layers"])]
    out.add_feed_forward_length([s["inner"] * each for each in feeds] if single else s["inner"])
    out.add_head_count(s["heads"])
    recurrent = ("lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next", "granitehybrid")
    attends = [i % 2 == 1 or architecture not in recurrent for i in range(s["layers"])]
    if single:
        attends = [i % 3 == 2 for i in range(s["layers"])]
    # Gemma 4's layers: every other one sees all, with heads twice as wide, one KV head and no matrix of values; with
    # more than three of them the last two read what others have stored.
    full = [architecture == "gemma4" and i % 2 == 1 for i in range(s["layers"])]
    shares = [architecture == "gemma4" and s["layers"] > 3 and i >= s["layers"] - 2 for i in range(s["layers"])]
    kv_heads = [1 if wide else s["kv_heads"] for wide in full]
    widths = [s["head_dim"] * (1 + wide) for wide in full]
    rank, plain, rotated, value = 96, 32, 16, 32  # of latent attention
    if architecture == "deepseek2":
        out.add_head_count_kv(1)
        out.add_key_length(rank + rotated)
        out.add_value_length(rank)
        out.add_kv_lora_rank(rank)
        out.add_q_lora_rank(64)
        out.add_key_length_mla(plain + rotated)
        out.add_value_length_mla(value)
        out.add_rope_dimension_count(rotated)
        out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        out.add_expert_group_count(2)
        out.add_expert_group_used_count(1)
    else:
        if "lfm2" in architecture or single or architecture == "granitehybrid":
            out.add_head_count_kv([s["kv_heads"] * each for each in attends])
        else:
            out.add_head_count_kv(kv_heads if any(full) else s["kv_heads"])
        for add in (out.add_key_length, out.add_value_length):
            add(2 * s["head_dim"] if any(full) else s["head_dim"])
    if architecture == "gemma4":
        out.add_key_length_swa(s["head_dim"])
        out.add_value_length_swa(s["head_dim"])
        out.add_sliding_window_pattern([not wide for wide in full])
        out.add_shared_kv_layers(sum(shares))
        out.add_embedding_length_per_layer_input(inputs)
        out.add_final_logit_softcapping(1.5)
        out.add_tensor("rope_freqs.weight", np.where(np.arange(s["head_dim"]) < 5, 1, 1e30).astype(np.float32))
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    if architecture in ("gemma2", "gemma3", "gemma4", "phi3", "gpt-oss"):
        out.add_sliding_window(s.get("window", 512))
    if architecture == "gemma2":  # near enough for both halves of tanh
        out.add_attn_logit_softcapping(0.5)
        out.add_final_logit_softcapping(1.5)

    if architecture == "mistral3":
        out.add_attn_temperature_scale(0.4)
        out.add_rope_scaling_orig_ctx_len(32)
    if s.get("tokenizer"):
        alphabet = [*map(chr, (*range(33, 127), *range(161, 173), *range(174, 256)))]
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("default")
        out.add_token_list(["</s>", "ab", *alphabet][: s["vocab"]])
        out.add_token_types([3] + [1] * (s["vocab"] - 1))
        out.add_token_merges(["a b"])
        out.add_eos_token_id(0)

    def matrix(name: str, rows: int, cols: int) -> None:
        raw = random_bytes(rng, kind, rows, cols, 1 / np.sqrt(cols))
        if s.get("unpacked"):
            out.add_tensor(name, dequantized(raw, kind))
        elif kind == "F32":
            out.add_tensor(name, raw.view(np.float32))
        elif kind == "F16":
            out.add_tensor(name, raw.view(np.float16))
        else:
            out.add_tensor(name, raw, raw_dtype=Type[kind])

    def stacked(name: str, rows: int, cols: int, count: int) -> None:
        raw = random_bytes(rng, kind, count * rows, cols, 1 / np.sqrt(cols)).reshape(count, rows, -1)
        plain = {"F32": np.float32, "F16": np.float16}.get(kind)
        if s.get("unpacked"):
            out.add_tensor(name, dequantized(raw.reshape(count * rows, -1), kind).reshape(count, rows, cols))
        elif plain is not None:
            out.add_tensor(name, raw.view(plain))
        else:
            out.add_tensor(name, raw, raw_dtype=Type[kind])

    def vector(name: str, n: int, around: float = 1.0) -> None:
        out.add_tensor(name, rng.normal(around, 0.1, n).astype(np.float32))

    family = families.of_gguf(architecture)
    assert family is not None
    mixture = None if family.mixture is None or family.mixture.optional else family.mixture
    if mixture is not None:
        out.add_expert_count(s["experts"])
        out.add_expert_used_count(s["used"])
        out.add_expert_feed_forward_length(s["expert_inner"])
    if family.conv is not None:
        out.add_shortconv_l_cache(3)
    if family.delta is not None or family.scan is not None:
        out.add_ssm_conv_kernel(4)
        out.add_ssm_state_size(16)
        out.add_ssm_group_count(2)
        out.add_ssm_time_step_rank(4)
        out.add_ssm_inner_size(4 * 32)
    if family.delta is not None:
        out.add_full_attention_interval(2)
    if architecture in ("glm4moe", "ernie4_5-moe", "lfm2moe", "deepseek2"):
        out.add_leading_dense_block_count(1)

    def experts(layer: int, mixture: Mixture) -> None:
        count, inner = s["experts"], s["expert_inner"]
        at = f"blk.{layer}."
        out.add_tensor(f"{at}ffn_gate_inp.weight", rng.normal(0, 0.3, (count, hidden)).astype(np.float32))
        joined = mixture.experts["gate"][0][0] == mixture.experts["up"][0][0]
        for part, rows, cols in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            if part != "up" or not joined:
                stacked(
                    f"{at}{mixture.experts[part][0][0]}", rows * (2 if joined and part == "gate" else 1), cols, count
                )
            if mixture.shared and mixture.flag is None:
                matrix(f"{at}{mixture.shared[part][0]}.weight", rows, cols)
        for places in mixture.norms.values():
            vector(f"{at}{places[0][0]}", hidden)
        for scale, n in ((mixture.router_scale, hidden), (mixture.expert_scale, count)):
            if scale is not None:
                vector(f"{at}{scale[0][0]}", n)
        if mixture.shared_gate:
            vector(f"{at}{mixture.shared_gate[0][0]}", hidden, 0.0)
        for part, n in (("router", count), ("gate", count * inner), ("up", count * inner), ("down", count * hidden)):
            if part in mixture.biases:
                values = rng.normal(0, 0.1, n).astype(np.float32)
                name = f"{at}{mixture.biases[part][0][0]}"
                out.add_tensor(name, values if part == "router" else values.reshape(count, -1))
        if family.sinks is not None:
            vector(f"{at}{family.sinks[0][0]}", s["heads"], 0.0)
        if mixture.choice_bias:
            vector(f"{at}{mixture.choice_bias[0][0]}", count, 0.0)

    def net(layer: int, delta: DeltaNet) -> None:
        at = f"blk.{layer}."
        for part, rows, cols in (("qkv", 192, hidden), ("z", 128, hidden), ("o", hidden, 128)):
            matrix(f"{at}{delta.matrices[part][0]}.weight", rows, cols)
        for name in {delta.matrices["a"][0]: None, delta.matrices["b"][0]: None}:
            rows = 8 if delta.matrices["a"] == delta.matrices["b"] else 4
            out.add_tensor(f"{at}{name}.weight", rng.normal(0, 0.3, (rows, hidden)).astype(np.float32))
        out.add_tensor(f"{at}{delta.convolution[0][0]}", rng.normal(0, 0.5, (192, 4)).astype(np.float32))
        for places, n, around in ((delta.decay, 4, -0.5), (delta.dt_bias, 4, 0.0), (delta.norm, 32, 1.0)):
            vector(f"{at}{places[0][0]}", n, around)

    def scan(layer: int, names: StateSpace) -> None:
        at = f"blk.{layer}."
        matrix(f"{at}{names.into[0]}.weight", 128 + 128 + 2 * 2 * 16 + 4, hidden)
        matrix(f"{at}{names.o[0]}.weight", hidden, 128)
        out.add_tensor(f"{at}{names.convolution[0][0]}", rng.normal(0, 0.5, (192, 4)).astype(np.float32))
        for places, n, around in (
            (names.convolution_bias, 192, 0.0), (names.decay, 4, -0.5), (names.dt_bias, 4, 0.0), (names.skip, 4, 1.0),
        ):  # fmt: skip
            vector(f"{at}{places[0][0]}", n, around)
        if names.normed is None:
            out.add_tensor(f"{at}{names.norm[0][0]}", rng.normal(1, 0.1, (2, 64)).astype(np.float32))

    hidden = s["hidden"]
    matrix("token_embd.weight", s["vocab"], hidden)
    vector(f"{family.outer['final_norm'][0]}.weight", hidden)
    if family.inputs:
        matrix("per_layer_token_embd.weight", s["vocab"], s["layers"] * inputs)
        matrix("per_layer_model_proj.weight", s["layers"] * inputs, hidden)
        vector("per_layer_proj_norm.weight", inputs)
    for i in range(s["layers"]):
        q, kv = s["heads"] * widths[i], kv_heads[i] * widths[i]
        sizes = {
            "q": 2 * q if family.gated else q, "k": kv, "v": kv, "o": hidden, "gate": s["inner"], "up": s["inner"],
            "down": hidden,
        }  # fmt: skip
        norms = {"q_norm": widths[i], "k_norm": widths[i]}
        if family.norms_over_heads:
            norms = {"q_norm": q, "k_norm": kv}
        missing = ("k", "v", "k_norm") if shares[i] else ("v",) if full[i] else ()
        fused: dict[str, list[str]] = {}
        columns = {"o": q, "down": s["inner"]}
        if family.latent is not None:
            sizes |= {"q": s["heads"] * (plain + rotated), "k": rank + rotated}
            columns |= {"q": 64, "o": s["heads"] * value}
            norms = {"q_norm": 64, "k_norm": rank}
        dense = mixture is None or (i == 0 and mixture.first is not None)
        fed = (dense or (mixture is not None and mixture.flag is not None)) and feeds[i]
        parts = [part for part in family.layer if part in MATRICES and (fed or part in ("q", "k", "v", "o"))]
        parts = [part for part in parts if part not in missing]
        for part in parts if attends[i] else [part for part in parts if part not in ("q", "k", "v", "o")]:
            fused.setdefault(family.layer[part][0], []).append(part)
        for name, parts in fused.items():
            matrix(f"blk.{i}.{name}.weight", sum(sizes[part] for part in parts), columns.get(parts[0], hidden))
        for part in ("attn_norm", "ffn_norm", "q_norm", "k_norm", "post_attn_norm", "post_ffn_norm"):
            there = part not in missing and (part == "attn_norm" or not single)
            if part in family.layer and there and (attends[i] or not part.startswith(("q_", "k_"))):
                ending = "" if part in family.bare else ".weight"
                vector(f"blk.{i}.{family.layer[part][0]}{ending}", norms.get(part, hidden))
        if family.inputs:
            matrix(f"blk.{i}.inp_gate.weight", inputs, hidden)
            matrix(f"blk.{i}.proj.weight", hidden, inputs)
            vector(f"blk.{i}.post_norm.weight", hidden)
        if family.output_scale is not None:
            vector(f"blk.{i}.{family.output_scale[0][0]}", 1)
        if mixture is not None and not dense:
            experts(i, mixture)
        if family.latent is not None:
            matrix(f"blk.{i}.{family.latent.q_down[0]}.weight", 64, hidden)
            stacked(f"blk.{i}.{family.latent.k_up}.weight", rank, plain, s["heads"])
            stacked(f"blk.{i}.{family.latent.v_up}.weight", value, rank, s["heads"])
        if family.delta is not None and not attends[i]:
            net(i, family.delta)
        if family.scan is not None and (family.scan.beside or not attends[i]) and not (single and feeds[i]):
            scan(i, family.scan)
        if family.conv is not None and not attends[i]:
            matrix(f"blk.{i}.{family.conv.matrices['in'][0]}.weight", 3 * hidden, hidden)
            matrix(f"blk.{i}.{family.conv.matrices['o'][0]}.weight", hidden, hidden)
            values = rng.normal(0, 0.5, (hidden, 3)).astype(np.float32)
            out.add_tensor(f"blk.{i}.{family.conv.convolution[0][0]}", values)
        if architecture == "gpt-oss":
            vector(f"blk.{i}.attn_output.bias", hidden, 0.0)
        if architecture in ("qwen2", "qwen2moe", "gpt-oss"):
            vector(f"blk.{i}.attn_q.bias", q, 0.0)
            vector(f"blk.{i}.attn_k.bias", kv, 0.0)
            vector(f"blk.{i}.attn_v.bias", kv, 0.0)
        if s.get("ffn_bias"):
            vector(f"blk.{i}.ffn_down.bias", hidden, 0.0)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Foreign:
    """A rule that the runtime has never heard of: it forbids even tokens."""

    def start(self, prompt: Any) -> None: ...

    def advance(self, state: None, token: int) -> None: ...

    def apply(self, state: None, logits: Any) -> None:
        logits[::2] = -np.inf


class Grammar:
    """A rule with masks: what it allows, about ``share`` of all tokens, follows from the tokens so far."""

    def __init__(self, vocab: int, share: float) -> None:
        self.vocab, self.share = vocab, share

    def start(self, prompt: Any) -> tuple[int, ...]:
        return tuple(int(t) for t in prompt)

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def allowed(self, state: tuple[int, ...]) -> Any:
        return np.random.default_rng(state).random(self.vocab) < self.share

    def apply(self, state: tuple[int, ...], logits: Any) -> None:
        logits[~self.allowed(state)] = -np.inf

    def mask(self, state: tuple[int, ...]) -> Any:
        bits = np.packbits(self.allowed(state), bitorder="little")
        return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


def feed(
    model: NativeModel, row: int, tokens: Any, chunk: int | None = None, parents: Sequence[int] | None = None
) -> Any:
    """Logits float32 [n, V] of ``tokens`` [n] run on ``row`` in chunks."""
    tokens = np.asarray(tokens, np.int32)
    pieces = []
    for at in range(0, len(tokens), chunk or len(tokens)):
        part = tokens[at : at + (chunk or len(tokens))]
        tree = None if parents is None else [np.asarray(parents, np.int32)]
        batch = Batch.pack([row], [part], [model.kv.length(row)], [True], tree)
        pieces.append(model.forward(batch).logits(np.arange(len(part), dtype=np.int32)))
    return np.concatenate(pieces)


def check_rows(held: Any, rows: Iterable[int]) -> None:
    """A drafter's network has KV for ``rows`` alone; its other memory is poisoned, so that nothing reads it unseen."""
    held.kv.check(list(rows))
    held.kv.model.kv_poison()


def release_all(held: Any, rows: Iterable[int]) -> None:
    """``rows`` are let go, after which it holds nothing."""
    for row in list(rows):
        held.kv.release(row)
    assert held.kv.bytes == 0
