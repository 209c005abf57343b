"""Rotary position embeddings as tables of inverse frequencies (Su et al., arXiv 2104.09864), and their scalings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from outpace.common.arrays import F32
from outpace.models.weights.facts import Facts

_ONE = np.float32(1)


@dataclass(frozen=True, slots=True)
class Rope:
    """``frequencies``: float32 [n], rotating value i of a head against i + n, and the first 2 n values only.

    ``base``: what they are powers of, but for a stretch. ``scale`` multiplies cosines and sines. ``limit``: positions
    for which it holds; None: all. Queries are multiplied by 1 + ``growth`` ln(1 + position / ``period``), the ratio
    rounded down.
    """

    base: float
    frequencies: F32
    scale: float = 1.0
    limit: int | None = None
    growth: float = 0.0
    period: int = 1

    @property
    def plain(self) -> bool:
        """Whether nothing is stretched or scaled; queries may grow."""
        own = inverse_frequencies(self.base, 2 * len(self.frequencies))
        return self.scale == 1.0 and bool((self.frequencies == own).all())


def inverse_frequencies(base: float, width: int, stretch: F32 | np.float32 = _ONE) -> F32:
    """float32 [width / 2]: base^(-2 i / width), each wave so many times as long as ``stretch`` says."""
    exponents = (np.arange(0, width, 2, dtype=np.float32) / np.float32(width)).tolist()
    # One by one in float64: the last bit of numpy's float32 powers depends on the processor.
    powers = np.array([math.pow(np.float32(base), exponent) for exponent in exponents], np.float32)
    return (_ONE / (stretch * powers)).astype(np.float32)


def from_config(facts: Facts, width: int, part: bool, longest: int) -> Rope:
    """The table that rope_parameters of config.json describe for heads of ``width``, contexts up to ``longest``.

    ``part``: a part of a head may be rotated. Raises ModelError for a kind that is not known.
    """
    kind = "longrope" if facts.get("short_factor") else facts.get("rope_type", facts.get("type", "default"))
    if kind not in KINDS:
        raise facts.fail(f"its rope scaling {kind!r} is not supported ({', '.join(KINDS)} are)")
    share = facts.number("partial_rotary_factor", 1.0)
    if part:
        width = int(width * share)
    elif share != 1 and kind not in ("default", "proportional"):  # transformers leaves it out of plain rotations
        raise facts.fail(f"its partial_rotary_factor is {share:g}, where its family rotates whole heads")
    return KINDS[kind](facts, facts.number("rope_theta"), width, longest)


def from_gguf(
    facts: Facts,
    base: float,
    width: int,
    part: bool,
    longest: int,
    divisors: F32 | None,
    short: F32 | None,
    truncate: bool = True,
    spread: float = 0.0,
) -> Rope:
    """A GGUF file's table for heads of ``width``, of which a ``part`` may be rotated, contexts up to ``longest``.

    ``divisors``, ``short``: the tensors rope_freqs and rope_factors_short, where it has any. ``truncate``: bounds of
    yarn are whole dimensions. ``spread``: yarn's scale is divided by that of so many logarithms.
    """
    rotated = facts.whole("rope.dimension_count", width, most=width)
    if rotated != width and not part:
        raise facts.fail(f"its {facts.prefix}rope.dimension_count is {rotated}, where its family rotates all {width}")
    kind = facts.get("rope.scaling.type", "linear")  # as llama.cpp reads a factor alone
    scale = facts.number("rope.scaling.attn_factor", 1.0)
    factor = facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 1.0)) or 1.0
    stretch = np.float32(facts.about({"rope.scaling.factor": factor}).number("rope.scaling.factor"))
    if kind in ("none", ""):
        stretch = _ONE
    elif kind not in ("linear", "longrope", "yarn"):
        raise facts.fail(f"its rope scaling {kind!r} is not supported (linear, llama3, longrope and yarn are)")
    frequencies = inverse_frequencies(base, rotated) / stretch
    if kind == "yarn":
        if stretch == 1:
            raise facts.fail("its rotations are stretched by yarn, and rope.scaling.factor does not say how much")
        if divisors is not None or short is not None:
            raise facts.fail("its rotations are stretched twice, by yarn and by a tensor of factors")
        original = facts.whole("rope.scaling.original_context_length", longest)
        fast, slow = (
            facts.number(f"rope.scaling.yarn_beta_{end}", value) for end, value in (("fast", 32.0), ("slow", 1.0))
        )
        frequencies = _stretched_by_turns(base, rotated, float(stretch), original, fast, slow, truncate)
        scale *= mscale(float(stretch))
        scale /= mscale(float(stretch), spread)
        if facts.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise facts.fail("its yarn is applied in part (rope.scaling.yarn_ext_factor)")
    for name, by in (("rope_freqs.weight", divisors), ("rope_factors_short.weight", short)):
        if by is not None and (by.shape != frequencies.shape or not (by > 0).all()):
            raise facts.fail(f"{name} does not fit its {len(frequencies)} frequencies")
    if divisors is not None:
        frequencies = np.where(divisors < 1e30, frequencies / divisors, np.float32(0))  # 1e30: it is not rotated
    limit = None
    if short is not None:
        if stretch != 1:
            raise facts.fail("its rotations are stretched twice, by a factor and by rope_factors_short.weight")
        frequencies = inverse_frequencies(base, rotated, short)
        limit = facts.whole("rope.scaling.original_context_length")
    elif kind == "longrope":
        raise facts.fail("it has no tensor rope_factors_short.weight, so the model is incomplete")
    return Rope(base, frequencies, scale, limit)


def growing(table: Rope, facts: Facts, growth: str, original: str, longest: int) -> Rope:
    """``table`` for queries that grow by so much, which stands at the key ``growth``, whenever a position has gone
    through a context of the ``original`` length."""
    if not facts.get(growth):
        return table
    return replace(table, growth=facts.number(growth), period=facts.whole(original, longest))


def _default(facts: Facts, base: float, width: int, longest: int) -> Rope:
    return Rope(base, inverse_frequencies(base, width))


def _proportional(facts: Facts, base: float, width: int, longest: int) -> Rope:
    """Gemma 4's: the first part of the angles of a whole head; the rest stand still."""
    angles = int(facts.number("partial_rotary_factor", 1.0) * width // 2)
    frequencies = inverse_frequencies(base, width) / np.float32(facts.number("factor", 1.0))
    frequencies[angles:] = 0
    return Rope(base, frequencies)


def _linear(facts: Facts, base: float, width: int, longest: int) -> Rope:
    return Rope(base, inverse_frequencies(base, width) / np.float32(facts.number("factor")))


def _llama3(facts: Facts, base: float, width: int, longest: int) -> Rope:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    frequencies = inverse_frequencies(base, width)
    factor = np.float32(facts.number("factor"))
    low, high = np.float32(facts.number("low_freq_factor")), np.float32(facts.number("high_freq_factor"))
    context = np.float32(facts.number("original_max_position_embeddings"))
    wavelength = np.float32(2 * math.pi) / frequencies
    blend = (context / wavelength - low) / (high - low)
    between = (np.float32(1) - blend) * frequencies / factor + blend * frequencies
    stretched = np.where(wavelength > context / low, frequencies / factor, between)
    return Rope(base, np.where(wavelength < context / high, frequencies, stretched).astype(np.float32))


def _longrope(facts: Facts, base: float, width: int, longest: int) -> Rope:
    """The short factors (Ding et al., arXiv 2402.13753), which hold up to the original length: past it every position
    would be rotated by the long ones, and keys that were written before would not fit."""
    short = np.array(facts.numbers("short_factor", width // 2), np.float32)
    original = facts.whole("original_max_position_embeddings", longest)
    factor = facts.number("factor", longest / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(base, inverse_frequencies(base, width, short), facts.number("attention_factor", scale), original)


def _yarn(facts: Facts, base: float, width: int, longest: int) -> Rope:
    """YaRN (Peng et al., arXiv 2309.00071)."""
    original = facts.whole("original_max_position_embeddings", longest)
    factor = longest / original if facts.get("factor") is None else facts.number("factor")
    fast, slow = (
        facts.number(f"beta_{end}") if facts.get(f"beta_{end}") else value
        for end, value in (("fast", 32.0), ("slow", 1.0))
    )
    frequencies = _stretched_by_turns(base, width, factor, original, fast, slow, facts.get("truncate", True))
    scale, over = facts.get("mscale"), facts.get("mscale_all_dim")
    if facts.get("attention_factor") is not None:
        return Rope(base, frequencies, facts.number("attention_factor"))
    if scale and over:
        return Rope(
            base, frequencies, mscale(factor, facts.number("mscale")) / mscale(factor, facts.number("mscale_all_dim"))
        )
    return Rope(base, frequencies, mscale(factor))


def mscale(factor: float, by: float = 1.0) -> float:
    """What yarn multiplies by where contexts are stretched by ``factor``; ``by``: 0 for 1."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def _stretched_by_turns(
    base: float, width: int, factor: float, original: int, fast: float, slow: float, truncate: bool = True
) -> F32:
    """Inverse frequencies of waves that turn more than ``fast`` times within ``original`` positions as they are, of
    those that turn less than ``slow`` times divided by ``factor``, and blended between, by dimension."""

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = ((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    frequencies = inverse_frequencies(base, width)
    blended: F32 = (frequencies / np.float32(factor) * ramp + frequencies * (1 - ramp)).astype(np.float32)
    return blended


KINDS: dict[str, Callable[[Facts, float, int, int], Rope]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "longrope": _longrope, "yarn": _yarn,
    "proportional": _proportional,
}  # fmt: skip
