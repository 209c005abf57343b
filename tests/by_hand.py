"""The target's side of drafting by hand: rows, what is committed, and the hidden states that a drafter gets of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from outpace import Engine, SamplingParams
from outpace.drafters.base import Drafter, Event, RowView
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, Model
from tests.driving import finished


def view(row: int, tokens: list[int], params: SamplingParams | None = None) -> RowView:
    chooser = Chooser(params or SamplingParams(), Noise(row), len(tokens))
    return RowView(row, row, np.array(tokens, np.int32), 2048, chooser, "coupled")


class Target:
    """The target's side of some rows, by hand: what is committed, and the hidden states of what became final."""

    def __init__(self, model: Model, hidden_layers: tuple[int, ...]) -> None:
        self.model, self.layers = model, hidden_layers
        self.tokens: dict[int, list[int]] = {}

    def start(self, prompt: list[int], drafter: Drafter, chunk: int = 7) -> int:
        row = self.model.kv.alloc()
        self.tokens[row] = prompt
        for at in range(0, len(prompt) - 1, chunk):
            drafter.observe([self.run(row, at, min(at + chunk, len(prompt) - 1))])
        return row

    def commit(self, row: int, tokens: list[int]) -> Event:
        length = len(self.tokens[row])
        self.tokens[row] = self.tokens[row] + tokens
        return self.run(row, length - 1, length - 1 + len(tokens))

    def run(self, row: int, start: int, end: int) -> Event:
        """KV of positions ``start .. end - 1``, and the event that says so."""
        its = np.array(self.tokens[row], np.int32)
        batch = Batch.pack([row], [its[start:end]], [start], [False], hidden_layers=self.layers)
        hidden_states = self.model.forward(batch).hidden_states(np.arange(end - start, dtype=np.int32))
        return Event(row, start + 1, its[start + 1 : end + 1], None, hidden_states)

    def hidden_states(self, row: int) -> Event:
        """All of the row's, in one go."""
        self.model.kv.truncate(row, 0)
        return self.run(row, 0, len(self.tokens[row]) - 1)


def assert_same(a: Drafts, i: int, b: Drafts, j: int) -> None:
    one, other = a.row(i), b.row(j)
    assert (one.tokens, one.parents) == (other.tokens, other.parents)
    assert a.confidence is not None
    assert b.confidence is not None
    np.testing.assert_allclose(a.confidence[i, : len(one)], b.confidence[j, : len(other)], rtol=2e-3)


def forked(target: Target, drafter: Drafter, row: int) -> int:
    """A row that shares all but the last five tokens, as the engine makes one of a finished row."""
    other, common = target.model.kv.alloc(), len(target.tokens[row]) - 5
    target.model.kv.fork(row, other, common - 1)
    target.tokens[other] = [*target.tokens[row][:common], 7, 2, 7]
    drafter.fork(row, other, common)
    drafter.observe([target.run(other, common - 1, common + 2)])
    return other


PROMPTS = [[1, 2, 3], [4] * 20, list(range(12)) * 3, [9]]
MASKED = SamplingParams(temperature=2.0, frequency_penalty=0.3, allowed_tokens=[0, 1, 3, 5, 6, 9])


def answers(model: Model, drafter: Drafter | None, params: SamplingParams, **options: Any) -> list[Any]:
    """What an engine with little room says to ``PROMPTS``."""
    options = {"size": 6, "prefill_chunk": 8, "max_rows": 3} | options
    with Engine(model, drafter=drafter, **options) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, params.with_(seed=i))
        found = list(finished(engine).values())
    notes = {note for result in found for note in result.notes}
    assert not [note for note in notes if "likely made for another model" not in note], (
        notes
    )  # random weights draft badly
    return found


def propose(
    drafter: Drafter, target: Target, rows: list[int], size: int, params: SamplingParams | None = None
) -> Drafts:
    """At most ``size`` nodes for each of ``rows``."""
    return drafter.propose([view(row, target.tokens[row], params) for row in rows], np.full(len(rows), size, np.int32))


def stay_in_step(
    target: Target, drafter: Drafter, fresh: Drafter, lengths: tuple[int, ...], vocab: int, size: int,
    temperature: float, *, bits: bool,
) -> None:  # fmt: skip
    """Commits that follow the drafts now and then, rows that do not always draft, a row that is forked.

    A row's draft is the same whoever else is asked for, and the same as that of ``fresh``, which is told of the row all
    at once; with ``bits`` natively bit for bit.
    """
    params, rng = SamplingParams(temperature=temperature), np.random.default_rng(1)
    exactly = bits and target.model.info.backend == "native"
    rows = [target.start(rng.integers(0, vocab, n).tolist(), drafter) for n in lengths]
    for step in range(5):
        if step == 3:
            rows.append(forked(target, drafter, rows[1]))
        asked = rows if step % 3 else rows[:2]
        found = propose(drafter, target, asked, size, params)
        assert (found.widths == size).all()
        for i, row in enumerate(asked):
            alone = propose(drafter, target, [row], size, params)
            fresh.observe([target.hidden_states(row)])
            for other in (alone, propose(fresh, target, [row], size, params)):
                assert_same(found, i, other, 0)
                if exactly:
                    assert found.confidence is not None
                    assert other.confidence is not None
                    assert found.confidence[i].tolist() == other.confidence[0].tolist()
            fresh.release(row)
        for i, row in enumerate(rows):
            draft = found.row(i) if i < len(asked) else Drafts.empty(1).row(0)
            path = draft.path(int(rng.integers(-1, len(draft))))
            drafter.observe([target.commit(row, [*(draft.tokens[n] for n in path), int(rng.integers(0, vocab))])])
        drafter.check(rows)
    for row in rows:
        drafter.release(row)
    drafter.check([])
    assert drafter.bytes == 0
