"""One runtime serves several models in turn, changes no bit of what they say, and survives a fork."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from native_helpers import Tiny, feed

from outpace import Engine, SamplingParams, _native
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.errors import ModelError, ParameterError
from outpace.models.load import load
from outpace.models.native import build
from outpace.models.native.model import NativeModel, load_native
from outpace.models.options import LoadOptions
from outpace.models.weights.gguf import TYPES, GGUFFile

# Models that differ in every size, so that each finds the other's numbers where it must not look: (type, sizes).
MODELS = (
    ("Q4_1", {}),
    ("F32", {"heads": 14, "kv_heads": 2, "head_dim": 10, "hidden": 160, "inner": 32}),
    ("BF16", {"heads": 2, "kv_heads": 1, "head_dim": 128, "vocab": 300, "layers": 3}),
)


def said(model: Any, seed: int) -> list[Any]:
    """Logits of a few forwards of all kinds: wide, narrow, a tree."""
    rng = np.random.default_rng(seed)
    row = model.kv.alloc()
    out = []
    for n in (150, 1, 2, 9):
        out.append(feed(model, row, rng.integers(0, 100, n)))
        out.append(feed(model, row, rng.integers(0, 100, 4), parents=[-1, 0, 0, 1]))
        model.kv.truncate(row, model.kv.length(row) - 4)
    model.kv.free(row)
    return out


@pytest.mark.parametrize("threads", [1, 3])
def test_models_on_one_runtime_are_as_alone(threads: int, isa: str, tiny: Tiny) -> None:
    apart = [tiny.load(kind, sizes=sizes, threads=threads, isa=isa) for kind, sizes in MODELS]
    expected = [[said(model, seed) for seed in range(3)] for model in apart]
    first = tiny.load(MODELS[0][0], sizes=MODELS[0][1], threads=threads, isa=isa)
    others = [tiny.load(kind, sizes=sizes, isa=isa, runtime=first.runtime) for kind, sizes in MODELS[1:]]
    together = [first, *others]
    assert all(model.runtime is first.runtime and model.threads == threads for model in together)
    for seed in range(3):
        for model, alone in zip(together, expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(said(model, seed), alone[seed], strict=True))


def test_what_another_model_left_is_never_read(isa: str, tiny: Tiny, tmp_path: Path) -> None:
    """NaN in all of one model's numbers does not reach the next, whose heads are padded."""
    kind, sizes = MODELS[1]
    model = tiny.load(kind, sizes=sizes, threads=2, isa=isa)
    expected = said(model, 0)
    whole, path = tiny.path("F32", hidden=192, heads=8, head_dim=32, inner=256), tmp_path / "nan.gguf"
    data, info = bytearray(whole.read_bytes()), GGUFFile.open(whole).info("token_embd.weight")
    data[info.offset : info.offset + info.n_bytes] = b"\xff" * info.n_bytes
    path.write_bytes(data)
    broken = load_native(path, isa=isa, runtime=model.runtime)
    assert np.isnan(feed(broken, broken.kv.alloc(), np.arange(100))).all()
    assert all(np.array_equal(a, b) for a, b in zip(said(model, 0), expected, strict=True))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_closing_in_any_order(order: tuple[int, int], tiny: Tiny) -> None:
    alone = tiny.load("Q4_1", threads=2)
    expected = said(alone, 0)
    first = tiny.load("Q4_1", threads=2)
    models = [first, tiny.load("Q4_1", runtime=first.runtime)]
    closed, open_ = models[order[0]], models[order[1]]
    said(closed, 1)
    closed.close()
    del first, closed
    gc.collect()
    assert all(np.array_equal(a, b) for a, b in zip(said(open_, 0), expected, strict=True))
    open_.close()
    for model in models:
        with pytest.raises(ValueError, match="closed"):
            model.kv.alloc()
        with pytest.raises(ValueError, match="closed"):
            _ = model.runtime


def test_weights_are_shared_by_reference(tiny: Tiny) -> None:
    """Two caches on the same weights: a model that drafts for itself needs no second copy."""
    one = tiny.load("Q4_1", threads=1)
    weights = build.build_weights(*build.open_weights(tiny.path("Q4_1"), None, "auto"), longest=4096, threads=1)
    pair = [
        NativeModel(_native.Model(weights, one.runtime, one.isa, "bfloat16", -1), one.runtime, one.info, None)
        for _ in range(2)
    ]
    assert weights.bytes == one.info.weight_bytes
    del weights
    for model in pair:
        assert all(np.array_equal(a, b) for a, b in zip(said(model, 0), said(one, 0), strict=True))
        model.close()


