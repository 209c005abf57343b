"""Thousands of damaged files: each loads or fails with a clear error; none crashes or takes memory without bound."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from native_helpers import BLOCKS, Tiny

from outpace.errors import ModelError
from outpace.models.native.build import estimate

_CHILD = textwrap.dedent(
    """
    import os, random, resource, struct, sys
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # its shadow memory alone is terabytes of addresses
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    import numpy as np
    from outpace.errors import OutpaceError
    from outpace.models.base import Batch
    from outpace.models.native.model import load_native

    path, work, count, seed, header = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    original = open(path, "rb").read()
    rng, loaded, refused = random.Random(seed), 0, 0
    extreme = [0, 1, 2, 3, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
    for _ in range(count):
        data = bytearray(original)
        kind = rng.randrange(5)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(header - 8)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                struct.pack_into("<Q", data, at, rng.choice(extreme))
            elif kind == 2:
                struct.pack_into("<I", data, at, rng.choice(extreme) & 0xFFFFFFFF)
            elif kind == 3:
                del data[rng.randrange(len(data)):]
                break
            else:
                data[at] ^= 1 << rng.randrange(8)
        with open(work, "wb") as file:
            file.write(data)
        try:
            model = load_native(work, threads=1, kv_memory=1 << 24)
            n = min(4, model.info.max_length)
            row = model.kv.alloc()
            model.forward(Batch.pack([row], [np.zeros(n, np.int32)], [0], [True])).logits(np.array([n - 1], np.int32))
            loaded += 1
            model.close()
        except OutpaceError as error:
            assert str(error), "an error without a message"
            refused += 1
    print(loaded, refused)
    """
)


def mutate(path: Path, work: Path, count: int, seed: int, header: int) -> tuple[int, int]:
    arguments = [sys.executable, "-c", _CHILD, path, work, count, seed, header]
    result = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-2000:]
    loaded, refused = result.stdout.split()
    return int(loaded), int(refused)


def test_mutated_headers(tiny: Tiny, tmp_path: Path) -> None:
    for seed, (kind, architecture) in enumerate([("Q4_1", "llama"), ("Q8_0", "gemma3"), ("F16", "qwen2")]):
        path = tiny.path(kind, architecture, layers=1)
        from outpace.models.formats.gguf import GGUFFile

        header = min(t.offset for t in GGUFFile.open(path).tensors.values())
        loaded, refused = mutate(path, tmp_path / "damaged.gguf", 1000, seed, header)
        assert loaded + refused == 1000
        assert refused > 400
        assert loaded > 0  # damage to a name or a value that nobody reads


def test_damaged_weights_never_crash(tiny: Tiny, tmp_path: Path) -> None:
    """Any bits may stand in the tensors: NaN and infinity go through the arithmetic."""
    path = tiny.path("Q4_1", "llama", layers=1)
    size = path.stat().st_size
    loaded, _ = mutate(path, tmp_path / "damaged.gguf", 100, 9, size)
    assert loaded > 10


def test_a_tensor_that_nothing_reads_is_refused_by_name(tiny: Tiny) -> None:
    """A bias that was left out would make another model of it."""
    with pytest.raises(ModelError, match=r"the tensor 'blk\.0\.ffn_down\.bias' and 1 more"):
        tiny.load("Q4_1", "llama", {"ffn_bias": 1})


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16", "F32"]
)
def test_estimate(kind: str, tiny: Tiny) -> None:
    sizes = {"hidden": 256, "inner": 256, "head_dim": 64} if BLOCKS[kind][0] == 256 else {}
    for options in ({"kv_dtype": "float32"}, {"kv_dtype": "int8"}, {"quantize": "int8"}):
        model = tiny.load(kind, sizes=sizes, **options)
        info = model.info
        assert estimate(tiny.path(kind, **sizes), **options) == (info.weight_bytes, info.kv_bytes_per_position)
        model.close()
