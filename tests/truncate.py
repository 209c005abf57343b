"""A GGUF model's first layers as a model of their own: an imperfect draft model that every backend reads."""

from __future__ import annotations

import os
from pathlib import Path

import gguf


def truncated(source: Path, layers: int, folder: Path) -> Path:
    """The file in ``folder`` with the first ``layers`` blocks of ``source``; made if it is not there yet."""
    out = folder / f"{source.stem}-first-{layers}.gguf"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        _write(source, layers, part)
        os.replace(part, out)
    return out


def _write(source: Path, layers: int, out: Path) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = layers if key == f"{architecture}.block_count" else field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        name = tensor.name.split(".")
        if name[0] != "blk" or int(name[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
