"""Small valid inputs of every kind, made by code: what mutations start from. A seed is files by name."""

from __future__ import annotations

import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.config import Config, Decoder, EagleConfig
from outpace.drafters.lookup import datastore
from outpace.models.weights.gguf import TYPES
from tests import learned

RECORDED = Path(__file__).parents[1] / "recorded"

Files = dict[str, bytes]

_HEADS, _KV_HEADS, _WIDTH, _INNER = 2, 1, 16, 32
_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
_WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "\u0120", "\u0120a", "<|im_end|>", "\u2581", "\u2581a", "<0x41>"]
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    """Type and value; the type follows from Python's."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if isinstance(value[0], list):
        return struct.pack("<IIQ", 9, 9, len(value)) + b"".join(_value(inner)[4:] for inner in value)
    form, kind = ("f", 6) if isinstance(value[0], float) else ("i", 5)
    return struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value)


def gguf_file(metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A GGUF file, version 3. ``tensors``: type, shape in numpy's order, bytes."""
    alignment = metadata.get("general.alignment", 32)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", _NUMBERS[kind], len(body))
        body += data + bytes(-len(data) % alignment)
    return head + bytes(-len(head) % alignment) + body


def _matrix(rng: np.random.Generator, kind: str, rows: int, cols: int) -> tuple[str, tuple[int, ...], bytes]:
    if kind == "F32":
        return kind, (rows, cols), rng.normal(0, 0.2, (rows, cols)).astype("<f4").tobytes()
    _, values, size = TYPES[_NUMBERS[kind]]
    raw = rng.integers(0, 256, (rows * cols // values, size), dtype=np.uint8)
    raw[:, 1::size] = 0x20  # the scale's upper byte: a sane one
    return kind, (rows, cols), raw.tobytes()


def _decoder(
    architecture: str, kind: str, hidden: int, biases: bool, norms: bool
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    rng = np.random.default_rng(5)
    facts = {
        "block_count": 1, "context_length": 64, "embedding_length": hidden, "feed_forward_length": _INNER,
        "attention.head_count": _HEADS, "attention.head_count_kv": _KV_HEADS, "attention.key_length": _WIDTH,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    }  # fmt: skip
    if architecture == "gemma3":
        facts["attention.sliding_window"] = 8
    metadata: dict[str, Any] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in facts.items()}
    q, kv = _HEADS * _WIDTH, _KV_HEADS * _WIDTH

    def vector(n: int) -> tuple[str, tuple[int, ...], bytes]:
        return "F32", (n,), rng.normal(1, 0.1, n).astype("<f4").tobytes()

    shapes = {
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q),
        "ffn_gate": (_INNER, hidden), "ffn_up": (_INNER, hidden), "ffn_down": (hidden, _INNER),
    }  # fmt: skip
    tensors = {"token_embd.weight": _matrix(rng, kind, len(_WORDS), hidden), "output_norm.weight": vector(hidden)}
    tensors |= {f"blk.0.{name}.weight": _matrix(rng, kind, *shape) for name, shape in shapes.items()}
    tensors |= {f"blk.0.{name}.weight": vector(hidden) for name in ("attn_norm", "ffn_norm")}
    if biases:
        tensors |= {f"blk.0.attn_{n}.bias": vector(size) for n, size in (("q", q), ("k", kv), ("v", kv))}
    if norms:
        tensors |= {f"blk.0.attn_{n}_norm.weight": vector(_WIDTH) for n in ("q", "k")}
    if architecture == "gemma3":
        tensors |= {f"blk.0.post_{n}_norm.weight": vector(hidden) for n in ("attention", "ffw")}
    return metadata, tensors


def _byte_level(pre: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": _WORDS,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 3, 1, 1, 6],
        "tokenizer.ggml.merges": ["a b", "\u0120 a"], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": _TEMPLATE,
    }  # fmt: skip


def _pieces() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": _WORDS,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 4, 1, 1, 6],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(_WORDS))], "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_space_prefix": True,
    }  # fmt: skip


