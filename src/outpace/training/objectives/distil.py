"""A small decoder that learns the target's distribution (DistillSpec, arXiv 2310.08461)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.common.files import write_json
from outpace.drafters.learned.config import Decoder
from outpace.drafters.learned.networks.layers import Layer, Norm, Rope, initialise
from outpace.errors import Argument, ParameterError
from outpace.models.base import Model
from outpace.models.load import Source, resolve
from outpace.models.weights import safetensors
from outpace.text.tokenizer import Tokenizer, differences
from outpace.training.hidden_states import forward_states, open_target
from outpace.training.objective import Objective, Simulated, TrainBatch, walk
from outpace.training.objectives.losses import LOSSES, in_chunks, sequence_weights
from outpace.training.objectives.narrow import Narrowing
from outpace.training.options import ANSWER, DistilOptions
from outpace.training.setup import Setup, shaped_as
from outpace.training.target import DraftHead, DraftVocabulary, TargetParts, TargetWeights

# -- student ----------------------------------------------------------------------------------------------------------
# A small Llama, as a draft model of its own: distilled from the target, served like any other model.
# Names are those of Hugging Face's ``LlamaForCausalLM``, or ``Qwen3ForCausalLM`` where query and key heads have norms,
# without ``model.``.

Cache = list[tuple[Tensor, Tensor]]  # of each layer: keys and values [B, n, kv_heads, head_dim]


class Student(nn.Module):
    """``embedding``, ``head`` [V, h] are the model's own; one tensor given as both is tied. ``frozen``: they do not
    learn, which is cheaper and lets little data go further."""

    def __init__(self, shape: Decoder, embedding: Tensor, head: Tensor, *, frozen: bool, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.tied = head is embedding
        self.embed_tokens = nn.Parameter(embedding, requires_grad=not frozen)
        self.lm_head = self.embed_tokens if self.tied else nn.Parameter(head, requires_grad=not frozen)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.rope = Rope(shape)
        initialise(self, torch.Generator().manual_seed(seed))

    def take(self, layers: Sequence[Mapping[str, Tensor]], norm: Tensor) -> None:
        """Begin as these layers of a target (``q`` .. ``down``, ``attn_norm``, ``ffn_norm``, perhaps ``q_norm``,
        ``k_norm``) under its final ``norm`` [h]. Raises ParameterError for layers of another size or kind."""
        with torch.no_grad():
            self.norm.weight.copy_(norm)
            for i, (layer, given) in enumerate(zip(self.layers, layers, strict=True)):
                attention, mlp = layer.self_attn, layer.mlp
                own = {name: getattr(attention, f"{name}_proj").weight for name in "qkvo"}
                own |= {name: getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")}
                own |= {"attn_norm": layer.input_layernorm.weight, "ffn_norm": layer.post_attention_layernorm.weight}
                if self.shape.qk_norm:
                    own |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
                for name in sorted(own.keys() | given.keys()):
                    if name not in own or name not in given or own[name].shape != given[name].shape:
                        raise ParameterError(
                            f"layer {i} cannot begin as a layer of the target, whose {name} differs: give ",
                            Argument("init", "scratch"),
                        )
                    own[name].copy_(given[name])

    def forward(self, tokens: Tensor, position: Tensor, starts: Sequence[int]) -> Tensor:
        """Normed states [N, h] of packed sequences: ``tokens``, ``position`` int64 [N], ``starts`` B + 1 bounds."""
        lengths = [stop - start for start, stop in pairwise(starts)]

        def attend(i: int, *heads: Tensor) -> Tensor:
            parts = zip(*(t.split(lengths) for t in heads), strict=True)
            return torch.cat([_attend(*part, causal=True) for part in parts])

        return self._normed(tokens, position, attend)

    def step(self, tokens: Tensor, position: int, cache: Cache) -> tuple[Tensor, Cache]:
        """Normed states [B, h] after one token each of B rows of one length, and their cache with it."""
        grown: Cache = []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k[:, None], v[:, None]
            if cache:
                k, v = torch.cat((cache[i][0], k), 1), torch.cat((cache[i][1], v), 1)
            grown.append((k, v))
            return _attend(q[:, None], k, v, causal=False)[:, 0]

        return self._normed(tokens, torch.full((len(tokens),), position, device=tokens.device), attend), grown

    @torch.no_grad()
    def continued(self, prompt: Tensor, count: int, draw: torch.Generator | None = None) -> Tensor:
        """``prompt`` int64 [n] and ``count`` tokens sampled at temperature 1 (``draw`` None: the likeliest)."""
        cache: Cache = []
        sampled: list[Tensor] = []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append((k[None], v[None]))
            return _attend(q, k, v, causal=True)

        hidden = self._normed(prompt, torch.arange(len(prompt), device=prompt.device), attend)[-1:]
        for i in range(count):
            logits = hidden @ self.lm_head.T
            token = logits.argmax(-1)
            if draw is not None:  # a generator's numbers are the CPU's
                token = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=draw)[:, 0].to(prompt.device)
            sampled.append(token)
            if i + 1 < count:
                hidden, cache = self.step(token, len(prompt) + i, cache)
        return torch.cat((prompt, *sampled))

    def _normed(self, tokens: Tensor, position: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Normed states [n, h]; ``attend(i, q, k, v)`` mixes layer i's heads [n, heads, head_dim]."""
        cos, sin = self.rope(position)
        x = F.embedding(tokens, self.embed_tokens)
        for i, layer in enumerate(self.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            mixed = attend(i, attention.queries(normed, cos, sin), *attention.keys_values(normed, cos, sin))
            x = x + attention.o_proj(mixed.flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.norm(x)
        return out


def chosen_layers(layers: int, wanted: int, how: str) -> list[int]:
    """Which of ``layers`` layers a student of ``wanted`` begins as; "even" has the first and the last.

    Raises ParameterError when there are not so many.
    """
    if not 1 <= wanted <= layers:
        raise ParameterError(Argument("layers", wanted), f" is out of range: the target has {layers}")
    if how == "first":
        return list(range(wanted))
    if how == "last":
        return list(range(layers - wanted, layers))
    if wanted == 1:
        return [layers - 1]
    return [round(i * (layers - 1) / (wanted - 1)) for i in range(wanted)]


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """[..., n, heads, d] of ``q`` [..., n, heads, d] and ``k``, ``v`` [..., m, kv_heads, d]."""
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[-3] != k.shape[-3])
    return mixed.transpose(-3, -2)


RECIPE = "training.json"
_ROWS = 128  # positions whose logits are held at a time


class Teacher(Protocol):
    """The target itself, for sequences that nobody computed before."""

    def states(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Of tokens int64 [L]: the states before the final norm [L, h], one of each sequence."""

    def close(self) -> None: ...


class NativeTeacher:
    """The target as it serves, computing states for sequences that a student continued."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def states(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """See ``Teacher``: bfloat16."""
        tokens = [sequence.cpu().numpy().astype(np.int32) for sequence in sequences]
        found = forward_states(self.model, tokens, (self.model.info.layers - 1,))
        return [torch.from_numpy(states[:, 0].view(np.int16)).view(torch.bfloat16) for states in found]

    def close(self) -> None:
        self.model.close()


class DistilObjective(Objective[Student, DistilOptions]):
    """See ``Objective``. ``vocabulary``: the loss covers these tokens alone, with both distributions renormalised
    (None: all). ``teacher``: needed for sequences that the student continues. ``counts`` int64 [V]: how often tokens
    occur in the training data; with them, the most frequent ones are always candidates."""

    def __init__(
        self,
        network: Student,
        target: TargetParts,
        options: DistilOptions,
        vocabulary: DraftVocabulary | None = None,
        teacher: Teacher | None = None,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        options.check()
        if options.on_policy and teacher is None:
            raise ValueError("on-policy distillation needs a teacher")
        self.network, self.target, self.options, self.teacher = network, target, options, teacher
        every = DraftVocabulary.of(np.arange(target.vocab), target.vocab)
        self._head = DraftHead(target, vocabulary or every, counts, options.candidates)

    @classmethod
    def layers(cls, options: DistilOptions, count: int) -> tuple[int, ...] | None:
        """See ``Objective``."""
        return None if options.loss == ANSWER else ()

    @classmethod
    def begin(cls, setup: Setup, options: DistilOptions) -> DistilObjective:
        """Raises ParameterError where the target's layers are no Llama's, ModelError."""
        student, parts = _student(setup, options).to(setup.device), setup.parts.to(setup.device)
        vocabulary = None if options.all_tokens else setup.vocabulary
        target = open_target(setup.answers.meta, setup.run.threads) if options.on_policy else None
        teacher = None if target is None else NativeTeacher(target)
        made = cls(student, parts, options, vocabulary, teacher, setup.counts)
        made.write = partial(write_model, _tokenizer(setup.source))
        return made

    def close(self) -> None:
        if self.teacher is not None:
            self.teacher.close()

    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        student, name = self.network, self.options.loss
        if self.options.on_policy:
            batch = self.mixed(batch)
        place = self._head.place[torch.cat([batch.tokens[1:], batch.tokens[:1]])]
        at = torch.nonzero(batch.loss_mask & (place >= 0)).flatten()
        if not len(at):
            return torch.zeros((), device=batch.device), {}
        found = self._head.draw(batch.tokens, torch.Generator().manual_seed(batch.seed))
        answers = place[at] if found.chosen is None else torch.searchsorted(found.chosen, place[at])
        weight = sequence_weights(batch.weight[at], batch.sequence[at], batch.sequences)
        normed = student(batch.tokens, batch.position, batch.starts)[at]
        rows = student.lm_head[self._head.ids if found.chosen is None else self._head.ids[found.chosen]]
        offset: Tensor | float = 0.0 if found.offset is None else found.offset
        target_states = None if name == ANSWER else self.target.norm(batch.states[at, -1])

        def piece(start: int, stop: int, normed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            logits = normed @ rows.T + offset
            if target_states is None:
                likeliest = answers[start:stop]
                missed = F.cross_entropy(logits, likeliest, reduction="none")
            else:
                with torch.no_grad():
                    p = torch.softmax(target_states[start:stop] @ found.head.T + offset, -1)
                likeliest, missed = p.argmax(-1), LOSSES[name][0](logits, p)
            agree = (logits.argmax(-1) == likeliest).to(missed.dtype)
            return (weight[start:stop] * missed).sum(), torch.stack((missed, agree), -1).detach()

        total, facts = in_chunks(piece, _ROWS, (normed,), (rows,))
        missed, agree = facts.mean(0).tolist()
        return total, {name: missed, "agree0": agree}

    @torch.no_grad()
    def simulate(self, batch: TrainBatch) -> Simulated:
        """One forward says it for all starts: up to its first wrong token, a chain's prefix is the answer's own."""
        normed = self.network(batch.tokens, batch.position, batch.starts)
        best = torch.cat([(part @ self.network.lm_head.T).argmax(-1) for part in normed.split(_ROWS)])
        hits = best[:-1] == batch.tokens[1:]  # after position i, token i + 1
        reach, tried = self._reach(batch)
        right = tried & hits[reach.clamp_max(len(batch) - 2)]
        return walk(batch, right.cpu().numpy(), tried.cpu().numpy())

    def _reach(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """[N, k]: the position after which the chain of entry i says token s, which begins after i + 1; whether the
        answer goes on there."""
        every = torch.arange(len(batch), device=batch.device)
        reach = every[:, None] + 1 + torch.arange(self.options.depth, device=batch.device)
        return reach, reach + 1 < batch.ends[:, None]

    def export(self) -> tuple[str, Decoder, Mapping[str, Any]]:
        """Tensors by Hugging Face's names; a tied head is left out."""
        student = self.network
        tensors = {
            f"model.{name}": value.detach().cpu().numpy()
            for name, value in student.state_dict().items()
            if name not in ("embed_tokens", "lm_head")
        }
        tensors["model.embed_tokens.weight"] = student.embed_tokens.detach().cpu().numpy()
        if not student.tied:
            tensors["lm_head.weight"] = student.lm_head.detach().cpu().numpy()
        return "distil", student.shape, tensors

    def mixed(self, batch: TrainBatch) -> TrainBatch:
        """The batch with a share of its sequences in the student's words, of which these alone count. No states."""
        assert self.teacher is not None
        draw = torch.Generator().manual_seed(batch.seed)
        sequences, cuts = [], dict[int, int]()
        for b, (start, stop) in enumerate(pairwise(batch.starts)):
            own = batch.tokens[start:stop]
            places = torch.nonzero(batch.loss_mask[start:stop]).flatten()
            if len(places) and float(torch.rand((), generator=draw)) < self.options.on_policy:
                cut = int(places[int(torch.randint(len(places), (), generator=draw))]) + 1
                own = self.network.continued(own[:cut], self.options.on_policy_tokens, draw)
                cuts[b] = cut
            sequences.append(own)
        if not cuts:
            return batch
        taught = dict(zip(cuts, self.teacher.states([sequences[b] for b in cuts]), strict=True))
        states, weights, starts = [], [], [0]
        for b, own in enumerate(sequences):
            own_rows = slice(batch.starts[b], batch.starts[b + 1])
            starts.append(starts[-1] + len(own))
            if b not in cuts:
                states.append(batch.states[own_rows, -1:])
                weights.append(batch.weight[own_rows])
                continue
            states.append(taught[b][:, None].to(batch.states))
            weights.append((torch.arange(len(own), device=own.device) >= cuts[b] - 1).float())
            weights[-1][-1] = 0.0
        return TrainBatch(
            tokens=torch.cat(sequences),
            starts=tuple(starts),
            position=torch.cat([torch.arange(len(own), device=own.device) for own in sequences]),
            weight=torch.cat(weights),
            states=torch.cat(states),
            seed=batch.seed,
        )


def _student(setup: Setup, options: DistilOptions) -> Student:
    """A student at its beginning. Raises ParameterError where layers to begin as are no Llama's, ModelError."""
    if options.start is not None:
        return _started(setup, resolve(options.start), options)
    weights, parts, hidden = setup.weights, setup.parts, options.hidden or setup.parts.hidden
    if hidden > parts.hidden:
        raise ParameterError(Argument("hidden", hidden), f" is out of range: the target has {parts.hidden}")
    last = weights.decoder.layers - 1
    qk_norm = options.init != "scratch" and weights.vector(last, "q_norm") is not None
    decoder = shaped_as(weights, options.layers, qk_norm)
    narrowing, final_norm = None, parts.final_norm
    if hidden < parts.hidden:
        ffn = max(32, round(decoder.ffn * hidden / parts.hidden / 32) * 32)
        decoder = replace(decoder, hidden=hidden, ffn=min(ffn, decoder.ffn))
        narrowing = Narrowing.of(parts.embedding, torch.from_numpy(setup.counts), hidden)
        final_norm = narrowing.final_norm(final_norm)
    student = _with_rows(parts, decoder, options, setup.run.options.seed, narrowing)
    if options.init == "scratch":
        return student
    layers = []
    for i in chosen_layers(weights.decoder.layers, options.layers, options.init):
        layer = _layer(weights, i, setup.source)
        layers.append(layer if narrowing is None else narrowing.layer(layer, decoder.ffn))
    student.take(layers, final_norm)
    return student


def _started(setup: Setup, source: Source, options: DistilOptions) -> Student:
    """The model of ``source``, whole. Raises as ``_student`` does."""
    weights = TargetWeights(source)
    if not _is_llama(weights):
        raise ParameterError(Argument("start", source.name), " is no Llama, as a student is: give another model")
    parts, count = weights.parts(), weights.decoder.layers
    if parts.vocab != setup.parts.vocab:
        raise ParameterError(
            Argument("start", source.name), f" has {parts.vocab} tokens, and the target {setup.parts.vocab}: give a "
            "model of the target's tokenizer",
        )  # fmt: skip
    for token, own, target in differences(_tokenizer(source), _tokenizer(setup.source), 1):
        raise ParameterError(
            Argument("start", source.name), f" has another tokenizer: its token {token} is {own!r}, the target's "
            f"{target!r}: give a model of the target's tokenizer",
        )  # fmt: skip
    if not weights.decoder.ropes[0].plain:
        raise ParameterError(
            Argument("start", source.name), " stretches its rotations, and a student does not: give another model"
        )
    qk_norm = weights.vector(count - 1, "q_norm") is not None
    student = _with_rows(parts, shaped_as(weights, count, qk_norm), options, setup.run.options.seed)
    student.take([_layer(weights, i, source) for i in range(count)], parts.final_norm)
    return student


def _with_rows(
    parts: TargetParts, decoder: Decoder, options: DistilOptions, seed: int, narrowing: Narrowing | None = None
) -> Student:
    """A random student with embedding and head of ``parts``."""
    embedding = parts.embedding if parts.embedding_scale == 1 else parts.embedding * parts.embedding_scale
    head, tied = parts.head, parts.head is embedding
    if narrowing is not None:
        embedding, head = embedding @ narrowing.basis, head @ narrowing.basis
    elif options.free:  # the target keeps its own
        embedding, head = embedding.clone(), head.clone()
    return Student(decoder, embedding, embedding if tied else head, frozen=not options.free, seed=seed)


def _layer(weights: TargetWeights, i: int, source: Source) -> dict[str, Tensor]:
    """Layer ``i`` as ``Student.take`` has it. Raises ParameterError where it is no Llama's."""
    if not _is_llama(weights):
        raise ParameterError(
            f"a student cannot begin as layers of {source.name}, which are no Llama's: give ",
            Argument("init", "scratch"),
        )
    norms = {name: weights.vector(i, name) for name in ("q_norm", "k_norm")}
    return {**weights.layer(i), **{name: norm for name, norm in norms.items() if norm is not None}}


def _is_llama(weights: TargetWeights) -> bool:
    return weights.decoder.family.name in ("llama", "mistral", "qwen3") and weights.vector(0, "q_bias") is None


def _tokenizer(source: Source) -> Tokenizer:
    """Raises ModelError."""
    return Tokenizer.from_folder(source.path) if source.gguf is None else Tokenizer.from_gguf(source.gguf)


def write_model(
    tokenizer: Tokenizer,
    folder: Path,
    method: str,
    shape: Decoder,
    tensors: Mapping[str, Any],
    target: Mapping[str, Any],
    recipe: Mapping[str, Any],
) -> None:
    """A model folder in Hugging Face's layout, bfloat16; config.json last, so that it is whole or none.

    ``method``, ``target`` and ``recipe`` go beside it: see ``objective.Write``. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    safetensors.write(folder / "model.safetensors", tensors, "BF16")
    write_json(folder / RECIPE, {"method": method, "target": dict(target), "recipe": dict(recipe)})
    # The same arithmetic by the name under which transformers takes any width.
    kind = "Qwen3" if shape.qk_norm else "Mistral" if shape.hidden % shape.heads else "Llama"
    config = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **({"sliding_window": None} if kind == "Mistral" else {}),
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
