"""What a native forward gives: choices, verdicts and hidden states where they lie; and the parts drafters share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.errors import NotFiniteError, NoTokenAllowedError
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.masks import mask_of
from outpace.exact.noise import Stream
from outpace.exact.rules import AllowedTokens, Bias, Penalties
from outpace.exact.sampling import Alternative, Chooser, TokenLogprob
from outpace.models.base import Output, choose_on_host
from outpace.params import FILTERS

# What the runtime returns in place of a token.
_NONE_ALLOWED, _NAN, _UNDECIDED = -1, -2, -3

Edit = dict[str, Any]  # a rule with its state, as the runtime takes it: "kind", then arrays and numbers by name


class NativeOutput(Output):
    """A forward's result in the runtime's own memory."""

    def __init__(self, result: _fast.native.Result) -> None:
        self._result = result

    @property
    def threads(self) -> int:
        """How many threads were left of those that began the forward."""
        return self._result.threads

    @property
    def experts(self) -> float:
        """See ``Output.experts``."""
        return self._result.experts

    def decide(self, rows: _fast.native.Rows, choosers: Callable[[], Sequence[Chooser | None]]) -> None:
        """See ``Output.decide``: ``rows`` have choosers of their own."""
        rows.verify(self._result)

    def verify(self, drafts: Drafts, starts: I32, choosers: Sequence[Chooser | None]) -> Verdicts | None:
        """See ``Output.verify``. Rows with rules that this runtime cannot advance are left to the caller, too."""
        rows = [None if chooser is None else _walker(chooser) for chooser in choosers]
        return Verdicts(*self._result.verify(drafts.tokens, drafts.widths, drafts.parents, starts, rows))

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        """See ``Output.choose``. Logits move to Python only for rules that this runtime does not know."""
        if all(chooser.plain_greedy for chooser in choosers):
            best = self._result.best(at)
            if len(best) and best.min() < 0:
                _complain(int(best.min()))
            return best
        chosen = np.empty(len(at), np.int32)
        for i, (node, chooser) in enumerate(zip(at.tolist(), choosers, strict=True)):
            edits = describe_rules(chooser)
            try:
                token = _UNDECIDED if edits is None else self._result.choose(node, describe(chooser, edits))
            except ValueError:  # a mask for another vocabulary, or an edit that does not fit: named by the reference
                token = _UNDECIDED
            if token == _UNDECIDED:
                token = int(choose_on_host(self.logits(at[i : i + 1]), [chooser])[0])
            elif token < 0:
                _complain(token)
            chosen[i] = token
        return chosen

    def logits(self, at: I32) -> F32:
        return self._result.logits(np.ascontiguousarray(at, np.int32))

    def near_ties(self, at: I32) -> int:
        return 0

    def logprobs(self, at: I32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
        found = self._result.logprobs(at, tokens, top)
        return [
            TokenLogprob(token, logprob, tuple(Alternative(*one) for one in best))
            for token, (logprob, best) in zip(tokens.tolist(), found, strict=True)
        ]

    def hidden_states(self, at: I32) -> NativeHiddenStates:
        """See ``Output.hidden_states``. Raises IndexError for tokens of other rows, ValueError without states."""
        return NativeHiddenStates(self._result.hidden_states(), self._result.hidden_places(at))


class NativeHiddenStates:
    """See ``HiddenStates``. It shares memory with the forward's result and stays valid whatever is run later."""

    def __init__(self, states: F32, places: I32, columns: tuple[int, ...] | None = None) -> None:
        self._states = states  # [m, T, H] of all tokens whose rows keep them
        self._places = places  # [n] among them
        self._columns = columns  # of T; None: all, as they are

    def __len__(self) -> int:
        return len(self._places)

    def at(self, indices: I32) -> NativeHiddenStates:
        return NativeHiddenStates(self._states, self._places[indices], self._columns)

    def layers(self, columns: Sequence[int]) -> NativeHiddenStates:
        chosen = tuple(columns) if self._columns is None else tuple(self._columns[column] for column in columns)
        return NativeHiddenStates(
            self._states, self._places, None if chosen == tuple(range(self._states.shape[1])) else chosen
        )

    @property
    def native(self) -> F32:
        return self.numpy()

    def numpy(self) -> F32:
        if self._columns is None:
            values: F32 = self._states[self._places]
        else:
            values = self._states[self._places[:, None], self._columns]
        return values


