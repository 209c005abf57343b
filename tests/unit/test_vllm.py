"""Our lookups as vLLM's drafter, by its interface for one: a stand-in for its batch, and where its source package
is, its own loader and the call that it makes."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.errors import DrafterError, OutpaceError
from outpace.integrations import vllm

VOCAB, LONGEST, MOST = 1000, 400, 6
SOURCES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outpace-peers" / "vllm-0.33.0" / "vllm"


def config(more: Any = None) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=LONGEST),
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST, model=None),
        additional_config=more or {},
    )


def made(spec: str, more: Any = None) -> Any:
    return getattr(vllm, spec)(config(more))


@dataclass
class Request:
    """``text``: its prompt, and after ``prompt`` tokens the answer that the target gives."""

    text: list[int]
    prompt: int
    length: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    accepted: int = 0


def phrases(seed: int, novelty: float, answer: int = 150) -> Request:
    """A prompt of 30 tokens and an answer that goes on from places of the text so far, or with new tokens."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCAB, 30).tolist()
    while len(text) < 30 + answer:
        if rng.random() < novelty:
            text += rng.integers(0, VOCAB, 4).tolist()
        else:
            at = int(rng.integers(0, len(text) - 8))
            text += text[at : at + 12]
    return Request(text[: 30 + answer], 30)


def serve(proposer: Any, waiting: list[Request], rows: int, clock: list[float] | None = None) -> int:
    """vLLM's loop around a custom proposer, as its Model Runner V1 has it: the steps it takes.

    A prompt is read in two parts, of which the first gives no token; who has ended leaves, and the last row takes the
    place; a row's draft is verified in the next step, and tokens stand in the batch before it is asked.
    """
    tokens, counts = np.zeros((rows, LONGEST), np.int32), np.zeros(rows, np.int32)
    live: list[tuple[Request, list[int], bool]] = []  # with its draft, and whether half of its prompt is read
    waiting, steps = list(waiting), 0
    while live or waiting:
        steps += 1
        while waiting and len(live) < rows:
            live.append((waiting.pop(0), [], False))
        if clock is not None:
            clock[0] += 1.0 + 0.05 * sum(len(draft) for _, draft, _ in live)
        sampled: list[list[int]] = []
        for i, (request, draft, half) in enumerate(live):
            start = max(request.length, request.prompt)
            good = 0
            while good < len(draft) and request.text[start + good : start + good + 1] == [draft[good]]:
                good += 1
            gained = request.text[start : start + good + 1] if half else []
            request.accepted += max(len(gained) - 1, 0)
            request.length = start + len(gained)
            tokens[i, : request.length] = request.text[: request.length]
            counts[i] = request.length
            sampled.append(gained)
        drafts = proposer.propose(sampled, counts, tokens, slot_mappings=None)
        assert len(drafts) == len(live)
        after = []
        for (request, _, half), draft, gained in zip(live, drafts, sampled, strict=True):
            assert len(draft) <= MOST
            assert all(0 <= token < VOCAB for token in draft)
            assert bool(gained) or not draft
            if half:
                request.drafts.append(draft)
            if request.length < len(request.text):
                after.append((request, draft, True))
        while len(after) > 1 and len(after) < len(live):  # the last row takes a place that is free
            after.insert(0, after.pop())
            break
        live = after
    return steps


@pytest.mark.parametrize("spec", ["suffix:size=6", "ngram+suffix:size=6", "ngram:size=4"])
def test_a_row_is_known_wherever_it_stands(spec: str) -> None:
    """In a crowd whose rows change places every request gets the drafts that it gets alone."""
    alone = [phrases(seed, 0.2) for seed in range(7)]
    for request in alone:
        serve(made(spec), [request], 1)
    crowd = [phrases(seed, 0.2) for seed in range(7)]
    proposer = made(spec)
    serve(proposer, crowd, 3)
    assert [request.drafts for request in crowd] == [request.drafts for request in alone]
    assert sum(request.accepted for request in crowd) > 0.4 * 7 * 150
    assert proposer.propose([], np.zeros(3, np.int32), np.zeros((3, LONGEST), np.int32)) == []
    assert not proposer._live  # all are released


