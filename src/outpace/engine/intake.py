"""From what a caller gives to a running engine and to a ``Request``: checked, or refused with the name, the value and
the remedy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from outpace.common.arrays import I32
from outpace.common.files import StrPath
from outpace.common.habits import HOMES
from outpace.common.parameter import Choice, Flag, Integer, Interval, check, defined
from outpace.common.units import format_bytes
from outpace.control.adaptive import AUTO_SIZE
from outpace.drafters import measured
from outpace.drafters.base import DraftContext, Drafter, DrafterSource
from outpace.drafters.registry import build, parse
from outpace.drafters.spec import draft_models
from outpace.engine.kv_files import checked_limit
from outpace.engine.kv_store import KVStore
from outpace.engine.request import EngineKeywords, OwnKeywords, RequestKeywords, Size
from outpace.errors import Argument, DrafterError, MemoryLimitError, ModelError, OutpaceError, ParameterError
from outpace.models.base import Model, ModelInfo
from outpace.models.host import spare_memory
from outpace.models.load import MemoryEstimate, Source, estimate, live, load, resolve, unwrapped
from outpace.models.options import LoadKeywords, LoadOptions
from outpace.params import ACCEPTANCES, Acceptance, Prompt, SamplingParams, check_keywords
from outpace.text import chat_template

if TYPE_CHECKING:
    from outpace.text.tokenizer import Tokenizer

E = TypeVar("E")

log = logging.getLogger(__name__)


def load_engines(
    make: Callable[..., E],
    model: Any,
    drafters: Sequence[DrafterSource],
    options: Mapping[str, Any],
    more: Sequence[DrafterSource] = (),
    unfit: Callable[[DrafterSource, OutpaceError], bool] = lambda drafter, error: False,
) -> list[E]:
    """One engine a drafter spec, over one target; used in turn, not at once. ``more``: specs that requests may choose.
    ``model``: a name, or a transformers model in memory; then ``options`` may have its ``tokenizer``. ``unfit``: if a
    drafter that cannot be made is left out, instead of the error.

    Raises ModelError, DrafterError, ParameterError or MemoryLimitError; then nothing stays loaded.
    """
    options = dict(options)
    tokenizer = options.pop("tokenizer", None)
    check_keywords(options, HOMES["Engine.load"], "Engine.load")
    engine_options = {name: options[name] for name in EngineKeywords.__annotations__ if name in options}
    load_options = LoadOptions(**{name: options[name] for name in LoadKeywords.__annotations__ if name in options})
    if isinstance(more, (str, os.PathLike, Drafter)):
        raise ParameterError(Argument("drafters", more), " is a single one: give a list")
    specs, others = [parse(drafter) for drafter in drafters], [parse(drafter) for drafter in more]
    sized = [engine_options if s.size is None else {**engine_options, "size": s.size} for s in specs]
    checked = [EngineOptions(**own) for own in sized]
    if options.get("cache_dir") is not None:
        checked_limit(options["cache_dir"], options.get("cache_size"))  # before a model is loaded for nothing
    template = None if load_options.chat_template is None else chat_template.given(load_options.chat_template)
    beside = [draft_model for s in (*specs, *others) for draft_model in draft_models(s, load_options)]
    if isinstance(model, (str, os.PathLike)):
        if tokenizer is not None:
            raise ParameterError("a tokenizer goes with a model in memory: one that is loaded by name has its own")
        found = resolve(model, load_options)
        source: Source | None = found
        taken = [estimate(*draft_model) for draft_model in beside]
        if any(spec.auto for spec in (*specs, *others)):
            taken += _remembered(found.name, load_options)
        device, weights = _announce(found, taken, load_options)
    else:
        model = unwrapped(model)
        source, device, weights = None, str(getattr(model, "device", "cpu")), 0
    limit = load_options.kv_memory if load_options.kv_memory is not None else spare_memory(device, weights)
    load_options = replace(load_options, kv_memory=limit)
    if len(specs) > 1:  # used in turn: what one keeps would be another's loss
        sized = [{"prefix_rows": 0, **own} for own in sized]
    target, tokenizer = live(model, tokenizer, load_options) if source is None else load(source, load_options)
    with ExitStack() as undo:
        undo.callback(target.close)
        if template is not None and tokenizer is not None:
            tokenizer.use_chat_template(template)
        engines: list[E] = []
        for given, spec, own, one in zip(drafters, specs, sized, checked, strict=True):
            context = DraftContext(target, tokenizer, load_options, one.nodes, one.acceptance)
            try:
                first = _closed_by(undo, build(spec, context))
            except (DrafterError, ModelError) as error:
                if unfit(given, error):
                    continue
                raise
            built = [first, *(_closed_by(undo, build(each, context)) for each in others)]
            named = {drafter.name: drafter for drafter in built[1:] if drafter.name != "none"}
            rest = {name: options[name] for name in OwnKeywords.__annotations__ if name in options}
            engine = make(target, tokenizer, drafter=built[0], drafters=named, kv_memory=limit, **own, **rest)
            engines.append(engine)
        undo.pop_all()
    return engines


def kv_store(model: Model, folder: StrPath | None, size: int | str | None) -> KVStore | None:
    """What keeps KV on the disk, if that was asked for. Raises ParameterError."""
    if folder is not None:
        return KVStore(model, folder, size)
    if size is not None:
        raise ParameterError(
            Argument("cache_size", size), " bounds a folder that is not given: add ", Argument("cache_dir")
        )
    return None


def _closed_by(undo: ExitStack, drafter: Drafter) -> Drafter:
    undo.callback(drafter.close)
    return drafter


def _remembered(name: str, options: LoadOptions) -> list[MemoryEstimate]:
    """Of the draft models that ``auto`` stands for; none where they cannot be used any more, which ``build`` says."""
    kept = measured.known(name, options)
    try:
        return [] if kept is None else [estimate(*each) for each in draft_models(parse(kept.spec or "none"), options)]
    except (DrafterError, ModelError):
        return []


def _announce(model: Source, beside: Sequence[MemoryEstimate], options: LoadOptions) -> tuple[str, int]:
    """Log what loading will take; the target's device, and the bytes of all weights there. ``beside``: draft models."""
    target = estimate(model, options)
    parts = [f"target {format_bytes(target.weights)}"]
    per_position, weights = target.kv_bytes_per_position - target.windowed, target.weights
    windows = target.windowed * target.window
    for drafter in beside:
        parts.append(f"drafter {format_bytes(drafter.weights)}")
        per_position += drafter.kv_bytes_per_position - drafter.windowed
        windows += drafter.windowed * drafter.window
        weights += drafter.weights if drafter.device == target.device else 0
    bound = "half of the free memory" if options.kv_memory is None else format_bytes(options.kv_memory)
    kv = f"{format_bytes(per_position)} a position" + (f" and {format_bytes(windows)} a row" if windows else "")
    log.info("memory: %s, KV %s, bounded by %s", ", ".join(parts), kv, bound)
    return target.device, weights


