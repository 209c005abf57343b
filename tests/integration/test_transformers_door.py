"""The door for transformers' users: a patched ``generate`` gives what the model's own gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import outpace
from outpace.errors import ModelError, ParameterError
from outpace.integrations import transformers as doors
from outpace.models.base import Batch
from outpace.models.torch.model import TransformersModel
from tests.gpu.test_recurrent import module_of as recurrent

from .test_architectures import FAMILIES as ARCHITECTURES
from .test_architectures import tiny

FAMILIES = ("llama", "qwen3", "gpt_neox")
PROMPT = torch.tensor([[3, 5, 9, 4, 5, 9, 4]])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    made = tiny(request.param)
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = 0, 2
    return made


@pytest.fixture
def patched(model: Any) -> Iterator[Any]:
    with outpace.patch(model, size=4):
        yield model
        assert not outpace.stats(model).own  # every call was drafted


def own(model: Any, *args: Any, **named: Any) -> Any:
    """What the model's own generate gives."""
    return type(model).generate(model, *args, **named)


def doubled(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that depends on the last token."""
    scores = scores.clone()
    scores[torch.arange(len(ids)), (ids[:, -1] + 1) % scores.shape[1]] += 1.5
    return scores


def early(ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """A stopping criterion of its own for every row."""
    return (ids[:, -1] % 7 == 3) & (ids.shape[1] > 12)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 16, "suppress_tokens": [5, 6, 7]},
        {"bad_words_ids": [[4, 5], [9]]},
        {"no_repeat_ngram_size": 2, "renormalize_logits": True},
        {"stopping_criteria": StoppingCriteriaList([early])},
        {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 8, 11, int(ids[-1]) % 40]},
    ],
)
def test_greedy_tokens_are_the_models_own(model: Any, asked: dict[str, Any]) -> None:
    ids = torch.cat([PROMPT, PROMPT.flip(1), PROMPT])
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    asked = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, **asked}
    expected = own(model, ids, **asked)
    with outpace.patch(model, size=4) as patched:
        assert torch.equal(model.generate(ids, **asked), expected)
        assert not patched.stats.own
    assert torch.equal(model.generate(ids, **asked, custom_generate=outpace.generate), expected)
    outpace.unpatch(model)


def around_images() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    text = {**ARCHITECTURES["gemma3_text"], "model_type": "gemma3_text"}
    torch.manual_seed(3)
    module = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    return module.eval()


KINDS: dict[str, Callable[[], Any]] = {
    "a hybrid": lambda: recurrent("Qwen3_5", "cpu"),
    "a hybrid that is a mixture": lambda: recurrent("Qwen3Next", "cpu"),
    "state spaces": lambda: recurrent("FalconH1", "cpu"),
    "a mixture": lambda: tiny("qwen3_moe"),
    "a mixture with windows and sinks": lambda: tiny("gpt_oss"),
    "compressed keys": lambda: tiny("deepseek_v3"),
    "a wrapper around images": around_images,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_drafts_its_own_tokens(kind: str) -> None:
    model = KINDS[kind]()
    ids, few = torch.tensor([[7, 8, 9, 8] * 4 + [11, 7], [5, 9] * 8 + [7, 8]]), (7, 8, 9)  # so that drafts are right
    asked = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0,
        "suppress_tokens": [i for i in range(model.get_output_embeddings().out_features) if i not in few],
    }  # fmt: skip
    expected = model.generate(ids, **asked)
    with outpace.patch(model, drafter="suffix", size=4) as patched:
        assert torch.equal(model.generate(ids, **asked), expected)
    assert not patched.stats.own
    assert patched.stats.total.accepted > 0


class Bias:
    """Row by row: [B, V]."""

    def __init__(self) -> None:
        self.bias = torch.stack([torch.linspace(-2, 2, 97), torch.linspace(2, -2, 97)])

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.bias[:, : scores.shape[1]]


class OneEach(LogitsProcessor):
    """Every call counts, and every row has a token of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        for row in range(len(ids)):
            scores[row, 5 + 7 * row + self.calls] = 100.0
        return scores


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (lambda: {"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenalty"),
        (lambda: {"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGram"),
        (lambda: {"logits_processor": LogitsProcessorList([Bias()])}, "caller's own"),
        (lambda: {"logits_processor": LogitsProcessorList([OneEach()])}, "caller's own"),
        (lambda: {"logits_processor": LogitsProcessorList([doubled]), "repetition_penalty": 1.2}, "caller's own"),
    ],
)
def test_processors_that_know_their_rows_are_the_models_own(model: Any, asked: Any, named: str) -> None:
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    common: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with outpace.patch(model, size=4) as patched:
        for prompt, given in ((ids, common), (PROMPT, common | {"num_beams": 1, "num_return_sequences": 2})):
            given = given | ({"do_sample": True} if "num_return_sequences" in given else {})
            torch.manual_seed(5)
            expected = own(model, prompt, **given, **asked())
            torch.manual_seed(5)
            assert torch.equal(model.generate(prompt, **given, **asked()), expected)
        assert [named in reason for reason in patched.stats.own] == [True]
        assert sum(patched.stats.own.values()) == 2
        if named != "caller's own" or asked()["logits_processor"] == [doubled]:  # one row, and pure
            assert torch.equal(model.generate(PROMPT, **common, **asked()), own(model, PROMPT, **common, **asked()))
            assert sum(patched.stats.own.values()) == 2


def test_drafters_that_a_call_names(patched: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
    expected = own(patched, PROMPT, **asked)
    for how in (
        {"assistant_model": tiny("llama")},
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2},
        {"assistant_early_exit": 1},
    ):
        assert torch.equal(patched.generate(PROMPT, **asked, **how), expected), how


def test_dict_outputs_have_the_scores_of_every_token(patched: Any) -> None:
    asked: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.3, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    }  # fmt: skip
    expected, found = own(patched, PROMPT, **asked), patched.generate(PROMPT, **asked)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(expected.scores) == len(found.logits)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)


