"""Hidden states in and out: handles of them, features beside tokens, and the parts that a learned drafter shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_helpers import Tiny

from outpace.common.arrays import F32, I32
from outpace.models.base import Batch
from outpace.models.native.model import NativeModel

# An embedding of each kind that the head's kernels know, tied: integer groups, K-quants, and floats.
KINDS = ["Q4_1", "Q8_0", "Q6_K", "BF16", "F32"]


def new_row(model: NativeModel) -> int:
    return model.kv.alloc()


def run(model: NativeModel, tokens: I32, **options: Any) -> Any:
    """One row's forward from an empty cache."""
    row = new_row(model)
    try:
        return model.forward(Batch.pack([row], [tokens], [0], [True], **options))
    finally:
        model.kv.free(row)


def every(n: int) -> I32:
    return np.arange(n, dtype=np.int32)


def test_hidden_states_cover_named_rows_only_and_copy_when_asked(tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("Q4_1", threads=2)
    rows = [new_row(model) for _ in range(3)]
    tokens = [rng.integers(0, 100, n).astype(np.int32) for n in (5, 140, 3)]
    pack = {"hidden_layers": (1, 0), "hidden_rows": np.array([True, False, True])}
    output = model.forward(Batch.pack(rows, tokens, [0] * 3, [False] * 3, **pack))
    hidden_states = output.hidden_states(np.array([146, 0, 4, 145], np.int32))
    assert len(hidden_states) == 4
    expected = [
        run(model, t, hidden_layers=(1, 0)).hidden_states(every(len(t))).numpy() for t in tokens
    ]  # also a later forward
    found = hidden_states.numpy()
    assert found.shape == (4, 2, 64)
    assert found.dtype == np.float32
    want = np.stack([expected[2][1], expected[0][0], expected[0][4], expected[2][0]])
    assert found.tobytes() == want.tobytes()
    assert hidden_states.at(np.array([3, 1], np.int32)).native.tobytes() == want[[3, 1]].tobytes()
    found += 1  # a copy of its own
    assert hidden_states.numpy().tobytes() == want.tobytes()
    with pytest.raises(IndexError, match="packed index 5 is of a row whose hidden states were not kept"):
        output.hidden_states(np.array([0, 5], np.int32))
    with pytest.raises(IndexError, match="packed index 148 is not in the batch"):
        output.hidden_states(np.array([148], np.int32))
    with pytest.raises(ValueError, match="kept no hidden states"):
        run(model, tokens[0]).hidden_states(every(1))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_forwards_own_steps(kind: str, isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    architecture = "gemma2" if kind == KINDS[0] else "llama"  # the former caps its logits
    sizes = {"hidden": 256, "head_dim": 64, "inner": 256, "vocab": 203}
    model = tiny.load(kind, architecture, sizes, threads=2, isa=isa)
    tokens = rng.integers(0, 203, 150).astype(np.int32)  # more than one chunk
    output = run(model, tokens, hidden_layers=(1,))
    parts = model.parts
    normed = parts.norm(output.hidden_states(every(150)).numpy()[:, 0])
    logits = output.logits(every(150))
    assert parts.logits(normed).tobytes() == logits.tobytes()
    assert parts.logits(normed[7:8]).tobytes() == logits[7:8].tobytes()
    for ids in (np.array([202, 0, 17, 17, 16, 1], np.int32), rng.permutation(203).astype(np.int32), every(0)):
        assert parts.logits(normed, ids).tobytes() == logits[:, ids].tobytes()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])  # the latter scales its embeddings
def test_embeddings_as_features_are_the_tokens_themselves(architecture: str, tiny: Tiny) -> None:
    """e(t) + e(u) is symmetric: swapping a token with what enters beside it changes no bit."""
    model = tiny.load("F32", architecture, threads=1)
    a, b = np.array([3, 50, 7], np.int32), np.array([9, 2, 60], np.int32)
    embed = model.parts.embed
    assert embed(a).shape == (3, 64)
    scale = 8.0 if architecture == "gemma3" else 1.0
    plain = run(model, a).logits(every(3))
    one, other = (run(model, x, features=embed(y)).logits(every(3)) for x, y in ((a, b), (b, a)))
    assert one.tobytes() == other.tobytes()
    assert run(model, a, features=np.zeros((3, 64), np.float32)).logits(every(3)).tobytes() == plain.tobytes()
    assert one.tobytes() != plain.tobytes()
    table = model.parts.embed(every(100)) / np.float32(scale)
    assert 0.05 < np.abs(table).mean() < 1, "the embedding is scaled as the model scales it"


def test_features_do_not_see_width_threads_or_chunks(isa: str, tiny: Tiny, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 100, 140).astype(np.int32)
    features = rng.normal(0, 1, (140, 64)).astype(np.float32)

    def logits(threads: int, width: int) -> F32:
        model = tiny.load("Q4_1", threads=threads, isa=isa)
        row, found = new_row(model), []
        for at in range(0, 140, width):
            part = slice(at, at + width)
            batch = Batch.pack([row], [tokens[part]], [at], [True], features=features[part])
            found.append(model.forward(batch).logits(every(len(tokens[part]))))
        model.close()
        return np.concatenate(found)

    alone = logits(1, 1)
    assert all(logits(threads, width).tobytes() == alone.tobytes() for threads, width in ((1, 140), (3, 2), (2, 9)))


def test_states_of_another_shape_are_refused(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row, tokens = new_row(model), np.array([1, 2], np.int32)

    def forward(features: Any = None, hidden_rows: Any = None) -> None:
        model.forward(
            Batch.pack([row], [tokens], [0], [True], hidden_layers=(0,), features=features, hidden_rows=hidden_rows)
        )

    with pytest.raises(ValueError, match=r"features are \[3, 64\], but must be \[2, 64\]"):
        forward(np.zeros((3, 64), np.float32))
    with pytest.raises(ValueError, match=r"features are \[2, 63\], but must be \[2, 64\]"):
        forward(np.zeros((2, 63), np.float32))
    with pytest.raises(ValueError, match=r"float64 \[2, 64\], but must be a numpy array, float32"):
        forward(np.zeros((2, 64)))
    with pytest.raises(ValueError, match="hidden_rows has 2 rows, the batch 1"):
        forward(hidden_rows=np.ones(2, bool))
    with pytest.raises(ValueError, match=r"\[n, 60\], but must be \[n, 64\]"):
        model.parts.norm(np.zeros((2, 60), np.float32))
    with pytest.raises(ValueError, match="token 100 is not in the vocabulary of 100"):
        model.parts.embed(np.array([100], np.int32))
    with pytest.raises(ValueError, match="token -1 is not in the vocabulary"):
        model.parts.logits(np.zeros((1, 64), np.float32), np.array([-1], np.int32))
    assert model.kv.length(row) == 0
