"""``outpace explain``: where two runs first part, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outpace.measure.replay import changes, recorded_gap
from outpace.measure.same import NEAR_TIE, Target, first_difference
from outpace.measure.trace import Trace, TracedRequest, TracedResult

_SERVING = ("n", "logprobs", "top_logprobs", "prompt_logprobs", "seed", "stop", "include_stop", "skip_special_tokens")
_ENDS = ("max_tokens", "stop", "stop_ids", "ignore_eos")  # these end an answer, and choose no token


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that two runs do not have in common. ``name`` is one of: prompt, parameters, seed, acceptance, model,
    version, backend, arithmetic, dtype, KV bytes a position, device, near-tie, ended, bug."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


@dataclass(frozen=True, slots=True)
class Explanation:
    """Two samples, one of each run, and where they part: at output index ``index`` (None: nowhere).

    ``tokens`` and ``texts`` are what each says there (None: it had ended). ``causes``: the first is the strongest.
    ``gap``: how far the worse token scores below the best, where the model could be asked; ``at_least``: it is only
    known to be no smaller.
    """

    requests: tuple[int, int]
    sample: int
    index: int | None
    common: int  # tokens that both have in common
    tokens: tuple[int | None, int | None] = (None, None)
    texts: tuple[str | None, str | None] = (None, None)
    causes: tuple[Cause, ...] = ()
    gap: float | None = None
    at_least: bool = False

    @property
    def identical(self) -> bool:
        return self.index is None

    def __str__(self) -> str:
        a, b = self.requests
        name = f"request {a}" if a == b else f"requests {a} and {b}"
        name += f", sample {self.sample}" if self.sample else ""
        if self.identical:
            also = f" (although: {'; '.join(map(str, self.causes))})" if self.causes else ""
            return f"{name}: identical, {self.common} tokens{also}"
        parted = " / ".join("ended" if text is None else repr(text) for text in self.texts)
        gap = "" if self.gap is None else f"; score gap {'at least ' if self.at_least else ''}{self.gap:.2g}"
        return f"{name}: part at token {self.index} ({parted}){gap}. {'; '.join(map(str, self.causes))}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: such a gap is None."""
        gap = self.gap if self.gap is not None and math.isfinite(self.gap) else None
        cause = self.causes[0].name if self.causes and not self.identical else None
        return {**asdict(self), "identical": self.identical, "cause": cause, "gap": gap}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side. ``alone``: requests of either that have no counterpart."""

    explanations: tuple[Explanation, ...]
    alone: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def identical(self) -> bool:
        return all(e.identical for e in self.explanations) and not any(self.alone)

    def to_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "explanations": [e.to_dict() for e in self.explanations],
            "alone": [list(ids) for ids in self.alone],
        }


@dataclass(frozen=True, slots=True)
class _Side:
    """A sample of one of the two runs. ``result``: None where it has not ended."""

    trace: Trace
    request: TracedRequest
    sample: int
    output: list[int]

    @property
    def result(self) -> TracedResult | None:
        results = self.trace.results
        return next((r for r in results if (r.request, r.sample) == (self.request.id, self.sample)), None)

    def token(self, index: int) -> tuple[int | None, str | None]:
        """The output token there and its text; None where it had ended."""
        if index >= len(self.output):
            return None, None
        token = self.output[index]
        return token, self.trace.texts.get(token, f"[{token}]")

    def margin(self, index: int) -> list[float]:
        """By how much the token there won, where that was recorded."""
        return list(self.trace.margins.get((self.request.id, self.sample), ())[index : index + 1])


def explain(a: Trace, b: Trace, model: Callable[[], Target | None] = lambda: None) -> Comparison:
    """Align two runs and say for each sample whether and why they part.

    ``model``: the target of ``a`` and its tokenizer, asked for only where a score gap decides; None: there is none.
    """
    pairs = _pairs(a.requests, b.requests)
    outputs = a.outputs(), b.outputs()
    explanations: list[Explanation] = []
    for one, other in pairs:
        left, right = _samples(outputs[0], one), _samples(outputs[1], other)
        for sample in sorted(left.keys() | right.keys()):
            sides = _Side(a, one, sample, left.get(sample, [])), _Side(b, other, sample, right.get(sample, []))
            explanations.append(_explain(*sides, model))
    paired = {one.id for one, _ in pairs}, {other.id for _, other in pairs}
    alone = tuple(r.id for r in a.requests if r.id not in paired[0])
    return Comparison(tuple(explanations), (alone, tuple(r.id for r in b.requests if r.id not in paired[1])))


def _samples(outputs: Mapping[tuple[int, int], list[int]], request: TracedRequest) -> dict[int, list[int]]:
    return {sample: output for (id_, sample), output in outputs.items() if id_ == request.id}


def _explain(one: _Side, other: _Side, model: Callable[[], Target | None]) -> Explanation:
    causes = list(_causes(one.trace.header, other.trace.header, one.request, other.request))
    index, ids = first_difference(one.output, other.output), (one.request.id, other.request.id)
    if index is None:
        return Explanation(ids, one.sample, None, len(one.output), causes=tuple(causes))
    (x, text), (y, other_text) = one.token(index), other.token(index)
    gap, at_least = None, False
    if x is None or y is None:
        causes = [*_ending(one, other, one if x is None else other), *causes]
    elif not any(cause.name in _DECIDES for cause in causes):
        gap, at_least = _gap(one, other, index, (x, y), model)
        causes = _arithmetic(causes, gap, at_least, one.trace.header)
    return Explanation(ids, one.sample, index, index, (x, y), (text, other_text), tuple(causes), gap, at_least)


_DECIDES = ("prompt", "parameters", "seed", "acceptance", "model")  # where these differ, no score is worth asking for


def _pairs(a: tuple[TracedRequest, ...], b: tuple[TracedRequest, ...]) -> list[tuple[TracedRequest, TracedRequest]]:
    """Requests that belong together: by prompt and parameters, else by prompt, else by order."""
    left, right = list(a), list(b)
    pairs: list[tuple[TracedRequest, TracedRequest]] = []
    same: list[Callable[[TracedRequest, TracedRequest], bool]] = [
        lambda x, y: x.prompt == y.prompt and x.params == y.params and x.seed == y.seed,
        lambda x, y: x.prompt == y.prompt,
        lambda x, y: True,
    ]
    for alike in same:
        for one in list(left):
            other = next((r for r in right if alike(one, r)), None)
            if other is not None:
                pairs.append((one, other))
                left.remove(one)
                right.remove(other)
    return sorted(pairs, key=lambda pair: pair[0].id)


def _causes(a: Mapping[str, Any], b: Mapping[str, Any], one: TracedRequest, other: TracedRequest) -> Iterator[Cause]:
    """What two requests do not have in common that can change a token, the most telling first."""
    if one.prompt != other.prompt:
        at = first_difference(one.prompt, other.prompt)
        yield Cause("prompt", f"they differ from token {at} of {len(one.prompt)} / {len(other.prompt)}")
    names = [name for name in dict.fromkeys([*one.params, *other.params]) if name not in (*_SERVING, *_ENDS)]
    if differing := list(_differing(one, other, names)):
        yield Cause("parameters", ", ".join(differing))
    greedy = not one.params.get("temperature") and not other.params.get("temperature")
    if one.seed != other.seed and not greedy:
        yield Cause("seed", f"{one.seed} / {other.seed}")
    if one.acceptance != other.acceptance and not greedy:
        yield Cause("acceptance", f"{one.acceptance} / {other.acceptance}")
    elif one.acceptance != "coupled" and not greedy:
        yield Cause("acceptance", f"{one.acceptance} promises the same distribution, not the same tokens")
    for name, x, y in changes(a, b):
        yield Cause("version", f"outpace {x} / {y}") if name == "outpace" else Cause(name, f"{x} / {y}")
    models = a.get("model", {}), b.get("model", {})
    if models[0].get("fingerprint") is None and models[0].get("name") != models[1].get("name"):
        yield Cause("model", f"{models[0].get('name')} / {models[1].get('name')}")


def _differing(one: TracedRequest, other: TracedRequest, names: Iterable[str]) -> Iterator[str]:
    """Of these parameters, those that differ, with both values."""
    for name in names:
        x, y = one.params.get(name), other.params.get(name)
        if x != y:
            yield f"{name}={x!r} / {y!r}"


def _ending(one: _Side, other: _Side, ended: _Side) -> Iterator[Cause]:
    """Why one output ended where the other goes on."""
    for differing in _differing(one.request, other.request, _ENDS):
        yield Cause("parameters", differing)
    result, name = ended.result, ended.trace.name
    if result is None:
        yield Cause("ended", f"{name} has no result for it: {ended.trace.cut or 'it was still running'}")
    elif result.finish_reason not in ("stop", "length"):
        why = f": {result.error}" if result.error else ""
        yield Cause("ended", f"it was {result.finish_reason} in {name}{why}")
    elif one.request.limit != other.request.limit:
        yield Cause("ended", f"their limits are {one.request.limit} / {other.request.limit} tokens, prompt included")
    else:
        yield Cause("bug", f"the tokens before are the same, but it ended in {name} ({result.finish_reason})")


def _gap(
    one: _Side, other: _Side, index: int, tokens: tuple[int, int], model: Callable[[], Target | None]
) -> tuple[float | None, bool]:
    """The score gap between the two tokens, and whether it is only known to be at least so large."""
    target = None if one.request.params.get("rules") else model()
    if target is not None:
        return recorded_gap(target, one.request, one.sample, one.output[:index], tokens), False
    recorded = [*one.margin(index), *other.margin(index)]
    return (max(recorded), True) if recorded else (None, False)


def _arithmetic(causes: list[Cause], gap: float | None, at_least: bool, header: Mapping[str, Any]) -> list[Cause]:
    """The causes with a verdict on the gap put among them."""
    if gap is None:
        return causes or [Cause("unknown", "all else is the same, and the gap is not known: give --model")]
    near = gap < NEAR_TIE
    if causes:  # another path or version adds in another order: a near-tie is what that looks like
        return causes if near else [*causes, Cause("bug", f"the gap of {gap:.2g} is more than rounding explains")]
    if near and header.get("model", {}).get("backend") != "native":
        return [Cause("near-tie", f"everything is the same; within {NEAR_TIE:g}, rounding decides on this backend")]
    promise = " (a near-tie, but one native path promises the very bits)" if near else ""
    return [Cause("bug", f"everything is the same, gap {'at least ' if at_least else ''}{gap:.2g}{promise}")]