_ACCEPTANCE = Choice(ACCEPTANCES, "unknown")
_SECONDS = Interval("(0, inf]", "give seconds above 0, or None")
MOST_NODES = 63  # a forward has at most 64 tokens of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's own options, validated before anything is loaded. Raises ParameterError."""

    size: Size = defined("auto", "Tokens drafted a step, 0 to 63, or auto: what pays.")
    acceptance: Acceptance = defined("coupled", "Same tokens, or same distribution (exactness.md).", _ACCEPTANCE)
    max_rows: int = defined(16, "Requests that run at once.", Integer(1, remedy="give at least 1"))
    prefill_chunk: int = defined(512, "Prompt tokens a step.", Integer(1, remedy="give at least 1"))
    prefill_delay: float | None = defined(
        None, "Seconds by which prompts may hold up rows that decode. None: any; 4 tokens go in any case.", _SECONDS
    )
    step_stretch: float | None = defined(
        None, "How much longer than a plain step of its rows auto may make one with drafts in which several rows run.",
        Interval("[1, inf]", "give at least 1, or None"),
    )  # fmt: skip
    prefix_rows: int = defined(
        16, "Finished rows whose KV is kept for prompts that begin alike. 0: none.",
        Integer(0, remedy="give at least 0"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        checked_size(self.size)

    @property
    def nodes(self) -> int:
        """The most nodes a step."""
        return checked_size(self.size)


def engine_options(keywords: Mapping[str, Any], call: str = "Engine") -> EngineOptions:
    """``keywords`` of ``call``, or the defaults. Raises ParameterError."""
    check_keywords(keywords, (*EngineKeywords.__annotations__, "drafter", "kv_memory"), call)
    return EngineOptions(**keywords)


def sampling(params: SamplingParams | None, keywords: Mapping[str, Any]) -> SamplingParams:
    """``params``, or the defaults, with ``keywords`` in their places. Raises ParameterError."""
    if params is not None and not isinstance(params, SamplingParams):
        example = Argument("max_tokens", 8)
        raise ParameterError(
            Argument("params", params), " is no SamplingParams: give one, or keywords such as ", example
        )
    check_keywords(keywords, RequestKeywords.__annotations__, "a request")
    return (params or SamplingParams()).with_(**keywords)


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    raw: bool = False,
    add_special_tokens: bool = True,
) -> I32:
    """The token ids int32 [n] that ``prompt`` stands for. Raises ParameterError when there are none."""
    checked_flags(raw=raw, add_special_tokens=add_special_tokens)
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray, memoryview))
    if not listed and not (hasattr(prompt, "__array__") and np.ndim(prompt)):
        raise ParameterError(f"the prompt is a {type(prompt).__name__}: give text, token ids, or chat messages")
    is_raw = isinstance(prompt, str) and (raw or tokenizer is None or not tokenizer.has_chat_template)
    if not add_special_tokens and not is_raw:
        raise ParameterError(
            Argument("add_special_tokens", add_special_tokens),
            " is of raw texts alone, and this prompt is none: give text with ", Argument("raw", True),
        )  # fmt: skip
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise ParameterError("this engine has no tokenizer: give token ids")
        if isinstance(prompt, str) and is_raw:
            tokens = encode_raw(prompt, tokenizer, add_special=add_special_tokens)
        elif isinstance(prompt, str) and not prompt:
            raise ParameterError("the prompt is empty: give some text")
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tokens = tokenizer.encode_chat(messages)  # type: ignore[arg-type]
        check_ids("the prompt", tokens, vocab_size)
    else:
        tokens = _token_ids(prompt, vocab_size)
    if not len(tokens):
        raise ParameterError(f"the prompt is empty: give {'some text' if isinstance(prompt, str) else 'a token id'}")
    return tokens.astype(np.int32)


