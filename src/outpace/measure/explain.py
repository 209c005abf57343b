"""``outpace explain``: where two runs first part, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outpace.measure.replay import changes, recorded_gap
from outpace.measure.same import NEAR_TIE, Target, first_difference
from outpace.measure.trace import Trace, TracedRequest

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


def explain(a: Trace, b: Trace, model: Callable[[], Target | None] = lambda: None) -> Comparison:
    """Align two runs and say for each sample whether and why they part.

    ``model``: the target of ``a`` and its tokenizer, asked for only where a score gap decides; None: there is none.
    """
    pairs = _pairs(a.requests, b.requests)
    outputs = a.outputs(), b.outputs()
    found: list[Explanation] = []
    for one, other in pairs:
        samples = {sample for id_, sample in outputs[0] if id_ == one.id}
        samples |= {sample for id_, sample in outputs[1] if id_ == other.id}
        found.extend(_explain(a, b, one, other, sample, outputs, model) for sample in sorted(samples))
    paired = {one.id for one, _ in pairs}, {other.id for _, other in pairs}
    return Comparison(
        tuple(found),
        (
            tuple(r.id for r in a.requests if r.id not in paired[0]),
            tuple(r.id for r in b.requests if r.id not in paired[1]),
        ),
    )


Outputs = tuple[Mapping[tuple[int, int], list[int]], Mapping[tuple[int, int], list[int]]]


def _explain(
    a: Trace,
    b: Trace,
    one: TracedRequest,
    other: TracedRequest,
    sample: int,
    outputs: Outputs,
    model: Callable[[], Target | None],
) -> Explanation:
    left, right = outputs[0].get((one.id, sample), []), outputs[1].get((other.id, sample), [])
    causes = list(_causes(a.header, b.header, one, other))
    index = first_difference(left, right)
    ids = one.id, other.id
    if index is None:
        return Explanation(ids, sample, None, len(left), causes=tuple(causes))
    x, y = (output[index] if index < len(output) else None for output in (left, right))
    texts = (
        None if x is None else a.texts.get(x, f"[{x}]"),
        None if y is None else b.texts.get(y, f"[{y}]"),
    )
    if x is None or y is None:
        causes = [*_ending(a, b, one, other, sample, x is None), *causes]
        return Explanation(ids, sample, index, index, (x, y), texts, tuple(causes))
    gap, at_least = None, False
    if not any(cause.name in _DECIDES for cause in causes):
        gap, at_least = _gap(a, b, one, other, sample, left[:index], x, y, model)
        causes = _arithmetic(causes, gap, at_least, a.header, one)
    return Explanation(ids, sample, index, index, (x, y), texts, tuple(causes), gap, at_least)


_DECIDES = ("prompt", "parameters", "seed", "acceptance", "model")  # where these differ, no score is worth asking for


def _pairs(a: tuple[TracedRequest, ...], b: tuple[TracedRequest, ...]) -> list[tuple[TracedRequest, TracedRequest]]:
    """Requests that belong together: by prompt and parameters, else by prompt, else by order."""
    left, right = list(a), list(b)
    found: list[tuple[TracedRequest, TracedRequest]] = []
    same: list[Callable[[TracedRequest, TracedRequest], bool]] = [
        lambda x, y: x.prompt == y.prompt and x.params == y.params and x.seed == y.seed,
        lambda x, y: x.prompt == y.prompt,
        lambda x, y: True,
    ]
    for alike in same:
        for one in list(left):
            other = next((r for r in right if alike(one, r)), None)
            if other is not None:
                found.append((one, other))
                left.remove(one)
                right.remove(other)
    return sorted(found, key=lambda pair: pair[0].id)


def _causes(a: Mapping[str, Any], b: Mapping[str, Any], one: TracedRequest, other: TracedRequest) -> Iterator[Cause]:
    """What two requests do not have in common that can change a token, the most telling first."""
    if one.prompt != other.prompt:
        at = first_difference(one.prompt, other.prompt)
        yield Cause("prompt", f"they differ from token {at} of {len(one.prompt)} / {len(other.prompt)}")
    differing = [
        f"{name}={one.params.get(name)!r} / {other.params.get(name)!r}"
        for name in dict.fromkeys([*one.params, *other.params])
        if name not in (*_SERVING, *_ENDS) and one.params.get(name) != other.params.get(name)
    ]
    if differing:
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


def _ending(a: Trace, b: Trace, one: TracedRequest, other: TracedRequest, sample: int, first: bool) -> Iterator[Cause]:
    """Why one output ended where the other goes on."""
    for name in _ENDS:
        if one.params.get(name) != other.params.get(name):
            yield Cause("parameters", f"{name}={one.params.get(name)!r} / {other.params.get(name)!r}")
    trace, request = (a, one) if first else (b, other)
    result = next((r for r in trace.results if (r.request, r.sample) == (request.id, sample)), None)
    if result is None:
        yield Cause("ended", f"{trace.name} has no result for it: {trace.cut or 'it was still running'}")
    elif result.finish_reason not in ("stop", "length"):
        why = f": {result.error}" if result.error else ""
        yield Cause("ended", f"it was {result.finish_reason} in {trace.name}{why}")
    elif one.limit != other.limit:
        yield Cause("ended", f"their limits are {one.limit} / {other.limit} tokens, prompt included")
    else:
        yield Cause("bug", f"the tokens before are the same, but it ended in {trace.name} ({result.finish_reason})")


def _gap(
    a: Trace,
    b: Trace,
    one: TracedRequest,
    other: TracedRequest,
    sample: int,
    output: list[int],
    x: int,
    y: int,
    model: Callable[[], Target | None],
) -> tuple[float | None, bool]:
    """The score gap between the two tokens, and whether it is only known to be at least so large."""
    if not one.params.get("rules"):
        target = model()
        if target is not None:
            return recorded_gap(target, one, sample, output, (x, y)), False
    recorded = [
        margins[len(output)]
        for trace, request in ((a, one), (b, other))
        if len(margins := trace.margins.get((request.id, sample), ())) > len(output)
    ]
    return (max(recorded), True) if recorded else (None, False)


def _arithmetic(
    causes: list[Cause], gap: float | None, at_least: bool, header: Mapping[str, Any], request: TracedRequest
) -> list[Cause]:
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
