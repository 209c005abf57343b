"""A layer of the target's own files that drafts (multi-token prediction, arXiv 2412.19437), as Qwen 3.5 has it.

Unrolled as EAGLE is, and written as ``mtp.*`` beside the target's tensors: the result is a model, which drafts with
``--drafter mtp``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.common.files import write_json
from outpace.drafters.learned.config import Decoder
from outpace.drafters.learned.networks.layers import Layer, Norm, rotate
from outpace.errors import ParameterError
from outpace.models import decoder as decoders
from outpace.models.load import Source
from outpace.models.weights import safetensors
from outpace.models.weights.facts import read_config
from outpace.training.objective import TrainBatch
from outpace.training.objectives.eagle import AnchoredAttention, Span, UnrolledObjective, pick
from outpace.training.options import MtpOptions
from outpace.training.setup import Setup, shaped_as

FAMILY = "qwen3_5"
WEIGHTS, INDEX, RECIPE = "mtp.safetensors", "model.safetensors.index.json", "mtp.json"


class MtpNetwork(nn.Module):
    """Its parameters have the names of Qwen 3.5's files behind ``mtp.``; norms are whole here."""

    def __init__(self, target: decoders.Decoder, shape: Decoder) -> None:
        super().__init__()
        h, inner = shape.hidden, shape.heads * shape.head_dim
        self.shape, (self._turns, self._turn_scale) = shape, (target.ropes[0].frequencies, target.ropes[0].scale)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(h, shape.eps), Norm(h, shape.eps)
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.layer.self_attn.q_proj = nn.Linear(h, 2 * inner, bias=False)  # of each head its queries, then its gate
        self.norm = Norm(h, shape.eps)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def initialise(self, final_norm: Tensor, seed: int) -> None:
        """At random, but that the target's state passes through."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0, module.in_features**-0.5, generator=draw)
            for matrix in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj, self.fc):
                matrix.weight.mul_(0.5)
            self.fc.weight[:, self.shape.hidden :] += torch.eye(self.shape.hidden)
            self.norm.weight.copy_(final_norm)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of what the layer reads [n, h]: queries, their gates, keys and values [n, heads, head_dim]."""
        attention, dim = self.layer.self_attn, self.shape.head_dim
        assert attention.q_norm is not None
        assert attention.k_norm is not None
        q, gate = attention.q_proj(x).view(len(x), -1, 2 * dim).split(dim, -1)
        k, v = (each(x).view(len(x), -1, dim) for each in (attention.k_proj, attention.v_proj))
        return self._turned(attention.q_norm(q), position), gate, self._turned(attention.k_norm(k), position), v

    def leave(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        """What the head reads [n, h], and the next entry, of the residual [n, h] and attention's [n, heads, d]."""
        x = x + self.layer.self_attn.o_proj((mixed * torch.sigmoid(gate)).flatten(1))
        out: Tensor = self.norm(x + self.layer.mlp(self.layer.post_attention_layernorm(x)))
        return out

    def _turned(self, heads: Tensor, position: Tensor) -> Tensor:
        """Rotated in their first numbers, as many as there are frequencies twice."""
        turns = torch.from_numpy(np.asarray(self._turns, np.float32)).to(position.device)
        angles = position[:, None, None].float() * turns
        cos, sin = angles.cos() * self._turn_scale, angles.sin() * self._turn_scale
        width = 2 * len(turns)
        return torch.cat([rotate(heads[..., :width], cos, sin), heads[..., width:]], -1)


def unroll(
    network: MtpNetwork,
    states: Tensor,  # [N, h]: what the target's head reads
    embedded: Tensor,  # [N, h]
    position: Tensor,  # int64 [N]
    starts: Sequence[int],
    anchors: Sequence[Tensor],
) -> list[Tensor]:
    """As ``eagle.unroll``: the outputs [M_s, h] of each step."""
    of_token, of_state = network.fc.weight.split(network.shape.hidden, 1)
    read = F.linear(network.pre_fc_norm_embedding(embedded), of_token)
    bounds = torch.tensor(starts, device=position.device)
    real = anchors[0]
    inner = torch.searchsorted(real, bounds).tolist()
    g, own = pick(states, real), list[tuple[Tensor, Tensor]]()
    first: tuple[Tensor, Tensor] | None = None
    outputs: list[Tensor] = []
    for s, at in enumerate(anchors):
        if s:
            kept = torch.searchsorted(anchors[s - 1], at)
            g, own = pick(g, kept), [(pick(k, kept), pick(v, kept)) for k, v in own]
        x = pick(read, at + s + 1) + F.linear(network.pre_fc_norm_hidden(g), of_state)
        q, gate, k, v = network.project(network.layer.input_layernorm(x), position[at] + s)
        if first is None:
            first = k, v
        else:
            own.append((k, v))
        mine = [
            torch.stack([each[i] for each in own], 1) if own else k.new_zeros(len(k), 0, *k.shape[1:]) for i in (0, 1)
        ]
        outer = torch.searchsorted(at, bounds).tolist()
        spans: list[Span] = list(zip(outer, outer[1:], inner, inner[1:], strict=False))
        mixed = AnchoredAttention.apply(q, *first, *mine, spans, torch.searchsorted(real, at))
        g = network.leave(x, mixed, gate)
        outputs.append(g)
    return outputs


class MtpObjective(UnrolledObjective[MtpNetwork, MtpOptions]):
    """See ``Objective``."""

    @classmethod
    def begin(cls, setup: Setup, options: MtpOptions) -> MtpObjective:
        """Raises ParameterError for a target of another family, or from a GGUF file."""
        target = setup.weights.decoder
        if target.family.name != FAMILY or setup.source.kind != "folder":
            kind = "a GGUF file" if setup.source.kind != "folder" else f"of the family {target.family.name}"
            raise ParameterError(
                f"{setup.source.name} is {kind}: mtp is trained for folders of dense Qwen 3.5 models; train eagle for "
                "this one"
            )
        network = MtpNetwork(target, shaped_as(setup.weights, 1, qk_norm=True))
        network.initialise(setup.parts.final_norm, setup.run.options.seed)
        made = cls(
            network.to(setup.device), setup.parts.to(setup.device), setup.vocabulary, options, setup.counts
        )  # fmt: skip
        made.write = partial(write_model, setup.source, target.family.norm_offset)
        return made

    def outputs(
        self, batch: TrainBatch, anchors: Sequence[Tensor], draw: torch.Generator | None = None
    ) -> list[Tensor]:
        states, embedded = self.target.norm(batch.states[:, -1]), self.target.embed(batch.tokens)
        return unroll(self.network, states, embedded, batch.position, batch.starts, anchors)

    def export(self) -> tuple[str, Decoder, Mapping[str, Any]]:
        tensors = {name: value.detach().cpu().numpy().copy() for name, value in self.network.state_dict().items()}
        return self.options.method, self.network.shape, tensors


def write_model(
    source: Source,
    norm_offset: float,
    folder: Path,
    method: str,
    shape: Decoder,
    tensors: Mapping[str, Any],
    target: Mapping[str, Any],
    recipe: Mapping[str, Any],
) -> None:
    """The target's folder with this layer as its ``mtp.*``; config.json last, so that it is whole or none.

    The target's weights are linked where the file system can, else copied. ``method``, ``target`` and ``recipe`` go
    beside it: see ``objective.Write``. Raises OSError, ModelError.
    """
    where: dict[str, str] = {}
    for path in sorted(source.path.iterdir()):
        if not path.is_file() or path.name in ("config.json", INDEX, WEIGHTS, RECIPE):
            continue
        name = "target.safetensors" if path.name == "model.safetensors" else path.name
        if not (folder / name).exists():
            _placed(path, folder / name)
    files, stored = safetensors.read_folder(source.path)
    for path in files:
        name = "target.safetensors" if path.name == "model.safetensors" else path.name
        where |= {each: name for each in safetensors.read(path) if each in stored and not each.startswith("mtp.")}
    norms = {name: values - np.float32(norm_offset) for name, values in tensors.items() if "norm" in name}
    own = {f"mtp.{name}": values for name, values in {**tensors, **norms}.items()}
    kinds = {tensor.type for tensor in stored.values()}
    safetensors.write(folder / WEIGHTS, own, "F32" if "F32" in kinds else "BF16")
    write_json(folder / INDEX, {"metadata": {}, "weight_map": {**where, **dict.fromkeys(own, WEIGHTS)}})
    write_json(folder / RECIPE, {"method": method, "target": dict(target), "recipe": dict(recipe)})
    config = read_config(source.path)
    (config.get("text_config") or config)["mtp_num_hidden_layers"] = shape.layers
    write_json(folder / "config.json", config)


def _placed(source: Path, target: Path) -> None:
    """Weights are linked, since nobody writes into them."""
    if source.suffix == ".safetensors":
        with suppress(OSError):  # another file system, or one without links
            os.link(source.resolve(), target)
            return
    shutil.copyfile(source, target)
