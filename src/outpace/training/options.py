"""Every setting of a training: its default, its range, and its command-line option. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from outpace.common.option import check, option
from outpace.errors import Argument, ParameterError

LOSSES = ("ce", "kl", "reverse", "tv", "lk", "hybrid")  # of one token's distribution: ``losses``
LENGTH = "length"  # of the expected accepted length of a chain: ``losses.expected_length``
OPTIMISERS = ("muon", "adamw")
EAGLE_INITS = ("fresh", "layer", "now", "next", "layer+now", "layer+next")
STUDENT_INITS = ("scratch", "first", "last", "even")

_DATA, _BETWEEN = "what it learns from", "evaluations and snapshots"  # headings
_CANDIDATES = option("--candidates", help="Rows of the head a batch is trained against. 0: all.", within="[0, inf)")
_DEPTH = option("--depth", help="Tokens of a simulated chain.", within="[1, 16]")


# Options that a training which goes on may change: no step that was taken depends on them.
MAY_CHANGE = ("minutes", "epochs", "steps", "evaluate", "patience", "snapshot", "report")


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long, on what and how fast any drafter is trained. One of ``steps``, ``epochs`` and ``minutes`` ends it."""

    GROUP: ClassVar[str] = "learning"

    minutes: Annotated[
        float | None,
        option("--minutes", group="", help="Train for about so many; or give --epochs, or --steps.", within="(0, inf)"),
    ] = None
    epochs: Annotated[
        float | None, option("--epochs", group="", help="Passes over all answers.", within="(0, inf)")
    ] = None
    steps: Annotated[int | None, option("--steps", group="", help="Steps to train.", within="(0, inf)")] = None
    draft_vocab: Annotated[
        int | None,
        option(
            "--draft-vocab",
            group=_DATA,
            metavar="N",
            within="[1, inf)",
            help="Tokens that can be drafted: the answers' most frequent. Default: those of --start, else 8192.",
        ),
    ] = None
    prompt_weight: Annotated[
        float,
        option(
            "--prompt-weight", group=_DATA, help="Of a prompt's token in the loss; an answer's has 1.", within="[0, 1]"
        ),
    ] = 1.0
    loop_weight: Annotated[
        float,
        option(
            "--loop-weight",
            group=_DATA,
            help="Of a token in a tail that repeats itself; an answer's others have 1.",
            within="[0, 1]",
        ),
    ] = 1.0
    lr: Annotated[float, option("--lr", help="Greatest learning rate.", within="(0, 1)")] = 1e-3
    optimiser: Annotated[str, option("--optimiser", help="muon or adamw.", choices=OPTIMISERS)] = "muon"
    weight_decay: Annotated[float, option("--weight-decay", help="Of matrices.")] = 0.01
    warm_up: Annotated[int, option("--warm-up", help="Steps until the greatest learning rate.", within="[1, inf)")] = 40
    fall: Annotated[
        float,
        option(
            "--fall", help="Share of the steps, the last, in which the rate falls from its constant.", within="[0, 1]"
        ),
    ] = 1.0
    average: Annotated[
        float,
        option(
            "--average",
            help="Judge and keep a running average of the weights, which each step keeps to this share. 0: the last.",
            within="[0, 1)",
        ),
    ] = 0.0
    four_bits: Annotated[
        bool, option("--four-bits", help="Judge weights as 4 bits keep them, and train them so while the rate falls.")
    ] = False
    clip: Annotated[float, option("--clip", help="Greatest norm of a gradient.")] = 1.0
    tokens: Annotated[int, option("--tokens", group=_DATA, help="Tokens a batch.")] = 3072
    longest: Annotated[
        int, option("--longest", group=_DATA, help="Tokens an answer is cut at, its prompt included.")
    ] = 2048
    gather: Annotated[int, option("--gather", help="Batches a step, of all processes together.", within="[1, inf)")] = 1
    bfloat16: Annotated[bool, option("--bfloat16", help="Products in bfloat16, where the processor has them.")] = False
    held_out: Annotated[
        float, option("--held-out", group=_DATA, help="Share of prompts whose greedy answers judge the drafter.")
    ] = 0.05
    judged: Annotated[
        int, option("--judged", group=_BETWEEN, help="Most tokens of these answers that are simulated on.")
    ] = 12_000
    evaluate: Annotated[
        int, option("--evaluate", group=_BETWEEN, help="Steps between two evaluations.", within="[1, inf)")
    ] = 200
    patience: Annotated[
        int,
        option(
            "--patience", group=_BETWEEN, help="Evaluations without a gain until it stops; 0: none.", within="[0, inf)"
        ),
    ] = 0
    snapshot: Annotated[
        float, option("--snapshot", group=_BETWEEN, help="Seconds between two snapshots; an evaluation makes one, too.")
    ] = 300.0
    report: Annotated[float, option("--report", group=_BETWEEN, help="Seconds between two lines.")] = 10.0
    split_seed: Annotated[int, option("--split-seed", group=_DATA, help="Of which prompts are held out.")] = 0
    seed: Annotated[int, option("--seed", help="Of all else that is drawn at random.")] = 0

    def check(self) -> None:
        """Raises ParameterError."""
        if (self.steps, self.epochs, self.minutes).count(None) != 2:
            raise ParameterError(
                "how long to train has one unit: give one of ",
                Argument("steps"), ", ", Argument("epochs"), ", ", Argument("minutes"),
            )  # fmt: skip
        check(self)


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """EAGLE-3.1: ``share`` of the anchors go on after the first unrolled step; for ``init`` see
    ``objectives.eagle.initialise``; ``start``: a drafter whose weights and vocabulary the training begins with."""

    method: ClassVar[str] = "eagle"
    GROUP: ClassVar[str] = "the network and its loss"
    steps_ttt: Annotated[
        int, option("--steps-ttt", help="Entries that are unrolled in training.", within="[1, 16]")
    ] = 3
    share: Annotated[
        float, option("--share", help="Of entries that are unrolled beyond the first.", within="[0.05, 1]")
    ] = 0.5
    loss: Annotated[
        str, option("--loss", help="ce, kl, reverse, tv, lk, hybrid or length.", choices=(*LOSSES, LENGTH))
    ] = "ce"
    decay: Annotated[float, option("--decay", help="Unrolled entry i has weight decay^i.", within="[0.05, 1]")] = 0.9
    candidates: Annotated[int, _CANDIDATES] = 2048
    hidden_layers: Annotated[
        list[int] | None,
        option("--hidden-layer", help="Repeatable: a layer whose output it reads, from 0. Default: the usual three."),
    ] = None
    init: Annotated[
        str, option("--init", help="fresh, layer, now, next, layer+now or layer+next.", choices=EAGLE_INITS)
    ] = "next"
    start: Annotated[
        str | None,
        option("--start", help="A drafter to begin with; its optimiser's state, too, where a snapshot has it."),
    ] = None
    noise: Annotated[
        float, option("--noise", help="In the hidden states, as a share of their root mean square.", within="[0, 1)")
    ] = 0.0
    dropout: Annotated[float, option("--dropout", help="Share of hidden states left out.", within="[0, 1)")] = 0.0
    depth: Annotated[int, _DEPTH] = 4

    def check(self) -> None:
        """Raises ParameterError."""
        check(self)
        layers = self.hidden_layers or []
        if layers != sorted(set(layers)):
            raise ParameterError(Argument("hidden_layers", layers), ": name layers in ascending order, each once")


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Medusa-1: heads on the target's last hidden state, and the search of the tree of their candidates."""

    method: ClassVar[str] = "medusa"
    GROUP: ClassVar[str] = "the network and its loss"
    heads: Annotated[int, option("--heads", help="Tokens ahead.", within="[1, 64]")] = 4
    layers: Annotated[int, option("--layers", help="Residual blocks of a head.", within="[1, 64]")] = 1
    decay: Annotated[float, option("--decay", help="Head k has weight decay^k.", within="(0, 1]")] = 0.8
    candidates: Annotated[int, _CANDIDATES] = 2048
    nodes: Annotated[int, option("--nodes", help="Of the tree that is searched.", within="[1, 1024]")] = 32
    ranks: Annotated[int, option("--ranks", help="Candidates of a head in that tree.", within="[1, 1024]")] = 10

    def check(self) -> None:
        """Raises ParameterError."""
        check(self)


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """DSpark. ``length`` is D-PACE's aim (arXiv 2605.18810): what is missing of a block's expected accepted length, as
    a share of its slots. The confidence head learns whether greedy decoding accepts a slot ("agreement"), or how often
    sampling does ("overlap", DSpark's own)."""

    method: ClassVar[str] = "parallel"
    GROUP: ClassVar[str] = "the network and its loss"
    block: Annotated[int, option("--block", help="Tokens a draft.", within="[1, 64]")] = 7
    layers: Annotated[int, option("--layers", help="Of the network.", within="[1, 64]")] = 2
    rank: Annotated[
        int, option("--markov-rank", help="Of what the token before adds; 0: nothing.", within="[0, 4096]")
    ] = 64
    mask_token: Annotated[
        int | None, option("--mask-token", help="Stands for tokens that are not known. Default: the rarest token.")
    ] = None
    anchors: Annotated[float, option("--anchors", help="Blocks for each token that counts.", within="(0, 1]")] = 0.25
    candidates: Annotated[int, _CANDIDATES] = 2048
    slope: Annotated[
        float, option("--slope", help="Token k of a block has weight e^(-k / slope).", within="(0, inf)")
    ] = 4.0
    cross_entropy: Annotated[float, option("--cross-entropy", help="Its weight.", within="[0, inf)")] = 0.1
    l1: Annotated[float, option("--l1", help="Weight of the L1 distance from the target.", within="[0, inf)")] = 0.9
    length: Annotated[float, option("--length", help="Weight of the expected accepted length.", within="[0, inf)")] = (
        0.0
    )
    confidence: Annotated[
        float, option("--confidence", help="Weight of the confidence head's loss.", within="[0, inf)")
    ] = 1.0
    confidence_of: Annotated[
        str,
        option(
            "--confidence-of", help="agreement (of greedy decoding) or overlap (of sampling).",
            choices=("agreement", "overlap"),
        ),
    ] = "agreement"  # fmt: skip

    def check(self) -> None:
        """Raises ParameterError."""
        check(self)


