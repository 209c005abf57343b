"""``coupled`` by enumeration: every choice function, every draft, chains and trees, against plain decoding."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from outpace.common.arrays import I32
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.verify import walk

Path = tuple[int, ...]


def shapes(k: int, *, chains: bool) -> list[I32 | None]:
    """Every way in which k nodes can hang together; None is a chain."""
    if chains:
        return [None]
    return [np.array(parents, np.int32) for parents in product(*[range(-1, i) for i in range(k)])]


def paths(draft: Draft) -> list[Path]:
    """The tokens on the way to each node."""
    found: list[Path] = []
    for node in range(len(draft)):
        parent = draft.parent(node)
        found.append((*(found[parent] if parent >= 0 else ()), int(draft.tokens[node])))
    return found


def plain(choice: dict[Path, int]) -> list[int]:
    """Plain decoding, as far as the choice function is defined, and one token beyond."""
    out: list[int] = []
    while tuple(out) in choice:
        out.append(choice[tuple(out)])
    return out


@pytest.mark.parametrize(
    ("vocab", "size", "chains"),
    [(2, k, False) for k in range(5)] + [(3, k, False) for k in range(4)] + [(5, 2, False), (3, 4, True), (4, 3, True)],
)
def test_every_draft_gives_the_tokens_of_plain_decoding(vocab: int, size: int, chains: bool) -> None:
    cases = 0
    for parents in shapes(size, chains=chains):
        for tokens in product(range(vocab), repeat=size):
            draft = Draft(np.array(tokens, np.int32), parents)
            ends = paths(draft)
            prefixes = list(dict.fromkeys([(), *ends]))  # duplicates among siblings are one prefix
            choices = np.array(list(product(range(vocab), repeat=len(prefixes))), np.int32)  # [C, P]
            column = np.array([prefixes.index(p) for p in [(), *ends]])
            c = len(choices)  # every choice function is a row of one batch
            drafts = Drafts(
                np.tile(draft.tokens, (c, 1)),
                np.full(c, size, np.int32),
                None if parents is None else np.tile(parents, (c, 1)),
            )
            asked: list[tuple[int, int]] = []

            def choose(rows: I32, nodes: I32, choices: I32 = choices, column: I32 = column, asked: list = asked) -> I32:  # type: ignore[type-arg]
                asked.extend(zip(rows.tolist(), nodes.tolist(), strict=True))
                return choices[rows, column[nodes + 1]]

            distinct = len(prefixes) == size + 1
            for row, verdict in enumerate(walk(choose, drafts)):
                expected = plain(dict(zip(prefixes, choices[row].tolist(), strict=True)))
                gained = verdict.tokens.tolist()
                # Among equal siblings only the first is followed, so what hangs under another may be missed.
                assert gained == expected if distinct else gained == expected[: len(gained)]
                assert [int(draft.tokens[n]) for n in verdict.path] == gained[:-1]
                assert [draft.parent(n) for n in verdict.path] == [-1, *verdict.path.tolist()][:-1]
                cases += 1
                visited = [(row, -1), *((row, int(node)) for node in verdict.path)]
                assert set(visited) <= set(asked)
            assert len(asked) == len(set(asked)), "a node was asked for twice"
    assert cases >= vocab


def test_ragged_rows_do_not_see_each_other() -> None:
    drafts = Drafts.chains([[1, 2, 3], [], [1, 9]], "x")
    answers = {(0, -1): 1, (0, 0): 2, (0, 1): 7, (1, -1): 4, (2, -1): 1, (2, 0): 0}
    verdicts = walk(
        lambda rows, nodes: np.array([answers[r, n] for r, n in zip(rows.tolist(), nodes.tolist(), strict=True)]),
        drafts,
    )
    assert [v.tokens.tolist() for v in verdicts] == [[1, 2, 7], [4], [1, 0]]
    assert verdicts.accepted.tolist() == [2, 0, 1]


def test_what_pads_a_narrower_row_is_never_followed() -> None:
    """Row 1 has no node, row 2 one: what stands behind it in the batch would agree with every choice."""
    drafts = Drafts(np.zeros((3, 2), np.int32), np.array([2, 0, 1], np.int32), None)
    found = walk(lambda rows, nodes: np.zeros(len(rows), np.int32), drafts)
    assert found.accepted.tolist() == [2, 0, 1]
