"""OpenTelemetry: a span for every request, with the attributes that its conventions for generative models name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outpace.common.installing import install
from outpace.errors import MissingExtraError
from outpace.server.engines.generation import Generation, Observer, Part, usage
from outpace.server.errors import APIError


class Span(Protocol):
    """The part of OpenTelemetry's that is used."""

    def set_attribute(self, key: str, value: Any) -> None: ...
    def add_event(self, name: str) -> None: ...
    def end(self) -> None: ...


class Tracer(Protocol):
    """The part of OpenTelemetry's that is used."""

    def start_span(self, name: str) -> Span: ...


def tracer() -> Tracer:
    """OpenTelemetry's, which sends where its environment variables say (OTEL_EXPORTER_OTLP_ENDPOINT and others).
    Raises MissingExtraError."""
    from importlib import import_module

    try:
        api = import_module("opentelemetry.trace")
        sdk, exports = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        needed = install("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
        raise MissingExtraError(f"--otel needs opentelemetry: {needed}") from error
    provider = sdk.TracerProvider()
    provider.add_span_processor(exports.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    api.set_tracer_provider(provider)
    its: Tracer = api.get_tracer("outpace")
    return its


class Spans(Observer):
    """A span for every request, from its queueing to its end. Neither prompts nor answers are in them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[Generation, Span] = {}
        self._first: set[Generation] = set()

    def began(self, generation: Generation) -> None:
        name, params = generation.model.name, generation.work.params
        span = self._spans[generation] = self._tracer.start_span(f"generate {name}")
        its: dict[str, Any] = {
            "gen_ai.operation.name": "chat" if generation.id.startswith("chatcmpl") else "text_completion",
            "gen_ai.provider.name": "outpace",
            "gen_ai.request.model": name,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.choice.count": generation.work.samples,
            "gen_ai.response.id": generation.id,
            "outpace.request_id": generation.request_id,
        }
        for key, value in its.items():
            span.set_attribute(key, value)

    def gained(self, generation: Generation, parts: Sequence[Part]) -> None:
        if generation.first_token_at is not None and generation not in self._first:
            self._first.add(generation)
            self._spans[generation].add_event("first token")

    def ended(self, generation: Generation, error: APIError | None) -> None:
        span = self._spans.pop(generation)
        self._first.discard(generation)
        if generation.results:
            cost = usage(generation)
            span.set_attribute("gen_ai.usage.input_tokens", cost.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", cost.completion_tokens)
            span.set_attribute(
                "gen_ai.response.finish_reasons", [result.finish_reason for result in generation.in_order]
            )
            for name in ("drafter", "steps", "drafted", "accepted"):
                span.set_attribute(f"outpace.speculation.{name}", getattr(cost.speculation, name))
        if error is not None:
            span.set_attribute("error.type", error.code or str(error.status))
        span.end()
