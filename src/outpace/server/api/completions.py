"""``POST /v1/completions``: texts that go on, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from outpace.common.arrays import I32
from outpace.engine.intake import encode_raw
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.exact.sampling import TokenLogprob
from outpace.params import SamplingParams
from outpace.server import errors, schema
from outpace.server.api import formats, sampling
from outpace.server.api.answers import Choice, Choices, Chunk, Completed, PromptLogprobs, prompt_logprobs
from outpace.server.api.route import STREAMED, Route, answered, service_of
from outpace.server.api.sampling import Sampling
from outpace.server.engines.generation import Generation, Part, Whole, Work
from outpace.server.engines.models import Models, Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Items
from outpace.server.settings import ServerSettings
from outpace.text.answer import TextReader, pieces
from outpace.text.tokenizer import Tokenizer

router = APIRouter(route_class=Route)

_OF_MODELS = {"allowed_token_ids", "bad_words", "max_tokens", "min_tokens", "stop_token_ids"}  # what a model bounds


class CompletionRequest(Sampling):
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    suffix: str | None = Field(default=None, description="What follows the answer: it is written between them.")
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="False: the tokens that the model expects around a text are not put there."
    )


def asked(**fields: Any) -> CompletionRequest:
    """The completion that another protocol's request asks for: fields that are None are left out. Raises APIError."""
    return schema.made(CompletionRequest, fields)


