"""From logits to a choice: the one path that the target and every sampling drafter take.

The choice after a prefix is ``argmax(logits' / T + g)``, lowest id on ties: logits' after all rules and filters, g
the request's Gumbel noise at this output index, zero when greedy (the Gumbel-max trick; as a coupling of target and
drafter, Daliri et al., arXiv 2408.07978). All arithmetic after the model's float32 logits is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from outpace.common.arrays import F32, F64, I32, U32
from outpace.errors import NotFiniteError, NoTokenAllowedError
from outpace.exact.masks import allowed_mask, called, mask_of, unpacked
from outpace.exact.noise import GUMBEL_MAX, Noise, Stream, log
from outpace.params import LogitRule, SamplingParams


class Alternative(NamedTuple):
    """One of the likeliest tokens where another may have been committed."""

    token: int
    logprob: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-softmax of the target (before rules and temperature) at one committed ``token`` (an id).

    ``logprob``: in nats; ``top``: the likeliest alternatives, best first. ``text``: the token's own, decoded alone;
    None where there is no tokenizer.
    """

    token: int
    logprob: float
    top: tuple[Alternative, ...] = ()
    text: str | None = None

    def with_texts(self, text_of: Callable[[int], str]) -> TokenLogprob:
        """The same with the texts, ``text_of(token)``, of the token and the alternatives."""
        top = tuple(Alternative(token, logprob, text_of(token)) for token, logprob, _ in self.top)
        return replace(self, top=top, text=text_of(self.token))


@dataclass(frozen=True, slots=True)
class Chooser:
    """Everything that turns one row of logits into a token: parameters, rules with their state, noise, index.

    Immutable: ``advance(token)`` is the chooser one token further along a path.
    """

    params: SamplingParams
    noise: Noise
    index: int  # the output index of the token to choose: 0 for the first one after the prompt
    rules: Sequence[LogitRule] = ()
    states: tuple[Any, ...] = ()

    @staticmethod
    def start(params: SamplingParams, noise: Noise, rules: Sequence[LogitRule], prompt: I32) -> Chooser:
        """The chooser of the first output token after ``prompt`` int32 [P]. Raises RuleError."""
        return Chooser(params, noise, 0, rules, tuple(called(rule, "start", prompt) for rule in rules))

    def advance(self, token: int) -> Chooser:
        """Raises RuleError."""
        states = self.states
        if states:
            pairs = zip(self.rules, states, strict=True)
            states = tuple(called(rule, "advance", state, token) for rule, state in pairs)
        return Chooser(self.params, self.noise, self.index + 1, self.rules, states)

    def after(self, tokens: Sequence[int]) -> Chooser:
        """``advance`` over all of ``tokens``. Raises RuleError."""
        if not self.states:
            return Chooser(self.params, self.noise, self.index + len(tokens), self.rules)
        chooser = self
        for token in tokens:
            chooser = chooser.advance(token)
        return chooser

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self.params.greedy and not self.rules

    @property
    def free(self) -> Chooser:
        """The chooser without rules that can test a single token: its choice is the choice if those rules allow it.

        A choice under a filter depends on which other tokens are allowed, so the chooser itself is returned there, and
        where no rule can test a single token.
        """
        p = self.params
        if not self.rules or not (p.greedy or not p.filtered):
            return self
        pairs = [pair for pair in zip(self.rules, self.states, strict=True) if not hasattr(pair[0], "allows")]
        if len(pairs) == len(self.rules):
            return self
        return Chooser(p, self.noise, self.index, tuple(r for r, _ in pairs), tuple(s for _, s in pairs))

    def allows(self, token: int) -> bool:
        """Whether all rules that can test a single token allow ``token``. Raises RuleError."""
        pairs = zip(self.rules, self.states, strict=True)
        return all(called(rule, "allows", state, token) for rule, state in pairs if hasattr(rule, "allows"))

    def mask(self) -> U32 | None:
        """The tokens that all rules with a mask allow next, as bits; None where no rule has one. Raises RuleError."""
        return allowed_mask(self.rules, self.states)

    def apply_rules(self, logits: F32) -> F32:
        """logits' [V]: a copy with every rule applied, or ``logits`` itself when there is none. Raises RuleError."""
        if not self.rules:
            return logits
        ruled = logits.copy()
        for rule, state in zip(self.rules, self.states, strict=True):
            bits = mask_of(rule, state, len(ruled))
            if bits is None:
                called(rule, "apply", state, ruled)
            else:
                ruled[~unpacked(bits, len(ruled))] = -np.inf
        return ruled

    def choose(self, logits: F32, stream: Stream = Stream.CHOICE) -> int:
        """The token chosen from float32 ``logits`` [V]. Raises NoTokenAllowedError, NotFiniteError or RuleError."""
        return choose(self.apply_rules(logits), self.params, self.noise, self.index, stream)

    def probabilities(self, logits: F32) -> F64:
        """p [V] float64: the distribution that ``choose`` draws from."""
        return probabilities(self.apply_rules(logits), self.params)

    def scores(self, logits: F32) -> F64:
        """What ``choose`` takes the argmax of, [V] float64; -inf where a rule or filter forbids."""
        return scores(self.apply_rules(logits), self.params, self.noise, self.index, Stream.CHOICE)


def choose(logits: F32, params: SamplingParams, noise: Noise, index: int, stream: Stream = Stream.CHOICE) -> int:
    """``argmax(logits' / T + g)``: ``logits`` [V] have the rules applied already."""
    return judged(logits, params, noise, index, 0.0, stream)[0]


