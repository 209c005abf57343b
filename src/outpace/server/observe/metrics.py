"""Prometheus's metrics: Outpace's, and under vLLM's names those that mean the same, for its dashboards and tools.

The engine's thread pays nothing for them: what an engine counts anyway is read at a scrape, between two steps; times
are taken in the event loop, from parts of answers as they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Snapshot
from outpace.engine.statistics import Stats, pooled
from outpace.errors import OutpaceError
from outpace.server.engines.generation import Generation, Observer, Part
from outpace.server.errors import APIError
from outpace.server.observe.delays import Delay

if TYPE_CHECKING:
    from outpace.server.engines.service import Service

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_WAITS = (0.001, 0.005, *_LONG)
_TOKENS = tuple(float(2**i) for i in range(18))
_PATIENCE = 2.0  # seconds that an engine has to answer a scrape; after that its last answer counts
_ALSO = {  # ours, and vLLM's name for the same
    "outpace_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "outpace_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "outpace_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "outpace_queue_seconds": "vllm:request_queue_time_seconds",
    "outpace_request_seconds": "vllm:e2e_request_latency_seconds",
    "outpace_request_prompt_tokens": "vllm:request_prompt_tokens",
    "outpace_request_tokens": "vllm:request_generation_tokens",
}
_ENDED = {
    "stop": "stop",
    "length": "length",
    "deadline": "length",
    "error": "error",
    "gone": "abort",
}  # vLLM's words for how a request ended


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last snapshot of a model's engine. ``before``: what engines did that served the model earlier."""

    serving: AsyncEngine
    snapshot: Snapshot
    before: Stats
    stale: bool = False

    @property
    def stats(self) -> Stats:
        return pooled([self.before, self.snapshot.stats])


class Metrics(Observer):
    """Counts, in a registry of its own: nothing of the process is in it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        model = ["model"]
        self._first = self._histogram(
            "outpace_time_to_first_token_seconds", "Seconds from queueing to the first token.", _LONG
        )
        self._gap = self._histogram(
            "outpace_inter_token_seconds", "Seconds between two steps' tokens of an answer.", _SHORT
        )
        self._each = self._histogram(
            "outpace_time_per_output_token_seconds", "Seconds a token, after the first step's, of an answer.", _SHORT
        )
        self._queued = self._histogram("outpace_queue_seconds", "Seconds that a choice waited for a row.", _WAITS)
        self._total = self._histogram("outpace_request_seconds", "Seconds from queueing to the last token.", _LONG)
        self._prompt = self._histogram("outpace_request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self._generated = self._histogram("outpace_request_tokens", "Output tokens of a choice.", _TOKENS)
        self._ended = Counter(
            "outpace_answers", "Choices that have ended, by how.", [*model, "ended"], registry=self._registry
        )
        self._refused = Counter(
            "outpace_refused", "Requests answered with an error.", ["status", "code"], registry=self._registry
        )
        self._delay = Histogram(
            "outpace_loop_delay_seconds", "Seconds by which the event loop was late, ten times a second, by cause.",
            ["cause"], buckets=_SHORT, registry=self._registry,
        )  # fmt: skip
        self._inside = Gauge("outpace_requests_inside", "HTTP requests in flight.", registry=self._registry)
        self._read = _AtScrape()
        self._registry.register(self._read)
        histograms = [self._first, self._gap, self._each, self._queued, self._total, self._prompt, self._generated]
        self._registry.register(_Also(histograms, self._ended))
        self._last: dict[Generation, dict[int, float]] = {}  # when each choice last gained tokens

    def _histogram(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, words, ["model"], buckets=buckets, registry=self._registry)

    def began(self, generation: Generation) -> None:
        self._last[generation] = {}

    def gained(self, generation: Generation, parts: Sequence[Part]) -> None:
        last, name, now = self._last[generation], generation.model.name, time.perf_counter()
        for part in parts:
            if part.token_ids:
                if part.index in last:
                    self._gap.labels(name).observe(now - last[part.index])
                else:
                    self._first.labels(name).observe(now - generation.began)
                last[part.index] = now
            if part.result is not None:
                stats = part.result.stats
                self._queued.labels(name).observe(stats.queue_seconds)
                self._total.labels(name).observe(now - generation.began)
                self._prompt.labels(name).observe(part.result.prompt_tokens)
                self._generated.labels(name).observe(part.result.completion_tokens)
                if stats.decode_tokens_per_second:
                    self._each.labels(name).observe(1 / stats.decode_tokens_per_second)
                self._ended.labels(name, part.result.finish_reason).inc()

    def ended(self, generation: Generation, error: APIError | None) -> None:
        del self._last[generation]
        left = generation.work.samples - len(generation.results)
        if left:
            self._ended.labels(generation.model.name, "gone" if error is None else "error").inc(left)

    def refused(self, error: APIError) -> None:
        self._refused.labels(str(error.status), error.code or "").inc()

    def delayed(self, delay: Delay) -> None:
        for cause, seconds in asdict(delay).items():
            self._delay.labels(cause).observe(seconds)

    async def exposition(self, service: Service) -> tuple[bytes, str]:
        """What ``/metrics`` answers, and its content type."""
        self._inside.set(service.inside)
        await self._read.look(service)
        return await service.work(generate_latest, self._registry), CONTENT_TYPE_LATEST


class _AtScrape(Collector):
    """What engines count themselves."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._states: dict[str, str] = {}
        self._queues: dict[str, tuple[int, int, int]] = {}  # samples in flight, the most of one key, and the limit

    async def look(self, service: Service) -> None:
        """Ask every loaded engine."""
        states = service.models.state()
        self._states = {name: str(its["state"]) for name, its in states.items()}
        known = {name: its for name in states if (its := service.known(name)) is not None}
        self._queues = {
            name: (its.inside, its.largest, its.capacity) for name, its in ((n, k.admission) for n, k in known.items())
        }
        looks = [self._ask(name, its.serving) for name, its in known.items() if its.serving.alive]
        await asyncio.gather(*looks)

    async def _ask(self, name: str, serving: AsyncEngine) -> None:
        seen = self._seen.get(name)
        before = Stats(requests=0) if seen is None else seen.before if seen.serving is serving else seen.stats
        try:
            found = await asyncio.wait_for(serving.ask(lambda engine: engine.snapshot()), _PATIENCE)
        except (TimeoutError, OutpaceError):  # in a long forward, or being unloaded
            if seen is not None:
                self._seen[name] = _Seen(seen.serving, seen.snapshot, seen.before, stale=True)
            return
        self._seen[name] = _Seen(serving, found, before)

    def collect(self) -> Iterable[Metric]:
        """Every family, with one sample a model or more."""
        families = _Families()
        for name, state in self._states.items():
            its = {"model": name, "state": state}
            families.gauge("outpace_model_state", "1 for the state that a model is in.", its, 1)
        for name, (inside, largest, capacity) in self._queues.items():
            its = {"model": name}
            families.gauge("outpace_queue_samples", "Samples that run or wait.", its, inside)
            families.gauge("outpace_queue_largest_key", "The most samples of one API key.", its, largest)
            families.gauge("outpace_queue_limit", "Samples at which further requests get 429.", its, capacity)
        for name, seen in self._seen.items():
            _now(families, name, seen)
            _so_far(families, name, seen.stats)
        yield from families.all.values()


