"""A GGUF file's model as a Hugging Face folder in bfloat16, with tokenizer and template, for servers that read no GGUF.

    python -m benchmarks.peers.dequantise demo FOLDER
    vllm serve FOLDER --dtype float32 --max-model-len 2048 --enforce-eager --port 8000

Needs what the Transformers backend needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from outpace.errors import ParameterError
from outpace.models.load import resolve
from outpace.models.text import gguf as gguf_tokenizer
from outpace.models.torch import gguf as reader


def dequantise(model: str, folder: Path) -> None:
    """Write it. Raises ParameterError for what is no GGUF file, and what loading raises."""
    its = resolve(model).gguf
    if its is None:
        raise ParameterError(f"{model} is no GGUF file: others' servers read it as it is")
    reader.build(its, torch.bfloat16, torch.device("cpu")).save_pretrained(folder)
    fast = gguf_tokenizer.build(its, None)
    fast.save(str(folder / "tokenizer.json"))
    ids = {f"{name}_token": gguf_tokenizer.token_id(its, name) for name in ("bos", "eos")}
    named = {name: number for name, number in ids.items() if number is not None}
    for file in ("config.json", "generation_config.json"):
        path = folder / file
        told = json.loads(path.read_text(encoding="utf-8")) | {f"{name}_id": number for name, number in named.items()}
        path.write_text(json.dumps(told, indent=1), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": its.text("tokenizer.chat_template", ""),
        "clean_up_tokenization_spaces": False,
        **{name: fast.id_to_token(number) for name, number in named.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    dequantise(sys.argv[1], Path(sys.argv[2]))
