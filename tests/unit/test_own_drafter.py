"""A drafter of the user's own: every way to name one, and that nothing it does shows in the output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace.common.arrays import I32
from outpace.drafters import registry
from outpace.drafters.base import DraftContext, Drafter, DrafterNeeds, RowView
from outpace.errors import DrafterError
from outpace.exact.drafts import Drafts
from tests.toy import ToyModel, ToyTokenizer

REPOSITORY = Path(__file__).parents[2]
PROMPT, ANSWER = [1, 2, 3, 1, 2], SamplingParams(max_tokens=12, temperature=0.8, seed=3)


def of_the_page() -> str:
    """The class of docs/drafters.md."""
    page = (REPOSITORY / "docs" / "drafters.md").read_text(encoding="utf-8")
    return page.split("```python\n")[1].split("engine = ")[0]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's drafter as a module of the current folder, which an installed package names, too."""
    (tmp_path / "my_drafters.py").write_text(of_the_page() + "\n\nbroken, text = len, 'no drafter'\n")
    facts = tmp_path / "mine-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[outpace.drafters]\nmine = my_drafters:Echo\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    registry.installed.cache_clear()
    yield "my_drafters"
    registry.installed.cache_clear()
    sys.modules.pop("my_drafters", None)


def answer(drafter: Drafter, acceptance: str = "coupled") -> tuple[list[int], tuple[str, ...]]:
    with Engine(ToyModel(), ToyTokenizer(), drafter=drafter, size=4, acceptance=acceptance) as engine:  # type: ignore[arg-type]
        result = engine.generate(PROMPT, ANSWER)
        return list(result.token_ids), result.notes


def context() -> DraftContext:
    from outpace.models.options import LoadOptions

    return DraftContext(ToyModel(), ToyTokenizer(), LoadOptions(), 8)


