"""The Transformers backend: any decoder-only ``AutoModelForCausalLM``, with Outpace's own attention and KV cache."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from outpace.common.arrays import I32
from outpace.common.fair_lock import FairLock
from outpace.errors import MemoryLimitError, ModelError, OutpaceError
from outpace.models.base import Batch, Model, ModelInfo
from outpace.models.torch.anatomy import attending, dissect, max_length, weight_bytes
from outpace.models.torch.attention import NAME, Plan, counts, plan
from outpace.models.torch.choose import ROUNDING
from outpace.models.torch.decoder import OwnDecoder, apart, described
from outpace.models.torch.experts import Mixtures
from outpace.models.torch.graphs import Captures, Graphs
from outpace.models.torch.kv import BLOCK, TorchKV
from outpace.models.torch.mixers import in_attentions_place, mixers, mixing, state_shape
from outpace.models.torch.output import TorchOutput
from outpace.models.torch.probe import Reference, agree, prove_in_float32
from outpace.models.torch.recurrent import records
from outpace.models.torch.state import ModuleState
from outpace.models.torch.upload import uploaded

# -- parts ------------------------------------------------------------------------------------------------------------
# The embedding, final norm and head of a transformers model, found by watching one forward and proven on it.

# How far apart two computations of the same may be, relative to the largest value: rounding, of another order of sums.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class TorchParts:
    """See ``Parts``. Gradients flow through, so a drafter can be trained against them."""

    name: str
    embedding: torch.nn.Module
    scale: float | None  # of the embedding, beyond what its module does; None: it depends on more than the token
    final_norm: torch.nn.Module | None
    head: Any
    after_head: Callable[[torch.Tensor], torch.Tensor] | None  # None: not known

    def embed(self, tokens: I32 | torch.Tensor) -> torch.Tensor:
        """[..., H] of ids, on the host or where the model is. Raises ModelError where positions or something else are
        mixed into the embeddings."""
        if self.scale is None:
            raise ModelError(f"what enters {self.name}'s first layer is not a multiple of the token's embedding alone")
        ids = tokens if isinstance(tokens, torch.Tensor) else uploaded(self.head.weight.device, tokens)[0]
        embedded: torch.Tensor = self.embedding(ids)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H]. Raises ModelError where no module turns the last layer's output into the head's input."""
        if self.final_norm is None:
            raise ModelError(f"{self.name}'s final norm was not found: no module leads from its last layer to its head")
        normed: torch.Tensor = self.final_norm(hidden)
        return normed

    def logits(self, normed: torch.Tensor, ids: I32 | None = None) -> torch.Tensor:
        """[n, V], or [n, m] of rows ``ids``. Raises ModelError where the model does something unknown to them."""
        return self.head_of(ids)(normed)

    def head_of(self, ids: I32 | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """``logits`` by rows ``ids``, which are copied here, once. Raises ModelError as it does."""
        after = self.after_head
        if after is None:
            raise ModelError(f"{self.name} changes its head's logits in a way that is not known here")
        weight, bias = self.head.weight.detach(), None if self.head.bias is None else self.head.bias.detach()
        if ids is not None and len(ids) < len(weight):
            (index,) = uploaded(weight.device, ids)
            weight, bias = weight[index], None if bias is None else bias[index]
        return lambda normed: after(torch.nn.functional.linear(normed, weight, bias))


def find(name: str, module: Any, layers: torch.nn.ModuleList, run: Callable[[], torch.Tensor]) -> TorchParts:
    """The parts of ``module``, watched while ``run`` gives its logits [n, V] for n tokens. Raises ModelError."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or embedding is None:
        raise ModelError(f"{name} has no embedding and linear head that a drafter could share")
    seen: list[tuple[torch.nn.Module, Any, Any]] = []  # what modules were given, and what they gave

    def note(part: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        given = inputs[0] if inputs else named.get("hidden_states")
        seen.append((part, given, output[0] if isinstance(output, tuple) else output))

    inside = {id(part) for part in layers.modules()} - {id(layers[0]), id(layers[-1])}
    with ExitStack() as undo:
        for part in module.modules():
            if id(part) not in inside:
                undo.callback(part.register_forward_hook(note, with_kwargs=True).remove)
        logits = run()
    by_part = {id(part): (given, gave) for part, given, gave in seen}
    if not all(id(part) in by_part for part in (embedding, layers[0], layers[-1], head)):
        raise ModelError(f"{name} does not use its embedding, layers and head one after the other")
    embedded, entered, left = by_part[id(embedding)][1], by_part[id(layers[0])][0], by_part[id(layers[-1])][1]
    headed, raw = by_part[id(head)]
    norm = next((part for part, *both in seen if all(map(_same, both, (left, headed)))), None)
    tolerance = _ROUNDING.get(left.dtype, 1e-5)
    scale = _multiple(embedded, entered, tolerance)
    return TorchParts(name, embedding, scale, norm, head, _after_head(module, raw[0], logits, tolerance))


def _same(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and torch.equal(a, b)


def _multiple(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> float | None:
    """The factor that makes ``b`` of ``a``; None where there is none."""
    if a.shape != b.shape:
        return None
    if torch.equal(a, b):
        return 1.0
    x, y = a.double(), b.double()
    factor = float((x * y).sum() / (x * x).sum())
    return factor if _close(x * factor, y, tolerance) else None


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def _after_head(
    module: Any, raw: torch.Tensor, logits: torch.Tensor, tolerance: float
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the model does to its head's output ``raw`` to give ``logits``; None where that is not known."""
    raw, logits = raw.double(), logits.double()
    if raw.shape != logits.shape:
        return None
    if _close(raw, logits, tolerance):
        return lambda x: x
    cap = getattr(module.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    if cap and _close(torch.tanh(raw / cap) * cap, logits, tolerance):
        return lambda x: torch.tanh(x / cap) * cap
    factor = _multiple(raw, logits, tolerance)
    return None if factor is None else lambda x: x * factor


# By module: several models may serve one, each for an engine, and a forward through the module's own code marks it.
_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, FairLock] = weakref.WeakKeyDictionary()
_SERVING: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[TransformersModel]] = weakref.WeakKeyDictionary()


