"""``outpace train distil``, put together; and a student as a folder that loads like any other model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from outpace.common.files import write_json
from outpace.drafters.learned.configs import Decoder
from outpace.errors import Argument, ParameterError
from outpace.models.base import Model
from outpace.models.load import Source
from outpace.models.text.tokenizer import Tokenizer
from outpace.models.weights import safetensors
from outpace.training.hidden_states import forward_states, open_target
from outpace.training.loop import Loop
from outpace.training.networks.student import CHOICES, Student, chosen_layers
from outpace.training.objectives.distil import DistilObjective, DistilOptions
from outpace.training.setup import Bench, Job, prepared, shaped_as

INITS = ("scratch", *CHOICES)
RECIPE = "training.json"


@dataclass(frozen=True, slots=True)
class StudentShape:
    """``layers`` like the target's; ``init``: scratch, or the target's first, last or evenly spread ones; ``frozen``:
    embedding and head stay the target's; ``all_tokens``: the loss looks at all, not at the draft vocabulary's."""

    layers: int = 4
    init: Literal["scratch", "first", "last", "even"] = "even"
    frozen: bool = True
    all_tokens: bool = False

    def check(self) -> None:
        """Raises ParameterError."""
        if self.init not in INITS:
            raise ParameterError(Argument("init", self.init), f" is not known: use one of {', '.join(INITS)}")
        if self.layers < 1:
            raise ParameterError(Argument("layers", self.layers), " is out of range: give at least 1")


class NativeTeacher:
    """The target as it serves, asked about what a student said."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def states(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """See ``Teacher``: bfloat16."""
        tokens = [its.cpu().numpy().astype(np.int32) for its in sequences]
        found = forward_states(self._model, tokens, (self._model.info.layers - 1,))
        return [torch.from_numpy(its[:, 0].view(np.int16)).view(torch.bfloat16) for its in found]


@contextmanager
def open_run(job: Job, shape: StudentShape, options: DistilOptions) -> Iterator[Loop]:
    """A training that is ready to run; raises as ``setup.prepared`` does. It reads no hidden states."""
    options.check()
    shape.check()
    with ExitStack() as stack:
        bench = stack.enter_context(prepared(job, lambda layers: ()))
        teacher = None
        if options.on_policy:
            target = open_target(bench.answers.meta, job.threads)
            stack.callback(target.close)
            teacher = NativeTeacher(target)
        words = None if shape.all_tokens else bench.vocabulary
        student = student_of(bench, shape).to(bench.device)
        objective = DistilObjective(student, bench.parts.to(bench.device), options, words, teacher)
        keep = partial(write, tokenizer_of(bench.source))
        yield bench.loop("distil", objective, {**asdict(shape), **asdict(options)}, keep)


def student_of(bench: Bench, shape: StudentShape) -> Student:
    """A student at its beginning. Raises ParameterError where the target's layers are no Llama's."""
    weights, parts = bench.weights, bench.parts
    last = weights.decoder.layers - 1
    qk_norm = shape.init != "scratch" and weights.vector(last, "q_norm") is not None
    embedding = parts.embedding if parts.embedding_scale == 1 else parts.embedding * parts.embedding_scale
    head = parts.head
    if not shape.frozen:  # the target keeps its own
        tied = head is embedding
        embedding = embedding.clone()
        head = embedding if tied else head.clone()
    decoder = shaped_as(weights, shape.layers, qk_norm)
    made = Student(decoder, embedding, head, frozen=shape.frozen, seed=bench.job.basics.seed)
    if shape.init == "scratch":
        return made
    its = weights.decoder
    if its.family.name not in ("llama", "mistral", "qwen3") or weights.vector(last, "q_bias") is not None:
        raise ParameterError(
            f"a student cannot begin as layers of {bench.source.name}, which are no Llama's: give ",
            Argument("init", "scratch"),
        )
    layers = []
    for i in chosen_layers(its.layers, shape.layers, shape.init):
        norms = {name: weights.vector(i, name) for name in ("q_norm", "k_norm")}
        layers.append({**weights.layer(i), **{name: norm for name, norm in norms.items() if norm is not None}})
    made.take(layers, parts.final_norm)
    return made


def tokenizer_of(source: Source) -> Tokenizer:
    """Raises ModelError."""
    return Tokenizer.from_folder(source.path) if source.gguf is None else Tokenizer.from_gguf(source.gguf)


def write(
    tokenizer: Tokenizer,
    folder: Path,
    method: str,
    shape: Decoder,
    tensors: Mapping[str, Any],
    target: Mapping[str, Any],
    recipe: Mapping[str, Any],
) -> None:
    """A model folder in Hugging Face's layout, bfloat16; config.json last, so that it is whole or none.

    ``method``, ``target`` and ``recipe`` go beside it: see ``loop.Write``. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    safetensors.write(folder / "model.safetensors", tensors, "BF16")
    write_json(folder / RECIPE, {"method": method, "target": dict(target), "recipe": dict(recipe)})
    config = {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "dtype": "bfloat16",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "eos_token_id": list(tokenizer.eos_ids),
    }
    write_json(folder / "config.json", config)