class NativeParts:
    """See ``Parts``: float32 arrays, computed by the forward's own kernels, so with the same bits.

    ``live`` gives the model's handle. Raises ValueError once the model is closed.
    """

    def __init__(self, live: Callable[[], _fast.native.Model]) -> None:
        self._live = live

    def embed(self, tokens: I32) -> F32:
        """Raises ValueError for ids outside the vocabulary."""
        return _fast.native.embed(self._live(), np.ascontiguousarray(tokens, np.int32))

    def norm(self, hidden: F32) -> F32:
        return _fast.native.final_norm(self._live(), features_of(hidden))

    def logits(self, normed: F32, ids: I32 | None = None) -> F32:
        """Raises ValueError for ids outside the vocabulary."""
        asked = None if ids is None else np.ascontiguousarray(ids, np.int32)
        return _fast.native.head(self._live(), features_of(normed), asked)


def features_of(states: Any) -> F32:
    """Hidden states as the runtime takes them: float32 [n, H], contiguous. Raises ValueError."""
    if not isinstance(states, np.ndarray) or states.ndim != 2 or states.dtype != np.float32:
        kind = f"{states.dtype} {list(states.shape)}" if isinstance(states, np.ndarray) else type(states).__name__
        raise ValueError(f"hidden states are {kind}, but must be a numpy array, float32 [n, hidden size]")
    return np.ascontiguousarray(states)


def describe(chooser: Chooser, edits: list[Edit]) -> dict[str, Any]:
    """The fields of the runtime's ``Sampling`` by name, and ``rules``."""
    described = {name: getattr(chooser.params, name) for name in ("temperature", *FILTERS)}
    noise = {"seed": chooser.noise.seed, "sample": chooser.noise.sample}
    return {**described, **noise, "index": chooser.index, "stream": int(Stream.CHOICE), "rules": edits}


def describe_rules(chooser: Chooser) -> list[Edit] | None:
    """The chooser's rules with their states; None when the runtime cannot apply one of them."""
    described: list[Edit] = []
    for rule, state in zip(chooser.rules, chooser.states, strict=True):
        known = _known(rule, state)
        if known is None:
            bits = mask_of(rule, state)
            if bits is None:
                return None
            known = {"kind": "mask", "bits": np.ascontiguousarray(bits, np.uint32)}
        described.append(known)
    return described


def _known(rule: Any, state: Any) -> Edit | None:
    """A rule that the runtime can both apply and advance."""
    if type(rule) is Penalties:
        ids = np.fromiter(state.output.keys(), np.int32, len(state.output))
        counts = np.fromiter(state.output.values(), np.float32, len(state.output))
        seen = {"kind": "penalties", "ids": state.seen, "output": ids, "counts": counts}
        return {**seen, "repetition": rule.repetition, "presence": rule.presence, "frequency": rule.frequency}
    if type(rule) is Bias:
        return {"kind": "bias", "ids": rule.ids, "values": rule.values}
    if type(rule) is AllowedTokens:
        return {"kind": "allowed", "ids": rule.ids}
    return None


def known_edits(chooser: Chooser) -> list[Edit] | None:
    """The chooser's rules with their states; None when the runtime cannot take one of them along a draft's path."""
    edits = [_known(rule, state) for rule, state in zip(chooser.rules, chooser.states, strict=True)]
    known = [edit for edit in edits if edit is not None]
    return known if len(known) == len(edits) else None


def _walker(chooser: Chooser) -> dict[str, Any] | None:
    """A chooser that the runtime can take along a draft's path; {}: greedy without rules; None: it cannot."""
    if chooser.plain_greedy:
        return {}
    edits = known_edits(chooser)
    return None if edits is None else describe(chooser, edits)


def _complain(code: int) -> NoReturn:
    if code == _NONE_ALLOWED:
        raise NoTokenAllowedError
    raise NotFiniteError