def test_a_model_loads_beside_another(tiny: Tiny) -> None:
    options = LoadOptions(backend="native", threads=2)
    target, _ = load("demo", options)
    draft, _ = load("demo", options, beside=target)
    assert draft.runtime is target.runtime  # type: ignore[attr-defined]
    target.close()
    assert feed(draft, draft.kv.alloc(), [1, 2, 3]).shape == (3, draft.info.vocab_size)  # type: ignore[arg-type]
    draft.close()


def test_thread_counts_that_cannot_be(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=2)
    with pytest.raises(ParameterError, match="threads=3, but the runtime to share has 2"):
        tiny.load("Q4_1", threads=3, runtime=model.runtime)
    with pytest.raises(ValueError, match="threads=0 is out of range"):
        _native.Runtime(0)


def test_types_of_weights_are_those_of_the_reader() -> None:
    """Names, numbers and block sizes stand in weights/pack.h and in formats/gguf.py."""
    known = _native.source_types()
    assert {number: TYPES[number] for number in known} == known
    assert len(known) == 19


def test_estimates_of_what_cannot_be_packed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="type 10 are not supported: use one of F32, F16, BF16, Q4_0"):
        _native.packed_bytes(10, 64, 256)
    with pytest.raises(ValueError, match="quantised already"):
        _native.packed_bytes(3, 64, 256, "int8")
    with pytest.raises(ValueError, match="not possible"):
        _native.packed_bytes(3, 1 << 40, 256)
    monkeypatch.setattr(build, "READ", ("F32",))
    with pytest.raises(ModelError, match=r"a matrix of type Q4_1, which is not read \(F32 are read\): get"):
        build.estimate(tiny.path("Q4_1"))


