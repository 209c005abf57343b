"""Steps of the native model against those of a backend in Python: decision for decision, record for record."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from native_helpers import Grammar, Tiny

import outpace.drafters.learned.drafter
import outpace.engine.step
from outpace import Engine, SamplingParams
from outpace.common.arrays import I32
from outpace.control.cost import Cost
from outpace.drafters.base import Drafter
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.learned.native import NativeEagle
from outpace.drafters.lookup.datastore import Datastore, build
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.recycling import RecyclingDrafter
from outpace.drafters.lookup.retrieval import RetrievalDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.engine import step
from outpace.engine.request import StepRecord
from outpace.engine.results import Result
from outpace.engine.statistics import Clock
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, KVCache, Model, Output
from outpace.models.native.model import NativeKV, NativeModel, load_native
from outpace.models.native.output import NativeOutput
from tests.eagles import table

VOCAB = 100
COST = Cost((1, 2, 4, 8, 64), (1.0, 1.05, 1.1, 1.3, 4.0))
TIMES = ("seconds", "queue_seconds", "prefill_seconds", "time_to_first_token", "decode_seconds", "total_seconds")

Asked = tuple[I32, SamplingParams, dict[str, Any]]


class WatchedOutput(NativeOutput):
    decide = Output.decide  # type: ignore[assignment]


class WatchedKV(NativeKV):
    settle = KVCache.settle


class Watched(NativeModel):
    """The same model as a backend in Python: batches are arrays, and its outputs and its cache are asked row by row."""

    native = None
    run = Model.run  # type: ignore[assignment]

    def forward(self, batch: Batch) -> NativeOutput:
        output = super().forward(batch)
        output.__class__ = WatchedOutput
        return output


class Counted:
    """An ``_native.Rows`` that counts what is called."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.calls = rows, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.rows, name)


class Scripted(Clock):
    """What a step takes is a function of its number, so that two policies learn the same."""

    made: Iterator[int] = count()

    def __init__(self) -> None:
        super().__init__()
        draws = np.random.default_rng(next(self.made)).random(4)
        self._said = dict(
            zip(("draft", "target", "verify", "other"), (draws * (0.02, 1.0, 0.1, 0.1)).tolist(), strict=True)
        )

    def so_far(self) -> dict[str, float]:
        return dict(self._said)


