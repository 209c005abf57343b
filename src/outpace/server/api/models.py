"""``GET /v1/models``, and ``/props`` and ``/slots``, which llama.cpp's clients ask; a model's token ids and prompts:
``/tokenize``, ``/detokenize``, ``/tokenizer_info``, ``/apply-template``; and ``/v1/embeddings``, which none has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request

from outpace.common.arrays import I32
from outpace.common.version import __version__
from outpace.params import SamplingParams
from outpace.server.api.prompt import Prompt, rendered
from outpace.server.api.route import Route, service_of
from outpace.server.api.sampling import check_size
from outpace.server.conversation.control import unmarked
from outpace.server.conversation.messages import Messages
from outpace.server.conversation.tools import checked
from outpace.server.engines.models import Served
from outpace.server.engines.service import Service
from outpace.server.errors import APIError, Refusal
from outpace.server.schema import Answer, Body, Items
from outpace.server.settings import REQUESTED

T = TypeVar("T")

router = APIRouter()
bodies = APIRouter(route_class=Route)


class Model(Answer):
    """``max_model_len`` and ``drafters`` are known once the model has been used."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None
    drafters: list[str] | None = None


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


@router.get("/v1/models", response_model_exclude_unset=True)
async def list_models(request: Request) -> ModelList:
    """The models that are served."""
    service = service_of(request)
    return ModelList(object="list", data=[_model(service, name) for name in service.names()])


@router.get("/v1/models/{name:path}", response_model_exclude_unset=True)
async def one_model(request: Request, name: str) -> Model:
    """One of them."""
    service = service_of(request)
    service.named(name)
    return _model(service, name)


async def leased(request: Request, name: str | None, function: Callable[[Served], T]) -> T:
    """What ``function`` makes of a model, off the event loop. Raises APIError, and what it raises."""
    service = service_of(request)
    async with AsyncExitStack() as stack:
        return await service.work(function, await service.admitted(name, stack))


def _model(service: Service, name: str) -> Model:
    known = service.known(service.named(name))
    more: dict[str, Any] = {}
    if known is not None:
        more = {"max_model_len": known.info.max_length, "drafters": list(known.serving.engine.drafters)}
    return Model(id=name, object="model", created=service.started, owned_by="outpace", **more)


class TokenizeRequest(Prompt):
    """A text (``prompt``; ``content``: as llama.cpp's clients name it), or a conversation as the model's template
    writes it (``messages``)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool | None = Field(default=None, description="Of content: with a start token. Default: false.")
    parse_special: bool | None = Field(default=None, description="Of content: it spells special tokens. Default: true.")
    with_pieces: bool | None = Field(default=None, description="Of content: each token is an id and its text.")


class Token(Answer):
    id: int
    piece: str | list[int] = Field(description="Its bytes, where they are no text by themselves.")


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int] | list[Token]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Items[int]
    skip_special_tokens: bool = False


class Detokenized(Answer):
    prompt: str
    content: str = Field(description="The same, as llama.cpp names it.")


@bodies.post("/tokenize", response_model=Tokenized)
async def tokenize(request: Request, body: TokenizeRequest) -> Tokenized:
    """The token ids of a text, or of a conversation."""
    settings = service_of(request).settings

    def tokenized(model: Served) -> Tokenized:
        tokens = _tokens(body, model, settings.max_values).tolist()
        if body.with_pieces:
            pieces = [Token(id=token, piece=_piece(token, model)) for token in tokens]
            return Tokenized(count=len(tokens), max_model_len=model.info.max_length, tokens=pieces)
        texts = [model.text_of(token) for token in tokens] if body.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=model.info.max_length, tokens=tokens, token_strs=texts)

    return await leased(request, body.model, tokenized)


@bodies.post("/detokenize", response_model=Detokenized)
async def detokenize(request: Request, body: DetokenizeRequest) -> Detokenized:
    """The text of token ids."""

    def detokenized(model: Served) -> Detokenized:
        tokens = model.ids(body.tokens, "tokens")
        text = model.tokenizer.decode(tokens, skip_special=body.skip_special_tokens)
        return Detokenized(prompt=text, content=text)

    return await leased(request, body.model, detokenized)


_OF_CHATS, _OF_TEXTS = tuple(Prompt.model_fields), ("add_special_tokens",)


def _piece(token: int, model: Served) -> str | list[int]:
    code = model.bytes_of(token)
    if not code:
        return model.tokenizer.token(token) or ""
    try:
        return bytes(code).decode()
    except UnicodeDecodeError:
        return code


def _tokens(body: TokenizeRequest, model: Served, most: int) -> I32:
    """Token ids int32 [n] of a text of at most about ``most``. Raises ParameterError or APIError."""
    if sum(each is not None for each in (body.prompt, body.messages, body.content)) != 1:
        raise APIError(400, "give either prompt, content or messages", param="prompt")
    if body.content is not None:
        check_size(body.content, model, "content", most, special=True)
        special = body.parse_special is not False
        return model.tokenizer.encode(body.content, add_special=bool(body.add_special), parse_special=special)
    kind, others = ("prompt", _OF_CHATS) if body.messages is None else ("messages", _OF_TEXTS)
    for name in others:
        if name in body.model_fields_set and getattr(body, name) is not None:
            raise APIError(400, f"{name} means nothing beside {kind}: leave it out", param=name)
    if body.prompt is not None:
        text = body.prompt
    else:
        tools = checked(body.tools)
        text = rendered(body, body.messages or [], tools, "auto" if tools else "none", model)
    check_size(text, model, kind, most, special=True)
    if kind == "prompt":
        return model.tokenizer.encode_raw(text, add_special=body.add_special_tokens)
    return model.control.encode(text)


class AddedToken(Answer):
    content: str
    special: bool


class TokenizerInfo(Answer):
    """As vLLM names it, after Hugging Face's tokenizer_config.json."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    added_tokens_decoder: dict[str, AddedToken]


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> TokenizerInfo:
    """What a model's tokenizer is like; the model is loaded."""

    def known(served: Served) -> TokenizerInfo:
        tokenizer = served.tokenizer
        return TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            model_max_length=served.info.max_length,
            bos_token=None if tokenizer.bos_id is None else tokenizer.token(tokenizer.bos_id),
            eos_token=tokenizer.token(served.info.eos_ids[0]) if served.info.eos_ids else None,
            chat_template=tokenizer.chat_template,
            added_tokens_decoder={
                str(i): AddedToken(content=tokenizer.token(i) or "", special=i in tokenizer.special_ids)
                for i in sorted(tokenizer.added_ids)
            },
        )

    return await leased(request, model, known)


