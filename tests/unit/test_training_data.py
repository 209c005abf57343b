"""Training data: what a kill leaves goes on to the same bytes, and nothing but the target's answers is ever read."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.engine.engine import Engine
from outpace.errors import DataError, ParameterError
from outpace.measure.prompts import PromptRow, read_prompts
from outpace.models.fingerprint import ARITHMETIC, difference, identity
from outpace.training import data as folders
from outpace.training.data import IMPORTED, Answer, Answers, Columns, Writer, import_answers
from outpace.training.generate import Plan, generate, hash_of, jobs
from tests.toy import ToyModel, ToyTokenizer

PROMPTS = [
    PromptRow(str(i), "abc"[i % 3], (text,)) for i, text in enumerate(("abc", "de", "a" * 20, "fgab", "cde", "bb"))
]
PLAN = Plan(samples=2, temperatures=(0.0, 0.8), max_tokens=7)


def toy(rows: int = 3) -> Engine:
    return Engine(ToyModel(eos=(3,), max_length=20), ToyTokenizer(), max_rows=rows)  # type: ignore[arg-type]


def writer(out: Path, engine: Engine | None = None, plan: Plan = PLAN, shard: int = 4, every: float = 20.0) -> Writer:
    target = identity((engine or toy()).model)
    return Writer(out, model="toy", target=target, load={}, options=plan.options(PROMPTS), shard=shard, every=every)


def make(
    out: Path, *, rows: int = 3, shard: int = 4, every: float = 20.0, done: Callable[[], None] = lambda: None
) -> int:
    """How many prompts were left out."""
    with toy(rows) as engine:
        its = writer(out, engine, shard=shard, every=every)
        return generate(engine, jobs(PROMPTS, PLAN, its), its, PLAN.max_tokens, done=lambda n, tokens: done())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def some(count: int, prompts: int = 5) -> list[Answer]:
    rng = np.random.default_rng(count)
    return [
        Answer(f"p{i % prompts}", "s", rng.integers(0, 11, 3 + i % 4).astype(np.int32), 1 + i % 2, sample=i // prompts)
        for i in range(count)
    ]


def written(out: Path, answers: list[Answer], shard: int = 4) -> Answers:
    with writer(out, shard=shard) as its:
        its.extend(answers)
    return Answers.open(out)


def test_what_a_kill_leaves_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """The folder is copied after every step of the engine, as a kill would leave it, and every copy is gone on with."""
    left: list[Path] = []

    def copy() -> None:
        left.append(tmp_path / f"left-{len(left)}")
        shutil.copytree(tmp_path / "whole", left[-1])

    assert make(tmp_path / "whole", every=0.0, done=copy) == 3, "one prompt does not fit, in three ways"
    whole = contents(tmp_path / "whole")
    assert list(whole) == [*(f"answers-{n:05d}.parquet" for n in range(4)), "meta.json"]
    assert len(Answers.open(tmp_path / "whole")) == 15
    moments = {str(contents(folder)): folder for folder in left}
    assert len(moments) >= 6, "the copies are of many moments"
    for folder in moments.values():
        (folder / ".meta.json.x1.tmp").write_bytes(b"cut")  # what a kill in the middle of a write leaves
        make(folder)
        assert contents(folder) == whole


def test_rows_and_shards_do_not_change_the_answers(tmp_path: Path) -> None:
    found = {}
    for rows, shard in ((1, 100), (2, 1), (5, 4), (16, 7)):
        make(tmp_path / f"{rows}", rows=rows, shard=shard)
        found[rows] = Answers.open(tmp_path / f"{rows}")
    assert len({answers.hash for answers in found.values()}) == 1
    assert len(folders.shards(tmp_path / "2")) == 15
    model = ToyModel(eos=(3,), max_length=20)
    for answer in found[1]:
        said = answer.tokens[answer.prompt_length :]
        assert answer.finish == ("stop" if said[-1] == 3 else "length")
        assert len(said) == PLAN.max_tokens or answer.finish == "stop"
        if answer.temperature == 0:
            for i in range(answer.prompt_length, len(answer.tokens)):
                assert model.logits_after(answer.tokens[:i].tolist()).argmax() == answer.tokens[i]
    sampled = [answer for answer in found[1] if answer.temperature]
    assert len({answer.seed for answer in sampled}) == len(sampled) == 10


def test_the_hash_is_of_contents(tmp_path: Path) -> None:
    answers = some(10)
    hashes = {written(tmp_path / str(shard), answers, shard).hash for shard in (1, 3, 4, 10, 50)}
    assert len(hashes) == 1
    for i, change in enumerate(({"sample": 9}, {"temperature": 0.5}, {"prompt_length": 2}, {"finish": "length"})):
        other = Answer(**{**{n: getattr(answers[0], n) for n in Answer.__slots__}, **change})
        assert written(tmp_path / f"other{i}", [other, *answers[1:]]).hash not in hashes


@given(st.lists(st.text(max_size=3), min_size=2, max_size=30), st.floats(0.01, 0.6), st.integers(0, 3))
def test_a_split_has_no_prompt_on_both_sides(ids: list[str], share: float, seed: int) -> None:
    tokens = np.arange(3 * len(ids), dtype=np.int32)
    n = len(ids)
    columns = Columns(
        ids, ids, ids, np.arange(n, dtype=np.int32), np.zeros(n, np.float32), np.zeros(n, np.int64),
        np.ones(n, np.int32), 3 * np.arange(n + 1), tokens, np.array([0, n]),
    )  # fmt: skip
    answers = Answers(Path(), {"target": {"vocab_size": 3 * n}}, columns, np.arange(n))
    distinct = len(set(ids))
    if max(round(share * distinct), 1) == distinct:
        with pytest.raises(ParameterError, match="too few"):
            answers.split(share, seed)
        return
    train, held = answers.split(share, seed)
    a, b = {x.id for x in train}, {x.id for x in held}
    assert not a & b
    assert len(b) == max(round(share * distinct), 1)
    assert sorted([*train.index, *held.index]) == list(range(n))
    assert all((x.tokens == tokens[3 * i : 3 * i + 3]).all() for i, x in zip(train.index, train, strict=True))
    assert (answers.split(share, seed)[1].index == held.index).all()


def test_tokens_are_counted_with_and_without_prompts(tmp_path: Path) -> None:
    answers = some(9)
    found = written(tmp_path / "a", answers)
    said = [t for a in answers for t in a.tokens[a.prompt_length :].tolist()]
    assert found.token_counts().tolist() == [said.count(t) for t in range(11)]
    assert found.token_counts(prompts=True).sum() == found.lengths().sum() == sum(len(a.tokens) for a in answers)
    part = found.select([3, 1])
    assert [a.id for a in part] == ["p3", "p1"]
    assert [answer.prompt_length for answer in part] == [2, 2]
    assert part.token_counts(prompts=True).sum() == len(answers[3].tokens) + len(answers[1].tokens)


def test_a_folder_goes_on_only_as_it_began(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    before = contents(out)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("begun with max_tokens 7, and now it is 8", lambda: writer(out, plan=Plan(2, (0.0, 0.8), 8))),
        ("begun with samples 2, and now it is 3", lambda: writer(out, plan=Plan(3, (0.0, 0.8), 7))),
        (r"temperatures \[0.0, 0.8\], and now", lambda: writer(out, plan=Plan(2, (0.0,), 7))),
        ("another target .*vocab size is 11", lambda: writer(out, Engine(ToyModel(13), size=2))),
        (
            "begun with made by generate",
            lambda: Writer(out, model="toy", target=identity(toy().model), load={}, options=IMPORTED),
        ),
        ("something else than training data", lambda: writer(tmp_path)),
        ("no folder of training data", lambda: Answers.open(tmp_path)),
        ("give each its own", lambda: hash_of([PROMPTS[0], PROMPTS[0]])),
        ("no answers yet", lambda: (writer(tmp_path / "none"), Answers.open(tmp_path / "none"))),
    ]
    for message, attempt in cases:
        with pytest.raises((DataError, ParameterError), match=message):
            attempt()
    assert contents(out) == before
    assert make(out) == 3
    assert contents(out) == before, "what is complete stays as it is"


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    first, second = writer(tmp_path / "a", shard=2), writer(tmp_path / "a", shard=2)
    first.extend(some(5))
    with pytest.raises(DataError, match="another process"):
        second.extend(some(4))


def test_damage_is_never_read_as_answers(tmp_path: Path) -> None:
    """Every byte of a shard is turned over, and the file cut at many places: an error, or the very same answers."""
    right = written(tmp_path / "a", some(3)).hash
    path = folders.shard_path(tmp_path / "a", 0)
    whole = path.read_bytes()
    found: list[str] = []
    for i in range(0, len(whole), 7):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x41]) + whole[i + 1 :])
        try:
            found.append(Answers.open(tmp_path / "a").hash)
        except DataError as error:
            found.append(str(error))
    assert all(right == what or str(path) in what for what in found), [w for w in found if w != right][:3]
    assert found.count(right) < len(found) // 2
    for end in range(0, len(whole), 101):
        path.write_bytes(whole[:end])
        with pytest.raises(DataError, match="remove it"):
            Answers.open(tmp_path / "a")


def test_missing_shards_are_missed(tmp_path: Path) -> None:
    answers = some(12)
    right = contents(written(tmp_path / "a", answers).path)
    folders.shard_path(tmp_path / "a", 2).unlink()
    with pytest.raises(DataError, match="has 8 answers, but 12 were written"):
        Answers.open(tmp_path / "a")
    with writer(tmp_path / "a") as its:
        its.extend(answers[8:])
    assert contents(tmp_path / "a") == right
    folders.shard_path(tmp_path / "a", 1).unlink()
    with pytest.raises(DataError, match=r"answers-00001.parquet is missing"):
        Answers.open(tmp_path / "a")
    folders.shard_path(tmp_path / "a", 2).rename(folders.shard_path(tmp_path / "a", 1))
    (tmp_path / "a" / "meta.json").write_text("{}")
    with pytest.raises(DataError, match="format None"):
        Answers.open(tmp_path / "a")


def test_another_targets_shard_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a", some(3))
    path = folders.shard_path(tmp_path / "a", 0)
    columns = {name: folders.read_shard(path, None).column(name).to_pylist() for name in folders.SCHEMA.names}
    folders.write_shard(path, columns, "0123456789abcdef")
    with pytest.raises(DataError, match="of the target 0123456789abcdef"):
        Answers.open(tmp_path / "a")


def test_a_full_disk_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "whole")
    real, calls = folders.write_shard, 0

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(folders, "write_shard", full)
    with pytest.raises(DataError, match=r"No space left .* 8 answers are there; make room"):
        make(tmp_path / "out")
    assert len(Answers.open(tmp_path / "out")) == 8
    monkeypatch.setattr(folders, "write_shard", real)
    make(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def imported(out: Path, *files: Path, said: list[str] | None = None) -> tuple[int, int]:
    its = Writer(out, model="toy", target=identity(toy().model), load={}, options=IMPORTED, shard=2)
    return import_answers(files, its, temperature=0.5, max_length=6, say=(said if said is not None else []).append)


def test_foreign_answers_are_taken_once(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": i, "source": "x", "prompt": [1, i], "answer": [2, 3], "finish": "length"}) for i in range(5)
    ]
    file, out, said = tmp_path / "f.jsonl", tmp_path / "out", list[str]()
    file.write_text("\n".join(lines[:4]))
    assert imported(out, file, said=said) == (3, 0)
    assert said == [f"{file}, line 4: it has no end yet and is left out"]
    file.write_text("\n".join(lines) + "\n")
    assert imported(out, file) == (2, 3)
    answers = Answers.open(out)
    assert [(a.id, a.tokens.tolist(), a.prompt_length, a.temperature, a.finish) for a in answers] == [
        (str(i), [1, i, 2, 3], 2, 0.5, "length") for i in range(5)
    ]
    for line, message in (
        ("{", "line 1: .*write one JSON object"),
        ('{"id": 7, "prompt": [1]}', "no answer"),
        ('{"id": 7, "prompt": [1], "answer": []}', "answer is no list"),
        ('{"id": 7, "prompt": [1], "answer": [11]}', "has token 11, and the target has 11"),
        ('{"id": 7, "prompt": [1, 2, 3, 4, 5], "answer": [1, 2]}', "7 tokens, but the target's context holds 6"),
        ("[]", "write one JSON object"),
    ):
        file.write_text(line + "\n")
        with pytest.raises(DataError, match=message):
            imported(out, file)
    assert len(Answers.open(out)) == 5


def test_an_identity_says_where_it_differs() -> None:
    one, other = identity(ToyModel()), identity(ToyModel(layers=2))
    assert one["fingerprint"] is None
    assert difference(one, one) is None
    assert difference(one, other) == "its target's layers is 1, that of toy is 2"
    assert difference(one, {**one, "dtype": "bfloat16"}) is None
    assert difference(one, {**one, "dtype": "bfloat16"}, ARITHMETIC) is not None


def test_prompts_are_texts_or_conversations(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n two \n")
    assert read_prompts(tmp_path / "p.txt") == [PromptRow("1", "all", ("one",)), PromptRow("3", "all", ("two",))]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": 4, "source": "web", "messages": messages}))
    assert read_prompts(path) == [PromptRow("4", "web", ("Why?",), messages=tuple(messages))]
    for bad, message in (([], "messages is a list"), ([{"role": "user"}], "messages is a list")):
        path.write_text(json.dumps({"messages": bad}))
        with pytest.raises(ParameterError, match=message):
            read_prompts(path)
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}))
    with pytest.raises(ParameterError, match="end with what is to be answered"):
        read_prompts(path)
