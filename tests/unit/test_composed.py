"""Composition: one tree of several drafters, who drafted what, exactness under rejection, and what each part sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from outpace.common.arrays import I32
from outpace.drafters.base import DraftCost, Drafter, DrafterNeeds, Event, RowView
from outpace.drafters.composed import ComposedDrafter, follow
from outpace.drafters.registry import build, parse
from outpace.errors import DrafterError
from outpace.exact.drafts import Draft, Drafts, Verdict
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import HostHiddenStates
from outpace.params import Acceptance, SamplingParams
from tests.exact.test_verify import Language, output, same, sampled_trees
from tests.unit.test_registry import context


class Fixed(Drafter):
    """Proposes the same tree for every row, cut to its size."""

    def __init__(self, name: str, tree: Draft, needs: DrafterNeeds | None = None) -> None:
        self.name, self.needs, self.tree = name, needs or DrafterNeeds(), tree
        self.seen: list[Event] = []
        self.closed = False

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        t = self.tree
        return Drafts.of([Draft(t.tokens[:n], t.parents[:n], t.gains[:n], t.sources[:n]) for n in sizes], (self.name,))

    def observe(self, events: Sequence[Event]) -> None:
        self.seen.extend(events)

    def close(self) -> None:
        self.closed = True


class Drawing(Drafter):
    """Proposes one sampled chain of those that there are for a size, in turn."""

    name, needs = "drawing", DrafterNeeds(draws=True)

    def __init__(self, language: Language) -> None:
        self._language = language
        self.turn: Iterator[tuple[float, Draft]] | None = None
        self.weight = 0.0

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        if self.turn is None:
            self.turn = sampled_trees(self._language, None, int(sizes[0]), replace=True)
        found = next(self.turn, None)
        if found is None:
            raise StopAsyncIteration
        self.weight, draft = found
        assert draft.q is not None
        return replace(Drafts.of([draft], (self.name,)), q=draft.q[None])


def view(row: int = 0, acceptance: Acceptance = "coupled", temperature: float = 0.0) -> RowView:
    chooser = Chooser(SamplingParams(temperature=temperature), Noise(0), 0)
    return RowView(row, row, np.array([1, 2, 3], np.int32), 100, chooser, acceptance)


def sizes(*values: int) -> I32:
    return np.array(values, np.int32)


A = Draft.chain([1, 2, 3], [0.9, 0.5, 0.2])
B = Draft([1, 4, 5], [-1, 0, -1], [0.6, 0.55, 0.3], [0, 0, 0])


def test_the_best_of_all_in_one_tree_with_sources() -> None:
    drafter = ComposedDrafter([Fixed("a", A), Fixed("b", B)])
    drafts = drafter.propose([view(0), view(1)], sizes(4, 2))
    assert drafter.name == "a+b"
    assert drafts.row(0).tokens == [1, 4, 2, 5]
    assert drafts.row(0).parents == [-1, 0, 0, -1]
    assert [drafts.sources_of(0)[i] for i in range(4)] == ["a", "b", "a", "b"]
    assert drafts.row(1).tokens == [1, 4]
    assert drafts.q is None


def test_a_fallback_works_only_where_those_before_it_have_nothing() -> None:
    class Odd(Fixed):
        def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
            return Drafts.of([self.tree if row.row % 2 else Draft() for row in rows], (self.name,))

    drafter = ComposedDrafter([Odd("a", A), Fixed("b", B)], [False, True])
    drafts = drafter.propose([view(0), view(1), view(2)], sizes(3, 3, 3))
    assert [drafts.sources_of(i)[0] for i in range(3)] == ["b", "a", "b"]
    assert [drafts.row(i).tokens for i in range(3)] == [[1, 4, 5], [1, 2, 3], [1, 4, 5]]
    with pytest.raises(DrafterError, match="first part"):
        ComposedDrafter([Fixed("a", A), Fixed("b", B)], [True, False])
    with pytest.raises(DrafterError, match="cannot be the fallback"):
        ComposedDrafter([Fixed("a", A, DrafterNeeds(draws=True)), Fixed("b", B)], [False, True])


def test_agreeing_chains_stay_a_chain() -> None:
    drafter = ComposedDrafter([Fixed("a", A), Fixed("b", Draft.chain([1, 2], [0.8, 0.7]))])
    drafts = drafter.propose([view()], sizes(7))
    assert drafts.parents is None
    assert drafts.row(0).tokens == [1, 2, 3]
    assert [drafts.sources_of(0)[i] for i in range(3)] == ["a", "b", "a"]


def test_a_part_sees_its_own_layers_and_its_own_path() -> None:
    a = Fixed("a", A, DrafterNeeds(hidden_layers=(4, 7)))
    b = Fixed("b", B, DrafterNeeds(hidden_layers=(2,)))
    drafter = ComposedDrafter([a, b])
    assert drafter.needs.hidden_layers == (2, 4, 7)
    drafter.propose([view()], sizes(4))
    states = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    verdict = Verdict(np.array([1, 4, 9], np.int32), np.array([0, 1], np.int32))
    drafter.observe([Event(0, 3, verdict.tokens, verdict, HostHiddenStates(states))])
    assert a.seen[0].hidden_states.numpy()[:, :, 0].tolist() == [[1, 2], [4, 5]]  # type: ignore[union-attr]
    assert b.seen[0].hidden_states.numpy()[:, :, 0].tolist() == [[0], [3]]  # type: ignore[union-attr]
    assert a.seen[0].verdict.path.tolist() == [0]  # type: ignore[union-attr]
    assert a.seen[0].verdict.tokens.tolist() == [1, 4]  # type: ignore[union-attr]
    assert b.seen[0].verdict.path.tolist() == [0, 1]  # type: ignore[union-attr]
    assert a.seen[0].tokens.tolist() == [1, 4, 9]
    drafter.check([])


def test_follow_goes_as_far_as_the_draft_does() -> None:
    draft = Draft([1, 1, 2, 3], [-1, -1, 0, 1])
    assert follow(draft, np.array([1, 2, 9], np.int32)).tolist() == [0, 2]
    assert follow(draft, np.array([8], np.int32)).tolist() == []


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "tree", [Draft(), Draft.chain([0, 1], [0.9, 0.8]), Draft([2, 0, 1], [-1, -1, 0], [0.9, 0.8, 0.7], [0, 0, 0])]
)
def test_rejection_is_exact_by_enumeration(temperature: float, size: int, tree: Draft) -> None:
    params = SamplingParams(temperature=temperature)
    target, drawing = Language(3, params, 1), Drawing(Language(3, params, 2))
    drafter = ComposedDrafter([Fixed("fixed", tree), drawing, Fixed("too", Draft.chain([1], [0.95]))])

    def drafts() -> Iterator[tuple[float, Draft]]:
        while True:
            try:
                found = drafter.propose([view(0, "rejection", temperature)], sizes(size))
            except StopAsyncIteration:
                return
            draft = found.row(0)
            assert len(draft) <= size
            assert found.sources_of(0)[0] == "drawing"
            yield drawing.weight, draft

    assert same(output(target, drafts(), size + 1), target.sequences(size + 1))


def test_rows_without_rejection_are_merged_beside_rows_with() -> None:
    params = SamplingParams(temperature=1.0)
    two = [(view(0, "rejection", 1.0)), view(1)]

    class Both(Drawing):
        def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
            draft = next(sampled_trees(Language(6, params, 2), None, int(sizes.max()), replace=True))[1]
            assert draft.q is not None
            return Drafts(np.tile(draft.tokens, (2, 1)), sizes, q=np.tile(draft.q, (2, 1, 1)), sources=("drawing",))

    drafts = ComposedDrafter([Fixed("a", A), Both(Language(6, params, 2))]).propose(two, sizes(4, 4))
    assert drafts.q is not None
    assert drafts.widths.tolist() == [4, 4]
    assert [drafts.sources_of(0)[i] for i in range(4)] == ["drawing", "drawing", "a", "a"]
    assert drafts.q[0].sum(axis=1) == pytest.approx([1, 1, 1, 1])
    assert drafts.q[1].max(axis=1).tolist() == [1, 1, 1, 1]


def test_two_parts_that_draw_are_refused_under_rejection_only() -> None:
    language = Language(3, SamplingParams(), 1)
    drafter = ComposedDrafter([Drawing(language), Drawing(language)])
    drafter.check_acceptance("coupled")
    with pytest.raises(DrafterError, match=r"drawing and drawing both sample.*keep one of them"):
        drafter.check_acceptance("rejection")


def test_a_part_that_reads_all_choices_is_refused() -> None:
    with pytest.raises(DrafterError, match="use it alone"):
        ComposedDrafter([Fixed("a", A), Fixed("b", B, DrafterNeeds(choices=True))])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ngram+suffix", ["ngram", "suffix"]),
        (" ngram + suffix ", ["ngram", "suffix"]),
        ("ngram:min=2+suffix:max=8+model:a/b", ["ngram", "suffix", "model"]),
        ("model:/data/c++/x+ngram", ["model", "ngram"]),
        ("model:/data/a+b", ["model"]),
        ("model:/data/x+ngram/m.gguf", ["model"]),
        ("model:a+model:b+suffix", ["model", "model", "suffix"]),
    ],
)
def test_specs_are_split(text: str, parts: list[str]) -> None:
    spec = parse(text)
    assert [part.name for part in spec.parts or (spec,)] == parts


def test_arguments_and_sizes_of_a_composition() -> None:
    spec = parse("model:/data/c++/x,size=5+ngram:size=5")
    assert (spec.name, spec.size, spec.arguments_of("model")) == ("model+ngram", 5, ["/data/c++/x"])
    assert parse("ngram+suffix").size is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngram+sufix", "did you mean suffix?"),
        ("ngram+", "unknown drafter ''"),
        ("ngram+none", "none drafts nothing"),
        ("ngram:size=3+suffix:size=4", "sizes 3, 4 differ"),
        ("ngram+suffix:max=100", "max=100"),
        ("suffix:tree=2", "tree=2 is neither 0"),
        ("suffix:memory=-1", "memory=1"),
        ("suffix:file=/x", "add history=1"),
        ("ngram:candidates=0", "candidates=0"),
    ],
)
def test_bad_compositions_are_refused(text: str, says: str) -> None:
    with pytest.raises(DrafterError) as caught:
        build(parse(text), context())
    assert says in str(caught.value)


def test_parts_are_built_with_their_options_and_closed() -> None:
    drafter = build(parse("ngram:candidates=3+suffix:history=1,tree=0,memory=2,max=8"), context())
    assert drafter.name == "ngram+suffix"
    parts = [Fixed("a", A), Fixed("b", B)]
    ComposedDrafter(parts).close()
    assert all(part.closed for part in parts)


class Network(Drafter):
    """Pays by the level; notes whom it was asked for."""

    name, needs, cost = "network", DrafterNeeds(draws=True), DraftCost(levels="network", nodes=True)

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        self.asked.append([view.row for view in rows])
        drafts = Drafts.of([Draft.chain([7, 8], [0.6, 0.3])] * len(rows), (self.name,))
        return replace(drafts, levels=np.array([view.depth for view in rows], np.int32))


def test_a_network_is_asked_for_rows_that_may_have_a_level() -> None:
    network = Network()
    drafter = ComposedDrafter([Fixed("a", Draft.chain([1, 2, 3, 4], [0.9, 0.8, 0.7, 0.6])), network])
    rows = [view(i)._replace(depth=levels, adaptive=i < 2) for i, levels in enumerate((0, 2, 2))]
    drafts = drafter.propose(rows, sizes(6, 6, 6))
    assert network.asked == [[1, 2]]
    assert drafts.levels is not None
    assert drafts.levels.tolist() == [0, 2, 2]
    assert [drafts.sources_of(i).count("network") for i in range(3)] == [0, 2, 2]
