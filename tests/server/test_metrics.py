"""What is counted is what happened; vLLM's names say the same; the dashboard asks for nothing that there is not."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outpace import Engine, SamplingParams
from outpace.engine.statistics import Stats
from outpace.errors import MissingExtraError, ParameterError
from outpace.server.observe.logs import JsonLines, Lines, RequestLog, configure
from outpace.server.observe.metrics import Metrics, decisions
from outpace.server.observe.spans import Spans, tracer
from tests.server.serving import Running, serving

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
SAID = "Repeat after me: one two three, one two three, one two three, one two three."


class Recorded:
    """A tracer, and its spans as they ended."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []

    def start_span(self, name: str) -> Any:
        tracer, events = self, list[str]()
        its: dict[str, Any] = {"name": name, "events": events}

        class Span:
            def set_attribute(self, key: str, value: Any) -> None:
                its[key] = value

            def add_event(self, name: str) -> None:
                events.append(name)

            def end(self) -> None:
                tracer.ended.append(its)

        return Span()


SPANS = Recorded()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("kv")
    engine = Engine.load("demo", drafter="ngram+suffix", max_length=1024, cache_dir=folder)
    with serving(engine, observers=(Metrics(), RequestLog(), Spans(SPANS))) as running:
        yield running


def scraped(served: Running) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name, and by the values of their labels but the model's, in the order of the labels."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {n: v for n, v in sorted(sample.labels.items()) if n not in ("model", "model_name", "engine")}
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


@pytest.fixture
def written() -> Iterator[dict[str, io.StringIO]]:
    """What is logged meanwhile, in both forms."""
    logger = logging.getLogger("outpace.server.observe.logs")
    level = logger.level
    forms = {"json": JsonLines(), "text": Lines("%(message)s")}
    handlers = {name: logging.StreamHandler(io.StringIO()) for name in forms}
    for name, handler in handlers.items():
        handler.setFormatter(forms[name])
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield {name: handler.stream for name, handler in handlers.items()}
    logger.setLevel(level)
    for handler in handlers.values():
        logger.removeHandler(handler)


