"""The engine under every kind of drafter, load and accident: plain decoding's tokens, and invariants at every step.

What plain decoding gives is computed here from the toy model and the choosers alone, one token at a time; none of the
engine's scheduling, caching, drafting or verification takes part in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from outpace import Engine, SamplingParams
from outpace.common.arrays import F32, I32
from outpace.control.cost import Cost
from outpace.drafters.base import Drafter, DrafterNeeds, Event, RowView
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.results import TARGET, Delta, Result
from outpace.errors import MemoryLimitError, NoTokenAllowedError, ParameterError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from tests.toy import BYTES, ToyError, ToyKV, ToyModel, ToyTokenizer
from tests.toy_blocks import medusa, parallel
from tests.toy_head import ToyHead

VOCAB, LONGEST, SIZE = 6, 72, 6
LEARNED = ["eagle", "eagle chain", "eagle short", "eagle+", "parallel", "parallel+", "medusa", "medusa+"]


@dataclass(frozen=True)
class DeadEnd:
    """Forbids every token after ``after`` outputs, or once ``trigger`` was output."""

    after: int = 10**9
    trigger: int = -1

    def start(self, prompt: I32) -> tuple[int, bool]:
        return (0, False)

    def advance(self, state: tuple[int, bool], token: int) -> tuple[int, bool]:
        return (state[0] + 1, state[1] or token == self.trigger)

    def apply(self, state: tuple[int, bool], logits: F32) -> None:
        if state[0] >= self.after or state[1]:
            logits.fill(-np.inf)


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    {"temperature": 1.2, "top_k": 3, "logit_bias": {0: 1.5, 1: -np.inf}},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.05, "top_logprobs": 2},
    {"temperature": 1.1, "top_n_sigma": 1.2, "top_k": 5},
    {"temperature": 1.0, "allowed_tokens": [0, 2, 3], "logprobs": True},
    {"temperature": 1.0, "stop": ["ab", "dc", "bcd"]},
    {"frequency_penalty": 0.8, "stop_ids": [2], "logprobs": True},
    {"temperature": 1.0, "rules": [DeadEnd(after=4)], "logprobs": True},
    {"temperature": 1.0, "rules": [DeadEnd(trigger=3)]},
    {"temperature": 1.0, "rules": [DeadEnd(trigger=3)], "stop_ids": [3]},
    {"temperature": 1.5, "ignore_eos": True},
]


def plain(
    model: ToyModel, prompt: Sequence[int], params: SamplingParams, seed: int, sample: int, longest: int = LONGEST
) -> tuple[Any, ...]:
    """(tokens, finish reason, text) of plain decoding."""
    prefix, text = list(prompt), ""
    limit = min(len(prefix) + (params.max_tokens or longest), longest)
    chooser = Chooser.start(params, Noise(seed, sample), rules_for(params, VOCAB), np.array(prompt, np.int32))
    ends = {*params.stop_ids, *(() if params.ignore_eos else model.info.eos_ids)}
    while True:
        try:
            token = chooser.choose(model.logits_after(prefix))
        except NoTokenAllowedError:
            return prefix[len(prompt) :], "error", text
        prefix.append(token)
        chooser = chooser.advance(token)
        if token in ends:
            return prefix[len(prompt) :], "stop", text
        text += chr(97 + token)
        found = [text.find(stop) for stop in params.stop_strings if stop in text]
        if found:
            return prefix[len(prompt) :], "stop", text[: min(found)]
        if len(prefix) == limit:
            return prefix[len(prompt) :], "length", text


class Scripted(Drafter):
    """Drafts by script, knowing the target: always right, always wrong, or chains and trees that are sometimes right.

    It also holds the engine to its word: what rows live, what ``observe`` says, what the hidden states belong to.
    """

    def __init__(self, target: ToyModel, script: str, seed: int, *, reads: bool) -> None:
        self.name = script
        self.needs = DrafterNeeds(hidden_layers=(0, 2) if reads else ())
        self._target, self._rng = target, np.random.default_rng(seed)
        self._requests: dict[int, int] = {}  # by row
        self._observed: dict[int, list[int]] = defaultdict(list)  # since the row was first seen

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        drafts = [self._draft(view, int(size)) for view, size in zip(rows, sizes, strict=True)]
        width = max(len(tokens) for tokens, _ in drafts) + int(self._rng.integers(2))  # padding must not matter
        tokens, parents = np.full((len(rows), width), 1, np.int32), np.full((len(rows), width), -1, np.int32)
        for i, (its, above) in enumerate(drafts):
            tokens[i, : len(its)], parents[i, : len(its)] = its, above
        widths = np.array([len(its) for its, _ in drafts], np.int32)
        chained = self.name != "tree"
        source = self._rng.integers(0, 2, tokens.shape).astype(np.uint8)
        return Drafts(tokens, widths, None if chained else parents, source=source, sources=("one", "two"))

    def _draft(self, view: RowView, size: int) -> tuple[list[int], list[int]]:
        committed = view.tokens.tolist()
        assert len(committed) + size < view.limit
        assert self._requests.setdefault(view.row, view.request) == view.request, "a row was not released"
        seen = self._observed[view.row]
        assert committed[len(committed) - len(seen) :] == seen
        width = size if self.name in ("perfect", "wrong") else int(self._rng.integers(size + 1))
        tokens: list[int] = []
        parents: list[int] = []
        nodes = [(committed, view.chooser)]
        for i in range(width):
            parent = int(self._rng.integers(-1, i)) if self.name == "tree" else i - 1
            prefix, chooser = nodes[parent + 1]
            try:
                right = chooser.choose(self._target.logits_after(prefix))
            except NoTokenAllowedError:
                right = 0
            guess = int(self._rng.integers(VOCAB))
            if self.name == "wrong":
                token = (right + 1) % VOCAB
            else:
                token = right if self.name == "perfect" or self._rng.random() < 0.6 else guess
            tokens.append(token)
            parents.append(parent)
            nodes.append(([*prefix, token], chooser.advance(token)))
        return tokens, parents

    def observe(self, events: Sequence[Event]) -> None:
        for e in events:
            self._observed[e.row] += e.tokens.tolist()
            assert (e.hidden_states is not None) == bool(self.needs.hidden_layers)
            if e.hidden_states is not None and len(e.tokens):
                hidden_states = e.hidden_states.numpy()
                assert hidden_states.shape == (len(e.tokens), 2, 2)
                assert hidden_states[:, 0, 1].tolist() == list(range(e.start - 1, e.start - 1 + len(e.tokens)))
                assert hidden_states[1:, 0, 0].tolist() == e.tokens[:-1].tolist()

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._requests.pop(row, None)
        self._observed.pop(row, None)

    def growth(self, row: int, positions: int) -> int:
        return 3 * positions - self._held(row)

    @property
    def bytes(self) -> int:
        return sum(self._held(row) for row in self._requests)

    def _held(self, row: int) -> int:
        return 3 * len(self._observed.get(row, ()))

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._requests) <= set(rows)
        assert set(self._observed) <= set(rows)


def make_drafter(kind: str, target: ToyModel, seed: int, *, reads: bool = False) -> Drafter:
    if kind == "ngram":
        return NgramDrafter()
    if kind.startswith("model"):
        draft = ToyModel(VOCAB, seed=1, blur=0.3, memory=target._memory, max_length=40 if "short" in kind else LONGEST)
        return ModelDrafter(draft, kind, VOCAB)
    if kind.startswith("eagle"):
        guesses = ToyModel(VOCAB, seed=1, blur=0.3, memory=2)
        head = ToyHead(guesses, [0, 1, 2, 4, 5], limit=60 if "short" in kind else None, max_length=LONGEST)
        eagle = LearnedDrafter(head, (0, 2), "eagle", VOCAB, branch=1 if "chain" in kind else 3)
        return ComposedDrafter([NgramDrafter(), eagle]) if "+" in kind else eagle
    if kind.startswith(("parallel", "medusa")):
        guesses = ToyModel(VOCAB, seed=1, blur=0.3, memory=2)
        ids, blocks = [0, 1, 2, 4, 5], kind.startswith("parallel")
        made = parallel(guesses, ids, VOCAB, LONGEST - 8) if blocks else medusa(guesses, ids, VOCAB)
        return ComposedDrafter([NgramDrafter(), made]) if "+" in kind else made
    return Scripted(target, kind, seed, reads=reads)


class World:
    """An engine, what was asked of it, and what it has said so far."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.target = ToyModel(VOCAB, seed=1, max_length=LONGEST, eos=(5,), memory=config["memory"])
        self.drafter = make_drafter(config["drafter"], self.target, config["seed"], reads=config["reads"])
        positions = config["positions"]
        self.engine = Engine(
            self.target,
            ToyTokenizer(),  # type: ignore[arg-type]
            drafter=self.drafter,
            size="auto" if config.get("slope") is not None else SIZE,
            cost=Cost((1, 64), (1e-3, 1e-3 * (1 + (config.get("slope") or 0)))),
            max_rows=config["max_rows"],
            prefill_chunk=config["prefill_chunk"],
            prefix_rows=config["prefix_rows"],
            kv_memory=None if positions is None else positions * BYTES,
        )
        self.prefix_rows = config["prefix_rows"]
        self.longest = min(LONGEST, LONGEST if positions is None else positions // ToyKV.block * ToyKV.block)
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.said: dict[tuple[int, int], list[Delta]] = defaultdict(list)
        self.results: dict[tuple[int, int], Result] = {}

    def add(self, prompt: list[int], params: SamplingParams, **options: Any) -> None:
        try:
            request = self.engine.add(prompt, params, **options)
        except MemoryLimitError:
            event("refused: too large for ever")
            return
        self.asked[request] = (prompt, params)

    def step(self) -> None:
        self.hear(self.engine.step())

    def hear(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            key = (delta.request, delta.sample)
            assert key not in self.results, "a request spoke after its end"
            self.said[key].append(delta)
            if delta.result is not None:
                self.results[key] = delta.result
                self.judge(delta.result)
        faults = self.engine._core.drafting.faults  # which no request would tell of
        assert not faults, faults
        self.engine.check()

    def cancel(self, which: int) -> None:
        if self.asked:
            self.hear(self.engine.cancel(sorted(self.asked)[which % len(self.asked)]))

    def judge(self, result: Result) -> None:
        prompt, params = self.asked[result.request]
        said = self.said[result.request, result.sample]
        assert params.seed is not None
        tokens, reason, text = plain(self.target, prompt, params, params.seed, result.sample, self.longest)
        got = list(result.token_ids)
        if result.acceptance == "coupled" or params.greedy:
            if result.finish_reason == "cancelled" or "bytes of KV" in str(result.error):
                assert got == tokens[: len(got)]
            else:
                assert (got, result.finish_reason, result.text) == (tokens, reason, text)
        assert (result.error is not None) == (result.finish_reason == "error")
        assert [t for d in said for t in d.token_ids] == got
        assert "".join(d.text for d in said) == result.text
        assert [s for d in said for s in d.sources] == list(result.sources)
        assert [x for d in said for x in d.logprobs] == list(result.logprobs)
        self.judge_logprobs(result, prompt, params)
        self.judge_stats(result)

    def judge_logprobs(self, result: Result, prompt: list[int], params: SamplingParams) -> None:
        """The target's raw log-softmax at every committed token, drafted or not."""
        assert len(result.logprobs) == (len(result.token_ids) if params.wants_logprobs else 0)
        for i, found in enumerate(result.logprobs):
            raw = self.target.logits_after([*prompt, *result.token_ids[:i]]).astype(np.float64)
            expected = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
            assert found.token == result.token_ids[i]
            assert found.text == chr(97 + found.token)
            np.testing.assert_allclose(found.logprob, expected[found.token], rtol=1e-12)
            likeliest = np.argsort(-expected, kind="stable")[: params.top_logprobs].tolist()
            assert [alternative.token for alternative in found.top] == likeliest

    def judge_stats(self, result: Result) -> None:
        stats = result.stats
        assert stats.tokens == result.completion_tokens
        assert sum(stats.accepted_by.values()) == stats.accepted == sum(stats.accepted_at)
        assert sum(stats.drafted_by.values()) == stats.drafted >= sum(stats.drafted_at)
        assert stats.accepted == sum(source != TARGET for source in result.sources)
        assert all(a <= d <= stats.steps for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
        if result.finish_reason != "error":
            assert stats.tokens >= stats.steps
        if result.drafter == "none":
            assert stats.drafted == 0
        if not stats.preemptions:
            assert stats.reused_tokens < max(result.prompt_tokens, 1)

    def finish(self) -> None:
        for _ in range(4000):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle, "the engine never came to an end"
        assert set(self.results) == {(r, i) for r, (_, params) in self.asked.items() for i in range(params.n)}
        assert len(self.target.kv.rows) <= self.prefix_rows
        pooled = self.engine.stats
        assert pooled.tokens == sum(r.completion_tokens for r in self.results.values())
        assert pooled.requests == len(self.results)
        self.engine.close()
        assert self.target.kv.rows == []
        assert self.drafter.bytes == 0
        self.drafter.check([])


adds = st.fixed_dictionaries(
    {
        "stem": st.integers(0, 24),  # prompts begin alike, so that rows are shared
        "tail": st.lists(st.integers(0, VOCAB - 1), max_size=12),
        "params": st.integers(0, len(PARAMS) - 1),
        "seed": st.integers(0, 3),
        "max_tokens": st.sampled_from([1, 2, 7, 20, None]),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "size": st.sampled_from([0, 1, 3, 3, SIZE, SIZE]),
        "drafter": st.sampled_from([True, True, True, False]),
        "acceptance": st.sampled_from(["coupled"] * 5 + ["rejection"]),
        "reuse_prefix": st.sampled_from([True, True, False]),
        "priority": st.sampled_from([0, 0, 0, 1]),
    }
)
operations = st.lists(
    st.one_of(
        adds,
        adds,
        st.just("step"),
        st.just("steps"),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.sampled_from(["forward", "output"])),
    ),
    min_size=3,
    max_size=30,
)
configs = st.fixed_dictionaries(
    {
        "drafter": st.sampled_from(
            ["perfect", "wrong", "chain", "tree", "tree", "ngram", "model", "model short", *LEARNED]
        ),
        "memory": st.sampled_from([2, 100]),  # 100: every slot of the cache counts
        "reads": st.booleans(),
        "seed": st.integers(0, 99),
        "max_rows": st.integers(1, 4),
        "prefill_chunk": st.sampled_from([1, 3, 16, 64]),
        "prefix_rows": st.integers(0, 3),
        "positions": st.sampled_from([None, None, 40, 76, 130, 240]),  # of KV memory: a few rows at most
        "slope": st.sampled_from([None, 0.1, 5.0, 60.0]),  # None: fixed sizes; else the policy chooses, by such costs
    }
)
STEM = np.random.default_rng(7).integers(0, VOCAB, 24).tolist()


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(configs, operations)
def test_whatever_happens_the_tokens_are_plain_decodings(config: dict[str, Any], ops: list[Any]) -> None:
    world = World(config)
    event(config["drafter"])
    for op in ops:
        if isinstance(op, dict):
            prompt = [*STEM[: op["stem"]], *op["tail"]] or [0]
            options = {**PARAMS[op["params"]], **{name: op[name] for name in ("seed", "max_tokens", "n")}}
            world.add(
                prompt,
                SamplingParams(**options),
                size=None if op["size"] == SIZE else op["size"],
                drafter=op["drafter"],
                acceptance=op["acceptance"],
                reuse_prefix=op["reuse_prefix"],
                priority=op["priority"],
            )
        elif op == "step":
            world.step()
        elif op == "steps":
            for _ in range(7):
                world.step()
        elif op[0] == "cancel":
            world.cancel(op[1])
        elif not world.engine.idle:
            world.target.fail = op[1]
            try:
                world.step()
            except ToyError:
                event(f"failed: {op[1]}")
            world.target.fail = None
            world.engine.check()
    world.finish()


CALM = {
    "memory": 100, "reads": False, "seed": 0, "max_rows": 4, "prefill_chunk": 64, "prefix_rows": 0, "positions": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["perfect", "wrong", "chain", "tree", "ngram", "model", "model short", *LEARNED])
@pytest.mark.parametrize("memory", [2, 100])
def test_every_parameter_under_every_drafter(kind: str, memory: int) -> None:
    """All at once in one ragged batch, a third of the requests with two samples: ``judge`` compares each with plain."""
    config = {**CALM, "max_rows": 5, "prefill_chunk": 9, "prefix_rows": 1, "reads": True}
    world = World({**config, "drafter": kind, "memory": memory})
    for i, options in enumerate(PARAMS):
        params = SamplingParams(seed=i, max_tokens=30, n=1 + (i % 3 == 0), **options)
        world.add(STEM[: 1 + 2 * i], params, size=1 + i % SIZE)
    world.finish()


def test_a_draft_model_that_is_the_target_is_always_believed() -> None:
    """So its cache is in step: after full acceptance, in ragged batches, after forks, and when rows are reused."""
    target = ToyModel(VOCAB, seed=1, max_length=LONGEST, memory=100)
    twin = ToyModel(VOCAB, seed=1, max_length=LONGEST, memory=100)
    with Engine(target, drafter=ModelDrafter(twin, "twin", VOCAB), size=4, max_rows=3, prefix_rows=1) as engine:
        for round_ in range(3):
            each = [
                SamplingParams(temperature=1.0, seed=i, n=1 + i % 2, max_tokens=9 + 5 * i, frequency_penalty=0.3)
                for i in range(5)
            ]
            engine.generate_many([STEM[: 3 + 5 * i + round_] for i in range(5)], each)
            engine.check()
        assert engine.stats.acceptance_rate == 1.0
        assert engine.stats.reused_tokens > 0


def test_a_perfect_drafter_is_always_believed_and_a_wrong_one_never() -> None:
    for kind, rate, per_step in (("perfect", 1.0, 1 + SIZE), ("wrong", 0.0, 1)):
        world = World({**CALM, "drafter": kind})
        world.add([1, 2, 3], SamplingParams(temperature=1.0, seed=3, max_tokens=4 * (1 + SIZE), ignore_eos=True))
        world.finish()
        stats = world.results[0, 0].stats
        assert stats.acceptance_rate == rate
        assert stats.tokens_per_step == per_step


def test_a_dead_end_after_the_end_is_no_error() -> None:
    """A draft runs past a stop token; that the rules allow nothing there must not show (plain never looks there)."""
    for acceptance in ("coupled", "rejection"):
        for seed in range(12):
            world = World({**CALM, "drafter": "perfect"})
            params = SamplingParams(rules=[DeadEnd(trigger=3)], stop_ids=[3], seed=seed, logit_bias={3: 1.5})
            world.add([seed % VOCAB], params, acceptance=acceptance)
            world.finish()
            assert world.results[0, 0].finish_reason != "error"


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_dead_end_keeps_what_came_before_it_and_spares_the_neighbours(acceptance: str) -> None:
    world = World({**CALM, "drafter": "perfect"})
    world.add([1, 2], SamplingParams(rules=[DeadEnd(after=4)], ignore_eos=True), acceptance=acceptance)
    world.add([1, 2], SamplingParams(max_tokens=12, ignore_eos=True), acceptance=acceptance)
    world.asked = {r: (prompt, params.with_(seed=0)) for r, (prompt, params) in world.asked.items()}
    world.finish()
    dead, fine = world.results[0, 0], world.results[1, 0]
    assert (dead.finish_reason, dead.completion_tokens) == ("error", 4)
    assert "every token is forbidden" in str(dead.error)
    assert (fine.finish_reason, fine.token_ids[:4]) == ("length", dead.token_ids)


def test_samples_share_the_prompt_and_differ() -> None:
    world = World({**CALM, "drafter": "tree", "prefill_chunk": 8})
    world.add(STEM, SamplingParams(temperature=1.5, seed=1, n=4, max_tokens=20, ignore_eos=True))
    world.finish()
    assert len({r.token_ids for r in world.results.values()}) == 4
    assert [world.results[0, i].stats.reused_tokens for i in range(4)] == [0, *[len(STEM) - 1] * 3]


def test_a_prefix_is_reused_and_the_least_recently_used_row_goes_first() -> None:
    world = World({**CALM, "drafter": "model", "prefix_rows": 2})
    other = [*STEM[:18], (STEM[18] + 1) % VOCAB]  # uses the first row, so the second becomes the oldest
    for prompt in (STEM[:20], [5] * 20, other, [5] * 20, STEM[:20]):
        world.add(prompt, SamplingParams(max_tokens=3, seed=0, ignore_eos=True))
        while not world.engine.idle:
            world.step()
    assert [world.results[i, 0].stats.reused_tokens for i in range(5)] == [0, 0, 18, 0, 18]
    world.finish()


def test_a_third_of_the_worst_case_memory_finishes_all_and_changes_nothing() -> None:
    """32 mixed requests in a third of what 16 whole rows would take: none fails, every token is plain decoding's."""
    longest = 24 + 40
    positions = 16 * longest // 3
    world = World({**CALM, "drafter": "tree", "positions": positions, "max_rows": 16})
    for i in range(32):
        prompt = [*STEM[: i % 24], i % VOCAB]
        options = PARAMS[i % 7]
        world.add(
            prompt, SamplingParams(seed=i, max_tokens=40 - i % 9, ignore_eos=True, **options), reuse_prefix=i % 3 > 0
        )
    most = 0
    while not world.engine.idle:
        world.step()
        most = max(most, len(world.target.kv.rows))
        assert world.target.kv.bytes <= positions * BYTES
    assert most > positions // longest, "rows were reserved by the worst case"
    assert world.engine.stats.preemptions > 0
    assert all(result.error is None for result in world.results.values())
    with pytest.raises(MemoryLimitError, match="lower max_tokens or the prompt"):
        World({**CALM, "drafter": "ngram", "positions": 40}).engine.add([1], SamplingParams(max_tokens=60))
    world.finish()


def test_a_row_that_outgrows_the_memory_alone_ends_and_says_why() -> None:
    """Without ``max_tokens`` the memory is the context: it ends there, and no sooner."""
    world = World({**CALM, "drafter": "chain", "positions": 30})
    world.add([1, 2], SamplingParams(seed=0, max_tokens=None, ignore_eos=True))
    world.finish()
    result = world.results[0, 0]
    assert (result.finish_reason, result.prompt_tokens + result.completion_tokens) == ("length", 28)


def test_closing_ends_what_runs_and_what_waits() -> None:
    world = World({**CALM, "drafter": "tree", "max_rows": 1, "prefix_rows": 2})
    for _ in range(3):
        world.add(STEM, SamplingParams(seed=0))
    world.step()
    world.step()
    world.engine.close()
    world.engine.close()
    assert world.target.kv.rows == []
    world.drafter.check([])
    results = [delta.result for delta in world.engine.step()]
    assert [result and result.error for result in results] == [
        "the engine was closed while this request ran: make a new one"
    ] * 3
    assert world.engine.idle
    assert world.engine.step() == []
    with pytest.raises(ParameterError, match="closed"):
        world.engine.add([1])


def test_closing_a_stream_cancels_its_request() -> None:
    world = World({**CALM, "drafter": "chain"})
    stream = world.engine.stream([1, 2], SamplingParams(seed=0, ignore_eos=True))
    next(stream)
    stream.close()
    assert world.engine.idle
    world.engine.check()
    assert world.target.kv.rows == []


def test_generate_many_keeps_the_order_of_prompts_and_samples() -> None:
    world = World({**CALM, "drafter": "tree", "max_rows": 2})
    prompts = [[1], [2, 3, 4], [5] * 9]
    each = [SamplingParams(temperature=1.0, seed=i, n=i + 1, max_tokens=9 - 2 * i) for i in range(3)]
    results = world.engine.generate_many(prompts, each)
    assert [(r.prompt_tokens, r.sample) for r in results] == [(1, 0), (3, 0), (3, 1), (9, 0), (9, 1), (9, 2)]
    for r in results:
        i = {1: 0, 3: 1, 9: 2}[r.prompt_tokens]
        assert list(r.token_ids) == plain(world.target, prompts[i], each[i], i, r.sample)[0]


def test_a_drawn_seed_is_reported_and_gives_the_same_again() -> None:
    world = World({**CALM, "drafter": "chain"})
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    first, second = world.engine.generate([1], params), world.engine.generate([1], params)
    assert first.seed != second.seed
    assert world.engine.generate([1], params.with_(seed=first.seed)).token_ids == first.token_ids


REFUSALS: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    ([], {}, {}, "empty"),
    ("", {}, {}, "empty"),
    ([[1, 2]], {}, {}, "token ids"),
    ([1.5, 2.0], {}, {}, "token ids"),
    (["a", "b"], {}, {}, "token ids"),
    ([True], {}, {}, "token ids"),
    (None, {}, {}, "NoneType"),
    (5, {}, {}, "int"),
    ([VOCAB], {}, {}, f"token id {VOCAB}"),
    ([2**40], {}, {}, f"token id {2**40}"),
    ([-1], {}, {}, "token id -1"),
    ([1] * LONGEST, {}, {}, f"{LONGEST} tokens"),
    ([1], {"stop_ids": [VOCAB]}, {}, "stop_ids"),
    ([1], {"logit_bias": {VOCAB: 1.0}}, {}, "logit_bias"),
    ([1], {"allowed_tokens": [VOCAB]}, {}, "allowed_tokens"),
    ([1], {"rules": [3]}, {}, "LogitsProcessor"),
    ([1], {}, {"size": SIZE + 1}, f"size={SIZE + 1}"),
    ([1], {}, {"size": -1}, "size=-1"),
    ([1], {}, {"size": 64}, "size=64"),
    ([1], {}, {"size": 1.5}, "size=1.5"),
    ([1], {}, {"acceptance": "exact"}, "acceptance='exact'"),
]


@pytest.mark.parametrize(("prompt", "params", "options", "says"), REFUSALS)
def test_what_cannot_be_honoured_is_refused_and_nothing_is_queued(
    prompt: Any, params: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    engine = World({**CALM, "drafter": "chain"}).engine
    with pytest.raises(ParameterError) as caught:
        engine.add(prompt, SamplingParams(**params), **options)
    assert says in str(caught.value)
    assert engine.idle


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_rows": 0}, "max_rows=0"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"prefix_rows": -1}, "prefix_rows=-1"),
        ({"size": 64}, "size=64"),
        ({"acceptance": "lossless"}, "acceptance='lossless'"),
    ],
)
def test_engine_options_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        Engine(ToyModel(), **options)
