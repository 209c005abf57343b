"""Drafter specs: what they mean, and errors that name the option and what there is."""

from __future__ import annotations

from importlib import import_module

import pytest

from outpace.drafters.base import DraftContext
from outpace.drafters.catalogue import AUTO, METHODS, listed
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.none import NoDrafter
from outpace.drafters.registry import build, parse
from outpace.drafters.spec import draft_models
from outpace.errors import DrafterError
from outpace.models.options import LoadOptions
from tests.toy import ToyModel, ToyTokenizer
from tests.unit.test_ngram import view as ngram_view


@pytest.mark.parametrize(
    ("text", "name", "argument", "size", "options"),
    [
        ("none", "none", None, None, {}),
        (" ngram ", "ngram", None, None, {}),
        ("auto", AUTO, None, None, {}),
        ("auto:size=5", AUTO, None, 5, {"size": "5"}),
        ("auto+model:x", f"{AUTO}+model", None, None, {}),
        ("ngram:", "ngram", None, None, {}),
        ("ngram:size=5", "ngram", None, 5, {"size": "5"}),
        ("ngram:min=2,max=5,size=3", "ngram", None, 3, {"min": "2", "max": "5", "size": "3"}),
        ("model:org/name", "model", "org/name", None, {}),
        ("model:/a/b c.gguf,size=4", "model", "/a/b c.gguf", 4, {"size": "4"}),
        ("model:./x=y", "model", "./x=y", None, {}),
    ],
)
def test_specs(text: str, name: str, argument: str | None, size: int | None, options: dict[str, str]) -> None:
    spec = parse(text)
    assert (spec.name, spec.argument, spec.size, dict(spec.options)) == (name, argument, size, options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngrm", "did you mean ngram?"),
        ("modle:x", "did you mean model?"),
        ("zzz", "use one of auto, none, ngram, suffix, recycle, lookahead, retrieval, layers, model"),
        ("", "use one of"),
        ("ngram:5", "'5' is no option of ngram: it takes min=, max=, candidates=, size="),
        ("ngram:mim=2", "'mim=2' is no option of ngram: it takes min="),
        ("ngram:min=2,", "'' is no option"),
        ("layers", "layers needs how many of the target's layers draft, as in layers:10"),
        ("auto:max=3", "'max=3' is no option of auto: it takes size="),
        ("auto+none", "none drafts nothing"),
        ("model", "model needs a model"),
        ("model:", "model needs a model"),
        ("model:size=3", "model needs a model"),
        ("model:a,b", "'b' is no option of model"),
        ("none:min=1", "'min=1' is no option of none"),
    ],
)
def test_bad_specs_are_refused_with_what_there_is(text: str, says: str) -> None:
    with pytest.raises(DrafterError) as caught:
        parse(text)
    assert says in str(caught.value)


def test_everything_that_is_listed_can_be_built() -> None:
    for name, method in METHODS.items():
        module, _, function = method.build.partition(":")
        assert name == "auto" or callable(getattr(import_module(module), function)), name
    assert [spelled.partition(":")[0] for spelled, _ in listed()] == list(METHODS)
    assert all(says and "\n" not in says for _, says in listed())


def context() -> DraftContext:
    return DraftContext(ToyModel(), ToyTokenizer(), LoadOptions(), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngram:min=x", "min=x is not a whole number"),
        ("ngram:max=", "max= is not a whole number"),
        ("ngram:min=0", "min=0"),
        ("ngram:min=5,max=4", "min=5,max=4 is out of range"),
        ("ngram:max=65", "max=65"),
    ],
)
def test_bad_values_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(DrafterError) as caught:
        build(parse(text), context())
    assert says in str(caught.value)


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(DrafterError, match="size=big is not a whole number"):
        _ = parse("ngram:size=big").size


def test_built_drafters() -> None:
    assert isinstance(build(parse("none"), context()), NoDrafter)
    drafter = build(parse("ngram:min=2,max=3"), context())
    assert isinstance(drafter, NgramDrafter)
    found = drafter.trees([ngram_view([1, 2, 1]), ngram_view([1, 2, 5, 1, 2])], [1, 1])
    assert [tree.tokens for tree in found] == [[], [5]]  # one token is too short a match


def test_a_draft_model_inherits_neither_trust_nor_revision() -> None:
    target = LoadOptions(
        revision="abc", trust_remote_code=True, allow_pickle=True, kv_memory=5, max_length=9, threads=2, dtype="float32"
    )
    spec = parse("ngram+model:a/b,size=3+model:c,revision=v2,trust=1,pickle=1")
    (plain, own) = draft_models(spec, target)
    assert plain == ("a/b", LoadOptions(threads=2, dtype="float32"))
    trusted = LoadOptions(revision="v2", trust_remote_code=True, allow_pickle=True, threads=2, dtype="float32")
    assert own == ("c", trusted)
    assert draft_models(parse("model:c"), target) == [("c", LoadOptions(threads=2, dtype="float32"))]
    assert draft_models(parse("ngram+suffix"), target) == []
    with pytest.raises(DrafterError, match="trust=yes is neither 0"):
        draft_models(parse("model:c,trust=yes"), target)


def test_a_draft_model_is_loaded_as_its_spec_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, LoadOptions]] = []

    def load(name: str, options: LoadOptions, **_: object) -> None:
        asked.append((name, options))
        raise DrafterError("that is all")

    monkeypatch.setattr("outpace.models.load.load", load)
    options = LoadOptions(revision="abc", trust_remote_code=True, allow_pickle=True)
    trusting = DraftContext(ToyModel(), ToyTokenizer(), options, 7)  # type: ignore[arg-type]
    for text in ("model:a/b", "ngram+model:a/b,revision=v2"):
        with pytest.raises(DrafterError, match="that is all"):
            build(parse(text), trusting)
    assert asked == [("a/b", LoadOptions()), ("a/b", LoadOptions(revision="v2"))]
