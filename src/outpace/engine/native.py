"""Whole steps in C++: of rows on the native model whose drafters are there too, or that have none, and need no Python.

What ``step.compute`` does for such rows, up to the verdicts and the KV that they leave, in one call: between two
forwards all code is cold, so what counts is how much of it runs. ``step.compute`` is the reference: the same drafts,
decisions, verdicts and records. It serves every other step, and decides what this one could not.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import Any

import numpy as np

from outpace import _fast
from outpace.arrays import I32
from outpace.control.adaptive import Adaptive
from outpace.control.policy import PLAIN, Decision, Fixed, Policy
from outpace.engine.clock import Clock
from outpace.engine.drafting import NONE, Drafting, Proposal
from outpace.engine.results import TARGET
from outpace.engine.scheduler import Plan
from outpace.engine.sequence import Sequence
from outpace.engine.step import Computed, Gain, gain
from outpace.engine.text import TextError
from outpace.engine.verifier import Verifier
from outpace.errors import MemoryLimitError, RuleError
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.sampling import TokenLogprob
from outpace.models.base import Model, Taps
from outpace.models.native.model import NativeModel
from outpace.models.native.output import NativeOutput, describe


class NativeComputed:
    """A step before it is applied, as ``Computed``. What only records read is made when one reads it, in this step."""

    def __init__(self, stepper: Any, gains: list[Gain], chunks: int, threads: int, adaptive: bool) -> None:
        self._stepper, self.gains, self.threads, self._adaptive = stepper, gains, threads, adaptive
        self.prompt_logprobs: SequenceOf[list[TokenLogprob]] = [[]] * chunks

    def teach(self, policy: Policy, seconds: Mapping[str, float]) -> None:
        """Tell the policy what became of the step, if it was asked."""
        if self._adaptive:
            self._stepper.learn(seconds["draft"], seconds["target"] + seconds["verify"] + seconds["other"])

    def observe(self, rows: SequenceOf[tuple[int, int]]) -> None:
        """The drafters of rows that read taps hear what became final: (row of the plan, how many tokens)."""
        self._stepper.observe(rows)

    @cached_property
    def _record(self) -> tuple[Proposal, Verdicts, I32]:
        return _recorded(self._stepper)

    @property
    def proposal(self) -> Proposal:
        return self._record[0]

    @property
    def verdicts(self) -> Verdicts:
        return self._record[1]


class NativeSteps:
    """The steps of one engine that need no Python."""

    def __init__(self, model: NativeModel, drafting: Drafting) -> None:
        self._model, self._drafting = model, drafting
        self.served = 0  # steps
        self._stepper: Any = _fast.native.Stepper(model.info.layers, TARGET, list(drafting.needs.taps))

    @staticmethod
    def of(model: Model, drafting: Drafting) -> NativeSteps | None:
        """None where the model is not the native one, whose calls nobody watches."""
        if type(model) is not NativeModel or "forward" in vars(model):
            return None
        return NativeSteps(model, drafting)

    def compute(self, plan: Plan, clock: Clock) -> Computed | NativeComputed | None:
        """See ``step.compute``. None: some row needs Python, or drafting failed; nothing was changed."""
        policy, asked = self._drafting.policy, []
        its = policy.native if type(policy) is Adaptive else None
        rows, chunks = plan.decoding, []
        if not rows or (its is None and type(policy) is not Fixed):
            return None
        for s in rows:
            if not self._runs(s):
                return None
            length = s.length
            asked.append((s.native, s.buffer, length, 0 if s.paused else min(s.size, s.request.limit - length - 1)))
        for chunk in plan.chunks:
            if chunk.wanted or not self._runs(chunk.sequence):
                return None
            chunks.append((chunk.sequence.native, chunk.sequence.tokens, chunk.start, chunk.count))
        try:
            said, threads, draft, target, verify, decided = self._stepper.step(self._model.native, its, asked, chunks)
        except _fast.native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error
        except _fast.native.DraftFault as error:
            self._drafting.faults.append(f"drafting in C++ failed ({error}): the step was drafted in Python")
            return None
        self.served += 1
        clock.spent(draft, target, verify)
        if not decided:
            return self._decide(plan, threads)
        gains = []
        for sequence, (tokens, path, sources, *rest) in zip(rows, said, strict=True):
            try:
                extension = sequence.extended(tokens)
            except (RuleError, TextError) as error:
                extension = sequence.ended("error", error)
            gains.append(Gain(extension, path, sources[: len(extension.tokens)], [], *rest))
        return NativeComputed(self._stepper, gains, len(chunks), threads, its is not None)

    def _decide(self, plan: Plan, threads: int) -> Computed:
        """A row has no token that is allowed, or its choice is too near a filter's edge: Python walks on."""
        rows = plan.decoding
        proposal, _, starts = _recorded(self._stepper)
        output = NativeOutput(self._stepper.result())
        verifier = Verifier(
            [s.chooser for s in rows], [s.request.acceptance for s in rows], proposal.kept, starts, output
        )
        verdicts = verifier.verdicts()
        gains = [
            gain(s, proposal, i, tokens, path, verifier.failures.get(i), output, starts)
            for i, (s, (tokens, path)) in enumerate(zip(rows, verdicts.lists(), strict=True))
        ]
        taps: dict[int, Taps] = {
            i: output.taps(starts[i] + np.array(gained.slots, np.int32))
            for i, (s, gained) in enumerate(zip(rows, gains, strict=True))
            if self._drafting.needs_of(s).taps
        }
        for j, chunk in enumerate(plan.chunks, len(rows)):
            if self._drafting.needs_of(chunk.sequence).taps:
                taps[j] = output.taps(np.arange(starts[j], starts[j + 1], dtype=np.int32))
        return Computed(proposal, verdicts, gains, {}, taps, [[]] * len(plan.chunks), threads)

    def _runs(self, sequence: Sequence) -> bool:
        """Whether C++ takes the sequence, in ``sequence.native``."""
        if sequence.native is None:
            sequence.native = self._row(sequence)
        return sequence.native is not False

    def _row(self, sequence: Sequence) -> Any:
        """The sequence in its row as C++ takes it; False where it needs Python."""
        request, chooser, drafter = sequence.request, sequence.chooser, self._drafting.drafter_of(sequence)
        if request.acceptance != "coupled" or chooser.rules or request.params.wants_logprobs:
            return False
        its = (sequence.row, request.id, sequence.prompt_length)
        if drafter is None:
            return _fast.native.StepRow(*its, False, NONE, None, (), describe(chooser, []), None, False)
        if drafter.lookup is None or (drafter.listens and not drafter.lookup.taps):
            return False
        looked_up, cost = (sequence.drafter, drafter.lookup, drafter.names), drafter.cost
        return _fast.native.StepRow(*its, request.adaptive, *looked_up, describe(chooser, []), cost.levels, cost.nodes)


def _recorded(stepper: Any) -> tuple[Proposal, Verdicts, I32]:
    """The last step's drafts and decisions, its verdicts, and where its rows were packed."""
    proposed, kept, verdicts, decisions, starts = stepper.record()
    before = Drafts(*proposed)
    after = before if kept is None else Drafts(*kept)
    planned = decisions is not None
    if decisions is None:
        decisions = [Decision(n, None) if n else PLAIN for n in after.widths.tolist()]
    return Proposal((), before, after, decisions, planned), Verdicts(*verdicts), starts
