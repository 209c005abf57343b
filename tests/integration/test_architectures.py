"""The Transformers backend on tiny random models of every family, against each model's own full forward."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outpace.common.arrays import F32, I32
from outpace.errors import MemoryLimitError, ModelError
from outpace.models.base import Batch
from outpace.models.torch import attention
from outpace.models.torch.anatomy import max_length
from outpace.models.torch.model import TransformersModel

VOCAB = 97
CLOSE = 1e-5
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GEMMA = COMMON | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7, "pad_token_id": 0}
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MULTI_HEAD = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 16},
    "mistral": COMMON | {"sliding_window": 7},
    "gemma2": GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": GEMMA | {"sliding_window_pattern": 2},
    "phi3": COMMON | {"pad_token_id": 0, "sliding_window": 9},
    "gpt2": GPT2,
    "gpt_neox": MULTI_HEAD | {"rotary_pct": 0.5},
    "opt": {key: value for key, value in MULTI_HEAD.items() if key != "intermediate_size"}
    | {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1, "bos_token_id": 3},
    "gpt_oss": COMMON  # attention sinks, and a window in every other layer
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7},
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
    "qwen2_moe": COMMON  # builds a mask that no layer uses
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "deepseek_v3": COMMON  # keys and values of different widths
    | {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def tiny(family: str, **changes: Any) -> Any:
    """A random float32 model in evaluation mode; weights large enough that every part of it shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **(FAMILIES.get(family, COMMON) | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3 if "embed" in name or "wte" in name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class Pair:
    """The same weights twice: under Outpace, and as the model alone."""

    def __init__(self, family: str) -> None:
        module = tiny(family)
        self.reference = copy.deepcopy(module)
        self.model = TransformersModel(module, name=family, kv_block=4)
        self.model.kv._extend(64)

    def own(self, tokens: I32, **kw: Any) -> Any:
        with torch.inference_mode():
            return self.reference(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False, **kw)

    def own_logits(self, tokens: I32) -> F32:
        logits: F32 = self.own(tokens).logits[0].numpy()
        return logits

    def row(self) -> int:
        """A row of a cache whose free blocks hold NaN."""
        kv = self.model.kv
        for block in kv._free:
            for tensor in (*kv.keys, *kv.values):
                tensor[:, block * kv.block : (block + 1) * kv.block] = torch.nan
        return kv.alloc()

    def run(self, chunks: dict[int, I32], parents: dict[int, I32] | None = None, **kw: Any) -> dict[int, F32]:
        """Logits of every new token, by row."""
        rows = list(chunks)
        batch = Batch.pack(
            rows,
            [chunks[row] for row in rows],
            [self.model.kv.length(row) for row in rows],
            [True] * len(rows),
            [(parents or {}).get(row) for row in rows],
            **kw,
        )
        logits = self.model.forward(batch).logits(batch.wanted)
        return {row: logits[batch.starts[i] : batch.starts[i + 1]] for i, row in enumerate(rows)}


@pytest.fixture(scope="module", params=FAMILIES)
def shared(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.fixture
def pair(shared: Pair) -> Any:
    yield shared
    for row in shared.model.kv.rows:
        shared.model.kv.free(row)
    shared.model.kv.check()


def text(n: int, seed: int) -> I32:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype(np.int32)


def close(ours: F32, theirs: F32) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=CLOSE, atol=CLOSE * max(1.0, float(np.abs(theirs).max())))


def test_ragged_rows_in_chunks(pair: Pair) -> None:
    texts = [text(37, 1), text(5, 2), text(21, 3)]
    rows = [pair.row() for t in texts]
    rng = np.random.default_rng(4)
    done, found = [0, 0, 0], [[], [], []]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        chunks = {}
        for i, (row, t) in enumerate(zip(rows, texts, strict=True)):
            size = int(rng.integers(0, 12))
            if done[i] < len(t) and size:
                chunks[row] = t[done[i] : done[i] + size]
        for row, logits in (pair.run(chunks) if chunks else {}).items():
            found[rows.index(row)].append(logits)
            done[rows.index(row)] += len(logits)
        pair.model.kv.check()
    for t, parts in zip(texts, found, strict=True):
        close(np.concatenate(parts), pair.own_logits(t))


def test_truncated_and_extended_again(pair: Pair) -> None:
    row = pair.row()
    wrong, right = text(30, 5), text(33, 6)
    right[:11] = wrong[:11]
    pair.run({row: wrong})
    pair.model.kv.truncate(row, 11)
    one_by_one = [pair.run({row: right[i : i + 1]})[row] for i in range(11, 20)]
    rest = pair.run({row: right[20:]})[row]
    close(np.concatenate([*one_by_one, rest]), pair.own_logits(right)[11:])


def test_tree_equals_its_chains(pair: Pair) -> None:
    prompt, nodes = text(18, 7), text(9, 8)
    parents = np.array([-1, 0, 0, -1, 3, 1, 4, 6, 2], np.int32)
    tree, other = pair.row(), pair.row()
    pair.run({tree: prompt, other: prompt[:4]})
    ours = pair.run({other: prompt[4:9], tree: nodes}, {tree: parents})
    close(ours[other], pair.own_logits(prompt[:9])[4:])
    for node in range(len(nodes)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        close(ours[tree][node], pair.own_logits(np.concatenate([prompt, nodes[path]]))[-1])
    # Keep one branch, and go on behind it.
    path = [3, 4, 6]
    pair.model.kv.compact(tree, len(prompt), np.array(path, np.int32))
    more = text(5, 9)
    after = pair.run({tree: more})[tree]
    close(after, pair.own_logits(np.concatenate([prompt, nodes[path], more]))[-5:])


def test_forked_row_goes_its_own_way(pair: Pair) -> None:
    prompt, a, b = text(16, 10), text(6, 11), text(7, 12)
    source, copied = pair.row(), pair.row()
    pair.run({source: prompt})
    pair.model.kv.fork(source, copied, 13)
    ours = pair.run({source: a, copied: b})
    close(ours[source], pair.own_logits(np.concatenate([prompt, a]))[16:])
    close(ours[copied], pair.own_logits(np.concatenate([prompt[:13], b]))[13:])


def test_hidden_states_are_the_layers_outputs(pair: Pair) -> None:
    t = text(14, 13)
    row = pair.row()
    pair.run({row: t[:5]})
    batch = Batch.pack([row], [t[5:]], [5], [False], hidden_layers=(2, 0))
    hidden_states = pair.model.forward(batch).hidden_states(np.arange(9, dtype=np.int32))
    pair.run({pair.row(): text(9, 31)})  # they stay what they were
    hidden = pair.own(t, output_hidden_states=True).hidden_states
    for i, layer in enumerate((2, 0)):
        close(hidden_states.numpy()[:, i], hidden[layer + 1][0, 5:].numpy())
    some = hidden_states.at(np.array([1, 4, 8], np.int32)).at(np.array([2, 0], np.int32))
    assert len(some) == 2
    np.testing.assert_array_equal(some.native.numpy(), hidden_states.numpy()[[8, 1]])
    np.testing.assert_array_equal(some.layers((1,)).numpy(), hidden_states.numpy()[[8, 1], 1:])


def test_hidden_states_of_rows_that_draft_only(pair: Pair) -> None:
    rows = [pair.row(), pair.row()]
    batch = Batch.pack(
        rows, [text(3, 1), text(4, 2)], [0, 0], [False] * 2, hidden_layers=(1,), hidden_rows=np.array([False, True])
    )
    output = pair.model.forward(batch)
    assert output.hidden_states(np.array([3, 6], np.int32)).native.shape == (2, 1, 32)
    with pytest.raises(ValueError, match=r"rows \[0\] of the batch keep no hidden states"):
        output.hidden_states(np.array([2, 3], np.int32))


def test_first_layers_alone(pair: Pair) -> None:
    t = text(12, 14)
    row = pair.row()
    ours = np.concatenate([pair.run({row: t[:7]}, layers=2)[row], pair.run({row: t[7:]}, layers=2)[row]])
    holder, name = pair.model._anatomy.holder, pair.model._anatomy.attribute
    path = next(n for n, m in pair.model._live().named_modules() if m is holder)
    holder = pair.reference.get_submodule(path)
    whole = getattr(holder, name)
    setattr(holder, name, whole[:2])
    try:
        close(ours, pair.own_logits(t))
    finally:
        setattr(holder, name, whole)


def test_only_wanted_logits(pair: Pair) -> None:
    """Of the last token of each row, or of none."""
    a, b = text(9, 15), text(6, 16)
    rows = [pair.row(), pair.row()]
    batch = Batch.pack(rows, [a, b], [0, 0], [True, True], last_only=True)
    assert batch.wanted.tolist() == [8, 14]
    logits = pair.model.forward(batch).logits(batch.wanted)
    close(logits, np.stack([pair.own_logits(a)[-1], pair.own_logits(b)[-1]]))
    more = text(9, 17)
    pair.model.forward(Batch.pack(rows[:1], [more[:6]], [9], [False]))
    close(pair.run({rows[0]: more[6:]})[rows[0]], pair.own_logits(np.concatenate([a, more]))[15:])


def test_an_error_leaves_lengths_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    t = text(10, 18)
    row, other = pair.row(), pair.row()
    pair.run({row: t[:4]})
    kv = pair.model.kv
    kv.fork(row, other, 3)
    before = kv.bytes
    for broken, error in (
        (Batch.pack([row, 77], [t[4:6], t[:4]], [4, 0], [True, True]), "row 77 is not allocated"),
        (Batch.pack([row, row], [t[4:6], t[6:8]], [4, 6], [True, True]), "comes twice"),
        (replace(Batch.pack([row], [t[4:6]], [4], [True]), parent=np.array([1, -1], np.int32)), "not a node before it"),
        (Batch.pack([row], [t[4:6]], [127], [True]), "position 128 is beyond"),
        (Batch.pack([row], [t[5:7]], [5], [True]), "holds 4 positions, but its new tokens begin at position 5"),
    ):
        with pytest.raises(ValueError, match=error):
            pair.model.forward(broken)
    kv.limit = kv.reserved
    try:
        third, long = pair.row(), np.tile(t, 12)
        with pytest.raises(MemoryLimitError, match=f"120 more positions of row {third} do not fit"):
            pair.run({row: long, other: long, third: long})
        kv.free(third)
    finally:
        kv.limit = None
    assert (kv.length(row), kv.length(other), kv.bytes) == (4, 3, before)
    kv.check()

    attend = attention.mixed

    def fail(layer: int, *tensors: Any, **options: Any) -> Any:
        if layer == 2:
            raise torch.OutOfMemoryError
        return attend(layer, *tensors, **options)

    monkeypatch.setattr(attention, "mixed", fail)
    with pytest.raises(MemoryLimitError, match="cpu has no memory left for a forward of 2 tokens"):
        pair.run({row: t[4:6]}, layers=3)
    monkeypatch.undo()
    assert (kv.length(row), kv.bytes) == (4, before)
    kv.check()
    close(pair.run({row: t[4:]})[row], pair.own_logits(t)[4:])
    close(pair.run({other: t[3:]})[other], pair.own_logits(t)[3:])


def test_features_enter_beside_the_tokens(pair: Pair) -> None:
    t, rng = text(11, 20), np.random.default_rng(21)
    features = rng.normal(0, 0.5, (11, 32)).astype(np.float32)
    row = pair.row()
    found = [
        pair.run({row: t[:6]}, features=features[:6])[row],
        pair.run({row: t[6:]}, features=torch.from_numpy(features[6:]))[row],
    ]
    holder, name = pair.model._anatomy.holder, pair.model._anatomy.attribute
    path = next(n for n, m in pair.model._live().named_modules() if m is holder)
    first = getattr(pair.reference.get_submodule(path), name)[0]
    added = torch.from_numpy(features)[None]
    hook = first.register_forward_pre_hook(lambda _, inputs: (inputs[0] + added, *inputs[1:]))
    try:
        close(np.concatenate(found), pair.own_logits(t))
    finally:
        hook.remove()
    with pytest.raises(ValueError, match=r"features of shape \[11, 32\] do not fit 1 tokens of width 32"):
        pair.run({row: t[:1]}, features=features)


NO_EMBEDDING = ("gpt2", "opt")  # a position's own embedding is added


@torch.no_grad()
def test_parts_end_where_the_model_ends(pair: Pair) -> None:
    """From the last layer's output to the logits, and from tokens to what the first layer sees."""
    t = text(10, 22)
    batch = Batch.pack([pair.row()], [t], [0], [True], hidden_layers=(3,))
    output = pair.model.forward(batch)
    parts, hidden_states = pair.model.parts, output.hidden_states(batch.wanted)
    logits = parts.logits(parts.norm(hidden_states.native[:, 0]))
    close(logits.numpy(), output.logits(batch.wanted))
    ids = np.array([5, 0, 96], np.int32)
    some = parts.logits(parts.norm(hidden_states.at(ids[:1]).native[:, 0]), ids)
    close(some.numpy(), output.logits(batch.wanted)[5:6, ids])
    if pair.model.info.name in NO_EMBEDDING:
        with pytest.raises(ModelError, match="not a multiple of the token's embedding"):
            parts.embed(t)
        return
    seen: list[Any] = []
    path = next(n for n, m in pair.model._live().named_modules() if m is pair.model._anatomy.layers[0])
    first = pair.reference.get_submodule(path)
    hook = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    pair.own(t)
    hook.remove()
    close(parts.embed(t).numpy(), seen[0][0].numpy())


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "t5": (t5, "encoder-decoder"),
    "gemma3_text": (
        lambda: tiny("gemma3_text", use_bidirectional_attention=True), "is not causal",
    ),
    "mamba": (lambda: tiny("mamba", state_size=4, expand=2), "recurrent state"),
    "minimax": (
        lambda: tiny("minimax", head_dim=16, num_local_experts=2,
                     layer_types=["linear_attention", "full_attention"] * 2),
        "no attention of its own",
    ),
    "bloom": (lambda: tiny("bloom", n_head=4, n_layer=2), "takes no positions"),
    "bamba": (
        lambda: tiny("bamba", mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_expand=2),
        "recurrent state",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.filterwarnings("ignore")  # slow paths of kernels that are not installed
def test_refused_with_the_reason(family: str) -> None:
    build, reason = REFUSED[family]
    with pytest.raises(ModelError, match=f"{family} cannot be served exactly: .*{reason}"):
        TransformersModel(build(), name=family)


@pytest.mark.parametrize(
    ("family", "changes", "limit"),
    [
        ("phi3", {
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [4.0] * 4,
                                "short_factor": [1.0] * 4, "original_max_position_embeddings": 64},
        }, 64),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 128),
    ],
)  # fmt: skip
def test_length_dependent_rope_is_limited_to_where_it_is_exact(family: str, changes: Any, limit: int) -> None:
    told: list[str] = []
    module = tiny(family, **changes)
    reference = copy.deepcopy(module)
    model = TransformersModel(module, name=family, warn=told.append)
    assert model.info.max_length == limit
    assert len(told) == 1
    assert f"contexts are limited to {limit}" in told[0]
    t = text(limit, 1)
    row = model.kv.alloc()
    batch = Batch.pack([row], [t], [0], [True])
    with torch.inference_mode():
        own = reference(input_ids=torch.from_numpy(t.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    close(model.forward(batch).logits(batch.wanted), own)


def test_info() -> None:
    module = tiny("qwen2", tie_word_embeddings=True)
    model = TransformersModel(module, name="q", eos_ids=(2, 5), longest=50)
    info = model.info
    assert (info.name, info.backend, info.dtype, info.device) == ("q", "transformers", "float32", "cpu")
    assert (info.vocab_size, info.hidden_size, info.layers, info.max_length) == (VOCAB, 32, 4, 50)
    assert info.eos_ids == (2, 5)
    assert info.kv_bytes_per_position == 4 * 2 * 2 * 8 * 4
    assert info.weight_bytes == sum(p.numel() for p in module.parameters()) * 4
    gone = weakref.ref(module.model.layers[0].mlp.up_proj.weight)
    del module
    model.close()
    model.close()
    gc.collect()
    assert gone() is None
    with pytest.raises(ModelError, match="q is closed"):
        model.forward(Batch.pack([0], [text(1, 1)], [0], [True]))


def test_unstated_context_length_is_limited_aloud() -> None:
    class Config:
        rope_parameters = None

    longest, reason = max_length(Config())
    assert longest == 4096
    assert "limited to 4096" in str(reason)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])  # by our own forward, and through its modules
def test_a_module_stays_as_it_is(family: str) -> None:
    module = tiny(family)
    t = text(9, 1)
    ids = torch.from_numpy(t.astype(np.int64))[None]
    before, state = module(input_ids=ids).logits, [(dict(vars(m)), dict(m._parameters)) for m in module.modules()]
    with torch.inference_mode():  # whose tensors could not be trained
        models = [TransformersModel(module, name="m") for _ in range(2)]
    for model in (*models, models[0]):
        row = model.kv.alloc()
        batch = Batch.pack([row], [t], [0], [True])
        close(model.forward(batch).logits(batch.wanted), before[0].detach().numpy())
        after = module(input_ids=ids).logits
        assert torch.equal(before, after)
        assert [(dict(vars(m)), dict(m._parameters)) for m in module.modules()] == state
        after.sum().backward()
        assert module.model.layers[0].self_attn.o_proj.weight.grad is not None
    for model in models:
        model.close()
    assert [(dict(vars(m)), dict(m._parameters)) for m in module.modules()] == state
    refused = tiny("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="is not causal"):
        TransformersModel(refused, name="m")
    assert refused.config._attn_implementation == "eager"
