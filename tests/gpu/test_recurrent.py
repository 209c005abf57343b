"""Recurrent layers on the Transformers backend: transformers' own logits and tokens, whatever is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import outpace
from outpace import Engine, SamplingParams
from outpace.errors import MemoryLimitError, ModelError
from outpace.exact.noise import Noise
from outpace.measure.same import compare
from outpace.models import load as loading
from outpace.models.base import Batch
from outpace.models.options import LoadOptions
from outpace.models.torch.model import TransformersModel
from outpace.models.torch.recurrent import KEPT, States, StateShape, Step
from tests.driving import finished
from tests.exact.test_tree_drafters import make

CLOSE = 2e-3  # of logits of some units: transformers goes over delta nets in chunks
TREE = [-1, 0, 0, 1, 1, 2, 3, 6, -1]
PATHS = ([0, 2, 5], [0, 1, 3, 6], [8], [])
NET = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_hidden_layers": 5,
}  # fmt: skip
MIXTURE = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80,
}  # fmt: skip
CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4, "block_multiple_of": 16}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3_5": NET, "Lfm2": CONV, "Qwen3Next": {**NET, **MIXTURE}, "Qwen3_5Moe": {**NET, **MIXTURE},
    "Lfm2Moe": {**CONV, **MIXTURE, "num_dense_layers": 1},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 96,
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "num_hidden_layers": 3,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2,
    },
    "NemotronH": {
        "time_step_min": 1e-9,  # see docs/recurrent.md
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"], "head_dim": 16,
        "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2,
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 80,
    },
    "FalconH1": {
        "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_n_groups": 2,
        "num_hidden_layers": 3, "mlp_multipliers": [0.6, 1.7], "ssm_multipliers": [0.5, 1.4, 0.7, 1.3, 0.4],
        "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.4, "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6,
    },
}  # fmt: skip


def module_of(kind: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights, none at its resting value."""
    torch.manual_seed(1)
    name = f"{kind}TextConfig" if kind.startswith("Qwen3_5") else f"{kind}Config"
    config = getattr(transformers, name)(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, pad_token_id=None, bos_token_id=None, eos_token_id=None, **KINDS[kind],
    )  # fmt: skip
    module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name:
                parameter.abs_()
    return module.to(device, dtype).eval()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.fixture(scope="module", params=["Qwen3_5", "Lfm2"])
def module(request: pytest.FixtureRequest, device: str) -> Any:
    return module_of(request.param, device)


@pytest.fixture
def model(module: Any) -> Iterator[TransformersModel]:
    model = TransformersModel(module, name="hybrid")
    yield model
    for row in model.kv.rows:
        model.kv.free(row)
    model.kv.check()
    assert model.kv.bytes == 0
    model.close()


def theirs(module: Any, tokens: Any) -> Any:
    with torch.inference_mode():
        return module(torch.from_numpy(np.asarray(tokens, np.int64))[None].to(module.device)).logits[0].cpu().numpy()


def run(model: TransformersModel, rows: list[int], tokens: list[Any], parents: Any = None, **options: Any) -> Any:
    starts = [model.kv.length(row) for row in rows]
    given = [np.asarray(each, np.int32) for each in tokens]
    batch = Batch.pack(rows, given, starts, [True] * len(rows), parents, **options)
    logits = model.forward(batch).logits(batch.wanted)
    model.kv.check()
    return logits


def close(ours: Any, expected: Any) -> bool:
    return float(np.abs(ours - expected).max()) < CLOSE


def test_widths_and_what_is_taken_back(model: Any, module: Any, rng: np.random.Generator) -> None:
    """Chunks of 1 to 17 tokens and wrong ones that are taken back, in a batch whose rows go at their own pace."""
    texts = [rng.integers(0, 120, n) for n in (120, 90, 60)]
    expected = [theirs(module, text) for text in texts]
    rows, done = [model.kv.alloc() for _ in texts], [0, 0, 0]
    while now := [i for i in range(3) if done[i] < len(texts[i])]:
        now = [i for i in now if rng.random() < 0.8] or now
        right = [min(int(rng.integers(1, 18)), len(texts[i]) - done[i]) for i in now]
        chunks = [
            np.append(texts[i][done[i] : done[i] + n], rng.integers(0, 120, int(rng.integers(0, 9))))
            for i, n in zip(now, right, strict=True)
        ]
        logits, at = run(model, [rows[i] for i in now], chunks), 0
        for i, n, chunk in zip(now, right, chunks, strict=True):
            assert close(logits[at : at + n], expected[i][done[i] : done[i] + n])
            at, done[i] = at + len(chunk), done[i] + n
            model.kv.truncate(rows[i], done[i])