def test_sampled_tokens_follow_torchs_seed(patched: Any) -> None:
    asked: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "top_k": 30, "top_p": 0.9
    }  # fmt: skip
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(patched.generate(PROMPT, **asked))
    assert found[0].shape[0] == 3
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.slow
def test_sampled_tokens_are_distributed_as_the_models_own(patched: Any) -> None:
    draws = 3000
    torch.manual_seed(5)
    asked: dict[str, Any] = {
        "max_new_tokens": 1, "do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.95,
        "num_return_sequences": draws, "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    reference = own(patched, PROMPT, **asked)
    p = reference.scores[0][0].softmax(-1)
    asked.update(return_dict_in_generate=False, output_scores=False)
    count = torch.bincount(patched.generate(PROMPT, **asked)[:, -1], minlength=len(p)).float()
    assert set(torch.nonzero(count).flatten().tolist()) <= set(torch.nonzero(p).flatten().tolist())
    kept = p > 0
    chi_square = float(((count[kept] - draws * p[kept]) ** 2 / (draws * p[kept])).sum())
    assert chi_square < 30  # 4 degrees of freedom: a chance of 5e-6


def test_streamers_get_every_token(patched: Any) -> None:
    class Words(list[int]):
        ended = False

        def put(self, tokens: torch.Tensor) -> None:
            self.extend(tokens.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    words = Words()
    found = patched.generate(PROMPT, max_new_tokens=20, do_sample=False, streamer=words)
    assert words == found[0].tolist()
    assert words.ended


def test_the_models_own_forward_works_beside_it(model: Any) -> None:
    expected = model(PROMPT).logits
    with outpace.patch(model, size=4):
        model.generate(PROMPT, max_new_tokens=4, do_sample=False)
        assert torch.equal(model(PROMPT).logits, expected)
        copied = copy.deepcopy(model)
    assert "generate" not in model.__dict__
    assert torch.equal(model(PROMPT).logits, expected)
    assert torch.equal(
        copied.generate(PROMPT, num_beams=2, max_new_tokens=4), own(model, PROMPT, num_beams=2, max_new_tokens=4)
    )


def test_what_cannot_be_drafted_is_the_models_own(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With the same tokens, draws of torch's generator included, and a reason that is logged once."""
    asked: dict[str, dict[str, Any]] = {
        "beam_search": {"num_beams": 2},
        "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
        "UnbatchedClassifierFreeGuidance": {"guidance_scale": 1.5, "do_sample": True},
        "attention_mask": {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1]]), "do_sample": True},
        "inputs_embeds": {"inputs_embeds": model.get_input_embeddings()(PROMPT).detach()},
        "max_length=132": {"max_new_tokens": 125, "stopping_criteria": StoppingCriteriaList([early])},
        "custom_generate": {"custom_generate": lambda model, input_ids, **_: input_ids[:, :2]},
    }
    with outpace.patch(model, size=4) as patched:
        for count, (named, given) in enumerate(asked.items(), 1):
            given = {"max_new_tokens": 6, "do_sample": False, **given}
            prompt = () if "inputs_embeds" in given else (PROMPT,)
            torch.manual_seed(5)
            expected = own(model, *prompt, **given)
            for _ in range(2):
                torch.manual_seed(5)
                found = model.generate(*prompt, **given)
                assert type(found) is type(expected)
                one, other = (getattr(answer, "sequences", answer) for answer in (found, expected))
                assert torch.equal(one, other), named
            assert named in [*patched.stats.own][-1]
            assert (patched.stats.calls, len(patched.stats.own)) == (2 * count, count)
            assert sum("undrafted" in message for message in caplog.messages) == count
        with pytest.raises(ValueError, match="not_a_keyword"):
            model.generate(PROMPT, not_a_keyword=1)
        with pytest.raises(TypeError):
            model.generate(*[None] * 40)
        assert patched.stats.calls == 2 * len(asked)
    with pytest.raises(ParameterError, match="beam_search: leave custom_generate out"):
        model.generate(PROMPT, num_beams=2, max_new_tokens=4, custom_generate=outpace.generate)
    outpace.unpatch(model)


