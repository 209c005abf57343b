"""Our lookups as SGLang's drafter: a stand-in for its batch, and where its package is, its own registry of algorithms
and the worker that is derived from its NGRAM."""

from __future__ import annotations

import importlib.util
import os
import sys
from array import array
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from outpace.errors import DrafterError, OutpaceError
from outpace.integrations import sglang
from tests.unit.test_vllm import LONGEST, VOCAB, phrases
from tests.unit.test_vllm import Request as Text

NODES = 7
SOURCES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outpace-peers" / "sglang-0.5.23"
MISSING = f"no {SOURCES}: pip install --no-deps --target {SOURCES} sglang==0.5.23"


@dataclass
class Req:
    """A request of SGLang. ``late``: accepted tokens that its scheduler has not put into ``output_ids`` yet."""

    rid: str
    text: Text
    origin_input_ids_unpadded: list[int]
    output_ids: array[int]
    late: list[int]


class Batch:
    """``overlap``: the last step's tokens are in ``spec_info`` alone, NODES places a request."""

    def __init__(self, reqs: list[Req], overlap: bool) -> None:
        self.reqs = reqs
        rows = [req.late + [-1] * (NODES - len(req.late)) for req in reqs] if overlap else []
        counts = [len(req.late) for req in reqs]
        self.spec_info = SimpleNamespace(
            accept_tokens=torch.tensor(rows, dtype=torch.int64).flatten(), accept_lens=torch.tensor(counts)
        )

    def grammar_needs_sync(self) -> bool:
        return False


def answer(tokens: Any, mask: Any, rest: list[int]) -> list[int]:
    """What a target that goes on with ``rest`` gets of one request's tree: accepted tokens and the next one."""
    at, gained = 0, []
    for token in rest:
        gained.append(token)
        children = [n for n in range(at + 1, NODES) if mask[n].nonzero()[0][-2:].tolist() == [at, n]]
        found = [n for n in children if tokens[n] == token]
        if not found:
            break
        at = found[0]
    return gained


def serve(drafts: Any, waiting: list[Text], rows: int, overlap: bool, chains: bool = False) -> int:
    """SGLang's scheduler around its worker: the steps that it takes."""
    live: list[Req] = []
    waiting, steps = list(waiting), 0
    while live or waiting:
        while waiting and len(live) < rows:
            text = waiting.pop(0)
            first, text.length = text.text[text.prompt], text.prompt + 1
            live.insert(0, Req(f"request {id(text)}", text, text.text[: text.prompt], array("q"), [first]))
        steps += 1
        if not overlap:
            for req in live:
                req.output_ids.extend(req.late)
        tokens, mask = drafts(Batch(live, overlap))
        if overlap:
            for req in live:
                req.output_ids.extend(req.late)
        assert tokens.dtype == mask.dtype == np.int64
        tokens, mask = tokens.reshape(len(live), NODES), mask.reshape(len(live), NODES, NODES)
        assert not np.triu(mask, 1).any()
        assert (mask[:, range(NODES), range(NODES)] == 1).all()
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        if chains:
            assert (mask == np.tril(np.ones((NODES, NODES)))).all()
        for req, row, sees in zip(live, tokens, mask, strict=True):
            text = req.text
            assert row[0] == text.text[text.length - 1]
            text.drafts.append([*row.tolist(), *sees.ravel().tolist()])
            req.late = answer(row, sees, text.text[text.length :])
            text.length += len(req.late)
            text.accepted += max(len(req.late) - 1, 0)
        live = [req for req in live if req.text.length < len(req.text.text)]
    return steps


def trees(spec: str, chains: bool = False) -> sglang.Trees:
    return sglang.Trees(sglang.lookups.checked(spec, "SGLang"), VOCAB, LONGEST, NODES, chains)