def encode_raw(text: str, tokenizer: Tokenizer, *, add_special: bool = True) -> I32:
    """The token ids int32 [n] of a text that the model is to go on with, which may spell special tokens. Of an empty
    one, the start token, where the model has one; else none."""
    tokens = tokenizer.encode_raw(text, add_special=add_special)
    if not len(tokens) and add_special and tokenizer.bos_id is not None:
        return np.array([tokenizer.bos_id], np.int32)
    return tokens


def encoder(tokenizer: Tokenizer | None) -> Callable[[str], I32] | None:
    """How text becomes ids within an answer: special tokens where it spells them, without start and end tokens. None
    without a tokenizer."""
    return None if tokenizer is None else partial(tokenizer.encode, add_special=False, parse_special=True)


def resumed(
    given: Sequence[int] | Sequence[Sequence[int]], params: SamplingParams, acceptance: Acceptance, vocab_size: int
) -> list[list[int]]:
    """What every sample is resumed after. Raises ParameterError for what cannot be, but by rules and ends."""
    if not isinstance(given, (Sequence, np.ndarray)):
        raise ParameterError(Argument("resume", given), " is no list: give the ids that this request has produced")
    each: list[Any] = [given] if params.n == 1 and not (len(given) and isinstance(given[0], Sequence)) else list(given)
    if len(each) != params.n or not all(isinstance(own, (Sequence, np.ndarray)) for own in each):
        raise ParameterError(
            Argument("resume"), f" is not of {params.n} samples: give a list of ids for each, [] where nothing came"
        )
    for token in chain(*each):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            raise ParameterError(
                Argument("resume"), f" has token id {token!r}, but this model's ids go from 0 to {vocab_size - 1}"
            )
    found = [[int(token) for token in own] for own in each]
    if any(found):
        check_resumable(params)
        if acceptance != "coupled":
            raise ParameterError(
                Argument("acceptance", acceptance), " makes tokens depend on drafts, so such an answer cannot be "
                "resumed: ask again from the beginning",
            )  # fmt: skip
    return found


def check_resumable(params: SamplingParams) -> None:
    """Raise ParameterError where the seed is not known."""
    if params.seed is None and not params.greedy:
        raise ParameterError(
            Argument("resume"), " needs the seed that the tokens were drawn with: give ", Argument("seed"),
            " as the interrupted answer reported it",
        )  # fmt: skip