def test_trees_equal_their_chains(model: Any, module: Any, rng: np.random.Generator) -> None:
    text, nodes, more = rng.integers(0, 120, 40), rng.integers(0, 120, len(TREE)), rng.integers(0, 120, 12)
    parents = np.array(TREE, np.int32)
    for path in PATHS:
        rows = [model.kv.alloc(), model.kv.alloc()]
        run(model, rows, [text, text[:30]], last_only=True)
        logits = run(model, rows, [nodes, text[:5]], [parents, None])
        for node in range(len(TREE)):
            chain = [node]
            while TREE[chain[0]] >= 0:
                chain.insert(0, TREE[chain[0]])
            assert close(logits[node], theirs(module, np.append(text, nodes[chain]))[-1])
        model.kv.compact(rows[0], 40, np.array(path, np.int32))
        expected = theirs(module, np.concatenate([text, nodes[path], more]))[-len(more) :]
        assert close(run(model, rows[:1], [more]), expected)
    with pytest.raises(ValueError, match=f"a tree of {KEPT + 1} tokens is more than the {KEPT}"):
        run(model, rows[1:], [np.zeros(KEPT + 1)], [np.full(KEPT + 1, -1, np.int32)])


def test_rows_that_share_a_beginning(model: Any, module: Any, rng: np.random.Generator) -> None:
    text, ours = rng.integers(0, 120, 70), rng.integers(0, 120, 15)
    source, late, early = (model.kv.alloc() for _ in range(3))
    run(model, [source], [text[:50]], last_only=True)
    run(model, [source], [text[50:60]])
    # All from its base on, and where the prompt but its last token ended.
    assert [model.kv.reachable(source, n) for n in (0, 20, 49, 50, 55, 99)] == [0, 0, 49, 50, 55, 60]
    model.kv.fork(source, late, 55)
    for call in (lambda: model.kv.fork(source, early, 20), lambda: model.kv.truncate(source, 48)):
        with pytest.raises(ValueError, match=r"of 60 positions of row \d: its recurrent layers have passed"):
            call()
    model.kv.fork(source, early, 49)
    assert close(run(model, [early], [text[49:]]), theirs(module, text)[49:])
    model.kv.truncate(early, 49)
    expected = [theirs(module, np.append(text[:n], ours))[n:] for n in (49, 55)]
    assert close(run(model, [early, late], [ours, ours]), np.concatenate(expected))
    before, taken = model.kv.bytes, model.kv.exclusive([late])
    model.kv.free(late)
    assert model.kv.bytes == before - taken
    model.kv.truncate(source, 0)
    assert close(run(model, [source], [text[:9]]), theirs(module, text[:9]))


def test_memory_is_bounded_and_known_beforehand(module: Any, model: Any, rng: np.random.Generator) -> None:
    text, row = rng.integers(0, 120, 40), model.kv.alloc()
    limited = TransformersModel(module, name="limited", kv_memory=model.kv.growth(row, 40) + 1)
    one, two = limited.kv.alloc(), limited.kv.alloc()
    run(limited, [one], [text])
    with pytest.raises(MemoryLimitError, match="of KV memory"):
        run(limited, [two], [text])
    assert limited.kv.length(two) == 0
    limited.close()
    need = model.kv.growth(row, 40, settled=39)
    tight = TransformersModel(module, name="tight", kv_memory=need)
    run(tight, [tight.kv.alloc()], [text], last_only=True)  # of the others nothing is kept
    assert tight.kv.bytes <= need < model.kv.growth(row, 40)
    tight.close()
    for chunk in (text[:1], text[1:30], text[30:], text):
        growth, before = model.kv.growth(row, len(chunk)), model.kv.bytes
        run(model, [row], [chunk])
        assert model.kv.bytes - before <= growth
        model.kv.truncate(row, model.kv.length(row) - 1)