def judged(
    logits: F32, params: SamplingParams, noise: Noise, index: int, rounding: float, stream: Stream = Stream.CHOICE
) -> tuple[int, bool]:
    """``choose``, and whether rounding might have chosen otherwise: it changes a logit by up to ``rounding`` times the
    largest one's size (at least 1)."""
    best = _argmax(logits)
    within = rounding * max(1.0, abs(float(logits[best])))
    if params.greedy:
        return best, bool(within) and int(np.count_nonzero(logits >= logits[best] - np.float32(within))) > 1
    within /= params.temperature
    kept = filtered(logits, params)
    scaled = logits[kept].astype(np.float64) / params.temperature
    # No token can beat the likeliest one's score by more noise than there is: the rest needs none drawn.
    top = int(np.argmax(scaled))
    floor = scaled[top] + noise.gumbel(index, kept[top : top + 1], stream)[0] - GUMBEL_MAX - within
    near = scaled >= floor
    if 4 * np.count_nonzero(near) < len(kept):  # a block of noise serves four neighbours: gaps must pay
        kept, scaled = kept[near], scaled[near]
    return gumbel_max(kept, scaled, noise, index, stream, within)


def gumbel_max(
    ids: I32, scores: F64, noise: Noise, index: int, stream: Stream, within: float = 0.0
) -> tuple[int, bool]:
    """The id (of ``ids`` int32 [n], ascending) whose score [n] plus its Gumbel noise is largest; the lowest on ties.
    And whether another's is closer to it than ``within``.

    numpy's log is many times faster than the noise's own, but its last bits differ from machine to machine: it only
    finds who can win, with a margin far above its error, and the exact noise decides among them.
    """
    rough = scores - np.log(-np.log(noise.uniform(index, ids, stream)))
    best = rough.max()
    tie = within > 0 and int(np.count_nonzero(rough >= best - within)) > 1
    close = rough >= best - 1e-9 * (1 + abs(best))
    ids, scores = ids[close], scores[close]
    return int(ids[np.argmax(scores + noise.gumbel(index, ids, stream))]), tie


def scores(logits: F32, params: SamplingParams, noise: Noise, index: int, stream: Stream) -> F64:
    """The perturbed scores [V] that ``choose`` maximises, for every token (-inf: filtered out)."""
    out = np.full(len(logits), -np.inf)
    if params.greedy:
        return logits.astype(np.float64)
    kept = filtered(logits, params)
    out[kept] = logits[kept].astype(np.float64) / params.temperature + noise.gumbel(index, kept, stream)
    return out


def probabilities(logits: F32, params: SamplingParams) -> F64:
    """p [V] float64 after temperature and filters; one-hot when greedy."""
    out = np.zeros(len(logits))
    if params.greedy:
        out[_argmax(logits)] = 1.0
        return out
    _argmax(logits)
    kept = filtered(logits, params)
    out[kept] = _softmax(logits[kept].astype(np.float64) / params.temperature)
    return out


def filtered(logits: F32, params: SamplingParams) -> I32:
    """Token ids int32 [n], ascending, that survive top-n-sigma, then top-k, then top-p among those, then min-p.

    top-n-sigma keeps logits that are at least the largest less n standard deviations of all of them that are above
    -inf (Tang et al., arXiv 2411.07641): whatever the temperature, it keeps the same. top-k keeps k tokens by (logit,
    lowest id). top-p keeps the shortest prefix, in that order, whose probability reaches p. min-p keeps tokens at
    least min_p times as likely as the likeliest. Tokens at -inf never survive.
    """
    kept = np.flatnonzero(logits > -np.inf).astype(np.int32)
    peak = float(logits[kept].max()) / params.temperature
    if params.top_n_sigma > 0:
        values = logits[kept].astype(np.float64)
        kept = kept[values >= values.max() - params.top_n_sigma * values.std()]
    if 0 < params.top_k < len(kept):
        kth = np.partition(logits[kept], len(kept) - params.top_k)[len(kept) - params.top_k]
        above = kept[logits[kept] > kth]
        ties = kept[logits[kept] == kth]
        kept = np.sort(np.concatenate([above, ties[: params.top_k - len(above)]]))
    if params.top_p < 1:
        scaled = logits[kept].astype(np.float64) / params.temperature
        order = np.argsort(-scaled, kind="stable")
        reached = np.cumsum(_softmax(scaled[order]))
        kept = np.sort(kept[order[: int(np.searchsorted(reached, params.top_p)) + 1]])
    if params.min_p > 0:
        kept = kept[logits[kept].astype(np.float64) / params.temperature >= peak + log(np.array([params.min_p]))]
    return kept


def token_logprob(logits: F32, token: int, top: int) -> TokenLogprob:
    """Raw log-softmax of ``logits`` [V] at ``token``, and the ``top`` likeliest tokens (lowest id on ties)."""
    raw = logits.astype(np.float64)
    peak = raw.max()
    normaliser = peak + np.log(np.exp(raw - peak).sum())
    best: tuple[Alternative, ...] = ()
    if top:
        cut = np.partition(raw, len(raw) - top)[len(raw) - top] if top < len(raw) else -np.inf
        ids = np.flatnonzero(raw >= cut)
        ids = ids[np.argsort(-raw[ids], kind="stable")][:top]
        best = tuple(Alternative(int(i), float(raw[i] - normaliser)) for i in ids)
    return TokenLogprob(token, float(raw[token] - normaliser), best)


def _argmax(logits: F32) -> int:
    best = int(np.argmax(logits))
    value = logits[best]
    if value == -np.inf:
        raise NoTokenAllowedError
    if not np.isfinite(value):
        raise NotFiniteError
    return best


def _softmax(scaled: F64) -> F64:
    weights = np.exp(scaled - scaled.max())
    probabilities: F64 = weights / weights.sum()
    return probabilities
