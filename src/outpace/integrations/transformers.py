"""The door for transformers' users: ``outpace.patch(model)`` makes ``model.generate`` speculative.

transformers prepares everything (GenerationConfig, processors, stopping criteria); what decodes is an engine over the
same modules. Its tokens are taken column by column, as transformers' own loop appends them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from types import MethodType, TracebackType
from typing import Any, Unpack

import torch
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from outpace.common.files import StrPath
from outpace.common.units import parse_bytes
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.forward.model import drafting_with
from outpace.drafters.registry import build, parse
from outpace.engine.engine import Engine
from outpace.engine.intake import engine_options
from outpace.engine.keywords import EngineKeywords
from outpace.engine.results import Delta
from outpace.errors import ParameterError
from outpace.integrations.transformers_rules import Processors, as_parameters, of_row
from outpace.models.base import Model
from outpace.models.load import live
from outpace.models.memory import spare_memory
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer
from outpace.params import SamplingParams

_DOOR = "_outpace_door"
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
_USED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "synced_gpus")
_MOST_NODES = 63


class Patch:
    """What ``patch`` returns: engines over one model, made as calls ask for drafters. ``close`` undoes the patch; under
    ``with`` it is undone at the end."""

    def __init__(self, module: Any, drafter: StrPath, options: dict[str, Any]) -> None:
        options = {"prefix_rows": 0, "max_rows": 64, **options}
        memory = options.pop("kv_memory", None)
        self._module, self._drafter, self._options = module, drafter, options
        limit = spare_memory(str(module.device), 0) if memory is None else parse_bytes(memory)
        engine_options(options, "outpace.patch")
        self._load_options = LoadOptions(kv_memory=limit)
        self.model: Model = live(module, None, self._load_options)[0]
        self._engines: dict[Any, Engine] = {}
        self.lock = Lock()  # one generate at a time

    def engine(self, drafter: str | None = None, assistant: Any = None, tokenizers: Any = None) -> Engine:
        """The engine that drafts by the spec ``drafter`` (None: the patch's own) or with the module ``assistant``."""
        key = (drafter or self._drafter, None if assistant is None else id(assistant))
        if key not in self._engines:
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
                undo.callback(built.close)
                self._engines[key] = Engine(self.model, None, drafter=built, **options)
                undo.pop_all()
        return self._engines[key]

    def _assisted(self, assistant: Any, tokenizers: Any, nodes: int) -> Drafter:
        own: list[Tokenizer | None] = [None, None]
        if tokenizers is not None:
            own = [Tokenizer.from_transformers(tokenizer) for tokenizer in tokenizers]
        context = DraftContext(self.model, own[0], self._load_options, nodes)
        return drafting_with(live(assistant)[0], own[1], "assistant", context)

    def close(self) -> None:
        """Give the model its own generate back, and the memory. Calling twice is allowed."""
        self._module.__dict__.pop(_DOOR, None)
        if isinstance(self._module.__dict__.get("generate"), MethodType):
            del self._module.generate
        with ExitStack() as closing:
            closing.callback(self.model.close)
            for engine in self._engines.values():
                closing.callback(engine.close)
            self._engines.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy of the model is not patched

    def __reduce__(self) -> Any:
        return type(None), ()


def patch(
    model: Any, *, drafter: StrPath = "auto", kv_memory: int | str | None = None, **options: Unpack[EngineKeywords]
) -> Patch:
    """Let ``model.generate(...)`` decode speculatively: greedy tokens stay the same, sampled ones as likely as before.

    ``model``: a decoder-only transformers model in evaluation mode. ``drafter``: a spec such as "auto" or "ngram", for
    calls that name no ``assistant_model``, ``prompt_lookup_num_tokens`` or ``assistant_early_exit``. ``kv_memory``: a
    bound in bytes, or such as "2GiB". ``options``: those of ``EngineOptions`` (size, ...). ``unpatch(model)``, or the
    result's ``close``, undoes it. Raises ModelError when the model cannot be served exactly, ParameterError,
    DrafterError.
    """
    unpatch(model)
    found = _open(model, drafter, {**options, "kv_memory": kv_memory})
    model.generate = MethodType(_generate, model)
    return found


def unpatch(model: Any) -> None:
    """Give ``model`` its own ``generate`` back, and the memory. A model that is not patched stays as it is."""
    found = model.__dict__.get(_DOOR)
    if found is not None:
        found.close()


def _open(model: Any, drafter: StrPath = "auto", options: dict[str, Any] | None = None) -> Patch:
    found = model.__dict__.get(_DOOR)
    if found is None:
        parse(drafter)
        found = Patch(model, drafter, options or {})
        model.__dict__[_DOOR] = found
    assert isinstance(found, Patch)
    return found


def _generate(
    self: Any, inputs: Any = None, generation_config: Any = None, *args: Any, custom_generate: Any = None, **named: Any
) -> Any:
    """A patched model's ``generate``; what it is given goes to the model's own, which calls ``generate`` below."""
    own = partial(type(self).generate, self, inputs, generation_config, *args)
    if self.__dict__.get(_DOOR) is None or custom_generate is not None:  # a copy; or another's loop is asked for
        return own(custom_generate=custom_generate, **named)
    if args:
        raise ParameterError("a patched generate takes what follows generation_config by name")
    given = {name: named.pop(name, None) for name in ("streamer", "assistant_model", "assistant_tokenizer")}
    if named.get("past_key_values") is not None:
        raise _unserved("past_key_values")
    tokenizer = named.pop("tokenizer", None)
    if tokenizer is not None and (stops := named.pop("stop_strings", None)) is not None:
        criteria = StoppingCriteriaList(named.get("stopping_criteria") or [])
        named["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stops)])
    return own(custom_generate=partial(generate, **given, text_tokenizer=tokenizer), **named)


def _unserved(what: str) -> ParameterError:
    return ParameterError(f"{what} is not served by outpace: leave it out, or call outpace.unpatch(model) first")


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    text_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """transformers' decoding loop, for ``model.generate(..., custom_generate=outpace.generate)``.

    ``input_ids`` int64 [B, S]; ``logits_processor``, ``stopping_criteria``, ``generation_config`` and ``model_kwargs``
    as transformers prepares them. It hands no ``streamer``, ``assistant_model``, ``assistant_tokenizer`` or
    ``text_tokenizer`` (the model's own) to a callable, but a patched ``generate`` does. The engine stays with ``model``
    until ``outpace.unpatch(model)``. Returns int64 [B, S + new], or a GenerateDecoderOnlyOutput. Raises ParameterError
    for what is not served, by name.
    """
    config = generation_config
    _refuse(model, config, model_kwargs)
    spec = None
    if config.prompt_lookup_num_tokens is not None and assistant_model is None:
        longest = f",max={config.max_matching_ngram_size}" if config.max_matching_ngram_size else ""
        spec = f"ngram:size={min(config.prompt_lookup_num_tokens, _MOST_NODES)}{longest}"
    elif config.assistant_early_exit is not None:
        spec = f"layers:{config.assistant_early_exit}"
    door = _open(model)
    tokenizers = None if assistant_tokenizer is None else (text_tokenizer, assistant_tokenizer)
    with door.lock:
        engine = door.engine(spec, assistant_model, tokenizers)
        padding = _padding(input_ids, model_kwargs)
        return _Loop(
            engine, input_ids, list(logits_processor), list(stopping_criteria), config, streamer, padding
        ).run()


def _refuse(model: Any, config: Any, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode(None)
    if mode not in _MODES:
        raise _unserved(f"the generation mode {mode.value}")
    for name in ("output_attentions", "output_hidden_states", "token_healing"):
        if getattr(config, name, False):
            raise _unserved(name)
    for name, value in model_kwargs.items():
        cached = name == "past_key_values" and value is not None and value.get_seq_length() > 0
        if cached or (name not in _USED and value is not None):
            raise _unserved(name)
    if model_kwargs.get("synced_gpus"):
        raise _unserved("synced_gpus")
    if model.training:
        raise ParameterError("the model is in training mode, where dropout is on: call model.eval() first")


def _padding(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """How many of each row's first tokens are padding. Raises ParameterError for other masks and positions."""
    batch, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones((batch, width), dtype=torch.bool) if mask is None else mask.bool().cpu()
    lengths = mask.sum(1)
    if mask.shape != (batch, width) or not torch.equal(mask, torch.arange(width)[None] >= width - lengths[:, None]):
        raise _unserved("an attention_mask that is not left padding")
    if not int(lengths.min()):
        raise ParameterError("a prompt is empty: give at least one token that the attention_mask lets through")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        usual = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)
        if not torch.equal(positions.cpu().expand(batch, -1).masked_fill(~mask, 0), usual):
            raise _unserved("position_ids that do not count a row's tokens")
    return [width - int(n) for n in lengths]


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
    column: int = 0  # new columns that are whole

    def __post_init__(self) -> None:
        config, (batch, width) = self.config, self.input_ids.shape
        self._keep = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        own = (EosTokenCriteria, MaxLengthCriteria)
        self._ends = sorted({int(i) for c in self.criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id})
        self._longest = min(c.max_length for c in self.criteria if isinstance(c, MaxLengthCriteria))
        self._asked = [c for c in self.criteria if not isinstance(c, own)]
        self._new = self._longest - width
        self._ids = torch.cat([self.input_ids, self.input_ids.new_zeros((batch, max(self._new, 1)))], dim=1)
        self._rows: list[list[int]] = [[] for _ in range(batch)]  # new tokens; some may be ahead of the columns
        self._over = [False] * batch  # the engine has ended it
        self._done = [False] * batch  # transformers has

    def run(self) -> Any:
        """What ``generate`` returns. Raises ParameterError where the model's context is too short."""
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())
        requests: dict[int, int] = {}
        try:
            self._begin(requests)
            while not all(self._done):
                for delta in self.engine.step():
                    if delta.request in requests:
                        self._take(requests[delta.request], delta)
                while not all(self._done) and self._whole():
                    self._append()
                self._require_room()
                for request, row in requests.items():
                    if self._done[row] and not self._over[row]:
                        self._over[row] = True
                        self.engine.cancel(request)
        finally:
            for request in requests:
                self.engine.cancel(request)
        if self.streamer is not None:
            self.streamer.end()
        return self._answer()

    def _begin(self, requests: dict[int, int]) -> None:
        """Add a request a row to the engine, and to ``requests``."""
        rows = range(len(self._rows))
        seeds = torch.randint(0, 2**62, (len(rows),)).tolist() if self.config.do_sample else [0] * len(rows)
        for row in rows:
            prompt = self.input_ids[row, self.padding[row] :].cpu().numpy()
            requests[self.engine.add(prompt, self._params(row, seeds[row]))] = row

    def _take(self, row: int, delta: Delta) -> None:
        self._rows[row] += delta.token_ids
        if delta.result is not None:
            self._over[row] = True
            delta.result.raise_for_error()

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
        for criterion in self._asked:
            stops = criterion(self._ids[:, : end + 1], tuple(self.scores) if self.config.output_scores else None)
            stopped = torch.as_tensor(stops).expand(len(tokens)).tolist()
            self._done = [d or bool(s) for d, s in zip(self._done, stopped, strict=True)]
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))

    def _require_room(self) -> None:
        for done, over, row in zip(self._done, self._over, self._rows, strict=True):
            if over and not done and len(row) <= self.column:
                raise ParameterError(
                    f"the model's context of {self.engine.model.info.max_length} positions is full before "
                    f"max_length={self._longest}: lower max_new_tokens or shorten the prompt"
                )

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
        processors = of_row(self.processors, row, width)
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
