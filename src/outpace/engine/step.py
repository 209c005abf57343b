"""One step of speculative decoding (Leviathan et al., arXiv 2211.17192): draft, one target forward, verify.

``compute`` commits nothing: what it leaves in the KV cache lies behind the committed positions and is cut off if
anything raises. ``settle`` then makes the cache what the verdict says.

Between two forwards everything is cold: the weights have swept the caches. What runs here for every row therefore
touches little: no value is made that nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from outpace.arrays import I32
from outpace.control.policy import Policy
from outpace.engine.clock import Clock
from outpace.engine.drafting import Drafting, Proposal
from outpace.engine.results import TARGET
from outpace.engine.scheduler import Plan
from outpace.engine.sequence import Extension, Sequence
from outpace.engine.text import TextError
from outpace.engine.verifier import Verifier
from outpace.errors import RuleError
from outpace.exact.drafts import Drafts, Verdicts, levels_of
from outpace.exact.sampling import TokenLogprob
from outpace.models.base import Batch, KVCache, Model, Output, Taps


class Gain(NamedTuple):
    """What a decoding row gains in a step: the first ``kept`` tokens of its verdict, and what they make of it."""

    extension: Extension
    path: list[int]  # nodes of its draft that the verdict accepted
    sources: list[str]  # of the tokens
    logprobs: list[TokenLogprob]
    named: list[str]  # sources of all nodes
    levels: int  # of the draft
    size: int  # nodes that were verified, by the policy's decision
    expected: float | None  # the speed that it expected of them
    settled: bool = False  # its KV holds the whole verdict already

    @property
    def kept(self) -> int:
        return len(self.extension.tokens)

    @property
    def slots(self) -> list[int]:
        """Which of its new tokens (the pending one is 0) stay in the KV cache, [max(kept, 1)]."""
        return [0, *(node + 1 for node in self.path[: max(self.kept - 1, 0)])]


class Computed(NamedTuple):
    """A step before it is applied."""

    proposal: Proposal
    verdicts: Verdicts
    gains: list[Gain]
    choices: dict[int, I32]  # by decoding row whose drafter reads the choice after every node: [k + 1]
    taps: dict[int, Taps]  # by row of the batch
    prompt_logprobs: list[list[TokenLogprob]]  # of chunks
    threads: int | None  # that the forward ended with, where the backend says

    def teach(self, policy: Policy, seconds: Mapping[str, float]) -> None:
        """Tell the policy what became of the step, if it was asked."""
        proposal = self.proposal
        if proposal.planned:
            policy.learn(proposal.views, proposal.kept, self.verdicts, seconds)


def compute(plan: Plan, target: Model, drafting: Drafting, clock: Clock) -> Computed:
    """Everything that a step will change, before anything is changed. Raises what the target raises."""
    rows = plan.decoding
    clock.start("draft")
    proposal = drafting.propose(rows, plan.load)  # x_1 ... x_k of each row: a chain or a tree
    clock.start("target")
    batch = pack(plan, proposal.kept, drafting)
    output = target.forward(batch)  # what the target says after the pending token and after every x
    clock.start("verify")
    verifier = Verifier(
        [s.chooser for s in rows], [s.request.acceptance for s in rows], proposal.kept, batch.starts, output
    )
    verdicts = verifier.verdicts()  # the x that it agrees with, and one token of its own
    gains = [
        gain(s, proposal, i, tokens, path, verifier.failures.get(i), output, batch.starts)
        for i, (s, (tokens, path)) in enumerate(zip(rows, verdicts.lists(), strict=True))
    ]
    choices = {}
    if drafting.needs.choices:
        choices = {i: verifier.every(i) for i, s in enumerate(rows) if drafting.needs_of(s).choices}
    taps = _taps(batch, output, gains) if batch.taps else {}
    prompts = [_prompt_logprobs(plan, j, batch, output) for j in range(len(plan.chunks))]
    clock.start("other")
    return Computed(proposal, verdicts, gains, choices, taps, prompts, getattr(output, "threads", None))


def pack(plan: Plan, drafts: Drafts, drafting: Drafting) -> Batch:
    """Pending tokens with their drafts, then prefill chunks."""
    rows = plan.decoding
    sequences = [*rows, *(c.sequence for c in plan.chunks)]
    taps, tapped = drafting.needs.taps, None
    if taps:
        reads = [bool(drafting.needs_of(s).taps) for s in sequences]
        taps, tapped = (taps if any(reads) else ()), np.array(reads, np.bool_)
    return Batch.pack_step(
        [s.row for s in sequences], [*(s.length - 1 for s in rows), *(c.start for c in plan.chunks)],
        [s.pending for s in rows], drafts, [c.tokens for c in plan.chunks], [c.wanted for c in plan.chunks],
        taps=taps, tapped=tapped,
    )  # fmt: skip


def gain(
    sequence: Sequence,
    proposal: Proposal,
    i: int,
    tokens: list[int],
    path: list[int],
    failure: Exception | None,
    output: Output,
    starts: I32,
) -> Gain:
    """What row i's verdict makes of its sequence. A fault of its own rules or tokenizer ends it, here and alone.

    ``failure``: its rules left no token after what was accepted. ``starts``: where rows are packed.
    """
    if failure is not None:  # what was accepted before the dead end stays
        tokens = tokens[:-1]
    params, logprobs = sequence.request.params, []
    try:
        extension = sequence.extended(tokens) if tokens else sequence.ended("error", failure)
        if failure is not None and extension.finish_reason is None:  # a stop before the dead end comes first
            extension = extension._replace(finish_reason="error", error=failure)
        if params.wants_logprobs and extension.tokens:
            kept = extension.tokens
            slots = np.array([0, *(node + 1 for node in path[: len(kept) - 1])], np.int32)
            found = output.logprobs(int(starts[i]) + slots, np.array(kept, np.int32), [params.top_logprobs] * len(kept))
            logprobs = sequence.spelled(found)
    except (RuleError, TextError) as error:
        extension = sequence.ended("error", error)
    drafts, decision = proposal.kept, proposal.decisions[i]
    named, levels = [], 0
    if drafts.tokens.size:
        named, k = drafts.sources_of(i), int(drafts.widths[i])
        levels = levels_of(None if drafts.parents is None else drafts.parents[i, :k], k)
    sources = [*(named[node] for node in path), TARGET][: len(extension.tokens)]
    return Gain(extension, path, sources, logprobs, named, levels, decision.size, decision.expected)


def settle(kv: KVCache, sequence: Sequence, drafts: Drafts, i: int, gained: Gain) -> int:
    """Make the row's KV what its sequence will be once ``gained`` is committed: all but the last token. Its length."""
    before, kept = sequence.length - 1, gained.kept
    if drafts.parents is not None and kept:
        kv.compact(sequence.row, before, np.array(gained.slots, np.int32))
    elif kept <= int(drafts.widths[i]):  # some of what was verified goes; otherwise all of it stays
        kv.truncate(sequence.row, before + kept)
    return before + kept


