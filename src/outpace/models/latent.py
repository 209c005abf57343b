"""Latent attention (arXiv 2405.04434) as data: its sizes from GGUF metadata or config.json."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.models import architecture, rope
from outpace.models.architecture import KEYS, Family
from outpace.models.weights.facts import Facts

_MOST = 1 << 12  # of any size


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention to latent vectors of ``rank`` numbers. A head's queries and keys have ``plain`` and ``rotated`` parts,
    its values ``value`` numbers; queries are made of latent vectors, too, of ``q_rank`` numbers, 0: of hidden states.

    ``neighbours``: pairs that turn together stand side by side. ``eps``: of the latent vectors' norms.
    """

    rank: int
    q_rank: int
    plain: int
    rotated: int
    value: int
    neighbours: bool
    eps: float


def from_gguf(facts: Facts) -> Latent:
    """A GGUF file's latent attention; old files have the sizes of heads under the names that new ones have for their
    keys and values in the cache."""
    rank, rotated = facts.whole("attention.kv_lora_rank", most=_MOST), facts.whole("rope.dimension_count")
    new = "_mla" if facts.get("attention.key_length_mla") is not None else ""
    said = {"head_count_kv": facts.whole("attention.head_count")}
    if new:
        said = {"head_count_kv": 1, "key_length": rank + rotated, "value_length": rank}
    for key, value in said.items():
        if facts.whole(f"attention.{key}", value) != value:
            there = facts.get(f"attention.{key}")
            raise facts.fail(f"its {facts.prefix}attention.{key} is {there}, but must be {value}")
    each = facts.whole(f"attention.key_length{new}", most=_MOST)
    if rotated >= each or rotated % 2:
        raise facts.fail(
            f"{facts.prefix}rope.dimension_count is {rotated}, but must be an even part of a head's {each}"
        )
    return Latent(
        rank=rank,
        q_rank=facts.whole("attention.q_lora_rank", 0, least=0),
        plain=each - rotated,
        rotated=rotated,
        value=facts.whole(f"attention.value_length{new}", most=_MOST),
        neighbours=True,
        eps=facts.number(KEYS["eps"][0]),
    )


def spread(facts: Facts, family: Family) -> tuple[float, float]:
    """By how many logarithms a GGUF file's yarn divides its rotations' scale, and what it multiplies scores by."""
    if facts.get("rope.scaling.type") != "yarn" or not (family.grows or family.latent):
        return 0.0, 1.0
    key = "rope.scaling.yarn_log_multiplier"
    if family.latent is None:
        return (facts.number(key) if facts.get(key) else 0.0), 1.0
    by = round(10 * facts.number(key), 6)  # files have a tenth of it, in float32
    return 1.0, rope.mscale(facts.number("rope.scaling.factor"), by) ** 2


def from_config(facts: Facts, rule: architecture.Latent) -> Latent:
    """A folder's latent attention."""
    rotated = facts.whole("qk_rope_head_dim", most=_MOST)
    if rotated % 2:
        raise facts.fail(f"qk_rope_head_dim is {rotated}, and must be even")
    return Latent(
        rank=facts.whole("kv_lora_rank", most=_MOST),
        q_rank=0 if facts.get("q_lora_rank") is None else facts.whole("q_lora_rank"),
        plain=facts.whole("qk_nope_head_dim", most=_MOST),
        rotated=rotated,
        value=facts.whole("v_head_dim", most=_MOST),
        neighbours=bool(facts.get(rule.neighbours_key)) if rule.neighbours_key else rule.neighbours,
        eps=1e-6,  # whatever other norms have, in transformers
    )


def wider(facts: Facts) -> float:
    """What scores of latent attention are multiplied by where rotations are stretched."""
    stretch, parameters = facts.part("rope_scaling"), facts.part("rope_parameters")
    stretch = stretch if stretch.all else parameters
    if stretch.get("rope_type", stretch.get("type", "default")) == "default" or not stretch.get("mscale_all_dim"):
        return 1.0
    return rope.mscale(stretch.number("factor"), stretch.number("mscale_all_dim")) ** 2
