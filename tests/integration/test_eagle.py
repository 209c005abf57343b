"""``eagle`` on tiny models of both backends: what it drafts, and that plain decoding's tokens are said.

What a drafter's rows hold is judged by what it says from them, against one that reads everything anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outpace import Engine, SamplingParams
from outpace.drafters.base import DraftContext, DraftCost, Event
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.drafter import CATCH_UP, Ask, LearnedDrafter, Network
from outpace.drafters.learned.native import NativeEagle
from outpace.drafters.learned.networks.eagle import TorchEagle
from outpace.drafters.learned.picks import RIVALS, chosen
from outpace.drafters.registry import build, parse
from outpace.errors import DrafterError
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Model
from outpace.models.native.model import NativeModel
from outpace.models.options import LoadOptions
from tests import eagles, learned
from tests.by_hand import Target, assert_same, propose, view
from tests.integration.conftest import VOCAB, Load

LAYERS = (0, 1, 2)
IDS = (0, 1, 3, 4, 5, 7, 8, 10, 11)


def head_of(model: Model, checkpoint: Checkpoint, limit: int | None = None) -> Network:
    """As ``load.head_for`` has it, with weights and keys in float32."""
    if isinstance(model, NativeModel):
        return NativeEagle(model, checkpoint, dtype="float32", kv_dtype="float32", limit=limit)
    return TorchEagle(model, checkpoint, limit=limit)


def eagle(model: Model, checkpoint: Checkpoint, limit: int | None = None, **options: Any) -> LearnedDrafter:
    head = head_of(model, checkpoint, limit)
    return LearnedDrafter(head, checkpoint.config.hidden_layers, "eagle", model.info.vocab_size, **options)


def test_a_tree_is_the_union_of_its_chains(load: Load) -> None:
    """Every node's chance is that of its path, fed token by token; the nodes are the likeliest of those expanded."""
    model = load(3)
    head = TorchEagle(model, eagles.random(model, IDS, LAYERS, fc_norm=True, seed=3))
    rng = np.random.default_rng(0)
    entries = rng.integers(0, VOCAB, 9).astype(np.int32)
    hidden_states = [rng.normal(0, 1, (9, 3, model.info.hidden_size)).astype(np.float32)]

    def after(path: tuple[int, ...]) -> dict[int, float]:
        """The chances of what follows the path."""
        head.kv.release(0)
        logits, given = head.extend([0], [entries], hidden_states)
        for token in path:
            logits, given = head.extend([0], [np.array([token], np.int32)], given)
        p = np.exp(logits[0].astype(np.float64) - logits.max())
        return dict(zip(IDS, (p / p.sum()).tolist(), strict=True))

    def chance(path: tuple[int, ...]) -> float:
        return float(np.prod([after(path[:n])[token] for n, token in enumerate(path)]))

    drafts = head.draft([Ask(0, entries, hidden_states[0], 20, 4, len(IDS))])
    assert head.kv.length(0) == 9
    draft = drafts.row(0)
    paths = [tuple(draft.tokens[n] for n in draft.path(node)) for node in range(len(draft))]
    assert len(set(paths)) == 20
    assert max(map(len, paths)) > 2
    assert drafts.confidence is not None
    np.testing.assert_allclose(drafts.confidence[0], [chance(path) for path in paths], rtol=1e-4)
    shallow = [first * its for token, first in after(()).items() for its in (1.0, *after((token,)).values())]
    kept = sorted((chance(path) for path in paths if len(path) <= 2), reverse=True)
    np.testing.assert_allclose(kept, sorted(shallow, reverse=True)[: len(kept)], rtol=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_a_drafter_like_the_target_drafts_its_choice(seed: int) -> None:
    """With the target's own logits, what noise and filters choose is the first child; and chances say who is next."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(400, 100, replace=False)).astype(np.int32)
    logits = rng.normal(0, 2, 400).astype(np.float32)
    logits[np.setdiff1d(np.arange(400), ids)] = -np.inf
    for params in (SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_p=0.8, top_k=20)):
        chooser = Chooser(params, Noise(seed), 5)
        tokens, gains = chosen(logits[ids], ids, chooser, 3, 4)
        scores = chooser.after([0, 0, 0]).scores(logits)
        best = np.argsort(-scores, kind="stable")[:RIVALS]
        assert ids[tokens].tolist() == best[:4].tolist()
        weights = np.exp(scores[best] - scores[best[0]])
        np.testing.assert_allclose(np.exp(gains), (weights / weights.sum())[:4], rtol=1e-9)


def test_a_row_that_waits_for_long_is_read_in_bounded_pieces(load: Load) -> None:
    """Also where states never came: those entries are left out, and the rest stays in step."""
    target = Target(load(3), LAYERS)
    checkpoint = eagles.random(target.model, IDS, LAYERS)
    drafter, fresh, unseen = (eagle(target.model, checkpoint) for _ in range(3))
    tokens = np.random.default_rng(2).integers(0, VOCAB, 2 * CATCH_UP + 90).tolist()
    row = target.model.kv.alloc()
    target.tokens[row] = tokens
    target.run(row, 0, 20)  # nobody saw these
    for at in range(20, len(tokens) - 1, 100):
        drafter.observe([target.run(row, at, min(at + 100, len(tokens) - 1))])
        drafter.check([row])
    found = propose(drafter, target, [row], 5)
    whole = target.hidden_states(row)
    assert whole.hidden_states is not None
    late = np.arange(20, len(tokens) - 1, dtype=np.int32)
    fresh.observe([Event(row, 21, whole.tokens[20:], None, whole.hidden_states.at(late))])
    assert_same(found, 0, propose(fresh, target, [row], 5), 0)
    assert_same(found, 0, propose(drafter, target, [row], 5), 0)  # once more, though nothing is new
    assert propose(unseen, target, [row], 5).widths.tolist() == [0]


def test_without_memory_the_last_row_gives_way(load: Load) -> None:
    target = Target(load(3), LAYERS)
    checkpoint = eagles.random(target.model, IDS, LAYERS)
    roomy = eagle(target.model, checkpoint)
    one = roomy.growth(0, 1)
    tight = eagle(target.model, checkpoint, limit=2 * one)
    rows = [target.start([1, 2, 3, 4][: 2 + n], roomy) for n in range(3)]
    for row in rows:
        tight.observe([target.hidden_states(row)])
    expected, found = propose(roomy, target, rows, 4), propose(tight, target, rows, 4)
    assert found.widths.tolist() == [4, 4, 0]
    for i in range(2):
        assert_same(found, i, expected, i)
    assert tight.bytes == 2 * one
    tight.check(rows[:2])
    tight.release(rows[0])
    tight.observe([target.hidden_states(rows[2])])
    assert_same(propose(tight, target, [rows[2]], 4), 0, expected, 2)


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rejection_draws_from_a_q_over_the_whole_vocabulary(load: Load) -> None:
    """What the chain was drawn from is the network's own distribution, nothing outside of the draft vocabulary."""
    target = Target(load(3), LAYERS)
    checkpoint = eagles.random(target.model, IDS, LAYERS)
    drafter = eagle(target.model, checkpoint)
    row = target.start([1, 2, 3, 4, 5], drafter)
    its = view(row, target.tokens[row], SamplingParams(temperature=1.0))._replace(acceptance="rejection")
    drafts = drafter.propose([its], np.array([4], np.int32))
    assert drafts.parents is None
    assert drafts.q is not None
    assert drafts.q.shape == (1, 4, VOCAB)
    np.testing.assert_allclose(drafts.q.sum(-1), 1, rtol=1e-12)
    assert (drafts.q[..., np.setdiff1d(np.arange(VOCAB), IDS)] == 0).all()
    head, hidden_states = TorchEagle(target.model, checkpoint), target.hidden_states(row)
    assert hidden_states.hidden_states is not None
    logits, given = head.extend([0], [hidden_states.tokens], [hidden_states.hidden_states.native])
    for n, token in enumerate(drafts.tokens[0]):
        p = np.exp(logits[0].astype(np.float64) - logits.max())
        np.testing.assert_allclose(drafts.q[0, n, IDS], p / p.sum(), rtol=1e-4)
        logits, given = head.extend([0], [np.array([token], np.int32)], given)


SPECS: list[tuple[str, dict[str, Any], str]] = [
    ("eagle:{},branch=0", {}, "branch=0 is out of range: give 1 to 16"),
    ("eagle:{},levels=99", {}, "levels=99 is out of range: give 1 to 63"),
    ("eagle:{},quantize=int3", {}, "quantize=int3 is not known"),
    ("eagle:{}", {"hidden_layers": (0, 1, 3)}, "the outputs of layers"),
    ("eagle:{}", {"vocab": 13}, "vocabulary has 13 tokens"),
]


@pytest.mark.parametrize(("spec", "wrong", "says"), SPECS)
def test_what_does_not_fit_is_refused(load: Load, tmp_path: Path, spec: str, wrong: dict[str, Any], says: str) -> None:
    model = load(3)
    checkpoint = eagles.random(model, IDS, LAYERS)
    config = replace(checkpoint.config, **wrong)
    maps = learned.maps(IDS, config.vocab)
    checkpoint = replace(checkpoint, config=config, tensors={**checkpoint.tensors, **maps})
    path = eagles.write(tmp_path / "drafter", checkpoint)
    with pytest.raises(DrafterError, match=says):
        build(parse(spec.format(path)), DraftContext(model, None, LoadOptions(), 7))


@pytest.mark.parametrize("branch", [1, 2])
def test_a_drafter_from_a_folder(load: Load, tmp_path: Path, branch: int) -> None:
    model = load(3)
    path = eagles.write(tmp_path / "drafter", eagles.random(model, IDS, LAYERS, fc_norm=True))
    drafter = build(parse(f"eagle:{path},branch={branch},levels=3"), DraftContext(model, None, LoadOptions(), 7))
    assert (drafter.name, drafter.needs.hidden_layers) == (f"eagle:{path}", LAYERS)
    assert drafter.cost == DraftCost(drafter.name, nodes=True), "a chain, too, may be deeper than the mean"
    with Engine(model, drafter=drafter, size=7) as engine:
        found = engine.generate([1, 2, 3], SamplingParams(max_tokens=12))
        engine.check()
    with Engine(load(3)) as plain:
        assert found.token_ids == plain.generate([1, 2, 3], SamplingParams(max_tokens=12)).token_ids
    assert found.stats.drafted > 0
    assert len(found.stats.drafted_at) <= 3
    assert found.notes == ()


def test_contexts_up_to_the_model_s_limit(load: Load, tmp_path: Path) -> None:
    """The last ones that fit, too, by the network of the target's own backend. The slower one has fewer."""
    native = isinstance(load(3), NativeModel)
    length = 6000 if native else 1200
    prompt = np.random.default_rng(0).integers(1, VOCAB, length).tolist()
    said = []
    for spec in (None, "eagle:{},branch=3"):
        model = load(3, context=length + 20)
        drafter = None
        if spec is not None:
            path = eagles.write(tmp_path / "drafter", eagles.random(model, IDS, LAYERS, fc_norm=True))
            drafter = build(parse(spec.format(path)), DraftContext(model, None, LoadOptions(), 7))
        with Engine(model, drafter=drafter, size=5) as engine:
            said.append(engine.generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True)))
            engine.check()
    plain, drafted = said
    assert (len(drafted.token_ids), drafted.finish_reason) == (20, "length")
    assert all("drafted tokens were accepted" in note for note in drafted.notes)  # it is random
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted >= 30


@pytest.mark.parametrize("spec", ["eagle:{}", "ngram+eagle:{}"])
def test_results_tell_of_another_target_s_drafter(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spec: str
) -> None:
    model = load(3)
    monkeypatch.setattr("outpace.drafters.learned.load.fingerprint_of", lambda name, options: "b" * 16)
    path = eagles.write(tmp_path / "drafter", eagles.random(model, IDS, LAYERS), "a" * 16)
    drafter = build(parse(spec.format(path)), DraftContext(model, None, LoadOptions(), 7))
    note = (
        f"eagle:{path}: the drafter was trained beside another ({'a' * 16}), and this is {model.info.name} "
        f"({'b' * 16}), so its drafts may rarely be accepted: train one beside this target"
    )
    assert [record.getMessage() for record in caplog.records] == [note]
    with Engine(model, drafter=drafter, size=2) as engine:
        params = SamplingParams(max_tokens=3)
        assert engine.generate([1, 2, 3], params).notes == (note,)
        assert engine.generate([1, 2, 3], params, drafter=False).notes == ()
