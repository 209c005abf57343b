"""The Transformers backend: any decoder-only ``AutoModelForCausalLM``, with Outpace's own attention and row cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from outpace.arrays import F32, I32
from outpace.errors import ModelError
from outpace.exact.drafts import Draft, Verdict
from outpace.exact.sampling import Chooser, TokenLogprob
from outpace.models.base import Batch, ModelInfo, choose_on_host, logprobs_on_host
from outpace.models.torch.anatomy import dissect, max_length
from outpace.models.torch.attention import Forward, plan
from outpace.models.torch.kv import TorchKV
from outpace.models.torch.probe import Reference, agree


class TransformersModel:
    """A transformers model behind the ``Model`` seam. It runs on packed tokens [1, N] without a cache of its own."""

    def __init__(
        self,
        module: Any,
        *,
        name: str,
        eos_ids: Sequence[int] = (),
        longest: int | None = None,
        kv_memory: int | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Take over ``module``, a PreTrainedModel in evaluation mode, after proving that it can be served exactly.

        ``longest``: the most positions of a row, if less than the model's. ``warn`` is told what had to be limited.
        Raises ModelError with the reason when the model cannot be served exactly.
        """
        module.requires_grad_(False).eval()
        self._module = module
        self._device = next(module.parameters()).device
        config = module.config.get_text_config(decoder=True)
        claimed, reason = max_length(config)
        if reason is not None:
            warn(f"{name}: {reason}")
        parameters = inspect.signature(module.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._short: dict[int, torch.nn.ModuleList] = {}
        try:
            if getattr(module.config, "is_encoder_decoder", False):
                raise ModelError("it is an encoder-decoder model")
            if "position_ids" not in parameters:
                raise ModelError("it takes no positions (recurrent state, or positions that count slots)")
            with torch.inference_mode():
                reference = Reference.of(module, config.vocab_size, self._device)
                anatomy = dissect(module, claimed, reference.tokens[:1])
        except ModelError as error:
            raise ModelError(f"{name} cannot be served exactly: {error}") from error
        self._anatomy = anatomy
        self._forward: Forward = module._outpace_forward
        self.kv = TorchKV(anatomy.shapes, anatomy.dtype, self._device, kv_memory)
        weights = {p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}
        head = module.get_output_embeddings()
        self.info = ModelInfo(
            name=name,
            backend="transformers",
            vocab_size=int(config.vocab_size if head is None else head.weight.shape[0]),
            hidden_size=int(config.hidden_size),
            layers=len(anatomy.shapes),
            max_length=min(claimed, longest or claimed),
            eos_ids=tuple(eos_ids),
            dtype=str(anatomy.dtype).removeprefix("torch."),
            device=str(self._device),
            weight_bytes=sum(weights.values()),
            kv_bytes_per_position=self.kv.bytes_per_position,
        )
        try:
            trial = TorchKV(anatomy.shapes, anatomy.dtype, self._device)
            with torch.inference_mode():
                agree(lambda batch: self._run(batch, trial), trial, reference)
        except ModelError as error:
            raise ModelError(f"{name} cannot be served exactly: {error}") from error

    @property
    def threads(self) -> int | None:
        """The CPU threads it computes with; None on a GPU."""
        return torch.get_num_threads() if self._device.type == "cpu" else None

    def forward(self, batch: Batch) -> TorchOutput:
        """Run the batch; see ``Model.forward``. When it fails, every row is as long as it was. Raises ValueError."""
        with torch.inference_mode():
            return self._run(batch, self.kv)

    def _run(self, batch: Batch, kv: TorchKV) -> TorchOutput:
        if self._module is None:
            raise ModelError(f"{self.info.name} is closed: load it again")
        rows = plan(batch, kv)
        layers = self.info.layers if batch.layers is None else batch.layers
        if not 1 <= layers <= self.info.layers or any(not 0 <= tap < layers for tap in batch.taps):
            raise ValueError(f"layers={batch.layers}, taps={batch.taps}: the model has {self.info.layers} layers")
        taps: dict[int, torch.Tensor] = {}
        wanted = None if len(batch.wanted) == len(batch) else self._indices(batch.wanted)
        with ExitStack() as undo:
            if layers < self.info.layers:
                self._shorten(layers, undo)
            for tap in set(batch.taps):
                hook = self._anatomy.layers[tap].register_forward_hook(_keep_output(taps, tap))
                undo.callback(hook.remove)
            self._forward.rows = rows
            undo.callback(self._idle)
            keep = {"logits_to_keep": 0 if wanted is None else wanted} if self._keeps_logits else {}
            result = self._module(
                input_ids=self._indices(batch.token)[None],
                position_ids=self._indices(batch.position)[None],
                use_cache=False,
                return_dict=True,
                **keep,
            )
        logits = result.logits[0]
        if wanted is not None and not self._keeps_logits:
            logits = logits[wanted]
        for row in rows:
            kv.lengthen(int(batch.row[row.begin]), row.end - row.begin)
        if self._device.type == "cuda":  # what follows waits for it anyway, and times what it measures
            torch.cuda.current_stream(self._device).synchronize()
        return TorchOutput(batch.wanted, logits, [taps[tap] for tap in batch.taps])

    def _indices(self, values: I32) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _idle(self) -> None:
        self._forward.rows = None

    def _shorten(self, layers: int, undo: ExitStack) -> None:
        """Let the model see only its first so many layers until ``undo`` runs."""
        holder, name = self._anatomy.holder, self._anatomy.attribute
        if layers not in self._short:
            self._short[layers] = torch.nn.ModuleList(list(self._anatomy.layers)[:layers])
        undo.callback(setattr, holder, name, self._anatomy.layers)
        setattr(holder, name, self._short[layers])

    def close(self) -> None:
        """Forget the weights and the cache. Calling twice is allowed."""
        for row in self.kv.rows:
            self.kv.free(row)
        # The anatomy holds layers too: without this the weights would stay.
        self._anatomy = replace(self._anatomy, holder=torch.nn.Module(), layers=torch.nn.ModuleList())
        self._short.clear()
        self._module = None


def _keep_output(into: dict[int, torch.Tensor], tap: int) -> Callable[..., None]:
    def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        into[tap] = output[0] if isinstance(output, tuple) else output

    return hook


class TorchOutput:
    """A forward's result where it was computed; what is asked for comes to the host in one copy."""

    def __init__(self, wanted: I32, logits: torch.Tensor, taps: Sequence[torch.Tensor]) -> None:
        self._wanted = wanted
        self._logits = logits  # [M, V]
        self._taps = taps  # each [1, N, H]
        self._host: F32 | None = None

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        if self._host is None and all(chooser.plain_greedy for chooser in choosers):
            return self._greedy(self._found(at))
        return choose_on_host(self.logits(at), choosers)

    def walk(self, start: int, draft: Draft, chooser: Chooser) -> Verdict | None:
        return None

    def logits(self, at: I32) -> F32:
        if self._host is None:
            self._host = self._logits.float().cpu().numpy()
        logits: F32 = self._host[self._found(at)]
        return logits

    def logprobs(self, at: I32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
        return logprobs_on_host(self.logits(at), tokens, top)

    def taps(self, at: I32) -> F32:
        if not self._taps:
            raise ValueError("no hidden states were asked for: name the layers in Batch.taps")
        index = torch.from_numpy(at.astype(np.int64)).to(self._logits.device)
        taps: F32 = torch.stack([t[0, index] for t in self._taps], dim=1).float().cpu().numpy()
        return taps

    def _found(self, at: I32) -> np.ndarray[Any, np.dtype[np.intp]]:
        return np.searchsorted(self._wanted, at)

    def _greedy(self, found: np.ndarray[Any, np.dtype[np.intp]]) -> I32:
        logits = self._logits
        if len(found) != len(logits) or (found != np.arange(len(found))).any():
            logits = logits[torch.from_numpy(found).to(logits.device)]
        best = logits.argmax(-1)  # the lowest id on ties
        value = logits.gather(-1, best[:, None])[:, 0]
        ids, values = torch.stack([best.double(), value.double()]).cpu().numpy()  # ids are exact in float64
        if not np.isfinite(values).all():
            raise FloatingPointError(
                "the model produced NaN or infinite logits: try --dtype float32, or check the weights"
            )
        chosen: I32 = ids.astype(np.int32)
        return chosen
