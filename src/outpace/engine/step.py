"""One step of speculative decoding (Leviathan et al., arXiv 2211.17192): draft, one target forward, verify.

``compute`` commits nothing: what it leaves in the KV cache lies behind the committed positions and is cut off if
anything raises. ``settle`` then makes the cache what the verdict says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outpace.arrays import I32
from outpace.engine.clock import Clock
from outpace.engine.drafting import Drafting, Proposal
from outpace.engine.results import TARGET
from outpace.engine.scheduler import Plan
from outpace.engine.sequence import Extension, Sequence
from outpace.engine.text import TextError
from outpace.engine.verifier import Verifier
from outpace.errors import RuleError
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts
from outpace.exact.sampling import TokenLogprob
from outpace.models.base import Batch, KVCache, Model, Output, Taps


@dataclass(frozen=True, slots=True)
class Gain:
    """What a decoding row gains in a step: ``kept`` tokens of its verdict, and what they make of its sequence."""

    verdict: Verdict
    extension: Extension
    sources: list[str]  # of the tokens
    logprobs: list[TokenLogprob]
    slots: I32  # which of its new tokens (the pending one is 0) stay in the KV cache, [max(kept, 1)]

    @property
    def kept(self) -> int:
        return len(self.extension.tokens)


@dataclass(frozen=True, slots=True)
class Computed:
    """A step before it is applied."""

    proposal: Proposal
    batch: Batch
    verdicts: Verdicts
    gains: list[Gain]
    choices: list[I32 | None]  # of rows whose drafter reads the choice after every node
    taps: list[Taps | None]  # of decoding rows, then of chunks
    prompt_logprobs: list[list[TokenLogprob]]  # of chunks


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
        gain(s, proposal.kept, i, verdicts.row(i), verifier.failures.get(i), output, int(batch.starts[i]))
        for i, s in enumerate(rows)
    ]
    choices = [verifier.every(i) if drafting.needs_of(s).choices else None for i, s in enumerate(rows)]
    taps = _taps(plan, batch, output, gains)
    prompts = [_prompt_logprobs(plan, j, batch, output) for j in range(len(plan.chunks))]
    clock.start("other")
    return Computed(proposal, batch, verdicts, gains, choices, taps, prompts)


def pack(plan: Plan, drafts: Drafts, drafting: Drafting) -> Batch:
    """Pending tokens with their drafts, then prefill chunks."""
    rows, starts, tokens, parents, wanted, tapped = [], [], [], [], [], []
    trees = drafts.parents is not None
    taps = drafting.needs.taps
    for i, sequence in enumerate(plan.decoding):
        draft = drafts.row(i)
        rows.append(sequence.row)
        starts.append(sequence.length - 1)
        tokens.append(np.concatenate([sequence.tokens[-1:], draft.tokens]))
        parents.append(_after_pending(draft) if trees else None)
        wanted.append(True)
        tapped.append(bool(taps) and bool(drafting.needs_of(sequence).taps))
    for chunk in plan.chunks:
        rows.append(chunk.sequence.row)
        starts.append(chunk.start)
        tokens.append(chunk.tokens)
        parents.append(None)
        wanted.append(chunk.wanted)
        tapped.append(bool(taps) and bool(drafting.needs_of(chunk.sequence).taps))
    reads = np.array(tapped, np.bool_) if taps else None
    return Batch.pack(rows, tokens, starts, wanted, parents, taps=taps if any(tapped) else (), tapped=reads)


def gain(
    sequence: Sequence, drafts: Drafts, i: int, verdict: Verdict, failure: str | None, output: Output, start: int
) -> Gain:
    """What row i's verdict makes of its sequence. A fault of its own rules or tokenizer ends it, here and alone.

    ``failure``: its rules left no token after what was accepted. ``start``: where its pending token is packed.
    """
    tokens = verdict.tokens.tolist()
    if failure is not None:  # what was accepted before the dead end stays
        tokens.pop()
        verdict = Verdict(verdict.tokens[:-1], verdict.path)
    params, path, logprobs = sequence.request.params, verdict.path.tolist(), []
    try:
        extension = sequence.extended(tokens) if tokens else sequence.ended("error", failure)
        if failure is not None and extension.finish_reason is None:  # a stop before the dead end comes first
            extension = replace(extension, finish_reason="error", error=failure)
        kept = len(extension.tokens)
        slots = np.array([0, *(node + 1 for node in path[: max(kept - 1, 0)])], np.int32)
        if params.wants_logprobs and kept:
            found = output.logprobs(start + slots[:kept], extension.tokens, [params.top_logprobs] * kept)
            logprobs = sequence.spelled(found)
    except (RuleError, TextError) as error:
        extension, kept, slots = sequence.ended("error", str(error)), 0, np.zeros(1, np.int32)
    named = drafts.sources_of(i)
    sources = [*(named[node] for node in path), TARGET][:kept]
    return Gain(verdict, extension, sources, logprobs, slots)


def settle(kv: KVCache, sequence: Sequence, draft: Draft, gained: Gain) -> None:
    """Make the row's KV what its sequence will be once ``gained`` is committed: all but the last token."""
    before = sequence.length - 1
    if draft.parents is None or not gained.kept:
        kv.truncate(sequence.row, before + gained.kept)
    else:
        kv.compact(sequence.row, before, gained.slots)


def _after_pending(draft: Draft) -> I32:
    parents = np.arange(-1, len(draft) - 1, dtype=np.int32) if draft.parents is None else draft.parents
    return np.concatenate([np.array([-1], np.int32), parents + 1]).astype(np.int32)


def _taps(plan: Plan, batch: Batch, output: Output, gains: list[Gain]) -> list[Taps | None]:
    """Hidden states of the positions whose KV becomes final, of rows that draft with them."""
    if not batch.taps or batch.tapped is None:
        return [None] * len(plan)
    found: list[Taps | None] = []
    for b, reads in enumerate(batch.tapped.tolist()):
        if not reads:
            found.append(None)
            continue
        begin, end = int(batch.starts[b]), int(batch.starts[b + 1])
        at = begin + gains[b].slots if b < len(gains) else np.arange(begin, end)
        found.append(output.taps(at.astype(np.int32)))
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
