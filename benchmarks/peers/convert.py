"""The same model for others: a GGUF file as a Hugging Face folder, and a Q4_1 file as Q4_0.

    python -m benchmarks.peers.convert demo FOLDER        # for servers that read no GGUF: bfloat16, tokenizer, template
    vllm serve FOLDER --dtype float32 --max-model-len 2048 --enforce-eager --port 8000

The folder needs what the Transformers backend needs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np

from outpace.errors import ParameterError
from outpace.models.load import resolve


def requantise(source: Path, target: Path) -> Path:
    """Write ``target`` unless it is there: Q4_1 tensors as Q4_0, everything else as it is; whole or not at all.

    llama.cpp's CPU kernels are fastest there: it repacks the weights.
    """
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(part, architecture)
    try:
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            value = int(gguf.LlamaFileType.MOSTLY_Q4_0) if name == "general.file_type" else field.contents()
            kind = field.types[0]
            writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
        for tensor in reader.tensors:
            data, dtype = tensor.data, tensor.tensor_type
            if dtype == gguf.GGMLQuantizationType.Q4_1:
                values = gguf.dequantize(data, dtype).astype(np.float32)
                data, dtype = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(tensor.name, data, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def dequantise(model: str, folder: Path) -> None:
    """Write it. Raises ParameterError for what is no GGUF file, and what loading raises."""
    import torch

    from outpace.models.text import gguf as gguf_tokenizer
    from outpace.models.torch import gguf as reader

    source = resolve(model).gguf
    if source is None:
        raise ParameterError(f"{model} is no GGUF file: others' servers read it as it is")
    reader.build(source, torch.bfloat16, torch.device("cpu")).save_pretrained(folder)
    fast = gguf_tokenizer.build(source, None)
    fast.save(str(folder / "tokenizer.json"))
    ids = {f"{name}_token": gguf_tokenizer.token_id(source, name) for name in ("bos", "eos")}
    named = {name: number for name, number in ids.items() if number is not None}
    for file in ("config.json", "generation_config.json"):
        path = folder / file
        values = json.loads(path.read_text(encoding="utf-8")) | {f"{name}_id": number for name, number in named.items()}
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": source.text("tokenizer.chat_template", ""),
        "clean_up_tokenization_spaces": False,
        **{name: fast.id_to_token(number) for name, number in named.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    dequantise(sys.argv[1], Path(sys.argv[2]))
