"""Every setting of a training: its default, its range, and its command-line option. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outpace.common.parameter import Choice, Interval, check, defined, option
from outpace.errors import Argument, ParameterError

LOSSES = ("ce", "kl", "reverse", "tv", "lk", "hybrid")  # of one token's distribution: ``losses``
LENGTH = "length"  # of the expected accepted length of a chain: ``losses.expected_length``
OPTIMISERS = ("muon", "adamw")
EAGLE_INITS = ("fresh", "layer", "now", "next", "layer+now", "layer+next")
STUDENT_INITS = ("scratch", "first", "last", "even")
ANSWER = "answer"  # -log q of the answer's own token, which needs no target

_DATA, _BETWEEN = "what it learns from", "evaluations and snapshots"  # headings
_CANDIDATES = option("Rows of the head a batch is trained against. 0: all.", values=Interval("[0, inf)"))
_DEPTH = option("Tokens of a simulated chain.", values=Interval("[1, 16]"))


# Options that a training which goes on may change: no step that was taken depends on them.
MAY_CHANGE = ("minutes", "epochs", "steps", "evaluate", "patience", "snapshot", "report")


_LONGEST = 2048  # tokens an answer is cut at, where nothing says how many


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long, on what and how fast any drafter is trained. One of ``steps``, ``epochs`` and ``minutes`` ends it."""

    GROUP: ClassVar[str] = "learning"

    minutes: float | None = defined(
        None, "Train for about so many; or give --epochs, or --steps.", Interval("(0, inf)"), group=""
    )
    epochs: float | None = defined(None, "Passes over all answers.", Interval("(0, inf)"), group="")
    steps: int | None = defined(None, "Steps to train.", Interval("(0, inf)"), group="")
    draft_vocab: int | None = defined(
        None,
        "Tokens that can be drafted: the answers' most frequent. Default: those of --start, else 8192.",
        Interval("[1, inf)"),
        group=_DATA,
        metavar="N",
    )
    prompt_weight: float = defined(
        1.0, "Of a prompt's token in the loss; an answer's has 1.", Interval("[0, 1]"), group=_DATA
    )
    loop_weight: float = defined(
        1.0, "Of a token in a tail that repeats itself; an answer's others have 1.", Interval("[0, 1]"), group=_DATA
    )
    lr: float = defined(1e-3, "Greatest learning rate.", Interval("(0, 1)"))
    optimiser: str = defined("muon", "muon or adamw.", Choice(OPTIMISERS))
    weight_decay: float = defined(0.01, "Of matrices.")
    warm_up: int = defined(40, "Steps until the greatest learning rate.", Interval("[1, inf)"))
    fall: float = defined(
        1.0, "Share of the steps, the last, in which the rate falls from its constant.", Interval("[0, 1]")
    )
    average: float = defined(
        0.0,
        "Judge and keep a running average of the weights, which each step keeps to this share. 0: the last.",
        Interval("[0, 1)"),
    )
    four_bits: bool = defined(False, "Judge weights as 4 bits keep them, and train them so while the rate falls.")
    clip: float = defined(1.0, "Greatest norm of a gradient.")
    tokens: int = defined(3072, "Tokens a batch.", group=_DATA)
    longest: int | None = defined(
        None, "Tokens an answer is cut at, its prompt included. Default: 2048, or a batch.", group=_DATA
    )
    gather: int = defined(1, "Batches a step, of all processes together.", Interval("[1, inf)"))
    bfloat16: bool = defined(False, "Products in bfloat16, where the processor has them.")
    held_out: float = defined(0.05, "Share of prompts whose greedy answers judge the drafter.", group=_DATA)
    judged: int = defined(12_000, "Most tokens of these answers that are simulated on.", group=_BETWEEN)
    evaluate: int = defined(200, "Steps between two evaluations.", Interval("[1, inf)"), group=_BETWEEN)
    patience: int = defined(
        0, "Evaluations without a gain until it stops; 0: none.", Interval("[0, inf)"), group=_BETWEEN
    )
    snapshot: float = defined(300.0, "Seconds between two snapshots; an evaluation makes one, too.", group=_BETWEEN)
    report: float = defined(10.0, "Seconds between two lines.", group=_BETWEEN)
    split_seed: int = defined(0, "Of which prompts are held out.", group=_DATA)
    seed: int = defined(0, "Of all else that is drawn at random.")

    def check(self) -> None:
        """Raises ParameterError."""
        if (self.steps, self.epochs, self.minutes).count(None) != 2:
            raise ParameterError(
                "the length of a training is given once: by one of ",
                Argument("steps"), ", ", Argument("epochs"), ", ", Argument("minutes"),
            )  # fmt: skip
        check(self)
        if self.longest is None:
            object.__setattr__(self, "longest", min(_LONGEST, self.tokens))


