"""The OpenAPI document is the truth: what it allows is answered or refused, what it forbids is refused; never a 5xx."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
)

from outpace import Engine
from tests.server.serving import Running, serving

CHECKS = (not_a_server_error, negative_data_rejection, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def brief() -> Iterator[Running]:
    """A server whose answers are short, whatever is asked."""
    with serving(Engine.load("demo", drafter="ngram", max_length=96), request_timeout=0.05, max_n=2) as running:
        yield running


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_is_ignored_and_nothing_breaks(brief: Running, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{brief.url}/openapi.json")
    operations = [its.ok() for its in document.get_all_operations()]
    assert {"POST /v1/responses", "POST /v1/replay", "GET /ready"} < {its.label for its in operations}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing can be wrong with it

        @settings(
            max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        check()


def test_the_page_of_the_document_asks_nobody(brief: Running) -> None:
    answer = httpx.get(f"{brief.url}/docs")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert re.findall(r"<(?:script|link|img|iframe)|@import|url\(|https?://", answer.text) == []
    document = httpx.get(f"{brief.url}/openapi.json").json()
    for path in document["paths"]:
        assert path in answer.text
    for name, its in document["components"]["schemas"].items():
        assert f'id="{name}"' in answer.text
        for field in its.get("properties", ()):
            assert f"<code>{field}</code>" in answer.text
    brief.at_rest()