def datastore(top: int = VOCAB) -> Datastore:
    """Random tokens below ``top``; its arrays outlive its folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(1).integers(0, top, 4000).tolist()
        return build(Path(folder) / "store", [tokens], vocabulary="any", model="any")


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": NgramDrafter,
    "suffix": lambda: SuffixDrafter(memory=1 << 20),
    "chain": lambda: SuffixDrafter(tree=False),
    "recycle": RecyclingDrafter,
    "suffix+recycle": lambda: ComposedDrafter([SuffixDrafter(), RecyclingDrafter(history=True)]),
    "history": lambda: SuffixDrafter(history=True, memory=1 << 20),
    "retrieval": lambda: RetrievalDrafter(datastore(), least=1),
    "ngram+suffix": lambda: ComposedDrafter([NgramDrafter(), SuffixDrafter(history=True)]),
    "suffix, else retrieval": lambda: ComposedDrafter(
        [SuffixDrafter(), RetrievalDrafter(datastore(), least=1)], (False, True)
    ),
}
LEARNED: dict[str, Callable[[Drafter], Drafter]] = {
    "eagle": lambda eagle: eagle,
    "suffix+eagle": lambda eagle: ComposedDrafter([SuffixDrafter(), eagle]),
    "ngram, else eagle": lambda eagle: ComposedDrafter([NgramDrafter(), eagle], (False, True)),
}
PARAMS = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.05, "min_p": 0.05},
    {"temperature": 1.2, "top_n_sigma": 1.0},
    {"temperature": 0.0, "max_tokens": 9},
    {"temperature": 0.1, "n": 2},
)


def loaded(tiny: Tiny, native: bool, **options: Any) -> NativeModel:
    model = tiny.load("Q8_0", threads=2, max_length=256, **options)
    if not native:
        watch(model)
    return model


def watch(model: NativeModel) -> None:
    model.__class__, model.kv.__class__ = Watched, WatchedKV


def told(result: Result) -> Result:
    stats = replace(result.stats, **{name: 0.0 for name in TIMES if name != "seconds"}, seconds={}, steps_by_threads={})
    return replace(result, stats=stats)


def learned(model: NativeModel, native: bool, branch: int, blocks: int | None) -> LearnedDrafter:
    """Guesses what the model greedily says after a token, whatever is before it; the reference's rows are Python's."""
    model.__class__ = NativeModel
    tokens = np.arange(VOCAB, dtype=np.int32)
    rows = [model.kv.alloc() for _ in tokens]
    batch = Batch.pack(rows, [tokens[t : t + 1] for t in tokens], [0] * VOCAB, [True] * VOCAB)
    follows = model.forward(batch).choose(tokens, [Chooser(SamplingParams(temperature=0.0), Noise(0), 0)] * VOCAB)
    for row in rows:
        model.kv.free(row)
    its = table(model, range(VOCAB), (1, 0, 1), follows.tolist())
    limit = None if blocks is None else blocks * NativeEagle(model, its, dtype="float32").kv.growth(0, 1)
    head = NativeEagle(model, its, dtype="float32", limit=limit)
    if not native:
        watch(model)
        head.native_rows = lambda *_: None  # type: ignore[method-assign]
    return LearnedDrafter(head, its.config.hidden_layers, "eagle", VOCAB, branch=branch)


def run(
    model: NativeModel, drafter: Drafter | None, requests: list[Asked], **options: Any
) -> tuple[list[Result], list[StepRecord], int]:
    """All requests together, the invariants checked after every step; results, records, forwards in C++."""
    watched = options.pop("watched", True)
    runs = model.run
    served: list[object] = []
    model.run = lambda rows: served.append(rows) or runs(rows)  # type: ignore[method-assign, func-returns-value]
    records: list[StepRecord] = []
    outpace.engine.step.Clock.made = count()  # type: ignore[attr-defined]
    with Engine(model, drafter=drafter, cost=COST, max_rows=4, **options) as engine:
        if watched:
            engine.on_step = lambda record: records.append(replace(record, seconds={}))
        for prompt, params, asked in requests:
            engine.add(prompt.tolist(), params, **asked)
        results: dict[tuple[int, int], Result] = {}
        while not engine.idle:
            for delta in engine.step():
                if delta.result is not None:
                    results[delta.request, delta.sample] = told(delta.result)
            engine.check()
    return [results[key] for key in sorted(results)], records, 0 if isinstance(model, Watched) else len(served)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outpace.engine.step, "Clock", Scripted)


def asked(drafter: Drafter | None, alone: bool) -> list[Asked]:
    rng = np.random.default_rng(5)
    requests = []
    for i, params in enumerate(PARAMS):
        prompt = np.tile(rng.integers(0, 30, int(rng.integers(3, 9))), 4).astype(np.int32)
        its: dict[str, Any] = {"size": 3} if i == 1 else {"drafter": False} if i == 2 and drafter is not None else {}
        requests.append((prompt, SamplingParams(seed=i, ignore_eos=True, **({"max_tokens": 30 + 5 * i} | params)), its))
    return requests[:2] if alone else requests


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("size", [6, "auto"])
@pytest.mark.parametrize("watched", [True, False])
def test_equal_to_the_reference(tiny: Tiny, kind: str, size: int | str, watched: bool) -> None:
    found = []
    for native in (True, False):
        drafter = DRAFTERS[kind]()
        requests = asked(drafter, alone=not watched)
        found.append(run(loaded(tiny, native), drafter, requests, size=size, watched=watched))
    (results, records, served), (reference, expected, none) = found
    assert results == reference
    assert records == expected
    assert served > 20
    assert not none
    if watched:
        assert served == len(records)
        assert any(record.rows and record.chunks for record in records)


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize(
    "options",
    [
        {"size": 6},
        {"size": "auto", "prefix_rows": 2},
        {"size": "auto", "catch_up": 3},
        {"size": 5, "branch": 1},
        {"size": 6, "blocks": 3},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_learned_drafters_are_equal_to_the_reference(
    tiny: Tiny, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin and end, share prompts and are kept, read ahead, or find no memory (``blocks``: that the
    network's rows may take): it hears the same, and drafts the same."""
    monkeypatch.setattr(outpace.drafters.learned.drafter, "CATCH_UP", options.get("catch_up", 256))
    found = []
    for native in (True, False):
        model = loaded(tiny, native)
        eagle = learned(model, native, options.get("branch", 3), options.get("blocks"))
        drafter = LEARNED[kind](eagle)
        requests = asked(drafter, alone=False)
        requests.append((requests[0][0], SamplingParams(max_tokens=20, seed=6, ignore_eos=True), {}))
        rest = {name: value for name, value in options.items() if name in ("size", "prefix_rows")}
        found.append(run(model, drafter, requests, **rest))
    (results, records, served), (reference, expected, none) = found
    assert results == reference
    assert records == expected
    assert served == len(records)
    assert any(record.rows and record.chunks for record in records)
    assert not none
    assert any(result.stats.accepted_by.get("eagle") for result in results)