def cut(kv: KVCache, sequence: Sequence, gained: Gain) -> int:
    """``settle`` where the KV holds the whole verdict already: only what the sequence did not take goes."""
    length = sequence.length - 1 + gained.kept
    if gained.kept <= len(gained.path):
        kv.truncate(sequence.row, length)
    return length


def _taps(batch: Batch, output: Output, gains: list[Gain]) -> dict[int, Taps]:
    """Hidden states of the positions whose KV becomes final, of rows that draft with them."""
    if batch.tapped is None:
        return {}
    found = {}
    starts = batch.starts.tolist()
    for b, tapped in enumerate(batch.tapped.tolist()):
        if tapped:
            begin, end = starts[b], starts[b + 1]
            at = [begin + slot for slot in gains[b].slots] if b < len(gains) else range(begin, end)
            found[b] = output.taps(np.array(at, np.int32))
    return found


def _prompt_logprobs(plan: Plan, j: int, batch: Batch, output: Output) -> list[TokenLogprob]:
    """The log-probabilities of the prompt tokens that follow those of chunk j."""
    chunk = plan.chunks[j]
    if not chunk.wanted:
        return []
    sequence, b = chunk.sequence, len(plan.decoding) + j
    after = sequence.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
    at = np.arange(batch.starts[b], batch.starts[b] + len(after), dtype=np.int32)
    found = output.logprobs(at, after, [sequence.request.params.prompt_logprobs or 0] * len(after))
    try:
        return sequence.spelled(found)
    except TextError:  # figures without words are better than none
        return found
