"""Learned drafters on tiny models of both backends: what they draft, and that plain tokens are said.

What a drafter's rows hold is judged by what it says from them, against one that reads everything anew; what it says, by
the networks as they are trained.
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
from outpace.control.cost import Cost
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.config import Config, Decoder, EagleConfig, MedusaConfig, ParallelConfig
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.learned.load import layers_of, network_for
from outpace.drafters.learned.medusa import HeadsNetwork, filled
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.drafters.learned.networks.parallel import ParallelNetwork
from outpace.drafters.learned.picks import likeliest
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.registry import build, parse
from outpace.errors import DrafterError
from outpace.models.base import Model
from outpace.models.native.model import NativeModel
from outpace.models.options import LoadOptions
from outpace.params import Acceptance
from tests import eagles, learned
from tests.by_hand import MASKED, Target, answers, assert_same, propose, stay_in_step, view
from tests.driving import finished
from tests.integration.conftest import VOCAB, Load
from tests.integration.test_eagle import head_of

LAYERS, HIDDEN = (0, 1, 2), 64
IDS = (0, 1, 3, 4, 5, 7, 8, 10, 11)
TREE = ((0,), (0, 0), (1,), (0, 1), (1, 0), (2,), (0, 0, 0), (2, 1))
DECODER = Decoder(HIDDEN, 2, 4, 2, 16, 96, 1e-5, 1e4, 2048, qk_norm=True)


def block(**changes: Any) -> ParallelConfig:
    given = ParallelConfig(DECODER, VOCAB, len(IDS), LAYERS, 5, 2, 6, confidence=True)
    return replace(given, **changes)


def heads(**changes: Any) -> MedusaConfig:
    return replace(MedusaConfig(HIDDEN, VOCAB, len(IDS), 3, 2, TREE), **changes)


OTHERS = {
    "decoder": replace(DECODER, qk_norm=False, kv_heads=4),
    "sample_from_anchor": False,
    "confidence_markov": False,
}
EAGLE = EagleConfig(replace(DECODER, layers=1, qk_norm=False), VOCAB, len(IDS), LAYERS)
EAGLES: dict[str, tuple[Config, bool]] = {
    "eagle": (EAGLE, False),
    "eagle, 3.1": (replace(EAGLE, fc_norm=True, norm_output=True), False),
    "eagle, P": (replace(EAGLE, decoder=replace(DECODER, qk_norm=False), mask_token=2, depths=5), False),
    "eagle, others'": (
        replace(EAGLE, decoder=replace(DECODER, layers=1), norm_before_fc=True, norm_before_residual=True), True,
    ),
}  # fmt: skip
KINDS: dict[str, tuple[Config, bool]] = {  # and whether the checkpoint has a head and an embedding of its own
    "parallel": (block(markov="rnn"), False),
    "parallel, others'": (block(**OTHERS), True),
    "parallel, bare": (block(markov_rank=0, confidence=False), False),
    "medusa": (heads(), False),
    "medusa, others'": (heads(bias=True, own_heads=True, tree=()), True),
}


def checkpoint_of(kind: str, seed: int = 0) -> Checkpoint:
    """Weights that mean nothing, of the size that trained ones have."""
    config, own = (KINDS | EAGLES)[kind]
    return learned.random_checkpoint(seed, config, head=own, embedding=own, ids=IDS)


def drafter_of(model: Model, checkpoint: Checkpoint, branch: int = 3) -> LearnedDrafter:
    config = checkpoint.config
    if isinstance(config, EagleConfig):
        network = head_of(model, checkpoint) if config.mask_token is None else network_for(checkpoint, model)
        return LearnedDrafter(network, config.hidden_layers, "eagle", VOCAB, branch=branch)
    network, layers = network_for(checkpoint, model), layers_of(checkpoint, model)
    return LearnedDrafter(network, layers, checkpoint.method, VOCAB, branch=branch)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "temperature"), [*zip(KINDS | EAGLES, (0, 0.8, 0.8, 0, 0.8, 0, 0.8, 0.8, 0), strict=True)]
)
def test_rows_stay_in_step_with_what_is_committed(load: Load, kind: str, temperature: float) -> None:
    model, checkpoint = load(3), checkpoint_of(kind)
    drafter, fresh = (drafter_of(model, checkpoint) for _ in range(2))
    stay_in_step(
        Target(model, drafter.needs.hidden_layers), drafter, fresh, (3, 70, 12), VOCAB, 4, temperature, bits=True
    )


def tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, np.float32) if not isinstance(values, torch.Tensor) else values)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_network_that_is_trained(load: Load, kind: str) -> None:
    model, checkpoint = load(3), checkpoint_of(kind)
    config, w, ids = checkpoint.config, checkpoint.tensors, np.array(IDS, np.int32)
    drafter, parts = drafter_of(model, checkpoint, branch=1), model.parts
    target = Target(model, drafter.needs.hidden_layers)
    text = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    row = target.start(text, drafter)
    found = propose(drafter, target, [row], 8)
    hidden_states = target.hidden_states(row).hidden_states
    assert hidden_states is not None
    assert found.confidence is not None
    head = tensor(eagles._rows(model, ids))

    if isinstance(config, MedusaConfig):
        medusa = MedusaNetwork(config)
        medusa.load_state_dict({name: tensor(w[name]) for name in medusa.state_dict()})
        with torch.no_grad():
            states = medusa(tensor(parts.norm(hidden_states.native[-1:, 0])))[0]
        rows = [tensor(w[f"lm_heads.{k}.weight"]) if config.own_heads else head for k in range(config.heads)]
        logits = [(its @ x).numpy() for its, x in zip(rows, states, strict=True)]
        assert isinstance(drafter._network, HeadsNetwork)
        tree = config.tree or drafter._network.tree
        grown = filled(tree, [likeliest(its, len(IDS)) for its in logits], ids, 8)
        assert found.row(0).tokens == grown.tokens
        assert found.row(0).parents == grown.parents
        np.testing.assert_allclose(found.confidence[0], grown.gains, rtol=1e-3)
        return
    assert isinstance(config, ParallelConfig)
    network = ParallelNetwork(config)
    network.load_state_dict({name: tensor(w[name]) for name in network.state_dict()})
    own = tensor(w["lm_head.weight"]) if "lm_head.weight" in w else head

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        if "embed_tokens.weight" in w:
            return tensor(w["embed_tokens.weight"])[tokens]
        return tensor(parts.embed(tokens.numpy().astype(np.int32)))

    with torch.no_grad():
        context = network.context(tensor(hidden_states.native), torch.arange(len(text) - 1))
    anchor = torch.tensor(text[-1:])
    with torch.no_grad():
        block = network.logits(anchor, torch.tensor([len(text) - 1]), [context], embed, lambda x: x @ own.T)
    said = network.decide(anchor, *block, torch.tensor(IDS))
    assert found.widths.tolist() == [network.slots]
    assert found.tokens[0].tolist() == said.tokens[0].tolist()
    np.testing.assert_allclose(found.confidence[0], said.confidence[0].cumprod(0).numpy(), rtol=1e-3)


def test_rejection_draws_chains_from_a_q_and_trees_from_none(load: Load) -> None:
    model, params = load(3), SamplingParams(temperature=1.0)
    for kind in ("parallel", "medusa"):
        drafter = drafter_of(model, checkpoint_of(kind), branch=1)
        target = Target(model, drafter.needs.hidden_layers)
        rows = [target.start([1, 2, 3, 4, 5 + n], drafter) for n in range(2)]
        views = [
            view(rows[0], target.tokens[rows[0]], params)._replace(acceptance="rejection"),
            view(rows[1], target.tokens[rows[1]]),
        ]
        drafts = drafter.propose(views, np.array([4, 3], np.int32))
        greedy = propose(drafter, target, rows, 4)
        assert drafts.widths.tolist() == [4, 3]
        assert drafts.tokens[1, :3].tolist() == greedy.tokens[1, :3].tolist()
        if kind == "medusa":  # nothing is drawn, so that noise must not show
            assert drafts.q is None
            assert drafts.tokens[0].tolist() == greedy.tokens[0].tolist()
            continue
        assert drafts.q is not None
        np.testing.assert_allclose(drafts.q[0].sum(-1), 1, rtol=1e-12)
        assert (drafts.q[0][:, np.setdiff1d(np.arange(VOCAB), IDS)] == 0).all()
        assert (drafts.q[0][np.arange(4), drafts.tokens[0]] > 0).all()
        assert (drafts.q[0].max(-1) < 1).all()
        assert (drafts.q[1, :3] == drafts.one_hot(VOCAB)[1, :3]).all()


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parallel", "medusa", "eagle, 3.1", "eagle, P"])
@pytest.mark.parametrize(
    ("beside", "params", "options"),
    [
        (False, SamplingParams(), {}),
        (False, SamplingParams(temperature=2.0, n=2), {"max_rows": 2, "prefix_rows": 2}),
        (False, SamplingParams(), {"acceptance": "rejection"}),
        (True, MASKED, {}),
        (True, SamplingParams(temperature=2.0), {"size": "auto", "cost": Cost((1, 64), (1.0, 2.0))}),
    ],
)
def test_equal_to_plain_decoding(
    load: Load, kind: str, beside: bool, params: SamplingParams, options: dict[str, Any]
) -> None:
    params = params.with_(max_tokens=25)
    model = load(4)
    drafter: Drafter = drafter_of(model, checkpoint_of(kind))
    if beside:
        drafter = ComposedDrafter([NgramDrafter(), drafter])
    found = answers(model, drafter, params, **options)
    assert [r.token_ids for r in found] == [r.token_ids for r in answers(load(4), None, params)]
    if options.get("size") != "auto":  # which goes by the clock
        assert sum(r.stats.accepted_by.get(kind.split(",")[0], 0) for r in found) > 3


@pytest.mark.parametrize("kind", [*KINDS, "eagle", "eagle, P"])
@pytest.mark.parametrize(
    ("sampling", "acceptance"),
    [
        ({"temperature": 0.0}, "coupled"),
        ({"temperature": 1.5}, "coupled"),
        ({"temperature": 2.0, "top_p": 0.7}, "coupled"),
        ({"temperature": 1.5}, "rejection"),
    ],
)
def test_native_steps_draft_what_python_drafts(
    load: Load, kind: str, sampling: dict[str, float], acceptance: Acceptance
) -> None:
    """Beside a native target whole steps draft in C++; without the drafter's rows there, step by step in Python."""
    params = SamplingParams(max_tokens=25, seed=3, ignore_eos=True).with_(**sampling)
    found = []
    for native in (True, False):
        model = load(4)
        drafter = drafter_of(model, checkpoint_of(kind))
        assert (drafter.native is not None) == isinstance(model, NativeModel)
        if not native:
            drafter.native = None
        results = answers(model, drafter, params, prefix_rows=2, acceptance=acceptance)
        found.append([(r.token_ids, r.stats.steps, r.stats.drafted, r.stats.accepted) for r in results])
    assert found[0] == found[1]
    assert sum(drafted for _, _, drafted, _ in found[0]) > 0


