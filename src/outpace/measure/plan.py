"""How much to draft, from three numbers: how often a drafted token is accepted, what drafting one costs, and what
verifying costs by width.

A draft is a chain of ``size`` tokens, each accepted with the same chance if the one before it was. A step keeps those
before the first refusal and one token of the target's own: 1 + a + ... + a^size of them on average (Leviathan et al.,
arXiv 2211.17192, equation 1). It takes the time of drafting and of one forward of size + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from outpace.errors import Argument, ParameterError


class Planned(NamedTuple):
    """Drafts of ``size`` tokens: ``tokens`` a step on average, ``step``: its time in plain steps, ``speed``: tokens a
    plain step's time, where plain decoding has 1."""

    size: int
    tokens: float
    step: float
    speed: float


def expected_tokens(acceptance: float, size: int) -> float:
    """Tokens that a step with a chain of ``size`` drafted tokens keeps on average, the target's own included."""
    return sum(acceptance**i for i in range(size + 1))


def plan(acceptance: float, draft: float, width: Callable[[int], float], most: int) -> list[Planned]:
    """Drafts of 0 to ``most`` tokens. ``draft``: what drafting a token takes, in plain steps; ``width``: seconds of a
    forward by its tokens. Raises ParameterError for numbers out of range."""
    for name, value, least, largest in (("acceptance", acceptance, 0, 1), ("draft", draft, 0, 1000)):
        if not least <= value <= largest:
            raise ParameterError(Argument(name, value), f" is out of range: give {least} to {largest}")
    if not 1 <= most <= 63:
        raise ParameterError(Argument("most", most), " is out of range: give 1 to 63")
    found, plain = [], width(1)
    for size in range(most + 1):
        tokens, step = expected_tokens(acceptance, size), size * draft + width(size + 1) / plain
        found.append(Planned(size, tokens, step, tokens / step))
    return found


def best(planned: Sequence[Planned]) -> Planned:
    """The fastest; the smallest draft of several."""
    return max(planned, key=lambda each: (each.speed, -each.size))


def bars(planned: Sequence[Planned], columns: int) -> list[str]:
    """The curve of speeds as lines of text at most so wide: a bar a size, its best one marked."""
    top, room = best(planned), max(8, columns - 46)
    longest = max(each.speed for each in planned)
    lines = [f"{'draft':>5}  {'tokens a step':>13}  {'plain steps':>11}  speed"]
    for each in planned:
        bar = "#" * max(1, round(room * each.speed / longest))
        mark = "  best" if each == top else ""
        lines.append(f"{each.size:>5}  {each.tokens:>13.2f}  {each.step:>11.2f}  {each.speed:.2f} {bar}{mark}")
    return lines