def limit_of(tokens: I32, params: SamplingParams, info: ModelInfo, most_positions: int | None) -> int:
    """The most committed tokens of a sample. Raises ParameterError, or MemoryLimitError when it could never run."""
    if len(tokens) >= info.max_length:
        context = f"the context holds {info.max_length}, the answer included"
        raise ParameterError(f"the prompt has {len(tokens)} tokens, but {context}: shorten the prompt")
    limit = min(len(tokens) + (params.max_tokens or info.max_length), info.max_length)
    if most_positions is None or limit <= most_positions:
        return limit
    if params.max_tokens is None and len(tokens) < most_positions:
        return most_positions
    raise MemoryLimitError(
        f"{limit} positions do not fit, since there is memory for {most_positions}: raise ",
        Argument("kv_memory"),
        ", or lower ",
        Argument("max_tokens"),
        " or the prompt",
    )


def check_params(params: SamplingParams, info: ModelInfo, tokenizer: Tokenizer | None) -> None:
    """Raise ParameterError for what this engine cannot honour."""
    if params.stop_strings and tokenizer is None:
        raise ParameterError("stop strings need a tokenizer, and this engine has none: use ", Argument("stop_ids"))
    check_ids(Argument("stop_ids"), np.asarray(params.stop_ids, np.int32), info.vocab_size)


def drafter_of(given: str | bool | None, default: str, drafters: Mapping[str, Drafter]) -> str:
    """The name of the drafter that a request asked for: True or None the engine's own, False or "none" none."""
    if given is None or given is True:
        return default
    if given is False or given == "none":
        return "none"
    if given not in drafters:
        there = ", ".join([*drafters, "none"])
        raise ParameterError(Argument("drafter", given), f" is not loaded: this engine has {there}")
    return str(given)


def size_of(given: Size | None, most: int, adaptive: bool) -> tuple[int, bool]:
    """The most nodes a step, and whether the policy chooses, for what a request asked of an engine with ``most``."""
    if given is None:
        return most, adaptive
    nodes = checked_size(given, most, adaptive)
    if given == "auto":
        if not adaptive:
            raise ParameterError(
                Argument("size", "auto"), f" needs an engine made with it: this one's size is fixed at {most}"
            )
        return most, True
    if nodes > most:
        raise ParameterError(
            Argument("size", given), f" is more than the engine's {most}: make the engine with a larger one"
        )
    return nodes, False


def checked_size(size: Size, most: int = MOST_NODES, adaptive: bool = True) -> int:
    """The most nodes that ``size`` allows a step. ``most``, ``adaptive``: what the error says is possible."""
    if isinstance(size, str) and size == "auto":
        return AUTO_SIZE
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 0 <= size <= MOST_NODES:
        raise ParameterError(
            Argument("size", size),
            f" is out of range: draft 0 (plain decoding) to {most} tokens a step{', or auto' if adaptive else ''}",
        )
    return int(size)


def checked_acceptance(acceptance: Acceptance) -> Acceptance:
    checked: Acceptance = _ACCEPTANCE.checked("acceptance", acceptance)
    return checked


def checked_flags(**flags: object) -> None:
    """Raise ParameterError for one that is neither True nor False: a text such as "no" would be true."""
    for name, value in flags.items():
        Flag().checked(name, value)


def checked_serving(deadline: float | None, priority: int, cache_scope: str, owner: str) -> None:
    """Raise ParameterError for a deadline (seconds), a priority, a scope or an owner that cannot be."""
    if deadline is not None:
        _SECONDS.checked("deadline", deadline)
    if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)):
        raise ParameterError(Argument("priority", priority), " is no whole number: 0 is usual, more goes first")
    for argument, value in (("cache_scope", cache_scope), ("owner", owner)):
        if not isinstance(value, str):
            raise ParameterError(Argument(argument, value), " is no text: give a name, or '' for the common one")


def _token_ids(prompt: Any, vocab_size: int) -> I32:
    """The prompt as token ids int32 [n], before a float is cut or an id too large wraps. Raises ParameterError."""
    try:
        ids = np.asarray(prompt) if len(prompt) else np.zeros(0, np.int32)
    except (ValueError, OverflowError):
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        hint = ": several prompts go to generate_many" if _many(prompt) else ""
        raise ParameterError(
            f"the prompt is neither text nor a list of token ids nor chat messages{hint}: give one of them"
        )
    check_ids("the prompt", ids, vocab_size)
    return ids.astype(np.int32)


def _many(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(len(prompt)) and isinstance(prompt[0], (str, Sequence))


def check_ids(name: str | Argument, ids: np.ndarray[Any, Any], vocab_size: int) -> None:
    """Raise ParameterError when ``ids`` [n] are not all in the vocabulary."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ParameterError(name, f" has token id {wrong[0]}, but this model's ids go from 0 to {vocab_size - 1}")
