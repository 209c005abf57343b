"""The GGUF reader: what the reference writer wrote comes back, and damage is only ever a ModelError."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from outpace.errors import ModelError
from outpace.models.fingerprint import fingerprint
from outpace.models.weights.gguf import TYPES, GGUFFile

WORDS = ["<s>", "</s>", "a", "b", "c", "ab", "Ġ", "Ġa"]


def written(path: Path) -> Path:
    """A small file from the reference writer, with every kind of value in it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_float64("test.float", 1.5)
    writer.add_bool("test.bool", True)
    writer.add_string("test.text", "naïve")
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.standard_normal((8, 32)).astype(np.float32))
    quantised = gguf.quantize(rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("half", rng.standard_normal((3, 5)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_reads_what_the_reference_writer_wrote(path: Path) -> None:
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = ours.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name
    assert ours.metadata["test.text"] == "naïve"
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.info(tensor.name)
        assert info.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert (info.type, info.n_bytes) == (tensor.tensor_type.name, int(tensor.n_bytes))
        np.testing.assert_array_equal(ours.raw(tensor.name), tensor.data.view(np.uint8).ravel())
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        np.testing.assert_array_equal(ours.dequantize(tensor.name), expected.reshape(info.shape))


def test_block_sizes_are_the_formats() -> None:
    for kind, sizes in GGML_QUANT_SIZES.items():
        if int(kind) in TYPES:
            assert TYPES[int(kind)] == (kind.name, *sizes)


def test_bfloat16(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 3.140625, 65536.0]], np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    file = GGUFFile.open(raw_file(tmp_path, tensors=[("t", (4, 1), 30, 0)], data=raw.tobytes()))
    np.testing.assert_array_equal(file.dequantize("t"), values)


def test_missing_tensor_is_named(path: Path) -> None:
    with pytest.raises(ModelError, match=r"small.gguf has no tensor 'absent'"):
        GGUFFile.open(path).raw("absent")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def raw_file(
    tmp_path: Path,
    *,
    head: bytes = b"GGUF\x03\0\0\0",
    entries: list[bytes] | None = None,
    tensors: list[tuple[str, tuple[int, ...], int, int]] | None = None,
    counts: tuple[int, int] | None = None,
    data: bytes = b"",
) -> Path:
    """A file byte by byte; ``counts`` overrides how many tensors and entries it claims to have."""
    entries, tensors = entries or [], tensors or []
    body = head + struct.pack("<QQ", *(counts or (len(tensors), len(entries)))) + b"".join(entries)
    for name, shape, kind, offset in tensors:
        body += text(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    path = tmp_path / "made.gguf"
    path.write_bytes(body + b"\0" * (-len(body) % 32) + data)
    return path


HUGE = 1 << 60
BAD: dict[str, tuple[dict[str, object], str]] = {
    "magic": ({"head": b"GGML\x03\0\0\0"}, "starts with b'GGML'"),
    "version": ({"head": b"GGUF\x01\0\0\0"}, "version 1 is neither"),
    "big-endian": ({"head": b"GGUF\0\0\0\x03"}, "big-endian"),
    "tensor count": ({"counts": (HUGE, 0)}, "tensors cannot fit"),
    "entry count": ({"counts": (0, HUGE)}, "metadata entries cannot fit"),
    "key length": ({"entries": [struct.pack("<Q", HUGE) + b"\0" * 40]}, "a metadata key is"),
    "string length": ({"entries": [text(b"k") + struct.pack("<IQ", 8, HUGE) + b"\0" * 40]}, "runs past the end"),
    "array length": ({"entries": [text(b"k") + struct.pack("<IIQ", 9, 6, HUGE) + b"\0" * 40]}, "cannot fit"),
    "string array": ({"entries": [text(b"k") + struct.pack("<IIQ", 9, 8, HUGE) + b"\0" * 40]}, "cannot fit"),
    "value type": ({"entries": [text(b"k") + struct.pack("<I", 77) + b"\0" * 40]}, "unknown value type 77"),
    "deep array": ({"entries": [text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50]}, "nested more"),
    "twice": ({"entries": [text(b"k") + struct.pack("<IB", 0, 1)] * 2}, "'k' appears twice"),
    "utf-8": ({"entries": [text(b"k") + struct.pack("<I", 8) + text(b"\xff\xfe")]}, "not UTF-8"),
    "alignment": ({"entries": [text(b"general.alignment") + struct.pack("<II", 4, 3)]}, "not a power of two"),
    "dimensions": ({"tensors": [("t", (1,) * 5, 0, 0)]}, "has 5 dimensions"),
    "empty": ({"tensors": [("t", (0, 4), 0, 0)]}, "does not divide"),
    "block": ({"tensors": [("t", (33,), 2, 0)]}, "blocks of 32"),
    "type": ({"tensors": [("t", (4,), 99, 0)]}, "unknown type 99"),
    "product": ({"tensors": [("t", (1 << 40, 1 << 40), 0, 0)]}, "ends at byte"),
    "beyond": ({"tensors": [("t", (4,), 0, 32)], "data": b"\0" * 40}, "ends at byte"),
    "offset": ({"tensors": [("t", (4,), 0, 4)], "data": b"\0" * 40}, "no multiple of 32"),
    "same name": ({"tensors": [("t", (4,), 0, 0), ("t", (4,), 0, 32)], "data": b"\0" * 64}, "appears twice"),
    "overlap": ({"tensors": [("t", (4,), 0, 0), ("u", (4,), 0, 0)], "data": b"\0" * 64}, "overlap"),
}


@pytest.mark.parametrize("what", BAD)
def test_malformed_files_are_refused_by_name(what: str, tmp_path: Path) -> None:
    parts, message = BAD[what]
    path = raw_file(tmp_path, **parts)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=message) as caught:
        GGUFFile.open(path)
    assert "made.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match=r"empty.gguf is empty"):
        GGUFFile.open(tmp_path / "empty.gguf")
    with pytest.raises(ModelError, match=r"absent.gguf cannot be read"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile.open(tmp_path)


def test_shards_are_one_model(tmp_path: Path, path: Path) -> None:
    """What the reference writer splits reads as the whole file does; a shard that is missing, or another's, is told."""
    whole = GGUFFile.open(path)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    writer.add_context_length(64)
    for name in whole.tensors:
        info = whole.info(name)
        kind = gguf.GGMLQuantizationType[info.type]
        shape = (*info.shape[:-1], info.n_bytes // max(1, info.elements // info.shape[-1]))
        if kind.name in ("F32", "F16"):
            writer.add_tensor(name, whole.dequantize(name).astype(np.float32 if kind.name == "F32" else np.float16))
        else:
            writer.add_tensor(name, whole.raw(name).reshape(shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("m-0000*"))
    assert len(parts) == 3
    split = GGUFFile.open(parts[0])
    assert split.files == parts
    assert split.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        assert (split.raw(name) == whole.raw(name)).all()
    before = fingerprint(parts[0])
    with pytest.raises(ModelError, match="give the first"):
        GGUFFile.open(parts[1])
    content = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    assert fingerprint(parts[0]) != before
    with pytest.raises(ModelError, match="is not shard 3"):
        GGUFFile.open(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf is missing, one of the 3 shards"):
        GGUFFile.open(parts[0])
    parts[2].write_bytes(content)
    assert GGUFFile.open(parts[0]).raw("half").size
