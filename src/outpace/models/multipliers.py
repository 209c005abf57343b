"""Falcon-H1's multipliers (muP, arXiv 2203.03466; tiiuae/Falcon-H1), each at the place where a forward can take it.

Folders have them as numbers; GGUF files have them in their weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.models.weights.facts import Facts

_KEYS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "attention_in_multiplier",
    "key_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Of embeddings and logits; of attention's scores and of what it gives; of a feed-forward's gate and of what it
    gives; of a state space's gate, inputs, B, C and time steps, and of what it gives."""

    embedding: float = 1.0
    logits: float = 1.0
    scores: float = 1.0
    attended: float = 1.0
    gate: float = 1.0
    fed: float = 1.0
    scanned: tuple[float, ...] = (1.0,) * 5
    scan: float = 1.0


NONE = Multipliers()


def from_config(facts: Facts) -> Multipliers:
    """A folder's. Raises ModelError for one that is no positive number."""
    embedding, logits, attention, key, attended, scan_in, scan = (facts.number(name, 1.0) for name in _KEYS)
    gate, fed = _several(facts, "mlp_multipliers", 2)
    return Multipliers(
        embedding=embedding,
        logits=logits,
        scores=attention * attention * key,  # of queries and of keys
        attended=attention * attended,  # of values and of the output
        gate=gate,
        fed=fed,
        scanned=tuple(scan_in * each for each in _several(facts, "ssm_multipliers", 5)),
        scan=scan,
    )


def _several(facts: Facts, key: str, count: int) -> list[float]:
    return [1.0] * count if facts.get(key) is None else facts.numbers(key, count)