def test_rows_that_need_python_are_completed_there(tiny: Tiny) -> None:
    found = []
    for native in (True, False):
        requests = asked(NgramDrafter(), alone=False)
        requests[0] = (requests[0][0], requests[0][1].with_(logit_bias={3: 1.0}, max_tokens=12), {})
        requests[1] = (requests[1][0], requests[1][1].with_(top_logprobs=2, max_tokens=12), {})
        requests[3] = (requests[3][0], requests[3][1].with_(max_tokens=12), {"acceptance": "rejection"})
        found.append(run(loaded(tiny, native), NgramDrafter(), requests, size=4))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] > 0


def test_what_is_too_near_to_call_is_called_by_the_reference(tiny: Tiny, tmp_path: Any) -> None:
    """Without a final norm every token is as likely as any other, and half of them are top-p's very edge."""
    path = tmp_path / "flat.gguf"
    path.write_bytes(tiny.path("Q8_0").read_bytes())
    flat = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "output_norm.weight")
    flat.data[:] = 0
    flat.data.flush()  # type: ignore[attr-defined]
    found = []
    for native in (True, False):
        model = load_native(path, threads=1)
        if not native:
            watch(model)
        prompt = np.arange(20, dtype=np.int32)
        params = [
            SamplingParams(temperature=1.0, top_p=0.5, max_tokens=8, seed=1),
            *(SamplingParams(max_tokens=12, seed=i) for i in (2, 3, 4, 5)),  # the last one begins beside others
        ]
        found.append(run(model, SuffixDrafter(), [(prompt, its, {}) for its in params], size=4))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] > 0


def test_a_drafter_that_fails_in_cpp_loses_its_rows(tiny: Tiny) -> None:
    found = []
    for native in (True, False):
        drafter = RetrievalDrafter(datastore(VOCAB + 50), least=1)
        found.append(run(loaded(tiny, native), drafter, asked(drafter, alone=False)[:3], size=6))
    (results, records, _), (reference, expected, _) = found
    assert results == reference
    assert any("decoded plainly from there on" in note for result in results for note in result.notes)
    assert records == expected
    faults = [fault for record in records for fault in record.faults]
    assert any("failed (ValueError: it proposed a token that is not in the vocabulary" in fault for fault in faults)


def test_rows_that_give_way_are_computed_again(tiny: Tiny) -> None:
    """Rows that share blocks grow, are preempted and computed again, natively and not: the same tokens."""
    model = loaded(tiny, True)
    block = model.kv.bytes_for(model.kv.block)
    found = []
    for native in (True, False):
        prompt = np.tile(np.arange(31, dtype=np.int32), 2)
        params = SamplingParams(temperature=0.5, n=3, max_tokens=60, seed=3, ignore_eos=True)
        found.append(run(loaded(tiny, native, kv_memory=5 * block), SuffixDrafter(), [(prompt, params, {})], size=5))
    assert [r.token_ids for r in found[0][0]] == [r.token_ids for r in found[1][0]]
    assert found[0][2] > 0


