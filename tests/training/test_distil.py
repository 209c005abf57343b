"""Distillation: the student against Hugging Face's Llama, what it learns, and words of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from outpace.errors import ParameterError
from outpace.training.objectives.distil import DistilObjective, Student, chosen_layers
from outpace.training.options import DistilOptions
from outpace.training.target import DraftVocabulary
from tests.training import small

PARTS = small.target()


def student(layers: int = 2, *, frozen: bool = True, tied: bool = True, qk_norm: bool = False) -> Student:
    embedding = PARTS.embedding.clone()
    head = embedding if tied else small.target(1).head.clone()
    made = Student(small.decoder(layers, qk_norm), embedding, head, frozen=frozen)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=draw) * 0.2)
    return made


class Counting:
    """A teacher that goes on counting whatever was said."""

    def __init__(self) -> None:
        self.asked: list[torch.Tensor] = []

    def states(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.asked += sequences
        return [small.heard(its, PARTS) for its in sequences]


@pytest.mark.parametrize(("tied", "qk_norm"), [(True, False), (False, True)], ids=["llama", "qwen3"])
def test_it_is_what_it_says_it_is(tied: bool, qk_norm: bool) -> None:
    import transformers

    made = student(tied=tied, qk_norm=qk_norm)
    _, shape, tensors = DistilObjective(made, PARTS, DistilOptions()).export()
    kind = "Qwen3" if qk_norm else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=small.VOCAB, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        rms_norm_eps=shape.eps, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    missing, unexpected = model.load_state_dict({n: torch.from_numpy(t) for n, t in tensors.items()}, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if tied else set(), [])
    model.tie_weights()
    given_ = small.batch([9, 5, 2], PARTS)
    with torch.no_grad():
        packed = made(given_.tokens, given_.position, given_.starts) @ made.lm_head.T
        for a, b in pairwise(given_.starts):
            torch.testing.assert_close(packed[a:b], model(given_.tokens[None, a:b]).logits[0], atol=1e-5, rtol=1e-4)


def test_its_own_words_step_by_step_are_those_of_whole_forwards() -> None:
    made = student()
    said = made.continued(torch.tensor([3, 4, 5]), 6)
    for i in range(3, len(said)):
        with torch.no_grad():
            normed = made(said[:i], torch.arange(i), (0, i))[-1]
        assert int((normed @ made.lm_head.T).argmax()) == int(said[i])
    draws = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    words = [made.continued(torch.tensor([3]), 12, draw).tolist() for draw in draws]
    assert words[0] == words[1] != words[2]


@pytest.mark.parametrize("loss", ["kl", "reverse", "tv"])
@pytest.mark.parametrize("words", [None, small.WORDS], ids=["all tokens", "some tokens"])
def test_it_learns_to_count(loss: str, words: DraftVocabulary | None) -> None:
    warm, given_ = student(), small.batch([20, 12, 7], PARTS)
    small.fit(DistilObjective(warm, PARTS, DistilOptions(), words), given_, 6, 0.02)  # tv is flat where all is wrong
    made = DistilObjective(warm, PARTS, DistilOptions(loss=loss), words)
    first, last = small.fit(made, given_, 25, 0.02)
    assert last < 0.6 * first
    assert made.simulate(given_).tokens_per_step > 2.2


def test_simulation_is_what_serving_would_do() -> None:
    made, given_ = DistilObjective(student(), PARTS, DistilOptions(depth=3)), small.batch([17, 9], PARTS)
    small.fit(made, given_, 8, 0.02)
    accepted = []
    for b in range(2):
        tokens = given_.tokens[small.rows(given_, b)]
        runs = []
        for i in range(len(tokens)):
            drafted = made.network.continued(tokens[: i + 1], 3)[i + 1 :]
            pairs = zip(drafted.tolist(), tokens[i + 1 :].tolist(), strict=False)
            runs.append(int(np.cumprod([a == b for a, b in pairs]).sum()))
        accepted.append(runs)
    found = made.simulate(given_)
    assert small.same(found, *small.served(given_, accepted))
    assert 1 < found.tokens_per_step < 4


def test_the_embedding_learns_when_it_is_free() -> None:
    made = DistilObjective(student(frozen=False), PARTS, DistilOptions())
    made.loss(small.batch([9], PARTS))[0].backward()
    gradient = made.network.embed_tokens.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_on_policy_asks_the_teacher_about_the_students_words() -> None:
    teacher, given_ = Counting(), small.batch([12, 9], PARTS)
    options = DistilOptions(on_policy=1.0, on_policy_tokens=5)
    made = DistilObjective(student(), PARTS, options, teacher=teacher)
    mixed = made.mixed(given_)
    assert len(teacher.asked) == 2
    for b, own in enumerate(teacher.asked):
        its, cut = small.rows(mixed, b), len(own) - 5
        assert mixed.tokens[its].tolist() == own.tolist()
        assert own[:cut].tolist() == given_.tokens[small.rows(given_, b)][:cut].tolist()
        assert torch.nonzero(mixed.loss_mask[its]).flatten().tolist() == list(range(cut - 1, len(own) - 1))
    assert made.mixed(given_).tokens.tolist() == mixed.tokens.tolist()
    assert made.mixed(replace(given_, seed=5)).tokens.tolist() != mixed.tokens.tolist()
    with pytest.raises(ValueError, match="teacher"):
        DistilObjective(student(), PARTS, options)
    first, last = small.fit(made, given_, 15, 0.02)
    assert last < 0.8 * first


def test_layers_to_begin_as() -> None:
    found = [chosen_layers(30, 4, "first"), chosen_layers(30, 4, "last"), chosen_layers(30, 4, "even")]
    assert found == [[0, 1, 2, 3], [26, 27, 28, 29], [0, 10, 19, 29]]
    with pytest.raises(ParameterError, match="31"):
        chosen_layers(30, 31, "first")