@pytest.mark.parametrize("corrects", [True, False], ids=["delta net", "state space"])
def test_a_token_has_its_bits_whatever_is_computed_beside_it(
    corrects: bool, device: str, rng: np.random.Generator
) -> None:
    """States, updates and results: chunks with wrong tokens, a tree and other rows, and one by one."""
    shape, n = StateShape(1, 4, 128, 2, 4, 24, 8), 40
    given = [rng.standard_normal((2 * n, *size)) for size in ((2, 24), (2, 24), (4, 8), (4,), (4,), (128,))]
    query, key, value, beta, decay, x = (torch.from_numpy(each).float().to(device) for each in given)
    beta, decay, weight = torch.sigmoid(beta), torch.sigmoid(decay), torch.ones((4, 128), device=device) / 3

    def over(states: States, rows: dict[int, Any], parents: Any = None) -> Any:
        """``rows``: which tokens each goes over."""
        tokens = np.concatenate(list(rows.values()))
        batch = Batch.pack(
            list(rows), [np.asarray(each, np.int32) for each in rows.values()], [states.length(row) for row in rows],
            [True] * len(rows), parents,
        )  # fmt: skip
        step, at = Step(states, batch), torch.from_numpy(tokens).to(device)
        mixed = step.convolved(0, x[at], weight)
        found = step.gone_over(0, query[at], key[at], value[at], beta[at], decay[at], corrects)
        step.end()
        return torch.cat([mixed, found.flatten(1)], 1)

    one = States(shape, torch.device(device))
    expected = torch.cat([over(one, {0: np.array([i])}) for i in range(n)])
    states, done = States(shape, torch.device(device)), 0
    while done < n:
        right = min(int(rng.integers(1, 9)), n - done)
        wrong = rng.integers(n, 2 * n, int(rng.integers(0, 5)))
        # A wrong sibling beside each right node.
        chain = np.arange(done, done + right)
        tree = np.stack([rng.integers(n, 2 * n, right), chain], 1).ravel()
        if rng.random() < 0.5:
            found = over(states, {0: np.append(chain, wrong), 5: rng.integers(n, 2 * n, 3)})[:right]
            states.truncate(0, done + right)
        else:
            parents = np.repeat(np.arange(-1, 2 * right - 1, 2), 2).astype(np.int32)
            found = over(states, {0: tree, 5: rng.integers(n, 2 * n, 7)}, [parents, None])[1 : 2 * right : 2]
            states.compact(0, done, np.arange(1, 2 * right, 2, dtype=np.int32))
        assert torch.equal(found, expected[done : done + right])
        done += right
    over(states, {0: np.array([n])}), over(one, {0: np.array([n])})
    states.truncate(0, n), one.truncate(0, n)
    ours, alone = states.at(0), one.at(0)
    assert ours.base == alone.base
    assert torch.equal(ours.state, alone.state)  # type: ignore[arg-type]


# Answers

FEW = tuple(range(6))  # tokens of answers, so that guesses hit
PROMPTS = [[1, 2, 3, 1, 2], [4, 4, 4, 4], [5, 1, 5, 2, 5, 3, 5] * 6, [2, 3] * 20]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_transformers_own(kind: str, device: str, rng: np.random.Generator) -> None:
    module = module_of(kind, device)
    prompts = [rng.integers(0, 120, n).tolist() for n in (5, 70)]
    tensors = [torch.tensor([prompt], device=device) for prompt in prompts]
    expected = [
        module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        for ids in tensors
    ]  # fmt: skip
    model = TransformersModel(module, name=kind)
    assert (model._own is None) == (kind not in ("Qwen3_5", "Lfm2"))  # others run through transformers' modules
    for drafter in (None, "suffix+recycle"):
        given = {} if drafter is None else {"drafter": make(drafter, model), "size": 6}
        engine = Engine(model, prefill_chunk=37, prefix_rows=0, **given)
        found = engine.generate_many(prompts, SamplingParams(max_tokens=24))
        assert [list(result.token_ids) for result in found] == expected
        engine.check()
    model.close()


def params_of(i: int) -> SamplingParams:
    temperature = 0.8 * (i % 3 > 0)
    return SamplingParams(max_tokens=14 + 6 * i, n=1 + 2 * (i % 2), temperature=temperature, seed=i, allowed_tokens=FEW)


def answers(module: Any, drafter: str | None, preempt: bool = False, **options: Any) -> dict[Any, Any]:
    """To the prompts together, and once more to the long ones, whose beginnings the cache has."""
    model = TransformersModel(module, name="hybrid")
    given = {} if drafter is None else {"drafter": make(drafter, model), "size": 6}
    with Engine(model, **{"max_rows": 4, "prefill_chunk": 37, **given, **options}) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, params_of(i))
        found: dict[Any, Any] = {}
        for _ in range(5 * preempt):
            found |= {(each.request, each.sample): each.result for each in engine.step() if each.result is not None}
        if preempt:
            scheduler = engine._core.scheduler
            scheduler.preempt(scheduler.running[-1])
        found |= finished(engine)
        for i, prompt in enumerate(PROMPTS[2:], 2):
            engine.add([*prompt, *found[i, 0].token_ids], params_of(0))
            found |= finished(engine)
        return found


