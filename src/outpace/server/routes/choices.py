"""What chats and completions do alike: an answer of several choices, whole or streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from outpace.server.events import Whole
from outpace.server.generation import Generation
from outpace.server.routes.answering import answer, asked, begun, service_of, whole
from outpace.server.routes.heads import head, told_whole
from outpace.server.schema.common import Sampling
from outpace.server.served import Served
from outpace.server.settings import ServerSettings
from outpace.server.streaming import EventStream
from outpace.server.translate import Work

B = TypeVar("B", bound=Sampling)


async def choices_of(
    request: Request,
    schema: type[B],
    *,
    prefix: str,
    kind: str,
    work: Callable[[B, Served, ServerSettings, str], Work],
    choice: Callable[[Generation, Whole, B], dict[str, Any]],
    streamed: Callable[[Request, Generation, B], EventStream],
) -> Response:
    """Read a ``schema``, generate what ``work`` makes of it, and answer: ``streamed``, or with a ``choice`` each.

    ``prefix``: of the answer's id; ``kind``: its ``object``. Raises APIError or OutpaceError.
    """
    body, settings = await asked(request, schema), service_of(request).settings
    generation = await begun(request, body.model, prefix, lambda model, scope: work(body, model, settings, scope))
    if body.stream:
        return streamed(request, generation, body)
    wholes = await whole(request, generation)

    def value() -> dict[str, Any]:
        choices = [choice(generation, its, body) for its in wholes]
        return {**head(generation, kind), "choices": choices, **told_whole(generation, body)}

    return await answer(request, value)
