"""What the system refuses, takes away or changes under a call ends in a clear error, or changes nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_helpers import Tiny, feed

from outpace import SamplingParams, _native
from outpace.errors import ModelError
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch
from outpace.models.native import model as native_model
from outpace.models.native.output import describe

# The address sanitizer maps terabytes, and brings its own signal handlers.
SANITIZED = os.environ.get("OUTPACE_SANITIZED", "")
unsanitized = pytest.mark.skipif(bool(SANITIZED), reason="limits on memory cannot be set under a sanitizer")


def run(code: str, *arguments: object, env: dict[str, str] | None = None, stack: int | None = None) -> Any:
    """Python code in a process of its own; ``stack``: bytes that a thread's takes."""

    def limit() -> None:
        assert stack is not None
        resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path, **(env or {})},
        preexec_fn=None if stack is None else limit,
    )  # fmt: skip


# -- threads ---------------------------------------------------------------------------------------------------------

# A thread's stack takes 1 GiB of addresses here, of which only so many are left.
_FEW = """
    import contextlib, logging, os, resource, sys, threading
    import numpy as np
    from native_helpers import feed
    from outpace.models.native.model import load_native

    def leave(gib):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(gib * (1 << 30)),) * 2)

    path = sys.argv[1]
    tokens = np.arange(40) % 100
    alone = load_native(path, threads=1)
    expected = feed(alone, alone.kv.alloc(), tokens)
    whole = load_native(path, threads=3)
    child = os.fork()
    if child == 0:  # has none of the threads, and gets none
        leave(0.6)
        with contextlib.suppress(RuntimeError):  # stacks of the parent's threads, which may be handed on
            while True:
                threading.Thread(target=threading.Event().wait, daemon=True).start()
        row = whole.kv.alloc()
        same = np.array_equal(feed(whole, row, tokens), expected)
        os._exit(7 if same and whole.runtime.team == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    leave(1.6)
    logging.basicConfig(format="%(message)s")
    model = load_native(path, threads=4)
    assert (model.threads, model.runtime.team) == (2, 2), (model.threads, model.runtime.team)
    for chunk in (40, 3, 1):
        assert np.array_equal(feed(model, model.kv.alloc(), tokens, chunk), expected)
    model.close()
"""


@unsanitized
def test_threads_that_cannot_be_had_are_done_without_and_it_says_so(tiny: Tiny) -> None:
    sizes = {"hidden": 256, "inner": 1024, "vocab": 8192}  # matrices that are packed by several threads, too
    done = run(_FEW, tiny.path("Q4_1", **sizes), env={"OPENBLAS_NUM_THREADS": "1"}, stack=1 << 30)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 of 4 threads could be started" in done.stderr


def test_more_cores_than_threads_are_possible(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_model, "usable_cores", lambda: 300)
    made: list[int] = []
    monkeypatch.setattr(native_model._native, "Runtime", lambda n: made.append(n) or _one(n))
    tiny.load("Q4_1").close()
    assert made == [256]


_one_runtime = _native.Runtime


def _one(threads: int) -> Any:
    return _one_runtime(1)


# A system whose affinity masks are larger than a cpu_set_t: 4,096 processors, of which this process has the last few.
_HUGE = """
    #define _GNU_SOURCE
    #include <errno.h>
    #include <sched.h>
    #include <stdlib.h>
    #include <string.h>
    int given = 0;  /* how many processors workers may use */
    int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *mask) {
        if (size < 512) { errno = EINVAL; return -1; }
        memset(mask, 0, size);
        for (int i = 0; i < atoi(getenv("USABLE")); ++i) CPU_SET_S(4095 - i, size, mask);
        return 0;
    }
    int sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *mask) { given = CPU_COUNT_S(size, mask); return 0; }
    int sched_getcpu(void) { return 4095; }
"""


