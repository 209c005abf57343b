"""The scores that the target's choices maximise, along an answer that is there already: one prefill, no decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outpace.common.arrays import F64, I32
from outpace.engine.intake import encoder
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, Model
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.models.text.tokenizer import Tokenizer

_CHUNK = 128  # positions a forward: their logits are held at once


def scores_along(
    model: Model,
    tokenizer: Tokenizer | None,
    prompt: I32,
    output: Sequence[int],
    params: SamplingParams,
    noise: Noise,
    first: int = 0,
) -> Iterator[F64]:
    """For each index ``first`` .. len(output) of the output: the scores [V] that the choice there maximises.

    ``prompt`` int32 [P]; ``tokenizer``: for rules that speak of text. Takes a row of the model's KV and gives it
    back. Raises MemoryLimitError.
    """
    rules = rules_for(params, model.info.vocab_size, encoder(tokenizer), model.info.eos_ids)
    chooser = Chooser.start(params, noise, rules, prompt).after(output[:first])
    tokens = np.concatenate([prompt, np.asarray(output, np.int32)]).astype(np.int32)
    wanted = len(prompt) - 1 + first  # the position after which the first choice is made
    row = model.kv.alloc()
    try:
        at = 0
        while at < len(tokens):
            stop = min(at + _CHUNK, wanted if at < wanted else len(tokens))
            out = model.forward(Batch.pack([row], [tokens[at:stop]], [at], [at >= wanted]))
            if at >= wanted:
                logits = out.logits(np.arange(stop - at, dtype=np.int32))
                for i, position in enumerate(range(at, stop)):
                    yield chooser.scores(logits[i])
                    if position + 1 < len(tokens):
                        chooser = chooser.advance(int(tokens[position + 1]))
            at = stop
    finally:
        model.kv.free(row)


def margins(
    model: Model,
    tokenizer: Tokenizer | None,
    prompt: I32,
    output: Sequence[int],
    params: SamplingParams,
    noise: Noise,
) -> list[float]:
    """How far each output token's score [n] lies above the best of all others; negative where it was not the best."""
    found = []
    each = scores_along(model, tokenizer, prompt, output[:-1], params, noise)
    for token, scores in zip(output, each, strict=True):
        own = float(scores[token])
        scores[token] = -np.inf
        found.append(own - float(scores.max()))
    return found


def gap_between(scores: F64, a: int, b: int) -> float:
    """How far the worse of tokens ``a`` and ``b`` lies below the best score of all [V].

    Two tokens that are close to each other but far below the best are no near-tie: neither should have been chosen.
    """
    return float(scores.max() - min(scores[a], scores[b]))
