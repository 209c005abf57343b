"""``POST /tokenize`` and ``POST /detokenize``: text to token ids and back."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.server import translate
from outpace.server.routes.answering import answer, asked, service_of
from outpace.server.routes.described import describes
from outpace.server.schema.tokens import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize", openapi_extra=describes(TokenizeRequest), response_model=None)
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation."""
    body, service = await asked(request, TokenizeRequest), service_of(request)
    async with AsyncExitStack() as held:
        model = await service.model(body.model, held)

        def value() -> dict[str, Any]:
            tokens = translate.tokens(body, model).tolist()
            told = {"count": len(tokens), "max_model_len": model.info.max_length, "tokens": tokens}
            if body.return_token_strs:
                told["token_strs"] = [model.text_of(token) for token in tokens]
            return told

        return await answer(request, value)


@router.post("/detokenize", openapi_extra=describes(DetokenizeRequest), response_model=None)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body, service = await asked(request, DetokenizeRequest), service_of(request)
    async with AsyncExitStack() as held:
        model = await service.model(body.model, held)

        def value() -> dict[str, Any]:
            tokens = model.ids(body.tokens, "tokens")
            return {"prompt": model.tokenizer.decode(tokens, skip_special=body.skip_special_tokens)}

        return await answer(request, value)
