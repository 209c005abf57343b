"""GGUF files as transformers models, choices made where the logits lie, and the demo model against itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from outpace.common.arrays import F32, I32
from outpace.errors import MemoryLimitError, ModelError, NoTokenAllowedError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.rules import Bias
from outpace.exact.sampling import Chooser
from outpace.exact.verify import walk
from outpace.models.base import Batch
from outpace.models.load import estimate, load, resolve
from outpace.models.options import LoadOptions
from outpace.models.torch import gguf as gguf_transformers
from outpace.models.torch.graphs import Waits
from outpace.models.torch.kv import LayerShape, TorchKV
from outpace.models.torch.model import TransformersModel
from outpace.models.torch.output import TorchOutput
from outpace.models.weights.gguf import GGUFFile
from outpace.params import SamplingParams
from tests.exported import export
from tests.kv_machine import machine

from .test_architectures import COMMON, GEMMA, close, text, tiny


def own(module: Any, tokens: I32) -> F32:
    with torch.inference_mode():
        logits: F32 = (
            module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()
        )
    return logits


def built(path: Path) -> Any:
    return gguf_transformers.build(GGUFFile.open(path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "family", "changes"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 12}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", COMMON | {"head_dim": 16}),
        ("olmo2", "olmo2", {}),
        ("granite", "granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.3}),
        ("smollm3", "smollm3", {"num_hidden_layers": 5}),
        ("phi3", "phi3", {"pad_token_id": 0, "sliding_window": 9}),
        ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
        ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 5, "sliding_window_pattern": 2}),
    ],
)
def test_gguf_is_the_original_model(architecture: str, family: str, changes: Any, tmp_path: Path) -> None:
    original = tiny(family, **changes)
    path = export(original, architecture, tmp_path / "m.gguf")
    module = built(path)
    t = text(40, 1)
    np.testing.assert_allclose(own(module, t), own(original, t), rtol=1e-6, atol=1e-6)
    model = TransformersModel(module, name="m")
    row = model.kv.alloc()
    for at in (slice(0, 25), slice(25, 26), slice(26, 40)):
        batch = Batch.pack([row], [t[at]], [at.start], [True])
        close(model.forward(batch).logits(batch.wanted), own(original, t)[at])
    taken = estimate(str(path), LoadOptions(backend="transformers", dtype="float32", device="cpu"))
    assert taken.device == "cpu"
    assert (taken.weights, taken.kv_bytes_per_position) == (model.info.weight_bytes, model.info.kv_bytes_per_position)


def test_gguf_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = tiny("llama", rope_parameters=rope | {"original_max_position_embeddings": 32})
    plain = 1.0 / 1e4 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    divisors = (plain / original.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 2
    module = built(export(original, "llama", tmp_path / "m.gguf", frequencies=divisors))
    t = text(60, 2)
    np.testing.assert_allclose(own(module, t), own(original, t), rtol=1e-4, atol=1e-4)


def test_gguf_without_a_tensor_names_it(tmp_path: Path) -> None:
    path = export(tiny("llama"), "llama", tmp_path / "m.gguf", leave_out="blk.2.ffn_up.weight")
    with pytest.raises(ModelError, match=r"m.gguf is incomplete.*model.layers.2.mlp.up_proj.weight"):
        built(path)


def test_gguf_with_a_wrong_shape_names_it(tmp_path: Path) -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(40, 32)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight is \[40, 32\], but must be \[48, 32\]"):
        built(export(model, "llama", tmp_path / "m.gguf"))


# -- the output --------------------------------------------------------------------------------------------------------


def chooser(params: SamplingParams | None = None, **kw: Any) -> Chooser:
    return Chooser(params or SamplingParams(), Noise(3), 0, **kw)


def output(logits: list[list[float]], wanted: list[int]) -> TorchOutput:
    n = max(wanted) + 1
    asked = np.isin(np.arange(n), wanted)
    batch = Batch.pack([0], [np.zeros(n, np.int32)], [0], [True])
    return TorchOutput(replace(batch, wanted=np.flatnonzero(asked).astype(np.int32)), torch.tensor(logits))


def test_greedy_choices_take_the_lowest_id_on_ties() -> None:
    out = output([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0], [0.0, 0.0, 1.0]], [4, 6, 9])
    assert out.choose(np.array([4, 6, 9], np.int32), [chooser()] * 3).tolist() == [1, 0, 2]
    assert out.choose(np.array([9, 4], np.int32), [chooser()] * 2).tolist() == [2, 1]
    assert out.choose(np.array([9], np.int32), [chooser()]).dtype == np.int32


def test_other_choices_are_made_on_the_host() -> None:
    out = output([[0.0, 2.0, 1.9], [3.0, 1.0, 3.0]], [0, 1])
    bias = Bias(np.array([1], np.int32), np.array([-5], np.float32))
    at = np.array([0, 1], np.int32)
    assert out.choose(at, [chooser(rules=(bias,), states=(None,)), chooser()]).tolist() == [2, 0]
    warm = chooser(SamplingParams(temperature=1.0, seed=1))
    assert out.choose(at, [warm, warm]).tolist() == [warm.choose(row) for row in out.logits(at)]
    assert out.logprobs(at[:1], np.array([1], np.int32), [2])[0].top[0][0] == 1


def test_nan_is_reported_not_chosen() -> None:
    with pytest.raises(FloatingPointError, match="NaN"):
        output([[0.0, float("nan"), 1.0]], [0]).choose(np.array([0], np.int32), [chooser()])


def test_hidden_states_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="no hidden states were asked for"):
        output([[0.0]], [0]).hidden_states(np.array([0], np.int32))


@st.composite
def verified(draw: st.DrawFn) -> tuple[Any, Drafts, I32, Batch, list[Chooser | None]]:
    """Logits with ties, NaN and -inf, drafts that follow them often, and rows of every kind."""
    vocab, b = 5, draw(st.integers(1, 4))
    number = st.sampled_from([0.0, 1.0, 2.0, 2.0, -1.0, float("-inf"), float("nan")])
    widths = draw(st.lists(st.integers(0, 5), min_size=b, max_size=b))
    width = max(widths)
    tokens = np.array(draw(st.lists(st.integers(0, 2), min_size=b * width, max_size=b * width)), np.int32)
    parents = None
    if draw(st.booleans()):
        parents = np.array([[draw(st.integers(-1, node - 1)) for node in range(width)] for _ in range(b)], np.int32)
        parents = parents.reshape(b, width)
    drafts = Drafts(tokens.reshape(b, width), np.array(widths, np.int32), parents)
    before = draw(st.integers(0, 2))  # tokens of a row that prefills stand before the others
    counts = [before, *(w + 1 for w in widths)]
    batch = Batch.pack(list(range(b + 1)), [np.zeros(n, np.int32) for n in counts], [0] * (b + 1), [False] + [True] * b)
    values = st.lists(number, min_size=vocab, max_size=vocab)
    plain = st.lists(st.floats(-3, 3, width=32), min_size=vocab, max_size=vocab)
    logits = [draw(st.one_of(plain, plain, values)) for _ in batch.wanted]
    kinds = {
        "greedy": Chooser(SamplingParams(), Noise(1), 4),
        "sampled": Chooser(SamplingParams(temperature=0.9, top_k=3), Noise(5, 1), 2),
        "filtered": Chooser(SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05), Noise(6), 0),
        "ruled": Chooser(
            SamplingParams(), Noise(1), 0, (Bias(np.zeros(1, np.int32), np.ones(1, np.float32)),), (None,)
        ),
    }
    choosers = [draw(st.sampled_from([None, *kinds.values()])) for _ in range(b)]
    return np.array(logits, np.float32).reshape(-1, vocab), drafts, batch.starts[1:-1], batch, choosers


@settings(max_examples=150, deadline=None)
@given(case=verified())
def test_verify_is_the_walk(case: tuple[Any, Drafts, I32, Batch, list[Chooser | None]]) -> None:
    logits, drafts, starts, batch, choosers = case
    out = TorchOutput(batch, torch.from_numpy(logits))
    assert out.verify(drafts, starts, choosers) is None  # on the host the engine walks, by ``choose``
    out._on_device = True  # the way that takes one copy, without a device
    verdicts = out.verify(drafts, starts, choosers)
    assert verdicts is not None
    assert len(verdicts) == len(drafts)
    at = {int(where): i for i, where in enumerate(batch.wanted)}
    for i, chooser in enumerate(choosers):
        if chooser is None or chooser.rules:
            assert verdicts.accepted[i] == -1
            continue
        draft = drafts.row(i)

        def choose(rows: I32, nodes: I32, i: int = i, draft: Any = draft, chooser: Chooser = chooser) -> I32:
            path = draft.path(int(nodes[0]))
            after = chooser.after([draft.tokens[n] for n in path])
            return np.array([after.choose(logits[at[int(starts[i]) + 1 + int(nodes[0])]])], np.int32)

        try:
            expected = walk(choose, Drafts.of([draft])).row(0)
        except (NoTokenAllowedError, FloatingPointError):
            assert verdicts.accepted[i] == -1
            continue
        if verdicts.accepted[i] == -1:
            assert chooser.params.filtered  # at a filter's edge
            continue
        found = verdicts.row(i)
        assert (found.tokens.tolist(), found.path.tolist()) == (expected.tokens.tolist(), expected.path.tolist())


# -- the cache ---------------------------------------------------------------------------------------------------------

SHAPES = {"even": [LayerShape(2, 4, 4)] * 3, "uneven": [LayerShape(2, 4, 6), LayerShape(1, 8, 4)]}
BLOCK = 4


def cache(limit: int | None = None, *, kind: str = "even", block: int = BLOCK) -> TorchKV:
    return TorchKV(SHAPES[kind], torch.float32, torch.device("cpu"), limit, block)


def write(kv: TorchKV, values: dict[int, list[int]]) -> None:
    """Put a number a slot behind the rows' ends, as a forward would."""
    with kv.writing({row: len(its) for row, its in values.items()}):
        for row, its in values.items():
            length = kv.length(row)
            places = torch.from_numpy(kv.places(row, length + len(its))[length:])
            for tensor in (*kv.keys, *kv.values):
                tensor[:, places] = torch.tensor(its, dtype=tensor.dtype)[:, None]