class ListedLogprobs(Answer):
    """One entry a token. ``text_offset``: the character of the choice's text at which it begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Choice):
    text: str
    logprobs: ListedLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(Completed):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[TextChoice]


@router.post("/v1/completions", response_model=TextCompletion, responses=STREAMED)
async def completions(request: Request, body: CompletionRequest) -> Answer | Response:
    """Go on with a text, or with each of several."""
    asks = partial(work, body, service_of(request).settings)
    return await answered(request, body, TextEncoder, asks, model=body.model, streamed=bool(body.stream))


def work(body: CompletionRequest, settings: ServerSettings, model: Served, scope: str) -> Work:
    """What an engine is asked. Raises ParameterError, RuleError or APIError."""
    if body.logprobs is not None:
        sampling.check_logprobs("logprobs", body.logprobs, settings)
    sampling.check_prompt_logprobs(body, settings)
    prompts, texts = _prompts(body, model, settings)
    echo = bool(body.echo)
    both = {limit for limit in (body.max_tokens, body.n_predict) if limit is not None}
    if len(both) > 1:
        raise APIError(400, "max_tokens and n_predict differ: give one of them", param="max_tokens")
    most = both.pop() if both else settings.sampling.get("max_tokens", 16)
    if body.suffix:
        if echo:
            raise APIError(400, "echo repeats a text that goes on, and suffix ends one: give one of them", param="echo")
        prompts = between(model, prompts, body.suffix, sampling.bounded(most), settings)
    nothing = most == 0 and echo
    of_prompt = (body.prompt_logprobs, body.logprobs if echo else None)
    params = sampling.parameters(
        body, settings,
        max_tokens=1 if nothing else sampling.bounded(most),
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=max((each for each in of_prompt if each is not None), default=None),
        rules=formats.rules(formats.wanted(body, body.response_format), model, None),
    )  # fmt: skip
    if body.suffix:
        params = ended(params, model)
    return Work(
        prompts=prompts, params=params, options=sampling.engine_options(body, settings, scope), trace=body.traced,
        nothing=nothing, texts=texts if echo else [], user=body.user,
        notes=formats.left_out(params.rules), **sampling.resumed(body, len(prompts) * params.n),
    )  # fmt: skip


async def check_defaults(models: Models, settings: ServerSettings) -> None:
    """Raise ParameterError where no request to one of ``models`` could have the settings' defaults. Each model is
    loaded for those that depend on it; all but the first are unloaded again."""
    names = models.names() if settings.sampling.keys() & _OF_MODELS else []
    most = settings.sampling.get("max_tokens", max(16, settings.sampling.get("min_tokens", 0)))
    for name in names:
        async with models.lease(name) as serving:
            try:
                serving.engine.prepare([0], sampling.parameters(asked(prompt=[0]), settings, max_tokens=most))
            except OutpaceError as error:
                given = ", ".join(settings.defaults)
                raise ParameterError(
                    Argument("defaults", given), f" cannot be of requests to {name}: {errors.of(error).message}"
                ) from None
        if name != names[0]:
            await models.unload(name)


def _prompts(body: CompletionRequest, model: Served, settings: ServerSettings) -> tuple[list[I32], list[str]]:
    """Token ids and texts of all prompts. Raises APIError."""
    given = body.prompt
    empty = APIError(400, "prompt is empty: give some text, or token ids", param="prompt")
    many: Sequence[str | list[int]]
    if isinstance(given, str):
        many = [given]
    elif not given:
        raise empty
    elif isinstance(given[0], int):
        many = [[token for token in given if isinstance(token, int)]]
    else:
        many = [each for each in given if not isinstance(each, int)]
    if len(many) > settings.max_prompts:
        most = settings.max_prompts
        raise APIError(400, f"prompt has {len(many)} prompts: this server takes at most {most}", param="prompt")
    prompts, texts = [], []
    special, whole = body.add_special_tokens is not False, not body.suffix
    for each in many:
        if isinstance(each, str) and whole:
            sampling.check_text(each, model, "prompt", special=True)
            tokens, text = encode_raw(each, model.tokenizer, add_special=special), each
        elif isinstance(each, str):
            sampling.check_together([each, body.suffix or ""], model, "prompt")
            tokens, text = plain(each, model, "prompt", settings), each
        else:
            tokens = model.ids(each, "prompt")
            text = model.tokenizer.decode(tokens)
        if not len(tokens) and whole:
            raise empty
        if whole:
            sampling.check_length(tokens, model, "prompt")
        prompts.append(tokens)
        texts.append(text)
    return prompts, texts


def plain(text: str, model: Served, param: str, settings: ServerSettings) -> I32:
    """Token ids int32 [n] of a text in which nothing is a special token. Raises APIError."""
    sampling.check_size(text, model, param, settings.max_values)
    return model.tokenizer.encode(text, add_special=False)


def between(
    model: Served, befores: Sequence[I32], suffix: str, answer: int | None, settings: ServerSettings, **more: Any
) -> list[I32]:
    """The prompts, token ids int32 [n], for a middle of ``answer`` tokens (None: the model ends it) between each of
    ``befores`` and ``suffix``. ``more``: as ``Middle.prompt`` has it. Raises APIError where the model has no tokens for
    that."""
    tokens, most = model.tokenizer.middle, model.info.max_length
    if tokens is None:
        raise APIError(
            400, f"{model.name} cannot fill in the middle: its vocabulary has no such tokens (<|fim_prefix|>, "
            "<|fim_suffix|>, <|fim_middle|> or others of that kind); serve a model for code that has them, or leave "
            "the text after the middle out", param="suffix",
        )  # fmt: skip
    start = [token for token in model.tokenizer.encode("").tolist() if token == model.tokenizer.bos_id]
    after = plain(suffix, model, "suffix", settings)
    room = most // 4 if answer is None else min(answer, most // 2)
    encode = partial(model.tokenizer.encode, add_special=False)
    return [tokens.prompt(encode, ids, after, start=start, most=most - room, **more) for ids in befores]


def ended(params: SamplingParams, model: Served) -> SamplingParams:
    """Those of a middle, which tokens for filling in end, too."""
    tokens = () if model.tokenizer.middle is None else model.tokenizer.middle.ends
    ends = [token for token in tokens if token not in model.info.eos_ids]
    return params.with_(stop_ids=(*params.stop_ids, *ends)) if ends else params


class _Text:
    """The text and log-probabilities of one choice as they come: the prompt first, where it is repeated."""

    def __init__(self, generation: Generation, index: int, body: CompletionRequest) -> None:
        work, prompt = generation.work, index // generation.work.params.n
        self._model, self._top = generation.model, body.logprobs
        self._echoes = bool(work.texts)
        self._echo = work.texts[prompt] if work.texts else ""
        self._prompt = work.prompts[prompt]
        self._begun = index in generation.resumed
        self._reader = generation.reader(index)
        self._state = self._reader.start
        self._offset = 0
        if self._begun:
            self._offset = len(self._echo) + sum(map(self._width, generation.resumed[index].token_ids))

    def of(self, made: Whole | Part) -> tuple[str, ListedLogprobs | None]:
        """The text and log-probabilities that ``made`` adds."""
        text, before = made.joined.text, list[TokenLogprob | None]()
        if not self._begun:
            text, before = self._echo + text, list(made.prompt_logprobs) if self._echoes else []
        self._begun = True
        nothing = self._top is None or (isinstance(made, Part) and not (before or made.logprobs))
        return text, None if nothing else self._listed(before, made.logprobs, self._top or 0)

    def _width(self, token: int) -> int:
        """How many characters the answer gains with its next token."""
        self._state, text = self._reader.add(self._state, token)
        return len(text)

    def _listed(
        self, prompt: Sequence[TokenLogprob | None], answer: Sequence[TokenLogprob], most: int
    ) -> ListedLogprobs:
        """None stands for the prompt's first token, which follows nothing."""
        found = ListedLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        widths = _widths(self._model.tokenizer, self._prompt, self._echo) if prompt else []
        for i, entry in enumerate([*prompt, *answer]):
            token = int(self._prompt[0]) if entry is None else entry.token
            text = self._model.text_of(token)
            found.tokens.append(text)
            found.token_logprobs.append(None if entry is None else entry.logprob)
            found.text_offset.append(self._offset)
            self._offset += widths[i] if i < len(widths) else self._width(token)
            if entry is None or not most:
                found.top_logprobs.append(None)
                continue
            top: dict[str, float] = {}
            for other in entry.top[:most]:
                top.setdefault(other.text or "", other.logprob)  # tokens may look alike: the likelier one stays
            top.setdefault(text, entry.logprob)
            found.top_logprobs.append(top)
        return found


