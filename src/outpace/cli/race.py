"""``outpace race``: plain and drafted decoding side by side."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command
from outpace.cli.options import Common, Draft, Load, Sampling
from outpace.cli.summary import looping
from outpace.cli.terminal import coloured, folded
from outpace.common.parameter import argument, option
from outpace.errors import Argument, ParameterError

if TYPE_CHECKING:
    from outpace.engine.engine import Engine

_SHARE = 0.1  # seconds for which one of them decodes before it is the other's turn
_LINES = 12  # of each answer that stay in sight, where the terminal has as many
_HEAD = 3  # lines that they cannot have: two above, and the cursor's


@dataclass(slots=True)
class Lane:
    """One of the two. ``seconds``: of its own decoding, prefill included; ``after``: its tokens and seconds by step."""

    name: str
    engine: Engine
    request: int
    seconds: float = 0.0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    after: list[tuple[int, float]] = field(default_factory=list)
    done: bool = False

    def advance(self, seconds: float) -> None:
        """Decode for about ``seconds``."""
        begun, before = time.perf_counter(), self.seconds
        while not self.done and self.seconds - before < seconds:
            for delta in self.engine.step():
                self.text += delta.text
                self.tokens += delta.token_ids
                if delta.result is not None:
                    delta.result.raise_for_error()
                    self.done = True
            self.seconds = before + time.perf_counter() - begun
            self.after.append((len(self.tokens), self.seconds))

    @property
    def speed(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def until(self, tokens: int) -> float:
        """Seconds until it had so many."""
        return next(seconds for count, seconds in self.after if count >= tokens)


def run(
    load: Load,
    draft: Draft,
    sampling: Sampling,
    common: Common,
    prompt: Annotated[str, argument("What both answer.")] = "Write a Python function that adds two numbers.",
    raw: Annotated[bool, option("Give the model the text itself, without a chat template.")] = False,
) -> int:
    """Let plain and drafted decoding race, live, each in an engine of its own over the same model.

    They take turns of a tenth of a second, so that neither slows the other; a clock runs only in its owner's turn.
    Exit code 1 if their tokens differ.
    """
    from outpace.common.arrays import repeated_tail
    from outpace.exact.noise import fresh_seed
    from outpace.measure.same import require_tokens

    params = sampling.params()
    params = params.with_(seed=fresh_seed() if params.seed is None else params.seed)
    require_tokens(draft.acceptance, params)
    if draft.drafter == "none":
        raise ParameterError(Argument("drafter", "none"), " would race against itself: name another, or leave it out")
    plain, drafted = load.engines(["none", draft.drafter], prefix_rows=0, size=draft.size, acceptance=draft.acceptance)
    with plain, drafted:
        tokens = plain.encode(prompt, raw=raw)
        lanes = [
            Lane(name, engine, engine.add(tokens, params))
            for name, engine in (("plain", plain), (drafted.drafter.name, drafted))
        ]
        live = sys.stdout.isatty() and not common.prints_json
        shown = 0
        while not all(lane.done for lane in lanes):
            for lane in lanes:
                lane.advance(_SHARE)
            if live:
                shown = _show(lanes, shown)
    if live:
        _show(lanes, shown)
    first, second = lanes
    same = first.tokens == second.tokens
    loop = repeated_tail(first.tokens)
    before = len(first.tokens) - loop
    without = first.until(before) / second.until(before) if same and loop else None
    found: dict[str, Any] = {
        "identical": same,
        "faster": first.seconds / second.seconds,
        "without_loop": None if without is None else {"tokens": before, "faster": without},
        "lanes": [
            {
                "name": lane.name,
                "seconds": lane.seconds,
                "tokens": len(lane.tokens),
                "steps": len(lane.after),
                "text": lane.text,
            }
            for lane in lanes
        ],
    }
    if not common.emit(found):
        if not live:
            print("\n".join(_frame(lanes)))
        ahead, behind = (second, first) if second.seconds <= first.seconds else (first, second)
        took = (
            f"{ahead.name} took {ahead.seconds:.2f} s; {behind.name} took {behind.seconds:.2f} s, "
            f"{behind.seconds / ahead.seconds:.2f} times as long (one run, prefill included; outpace bench measures)"
        )
        print(f"\n{folded(took)}")
        for line in looping(first.tokens):
            print(folded(line))
        if without is not None:
            print(folded(f"until the loop, prefill included, {second.name} was {without:.2f} times as fast"))
        verdict = (
            f"identical: {len(first.tokens)} tokens"
            if same
            else "the tokens differ: outpace generate --compare says where"
        )
        print(coloured(verdict, "bold green" if same else "red"))
    return 0 if same else 1


def _show(lanes: list[Lane], shown: int) -> int:
    """Draw both over what was drawn last; how many lines that were."""
    lines = _frame(lanes)
    shown = min(shown, shutil.get_terminal_size().lines - 1)  # those above have left the terminal that was made smaller
    # Line by line: a terminal that is erased as a whole may keep what stood there in its history.
    sys.stdout.write((f"\x1b[{shown}A" if shown else "") + "".join(f"\x1b[K{line}\n" for line in lines) + "\x1b[J")
    sys.stdout.flush()
    return len(lines)


def _frame(lanes: list[Lane]) -> list[str]:
    """Two columns with the last lines of both texts."""
    size = shutil.get_terminal_size()  # a line that wraps or leaves above would be drawn over wrongly
    wide, most = max((size.columns - 3) // 2, 8), max(min(size.lines - _HEAD, _LINES), 1)
    columns = [list(_column(lane, wide, most)) for lane in lanes]
    tall = max(map(len, columns))
    return [
        " | ".join(column[i].ljust(wide) if i < len(column) else " " * wide for column in columns).rstrip()
        for i in range(tall)
    ]


def _column(lane: Lane, wide: int, most: int) -> Iterator[str]:
    figures = f": {len(lane.tokens)} tokens, {lane.seconds:.2f} s, {lane.speed:.0f}/s"
    yield (lane.name[: max(wide - len(figures), 5)] + figures)[:wide]
    yield "-" * wide
    lines = [piece for line in _printable(lane.text).splitlines() for piece in textwrap.wrap(line, wide) or [""]]
    yield from lines[-most:]


def _printable(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


COMMAND = Command(
    "race",
    run,
    "outpace race\n"
    "outpace race 'Why is the sky blue?' -d suffix+eagle:demo -n 120\n"
    "outpace race 'Tell me a story.' -m model.gguf -T 0.8 --seed 1",
)