def test_counts_are_the_answers(served: Running, written: dict[str, io.StringIO]) -> None:
    client = served.client()
    before = scraped(served).get("outpace_tokens_total", {}).get((), 0)
    told = []
    for stream in (False, True):
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": SAID}], max_tokens=32, temperature=0,
            extra_headers={"x-request-id": f"asked-{stream}"}, extra_body={"speculation": {"size": 4}}, **options,
        )  # fmt: skip
        told.append(list(answer)[-1].usage if stream else answer.usage)
    with pytest.raises(Exception, match="nobody"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": SAID}])
    served.at_rest()
    its = scraped(served)
    usages = [usage.model_dump() for usage in told]
    spoken = [usage["speculation"] for usage in usages]
    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert its["outpace_tokens_total"][()] - before == tokens == its["vllm:generation_tokens_total"][()]
    assert its["outpace_near_ties_total"][()] == sum(each["near_ties"] for each in spoken) == 0  # the native backend
    assert its["vllm:prompt_tokens_total"][()] == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert its["vllm:prefix_cache_hits_total"][()] == cached > 0
    drafted = sum(each["drafted"] for each in spoken)
    accepted = sum(each["accepted"] for each in spoken)
    assert its["vllm:spec_decode_num_draft_tokens_total"][()] == drafted > 0
    assert its["vllm:spec_decode_num_accepted_tokens_total"][()] == accepted
    assert sum(its["outpace_drafted_by_total"].values()) == drafted
    assert sum(its["outpace_accepted_by_total"].values()) == accepted
    assert its["outpace_drafted_at_total"][("0",)] == its["vllm:spec_decode_num_drafts_total"][()]
    steps = sum(each["steps"] for each in spoken)
    assert sum(its["outpace_steps_total"].values()) == sum(its["outpace_steps_by_width_total"].values()) == steps
    assert sum(its["outpace_steps_by_threads_total"].values()) == steps
    for ours, theirs in (
        ("outpace_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("outpace_queue_seconds", "vllm:request_queue_time_seconds"),
    ):
        assert its[f"{ours}_count"][()] == its[f"{theirs}_count"][()] == 2
        assert its[f"{ours}_bucket"] == its[f"{theirs}_bucket"]
    assert sum(its["vllm:request_success_total"].values()) == sum(its["outpace_answers_total"].values()) == 2
    assert its["outpace_refused_total"][("model_not_found", "404")] == 1
    assert its["vllm:num_requests_running"][()] == its["vllm:num_requests_waiting"][()] == 0
    assert 0 < its["vllm:kv_cache_usage_perc"][()] < 1
    json_lines, text = written["json"].getvalue(), written["text"].getvalue()
    assert "one two three" not in json_lines + text
    logged = [json.loads(line) for line in json_lines.splitlines()]
    assert [line["message"] for line in logged] == ["answered", "answered", "refused"]
    assert [line["request_id"] for line in logged[:2]] == ["asked-False", "asked-True"]
    assert logged[2]["request_id"]
    assert [line["completion_tokens"] for line in logged[:2]] == [usage["completion_tokens"] for usage in usages]
    assert re.search(r"^refused request_id=\S+ status=404 ", text, re.MULTILINE)
    assert [span["gen_ai.usage.output_tokens"] for span in SPANS.ended] == [u["completion_tokens"] for u in usages]
    assert all(span["events"] == ["first token"] for span in SPANS.ended)


def test_a_client_that_leaves_is_counted(served: Running) -> None:
    before = scraped(served)["outpace_answers_total"].get(("gone",), 0)
    stream = served.client().chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Write a long story."}], max_tokens=600, stream=True
    )
    next(iter(stream))
    running = scraped(served)
    assert running["outpace_rows_running"][()] == running["outpace_requests_inside"][()] == 1
    assert running["outpace_queue_samples"][()] == running["outpace_queue_largest_key"][()] == 1
    stream.close()
    served.at_rest()
    assert scraped(served)["outpace_answers_total"][("gone",)] == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_counted_once(served: Running, stream: bool, written: dict[str, io.StringIO]) -> None:
    """As an answer that nobody read, not as a refusal too."""
    before = scraped(served)
    body = json.dumps({"prompt": SAID, "max_tokens": 600, "ignore_eos": True, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    with served.held() as reached, socket.create_connection(served.server.address) as connection:
        connection.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        assert reached.wait(30)
    served.at_rest()
    after = scraped(served)
    assert after["outpace_answers_total"][("gone",)] == before["outpace_answers_total"].get(("gone",), 0) + 1
    assert sum(after["outpace_answers_total"].values()) == sum(before.get("outpace_answers_total", {}).values()) + 1
    assert after.get("outpace_refused_total") == before.get("outpace_refused_total")
    (line,) = written["text"].getvalue().splitlines()
    assert line.startswith("left by its client ")


def test_what_fails_is_counted_once(served: Running, written: dict[str, io.StringIO]) -> None:
    """As a generation's end, not as a refusal too; and no client writes lines or fields of the log."""
    before = scraped(served)
    grammar = {"type": "regex", "value": "(yes|no)"}
    body = {"prompt": SAID, "grammar": grammar, "min_tokens": 8, "user": "a\nFAKE status=200\x1b[31m"}
    error = served.answer("/v1/completions", body, 400)["error"]
    assert error["code"] == "no_answer"
    served.at_rest()
    after = scraped(served)
    assert after["outpace_answers_total"][("error",)] == before["outpace_answers_total"].get(("error",), 0) + 1
    assert after.get("outpace_refused_total") == before.get("outpace_refused_total")
    (line,) = written["text"].getvalue().splitlines()
    assert line.startswith("failed ")
    assert 'user="a\\nFAKE status=200\\u001b[31m"' in line


def test_waiting_for_a_row_is_told_apart_from_running() -> None:
    """Of two choices the queue's time is the first one's whole answer, where one row writes them."""
    with Engine.load("demo", drafter="none", max_length=256, max_rows=1) as engine:
        first, second = engine.generate_many(["a", "b"], SamplingParams(max_tokens=8, ignore_eos=True))
        assert 0 < first.stats.queue_seconds < first.stats.time_to_first_token
        assert first.stats.decode_seconds < second.stats.queue_seconds < second.stats.time_to_first_token
        engine.add("a", SamplingParams(max_tokens=200, ignore_eos=True))
        waits = engine.add("b", deadline=1e-6)
        ended = [delta.result for delta in engine.step() + engine.step() if delta.request == waits]
        assert [(its.stats.queue_seconds, its.completion_tokens) for its in ended if its] == [
            (its.stats.total_seconds, 0) for its in ended if its
        ]
        assert ended


def test_why_steps_drafted_or_not() -> None:
    stats = Stats(steps_by_size={0: 5, 3: 4}, expected={"on": [3.0, 1.0], "off": [2.0, -1.0]})
    assert decisions(stats) == {("on", "faster"): 3, ("on", "fixed"): 1, ("off", "slower"): 2, ("off", "nothing"): 3}


def test_the_dashboard_names_what_there_is(served: Running) -> None:
    with pytest.raises(openai.BadRequestError):
        served.client().completions.create(model="demo", prompt=SAID, temperature=-1)
    served.client().completions.create(model="demo", prompt=SAID, max_tokens=16, temperature=0)
    served.at_rest()
    its = scraped(served)
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    named = {name for expression in asked for name in re.findall(r"\b(?:outpace_|vllm:)\w+", expression)}
    assert len(named) > 15
    assert sorted(named - set(its)) == []
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    page = (DASHBOARD.parent / "observing.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`((?:outpace_|vllm:)\w+)`", page))
    exposed = {re.sub("_(bucket|sum|count)$", "", name) for name in its if not name.endswith("_created")}
    assert exposed == documented


def test_spans_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match="install opentelemetry-sdk"):
        tracer()


def test_an_unknown_form_of_logs_is_refused() -> None:
    with pytest.raises(ParameterError, match="use text or json"):
        configure("xml")