@pytest.mark.parametrize("kind", ["Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"])
def test_types_whose_values_no_format_has_are_refused_with_what_to_do(kind: str, tmp_path: Path) -> None:
    number, (_, values, size) = next((number, each) for number, each in TYPES.items() if each[0] == kind)
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in (
        ("block_count", 1),
        ("embedding_length", 256),
        ("feed_forward_length", 256),
        ("context_length", 9),
    ):
        out.add_uint32(f"llama.{key}", value)
    out.add_uint32("llama.attention.head_count", 4)
    out.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    raw = np.zeros((256, 256 // values * size), np.uint8)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in ("token_embd.weight", *(f"blk.0.{part}.weight" for part in parts)):
        out.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType(number))
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        out.add_tensor(name, np.ones(256, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    problem = f"a matrix of type {kind}, whose values none of the formats in memory has.*--allow-requantize FILE"
    with pytest.raises(ModelError, match=problem):
        load(str(tmp_path / "m.gguf"), LoadOptions(backend="native"))
    assert GGUFFile.open(tmp_path / "m.gguf").dequantize("token_embd.weight").shape == (256, 256)  # as torch unpacks it


# What a child of os.fork does with models that were loaded, and have computed, in its parent.
_FORK = """
    import gc, os, sys, threading, time
    import numpy as np
    from native_helpers import feed
    from outpace.models.native.model import load_native

    path, how = sys.argv[1:]
    model = load_native(path, threads=2)
    draft = load_native(path, runtime=model.runtime)
    other = load_native(path, threads=3)
    row = model.kv.alloc()
    prompt, more = np.arange(90) % 100, np.arange(20)
    feed(model, row, prompt)
    for each in (draft, other):
        feed(each, each.kv.alloc(), prompt)

    def goes_on():
        got = []
        for each in (model, draft, other):
            length = each.kv.length(0)
            got += [feed(each, 0, more), feed(each, 0, more[:1])]
            each.kv.truncate(0, length)
            each.kv.check()
        return np.concatenate(got)

    expected = goes_on()
    busy, ended = how == "busy", threading.Event()

    def work():
        mine = model.kv.alloc()
        while not ended.is_set():
            feed(model, mine, prompt)
            model.kv.truncate(mine, 0)

    worker = threading.Thread(target=work)
    if busy:
        worker.start()
    for _ in range(10 if busy else 2):
        child = os.fork()
        if child == 0:
            if how == "unused":
                sys.exit(7)  # the interpreter takes everything down
            if how == "closed":
                model.close()
                del model, draft, other
                gc.collect()
                os._exit(7)
            if how == "grandchild":
                child = os.fork()
                if child:
                    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            same = np.array_equal(goes_on(), expected) and np.array_equal(goes_on(), expected)
            model.close()
            gc.collect()
            os._exit(7 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert np.array_equal(goes_on(), expected)  # nothing changed for the parent
    ended.set()
    if busy:
        worker.join()
    print("done")
"""


@pytest.mark.parametrize("how", ["computes", "busy", "grandchild", "closed", "unused"])
def test_a_forked_child(how: str, tiny: Tiny) -> None:
    """A child computes the same with threads of its own, closes, and ends; whatever its parent is doing meanwhile."""
    arguments = [sys.executable, "-c", textwrap.dedent(_FORK), str(tiny.path("Q4_1")), how]
    here = Path(__file__).parent
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=here, start_new_session=True
    ) as process:
        try:
            output, complaint = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # children that hang hold the pipes
            raise
    assert (process.returncode, output) == (0, "done\n"), complaint[-2000:]


def test_how_many_threads_computed_is_told(tiny: Tiny) -> None:
    """Never more than there are; how many depends on what else the machine does."""
    with Engine(tiny.load("Q4_1", threads=2), size=0) as engine:
        result = engine.generate([1, 2, 3], SamplingParams(max_tokens=8))
        assert sum(result.stats.steps_by_threads.values()) == result.stats.steps
        assert set(result.stats.steps_by_threads) <= {1, 2}
        runtime = engine.model.runtime
        assert 1 <= runtime.team <= 2
        assert min(runtime.wake_seconds, runtime.hand_over_seconds) >= 0
        assert engine.stats.to_dict()["steps_by_threads"].keys() == {str(n) for n in result.stats.steps_by_threads}
    alone = tiny.load("Q4_1", threads=1)
    assert (alone.runtime.team, alone.runtime.wake_seconds, alone.runtime.hand_over_seconds) == (1, 0.0, 0.0)


def test_threads_are_dropped_on_evidence_alone() -> None:
    """Waits as such cost no thread its place: only those for threads that lacked a processor; and they come back."""
    runtime = _native.Runtime(2)
    before = runtime.drops
    assert [runtime.late_run(0.0, False, away=0.0, lost=0.9) for _ in range(5)] == [2] * 5
    assert runtime.late_run(0.0, False, away=0.9, lost=0.1) == 2
    assert runtime.drops == (before[0], before[1] + 5)
    assert runtime.late_run(0.0, False, away=0.9, lost=0.9) == 1
    assert runtime.drops == (before[0] + 1, before[1] + 5)
    for _ in range(300):  # runs of one thread, then a trial that goes well
        if runtime.late_run(0.0, False, away=0.0, lost=0.0) == 2:
            break
    assert runtime.late_run(0.0, False, away=0.0, lost=0.0) == 2
    # Asleep for the system, not for the pool: that it was away is real.
    assert runtime.late_run(0.03, True, away=-1.0, lost=0.9) == 1


def test_a_run_is_robbed_by_what_it_takes_as_a_whole() -> None:
    """A thread that is away for a moment as a run begins costs it less than the run would with half of its threads."""

    def keeps_both(late: float) -> bool:
        runtime = _native.Runtime(2)
        for _ in range(3):  # so long does it take
            assert runtime.late_run(0.0, False, away=0.0, after=0.04) == 2
        return runtime.late_run(late, False, away=0.9, after=0.04) == 2

    assert any(keeps_both(0.004) for _ in range(8))  # other work may add to it
    assert not any(keeps_both(0.1) for _ in range(2))


def test_what_robbed_a_run_says_nothing_of_other_kinds() -> None:
    """A moment that is most of a short run, such as a draft's, would cost the next forward half of its threads."""
    runtime = _native.Runtime(2)
    assert runtime.late_run(0.0, False, away=0.9, lost=0.9, kind=1) == 1
    assert runtime.team == 2  # of kind 0


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_that_are_sampled_by_several_threads_say_what_each_says_alone(threads: int, tiny: Tiny) -> None:
    params = [
        SamplingParams(temperature=0.5 + 0.2 * i, top_p=1.0 if i % 2 else 0.9, repetition_penalty=1.0 + 0.1 * (i % 3),
                       seed=i, max_tokens=20)
        for i in range(8)
    ]  # fmt: skip
    prompts = [[1, 2, 3, 1, 2, i] for i in range(8)]
    with Engine(tiny.load("Q4_1", threads=1)) as single:
        alone = [single.generate(prompt, its).token_ids for prompt, its in zip(prompts, params, strict=True)]
    with Engine(tiny.load("Q4_1", threads=threads), drafter=NgramDrafter(), size=3, max_rows=8) as engine:
        together = engine.generate_many(prompts, params)
        assert [result.token_ids for result in together] == alone
        assert engine.stats.accepted > 0


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_claimed_stretches_give_the_same_bits(tiny: Tiny, threads: int) -> None:
    """Where cores differ, threads claim a half of every product: whoever computes a row, its bits are the same."""
    model = tiny.load("Q4_1", threads=threads)
    model.runtime.claims = False
    expected = [said(model, seed) for seed in range(6)]
    model.runtime.claims = True
    assert model.runtime.claims
    for seed, its in enumerate(expected):
        assert all(np.array_equal(a, b) for a, b in zip(said(model, seed), its, strict=True))
    model.close()