def test_a_generate_within_another_one(patched: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected, inner = own(patched, PROMPT, **asked), []

    def nested(ids: torch.Tensor, _: Any) -> torch.Tensor:
        inner.append(patched.generate(PROMPT, **asked))
        return torch.zeros(len(ids), dtype=torch.bool)

    assert torch.equal(patched.generate(PROMPT, **asked, stopping_criteria=StoppingCriteriaList([nested])), expected)
    assert all(torch.equal(answer, expected) for answer in inner)
    assert outpace.stats(patched).own == {"a generate inside another one": len(inner)}
    outpace.patch(patched)  # which counts anew


def test_an_error_of_a_processor_is_the_callers(patched: Any) -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    for generate in (patched.generate, lambda *args, **named: own(patched, *args, **named)):
        with pytest.raises(ZeroDivisionError, match="mine"):
            generate(PROMPT, max_new_tokens=4, logits_processor=LogitsProcessorList([broken]))
    assert patched.generate(PROMPT, max_new_tokens=4).shape[0] == 1


def test_what_asks_for_nothing_is_drafted(model: Any) -> None:
    """Drafters that calls name do not pile up, nor do reasons that differ in numbers."""
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with outpace.patch(model) as patched:
        for given in ({"synced_gpus": False}, {"trust_remote_code": False}, {"logits_to_keep": 1}):
            assert torch.equal(model.generate(PROMPT, **asked, **given), own(model, PROMPT, **asked, **given))
        for size in range(1, 25):
            model.generate(PROMPT, **asked, prompt_lookup_num_tokens=size)
        assert patched.stats.own == {}
        assert len(patched._engines) < 12
        for longest in range(200, 203):
            model.generate(PROMPT, max_new_tokens=longest, stopping_criteria=StoppingCriteriaList([early]))
        assert [*patched.stats.own.values()] == [3]


@pytest.mark.parametrize("given", [{"drafter": "model:/nowhere"}, {"drafter": "ngram:size=99"}, {"size": 99}])
def test_a_drafter_that_cannot_be_is_refused_at_once(model: Any, given: dict[str, Any]) -> None:
    with pytest.raises(outpace.OutpaceError):
        outpace.patch(model, **given)
    assert not {"generate", "_outpace_door"} & vars(model).keys()


def test_stats_of_patched_calls(model: Any) -> None:
    with pytest.raises(ParameterError, match=r"not patched: call outpace.patch\(model\) first"):
        outpace.stats(model)
    asked: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    with outpace.patch(model, drafter="ngram", size=4) as patched:
        for batch in (1, 2):
            model.generate(PROMPT.expand(batch, -1), **asked)
        stats = outpace.stats(model)
        assert stats == patched.stats
        assert (stats.calls, stats.own, stats.notes) == (2, {}, ())
        assert stats.last is not None
        assert (stats.last.requests, stats.last.tokens, stats.total.tokens) == (2, 18, 27)
        assert stats.tokens_per_step == 27 / stats.total.steps
        assert set(stats.total.drafted_by) <= {"ngram"}
        model.generate(PROMPT, num_beams=2, max_new_tokens=3)
        assert repr(outpace.stats(model)).startswith("PatchStats(3 calls, 2 drafted: 27 tokens")
        assert outpace.stats(model).last is None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: outpace.generate("Hello"), r'use outpace.Engine.load\("demo"\).generate\("Hello"\)'),
        (lambda: outpace.generate(prompt="Hello"), r"custom_generate=outpace.generate"),
        (lambda: outpace.patch("gpt2"), r"not 'gpt2': AutoModelForCausalLM.from_pretrained\('gpt2'\)"),
        (lambda: outpace.unpatch("gpt2"), "outpace.unpatch takes a transformers model"),
        (lambda: outpace.stats(None), "not a NoneType"),
        (lambda: outpace.patch(SimpleNamespace(model=torch.nn.Linear(1, 1))), "give its .model"),
    ],
)
def test_what_is_no_model_is_refused_with_a_remedy(call: Any, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        call()


def test_training_mode_is_refused() -> None:
    with pytest.raises(ModelError, match=r"eval\(\)"):
        outpace.patch(tiny("llama").train())


def test_engine_load_takes_objects_in_memory(model: Any) -> None:
    expected = own(model, PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, PROMPT.shape[1] :]
    with outpace.Engine.load(model=model, size=4) as engine:
        assert list(engine.generate(PROMPT[0].tolist(), max_tokens=12).token_ids) == expected.tolist()
        with pytest.raises(ParameterError, match="no tokenizer"):
            engine.generate("text")
    assert torch.equal(own(model, PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, -12:], expected)
    with pytest.raises(ParameterError, match="dtype"):
        outpace.Engine.load(model=model, dtype="bfloat16")


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:60]
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    fast = Tokenizer(models.BPE(vocab=words, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def test_the_assisted_decoding_page(tmp_path: Any) -> None:
    """What transformers' page on assisted decoding does, anew and with small models: one line more than there."""
    words = tokenizer()
    size = len(words)
    for name, layers in (("target", 3), ("assistant", 1)):
        made = tiny("llama", vocab_size=size, num_hidden_layers=layers)
        made.generation_config.pad_token_id, made.generation_config.eos_token_id = 0, 2
        made.save_pretrained(tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "assistant")
    inputs = words("3+4=7, 4+3=", return_tensors="pt", return_token_type_ids=False)
    asked: dict[str, Any] = {**inputs, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**asked)

    outpace.patch(model, size=4)  # the one line

    assert torch.equal(model.generate(**asked, assistant_model=assistant), expected)
    assert torch.equal(model.generate(**asked, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(model.generate(**asked, assistant_early_exit=1), expected)
    sampled = model.generate(**{**asked, "do_sample": True}, assistant_model=assistant, temperature=0.5)
    assert sampled.shape[1] > inputs["input_ids"].shape[1]
    text = words.decode(expected[0, inputs["input_ids"].shape[1] :])
    stop = text[5:7]
    found = model.generate(**asked, tokenizer=words, stop_strings=stop)
    assert torch.equal(found, own(model, **asked, tokenizer=words, stop_strings=stop))
    streamer = TextIteratorStreamer(words, skip_prompt=True)
    thread = Thread(target=model.generate, kwargs={**asked, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()
    outpace.unpatch(model)
    assert "generate" not in model.__dict__


# -- where weights lie, and what they are ------------------------------------------------------------------------------


class Rounded(torch.nn.Linear):
    """Weights of whole numbers and a scale a row, as bitsandbytes and torchao keep them. ``activations``: those are
    rounded, too, by one scale for all tokens, as far as they are large (LLM.int8())."""

    def __init__(self, linear: torch.nn.Linear, activations: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.scale = torch.nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)
        self.bias, self.activations = linear.bias, activations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activations:
            scale = x.abs().max() / 15
            x = (x / scale).round() * scale
        return torch.nn.functional.linear(x, self.weight.float() * self.scale, self.bias)


def quantised(activations: bool) -> Any:
    made = tiny("llama", attention_bias=True)
    for layer in made.model.layers:
        for holder in (layer.self_attn, layer.mlp):
            for name, linear in list(holder.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(holder, name, Rounded(linear, activations))
    return made.eval()


def test_quantised_weights_are_served_by_the_modules_themselves() -> None:
    model = quantised(activations=False)
    expected = own(model, PROMPT, max_new_tokens=24, do_sample=False, eos_token_id=None)[0, PROMPT.shape[1] :]
    with outpace.Engine.load(model=model, size=4) as engine:
        assert isinstance(engine.model, TransformersModel)
        assert engine.model._own is None
        assert list(engine.generate(PROMPT[0].tolist(), max_tokens=24).token_ids) == expected.tolist()


def test_quantised_activations_that_couple_tokens_are_refused() -> None:
    with pytest.raises(ModelError, match="something besides attention couples its tokens"):
        outpace.Engine.load(model=quantised(activations=True))


def test_a_device_map_of_one_device_is_served_and_one_of_several_is_refused(tmp_path: Any) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    expected = own(model, PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, PROMPT.shape[1] :]
    with outpace.Engine.load(model=model, size=4) as engine:
        assert list(engine.generate(PROMPT[0].tolist(), max_tokens=12).token_ids) == expected.tolist()
    folder = {"offload_folder": tmp_path / "off"}
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i == 3 else "cpu" for i in range(4)}
    split = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, **folder)
    with pytest.raises(
        ModelError, match=r"weights lie on cpu, meta: load it on one device, or run `outpace export vllm`"
    ):
        outpace.Engine.load(model=split)


def test_weights_of_several_processes_are_refused() -> None:
    """As ``tp_plan`` shards them; what a process would draft, and when, differs from what the others would."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = tiny("llama"), init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(model.model.layers[0].mlp.up_proj.weight.detach(), mesh, [Shard(0)])
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(sharded)
        with pytest.raises(ModelError, match=r"weights lie in 1 processes \(tp_plan\).*`outpace export vllm`"):
            outpace.Engine.load(model=model)
    finally:
        torch.distributed.destroy_process_group()


def test_first_calls_from_several_threads_share_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = tiny("llama")
    fresh.generation_config.pad_token_id = 0
    expected = own(fresh, PROMPT, max_new_tokens=8, do_sample=False)
    opened: list[Any] = []
    make = doors.Patch.__init__

    def counted(self: Any, *args: Any) -> None:
        opened.append(self)
        make(self, *args)

    monkeypatch.setattr(doors.Patch, "__init__", counted)

    def call() -> torch.Tensor:
        found: torch.Tensor = fresh.generate(
            PROMPT, max_new_tokens=8, do_sample=False, custom_generate=outpace.generate
        )
        return found

    with ThreadPoolExecutor(4) as threads:
        answers = [thread.result() for thread in [threads.submit(call) for _ in range(4)]]
    assert all(torch.equal(answer, expected) for answer in answers)
    assert len(opened) == 1
    outpace.unpatch(fresh)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("llama", torch.bfloat16), ("llama", torch.float16), ("gemma3_text", torch.bfloat16)),
        *product(("llama", "qwen2", "qwen3", "gemma3_text", "granite", "olmo2", "phi3", "smollm3"), [torch.float32]),
    ],
    ids=str,
)
def test_described_models_on_a_cpu_are_computed_natively(family: str, dtype: torch.dtype) -> None:
    """In the type that they have, with torch's threads; the tokens are the model's own."""
    model = tiny(family, **({"pad_token_id": 0} if family == "phi3" else {}))
    for weight in model.parameters():  # as from_pretrained: rotations stay in float32
        weight.data = weight.data.to(dtype)
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with outpace.patch(model, size=4) as patch:
        info = patch.model.info
        assert (info.backend, info.dtype, info.kv_dtype) == ("native", *[str(dtype).removeprefix("torch.")] * 2)
        assert patch.model.threads == torch.get_num_threads()
        found = model.generate(PROMPT, **asked)
        assert not patch.stats.own
    if dtype == torch.float32:  # in 16 bits another rounding may decide
        assert torch.equal(found, own(model, PROMPT, **asked))


def test_what_the_native_backend_does_not_describe_goes_through_torch() -> None:
    model = tiny("llama")
    models = [tiny("gpt_neox"), tiny("llama").double(), tiny("llama", rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16,
    })]  # fmt: skip
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    cast, scaled = tiny("llama").half().float(), tiny("llama")
    scaled.model.rotary_emb.attention_scaling = 1.25
    for each in [*models, model, cast, scaled]:
        with outpace.patch(each, drafter="none") as patch:
            assert patch.model.info.backend == "transformers"


def test_far_positions_are_the_models_own() -> None:
    """Rotations that were cast with the weights and those of the configuration drift apart over positions."""
    ids = torch.arange(500)[None] * 7 % 90 + 3
    for cast, backend in [(False, "native"), (True, "transformers")]:
        model = tiny("llama", max_position_embeddings=512)
        if cast:
            model = model.half().float()
        with torch.no_grad():
            expected = model(ids).logits[0]
        with outpace.patch(model, drafter="none") as patch:
            assert patch.model.info.backend == backend
            row = patch.model.kv.alloc()
            batch = Batch.pack([row], [ids[0].numpy().astype(np.int32)], [0], [True])
            found = patch.model.forward(batch).logits(batch.wanted)
            patch.model.kv.free(row)
        assert np.abs(found - expected.numpy()).max() < 1e-3