class TransformersModel(Model):
    """A transformers model behind the ``Model`` seam, on packed tokens: our own forward where the family is described
    (``decoder.described``), else the module's with our attention in it."""

    def __init__(
        self,
        module: Any,
        *,
        name: str,
        eos_ids: Sequence[int] = (),
        longest: int | None = None,
        kv_memory: int | None = None,
        kv_block: int = BLOCK,
        graphs: bool | None = None,
        strict: bool = False,
        weak: bool = False,
        watched: bool = False,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Serve ``module``, a PreTrainedModel in evaluation mode, after proving that it can be served exactly.

        It stays as it is: between forwards it carries nothing of ours, its own forward works, and others may serve it.
        ``weak``: do not keep it alive; once it is gone, forwards raise ModelError. ``watched``: its owner may change
        it, so ``require_unchanged`` compares it with what was read.

        ``longest``: the most positions of a row, if less than the model's. ``kv_memory``: hard bound in bytes, taken in
        blocks of ``kv_block`` positions. ``graphs``: run small forwards in fixed shapes, which a card replays as CUDA
        graphs (None: on a card), where they prove right. ``strict``: a token's bits depend on nothing that is computed
        beside it, which is proven at load. ``warn`` is called with what had to be limited. Weights are
        read here: what changes in them later does not count. Raises ModelError with the reason when the model cannot be
        served exactly.
        """
        self.lock = _LOCKS.setdefault(module, FairLock())
        _SERVING.setdefault(module, weakref.WeakSet()).add(self)
        self._weak, self._strong = weakref.ref(module), None if weak else module
        configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
        self._configs = list(configs.values())
        self._device = next(module.parameters()).device
        config = module.config.get_text_config(decoder=True)
        claimed, reason = max_length(config)
        if reason is not None:
            warn(f"{name}: {reason}")
        parameters = _parameters(module)
        self._keeps_logits = "logits_to_keep" in parameters
        self._short: dict[int, torch.nn.ModuleList] = {}
        self._parts: TorchParts | None = None
        try:
            if getattr(module.config, "is_encoder_decoder", False):
                raise ModelError("it is an encoder-decoder model")
            if any(part._compiled_call_impl is not None for part in module.modules()):
                raise ModelError("it is compiled (model.compile()): load it again, and do not compile it")
            if "position_ids" not in parameters:
                raise ModelError("it takes no positions (recurrent state, or positions that count slots)")
            self._mixers = mixers(module)
            if strict and self._mixers:
                raise ModelError(
                    "strict: recurrent layers go over a row's tokens together; the native backend is strict without it"
                )
            if strict and any("expert" in part for part, _ in module.named_modules()):
                raise ModelError("strict: an expert's products have as many rows as tokens that chose it")
            shared = [p.device_mesh.size() for p in module.parameters() if hasattr(p, "device_mesh")]
            devices = {str(p.device) for p in module.parameters()}
            if shared or len(devices) > 1 or "meta" in devices:
                where = f"in {max(shared)} processes (tp_plan)" if shared else f"on {', '.join(sorted(devices))}"
                raise ModelError(
                    f"its weights lie {where}: load it on one device, or run `outpace export vllm` for several cards"
                )
            with _plainly(self._device):
                self._mixtures = Mixtures(module)
                with self._mixtures.counting():
                    reference = Reference.of(module, config.vocab_size, self._device)
                others = in_attentions_place(module, self._mixers)
                anatomy = dissect(module, self._configs, claimed, reference.tokens[:1], others)
        except ModelError as error:
            raise ModelError(f"{name} cannot be served exactly: {error}") from error
        self._anatomy = anatomy
        self._windows = tuple(dict.fromkeys(anatomy.windows))
        self.strict, self._rounding = strict, 0.0 if strict else ROUNDING.get(anatomy.dtype, 0.0)
        self._state_shape = state_shape(self._mixers)
        self.kv = self._cache(kv_memory, kv_block)
        head = module.get_output_embeddings()
        self.info = ModelInfo(
            name=name,
            backend="transformers",
            vocab_size=int(config.vocab_size if head is None else head.weight.shape[0]),
            hidden_size=int(config.hidden_size),
            layers=len(anatomy.layers),
            max_length=min(claimed, longest or claimed),
            eos_ids=tuple(eos_ids),
            dtype=str(anatomy.dtype).removeprefix("torch."),
            device=str(self._device),
            weight_bytes=weight_bytes(module),
            kv_bytes_per_position=self.kv.bytes_per_position,
            experts=self._mixtures.count,
            used_experts=self._mixtures.used,
            expert_bytes=self._mixtures.bytes,
        )
        self._own = self._described(module, reference, warn)
        if self._own is None:
            try:
                self._prove(None, reference)
            except (OutpaceError, RuntimeError) as error:
                raise ModelError(f"{name} cannot be served exactly: {error}") from error
        self.graphs: Graphs | None = None  # may be dropped: forwards then run as they are
        captured = not self._mixers and (self._device.type == "cuda" if graphs is None else graphs)

        def tell(why: str) -> None:
            warn(f"{name}: {why}")

        for each in [True] * captured + [False] * strict:
            trial = self._cache()
            captures = [Captures(self._device, told) if each else None for told in (None, tell)]
            fixed, self.graphs = (
                Graphs(self._own or self._through_module, kv, self._windows, self._device, strict, own)
                for kv, own in zip((trial, self.kv), captures, strict=True)
            )
            try:
                with _plainly(self._device):
                    agree(
                        partial(self._run, kv=trial, own=self._own, graphs=fixed),
                        trial,
                        reference,
                        anatomy.dtype,
                        strict,
                    )
                break
            except (OutpaceError, RuntimeError) as error:
                self.graphs = None
                if not each:
                    raise ModelError(f"{name} cannot be served strictly: {error}") from error
                tell(f"CUDA graphs are off, which costs speed: {error}")
            finally:
                fixed.close()
        self._state = ModuleState(module) if watched else None

    def _cache(self, limit: int | None = None, block: int = BLOCK) -> TorchKV:
        return TorchKV(
            self._anatomy.shapes, self._anatomy.dtype, self._device, limit, block, recurrent=self._state_shape
        )

    def _described(self, module: Any, reference: Reference, warn: Callable[[str], None]) -> OwnDecoder | None:
        """Our own forward of ``module``, where it computes the same; what else it may be, its own modules know."""
        if not described(module):
            return None
        anatomy = self._anatomy
        try:
            if anatomy.dtype in (torch.bfloat16, torch.float16):
                with _plainly(self._device):
                    prove_in_float32(module, anatomy)
            # Not as a caller's inference mode would have it: the module's weights may come to lie in what is made here.
            with torch.inference_mode(False), torch.no_grad():
                own = OwnDecoder(module, anatomy.windows, anatomy.scales)
            self._prove(own, reference)
        except (OutpaceError, RuntimeError) as error:
            warn(f"{self.info.name}: transformers' modules run it, more slowly than ours, which do not fit: {error}")
            return None
        return own

    def _prove(self, own: OwnDecoder | None, reference: Reference) -> None:
        """Raises ModelError or RuntimeError unless its rows and trees give the logits of the module alone."""
        trial = self._cache()
        try:
            with _plainly(self._device):
                agree(lambda batch: self._run(batch, trial, own), trial, reference, trial.dtype)
        except IndexError as error:
            raise ModelError("its attention has other keys than those of its tokens (compressed, perhaps)") from error

    @property
    def card(self) -> str | None:
        """The card's name; None on a CPU."""
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None

    @property
    def threads(self) -> int | None:
        """The CPU threads it computes with; None on a GPU."""
        return torch.get_num_threads() if self._device.type == "cpu" else None

    @property
    def parts(self) -> TorchParts:
        """See ``Parts``. Raises ModelError with the reason when the model has none that could be shared."""
        if self._parts is None:
            tokens = np.arange(8, dtype=np.int32) * 13 % self.info.vocab_size
            trial = self._cache()
            batch = Batch.pack([trial.alloc()], [tokens], [0], [True])
            with _plainly(self._device):
                module, layers = self._live(), self._anatomy.layers
                self._parts = find(self.info.name, module, layers, lambda: self._run(batch, trial, None).on_device)
        return self._parts

    def require_unchanged(self) -> None:
        """Raise ModelError where the module is no longer what was proven and read, as far as ``ModuleState`` sees."""
        if self._state is not None and not self._state.same(self._live()):
            raise ModelError(f"{self.info.name} has changed since this engine read its weights: make a new engine")

    def forward(self, batch: Batch) -> TorchOutput:
        """Run the batch; see ``Model.forward``. When it fails, every row is as long as it was. Raises ValueError."""
        self._live()
        if len(batch) and int(batch.position.max()) >= self.info.max_length:
            raise ValueError(
                f"position {int(batch.position.max())} is beyond {self.info.name}'s {self.info.max_length} positions"
            )
        with self.lock, _plainly(self._device):
            return self._run(batch, self.kv, self._own, self.graphs)

    def _live(self) -> Any:
        module = self._weak()
        if module is None or not self._configs:
            raise ModelError(f"{self.info.name} is closed: load it again")
        return module

    def _run(self, batch: Batch, kv: TorchKV, own: OwnDecoder | None, graphs: Graphs | None = None) -> TorchOutput:
        layers = self.info.layers if batch.layers is None else batch.layers
        if not 1 <= layers <= self.info.layers or any(not 0 <= layer < layers for layer in batch.hidden_layers):
            raise ValueError(
                f"layers={batch.layers}, hidden_layers={batch.hidden_layers}: the model has {self.info.layers} layers"
            )
        if self._mixers and layers < self.info.layers:
            raise ValueError(f"layers={layers}: recurrent layers' states are over all layers or none")
        features = None if batch.features is None else self._features(batch)
        try:
            with kv.writing(counts(batch), records(batch) if self._mixers else None):
                found = None if graphs is None else graphs(batch, layers, batch.hidden_layers, features)
                if found is None:
                    planned = plan(batch, kv, self._windows, self._device)
                    both = (own or self._through_module)(planned, layers, features, batch.hidden_layers)
                    found = *both, planned.experts, None
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"{self._device} has no memory left for a forward of {len(batch)} tokens: bound the KV memory, or give "
                f"fewer tokens a step"
            ) from error
        logits, hidden_states, experts, where = found
        kept = [hidden_states[i] for i in batch.hidden_layers]
        return TorchOutput(batch, logits, kept, where, self._rounding, experts)

    def _through_module(
        self, planned: Plan, layers: int, features: torch.Tensor | None, kept: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As ``OwnDecoder.__call__``, by transformers' own modules."""
        hidden_states: dict[int, torch.Tensor] = {}
        wanted, anatomy = planned.wanted, self._anatomy
        with ExitStack() as undo:
            undo.callback(setattr, anatomy.forward, "plan", None)
            anatomy.forward.plan = planned
            undo.enter_context(attending(self._configs, NAME, anatomy.sites))
            undo.enter_context(mixing(self._mixers, planned.kv))
            read = undo.enter_context(self._mixtures.counting(planned.real))
            if layers < self.info.layers:
                self._shorten(layers, undo)
            if features is not None:
                entry = partial(_add_features, features)
                undo.callback(anatomy.layers[0].register_forward_pre_hook(entry, with_kwargs=True).remove)
            for layer in set(kept):
                keep_output = partial(_keep_output, hidden_states, layer)
                undo.callback(anatomy.layers[layer].register_forward_hook(keep_output).remove)
            keep = {"logits_to_keep": 0 if wanted is None else wanted} if self._keeps_logits else {}
            logits = self._live()(
                input_ids=planned.tokens[None],
                position_ids=planned.positions[None],
                use_cache=False,
                return_dict=True,
                **keep,
            ).logits[0]
        planned.experts = torch.stack(read).mean() if read else None
        return (logits if wanted is None or self._keeps_logits else logits[wanted]), hidden_states

    def _features(self, batch: Batch) -> torch.Tensor:
        """The batch's features [N, H] where they are needed. Raises ValueError for another shape."""
        features = torch.as_tensor(batch.features).to(self._device)
        if features.shape != (len(batch), self.info.hidden_size):
            raise ValueError(
                f"features of shape {list(features.shape)} do not fit {len(batch)} tokens of width "
                f"{self.info.hidden_size}: give one hidden state a token"
            )
        return features

    def _shorten(self, layers: int, undo: ExitStack) -> None:
        """Let the model see only its first so many layers until ``undo`` runs."""
        holder, name = self._anatomy.holder, self._anatomy.attribute
        if layers not in self._short:
            self._short[layers] = torch.nn.ModuleList(list(self._anatomy.layers)[:layers])
        undo.callback(setattr, holder, name, self._anatomy.layers)
        setattr(holder, name, self._short[layers])

    def close(self) -> None:
        """Forget the weights and the cache. Calling twice is allowed."""
        self.kv.close()
        if self.graphs is not None:
            self.graphs.close()
        self._parts = self._own = self.graphs = None
        # The anatomy holds layers too: without this the weights would stay.
        self._mixers, self._mixtures = (), Mixtures(torch.nn.Module())
        self._anatomy = replace(self._anatomy, holder=torch.nn.Module(), layers=torch.nn.ModuleList(), sites=())
        self._short.clear()
        self._configs.clear()
        self._strong = None
        module = self._weak()
        if module is not None and self in (serving := _SERVING[module]):
            serving.discard(self)
            if not serving:
                apart(module)


@contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """Without gradients, and in the weights' own types: a caller's autocast would mix others in."""
    with ExitStack() as modes:
        if torch.is_autocast_enabled(device.type):
            modes.enter_context(torch.autocast(device.type, enabled=False))
        modes.enter_context(torch.inference_mode())
        yield


def _parameters(module: Any) -> set[str]:
    """What its forward takes by name. A wrapper's own signature, ``(*args, **kwargs)``, says nothing: the class's does,
    and where that says nothing either, the proof decides."""
    for forward in (module.forward, type(module).forward):
        found = inspect.signature(forward).parameters
        if "input_ids" in found:
            return set(found)
    return {"position_ids"}


def _keep_output(into: dict[int, torch.Tensor], layer: int, _module: Any, _inputs: Any, output: Any) -> None:
    into[layer] = output[0][0] if isinstance(output, tuple) else output[0]


def _add_features(
    features: torch.Tensor, layer: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Any]:
    """Adds hidden states [N, H] to what enters a layer: after whatever the model did to its embeddings."""
    hidden = inputs[0] if inputs else named.get("hidden_states")
    if not isinstance(hidden, torch.Tensor) or hidden.shape[1:] != features.shape:
        raise ValueError(f"{type(layer).__name__} does not take plain hidden states, so features cannot be added")
    hidden = hidden + features.to(hidden.dtype)[None]
    return ((hidden, *inputs[1:]), named) if inputs else (inputs, {**named, "hidden_states": hidden})