@pytest.mark.parametrize("kind", ["ngram", "suffix+recycle", "lookahead"])
def test_drafted_answers_are_plain_decodings(module: Any, kind: str) -> None:
    plain = answers(module, None, prefix_rows=0)
    drafted = answers(module, kind, preempt=kind == "ngram")
    assert drafted.keys() == plain.keys()
    differ = next((key for key in plain if drafted[key].token_ids != plain[key].token_ids), None)
    if differ is not None:  # what follows from a near-tie may be anything
        i, sample = differ
        params, both = params_of(i), [list(each[differ].token_ids) for each in (plain, drafted)]
        with Engine(TransformersModel(module, name="hybrid")) as engine:
            found = compare(engine, PROMPTS[i], params, Noise(params.seed or 0, sample), *both)
        assert found is not None
        assert found.near_tie, str(found)
    assert sum(result.stats.accepted for result in drafted.values()) > 0
    assert sum(result.stats.reused_tokens for (i, _), result in drafted.items() if i >= len(PROMPTS)) > 50
    assert kind != "ngram" or sum(result.stats.preemptions for result in drafted.values()) > 0


def test_rows_that_share_a_state_get_on_in_little_memory(module: Any) -> None:
    memory = 2 * TransformersModel(module, name="hybrid").kv.bytes_for(65)
    expected: list[Any] = []
    for limit in (None, memory):
        with Engine(TransformersModel(module, name="hybrid", kv_memory=limit), max_rows=8) as engine:
            for i in range(3):
                engine.add([*range(1, 31)], SamplingParams(max_tokens=20, n=4, temperature=0.9, seed=i))
            expected.append([result.token_ids for result in finished(engine).values()])
    assert len(expected[0]) == 12
    assert expected[0] == expected[1]


@pytest.mark.parametrize("kind", ["Qwen3_5", "Lfm2"])
def test_sixteen_bits(kind: str, device: str, rng: np.random.Generator) -> None:
    """States are float32 whatever the weights are; our own decoder is proven in a copy in float32."""
    module = module_of(kind, device, torch.bfloat16)
    model = TransformersModel(module, name=kind)
    assert model._own is not None
    row, text = model.kv.alloc(), rng.integers(0, 120, 60)
    found = np.concatenate([run(model, [row], [text[at : at + 13]]) for at in range(0, 60, 13)])
    with torch.inference_mode():
        ids = torch.from_numpy(text.astype(np.int64))[None].to(device)
        expected = module(ids).logits[0].float().cpu().numpy()
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99
    assert model.kv.states is not None
    assert model.kv.states.at(row).records.dtype == torch.float32
    model.close()


def test_what_cannot_be_served_is_refused(model: Any, module: Any) -> None:
    with pytest.raises(ModelError, match="strict: recurrent layers"):
        TransformersModel(module, name="strict", strict=True)
    around = type("Qwen3_5ForConditionalGeneration", (type(module),), {})
    with pytest.raises(ModelError, match=r"it reads images, too, .* load that"):
        TransformersModel(around(module.config).eval(), name="wrapper")
    batch = Batch.pack([model.kv.alloc()], [np.zeros(3, np.int32)], [0], [True], layers=2)
    with pytest.raises(ValueError, match="recurrent layers"):
        model.forward(batch)


def test_folders_are_served_by_either_backend_and_patched_models_draft(module: Any, tmp_path: Path) -> None:
    module.save_pretrained(tmp_path)
    for backend, taken in (("auto", "native"), ("transformers", "transformers")):
        assert loading._backend_for(loading.resolve(str(tmp_path)), None, LoadOptions(backend=backend)) == taken
    ids = torch.tensor([[7, 8, 9, 10] * 8], device=module.device)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    own = module.generate(ids, **given)
    outpace.patch(module, drafter="suffix", size=4)
    try:
        assert torch.equal(module.generate(ids, **given), own)
        assert (outpace.stats(module).own, outpace.stats(module).total.steps > 0) == ({}, True)
    finally:
        outpace.unpatch(module)
    assert torch.equal(module.generate(ids, **given), own)