class _Method:
    __slots__ = ()
    GROUP: ClassVar[str] = "the network and its loss"

    def check(self) -> None:
        """Raises ParameterError."""
        check(self)


@dataclass(frozen=True, slots=True)
class EagleOptions(_Method):
    """EAGLE-3.1: ``share`` of the anchors go on after the first unrolled step; for ``init`` see
    ``objectives.eagle.initialise``; ``start``: a drafter whose weights and vocabulary the training begins with."""

    method: ClassVar[str] = "eagle"
    steps_ttt: int = defined(3, "Entries that are unrolled in training.", Interval("[1, 16]"))
    share: float = defined(0.5, "Of entries that are unrolled beyond the first.", Interval("[0.05, 1]"))
    loss: str = defined("ce", "ce, kl, reverse, tv, lk, hybrid or length.", Choice((*LOSSES, LENGTH)))
    decay: float = defined(0.9, "Unrolled entry i has weight decay^i.", Interval("[0.05, 1]"))
    candidates: int = defined(2048, _CANDIDATES)
    hidden_layers: list[int] | None = defined(
        None, "Repeatable: a layer whose output it reads, from 0. Default: the usual three.", option=("--hidden-layer",)
    )
    init: str = defined("next", "fresh, layer, now, next, layer+now or layer+next.", Choice(EAGLE_INITS))
    start: str | None = defined(None, "A drafter to begin with; its optimiser's state, too, where a snapshot has it.")
    noise: float = defined(0.0, "In the hidden states, as a share of their root mean square.", Interval("[0, 1)"))
    dropout: float = defined(0.0, "Share of hidden states left out.", Interval("[0, 1)"))
    depth: int = defined(4, _DEPTH)

    def check(self) -> None:
        """Raises ParameterError."""
        check(self)
        layers = self.hidden_layers or []
        if layers != sorted(set(layers)):
            raise ParameterError(Argument("hidden_layers", layers), ": name layers in ascending order, each once")


@dataclass(frozen=True, slots=True)
class MtpOptions(_Method):
    """A layer in a model's own files that drafts. It is unrolled as EAGLE is: arguments as there."""

    method: ClassVar[str] = "mtp"
    steps_ttt: int = defined(3, "Entries that are unrolled in training.", Interval("[1, 16]"))
    share: float = defined(0.5, "Of entries that are unrolled beyond the first.", Interval("[0.05, 1]"))
    loss: str = defined("ce", "ce, kl, reverse, tv, lk, hybrid or length.", Choice((*LOSSES, LENGTH)))
    decay: float = defined(0.9, "Unrolled entry i has weight decay^i.", Interval("[0.05, 1]"))
    candidates: int = defined(2048, _CANDIDATES)
    depth: int = defined(4, _DEPTH)


