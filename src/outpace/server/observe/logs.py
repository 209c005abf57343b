"""Logs with request ids, as text or as JSON; a line for every request. Prompts, answers and keys are in none."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from outpace.errors import Argument, ParameterError
from outpace.server.engines.generation import Generation
from outpace.server.engines.parts import Part
from outpace.server.engines.usage import usage
from outpace.server.errors import APIError

REQUEST_ID: ContextVar[str] = ContextVar("outpace_request_id", default="")

log = logging.getLogger(__name__)


def configure(form: str) -> None:
    """Log to standard error. Raises ParameterError for a ``form`` that is neither text nor json."""
    if form not in ("text", "json"):
        raise ParameterError(Argument("log_format", form), " is unknown: use text or json")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else Lines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says beside its message; the request's id where it was logged in one."""
    its: dict[str, Any] = dict(getattr(record, "fields", {}))
    if REQUEST_ID.get() and "request_id" not in its:
        its = {"request_id": REQUEST_ID.get(), **its}
    return its


class Lines(logging.Formatter):
    """Text: the fields follow the message as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without what was raised."""
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields(record).items())])


class JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        its = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            its["exception"] = self.formatException(record.exc_info)
        return json.dumps(its, default=str)


class RequestLog:
    """An Observer: one line for every request that was answered, left or refused."""

    def __init__(self) -> None:
        self._began: dict[Generation, tuple[float, float | None]] = {}  # when, and when the first token came

    def began(self, generation: Generation) -> None:
        self._began[generation] = (time.perf_counter(), None)

    def gained(self, generation: Generation, parts: Sequence[Part]) -> None:
        began, first = self._began[generation]
        if first is None and any(part.token_ids for part in parts):
            self._began[generation] = (began, time.perf_counter())

    def ended(self, generation: Generation, error: APIError | None) -> None:
        began, first = self._began.pop(generation)
        line: dict[str, Any] = {
            "request_id": generation.request_id,
            "id": generation.id,
            "model": generation.model.name,
            "seconds": round(time.perf_counter() - began, 4),
        }
        if first is not None:
            line["first_token_seconds"] = round(first - began, 4)
        if generation.user is not None:
            line["user"] = generation.user
        if generation.results:
            cost = usage(generation)
            line |= {"prompt_tokens": cost.prompt_tokens, "completion_tokens": cost.completion_tokens}
            for name in ("drafter", "steps", "drafted", "accepted"):
                line[name] = getattr(cost.speculation, name)
            line["finish"] = ",".join(dict.fromkeys(result.finish_reason for result in generation.in_order))
        if error is not None:
            line |= {"status": error.status, "code": error.code, "error": error.message}
            log.warning("failed", extra={"fields": line})
        elif len(generation.results) < generation.work.samples:
            log.info("left by its client", extra={"fields": line})
        else:
            log.info("answered", extra={"fields": line})

    def refused(self, error: APIError) -> None:
        log.info("refused", extra={"fields": {"status": error.status, "code": error.code, "param": error.param}})
