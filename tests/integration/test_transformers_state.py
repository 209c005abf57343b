"""What may happen to a model beside its patch: whatever it has become, a patched ``generate`` gives what the unpatched
model's own gives in the same state, and nothing of the patch stays.

The right tokens come from transformers' own generate of a copy that was never patched and was changed alike.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from threading import Event, Thread, current_thread
from typing import Any

import peft
import pytest
import torch
from torch.nn.utils import parametrizations, prune
from transformers import AutoModelForSequenceClassification, DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

import outpace
from outpace.errors import ModelError, ParameterError
from outpace.models.native.model import NativeModel
from outpace.models.native.output import NativeOutput
from outpace.models.torch import attention as attention_of_rows

from .test_architectures import tiny

FAMILIES = ("llama", "gpt_oss")  # by our own forward, and through the model's modules
PROMPT = torch.tensor([[3, 5, 9, 4, 5, 9, 4]])
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# A gap of scores under which two orders of sums may choose differently, as a share of the largest score.
NEAR = {torch.float32: 1e-4, torch.float64: 1e-9, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# What an output's cache, and a forward's, is called in this release.
CACHE = next(name for name in ("cache", "past_key_values") if name in GenerateDecoderOnlyOutput.__dataclass_fields__)
Change = Callable[[Any], "AbstractContextManager[Any] | None"]


def attention(model: Any) -> Any:
    return model.model.layers[-1].self_attn


@torch.no_grad()
def in_place(model: Any) -> None:
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.05)


def optimizer_step(model: Any) -> None:
    was = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        model(PROMPT.clone(), labels=PROMPT.clone()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for parameter, own in zip(model.parameters(), was, strict=True):
        parameter.requires_grad_(own)


def a_row_of_data(model: Any) -> None:
    model.lm_head.weight.data[11] += 5.0


def a_column_of_data(model: Any) -> None:
    attention(model).o_proj.weight.data[:, 3] += 5.0


def other_data(model: Any) -> None:
    weight = attention(model).v_proj.weight
    weight.data = torch.randn_like(weight)


def state_dict(model: Any) -> None:
    model.load_state_dict({name: tensor * 0.7 for name, tensor in model.state_dict().items()})


def assigned_state_dict(model: Any) -> None:
    model.load_state_dict({name: tensor * 0.7 for name, tensor in model.state_dict().items()}, assign=True)


def new_parameter(model: Any) -> None:
    for _ in range(3):  # the second may lie where the first was
        head = model.lm_head
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * 0.3)


def new_module(model: Any) -> None:
    old = attention(model).o_proj
    new = torch.nn.Linear(old.in_features, old.out_features, old.bias is not None)
    attention(model).o_proj = new.to(old.weight.device, old.weight.dtype).eval()


def layers_change_places(model: Any) -> None:
    layers = list(model.model.layers)
    for at, layer in enumerate(reversed(layers)):
        layer.self_attn.layer_idx = at
        model.model.layers[at] = layer


def more_tokens(model: Any) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 5, mean_resizing=False)


def rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.6)


def epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5


def scaling(model: Any) -> None:
    attention(model).scaling *= 3.0


def hook(model: Any) -> AbstractContextManager[Any]:
    return model.model.layers[0].register_forward_hook(lambda _m, _i, out: out * 2.0)  # type: ignore[no-any-return]


def pre_hook(model: Any) -> AbstractContextManager[Any]:
    return model.lm_head.register_forward_pre_hook(lambda _m, inputs: (-inputs[0],))  # type: ignore[no-any-return]


def hidden_states_once(model: Any) -> None:
    """After it transformers' own hooks stay."""
    with torch.no_grad(), torch.inference_mode(False):
        model(PROMPT, output_hidden_states=True, output_attentions=False)


@contextmanager
def global_hook(model: Any) -> Iterator[None]:
    head = weakref.ref(model.lm_head)

    def negated(module: Any, _inputs: Any, output: Any) -> Any:
        return -output if module is head() else None

    with torch.nn.modules.module.register_module_forward_hook(negated):
        yield