@dataclass(frozen=True, slots=True)
class DistilOptions:
    """A small decoder. ``on_policy``: these sequences are cut at a random place and continued by the student; the loss
    is on the tokens that it sampled. ``free``: embedding and head are trained, else they stay the target's."""

    method: ClassVar[str] = "distil"
    GROUP: ClassVar[str] = "the network and its loss"
    layers: Annotated[int, option("--layers", help="Of the student.", within="[1, inf)")] = 4
    init: Annotated[
        str,
        option("--init", help="scratch, or the target's layers: first, last or even (spread).", choices=STUDENT_INITS),
    ] = "even"
    loss: Annotated[
        str, option("--loss", help="kl (forward), reverse, tv (1 - acceptance), lk or hybrid.", choices=LOSSES)
    ] = "kl"
    free: Annotated[bool, option("--free", help="Train embedding and head, too; else they stay the target's.")] = False
    all_tokens: Annotated[
        bool, option("--all-tokens", help="The loss covers all tokens, not only --draft-vocab of them.")
    ] = False
    on_policy: Annotated[
        float, option("--on-policy", help="Share of answers that the student continues.", within="[0, 1]")
    ] = 0.0
    on_policy_tokens: Annotated[
        int, option("--on-policy-tokens", help="Tokens of such a continuation.", within="[1, 1024]")
    ] = 32
    depth: Annotated[int, _DEPTH] = 4

    def check(self) -> None:
        """Raises ParameterError."""
        check(self)


Options = EagleOptions | MedusaOptions | ParallelOptions | DistilOptions
