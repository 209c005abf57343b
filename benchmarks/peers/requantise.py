"""A Q4_0 copy of a Q4_1 GGUF file, for llama.cpp."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np


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
