"""What the policy knows of a row, and the bounds on what drafting may lose it."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.control.timing import Timing

EXPLORE = 0.01  # share of a row's decoding time that re-tries may cost, of all rows in its batch together
HARM = 0.01  # share of its decoding time that a row may lose to what others draft
FIRST_TRIES = 3  # a new row's tries that need not be earned
ALLOWANCE = 2.0  # plain steps that drafting may have lost, before what is expected of it counts for nothing
FORGIVEN = 0.005  # share of a row's decoding time that is added to the allowance
PATIENCE = 12  # fruitless proposals before a row may stop asking; then it waits 8, 16, ... steps between two
LONGEST_WAIT = 64


@dataclass(slots=True)
class Row:
    """What is known of a row."""

    kind: int  # of sampling
    biases: list[float] = field(default_factory=lambda: [0.0, 0.0])  # in log-odds, of first nodes and of deeper ones
    odds: list[float] = field(default_factory=lambda: [1.0, 1.0])  # exp(-bias)
    proposals: int = 0
    fruitless: int = 0  # proposals in a row of which nothing was worth verifying
    wait: int = 0  # steps until it asks again
    waited: int = 4  # how long it waited the last time
    reach: int = 64  # nodes worth asking for: about twice what was verified last
    value: float = 0.0  # seconds that a proposal saves, lately
    lead: float = 0.0  # seconds that it is ahead of plain decoding, by its own drafts less what all drafts took
    balance: float = 0.0  # seconds that drafting has saved so far: what was accepted, less what it took
    ratio: float | None = None  # speed over plain decoding of its drafts lately, where they are verified whole
    tries: int = 0
    spent: float = 0.0  # seconds that tries were expected to lose
    seconds: float = 0.0  # of its decoding: its share of the steps that it was in
    wall: float = 0.0  # those steps whole

    def waited_for(self, seconds: float, rows: int) -> None:
        """A step of so many seconds, with so many rows in it."""
        self.seconds += seconds / rows
        self.wall += seconds

    def trusted(self, plain: float) -> bool:
        """Whether what is expected of its drafts may be believed: not while they have lost more than they may."""
        return self.balance > -ALLOWANCE * plain - FORGIVEN * self.seconds

    def may_try(self, loss: float, rows: int) -> bool:
        """Whether it may verify what is expected to lose so many seconds, to learn whether that is still so. ``rows``:
        in the batch, all of which wait, and learn from each other's tries."""
        if self.tries * rows >= FIRST_TRIES and self.spent + loss > EXPLORE * self.seconds:
            return False
        self.tries += 1
        self.spent += loss
        return True

    @property
    def slack(self) -> float:
        """Seconds that it may lose now and still be as good as never slower than plain decoding."""
        return self.lead + HARM * self.wall

    def ask_again(self, saved: float, timing: Timing, rows: int) -> None:
        """When it asks for drafts next: every step while that pays, ever more rarely while it does not.

        ``saved``: seconds that its proposal is expected to save; asking takes its share of what it takes ``rows``.
        """
        self.value += (saved - self.value) / 16
        if saved > 0:
            self.fruitless, self.waited = 0, 4
            return
        self.fruitless += 1
        if self.fruitless >= PATIENCE:
            asking = timing.drafting(1)
            if self.value < max(asking - timing.drafting(0), asking / 3) / rows:
                self.wait = self.waited = min(2 * self.waited, LONGEST_WAIT)