class _Families:
    """Families of samples by name, made when their first sample comes."""

    def __init__(self) -> None:
        self.all: dict[str, Metric] = {}

    def gauge(self, name: str, words: str, labels: Mapping[str, str], value: float) -> None:
        """A sample of a gauge."""
        family = self.all.setdefault(name, GaugeMetricFamily(name, words))
        family.add_sample(name, dict(labels), value)

    def count(self, name: str, words: str, labels: Mapping[str, str], value: float) -> None:
        """A sample of a counter."""
        family = self.all.setdefault(name, CounterMetricFamily(name, words))
        family.add_sample(f"{name}_total", dict(labels), value)


def _theirs(model: str, **more: str) -> dict[str, str]:
    return {"model_name": model, "engine": "0", **more}


def _now(families: _Families, model: str, seen: _Seen) -> None:
    its, ours, theirs = seen.snapshot, {"model": model}, _theirs(model)
    gauge = families.gauge
    gauge("outpace_scrape_stale", "1 if the engine was too busy to answer: its figures are older.", ours, seen.stale)
    gauge("outpace_rows_running", "Rows that prefill or decode.", ours, its.running)
    gauge("outpace_rows_limit", "Most rows at once.", ours, its.rows)
    gauge("outpace_rows_waiting", "Samples that wait for a row.", ours, its.waiting)
    gauge("outpace_kv_bytes", "Bytes of KV in use, kept prefixes included.", ours, its.kv_bytes)
    gauge("outpace_kv_limit_bytes", "Most bytes of KV.", ours, its.kv_bound)
    gauge("outpace_kv_blocks", "Blocks of KV in use.", ours, its.kv_bytes // its.block_bytes)
    gauge("outpace_prefix_rows", "Rows kept for requests with the same beginning.", ours, its.prefix_rows)
    if (disk := its.disk) is not None:
        for what, words, value in (
            ("hits", "Beginnings of prompts that were read from the disk.", disk.hits),
            ("hit_tokens", "Tokens of those.", disk.tokens),
            ("read_bytes", "KV read from the disk.", disk.read),
            ("written_bytes", "KV written to the disk.", disk.written),
            ("evicted_files", "Files deleted, since others were used later.", disk.evicted),
            ("damaged_files", "Files that were not what was written.", disk.damaged),
        ):
            families.count(f"outpace_disk_{what}", words, ours, value)
    gauge("vllm:num_requests_running", "Rows that prefill or decode.", theirs, its.running)
    gauge("vllm:num_requests_waiting", "Samples that wait for a row.", theirs, its.waiting)
    gauge("vllm:kv_cache_usage_perc", "Share of KV in use, 0 to 1.", theirs, its.kv_bytes / its.kv_bound)


def _so_far(families: _Families, model: str, its: Stats) -> None:
    ours, count = {"model": model}, families.count
    drafts = its.drafted_at[0] if its.drafted_at else 0
    for mine, vllms, words, value in (
        ("prompt_tokens", "prompt_tokens", "Prompt tokens of samples that were started.", its.prompt_tokens),
        ("tokens", "generation_tokens", "Output tokens.", its.tokens),
        ("prefix_queries", "prefix_cache_queries", "Prompt tokens of samples that were started.", its.prompt_tokens),
        ("prefix_hits", "prefix_cache_hits", "Prompt tokens whose KV was reused.", its.reused_tokens),
        ("preemptions", "num_preemptions", "Rows preempted for others.", its.preemptions),
        ("drafts", "spec_decode_num_drafts", "Drafts that were verified.", drafts),
        ("drafted_tokens", "spec_decode_num_draft_tokens", "Draft tokens that were verified.", its.drafted),
        ("accepted_tokens", "spec_decode_num_accepted_tokens", "Draft tokens accepted.", its.accepted),
    ):
        count(f"outpace_{mine}", words, ours, value)
        count(f"vllm:{vllms}", words, _theirs(model), value)
    words = "Output tokens that another order of sums might have chosen otherwise."
    count("outpace_near_ties", words, ours, its.near_ties)
    for source, drafted in its.drafted_by.items():
        by = {**ours, "drafter": source}
        count("outpace_drafted_by", "Draft tokens verified, by drafter.", by, drafted)
        count("outpace_accepted_by", "Draft tokens accepted, by drafter.", by, its.accepted_by.get(source, 0))
    reached, accepted_to = "Drafts that reached a position.", "Drafts accepted as far as a position."
    for at, (drafted, accepted) in enumerate(zip(its.drafted_at, its.accepted_at, strict=True)):
        by, theirs = {**ours, "position": str(at)}, _theirs(model, position=str(at))
        count("outpace_drafted_at", reached, by, drafted)
        count("outpace_accepted_at", accepted_to, by, accepted)
        count("vllm:spec_decode_num_accepted_tokens_per_pos", accepted_to, theirs, accepted)
    for size, steps in sorted(its.steps_by_size.items()):
        count("outpace_steps_by_width", "Steps of rows, by width.", {**ours, "width": str(1 + size)}, steps)
    for threads, steps in sorted(its.steps_by_threads.items()):
        words = "Steps of rows, by the threads that their forward ended with."
        count("outpace_steps_by_threads", words, {**ours, "threads": str(threads)}, steps)
    for (state, why), steps in decisions(its).items():
        words = "Steps of rows, by whether they drafted, and why."
        count("outpace_steps", words, {**ours, "drafting": state, "why": why}, steps)
    for phase, seconds in its.seconds.items():
        count("outpace_phase_seconds", "Time of rows in steps, by phase.", {**ours, "phase": phase}, seconds)


def decisions(its: Stats) -> dict[tuple[str, str], int]:
    """Steps by whether they drafted, and why: the policy expected it to be faster, or slower; a fixed size; nothing was
    proposed or asked for."""
    total, off = sum(its.steps_by_size.values()), its.steps_by_size.get(0, 0)
    faster = int(its.expected.get("on", [0])[0])
    slower = int(its.expected.get("off", [0])[0])
    return {
        ("on", "faster"): faster,
        ("on", "fixed"): total - off - faster,
        ("off", "slower"): slower,
        ("off", "nothing"): off - slower,
    }


class _Also(Collector):
    """Families of ours under vLLM's names."""

    def __init__(self, histograms: Sequence[Histogram], ended: Counter) -> None:
        self._histograms, self._ended = histograms, ended

    def collect(self) -> Iterable[Metric]:
        """Copies, with vLLM's labels."""
        for histogram in self._histograms:
            for family in histogram.collect():
                name = _ALSO[family.name]
                copy = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    if sample.name.endswith("_created"):
                        continue
                    labels: dict[str, Any] = {n: v for n, v in sample.labels.items() if n != "model"}
                    labels |= _theirs(sample.labels["model"])
                    copy.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
                yield copy
        success = CounterMetricFamily("vllm:request_success", "Choices that have ended, by how.")
        counts: dict[tuple[str, str], float] = {}
        for family in self._ended.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    key = sample.labels["model"], _ENDED[sample.labels["ended"]]
                    counts[key] = counts.get(key, 0) + sample.value
        for (model, how), value in counts.items():
            success.add_sample("vllm:request_success_total", _theirs(model, finished_reason=how), value)
        yield success