def weight_norm(model: Any) -> None:
    if not torch.nn.utils.parametrize.is_parametrized(model.lm_head):
        parametrizations.weight_norm(model.lm_head)
        with torch.no_grad():
            model.lm_head.parametrizations.weight.original0.mul_(torch.rand(len(model.lm_head.weight), 1))


def pruned(model: Any) -> None:
    prune.random_unstructured(attention(model).q_proj, "weight", 0.7)


def forward_of_anything(model: Any) -> None:
    """As libraries wrap it: a signature that names nothing."""
    own = type(model).forward

    def forward(*args: Any, **named: Any) -> Any:
        out = own(model, *args, **named)
        out.logits = -out.logits
        return out

    model.forward = forward


def forward_of_a_part(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda x: -type(norm).forward(norm, x)


def other_inputs(model: Any) -> None:
    """As peft's prompt learning does it."""
    own = type(model).prepare_inputs_for_generation

    def prepared(*args: Any, **named: Any) -> Any:
        inputs = own(model, *args, **named)
        inputs["input_ids"] = (inputs["input_ids"] + 1) % 90
        return inputs

    model.prepare_inputs_for_generation = prepared


def lora(model: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def adapted(model: Any) -> None:
    lora(model)


def other_adapter(model: Any) -> None:
    with_two = lora(model)
    with_two.add_adapter("other", with_two.peft_config["default"])
    with_two.set_adapter("other")
    with_two.eval()


def merged(model: Any) -> None:
    lora(model).merge_adapter()


def merged_and_unloaded(model: Any) -> None:
    lora(model).merge_and_unload()


def disabled(model: Any) -> AbstractContextManager[Any]:
    return lora(model).disable_adapter()  # type: ignore[no-any-return]


@contextmanager
def compiled(model: Any) -> Iterator[None]:
    model.compile(backend="eager")
    yield
    model._compiled_call_impl = None


def sdpa(model: Any) -> None:
    if model._supports_sdpa:
        model.set_attn_implementation("eager" if model.config._attn_implementation == "sdpa" else "sdpa")


def quoted(name: str, *args: Any) -> Change:
    def change(model: Any) -> None:
        getattr(model, name)(*args)

    change.__name__ = "_".join([name, *(str(arg).removeprefix("torch.") for arg in args)])
    return change


def autocast(_model: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def inference_mode(_model: Any) -> AbstractContextManager[Any]:
    return torch.inference_mode()


CHANGES: tuple[Change, ...] = (
    in_place, optimizer_step, a_row_of_data, a_column_of_data, other_data, state_dict, assigned_state_dict,
    new_parameter, new_module, layers_change_places, more_tokens, rotary, epsilon, scaling, hook, pre_hook,
    hidden_states_once, global_hook, weight_norm, pruned, forward_of_anything, forward_of_a_part, other_inputs,
    adapted, other_adapter, merged, merged_and_unloaded, disabled, compiled, sdpa, autocast, inference_mode,
    quoted("train"), quoted("to", torch.bfloat16), quoted("half"), quoted("double"), quoted("requires_grad_", False),
)  # fmt: skip


def cases() -> list[Any]:
    """Each change alone, and pairs of them."""
    draw, many = random.Random(20261125), [change for change in CHANGES if change is not compiled]
    pairs = [tuple(draw.sample(many, 2)) for _ in range(24)]
    return [(change,) for change in CHANGES] + [pytest.param(pair, marks=pytest.mark.slow) for pair in pairs]


def own(model: Any, *args: Any, **named: Any) -> Any:
    """What the model's own generate gives."""
    return type(model).generate(model, *args, **named)


def require_same_answer(model: Any, reference: Any) -> Any:
    """``model``'s generate gives what ``reference``'s own does, up to near-ties. Returns the tokens, or the error."""
    asked = GREEDY | {"return_dict_in_generate": True, "output_scores": True}
    try:
        expected = own(reference, PROMPT, **asked)
    except Exception as error:
        with pytest.raises(type(error)):
            model.generate(PROMPT, **GREEDY)
        return type(error)
    found = model.generate(PROMPT, **GREEDY)
    assert found.shape == expected.sequences.shape
    for at, scores in enumerate(expected.scores):
        a, b = (int(tokens[0, PROMPT.shape[1] + at]) for tokens in (expected.sequences, found))
        if a != b:
            gap, largest = float(scores[0, a] - scores[0, b]), float(scores[0].abs().max())
            assert gap <= NEAR[model.dtype] * max(1.0, largest), f"token {at}: {a} expected, {b} found"
            break
    return expected.sequences


def require_same_module(model: Any, reference: Any) -> None:
    """Nothing of a patch is left in ``model``."""
    parts, others = list(model.modules()), list(reference.modules())
    assert len(parts) == len(others)
    for part, other in zip(parts, others, strict=True):
        assert type(part).__name__ == type(other).__name__
        assert vars(part).keys() == vars(other).keys()
        assert part.training == other.training
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks"):
            assert len(getattr(part, hooks)) == len(getattr(other, hooks)), hooks
    assert model.config.to_dict() == reference.config.to_dict()
    assert model.config._attn_implementation == reference.config._attn_implementation
    for (name, tensor), (other_name, theirs) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert (name, tensor.requires_grad, tensor.dtype) == (other_name, theirs.requires_grad, theirs.dtype)
        assert tensor.is_inference() == theirs.is_inference()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param, num_hidden_layers=2)


@pytest.mark.filterwarnings("ignore")  # peft's and torch's, about what is done here on purpose
@pytest.mark.parametrize("changes", cases(), ids=lambda changes: "+".join(change.__name__ for change in changes))
def test_changes_count(model: Any, changes: tuple[Change, ...]) -> None:
    reference = copy.deepcopy(model)
    outpace.patch(model, size=3)
    require_same_answer(model, reference)
    with ExitStack() as contexts:
        for change in changes:
            for each in (reference, model):
                torch.manual_seed(5)
                contexts.enter_context(change(each) or nullcontext())
            require_same_answer(model, reference)
    require_same_answer(model, reference)
    outpace.unpatch(model)
    require_same_module(model, reference)


def test_the_changes_would_be_seen() -> None:
    """Most of them give other tokens: stale ones would be found."""
    seen = set()
    for change in (in_place, a_row_of_data, a_column_of_data, other_data, state_dict, new_parameter, rotary, hook):
        reference, changed = (tiny("llama", num_hidden_layers=2) for _ in range(2))
        torch.manual_seed(5)
        with change(changed) or nullcontext():
            if not torch.equal(own(changed, PROMPT, **GREEDY), own(reference, PROMPT, **GREEDY)):
                seen.add(change)
    assert len(seen) >= 7


def test_calls_that_change_nothing_read_nothing_again(model: Any) -> None:
    with outpace.patch(model, size=3) as patched:
        model.generate(PROMPT, **GREEDY)
        served, engine = patched.model, patched.engine()
        for asked in ({"num_beams": 2}, {"return_dict_in_generate": True}, {"prompt_lookup_num_tokens": 2}, {}):
            model.generate(PROMPT, **GREEDY, **asked)
        model(PROMPT)
        assert patched.model is served
        assert patched.engine() is engine


class Stop:
    """Everything that a call may call: raises KeyboardInterrupt the time after ``left`` more."""

    def __init__(self, left: int) -> None:
        self.left = left

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def processor(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count()
        return scores

    def criterion(self, ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        self.count()
        return torch.zeros(len(ids), dtype=torch.bool)

    def put(self, _tokens: torch.Tensor) -> None:
        self.count()

    def attention(self, *args: Any, **named: Any) -> torch.Tensor:
        self.count()
        return ATTENTION(*args, **named)

    @property
    def forward(self) -> Callable[..., NativeOutput]:
        def forward(model: NativeModel, *args: Any) -> NativeOutput:
            self.count()
            return FORWARD(model, *args)

        return forward


ATTENTION, FORWARD = attention_of_rows.mixed, NativeModel.run


def interruptions(after: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    yield {"logits_processor": LogitsProcessorList([Stop(after).processor])}
    yield {"stopping_criteria": StoppingCriteriaList([Stop(after).criterion])}
    yield {"streamer": Stop(after)}
    with monkeypatch.context() as context:  # in a forward of its own
        context.setattr(attention_of_rows, "mixed", Stop(after).attention)
        context.setattr(NativeModel, "run", Stop(after).forward)
        yield {}


@pytest.mark.parametrize("changed", [False, True])  # then, the forward is one of those that prove it again
def test_an_interrupted_call_leaves_everything_whole(
    model: Any, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = copy.deepcopy(model)
    outpace.patch(model, size=3)
    for after in (0, 2, 5):
        for named in interruptions(after, monkeypatch):
            if changed:
                for each in (model, reference):
                    torch.manual_seed(after)
                    in_place(each)
            with pytest.raises(KeyboardInterrupt):
                model.generate(PROMPT, **GREEDY, **named)
        require_same_answer(model, reference)
    outpace.unpatch(model)
    require_same_module(model, reference)


def test_generate_inside_generate(model: Any) -> None:
    expected, seen = own(model, PROMPT, **GREEDY), []

    def processor(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(model.generate(PROMPT, **GREEDY))
        return scores

    def criterion(ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        seen.append(model.generate(PROMPT, **GREEDY))
        with pytest.raises(ParameterError, match="generate is running"):
            outpace.unpatch(model)
        with pytest.raises(ParameterError, match="inside another one"):
            own(model, PROMPT, **GREEDY, custom_generate=outpace.generate)
        return torch.zeros(len(ids), dtype=torch.bool)

    outpace.patch(model, size=3)
    asked: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([processor]), "stopping_criteria": StoppingCriteriaList([criterion])
    }  # fmt: skip
    thread = Thread(target=lambda: seen.append(model.generate(PROMPT, **GREEDY, **asked)))
    thread.start()
    seen.append(model.generate(PROMPT, **GREEDY))
    thread.join()
    assert len(seen) > 10
    assert all(torch.equal(tokens, expected) for tokens in seen)
    outpace.unpatch(model)


def test_an_old_patch_does_not_undo_a_newer_one(model: Any) -> None:
    expected = own(model, PROMPT, **GREEDY)
    old = outpace.patch(model, size=3)
    with outpace.patch(model, size=2) as new:
        old.close()
        assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
        assert new.stats.calls == 1
        assert new.stats.own == {}
        with pytest.raises(ParameterError, match="undone"):
            old.engine()
    assert not {"generate", "_outpace_door"} & vars(model).keys()


@pytest.mark.parametrize("again", [False, True])  # patched again meanwhile
@pytest.mark.parametrize("loop", [{}, {"custom_generate": outpace.generate}])
def test_calls_that_wait_while_the_patch_is_undone(model: Any, again: bool, loop: dict[str, Any]) -> None:
    expected, found = own(model, PROMPT, **GREEDY), []
    old, waits = outpace.patch(model, size=3), Event()

    class Lock:
        """The patch's own, and says when somebody comes to wait for it."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            if current_thread() is caller:
                waits.set()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    old.lock = Lock(old.lock)
    generate = partial(own, model) if loop else model.generate
    caller = Thread(target=lambda: found.append(generate(PROMPT, **GREEDY, **loop)))
    with old.lock:
        caller.start()
        assert waits.wait(60)
        old.close()
        new = outpace.patch(model, size=2) if again else None
    caller.join()
    assert torch.equal(found[0], expected)
    assert not old._engines
    if new is not None:
        assert (new.stats.calls, new.stats.own) == (1, {})
    outpace.unpatch(model)
    assert not {"generate", "_outpace_door"} & vars(model).keys()


def test_several_serve_one_module(model: Any) -> None:
    """A patch, engines over the module, and the module as its own assistant; in half precision they share weights."""
    for kind in (torch.float32, torch.float16):
        model.to(kind)
        reference = copy.deepcopy(model)
        expected = own(model, PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
        outpace.patch(model, size=3)
        for _ in range(2):
            with outpace.Engine.load(model=model, size=3) as one, outpace.Engine.load(model=model, size=3) as two:
                for engine in (one, two, one):
                    assert list(engine.generate(PROMPT[0].tolist(), max_tokens=8).token_ids) == expected
                    assert model.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist() == expected
                    with torch.autocast("cpu"):
                        assert list(engine.generate(PROMPT[0].tolist(), max_tokens=8).token_ids) == expected
            found = model.generate(PROMPT, **GREEDY, assistant_model=model)
            assert found[0, PROMPT.shape[1] :].tolist() == expected
        outpace.unpatch(model)
        require_same_module(model, reference)


def test_an_engine_over_a_changed_module_says_so(model: Any) -> None:
    with outpace.Engine.load(model=model, size=3) as engine:
        engine.generate(PROMPT[0].tolist(), max_tokens=4)
        in_place(model)
        with pytest.raises(ModelError, match=r"has changed since .* make a new engine"):
            engine.generate(PROMPT[0].tolist(), max_tokens=4)


@pytest.mark.filterwarnings("ignore")  # peft's
def test_wrappers(model: Any) -> None:
    reference = lora(copy.deepcopy(model))
    adapted = lora(model)
    adapted.load_state_dict(reference.state_dict())
    whole = torch.nn.DataParallel(torch.compile(adapted, backend="eager"))
    patched = outpace.patch(whole, size=3)
    expected = reference.generate(input_ids=PROMPT, **GREEDY)
    assert torch.equal(adapted.generate(input_ids=PROMPT, **GREEDY), expected)
    assert outpace.stats(adapted).calls == 1
    assert not patched.stats.own
    outpace.unpatch(whole)
    assert "generate" not in vars(adapted.get_base_model())


@pytest.mark.filterwarnings("ignore")  # peft's
def test_the_adapter_at_work_counts_where_prefixes_are_kept(model: Any) -> None:
    """What was kept under one adapter is not gone on with under another; nor is another scale."""
    prompt = PROMPT.repeat(1, 12)

    def tokens(model: Any) -> Any:
        return model.generate(input_ids=prompt, **GREEDY)

    torch.manual_seed(7)
    adapted = lora(model)
    adapted.add_adapter("other", adapted.peft_config["default"])
    adapted.eval()  # a new adapter's dropout is on
    reference = copy.deepcopy(adapted)
    answers = []
    with outpace.patch(adapted, size=3, prefix_rows=4) as patched:
        for name in ("default", "other", "default"):
            for each in (adapted, reference):
                each.set_adapter(name)
            for _ in range(2):
                answers.append(tokens(reference))
                assert torch.equal(tokens(adapted), answers[-1])
        for each in (adapted, reference):
            for part in each.modules():
                if isinstance(getattr(part, "scaling", None), dict):
                    part.scaling["default"] *= 6
        assert torch.equal(tokens(adapted), tokens(reference))
        assert not torch.equal(answers[0], answers[2])
        assert patched.stats.own == {}
    with outpace.Engine.load(model=adapted, size=3) as engine:
        engine.generate(prompt[0].tolist(), max_tokens=4)
        adapted.set_adapter("other")
        with pytest.raises(ModelError, match="has changed since"):
            engine.generate(prompt[0].tolist(), max_tokens=4)


def test_weights_lie_alone_once_nobody_serves_them(model: Any, tmp_path: Any) -> None:
    """safetensors saves no tensors that share memory. While two serve the module, one of them leaves them together."""
    from safetensors.torch import save_model

    model.half()
    expected = own(model, PROMPT, **GREEDY)
    with outpace.Engine.load(model=model, size=3) as engine:
        with outpace.patch(model, size=3):
            assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
        assert engine.generate(PROMPT[0].tolist(), max_tokens=4).token_ids
    save_model(model, str(tmp_path / "model.safetensors"))
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters())
    assert torch.equal(own(model, PROMPT, **GREEDY), expected)


def test_copies_are_not_patched(model: Any, tmp_path: Any) -> None:
    model.half()
    expected, reference = own(model, PROMPT, **GREEDY), copy.deepcopy(model)
    with outpace.patch(model, size=3) as patched:
        model.generate(PROMPT, **GREEDY)
        torch.save(model, tmp_path / "whole.pt")
        for each in (model, reference):  # it notes the type in the configuration
            each.save_pretrained(tmp_path / "folder")
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(tmp_path / "whole.pt", weights_only=False),
            type(model).from_pretrained(tmp_path / "folder", attn_implementation="eager"),
        ]
        calls = patched.stats.calls
        for each in copies:
            assert torch.equal(each.generate(PROMPT, **GREEDY), expected)
        assert patched.stats.calls == calls
    require_same_module(model, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_nobody_else_holds_is_freed(family: str) -> None:
    model = tiny(family, num_hidden_layers=2)
    patched, expected = outpace.patch(model, size=3), own(model, PROMPT, **GREEDY)
    gone: list[weakref.ref[Any]] = []
    for _ in range(3):
        assistant = tiny("llama", num_hidden_layers=1)
        for _ in range(2):
            assert torch.equal(model.generate(PROMPT, **GREEDY, assistant_model=assistant), expected)
            assistant.half()  # it is followed, too
        gone += [weakref.ref(assistant), weakref.ref(assistant.model.layers[0].mlp.up_proj.weight)]
    assert not patched.stats.own
    del assistant
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 6
    gone = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model
    gc.collect()
    assert gone[0]() is None
    patched.close()
    gc.collect()
    assert gone[1]() is None


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32])
def test_ids_of_every_type(kind: torch.dtype) -> None:
    model = tiny("llama", num_hidden_layers=2)
    try:
        expected: Any = own(model, PROMPT.to(kind), **GREEDY)
    except Exception as error:
        expected = type(error)
    with outpace.patch(model, size=3):
        if isinstance(expected, type):
            with pytest.raises(expected):
                model.generate(PROMPT.to(kind), **GREEDY)
            return
        found = model.generate(PROMPT.to(kind), **GREEDY)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("asked", [{}, {"use_cache": False}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # whose windows' caches keep the last positions alone
def test_a_returned_cache_can_be_gone_on_with(family: str, asked: dict[str, Any]) -> None:
    model = tiny(family, num_hidden_layers=2)
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    asked = {**GREEDY, "attention_mask": mask, "return_dict_in_generate": True, **asked}
    expected = own(model, ids, **asked)
    with outpace.patch(model, size=3) as patched:
        found = model.generate(ids, **asked)
        assert patched.stats.own == {}
    assert torch.equal(found.sequences, expected.sequences)
    caches = found.get(CACHE), expected.get(CACHE)
    if not asked.get("use_cache", True):
        assert caches == (None, None)
        return
    assert type(caches[0]) is type(caches[1])
    assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()) == found.sequences.shape[1] - 1
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(a[1], b[1], rtol=1e-4, atol=1e-4)  # the row without padding
    more = torch.cat([found.sequences, ids[:, 3:5]], dim=1)
    mask = torch.cat([mask, mask.new_ones((2, more.shape[1] - mask.shape[1]))], dim=1)
    if "cache_implementation" not in asked:  # a static one is as long as the call that made it
        both = [own(model, more, attention_mask=mask, **{CACHE: cache}, **GREEDY) for cache in caches]
        assert torch.equal(*both)


def test_a_given_cache_is_filled(model: Any) -> None:
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    expected = own(model, PROMPT, **GREEDY, **{CACHE: caches[0]})
    with outpace.patch(model, size=3):
        assert torch.equal(model.generate(PROMPT, **GREEDY, **{CACHE: caches[1]}), expected)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() > 0


def test_modules_that_generate_no_text_are_refused_as_such() -> None:
    model = tiny("llama", num_hidden_layers=2)
    for module in (AutoModelForSequenceClassification.from_config(model.config).eval(), model.model):
        for take in (outpace.patch, lambda module: outpace.Engine.load(model=module)):
            with pytest.raises(ModelError, match="generates no text: load the checkpoint with AutoModelForCausalLM"):
                take(module)
        assert not {"generate", "_outpace_door"} & vars(module).keys()
    with compiled(model), pytest.raises(ModelError, match="it is compiled"):
        outpace.patch(model)


def test_an_engine_takes_a_wrapped_module(model: Any) -> None:
    expected = own(model, PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    with outpace.Engine.load(model=torch.nn.DataParallel(model), size=3) as engine:
        assert list(engine.generate(PROMPT[0].tolist(), max_tokens=8).token_ids) == expected
    with pytest.raises(ModelError, match="a transformers PreTrainedModel"):
        outpace.Engine.load(model=model.lm_head)
    model.model.layers[0].train()
    with pytest.raises(ModelError, match=r"eval\(\)"):
        outpace.Engine.load(model=model)