def held(kv: TorchKV, row: int) -> list[int]:
    """The numbers of a row's slots, which every layer has to agree on."""
    found = []
    for place in kv.places(row, kv.length(row)).tolist():
        values = {float(v) for t in (*kv.keys, *kv.values) for v in t[:, place].ravel()}
        assert len(values) == 1
        found.append(int(values.pop()))
    return found


def test_random_use() -> None:
    model, reference = (TransformersModel(tiny("llama"), name="m", kv_block=16) for _ in range(2))
    rows = machine(model, reference, (1, 2, 5, 15, 16, 17, 33), 70, lambda a, b: np.allclose(a, b, 1e-4, 1e-4))
    run_state_machine_as_test(rows, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


def test_a_device_without_memory_is_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache()
    row = kv.alloc()
    write(kv, {row: [5] * 6})
    there = kv.reserved
    most = there // kv.bytes_per_position + 30 * BLOCK  # positions of a pool that the device can hold

    def empty(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        if shape[-2] > most:
            raise RuntimeError("[enforce fail] not enough memory")
        return torch.zeros(shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryLimitError, match=r"5000 more positions of row 0 do not fit: the cpu has no 768 bytes"):
        write(kv, {row: [1] * 5000})
    kv.check()
    assert (kv.length(row), kv.bytes) == (6, kv.bytes_for(6))
    assert kv.reserved - there <= 30 * BLOCK * kv.bytes_per_position
    more = (kv.reserved - kv.bytes) // kv.bytes_per_position
    write(kv, {row: [7] * more})
    assert held(kv, row) == [5] * 6 + [7] * more


def test_cache_is_bounded() -> None:
    kv = cache(limit=2000)
    assert kv.bytes_for(1) == kv.bytes_for(4) == 4 * 3 * 2 * (4 + 4) * 4
    row = kv.alloc()
    with pytest.raises(MemoryLimitError, match=r"9 more positions of row 0 do not fit: all of the 2000 bytes"):
        write(kv, {row: [1] * 9})
    write(kv, {row: [1] * 8})
    assert (kv.rows, kv.bytes, kv.limit) == ([0], 1536, 2000)
    kv.check()


def test_cache_refuses_nonsense() -> None:
    kv = cache()
    row, other = kv.alloc(), kv.alloc()
    write(kv, {row: [0, 1, 2, 3], other: [9]})
    for wrong in (
        lambda: kv.truncate(row, 5),
        lambda: kv.truncate(row, -1),
        lambda: kv.compact(row, 2, np.array([1, 0], np.int32)),
        lambda: kv.compact(row, 2, np.array([0, 2], np.int32)),
        lambda: kv.fork(row, other, 3),
        lambda: kv.fork(row, row, 1),
        lambda: kv.length(77),
        lambda: kv.free(77),
        lambda: write(kv, {row: [1], 77: [2]}),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert held(kv, row) == [0, 1, 2, 3]
    kv.check()


# -- the demo model ----------------------------------------------------------------------------------------------------


def test_demo_says_what_its_own_forward_says() -> None:
    reference = built(resolve("demo").path)
    model, tokenizer = load("demo", LoadOptions(backend="transformers", device="cpu"))
    assert model.info.weight_bytes == estimate("demo", LoadOptions(backend="transformers", device="cpu")).weights
    tokens = tokenizer.encode(
        "The river rises in the mountains and flows 1,024 km to the sea.\n\ndef area(r):\n    return 3.14159 * r ** 2\n"
        "La rivière prend sa source dans les montagnes. 河は山から海へ流れる。"
    )
    expected = own(reference, tokens)
    row = model.kv.alloc()
    found = []
    for begin in range(0, len(tokens), 13):
        chunk = tokens[begin : begin + 13]
        batch = Batch.pack([row], [chunk], [begin], [True])
        out = model.forward(batch)
        assert (
            out.choose(batch.wanted, [chooser()] * len(chunk)).tolist()
            == expected[begin : begin + 13].argmax(-1).tolist()
        )
        found.append(out.logits(batch.wanted))
    assert float(np.abs(np.concatenate(found) - expected).max()) < 2e-4


# -- what a forward asks of the device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # our own forward, and the module's
def test_a_forward_waits_for_nothing(family: str) -> None:
    model = TransformersModel(tiny(family), name="m")
    rows = [model.kv.alloc() for _ in range(3)]
    parents = [None, np.array([-1, 0, 0, 1], np.int32), None]
    first = Batch.pack(rows, [text(n, n) for n in (5, 17, 40)], [0] * 3, [True] * 3, last_only=True)
    then = Batch.pack(rows, [text(n, n) for n in (1, 4, 7)], [5, 17, 40], [True] * 3, parents, hidden_layers=(1,))
    with Waits() as waits:
        model.forward(first)
        out = model.forward(then)
        assert waits.seen == []
        assert out.hidden_states(then.wanted).native.shape == (12, 1, 32)
        assert waits.seen == []
        float(out.on_device.sum())
    assert waits.seen == ["Tensor.__float__", "_local_scalar_dense"]
