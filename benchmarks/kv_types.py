"""How far each type of the KV cache moves a model's logits from transformers' in float32.

    python -m benchmarks kv_types [--text FILE ...] [--tokens 2048]

The model's weights are float16 in both, so that what differs is the cache and the order of sums. No figure depends on
how fast the machine is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.figures import add_json, at_least_one, emit
from outpace.common.arrays import F64, I32
from outpace.errors import ParameterError
from outpace.models.base import Batch
from outpace.models.load import resolve
from outpace.models.native.model import KV_DTYPES, NativeModel, load_native
from outpace.models.weights.gguf import GGUFFile
from outpace.text.tokenizer import Tokenizer

DOCS = Path(__file__).parents[1] / "docs"
WINDOW = 512


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="a GGUF file that transformers reads, too")
    texts = [DOCS / "exactness.md", DOCS / "policy.md", DOCS / "training.md"]
    parser.add_argument("--text", type=Path, nargs="+", default=texts, metavar="FILE")
    parser.add_argument("--tokens", type=at_least_one, default=2048, help=f"read in windows of {WINDOW}")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    source = resolve(given.model)
    text = "\n".join(path.read_text(encoding="utf-8") for path in given.text)
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(source.path))
    ids = np.array(tokenizer.encode(text)[: given.tokens], np.int32)
    if len(ids) < WINDOW:
        raise ParameterError(f"the text has {len(ids)} tokens: give --text of {WINDOW} or more")
    pieces = [ids[at : at + WINDOW] for at in range(0, len(ids) - len(ids) % WINDOW, WINDOW)]
    read = AutoModelForCausalLM.from_pretrained(source.path.parent, gguf_file=source.path.name, dtype=torch.float16)
    del read.config.quantization_config  # with which it could not be saved
    whole = type(read)(read.config).half()
    whole.load_state_dict(read.state_dict())
    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        whole = whole.float().eval()
        with torch.inference_mode():
            expected = [whole(torch.from_numpy(piece)[None].long()).logits[0].double().numpy() for piece in pieces]
        for kv_dtype in KV_DTYPES:
            model = load_native(folder, kv_dtype=kv_dtype)
            found[kv_dtype] = _apart(expected, [_logits(model, piece) for piece in pieces], pieces)
            found[kv_dtype]["bytes"] = model.info.kv_bytes_per_position
            model.close()
    print(f"{given.model} in float16, {len(pieces) * WINDOW} tokens, beside transformers in float32\n")
    print("| keys and values | bytes a position | logits off (rms) | KL | likeliest token the same | perplexity |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kv_dtype, its in found.items():
        print(
            f"| {kv_dtype} | {its['bytes']:,.0f} | {its['rms']:.2g} | {its['kl']:.1g} | {its['same']:.1%} "
            f"| {its['perplexity']:.3f} |"
        )
    emit(given, {"model": given.model, "tokens": len(pieces) * WINDOW, "types": found})
    return 0


def _logits(model: NativeModel, piece: I32) -> F64:
    row = model.kv.alloc()
    output = model.forward(Batch.pack([row], [piece], [0], [True]))
    found = output.logits(np.arange(len(piece), dtype=np.int32)).astype(np.float64)
    model.kv.free(row)
    return found


def _apart(expected: list[F64], got: list[F64], pieces: list[I32]) -> dict[str, float]:
    a, b = np.concatenate(expected), np.concatenate(got)
    p, q = (each - np.logaddexp.reduce(each, 1, keepdims=True) for each in (a, b))
    told = np.concatenate([piece[1:] for piece in pieces])
    at = np.concatenate([np.arange(len(piece) - 1) + i * WINDOW for i, piece in enumerate(pieces)])
    return {
        "rms": float(np.sqrt(np.square(a - b).mean())),
        "kl": float((np.exp(p) * (p - q)).sum(1).mean()),
        "same": float((a.argmax(1) == b.argmax(1)).mean()),
        "perplexity": float(np.exp(-q[at, told].mean())),
    }