def test_what_a_forward_raises_changes_nothing(tiny: Tiny) -> None:
    """The forward of a row that was cut behind the engine's back."""
    with Engine(loaded(tiny, True), drafter=SuffixDrafter(), size=4) as engine:
        prompt, params = np.arange(40, dtype=np.int32).tolist(), SamplingParams(max_tokens=30, ignore_eos=True)
        expected = engine.generate(prompt, params).token_ids
        engine.add(prompt, params)
        for _ in range(5):
            engine.step()
        row = engine._core.scheduler.running[0]
        engine.model.kv.truncate(row.row, row.cached - 1)  # which cannot be rolled back: it is preempted
        with pytest.raises(ValueError, match="position"):
            engine.step()
        engine.check()
        tokens = None
        while tokens is None:
            tokens = next((d.result.token_ids for d in engine.step() if d.result is not None), None)
            engine.check()
        assert tokens == expected


def test_a_closed_model_takes_no_step(tiny: Tiny) -> None:
    engine = Engine(loaded(tiny, True), drafter=NgramDrafter(), size=4)
    engine.add([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    engine.model.close()
    with pytest.raises(ValueError, match="this model is closed"):
        engine.step()


def test_a_step_that_is_over_keeps_nothing(tiny: Tiny) -> None:
    drafter = NgramDrafter()
    with Engine(loaded(tiny, True), drafter=drafter, size=4) as engine:
        before = sys.getrefcount(drafter.native)
        engine.generate([1, 2, 3] * 4, SamplingParams(max_tokens=9, ignore_eos=True))
        after = sys.getrefcount(drafter.native)
    assert after == before


@pytest.mark.parametrize("native", [True, False])
def test_log_probabilities_are_of_the_tokens_beside_them(tiny: Tiny, native: bool) -> None:
    """Of rows that end within a verdict, beside prompts in pieces: as one forward over all of the tokens says."""
    rng, prompts = np.random.default_rng(3), {}
    model = loaded(tiny, native)
    with Engine(model, drafter=NgramDrafter(), size=4, max_rows=3, prefill_chunk=8) as engine:
        for length, limit in ((5, 9), (21, 6), (12, 7)):
            prompt = np.tile(rng.integers(0, 9, length), 2).tolist()
            params = SamplingParams(top_logprobs=2, prompt_logprobs=1, max_tokens=limit, ignore_eos=True)
            prompts[engine.add(prompt, params, reuse_prefix=False)] = prompt
        results = []
        while not engine.idle:
            results += [delta.result for delta in engine.step() if delta.result is not None]
            engine.check()
        for result in results:
            tokens = np.array([*prompts[result.request], *result.token_ids], np.int32)
            row, at = model.kv.alloc(), np.arange(len(tokens) - 1, dtype=np.int32)
            output = model.forward(Batch.pack([row], [tokens], [0], [True]))
            tops = [1] * (result.prompt_tokens - 1) + [2] * len(result.token_ids)
            assert result.prompt_logprobs[0] is None
            assert [*result.prompt_logprobs[1:], *result.logprobs] == output.logprobs(at, tokens[1:], tops)
            model.kv.free(row)
        assert len(results) == 3


def test_python_touches_only_the_rows_that_need_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows, of which one has a grammar, one wants log-probabilities and one is ``rejection``: in a step they make
    one native draft call, one forward and one native verification, and Python completes three rows."""
    touched: set[int] = set()
    draft = step.draft
    monkeypatch.setattr(step, "draft", lambda now, i: touched.add(i) or draft(now, i))
    with Engine(loaded(tiny, True), drafter=NgramDrafter(), size=4, max_rows=8) as engine:
        for i in range(8):
            params = SamplingParams(max_tokens=24, seed=i, ignore_eos=True, top_logprobs=2 if i == 3 else 0)
            acceptance = "rejection" if i == 6 else "coupled"
            rules = [Grammar(VOCAB, 0.9)] if i == 1 else []
            engine.add(list(range(9)) * 3, params.with_(rules=rules), acceptance=acceptance, reuse_prefix=False)
        while not all(s.decoding for s in engine._core.scheduler.running) or not engine._core.scheduler.running:
            engine.step()
        rows = engine._core.rows = Counted(engine._core.rows)
        for _ in range(3):
            touched.clear()
            rows.calls.clear()
            engine.step()
            engine.check()
            assert [rows.calls[name] for name in ("begin", "propose", "forward", "verify", "settle")] == [1] * 5
            assert touched == {1, 6}
