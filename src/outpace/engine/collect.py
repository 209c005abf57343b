"""Requests that run together, from prompts to results: what ``Engine`` and ``AsyncEngine`` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from outpace.common.progress import Advance, in_notebook, progress
from outpace.engine.results import Delta, Errors, Result
from outpace.engine.sequence import Prepared
from outpace.errors import Argument, OutpaceError, ParameterError
from outpace.params import Prompt, SamplingParams

Prepare = Callable[..., Prepared]  # Engine.prepare


def prepared_one(
    prepare: Prepare, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any]
) -> Prepared:
    """One request with one sample. Raises ParameterError, and what ``prepare`` raises."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise ParameterError(f"generate takes one prompt, and this is a list of {len(prompt)}: use generate_many")
    prepared = prepare(prompt, params, **options)
    n = len(prepared.sequences)
    if n != 1:
        raise ParameterError(Argument("n", n), " samples make several results: use generate_many")
    return prepared


def prepared_many(
    prepare: Prepare,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    options: Mapping[str, Any],
) -> list[Prepared]:
    """A request a prompt. Raises ParameterError, and what ``prepare`` raises."""
    if isinstance(prompts, str):
        raise ParameterError("generate_many takes a list of prompts, and this is one text: use generate")
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "__array__"):
        raise ParameterError(f"the prompts are a {type(prompts).__name__}: give a list of prompts")
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise ParameterError(f"{len(each)} params for {len(prompts)} prompts: give one for all, or one each")
    return [prepare(prompt, own, **options) for prompt, own in zip(prompts, each, strict=True)]


def checked_errors(errors: Errors) -> bool:
    """Whether an answer's error is raised. Raises ParameterError."""
    if errors not in ("raise", "return"):
        raise ParameterError(Argument("errors", errors), " is unknown: use raise, or return (the result has the error)")
    return errors == "raise"


def bar(samples: int, shown: bool | None) -> AbstractContextManager[Advance]:
    """Progress of so many answers. ``shown``: None in a notebook alone, where several are awaited."""
    return progress("answers", samples, speed=True, shown=in_notebook() and samples > 1 if shown is None else shown)


class Collected:
    """Results of ``requests``, from their deltas."""

    def __init__(self, requests: Sequence[Prepared], errors: Errors, advance: Advance) -> None:
        self._order = {prepared.request.id: place for place, prepared in enumerate(requests)}
        self._raises, self._advance = checked_errors(errors), advance
        self._results: dict[tuple[int, int], Result] = {}
        self._total = sum(len(prepared.sequences) for prepared in requests)

    @property
    def complete(self) -> bool:
        return len(self._results) == self._total

    def take(self, delta: Delta) -> None:
        """Raises what ended a request, where errors are to be raised."""
        result, place = delta.result, self._order[delta.request]
        self._advance(int(result is not None), len(delta.token_ids))
        if result is None:
            return
        self._results[place, delta.sample] = result
        if self._raises:
            try:
                result.raise_for_error()
            except OutpaceError as error:
                if len(self._order) > 1:
                    error.add_note(f"in prompt {place + 1} of {len(self._order)}; errors='return' returns all results")
                raise

    @property
    def results(self) -> list[Result]:
        """In the order of the requests, and of the samples within one."""
        return [self._results[key] for key in sorted(self._results)]