@unsanitized
@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="needs Linux and cc")
def test_a_machine_with_thousands_of_processors(tiny: Tiny, tmp_path: Path) -> None:
    source, shim = tmp_path / "huge.c", tmp_path / "huge.so"
    source.write_text(textwrap.dedent(_HUGE))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source], check=True)
    code = """
        import ctypes, sys
        import numpy as np
        from native_helpers import feed
        from outpace.models.native.model import load_native

        model = load_native(sys.argv[1], threads=2)
        row = model.kv.alloc()
        for _ in range(50):
            feed(model, row, np.arange(4))
        print(model.runtime.hand_over_seconds > 0, ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[2]), "given").value)
    """
    said = [
        run(code, tiny.path("Q4_1"), shim, env={"LD_PRELOAD": str(shim), "USABLE": str(usable)}) for usable in (1, 2, 9)
    ]
    assert [its.returncode for its in said] == [0, 0, 0], said[0].stderr[-2000:]
    # Two threads on one processor are crowded; where they need every processor, workers are kept off the caller's.
    assert [its.stdout.split() for its in said] == [["False", "0"], ["True", "1"], ["True", "0"]]


def test_threads_of_python_share_models_and_a_runtime(tiny: Tiny) -> None:
    """Forwards, sampled verification, caches and questions from several threads at once say what each says alone."""
    one = tiny.load("Q4_1", threads=2)
    models = [one, tiny.load("F32", runtime=one.runtime), tiny.load("Q8_0", threads=2)]
    tokens = np.arange(30) % 100
    expected = [feed(model, model.kv.alloc(), tokens) for model in models]
    params = SamplingParams(temperature=0.8, seed=3)
    drafts = Drafts(np.zeros((2, 3), np.int32), np.full(2, 3, np.int32))
    faults: list[BaseException] = []

    def work(i: int) -> None:
        try:
            model = models[i % 3]
            for _ in range(6):
                row, other = model.kv.alloc(), model.kv.alloc()
                assert np.array_equal(feed(model, row, tokens, chunk=7), expected[i % 3])
                model.kv.fork(row, other, 20)
                rows = [np.arange(4, dtype=np.int32)] * 2
                batch = Batch.pack([row, other], rows, [30, 20], [True, True])
                choosers = [Chooser(params, Noise(3, n), 0) for n in range(2)]
                model.forward(batch).verify(drafts, batch.starts[:2], choosers)
                model.kv.compact(other, 20, np.array([0, 2], np.int32))
                assert model.runtime.team <= model.threads
                model.kv.free(row)
                model.kv.free(other)
                model.take_timings()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for model in models:
        model.kv.check()
        model.close()


# -- arrays that another thread writes into --------------------------------------------------------------------------


class Meddler:
    """A thread that writes nonsense into arrays once a call has let it in. ``calls`` are repeated until three of them
    ended well although that happened meanwhile; others may have found the nonsense, and named it."""

    NONSENSE = (1 << 30, -7, 2**31 - 1, -(2**31))

    def __init__(self, *arrays: Any) -> None:
        self._arrays = [(array, array.copy()) for array in arrays]
        self._go, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._meddle)

    def _meddle(self) -> None:
        for turn in range(1 << 30):
            self._go.wait()
            self._go.clear()
            if self._ended:
                return
            for array, _ in self._arrays:
                array.fill(self.NONSENSE[turn % 4] if array.dtype == np.int32 else 77)

    def calls(self, call: Callable[[], Any]) -> None:
        self._thread.start()
        survived, until = 0, time.monotonic() + 120
        try:
            while survived < 3:
                assert time.monotonic() < until, "nothing was written during a call"
                for array, sense in self._arrays:
                    array[...] = sense
                self._go.set()
                with contextlib.suppress(ValueError, IndexError, OverflowError):
                    call()
                    survived += any((array != sense).any() for array, sense in self._arrays)
        finally:
            self._ended = True
            self._go.set()
            self._thread.join()
            for array, sense in self._arrays:
                array[...] = sense


def test_a_batch_that_changes_during_a_forward(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=2)
    row = model.kv.alloc()
    n = 900
    tree = np.arange(-1, n - 1, dtype=np.int32)
    tree[n - 3 :] = n - 5  # no chain, so that paths are made from parents
    its = Batch.pack([row], [np.arange(n, dtype=np.int32) % 100], [0], [True], [tree])
    arrays = [each.copy() for each in (its.token, its.row, its.position, its.parent, its.starts, its.wanted)]
    hidden_rows = np.ones(1, np.uint8)
    own = Batch(*arrays, hidden_layers=(0,), hidden_rows=hidden_rows.view(np.bool_))
    last = its.wanted[-1:]
    expected = model.forward(its).logits(last)
    model.kv.truncate(row, 0)

    def forward() -> None:
        output = model.forward(own)
        model.kv.check()
        assert model.kv.length(row) == n
        assert np.array_equal(output.logits(last), expected)

    def call() -> None:
        try:
            forward()
        finally:
            model.kv.truncate(row, 0)

    Meddler(*arrays, hidden_rows).calls(call)
    model.kv.check()
    model.close()


