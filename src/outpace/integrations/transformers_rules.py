"""transformers' logits processors as SamplingParams where those mean the same, else as one rule that calls them."""

from __future__ import annotations

import inspect
from copy import copy
from functools import partial
from typing import Any

import torch
from transformers.generation import logits_process as known

from outpace.common.arrays import F32, I32
from outpace.integrations.transformers_calls import NotDraftedError
from outpace.params import MIN_TEMPERATURE

# They run the model, or remember what they were called with: a rule sees drafts that may never be committed.
_REFUSED = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
# They hold something of every row's prompt.
_OF_BATCH = ("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")
State = tuple[int, ...]


class Processors:
    """A LogitRule: calls ``processors`` one row at a time with ids [1, S], the row's left padding included, and scores
    float32 [1, V].

    ``kept``: by the tokens so far, the scores [V] before and after, where ``keep`` is set.
    """

    def __init__(self, processors: list[Any], padding: torch.Tensor, *, keep: bool = False) -> None:
        self._processors, self._padding, self._keep = processors, padding, keep
        self.kept: dict[State, tuple[torch.Tensor, torch.Tensor]] = {}

    def start(self, prompt: I32) -> State:
        return tuple(int(token) for token in prompt)

    def advance(self, state: State, token: int) -> State:
        return (*state, token)

    def apply(self, state: State, logits: F32) -> None:
        device = self._padding.device
        ids = torch.cat([self._padding, torch.tensor(state, device=device)])[None]
        before = torch.from_numpy(logits.copy()).to(device)[None]
        after = before.clone()
        for processor in self._processors:
            after = processor(ids, after)
        if after.shape != before.shape:
            raise RuntimeError(f"logits processors gave scores of the shape {[*after.shape]}, not {[*before.shape]}")
        if self._keep:
            self.kept[state] = before[0], after[0]
        logits[:] = after[0].float().cpu().numpy()


def of_row(processors: list[Any], row: int, batch: int) -> list[Any]:
    """``processors`` of a ``batch`` of rows as they are for ``row`` alone.

    Raises NotDraftedError for those that cannot be called on drafts, and where there are several rows for those that
    may know them by their places: a caller's own cannot be looked into.
    """
    found = []
    for processor in processors:
        kind = type(processor).__name__
        if not callable(processor) or len(inspect.signature(processor.__call__).parameters) != 2:
            raise NotDraftedError(f"a {kind} as logits processor, which takes more than ids and scores")
        if kind in _REFUSED:
            raise NotDraftedError(f"{kind}, which runs the model or remembers its calls")
        if batch > 1 and not type(processor).__module__.startswith("transformers."):
            raise NotDraftedError("a logits processor of the caller's own in a batch, whose rows it may tell apart")
        if batch > 1 and kind in _OF_BATCH:
            raise NotDraftedError(f"a {kind} in a batch, whose rows it tells apart")
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor):
            processor = copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        if isinstance(processor, known.PrefixConstrainedLogitsProcessor):
            processor = copy(processor)
            processor._prefix_allowed_tokens_fn = partial(_of_batch, processor._prefix_allowed_tokens_fn, row)
        found.append(processor)
    return found


def _of_batch(allowed: Any, row: int, _: int, ids: torch.Tensor) -> Any:
    return allowed(row, ids)


def as_parameters(processors: list[Any], ends: list[int], width: int, *, sampled: bool) -> tuple[dict[str, Any], int]:
    """``(fields of SamplingParams, how many of the first processors they stand for)``: those behind them are a rule.

    Temperature and filters at the end, which follow every rule, are among the fields and cut off ``processors``.
    ``ends``: ids that end an answer; ``width``: tokens of the prompt, padding included.
    """
    fields: dict[str, Any] = {"temperature": 1.0 if sampled else 0.0}
    _take_filters(processors, fields, sampled)
    bias: dict[int, float] = {}
    least = 0
    taken = 0
    for processor in processors:
        match processor:
            case known.RepetitionPenaltyLogitsProcessor() if "repetition_penalty" not in fields and not isinstance(
                processor.prompt_ignore_length, int
            ):
                fields["repetition_penalty"] = float(processor.penalty)
            case known.MinLengthLogitsProcessor() if _ids(processor.eos_token_id) == sorted(ends):
                least = max(least, processor.min_length - width)
            case known.MinNewTokensLengthLogitsProcessor() if _ids(processor.eos_token_id) == sorted(ends):
                least = max(least, processor.min_new_tokens - width + processor.prompt_length_to_skip)
            case known.SuppressTokensLogitsProcessor():
                bias |= dict.fromkeys(_ids(processor.suppress_tokens), float("-inf"))
            case _:
                break
        taken += 1
    if bias:
        fields["logit_bias"] = bias
    if least > 0:
        fields["min_tokens"] = least
    return fields, taken


def _take_filters(processors: list[Any], fields: dict[str, Any], sampled: bool) -> None:
    """Cut temperature and filters, in the order in which they apply here, off the end of ``processors``."""
    if processors and isinstance(processors[-1], known.LogitNormalization):
        processors.pop()  # changes no choice
    if not sampled:
        return
    plain = all(
        getattr(p, "filter_value", -float("inf")) == -float("inf") and getattr(p, "min_tokens_to_keep", 1) == 1
        for p in processors
    )
    if processors and isinstance(processors[-1], known.MinPLogitsWarper) and plain:
        fields["min_p"] = processors.pop().min_p
    if processors and isinstance(processors[-1], known.TopPLogitsWarper) and plain and processors[-1].top_p > 0:
        fields["top_p"] = processors.pop().top_p
    if processors and isinstance(processors[-1], known.TopKLogitsWarper) and plain:
        fields["top_k"] = processors.pop().top_k
    last = processors[-1] if processors else None
    if isinstance(last, known.TemperatureLogitsWarper) and MIN_TEMPERATURE <= last.temperature <= 100:
        fields["temperature"] = processors.pop().temperature


def _ids(ids: Any) -> list[int]:
    return sorted(int(i) for i in torch.as_tensor(ids).flatten().tolist())