def test_chains_are_those_of_the_drafter() -> None:
    request = phrases(3, 0.2)
    serve(made("suffix:size=5,tree=0"), [request], 1)
    drafter, at = SuffixDrafter(tree=False, vocab=VOCAB), 31
    for draft in request.drafts:
        text = np.array(request.text[:at], np.int32)
        (lists,) = drafter.native.trees([(0, 0, 30, text, 4 * 5)])
        assert draft == lists[0][:5]
        good = 0
        while good < len(draft) and request.text[at + good : at + good + 1] == [draft[good]]:
            good += 1
        at += good + 1


def test_a_history_serves_later_requests_and_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "the.history"
    proposer = made("configured", {"outpace": f"suffix:history=1,size=6,file={file}"})
    first = serve(proposer, [phrases(seed, 0.9) for seed in range(3)], 2)
    second = serve(proposer, [phrases(seed, 0.9) for seed in range(3)], 2)
    assert second < 0.5 * first
    proposer._lookups._saving.join()
    assert file.exists()  # where the process is killed, too
    proposer.close()
    third = serve(made("configured", {"outpace": f"suffix:history=1,size=6,file={file}"}), [phrases(0, 0.9)], 1)
    assert third < 0.5 * serve(made("suffix:size=6"), [phrases(0, 0.9)], 1)


@pytest.mark.parametrize(("novelty", "least", "most"), [(0.1, 0.5, 1.0), (1.0, 0.0, 0.05)])
def test_the_policy_sizes_drafts(novelty: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token verified takes a twentieth of a step: long chains where they are accepted, hardly any where none is."""
    clock = [0.0]
    monkeypatch.setattr(vllm, "perf_counter", lambda: clock[0])
    requests = [phrases(seed, novelty, 300) for seed in range(6)]
    proposer = made("suffix")
    serve(proposer, requests, 2, clock)
    tried = [len(draft) for request in requests for draft in request.drafts]
    assert least <= sum(tried) / len(tried) / MOST <= most
    assert not len(proposer._policy) or proposer._live


def test_the_log_says_who_sizes_drafts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        made("suffix")
        made("suffix:size=4")
    said = [record.getMessage().rpartition("tokens, ")[2] for record in caplog.records]
    assert said == ["sized by the policy", "fixed"]


def test_refused() -> None:
    for spec, said in (
        ("eagle:demo", "eagle does not draft inside vLLM"), ("suffix+mtp", "mtp does not draft inside vLLM"),
        ("suffix:size=0", "leave speculative_config out"), ("sufix", "did you mean suffix"),
    ):  # fmt: skip
        with pytest.raises(DrafterError, match=said):
            made(spec)
    with pytest.raises(DrafterError, match="no drafter is configured: give one in vLLM's additional_config"):
        made("configured", {"outpaced": "suffix"})
    other = SimpleNamespace(model_config=None)
    with pytest.raises(OutpaceError, match=r"another interface for custom drafters than 0\.32 and 0\.33: its config"):
        vllm.suffix(other)
    proposer = made("suffix")
    for given in ((6, [[1]], np.ones(1, np.int32), np.ones((1, 9), np.int32)), ([[1]],)):
        with pytest.raises(OutpaceError, match=r"calls propose with \((int, )?list.* Install one of these, or write"):
            proposer.propose(*given)


@pytest.mark.skipif(not SOURCES.is_dir(), reason=f"no {SOURCES}: scripts/peers vllm fetches it")
def test_vllm_itself_loads_it_and_calls_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader, run from its source package, and the call in its model runner."""
    logger = SimpleNamespace(info=lambda *_: None)
    for name, content in {"config": {"VllmConfig": Any}, "logger": {"init_logger": lambda _: logger}}.items():
        module = ModuleType(f"vllm.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    spec = importlib.util.spec_from_file_location("loader", SOURCES / "v1/spec_decode/custom_class_proposer.py")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    given = config()
    given.speculative_config.model = "outpace.integrations.vllm.ngram+suffix:history=1,max=8"
    proposer = loader.create_custom_proposer(given)
    assert isinstance(proposer, vllm.Proposer)
    tree = ast.parse((SOURCES / "v1/worker/gpu_model_runner.py").read_text(encoding="utf-8"))
    calls = [ast.unparse(each) for each in ast.walk(tree) if isinstance(each, ast.Call)]
    made_so = "self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, slot_mappings=slot_mappings)"
    assert f"cast(Any, self.drafter).propose(sampled_token_ids, {made_so}" in calls