def _widths(tokenizer: Tokenizer, ids: I32, text: str) -> list[int]:
    """How many characters of ``text`` each of a prompt's tokens stands for; a start token put before it has none."""
    found: list[str] = []
    for skip in (True, False):  # token ids are repeated without special tokens, a text with those that it spells
        found = pieces(TextReader(tokenizer, skip_special=skip), ids.tolist())
        more = len("".join(found)) - len(text)
        if more >= 0 and "".join(found).endswith(text):
            break
    else:  # the tokenizer made another text of it
        more = 0
    widths = []
    for piece in found:
        cut = min(more, len(piece))
        more -= cut
        widths.append(len(piece) - cut)
    return widths


class TextEncoder(Choices):
    """Texts that go on."""

    prefix = "cmpl-"
    answer, chunk = (TextCompletion, "text_completion"), (TextChunk, "text_completion")
    body: CompletionRequest

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(generation, body)
        self._texts: dict[int, _Text] = {}

    def says(self, part: Part) -> bool:
        return super().says(part) or (part.index not in self._texts and bool(self.generation.work.texts))

    def choice(self, made: Whole | Part) -> TextChoice:
        if made.index not in self._texts:
            self._texts[made.index] = _Text(self.generation, made.index, self.body)
        text, logprobs = self._texts[made.index].of(made)
        more, most = self.fields(made), self.body.prompt_logprobs
        if isinstance(made, Whole) and most is not None:
            more["prompt_logprobs"] = prompt_logprobs(made.prompt_logprobs, most)
        return TextChoice(text=text, logprobs=logprobs, **more)
