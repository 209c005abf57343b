"""Logs with request ids, as text or as JSON; a line for every request. Prompts, answers and keys are in none."""

from __future__ import annotations

import json
import logging
import re
import time
from contextvars import ContextVar
from typing import Any

from outpace.errors import Argument, ParameterError
from outpace.server.engines.generation import Generation, Observer, usage
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
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every malformed request


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says beside its message; the request's id where it was logged in one."""
    found: dict[str, Any] = dict(getattr(record, "fields", {}))
    if REQUEST_ID.get() and "request_id" not in found:
        found = {"request_id": REQUEST_ID.get(), **found}
    return found


class Lines(logging.Formatter):
    """Text: the fields follow the message as ``name=value``. What clients write begins neither a line nor a field."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without what was raised."""
        found = [f"{name}={_quoted(str(value))}" for name, value in fields(record).items()]
        return _CONTROL.sub(lambda its: json.dumps(its[0])[1:-1], " ".join([super().formatMessage(record), *found]))


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _quoted(text: str) -> str:
    return json.dumps(text) if re.search(r"[\s\"=\\]", text) else text


class JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RequestLog(Observer):
    """One line for every request that was answered, left or refused."""

    def ended(self, generation: Generation, error: APIError | None) -> None:
        line: dict[str, Any] = {
            "request_id": generation.request_id,
            "id": generation.id,
            "model": generation.model.name,
            "seconds": round(time.perf_counter() - generation.began, 4),
        }
        if generation.first_token_at is not None:
            line["first_token_seconds"] = round(generation.first_token_at - generation.began, 4)
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
