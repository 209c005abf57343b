"""The door for transformers' users: ``outpace.patch(model)`` makes ``model.generate`` speculative.

transformers prepares everything (GenerationConfig, processors, stopping criteria); what decodes is an engine over the
same modules. Its tokens are taken column by column, as transformers' own loop appends them.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import ceil
from threading import Lock, RLock
from types import MethodType, TracebackType
from typing import Any, Unpack

import torch
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from outpace.common.files import StrPath
from outpace.common.units import parse_bytes
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.forward.model import drafting_with
from outpace.drafters.registry import build, parse
from outpace.engine.engine import Engine
from outpace.engine.intake import engine_options
from outpace.engine.request import EngineKeywords
from outpace.engine.results import Delta, Result
from outpace.engine.statistics import Stats, pooled
from outpace.errors import MemoryLimitError, ModelError, OutpaceError, ParameterError, RuleError
from outpace.integrations.transformers_calls import (
    NotDraftedError,
    caches,
    padding_of,
    require_drafted,
    require_known,
)
from outpace.integrations.transformers_rules import Processors, as_parameters, of_row
from outpace.models.base import Model
from outpace.models.host import spare_memory
from outpace.models.load import live, unwrapped
from outpace.models.options import LoadOptions
from outpace.models.torch.anatomy import weight_bytes
from outpace.models.torch.state import ModuleState
from outpace.params import SamplingParams
from outpace.text.tokenizer import Tokenizer

_DOOR = "_outpace_door"
_MOST_NODES = 63
_MOST_SPECS = 8  # drafters that calls named and that are kept
_OPENING = Lock()  # two threads that call a model's first generate share one engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PatchStats:
    """What the calls of a patched model's ``generate`` came to.

    ``calls``: how many returned; ``own``: those that went to the model's own ``generate``, by the reason; ``last``:
    counts and times of the last call, None where it was the model's own; ``total``: of all drafted calls. ``notes``:
    what was turned off in drafted calls, and why.
    """

    calls: int
    own: dict[str, int]
    last: Stats | None
    total: Stats
    notes: tuple[str, ...]

    @property
    def tokens_per_step(self) -> float:
        """Tokens over steps, of all drafted calls."""
        return self.total.tokens_per_step

    def __repr__(self) -> str:
        own = "".join(f"; {n} by the model's own generate: {reason}" for reason, n in self.own.items())
        notes = "".join(f"; {note}" for note in self.notes)
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        return f"PatchStats({calls}, {self.calls - sum(self.own.values())} drafted: {self.total.summary}{own}{notes})"


def _spare(module: Any) -> int | None:
    """Bytes for keys and values: half of what is free, on a CPU once the native backend has packed the weights."""
    device = str(module.device)
    packed = weight_bytes(module) if device == "cpu" else 0
    try:
        return spare_memory(device, packed)
    except MemoryLimitError:  # then nothing is packed
        return spare_memory(device, 0)


class Patch:
    """What ``patch`` returns: engines over one model, made as calls ask for drafters. ``close`` undoes the patch; under
    ``with`` it is undone at the end."""

    def __init__(self, module: Any, drafter: StrPath, options: dict[str, Any]) -> None:
        options = {"prefix_rows": 0, "max_rows": 64, **options}
        memory = options.pop("kv_memory", None)
        engine_options(options, "outpace.patch")
        self._module, self._drafter, self._options = weakref.ref(module), drafter, options
        limit = _spare(module) if memory is None else parse_bytes(memory)
        self._load_options = LoadOptions(kv_memory=limit)
        self._engines: dict[tuple[StrPath, int], Engine] = {}  # by the drafter's spec and the assistant's id
        self._assistants: dict[int, ModuleState] = {}  # by id
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()  # assistants that have a finalizer
        self._state: ModuleState | None = None  # of the module, as the engines have it
        self._refusal: str | None = None  # why there can be none
        self._closed = False
        self.model: Model
        self._serve(module)
        self.lock = RLock()  # one generate at a time
        self.drafting = False  # whether an engine runs; a generate that is called from within is the model's own
        self._calls, self._own, self._notes = 0, Counter[str](), dict[str, None]()
        self._reasons: dict[str, str] = {}  # the first of those that differ in numbers alone
        self._last: Stats | None = None
        self._total = pooled([])

    @property
    def stats(self) -> PatchStats:
        """What the calls so far came to."""
        return PatchStats(self._calls, dict(self._own), self._last, self._total, tuple(self._notes))

    def count(self, results: list[Result]) -> None:
        """Add a drafted call, which had these ``results``."""
        self._calls += 1
        self._last = pooled(result.stats for result in results)
        self._total = pooled([self._total, self._last])
        self._notes |= dict.fromkeys(note for result in results for note in result.notes)

    def count_own(self, reason: str) -> None:
        """Add a call that the model's own ``generate`` served, and log its ``reason`` once. Reasons that differ in
        numbers alone are one."""
        kind = re.sub(r"\d+", "0", reason)
        if kind not in self._reasons:
            log.warning("outpace: undrafted, by the model's own generate: %s", reason)
        reason = self._reasons.setdefault(kind, reason)
        self._calls += 1
        self._own[reason] += 1
        self._last = None

    def _serve(self, module: Any) -> None:
        self.model = live(module, None, self._load_options, weak=True)[0]
        self._state = ModuleState(module)

    def serves(self, module: Any) -> bool:
        """Whether ``module`` has this patch. Under ``lock`` that stays so."""
        return module.__dict__.get(_DOOR) is self

    def follow(self, module: Any) -> None:
        """Serve ``module`` as it is now: one that changed since is read, and proven, again. Raises NotDraftedError
        inside another call and once the patch is undone, ModelError where it can no longer be served exactly."""
        self._require_open()
        if self.drafting:
            raise NotDraftedError("a generate inside another one")
        if self._state is None or not self._state.same(module):
            self._state = self._refusal = None
            self._release()
            try:
                self._serve(module)
            except Exception as error:  # torch's, too, where it cannot compute what the module has become
                lines = str(error).strip().splitlines() or [type(error).__name__]
                self._state, self._refusal = ModuleState(module), lines[0]
        if self._refusal is not None:
            raise ModelError(self._refusal)

    def _require_open(self) -> None:
        if self._closed:
            raise NotDraftedError("a patch that was undone")

    def engine(self, drafter: str | None = None, assistant: Any = None, tokenizers: Any = None) -> Engine:
        """The engine that drafts by the spec ``drafter`` (None: the patch's own) or with the module ``assistant``.
        Raises NotDraftedError once the patch is undone."""
        self._require_open()
        identity = id(assistant)
        if identity in self._assistants and not self._assistants[identity].same(assistant):
            self._forget(identity)
        key = (drafter or self._drafter, identity)
        if key in self._engines:
            self._engines[key] = self._engines.pop(key)  # the latest is the last
        else:
            own = (self._drafter, id(None))
            past = [each for each in self._engines if each != own and each[1] == own[1]]
            if drafter is not None and len(past) >= _MOST_SPECS:
                self._engines.pop(past[0]).drafter.close()
            options = dict(self._options)
            spec = parse(key[0])
            if spec.size is not None:
                options["size"] = spec.size
            nodes = engine_options(options).nodes
            with ExitStack() as undo:
                if assistant is None:
                    built = build(spec, DraftContext(self.model, None, self._load_options, nodes))
                else:
                    built = self._assisted(assistant, tokenizers, nodes)
                    self._assistants[identity] = ModuleState(assistant)
                    if assistant not in self._watched:
                        self._watched.add(assistant)
                        weakref.finalize(assistant, _forget, weakref.ref(self), identity).atexit = False
                undo.callback(built.close)
                self._engines[key] = Engine(self.model, None, drafter=built, **options)
                undo.pop_all()
        return self._engines[key]

    def _assisted(self, assistant: Any, tokenizers: Any, nodes: int) -> Drafter:
        own: list[Tokenizer | None] = [None, None]
        if tokenizers is not None:
            own = [Tokenizer.from_transformers(tokenizer) for tokenizer in tokenizers]
        context = DraftContext(self.model, own[0], self._load_options, nodes)
        return drafting_with(live(assistant, weak=True, beside=self.model)[0], own[1], "assistant", context)

    def _forget(self, assistant: int) -> None:
        """Give back what drafts with the assistant of this id; the target is the other engines', too."""
        self._assistants.pop(assistant, None)
        for key in [key for key in self._engines if key[1] == assistant]:
            self._engines.pop(key).drafter.close()

    def _release(self) -> None:
        self._assistants.clear()
        with ExitStack() as closing:
            closing.callback(self.model.close)
            while self._engines:
                closing.callback(self._engines.popitem()[1].close)

    def close(self) -> None:
        """Give the model its own generate back, and the memory. Calling twice is allowed. Raises ParameterError inside
        a call of it."""
        with self.lock:
            if self.drafting:
                raise ParameterError("this model's generate is running: undo the patch when it has returned")
            module = self._module()
            if module is not None and self.serves(module):  # a newer patch stays
                del module.__dict__[_DOOR]
                module.__dict__.pop("generate", None)
            self._closed = True
            self._release()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy of the model is not patched

    def __reduce__(self) -> Any:
        return type(None), ()


def _forget(patch: weakref.ref[Patch], assistant: int) -> None:
    found = patch()
    if found is not None:
        found._forget(assistant)


def patch(
    model: Any, *, drafter: StrPath = "auto", kv_memory: int | str | None = None, **options: Unpack[EngineKeywords]
) -> Patch:
    """Let ``model.generate(...)`` decode speculatively: greedy tokens stay the same, sampled ones as likely as before.

    ``model``: a decoder-only transformers model in evaluation mode. ``drafter``: a spec such as "auto" or "ngram", for
    calls that name no ``assistant_model``, ``prompt_lookup_num_tokens`` or ``assistant_early_exit``. ``kv_memory``: a
    bound in bytes, or such as "2GiB". ``options``: those of ``EngineOptions`` (size, ...). Calls that cannot be drafted
    go to the model's own ``generate``: ``stats(model)`` says which, and why. ``unpatch(model)``, or the result's
    ``close``, undoes it. Raises ModelError when the model cannot be served exactly, ParameterError, DrafterError.
    """
    model = _module_of("patch", model)
    unpatch(model)
    found = _open(model, drafter, {**options, "kv_memory": kv_memory})
    try:
        found.engine()  # what steps cost is measured here, not in the first call
    except BaseException as error:
        # What was asked for is there, or refused now; calls say what is wrong with the rest.
        if drafter != "auto" or options or kv_memory is not None or not isinstance(error, OutpaceError):
            found.close()
            raise
    model.generate = MethodType(_generate, model)
    return found


def unpatch(model: Any) -> None:
    """Give ``model`` its own ``generate`` back, and the memory. A model that is not patched stays as it is."""
    found = _module_of("unpatch", model).__dict__.get(_DOOR)
    if found is not None:
        found.close()


def stats(model: Any) -> PatchStats:
    """What calls of ``model.generate`` came to since ``patch(model)``. Raises ParameterError for other models."""
    found = _module_of("stats", model).__dict__.get(_DOOR)
    if found is None:
        raise ParameterError(f"this {type(model).__name__} is not patched: call outpace.patch(model) first")
    assert isinstance(found, Patch)
    return found.stats


def _module_of(function: str, model: Any) -> Any:
    """The model whose ``generate`` is called in the end. Raises ParameterError where there is none."""
    if isinstance(model, torch.nn.Module):
        return unwrapped(model)
    remedy = "load one with transformers, or use outpace.Engine.load(...).generate(...), which loads it itself"
    if isinstance(model, str):
        remedy = f"AutoModelForCausalLM.from_pretrained({model!r}) loads one; outpace.Engine.load({model!r}) needs none"
    elif isinstance(getattr(model, "model", None), torch.nn.Module):
        remedy = "give its .model"
    shown = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
    raise ParameterError(f"outpace.{function} takes a transformers model in memory, not {shown}: {remedy}")


def _open(model: Any, drafter: StrPath = "auto", options: dict[str, Any] | None = None) -> Patch:
    with _OPENING:
        found = model.__dict__.get(_DOOR)
        if found is None:
            parse(drafter)
            found = Patch(model, drafter, options or {})
            model.__dict__[_DOOR] = found
    assert isinstance(found, Patch)
    return found


@contextmanager
def _held(find: Callable[[], Patch | None], model: Any) -> Iterator[Patch | None]:
    """The patch of ``model`` that ``find`` gives, locked; looked for anew where another thread undid it meanwhile."""
    while (patched := find()) is not None:
        with patched.lock:
            if patched.serves(model):
                yield patched
                return
    yield None


def _generate(self: Any, *args: Any, **named: Any) -> Any:
    """A patched model's ``generate``: drafted, or else the model's own with the very same arguments."""
    own = type(self).generate
    with _held(lambda: self.__dict__.get(_DOOR), self) as patched:
        if patched is None:  # a copy, or no longer patched when it was this call's turn
            return own(self, *args, **named)
        call = _Call(patched)
        random = torch.get_rng_state()
        try:
            return call.drafted(own, inspect.signature(own).bind(self, *args, **named))
        except Exception as error:
            # Before the engine has begun nothing of the call is used up. Mistakes raise the same again below.
            if call.begun or (call.prepared and not isinstance(error, OutpaceError)):
                raise
            reason = error.reason if isinstance(error, NotDraftedError) else str(error)
        torch.set_rng_state(random)
        answer = own(self, *args, **named)
        patched.count_own(reason)
        return answer


_generate.__name__ = "generate"  # by which a bound method is pickled: a copy gets the class's own


@dataclass
class _Call:
    """A call of ``generate`` that is to be drafted. It is the decoding loop, too, that transformers calls with what it
    has prepared; what transformers keeps from such a loop is given here."""

    patch: Patch
    streamer: Any = None
    assistant: Any = None
    assistant_tokenizer: Any = None
    tokenizer: Any = None
    prepared: bool = False  # transformers has checked and prepared the arguments
    begun: bool = False  # the engine has the requests

    def drafted(self, own: Any, bound: inspect.BoundArguments) -> Any:
        """What the model's ``own`` generate returns with this call as its decoding loop, and the arguments ``bound``.

        Raises NotDraftedError, or what transformers raises.
        """
        (_, model), *arguments = bound.arguments.items()
        given: dict[str, Any] = {}
        for name, value in arguments:
            given |= value if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        if given.get("custom_generate") is generate:
            del given["custom_generate"]
        require_known(model, given)
        self.streamer, self.assistant = given.pop("streamer", None), given.pop("assistant_model", None)
        self.assistant_tokenizer, self.tokenizer = given.pop("assistant_tokenizer", None), given.pop("tokenizer", None)
        if self.tokenizer is not None and (stops := given.pop("stop_strings", None)) is not None:
            criteria = given.get("stopping_criteria") or []
            given["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(self.tokenizer, stops)])
        elif getattr(given.get("generation_config") or model.generation_config, "stop_strings", None) is not None:
            given["tokenizer"] = self.tokenizer
        return own(model, **given, custom_generate=self)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        self.prepared = True
        config = generation_config
        require_drafted(model, config, model_kwargs)
        padding = padding_of(input_ids, model_kwargs)
        self.patch.follow(model)
        spec = None
        if config.assistant_early_exit is not None:  # which of them comes first is transformers' order
            spec = f"layers:{config.assistant_early_exit}"
        elif config.prompt_lookup_num_tokens is not None and self.assistant is None:
            if not config.prompt_lookup_num_tokens > 0:
                raise NotDraftedError(f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}")
            longest = f",max={config.max_matching_ngram_size}" if config.max_matching_ngram_size else ""
            spec = f"ngram:size={min(config.prompt_lookup_num_tokens, _MOST_NODES)}{longest}"
        both = None if self.assistant_tokenizer is None else (self.tokenizer, self.assistant_tokenizer)
        engine = self.patch.engine(spec, self.assistant, both)
        loop = _Loop(engine, input_ids, list(logits_processor), list(stopping_criteria), config, self.streamer, padding)
        self.patch.drafting = True
        try:
            with loop:
                self.begun = True
                answer = loop.run()
        finally:
            self.patch.drafting = False
        if config.return_dict_in_generate:
            for name, cache in caches(model, answer.sequences, model_kwargs).items():
                answer[name] = cache
        self.patch.count(loop.results)
        return answer


def generate(
    model: Any = None,
    input_ids: Any = None,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    streamer: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    text_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """transformers' decoding loop, for ``model.generate(..., custom_generate=outpace.generate)``.

    ``input_ids`` int64 [B, S]; ``logits_processor``, ``stopping_criteria``, ``generation_config`` and ``model_kwargs``
    as transformers prepares them. It hands no ``streamer``, ``assistant_model``, ``assistant_tokenizer`` or
    ``text_tokenizer`` (the model's own) to a callable: ``functools.partial`` does, or a patched ``generate``. The
    engine stays with ``model`` until ``outpace.unpatch(model)``. Returns int64 [B, S + new], or a
    GenerateDecoderOnlyOutput. Raises ParameterError for what is not drafted, by name.
    """
    if not isinstance(model, torch.nn.Module) or generation_config is None:
        raise ParameterError(
            "outpace.generate is a decoding loop, for model.generate(..., custom_generate=outpace.generate): "
            'for text, use outpace.Engine.load("demo").generate("Hello")'
        )
    with _held(lambda: _open(model), model) as patched:
        assert patched is not None
        call = _Call(patched, streamer, assistant_model, assistant_tokenizer, text_tokenizer)
        return call(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)


@dataclass
class _Loop:
    """transformers' loop over columns of new tokens, with an engine that decodes the rows.

    ``input_ids`` int64 [B, S]; ``padding`` [B]: how many of each row's first tokens are padding.
    """

    engine: Engine
    input_ids: torch.Tensor
    processors: list[Any]
    criteria: list[Any]
    config: Any
    streamer: Any
    padding: list[int]
    rules: list[Processors | None] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)  # a column each, float32 [B, V]
    logits: list[torch.Tensor] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    column: int = 0  # new columns that are whole

    def __post_init__(self) -> None:
        config, (batch, width) = self.config, self.input_ids.shape
        self._keep = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        own = (EosTokenCriteria, MaxLengthCriteria)
        self._ends = sorted({int(i) for c in self.criteria if type(c) is EosTokenCriteria for i in c.eos_token_id})
        self._longest = ceil(min(c.max_length for c in self.criteria if type(c) is MaxLengthCriteria))
        self._asked = StoppingCriteriaList(c for c in self.criteria if type(c) not in own)
        self._new = self._longest - width
        self._ids = torch.cat(
            [self.input_ids, self.input_ids.new_zeros((batch, max(self._new, 1)), dtype=torch.int64)], 1
        )
        self._requests: dict[int, int] = {}  # the row of each of the engine's requests
        self._rows: list[list[int]] = [[] for _ in range(batch)]  # new tokens; some may be ahead of the columns
        self._over = [False] * batch  # the engine has ended it
        self._done = [False] * batch  # transformers has

    def __enter__(self) -> _Loop:
        """Give the engine a request a row. Raises OutpaceError for what it does not serve; nothing is used up then."""
        most = self.engine.model.info.max_length
        if self._longest > most:
            raise NotDraftedError(f"max_length={self._longest} where the model's context has {most} positions")
        rows = range(len(self._rows))
        seeds = torch.randint(0, 2**62, (len(rows),)).tolist() if self.config.do_sample else [0] * len(rows)
        with ExitStack() as undo:
            undo.callback(self._cancel)
            for row in rows:
                prompt = self.input_ids[row, self.padding[row] :].cpu().numpy()
                self._requests[self.engine.add(prompt, self._params(row, seeds[row]))] = row
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    def _cancel(self) -> None:
        for request, row in self._requests.items():
            if not self._over[row]:
                self._end(request)

    def _end(self, request: int) -> None:
        self._over[self._requests[request]] = True
        self.results += [delta.result for delta in self.engine.cancel(request) if delta.result is not None]

    def run(self) -> Any:
        """What ``generate`` returns. Raises what a processor, a criterion or the streamer raises."""
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())
        while not all(self._done):
            for delta in self.engine.step():
                if delta.request in self._requests:
                    self._take(self._requests[delta.request], delta)
            while not all(self._done) and self._whole():
                self._append()
            for request, row in self._requests.items():
                if self._done[row] and not self._over[row]:
                    self._end(request)
        if self.streamer is not None:
            self.streamer.end()
        return self._answer()

    def _take(self, row: int, delta: Delta) -> None:
        self._rows[row] += delta.token_ids
        if delta.result is None:
            return
        self._over[row] = True
        self.results.append(delta.result)
        try:
            delta.result.raise_for_error()
        except RuleError as error:
            raise (error.__cause__ or error) from None  # a processor's own, as transformers lets it through

    def _whole(self) -> bool:
        """Whether every row that goes on has a token for the next column."""
        return all(done or len(row) > self.column for done, row in zip(self._done, self._rows, strict=True))

    def _append(self) -> None:
        """Append a column, and ask what may stop there."""
        pad = 0 if self.config._pad_token_tensor is None else int(self.config._pad_token_tensor)
        tokens = [pad if d else row[self.column] for d, row in zip(self._done, self._rows, strict=True)]
        end = self.input_ids.shape[1] + self.column
        self._ids[:, end] = torch.tensor(tokens, device=self._ids.device)
        if self._keep:
            self._record()
        self.column += 1
        full = self.column >= self._new
        self._done = [d or full or token in self._ends for d, token in zip(self._done, tokens, strict=True)]
        if self._asked:
            stopped = self._asked(self._ids[:, : end + 1], tuple(self.scores) if self.config.output_scores else None)
            self._done = [d or bool(s) for d, s in zip(self._done, stopped.tolist(), strict=True)]
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))

    def _answer(self) -> Any:
        sequences = self._ids[:, : self.input_ids.shape[1] + self.column]
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.scores) if self.config.output_scores else None,
            logits=tuple(self.logits) if self.config.output_logits else None,
        )

    def _params(self, row: int, seed: int) -> SamplingParams:
        width, new = self.input_ids.shape[1], max(self._new, 1)
        processors = of_row(self.processors, row, len(self._rows))
        fields: dict[str, Any] = {"temperature": 1.0 if self.config.do_sample else 0.0}
        if not self._keep:
            fields, taken = as_parameters(processors, self._ends, width, sampled=self.config.do_sample)
            processors = processors[taken:]
        rule = None
        if processors or self._keep:
            rule = Processors(processors, self.input_ids[row, : self.padding[row]], keep=self._keep)
        self.rules.append(rule)
        if "min_tokens" in fields:
            fields["min_tokens"] = min(fields["min_tokens"], new)
        vocab = self.engine.model.info.vocab_size
        stop = [i for i in self._ends if 0 <= i < vocab]
        return SamplingParams(**fields, max_tokens=new, stop_ids=stop, seed=seed, rules=[] if rule is None else [rule])

    def _record(self) -> None:
        """Keep what the column's tokens were chosen from, [B, V] before and after the processors; 0 in ended rows."""
        found = []
        for row, rule in enumerate(self.rules):
            assert rule is not None
            state = (*self.input_ids[row, self.padding[row] :].tolist(), *self._rows[row][: self.column])
            found.append(None if self._done[row] else rule.kept.pop(state))
        nothing = torch.zeros_like(next(pair[0] for pair in found if pair is not None))
        self.logits.append(torch.stack([nothing if pair is None else pair[0] for pair in found]))
        self.scores.append(torch.stack([nothing if pair is None else pair[1] for pair in found]))