def test_drafts_that_change_during_a_call() -> None:
    """Sampled rows are decided without the GIL; widths and parents bound what is read and written."""
    rng = np.random.default_rng(0)
    b, w, vocab = 6, 8, 20_000
    logits = rng.normal(0, 1, (b * (w + 1), vocab)).astype(np.float32)
    result = _native.Result.of(logits, np.arange(b * (w + 1), dtype=np.int32))
    tokens, widths = rng.integers(0, vocab, (b, w)).astype(np.int32), np.full(b, w, np.int32)
    parents = np.tile(np.array([-1, 0, 0, 1, 2, 2, 3, -1], np.int32), (b, 1))
    starts = np.arange(b, dtype=np.int32) * (w + 1)
    params = SamplingParams(temperature=0.9)
    rows = [describe(Chooser(params, Noise(7, i), 0), []) for i in range(b)]
    tokens[:, 0] = [result.choose(int(starts[i]), rows[i]) for i in range(b)]  # each walk goes on for a node
    expected = result.verify(*(each.copy() for each in (tokens, widths, parents, starts)), rows)

    def call() -> None:
        found = result.verify(tokens, widths, parents, starts, rows)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))

    Meddler(tokens, widths, parents, starts).calls(call)
    assert (expected[1] >= 1).all()


# -- after the end ---------------------------------------------------------------------------------------------------


def test_what_outlives_its_model_works_or_says_so(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=2)
    row = model.kv.alloc()
    tokens = np.arange(5, dtype=np.int32)
    batch = Batch.pack([row], [tokens], [0], [True], hidden_layers=(0,))
    output = model.forward(batch)
    hidden_states, logits = output.hidden_states(tokens), output.logits(tokens)
    parts, runtime, kv = model.parts, model.runtime, model.kv
    kv.free(row)
    for call in (lambda: kv.length(row), lambda: kv.free(row), lambda: kv.truncate(row, 0)):
        with pytest.raises(IndexError, match="KV row 0 is not in use"):
            call()
    with pytest.raises(IndexError, match="KV row 0 is not in use"):
        model.forward(batch)
    model.close()
    closed: list[Callable[[], Any]] = [
        kv.alloc, lambda: kv.bytes, lambda: parts.embed(tokens), lambda: parts.norm(np.ones((1, 64), np.float32)),
        lambda: parts.logits(np.ones((1, 64), np.float32)), lambda: model.forward(batch), lambda: model.runtime,
        lambda: model.isa, lambda: model.runtime.team, model.take_timings,
    ]  # fmt: skip
    for call in closed:
        with pytest.raises(ValueError, match="this model is closed: load it again"):
            call()
    assert np.array_equal(output.logits(tokens), logits)  # a result has what it needs, threads included
    params = SamplingParams(temperature=0.7, seed=1)
    drafts = Drafts(np.zeros((2, 1), np.int32), np.ones(2, np.int32))
    found = output.verify(drafts, np.array([0, 2], np.int32), [Chooser(params, Noise(1), 0)] * 2)
    assert isinstance(found, Verdicts)
    assert hidden_states.numpy().shape == (5, 1, 64)
    again = tiny.load("Q4_1", runtime=runtime)
    assert np.array_equal(feed(again, again.kv.alloc(), tokens), logits)
    again.close()