@cache
def gguf() -> dict[str, Files]:
    """Models that the native runtime serves, with tokenizers of both families, and one of many value types."""
    kinds = {
        "llama-Q4_1": (_decoder("llama", "Q4_1", 32, False, False), _byte_level("llama-bpe")),
        "qwen2-Q8_0": (_decoder("qwen2", "Q8_0", 64, True, False), _byte_level("qwen2")),
        "qwen3-F32": (_decoder("qwen3", "F32", 16, False, True), _byte_level("default")),
        "gemma3-Q4_0": (_decoder("gemma3", "Q4_0", 32, False, True), _pieces()),
        "llama-F32-pieces": (_decoder("llama", "F32", 16, False, False), _pieces()),
    }
    files = {name: {"model.gguf": gguf_file(meta | words, tensors)} for name, ((meta, tensors), words) in kinds.items()}
    odd = {"general.alignment": 64, "x.nested": [[1, 2], [3]], "x.float": 1.5, "x.flag": True, "x.text": "na\u00efve"}
    meta = {"general.architecture": "llama", "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    ones = ("F32", (8,), np.ones(8, "<f4").tobytes())
    odd_tensors = {"rope_freqs.weight": ones, "half": ("F16", (3, 5), bytes(30)), "brain": ("BF16", (4,), bytes(8))}
    return files | {"values": {"model.gguf": gguf_file(meta | odd, odd_tensors)}}


def safetensors_file(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _folder(named: str, kind: str, shards: int) -> Files:
    rng = np.random.default_rng(6)
    hidden, vocab = 16, 12
    q, kv = _HEADS * _WIDTH, _KV_HEADS * _WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocab, hidden), "norm": (hidden,),
        **{f"layers.0.self_attn.{n}_proj": (rows, hidden) for n, rows in (("q", q), ("k", kv), ("v", kv))},
        "layers.0.self_attn.o_proj": (hidden, q), "layers.0.mlp.gate_proj": (_INNER, hidden),
        "layers.0.mlp.up_proj": (_INNER, hidden), "layers.0.mlp.down_proj": (hidden, _INNER),
        "layers.0.input_layernorm": (hidden,), "layers.0.post_attention_layernorm": (hidden,),
    }  # fmt: skip
    dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind]
    tensors = {
        f"model.{name}.weight": (kind, shape, rng.normal(0.5, 0.2, shape).astype(dtype).tobytes())
        for name, shape in shapes.items()
    }
    if named.startswith("Qwen2"):
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            zeros = (kind, (rows,), np.zeros(rows, dtype).tobytes())
            tensors[f"model.layers.0.self_attn.{part}_proj.bias"] = zeros
    config = {
        "architectures": [named], "vocab_size": vocab, "hidden_size": hidden, "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS, "head_dim": _WIDTH, "num_hidden_layers": 1, "intermediate_size": _INNER,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": True, "hidden_act": "silu",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
    }  # fmt: skip
    files = {"config.json": json.dumps(config).encode()}
    if shards == 1:
        return files | {"model.safetensors": safetensors_file(tensors)}
    names = list(tensors)
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        files[file] = safetensors_file({name: tensors[name] for name in names[i::shards]})
        index |= dict.fromkeys(names[i::shards], file)
    return files | {"model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": index}).encode()}


@cache
def folders() -> dict[str, Files]:
    """Folders of config.json and safetensors files that the native runtime serves."""
    return {
        "llama-F32": _folder("LlamaForCausalLM", "F32", 1),
        "mistral-F16": _folder("MistralForCausalLM", "F16", 1),
        "qwen2-BF16-shards": _folder("Qwen2ForCausalLM", "BF16", 2),
    }


@cache
def datastores() -> dict[str, Files]:
    """Datastores of one segment and of several, of tokens 0 to 6."""
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, 7, int(n)).tolist() for n in (40, 25, 3)]
    made: dict[str, Files] = {}
    for name, segment in (("one", 1000), ("several", 30)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            datastore.build(path, texts, vocabulary="v", model="toy", segment=segment)
            made[name] = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    return made


@cache
def drafters() -> dict[str, Files]:
    """Learned drafters: as speculators wrote them, and as we do."""
    made = {}
    for folder in sorted(path for path in RECORDED.iterdir() if path.is_dir()):
        made[folder.name] = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    configs: dict[str, tuple[str, Config]] = {
        "ours": ("eagle", learned.eagle()),
        "medusa": ("medusa", learned.medusa()),
    }
    for name, (method, config) in configs.items():
        with tempfile.TemporaryDirectory() as place:
            path = Path(place)
            write_checkpoint(path, method, config, learned.random_tensors(config, head=True), {}, {})
            made[name] = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    return made


def eagles_target() -> bytes:
    """A GGUF file of three layers, all the same: the target of ``eagles``."""
    meta, tensors = _decoder("llama", "F32", 16, False, False)
    layers = {name.replace("blk.0", f"blk.{i}"): its for name, its in tensors.items() for i in range(3)}
    return gguf_file(meta | {"llama.block_count": 3} | _pieces(), layers)


@cache
def eagles() -> dict[str, Files]:
    """EAGLE-3 drafters that run beside ``eagles_target``, without our checksum: damaged weights are built, too."""
    decoder = Decoder(16, 1, _HEADS, _KV_HEADS, _WIDTH, _INNER, 1e-5, 5000.0, 64)
    kinds = {
        "three_layers": EagleConfig(decoder, len(_WORDS), 7, (0, 1, 2), fc_norm=True, norm_output=True),
        "plain": EagleConfig(decoder, len(_WORDS), len(_WORDS), (0, 1, 2), norm_before_residual=True),
    }
    made = {}
    for name, config in kinds.items():
        with tempfile.TemporaryDirectory() as place:
            path = Path(place)
            tensors = learned.random_tensors(config, head=True, embedding=name == "plain")
            write_checkpoint(path, "eagle", config, tensors, {}, {})
            made[name] = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
        theirs = {key: value for key, value in json.loads(made[name]["config.json"]).items() if key != "outpace"}
        made[name]["config.json"] = json.dumps(theirs).encode()
    return made
