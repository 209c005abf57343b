"""A Q4_0 copy of a Q4_1 GGUF file, for llama.cpp; and how a GGUF file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from outpace.common.files import cache_dir


@contextmanager
def writing(target: Path, architecture: str) -> Iterator[Any]:
    """A GGUFWriter, whose keys and tensors become the file ``target`` when the block ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    writer = gguf.GGUFWriter(part, architecture)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def copy_field(writer: Any, name: str, field: Any) -> None:
    kind = field.types[0]
    writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)


def q4_0(source: Path) -> Path:
    """A model's copy in the cache, written on first use."""
    return requantise(source, cache_dir() / "peers" / f"{source.stem}.Q4_0.gguf")


def requantise(source: Path, target: Path) -> Path:
    """Write ``target`` unless it is there: Q4_1 tensors as Q4_0, everything else as it is.

    llama.cpp's CPU kernels are fastest there: it repacks the weights.
    """
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    with writing(target, str(reader.fields["general.architecture"].contents())) as writer:
        for name, field in reader.fields.items():
            if name == "general.file_type":
                writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
            elif not name.startswith("GGUF.") and name != "general.architecture":
                copy_field(writer, name, field)
        for tensor in reader.tensors:
            data, dtype = tensor.data, tensor.tensor_type
            if dtype == gguf.GGMLQuantizationType.Q4_1:
                values = gguf.dequantize(data, dtype).astype(np.float32)
                data, dtype = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    return target
