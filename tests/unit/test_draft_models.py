"""How a draft model is loaded: beside its target, trusted only where its own spec says so."""

from __future__ import annotations

import pytest

from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.drafters.spec import draft_models
from outpace.errors import DrafterError
from outpace.models.options import LoadOptions
from tests.toy import ToyModel, ToyTokenizer


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
