"""A Q4_0 copy of a Q4_1 GGUF file, for llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from outpace.common.files import cache_dir
from outpace.training.export_gguf import copy_field, writing


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