@pytest.mark.parametrize(
    "spec",
    ["my_drafters:Echo", "my_drafters:Echo,least=2", "mine", "mine:least=1", "suffix+mine", "suffix+my_drafters:Echo"],
)
def test_it_is_named_by_its_module_or_by_its_packages_entry_point(module: str, spec: str) -> None:
    assert answer(registry.build(registry.parse(spec), context())) == (answer(Drafter())[0], ())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("my_drafters:Ehco", "could not be made with a DraftContext (AttributeError: module 'my_drafters' has no"),
        ("my_drafters:Echo,last=2", "unexpected keyword argument 'last'"),
        ("my_drafters:Echo,2", "'2' is no option"),
        ("my_drafters:broken", "object of type 'DraftContext' has no len()"),
        ("my_drafters:text", "'str' object is not callable"),
        ("no_such_module:Echo", "use one of auto, none, ngram"),
        ("mime", "did you mean mine?"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(module: str, spec: str, says: str) -> None:
    with pytest.raises(DrafterError) as caught:
        registry.build(registry.parse(spec), context())
    assert says in str(caught.value)


def test_an_object_and_what_makes_one_stand_for_themselves() -> None:
    mine = Drafter()
    assert registry.build(registry.parse(mine), context()) is mine
    assert registry.build(registry.parse(lambda _: mine), context()) is mine
    with pytest.raises(DrafterError, match="makes 5: it must be an outpace"):
        registry.build(registry.parse(lambda _: 5), context())  # type: ignore[arg-type, return-value]
    mine.needs = "all"  # type: ignore[assignment]
    with pytest.raises(DrafterError, match="its needs is 'all': it must be a DrafterNeeds"):
        registry.build(registry.parse(mine), context())
    with pytest.raises(DrafterError, match="5 is none of them"):
        registry.parse(5)  # type: ignore[arg-type]


Propose = Callable[[Sequence[RowView], I32], Drafts]
VOCAB = ToyModel().info.vocab_size


def of(tokens: object, widths: object, **more: object) -> Propose:
    """The same for one row, whatever it is asked."""
    return lambda _rows, _sizes: Drafts(np.asarray([tokens]), np.asarray([widths]), **more)  # type: ignore[arg-type]


def writes(rows: Sequence[RowView], sizes: I32) -> Drafts:
    rows[0].tokens[:] = 0
    return Drafts.empty(len(rows))


def unlocks(rows: Sequence[RowView], sizes: I32) -> Drafts:
    rows[0].tokens.flags.writeable = True
    return writes(rows, sizes)


class Badly(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_badly(rows: Sequence[RowView], sizes: I32) -> Drafts:
    raise Badly


def raises(rows: Sequence[RowView], sizes: I32) -> Drafts:
    raise RuntimeError("no")


ONE = np.int32([5])
NONSENSE: dict[str, tuple[Propose, str]] = {
    "an id beyond the vocabulary": (of(np.int32([VOCAB]), np.int32(1)), "not in the vocabulary"),
    "a negative id": (of(np.int32([-1]), np.int32(1)), "not in the vocabulary"),
    "floats": (of([5.5], np.int32(1)), "tokens must be a contiguous numpy array of int32"),
    "what numpy makes of a list": (of([5], np.int32(1)), "tokens must be a contiguous numpy array of int32"),
    "no widths": (lambda _rows, _sizes: Drafts(np.int32([[5]]), None), "one is None"),  # type: ignore[arg-type]
    "a source that is no name": (of(ONE, np.int32(1), sources=(5,)), "a tuple of names"),
    "too many": (of(np.full(9, 5, np.int32), np.int32(9)), "9 nodes where"),
    "wider than it is": (of(ONE, np.int32(3)), "more nodes than its arrays hold"),
    "a node before its parent": (of(np.int32([5, 5]), np.int32(2), parents=np.int32([[1, 0]])), "before its parent"),
    "no drafts": (lambda _rows, _sizes: [[5]], "it proposed a list"),  # type: ignore[dict-item, return-value]
    "what writes to its view": (writes, "read-only"),
    "what unlocks its view": (unlocks, "cannot set WRITEABLE flag"),
    "an error without words": (raises_badly, "Badly"),
    "what raises": (raises, "RuntimeError: no"),
}
Q = np.full((1, 1, VOCAB), 1 / VOCAB)
BAD_Q: dict[str, tuple[object, str]] = {
    "not a number": (Q * np.nan, "no distribution"),
    "nothing": (Q * 0, "no distribution"),
    "twice as much": (Q * 2, "no distribution"),
    "negative": (np.where(np.arange(VOCAB) == 0, -1 / VOCAB, Q + 2 / VOCAB / (VOCAB - 1)), "no distribution"),
    "another vocabulary's": (np.full((1, 1, VOCAB + 1), 1 / (VOCAB + 1)), "must be an array of floats"),
    "whole numbers": (np.ones((1, 1, VOCAB), np.int64), "must be an array of floats"),
    "text": ("q", "its q is str"),
    "without its token": (np.where(np.arange(VOCAB) == 5, 0, Q * VOCAB / (VOCAB - 1)), "its own q rules out"),
}


def proposing(propose: Propose, *, draws: bool = False) -> Drafter:
    class Mine(Drafter):
        name = "mine"
        needs = DrafterNeeds(draws=draws)

        def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
            return propose(rows, sizes)

    return Mine()


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_costs_the_draft_and_a_note(what: str) -> None:
    propose, says = NONSENSE[what]
    tokens, notes = answer(proposing(propose))
    assert tokens == answer(Drafter())[0]
    assert len(notes) == 1
    assert says in notes[0]


@pytest.mark.parametrize("what", BAD_Q)
def test_a_q_that_is_no_distribution_costs_the_draft_and_a_note(what: str) -> None:
    q, says = BAD_Q[what]
    tokens, notes = answer(proposing(of(ONE, np.int32(1), q=q), draws=True), "rejection")
    assert tokens == answer(Drafter(), "rejection")[0]
    assert len(notes) == 1
    assert says in notes[0]


def test_rounding_of_q_is_mended() -> None:
    drafts = of(ONE, np.int32(1), q=(Q * 1.0004).astype(np.float32))([], ONE).normalized(VOCAB)
    assert drafts.q is not None
    assert drafts.q.dtype == np.float64
    assert abs(drafts.q.sum() - 1) < 1e-12


def test_an_engine_of_objects_checks_what_one_that_loads_checks() -> None:
    class Nameless(Drafter):
        name = None  # type: ignore[assignment]

        def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
            return Drafts.empty(len(rows))

    for drafter, said in (
        (Nameless(), "its name is None"),
        ("ngram", "'ngram' is no Drafter: Engine.load takes specs"),
    ):
        with pytest.raises(DrafterError, match=said):
            Engine(ToyModel(), ToyTokenizer(), drafter=drafter)  # type: ignore[arg-type]
        with pytest.raises(DrafterError, match=said):
            Engine(ToyModel(), ToyTokenizer(), drafters={"other": drafter})  # type: ignore[dict-item]


def test_one_that_brings_nothing_is_remarked_on_once_an_engine() -> None:
    """Not for every answer: as soon as 64 of its tokens were tried, over all of them."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with Engine(ToyModel(), ToyTokenizer()) as plain:
        said = plain.generate(PROMPT, params).token_ids

    class Wrong(Drafter):
        name = "model:wrong"

        def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
            never = [0 if said[len(view.tokens) - len(PROMPT)] else 1 for view in rows]
            return Drafts.chains([[token] * size for token, size in zip(never, sizes.tolist(), strict=True)], self.name)

    with Engine(ToyModel(), ToyTokenizer(), drafter=Wrong(), size=4) as engine:
        answers = [engine.generate(PROMPT, params) for _ in range(6)]
    assert {result.token_ids for result in answers} == {said}
    drafted = np.cumsum([result.stats.drafted for result in answers])
    assert [len(result.notes) for result in answers] == [int(n == (drafted >= 64).argmax()) for n in range(6)]
    assert any("model:wrong: 0 of" in note for result in answers for note in result.notes)