def test_none_where_an_object_must_be(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    index = _native.SuffixIndex(100, 8, 4, 4, [0.0, 1.0], 0.5)
    one = np.array([1], np.int32)
    calls: list[Callable[[], Any]] = [
        lambda: index.propose(one, 4, [None], True), lambda: _native.Model(None, model.runtime, "", False, -1),
        lambda: _native.embed(None, one), lambda: _native.pack(None, np.zeros(64, np.uint8), 0, 4, 4),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((TypeError, RuntimeError)):
            call()
    model.close()


# -- files that shrink -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 100, 0.5, -1])
def test_a_model_file_that_is_cut_short(keep: float, tiny: Tiny, tmp_path: Path) -> None:
    """Between opening and loading: an error that names it. After loading: nothing, since all of it was read."""
    from outpace.models.weights.gguf import GGUFFile

    path = tmp_path / "model.gguf"
    shutil.copy(tiny.path("Q4_1"), path)
    size = path.stat().st_size
    left = int(keep * size) if 0 < keep < 1 else int(keep) if keep >= 0 else size - 1
    opened = GGUFFile.open(path)
    model = native_model.load_native(path, threads=1)
    expected = feed(model, model.kv.alloc(), np.arange(20))
    os.truncate(path, left)
    assert np.array_equal(feed(model, model.kv.alloc(), np.arange(20)), expected)
    model.close()
    with pytest.raises(ModelError, match=rf"model\.gguf ends at byte \d+ now, and had {size}: it was cut short"):
        native_model.load_native(opened, threads=1)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        native_model.load_native(path, threads=1)


def test_a_safetensors_file_that_is_cut_short(tmp_path: Path) -> None:
    from outpace.models.weights import safetensors
    from tests.fuzz import seeds

    for name, data in seeds.folders()["llama-F32"].items():
        (tmp_path / name).write_bytes(data)
    path = tmp_path / "model.safetensors"
    found = safetensors.read(path)
    model = native_model.load_native(tmp_path, threads=1)
    expected = feed(model, model.kv.alloc(), np.arange(9))
    os.truncate(path, path.stat().st_size // 2)
    assert np.array_equal(feed(model, model.kv.alloc(), np.arange(9)), expected)
    model.close()
    with pytest.raises(ModelError, match=r"model\.safetensors ends at byte .* it was cut short"):
        _ = [tensor.data for tensor in found.values()]
    with pytest.raises(ModelError, match=r"model\.safetensors is not a usable"):
        native_model.load_native(tmp_path, threads=1)


_TORN = """
    import faulthandler, os, sys
    import numpy as np
    from outpace import Engine, SamplingParams
    from outpace.drafters.lookup.datastore import Datastore, build
    from outpace.drafters.lookup.retrieval import RetrievalDrafter
    from outpace.errors import DrafterError
    from tests.toy import ToyModel

    path, order, file, foreign = sys.argv[1:]
    if order == "before":
        faulthandler.enable()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with Engine(ToyModel(5)) as plain:
        expected = plain.generate([1, 2, 3], params).token_ids
    rng = np.random.default_rng(0)
    store = build(path, [[1, 2, 3, *expected], rng.integers(0, 5, 9000).tolist()], vocabulary="v", model="toy")
    if order == "after":
        faulthandler.enable()
    with Engine(ToyModel(5), drafter=RetrievalDrafter(store, vocab=5), size=4) as engine:
        whole = engine.generate([1, 2, 3], params)
        assert whole.token_ids == expected and whole.stats.accepted > 10
        os.truncate(f"{path}/00000.{file}.npy", 128)
        torn = engine.generate([1, 2, 3], params)
        assert torn.token_ids == expected
        engine.check()
        print(*torn.notes)
    try:
        Datastore(path)
    except DrafterError as error:
        print(error)
    sys.stdout.flush()
    if foreign == "yes":  # somebody else's mapping still ends the process, as ever
        with open(path + "/foreign", "wb+") as own:
            own.truncate(8192)
            mapped = np.memmap(own.name, np.uint8, "r")
            os.unlink(own.name)
            own.truncate(0)
            mapped[5000]
"""


@pytest.mark.parametrize(
    ("order", "file", "foreign"),
    [("never", "tokens", "yes"), ("before", "keys", "yes"), ("after", "order", "yes"), ("never", "keys", "no")],
)
def test_a_datastore_that_is_cut_short_while_it_is_open(order: str, file: str, foreign: str, tmp_path: Path) -> None:
    """Its drafter fails by name and the request is decoded plainly; ``order``: when Python's own handler was set."""
    if SANITIZED and foreign == "yes":
        pytest.skip("a sanitizer answers the signal itself")
    done = run(_TORN, tmp_path / "store", order, file, foreign)
    assert "was cut short while it was open" in done.stdout, done.stderr[-2000:]
    assert "is damaged" in done.stdout
    assert done.returncode == (-signal.SIGBUS if foreign == "yes" else 0), done.stderr[-2000:]
    assert ("Bus error" in done.stderr) == (foreign == "yes" and order != "never")