@pytest.mark.parametrize(("spec", "chains"), [("ngram+suffix", False), ("suffix", True)])
def test_a_crowd_gets_the_drafts_of_each_alone(spec: str, chains: bool) -> None:
    def called(drafter: sglang.Trees, batch: Batch) -> Any:
        return drafter.draft(
            [sglang.Request(r, r.rid, r.origin_input_ids_unpadded, r.output_ids, []) for r in batch.reqs]
        )

    alone = [phrases(seed, 0.2) for seed in range(6)]
    for text in alone:
        drafter = trees(spec, chains)
        serve(lambda batch, drafter=drafter: called(drafter, batch), [text], 1, False, chains)
    crowd = [phrases(seed, 0.2) for seed in range(6)]
    drafter = trees(spec, chains)
    serve(lambda batch: called(drafter, batch), crowd, 3, False, chains)
    assert [text.drafts for text in crowd] == [text.drafts for text in alone]
    assert sum(text.accepted for text in crowd) > 0.4 * 6 * 150


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, said in (
        ("", "OUTPACE_DRAFTER=ngram"), ("eagle:demo", "eagle does not draft inside SGLang"),
        ("suffix:size=4", "size=4 has no meaning inside SGLang"),
    ):  # fmt: skip
        monkeypatch.setenv("OUTPACE_DRAFTER", spec)
        with pytest.raises(DrafterError, match=said):
            sglang.configured()
    monkeypatch.setenv("OUTPACE_DRAFTER", "ngram+suffix:history=1,file=kept.history")
    assert sglang.configured(SimpleNamespace(tp_size=1))
    with pytest.raises(DrafterError, match=r"SGLang's 2 ranks \(its tp_size\) .* leave file out"):
        sglang.configured(SimpleNamespace(tp_size=2))
    monkeypatch.setenv("OUTPACE_DRAFTER", "suffix:history=1")
    assert sglang.configured(SimpleNamespace(tp_size=2))
    monkeypatch.setenv("OUTPACE_DRAFTER", "suffix")
    older = ModuleType("sglang.srt.speculative.ngram_worker")
    older.__dict__["NGRAMWorker"] = type("NGRAMWorker", (), {"_prepare_draft_tokens": lambda self, batch, more: None})
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, older.__name__, older)
    for call in (sglang.worker, sglang.register):
        with pytest.raises(OutpaceError, match=r"SGLang of an unknown version has another interface .* than 0\.5\.23"):
            call()


class Replaced:
    """Every module of sglang but those in ``KEPT`` is a mock: they want a card, or packages by the dozen."""

    KEPT = ("speculative", "spec_info", "spec_registry", "ngram_worker")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "sglang" or name.rpartition(".")[2] in self.KEPT:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__ = [str(SOURCES.joinpath(*spec.name.split(".")))]
        module.BaseSpecWorker = object
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.mark.skipif(not SOURCES.is_dir(), reason=MISSING)
@pytest.mark.parametrize("overlap", [False, True])
def test_sglangs_registry_and_worker(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registry takes the algorithm, which answers as NGRAM does, and its worker drafts by it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Replaced(), *sys.meta_path])
    monkeypatch.setenv("OUTPACE_DRAFTER", "ngram+suffix")
    try:
        sglang.register()
        info = importlib.import_module("sglang.srt.speculative.spec_info")
        found, ngram = info.SpeculativeAlgorithm.from_string("outpace"), info.SpeculativeAlgorithm.NGRAM
        for name in vars(type(ngram)):
            if name.startswith(("is_", "supports_", "has_", "need_", "carries_")):
                assert getattr(found, name)() == getattr(ngram, name)(), name
        assert found.validate_server_args(None)
        kind = found.create_worker(SimpleNamespace())
        worker = kind.__new__(kind)
        model = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB, context_len=LONGEST))
        running = importlib.import_module("sglang.srt.speculative.ngram_worker")
        running.get_spec.return_value = SimpleNamespace(
            speculative_num_draft_tokens=NODES, speculative_eagle_topk=4, speculative_ngram_max_trie_depth=18,
            speculative_num_steps=1, speculative_ngram_external_corpus_path=None, speculative_ngram_min_bfs_breadth=1,
            speculative_ngram_max_bfs_breadth=4, speculative_ngram_match_type="BFS", speculative_ngram_capacity=100,
            speculative_ngram_external_sam_budget=0, speculative_ngram_external_corpus_max_tokens=0,
        )  # fmt: skip
        running.get_schedule.return_value = SimpleNamespace(disable_overlap_schedule=not overlap, page_size=1)
        worker.__init__(SimpleNamespace(tp_size=2), 0, 0, SimpleNamespace(model_runner=model))
        texts = [phrases(seed, 0.2) for seed in range(4)]

        def drafts(batch: Batch) -> Any:
            tokens, mask = worker._prepare_draft_tokens(batch)
            links = running._derive_tree_links(mask, len(batch.reqs), NODES)  # SGLang's reading of the mask
            for i, (row, sees) in enumerate(zip(*links, strict=True)):
                reached, left = {0}, [0]
                while left:
                    child = int(row[left.pop()])
                    while child >= 0:
                        reached.add(child)
                        left.append(child)
                        child = int(sees[child])
                assert reached == set(range(NODES)), i
            worker._update_ngram_corpus(batch)
            return tokens, mask

        serve(drafts, texts, 2, overlap)
        assert sum(text.accepted for text in texts) > 0.4 * 4 * 150
        assert not worker.ngram_corpus.batch_put.called
        worker.clear_cache_pool()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