@dataclass(frozen=True, slots=True)
class MedusaOptions(_Method):
    """Medusa-1: heads on the target's last hidden state, and the search of the tree of their candidates."""

    method: ClassVar[str] = "medusa"
    heads: int = defined(4, "Tokens ahead.", Interval("[1, 64]"))
    layers: int = defined(1, "Residual blocks of a head.", Interval("[1, 64]"))
    decay: float = defined(0.8, "Head k has weight decay^k.", Interval("(0, 1]"))
    candidates: int = defined(2048, _CANDIDATES)
    nodes: int = defined(32, "Of the tree that is searched.", Interval("[1, 1024]"))
    ranks: int = defined(10, "Candidates of a head in that tree.", Interval("[1, 1024]"))


@dataclass(frozen=True, slots=True)
class ParallelOptions(_Method):
    """DSpark. ``length`` is D-PACE's aim (arXiv 2605.18810): what is missing of a block's expected accepted length, as
    a share of its slots. The confidence head learns whether greedy decoding accepts a slot ("agreement"), or how often
    sampling does ("overlap", DSpark's own)."""

    method: ClassVar[str] = "parallel"
    block: int = defined(7, "Tokens a draft.", Interval("[1, 64]"))
    layers: int = defined(2, "Of the network.", Interval("[1, 64]"))
    rank: int = defined(
        64, "Of what the token before adds; 0: nothing.", Interval("[0, 4096]"), option=("--markov-rank",)
    )
    mask_token: int | None = defined(None, "Stands for tokens that are not known. Default: the rarest token.")
    anchors: float = defined(0.25, "Blocks for each token that counts.", Interval("(0, 1]"))
    candidates: int = defined(2048, _CANDIDATES)
    slope: float = defined(4.0, "Token k of a block has weight e^(-k / slope).", Interval("(0, inf)"))
    cross_entropy: float = defined(0.1, "Its weight.", Interval("[0, inf)"))
    l1: float = defined(0.9, "Weight of the L1 distance from the target.", Interval("[0, inf)"))
    length: float = defined(0.0, "Weight of the expected accepted length.", Interval("[0, inf)"))
    confidence: float = defined(1.0, "Weight of the confidence head's loss.", Interval("[0, inf)"))
    confidence_of: str = defined(
        "agreement", "agreement (of greedy decoding) or overlap (of sampling).", Choice(("agreement", "overlap"))
    )


@dataclass(frozen=True, slots=True)
class DistilOptions(_Method):
    """A small decoder. ``on_policy``: these sequences are cut at a random place and continued by the student; the loss
    is on the tokens that it sampled. ``free``: embedding and head are trained, else they stay the target's."""

    method: ClassVar[str] = "distil"
    layers: int = defined(4, "Of the student.", Interval("[1, inf)"))
    hidden: int | None = defined(
        None, "Width of the student's states, best a multiple of 32. Default: the target's.", Interval("[1, inf)")
    )
    init: str = defined("even", "scratch, or the target's layers: first, last or even (spread).", Choice(STUDENT_INITS))
    start: str | None = defined(None, "A model to go on with, perhaps another training's OUT, instead of the three.")
    loss: str = defined(
        "kl",
        "kl (forward), reverse, tv (1 - acceptance), lk, hybrid, or answer: its own tokens, without the target.",
        Choice((*LOSSES, ANSWER)),
    )
    free: bool = defined(False, "Train embedding and head, too; else they stay the target's.")
    all_tokens: bool = defined(False, "The loss covers all tokens, not only --draft-vocab of them.")
    candidates: int = defined(0, _CANDIDATES)
    on_policy: float = defined(0.0, "Share of answers that the student continues.", Interval("[0, 1]"))
    on_policy_tokens: int = defined(32, "Tokens of such a continuation.", Interval("[1, 1024]"))
    depth: int = defined(4, _DEPTH)

    def check(self) -> None:
        """Raises ParameterError."""
        check(self)
        if self.on_policy and self.loss == ANSWER:
            raise ParameterError(
                Argument("loss", ANSWER), " learns the answers' own tokens, and ",
                Argument("on_policy", self.on_policy), " replaces them: give another loss, or 0",
            )  # fmt: skip


Options = EagleOptions | MtpOptions | MedusaOptions | ParallelOptions | DistilOptions