class TemplateRequest(Prompt):
    model: str | None = None
    messages: Messages


class Prompted(Answer):
    prompt: str


@bodies.post("/apply-template", response_model=Prompted)
async def apply_template(request: Request, body: TemplateRequest) -> Prompted:
    """A conversation as the model's template writes it."""

    def prompted(model: Served) -> Prompted:
        tools = checked(body.tools)
        return Prompted(prompt=unmarked(rendered(body, body.messages, tools, "auto" if tools else "none", model)))

    return await leased(request, body.model, prompted)


class EmbeddingsRequest(Body):
    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


@bodies.post("/v1/embeddings", response_model=Refusal)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Answer:
    """Refused: the models here write text."""
    name = service_of(request).models.names()[0] if body.model is None else body.model
    raise no_embeddings(name)


def no_embeddings(name: str) -> APIError:
    """The refusal of what no model here has."""
    return APIError(
        400, f"the model {name!r} writes text and has no embeddings: ask a server of an embedding model", param="model",
        code="unsupported_model",
    )  # fmt: skip


class DefaultParameters(Answer):
    n_predict: int = Field(description="-1: as many as the context holds.")
    seed: int = Field(description="-1: a fresh one each time.")
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float


class DefaultSettings(Answer):
    n_ctx: int
    speculative: bool
    params: DefaultParameters


class Modalities(Answer):
    vision: Literal[False]
    audio: Literal[False]


class Properties(Answer):
    """As llama.cpp names them."""

    default_generation_settings: DefaultSettings
    total_slots: int = Field(description="Answers that are written at once.")
    model_alias: str
    model_path: str
    role: Literal["model"]
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class Slot(Answer):
    """As llama.cpp names it: a place of those in which answers are written at once."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


@router.get("/slots")
async def slots(request: Request, model: str | None = None) -> list[Slot]:
    """The places of a model, which is loaded; they are taken in no order."""

    def known(served: Served) -> list[Slot]:
        engine, admission = served.serving.engine, served.admission
        drafts, inside = bool({*engine.drafters} - {"none"}), admission.inside - 1  # this request has a place, too
        return [
            Slot(id=i, n_ctx=served.info.max_length, speculative=drafts, is_processing=i < inside)
            for i in range(admission.rows)
        ]

    return await leased(request, model, known)


@router.get("/props")
async def props(request: Request, model: str | None = None) -> Properties:
    """What llama.cpp's page asks of a model, which is loaded."""

    def known(served: Served) -> Properties:
        engine, tokenizer = served.serving.engine, served.tokenizer
        given = service_of(request).settings.sampling
        own = {REQUESTED[name].name: value for name, value in given.items() if name in REQUESTED}
        plain = SamplingParams(**{"temperature": 1.0, **own})
        defaults = DefaultParameters(
            n_predict=given.get("max_tokens") or -1,
            seed=-1 if plain.seed is None else plain.seed,
            temperature=plain.temperature,
            top_k=plain.top_k,
            top_p=plain.top_p,
            min_p=plain.min_p,
            repeat_penalty=plain.repetition_penalty,
            presence_penalty=plain.presence_penalty,
            frequency_penalty=plain.frequency_penalty,
        )
        drafts = bool(set(engine.drafters) - {"none"})
        settings = DefaultSettings(n_ctx=served.info.max_length, speculative=drafts, params=defaults)
        return Properties(
            default_generation_settings=settings,
            total_slots=engine.options.max_rows,
            model_alias=served.name,
            model_path=served.name,
            role="model",
            modalities=Modalities(vision=False, audio=False),
            chat_template=tokenizer.chat_template or "",
            bos_token="" if tokenizer.bos_id is None else tokenizer.token(tokenizer.bos_id) or "",
            eos_token=tokenizer.token(served.info.eos_ids[0]) or "" if served.info.eos_ids else "",
            build_info=f"outpace {__version__}",
        )

    return await leased(request, model, known)
