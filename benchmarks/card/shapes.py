"""Models of a published shape and of random weights, made where they run, that say what is known beforehand.

Whatever stands before token t, the likeliest token after it is ``follows(t)``, by a wide margin: so answers are known,
drafts can be right as often as is wanted, and rounding decides nothing. A draft model and an EAGLE drafter of such
weights cost what trained ones of their shape cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outpace.common.arrays import I32
from outpace.drafters.base import Drafter, RowView
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import Decoder, EagleConfig, eagle_layers, tensor_shapes
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.learned.networks.eagle import TorchEagle
from outpace.exact.drafts import Drafts
from outpace.models.base import Model

STRIDE = 7919


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int = 32768


LARGE = Shape(4096, 14336, 32, 32, 8, 128, 128256)  # Llama 3.1 8B's
SMALL = Shape(2048, 8192, 16, 32, 8, 64, 128256)  # Llama 3.2 1B's
TINY = Shape(64, 128, 5, 4, 2, 16, 4000, 2048)  # the script itself, where there is no card
TINIER = Shape(32, 64, 2, 2, 1, 16, 4000, 2048)


def follows(token: int, vocab: int) -> int:
    return (token + STRIDE) % vocab


def right(token: int, chance: float) -> bool:
    """Whether a drafter knows what follows ``token``: for that share of tokens, always the same ones."""
    return (token * 2654435761) % 2**32 < chance * 2**32


def text(start: int, n: int, vocab: int) -> list[int]:
    """A text of n tokens, as the models continue it."""
    return [(start + i * STRIDE) % vocab for i in range(n)]


def llama(shape: Shape, device: torch.device, dtype: torch.dtype, *, chance: float = 1.0, margin: float = 24.0) -> Any:
    """A LlamaForCausalLM that says ``follows`` after the ``chance`` of tokens, and a neighbour after the others: about
    ``margin`` is the logit of it, ``margin`` / sqrt(hidden) the deviation of the others'."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner, head_dim=shape.head_dim,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    module = module.to(dtype).to_empty(device=device)
    module.model.rotary_emb = type(module.model.rotary_emb)(config=config).to(device)
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            small = name.endswith(("o_proj.weight", "down_proj.weight"))  # so that a token's own embedding prevails
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 1.0 if "embed" in name else 0.0003 if small else 0.02, generator=draw)
        said = [follows(t, shape.vocab) + (0 if right(t, chance) else 1) for t in range(shape.vocab)]
        target = torch.tensor(said, device=device) % shape.vocab
        embedding = module.model.embed_tokens.weight
        module.lm_head.weight.zero_().index_add_(0, target, embedding, alpha=margin / shape.hidden)
    return module.eval()


def eagle(target: Model, shape: Shape, draft_vocab: int) -> TorchEagle:
    """EAGLE-3's network for a target of this shape, of random weights."""
    decoder = Decoder(
        shape.hidden, 1, shape.heads, shape.kv_heads, shape.head_dim, shape.inner, 1e-5, 5e5, shape.positions
    )
    config = EagleConfig(decoder, shape.vocab, draft_vocab, eagle_layers(shape.layers))
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, size in {**tensor_shapes(config), "lm_head.weight": (draft_vocab, shape.hidden)}.items():
        one = len(size) == 1
        tensors[name] = np.ones(size, np.float32) if one else rng.standard_normal(size, np.float32) * np.float32(0.02)
    return TorchEagle(target, Checkpoint("eagle", config, tensors))


class Oracle(Drafter):
    """Drafts what follows, right by ``chance`` a token; costs nothing."""

    def __init__(self, vocab: int, chance: float = 1.0) -> None:
        self.name = "oracle"
        self._vocab, self._chance = vocab, chance

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        return Drafts.chains([self.chain(int(v.tokens[-1]), int(n)) for v, n in zip(rows, sizes, strict=True)])

    def chain(self, token: int, n: int) -> list[int]:
        found: list[int] = []
        for _ in range(n):
            wrong = not right(token, self._chance)
            token = follows(token, self._vocab)
            found.append((token + wrong) % self._vocab)
        return found


class RecordedEagle(LearnedDrafter):
    """EAGLE whose chains cost what they cost, and have an oracle's tokens in the end."""

    def __init__(self, network: TorchEagle, layers: int, vocab: int, chance: float) -> None:
        super().__init__(network, eagle_layers(layers), "eagle", vocab, branch=1)
        self._oracle = Oracle(vocab, chance)

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        drafts = super().propose(rows, sizes)
        for i, view in enumerate(rows):
            n = int(drafts.widths[i])
            drafts.tokens[i, :n] = self._oracle.chain(int(view.tokens[-1]), n)
        return drafts
