"""The datastore finds what a search by hand finds; it is whole or not there; retrieval drafts from it, exactly."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.drafters.lookup import datastore
from outpace.drafters.lookup.datastore import DEPTH, Datastore
from outpace.drafters.lookup.retrieval import DOUBT, WEIGHTS
from outpace.drafters.registry import build, parse
from outpace.errors import DrafterError, ParameterError
from outpace.measure.prompts import PromptRow, resume, sequences, write_answers
from outpace.params import SamplingParams
from tests.oracles.datastore import Place, Search
from tests.toy import ToyTokenizer
from tests.unit.test_registry import context

TOKEN = st.integers(0, 3)
VOCAB = 10


def make(path: Path, texts: list[list[int]], **options: object) -> Datastore:
    return datastore.build(path, texts, vocabulary="v", model="toy", **options)  # type: ignore[arg-type]


def search(store: Datastore) -> Search:
    return Search(store.arrays, WEIGHTS, DOUBT, VOCAB)


def places(store: Datastore, context: list[int], count: int, follow: int) -> list[Place]:
    return search(store).places(context, count, follow)


def longest(texts: list[list[int]], wanted: list[int]) -> int:
    """The longest end of ``wanted``, up to DEPTH, that is followed by something anywhere."""
    for n in range(min(DEPTH, len(wanted)), 0, -1):
        tail = wanted[-n:]
        if any(text[i : i + n] == tail for text in texts for i in range(len(text) - n)):
            return n
    return 0


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(TOKEN, min_size=2, max_size=60), min_size=1, max_size=5),
    st.lists(TOKEN, min_size=1, max_size=30),
    st.integers(1, 6),
    st.sampled_from([7, 40, 10_000]),
)
def test_places_are_those_of_a_search_by_hand(
    texts: list[list[int]], wanted: list[int], count: int, segment: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = make(Path(folder) / "store", texts, segment=segment)
        found = places(store, wanted, count, 5)
        if segment == 10_000:
            best = longest(texts, wanted)
            assert (found[0].length if found else 0) == best
        lengths = [place.length for place in found]
        assert lengths == sorted(lengths, reverse=True)
        assert len(found) <= count
        for place in found:  # what is said to match and to follow stands there
            piece = wanted[len(wanted) - place.length :] + place.following
            assert any(text[i : i + len(piece)] == piece for text in texts for i in range(len(text)))
            assert 1 <= len(place.following) <= 5


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(TOKEN, min_size=2, max_size=60), min_size=1, max_size=5),
    st.lists(st.lists(TOKEN, min_size=1, max_size=30), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([7, 40, 10_000]),
)
def test_the_search_is_its_oracle(
    texts: list[list[int]], contexts: list[list[int]], places: int, least: int, budget: int, segment: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = make(Path(folder) / "store", texts, segment=segment)
        native = _native.Datastore(store.arrays, WEIGHTS, DOUBT, VOCAB)
        for wanted in (*contexts, *(text[:-1] for text in texts)):
            context = np.array(wanted, np.int32)
            expected = search(store).propose(context, places, least, budget)
            assert native.propose(context, places, least, budget) == expected


def test_adding_keeps_what_was_there_and_other_vocabularies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path, [[1, 2, 3, 4]])
    assert [p.following for p in places(Datastore(path), [1, 2], 4, 2)] == [[3, 4]]
    more = make(path, [[9, 1, 2, 7]], add=True)
    assert [p.following for p in places(more, [9, 1, 2], 4, 2)] == [[7], [3, 4]]
    assert len(more) == 10
    with pytest.raises(DrafterError, match="another vocabulary"):
        Datastore(path, "w")
    with pytest.raises(DrafterError, match="add=True"):
        make(path, [[1, 2]])


def test_a_failing_build_leaves_nothing_and_damage_is_named(tmp_path: Path) -> None:
    def failing() -> object:
        yield [1, 2, 3]
        raise ParameterError("line 2 is bad")

    with pytest.raises(ParameterError, match="line 2"):
        datastore.build(tmp_path / "store", failing(), vocabulary="v", model="toy", segment=3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DrafterError, match="no text"):
        make(tmp_path / "store", [[1]])
    with pytest.raises(DrafterError, match="no datastore"):
        Datastore(tmp_path)
    make(tmp_path / "store", [[1, 2, 3]])
    (tmp_path / "store" / "00000.order.npy").write_bytes(b"no array")
    with pytest.raises(DrafterError, match="damaged"):
        Datastore(tmp_path / "store")
    (tmp_path / "store" / "datastore.json").write_text("{}")
    with pytest.raises(DrafterError, match="cannot be read"):
        Datastore(tmp_path / "store")


def saved(path: Path, **arrays: object) -> None:
    for name, array in arrays.items():
        np.save(path / f"00000.{name}.npy", array)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tokens", np.arange(9, dtype=np.int64)),
        ("order", np.zeros((2, 2), np.int32)),
        ("keys", np.array([b"abc"])),
        ("tokens", np.arange(9, dtype=">i4")),
    ],
)
def test_arrays_that_are_others_are_refused_by_name(name: str, array: object, tmp_path: Path) -> None:
    make(tmp_path / "store", [[1, 2, 3, 4]])
    saved(tmp_path / "store", **{name: array})
    with pytest.raises(DrafterError, match=rf"00000\.{name}\.npy is damaged \(it is not the array"):
        Datastore(tmp_path / "store")


def test_lengths_and_manifests_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path, [[1, 2, 3, 4]])
    manifest = json.loads((path / "datastore.json").read_text())
    for change, message in (
        ({"tokens": 6}, "has 5 tokens, and 6 were written"),
        ({"segments": ["../../etc"]}, "misnamed"),
        ({"segments": [7]}, "misnamed"),
        ({"segments": ["00000", "00000"]}, "misnamed"),
        ({"segments": ["00007"]}, "missing"),
        ({"segments": 3}, "is damaged"),
        ({"format": True}, "is damaged"),
        ({"format": 9}, "format 9"),
    ):
        (path / "datastore.json").write_text(json.dumps(manifest | change))
        with pytest.raises(DrafterError, match=message):
            Datastore(path)
    (path / "datastore.json").write_text(json.dumps(manifest))
    saved(path, keys=np.zeros(9, np.int64))
    with pytest.raises(DrafterError, match="differ in length"):
        Datastore(path)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_ids_and_positions_out_of_range_are_passed_over(data: st.DataObject) -> None:
    """Whatever stands in the arrays, both searches say the same, and only tokens of the vocabulary."""
    import tempfile

    wild = st.one_of(st.integers(-3, 12), st.integers(-(2**31), 2**31 - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        store = make(path, [[1, 2, 3, 1, 2, 0, 1, 2, 3, 1, 2]])
        tokens, order, keys = (array.copy() for array in store.arrays[0])
        for array in data.draw(st.sets(st.sampled_from([0, 1]), min_size=1)):
            for place in data.draw(st.lists(st.integers(0, len(order) - 1), max_size=6)):
                (tokens, order)[array][place] = data.draw(wild)
        saved(path, tokens=tokens, order=order, keys=keys)
        damaged = Datastore(path)
        native = _native.Datastore(damaged.arrays, WEIGHTS, DOUBT, 4)
        reference = Search(damaged.arrays, WEIGHTS, DOUBT, 4)
        context = np.array([*data.draw(st.lists(wild, min_size=1, max_size=6)), 1, 2], np.int32)
        found = native.propose(context, 5, 1, 6)
        assert found == reference.propose(context, 5, 1, 6)
        assert all(0 <= token < 4 for token in found[0])


def test_a_search_keeps_what_it_reads(tmp_path: Path) -> None:
    """The files may be gone, and whoever opened them."""
    make(tmp_path / "store", [[1, 2, 3, 4]])
    store = Datastore(tmp_path / "store")
    native = _native.Datastore(store.arrays, WEIGHTS, DOUBT, VOCAB)
    expected = native.propose(np.array([1, 2], np.int32), 4, 1, 2)
    del store
    gc.collect()
    shutil.rmtree(tmp_path / "store")
    assert native.propose(np.array([1, 2], np.int32), 4, 1, 2) == expected
    assert expected[0] == [3, 4]


def test_specs_and_their_errors(tmp_path: Path) -> None:
    make(tmp_path / "store", [[1, 2, 3]])
    unnamed = replace(context(), tokenizer=None)  # a toy's vocabulary has no names to compare
    assert build(parse(f"retrieval:{tmp_path / 'store'},places=3,min=1"), unnamed).name == "retrieval"
    for options, message in (("places=0", "places=0"), ("min=17", "min=17")):
        with pytest.raises(DrafterError, match=message):
            build(parse(f"retrieval:{tmp_path / 'store'},{options}"), unnamed)
    with pytest.raises(DrafterError, match="needs a datastore"):
        parse("retrieval")


def test_corpora_of_text_and_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("abc\n")
    lines.write_text(json.dumps({"token_ids": [1, 2]}) + "\n\n" + json.dumps({"turns": ["ab", "c"]}) + "\n")
    tokenizer = ToyTokenizer()
    found = list(sequences([text, lines], tokenizer, 9))  # type: ignore[arg-type]
    assert found == [tokenizer.encode("abc\n").tolist(), [1, 2], *(tokenizer.encode(t).tolist() for t in ("ab", "c"))]
    for bad, message in (("nope", "line 1: not JSON"), ("[]", "not an object"), ("{}", "no text")):
        lines.write_text(bad + "\n")
        with pytest.raises(ParameterError, match=message):
            list(sequences([lines], tokenizer, 9))  # type: ignore[arg-type]
    lines.write_text('{"token_ids": [1, 99]}\n')
    with pytest.raises(ParameterError, match="from 0 to 8"):
        list(sequences([lines], tokenizer, 9))  # type: ignore[arg-type]


ROWS = [
    PromptRow(str(i), "all", (text,)) for i, text in enumerate(("one", "zwei £ \u2028 ünd", "drei \U0001f600", "x\ny"))
]


class Answering:
    """An engine, as far as answers are concerned: it repeats the prompt."""

    tokenizer = SimpleNamespace(has_chat_template=False)
    model = SimpleNamespace(info=SimpleNamespace(max_length=20))

    def __init__(self) -> None:
        self.asked = 0

    def encode(self, text: str, *, raw: bool = False) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int32)

    def generate_many(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        self.asked += len(prompts)
        return [SimpleNamespace(text="".join(map(chr, p)), token_ids=tuple(p)) for p in prompts]


def write(out: Path, rows: list[PromptRow] = ROWS, together: int = 2) -> tuple[int, int, list[str]]:
    """How many answers the file has, how many were asked for, and what was said."""
    engine, said = Answering(), list[str]()
    count = write_answers(engine, rows, out, SamplingParams(), together, lambda n: None, said.append)  # type: ignore[arg-type]
    return count, engine.asked, said


def test_a_run_that_was_killed_at_any_byte_goes_on(tmp_path: Path) -> None:
    """Cut after every byte of the last two lines, as a kill in the middle of a write does."""
    whole = tmp_path / "whole.jsonl"
    assert write(whole) == (4, 4, [])
    content = whole.read_bytes()
    assert [json.loads(line)["prompt"] for line in content.decode().split("\n")[:-1]] == [row.turns[0] for row in ROWS]
    lines = content.splitlines(keepends=True)
    kept = len(b"".join(lines[:2]))
    ends = {kept: 2, kept + len(lines[2]): 1, len(content): 0}
    for end in range(kept, len(content) + 1):
        out = tmp_path / "out.jsonl"
        out.write_bytes(content[:end])
        count, asked, said = write(out)
        assert out.read_bytes() == content
        assert count == 4
        assert asked == (1 if end >= kept + len(lines[2]) else 2) - (end == len(content))
        assert bool(said) == (end not in ends)
        assert all("cut short" in line and str(out) in line for line in said)


def test_prompts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert write(out, [*ROWS, PromptRow("long", "all", ("x" * 40,))])[:2] == (4, 4)
    assert write(out, [*ROWS, PromptRow("5", "all", ("new",))]) == (5, 1, [])
    assert len(out.read_text().split("\n")[:-1]) == 5


@pytest.mark.parametrize(
    "content",
    ["my notes", "my notes\n", '{"id": "1"}\n', "[1]\n", '{"id": "1", "token_ids": []}\nnotes', "\n", '{"idea": 1'],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(ParameterError, match="name another file"):
        resume(out, pytest.fail)
    assert out.read_text() == content