def test_preempted_rows_say_the_same(load: Load) -> None:
    """Three rows in memory for about one and a half, with the contexts' share of it."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    model = load(3)
    drafter = drafter_of(model, checkpoint_of("parallel"))
    memory = int(1.6 * (model.kv.bytes_for(80) + drafter.growth(0, 80)))
    with Engine(model, drafter=drafter, size=4, max_rows=3, kv_memory=memory, prefix_rows=0) as engine:
        for i in range(3):
            engine.add([*range(10), i] * 3, params)
        found = finished(engine)
        assert engine.stats.preemptions > 0
    with Engine(load(3)) as plain:
        for i in range(3):
            assert found[i, 0].token_ids == plain.generate([*range(10), i] * 3, params).token_ids


def folder(path: Path, checkpoint: Checkpoint) -> str:
    write_checkpoint(path, checkpoint.method, checkpoint.config, checkpoint.tensors, {}, {}, dtype="float32")
    return str(path)


@pytest.mark.parametrize("method", ["parallel", "medusa"])
def test_a_drafter_from_a_folder(load: Load, tmp_path: Path, method: str) -> None:
    model, checkpoint = load(3), checkpoint_of(method)
    path = folder(tmp_path / "drafter", checkpoint)
    context = DraftContext(model, None, LoadOptions(), 7)
    drafter = build(parse(f"{method}:{path}"), context)
    assert (drafter.name, drafter.cost.levels) == (f"{method}:{path}", None)
    direct, target = drafter_of(model, checkpoint), Target(model, drafter.needs.hidden_layers)
    row = target.start([5, 1, 4, 4, 2], drafter)
    direct.observe([target.hidden_states(row)])
    assert_same(propose(drafter, target, [row], 5), 0, propose(direct, target, [row], 5), 0)
    other = "medusa" if method == "parallel" else "eagle"
    with pytest.raises(DrafterError, match=f"name it {method}:"):
        build(parse(f"{other}:{path}"), context)


def test_a_tree_that_cannot_be_walked_is_refused(load: Load, tmp_path: Path) -> None:
    model, checkpoint = load(3), checkpoint_of("medusa")
    path = folder(tmp_path / "drafter", replace(checkpoint, config=heads(tree=((0,), (1, 0)))))
    with pytest.raises(DrafterError, match=r"path \[1, 0\]"):
        build(parse(f"medusa:{path}"), DraftContext(model, None, LoadOptions(), 7))
