"""One NVIDIA card in under ten minutes: bandwidth, products, the transformers backend, and transformers beside it.

    python3 -m pip install -q --no-deps --no-build-isolation --target /tmp/site .   # where nothing can be downloaded
    PYTHONPATH=/tmp/site python3 -m benchmarks card --json card.json
    python -m benchmarks card --tiny                                     # the script itself, where there is no card

Llama 3.1 8B's shape with random weights, made on the card, so nothing is read or downloaded. Figures are printed and
written after every stage; a stage that fails is named and the others go on; one for which no time is left is skipped.
Exit code 1 where a stage failed or an answer was not the one that is known.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.card import shapes
from benchmarks.card.shapes import Oracle, RecordedEagle, Shape
from benchmarks.figures import Measuring, add_json, emit
from outpace.common.arrays import I32
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.registry import build, parse
from outpace.engine.engine import Engine
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch
from outpace.models.options import LoadOptions
from outpace.models.torch.model import TransformersModel
from outpace.params import SamplingParams

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
BITS_AT = (1, 2, 3, 4, 8, 16, 17, 32, 64, 128, 256, 512)  # rows of a product
Figures = dict[str, Any]


@dataclass
class Card:
    """What the stages share. ``ends``: when the last of them has to be over, on time.monotonic's clock."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool
    chance: float
    ends: float
    figures: Figures = field(default_factory=dict)
    _model: TransformersModel | None = None
    module: Any = None

    @property
    def shape(self) -> Shape:
        return shapes.TINY if self.tiny else shapes.LARGE

    @property
    def model(self) -> TransformersModel:
        if self._model is None:
            self.module = shapes.llama(self.shape, self.device, self.dtype)
            memory = (64 << 20) if self.tiny else (16 << 30)
            self._model = TransformersModel(self.module, name="card", kv_memory=memory, graphs=True, warn=print)
        return self._model

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 20, rounds: int = 3) -> float:
        """Of one call, where many follow one another: the median of rounds."""
        repeats, rounds = (2, 1) if self.tiny else (repeats, rounds)
        run()
        found = []
        for _ in range(rounds):
            self.wait()
            begin = time.perf_counter()
            for _ in range(repeats):
                run()
            self.wait()
            found.append((time.perf_counter() - begin) / repeats)
        return median(found)

    def engine(self, drafter: Drafter | None = None, **options: Any) -> Engine:
        return Engine(self.model, drafter=drafter, prefix_rows=0, **options)

    def decoded(self, engine: Engine, rows: int, context: int, tokens: int) -> Figures:
        """Milliseconds a step and tokens a second of decoding; every answer is the one that is known."""
        prompts = [shapes.text(17 * row, context, self.shape.vocab) for row in range(rows)]
        params = SamplingParams(max_tokens=tokens)
        walls = []
        for _ in range(2):  # graphs are captured in the first
            begin = time.perf_counter()
            found = engine.generate_many(prompts, params)
            walls.append(time.perf_counter() - begin)
        expected = [shapes.text(17 * row + context * shapes.STRIDE, tokens, self.shape.vocab) for row in range(rows)]
        if [list(result.token_ids) for result in found] != expected:
            raise AssertionError("an answer is not the one that is known")
        stats = [result.stats for result in found]
        steps = max(s.steps for s in stats)
        decode = max(s.decode_seconds for s in stats)
        return {
            "ms_per_step": 1e3 * decode / max(steps - 1, 1), "tokens_per_step": stats[0].tokens_per_step,
            "tokens_per_second": sum(s.tokens - s.first_delta_tokens for s in stats) / decode, "wall": walls[1],
            "first_wall": walls[0],
            "phases_ms": {name: 1e3 * t / steps for name, t in stats[0].seconds.items()},
        }  # fmt: skip


# -- stages: each gives its figures ------------------------------------------------------------------------------------


def machine(card: Card) -> Figures:
    """Versions, the card, and the bandwidth that everything is measured by."""
    import transformers

    size = (1 << 22) if card.tiny else (4 << 30)
    a, b = (torch.zeros(size, dtype=torch.uint8, device=card.device) for _ in range(2))
    copied = card.seconds(lambda: b.copy_(a), 10)
    rows = a.view(torch.bfloat16).view(-1, 4096)
    vector = torch.ones(4096, dtype=torch.bfloat16, device=card.device)
    read = card.seconds(lambda: rows @ vector, 10)
    one = torch.zeros(1, device=card.device)
    there = card.seconds(lambda: one.add_(1), 200)
    back = card.seconds(lambda: float(one.add_(1)), 200)
    names = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    name = torch.cuda.get_device_name(card.device) if card.device.type == "cuda" else card.device.type
    best = max(2 * size / copied, size / read)
    return {
        **names, "device": name, "copy_TB_s": 2e-12 * size / copied, "read_TB_s": 1e-12 * size / read,
        "bandwidth": best, "launch_us": 1e6 * there, "launch_and_wait_us": 1e6 * back,
    }  # fmt: skip


def products(card: Card) -> Figures:
    """Every product of the shape at every count of rows: its time, and whether a row's bits depend on the others."""
    s = card.shape
    inner = s.heads * s.head_dim
    sizes = {
        "qkv": (inner + 2 * s.kv_heads * s.head_dim, s.hidden), "o": (s.hidden, inner),
        "gate_up": (2 * s.inner, s.hidden), "down": (s.hidden, s.inner), "head": (s.vocab, s.hidden),
        "eagle_fc": (s.hidden, 3 * s.hidden), "eagle_qkv": (inner + 2 * s.kv_heads * s.head_dim, 2 * s.hidden),
    }  # fmt: skip
    counts = BITS_AT[:6] if card.tiny else BITS_AT
    found: Figures = {}
    settings: dict[str, Any] = {"default": True, "no_split_k": (False, False)}
    for setting, value in settings.items():
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = value
        for name, size in sizes.items():
            weight = torch.randn(size, dtype=card.dtype, device=card.device) * 0.02
            x = torch.randn(max(counts), size[1], dtype=card.dtype, device=card.device)
            whole = torch.nn.functional.linear(x, weight)
            ms, same = {}, {}
            for m in counts:
                out = torch.nn.functional.linear(x[:m], weight)
                moved = torch.nn.functional.linear(x[:m].flip(0).contiguous(), weight).flip(0)
                same[m] = [torch.equal(out[:1], whole[:1]), torch.equal(out, moved)]
                ms[m] = 1e3 * card.seconds(partial(torch.nn.functional.linear, x[:m], weight), 10, 1)
            found[f"{name} {setting}"] = {"ms": ms, "bits_of_widest_and_any_order": same}
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    return found


def forwards(card: Card) -> Figures:
    """Bare forwards and the choice after them, by width and context, and the share of the bandwidth bound."""
    model, vocab = card.model, card.shape.vocab
    bound = model.info.weight_bytes / card.figures["machine"]["bandwidth"]
    found: Figures = {"bound_ms": 1e3 * bound}
    for context in (100, 300) if card.tiny else (300, 2000, 8000):
        row = model.kv.alloc()
        for at in range(0, context, 512):
            chunk = _ids(shapes.text(at * shapes.STRIDE, min(512, context - at), vocab))
            model.forward(Batch.pack([row], [chunk], [at], [False]))
        for width in WIDTHS[:4] if card.tiny else WIDTHS:
            chunk = _ids(shapes.text(context * shapes.STRIDE, width, vocab))
            batch = Batch.pack([row], [chunk], [context], [True])
            choosers = [Chooser(SamplingParams(), Noise(0), 0)] * width

            run = partial(_forward, model, batch, choosers, row, context)
            found[f"context {context} width {width}"] = {"ms": 1e3 * card.seconds(run)}
        graphs, model.graphs = model.graphs, None
        found[f"context {context} width {width}, without graphs"] = {"ms": 1e3 * card.seconds(run)}
        model.graphs = graphs
        model.kv.free(row)
    first = found[f"context {100 if card.tiny else 300} width 1"]["ms"]
    return {**found, "plain_of_bound": 1e3 * bound / first}


def _forward(model: TransformersModel, batch: Batch, choosers: list[Chooser], row: int, context: int) -> None:
    model.forward(batch).choose(batch.wanted, choosers)
    model.kv.truncate(row, context)


def steps(card: Card) -> Figures:
    """The engine: plain, verification of 8, and its own share of a step."""
    n = 12 if card.tiny else 128
    plain = card.decoded(card.engine(), 1, 300, n)
    eight = card.decoded(card.engine(Oracle(card.shape.vocab), size=7), 1, 300, 8 * n)
    bare = card.figures["forwards"]
    first = bare[f"context {100 if card.tiny else 300} width 1"]["ms"]
    return {
        "plain": plain, "eight": eight, "eight_over_plain": eight["ms_per_step"] / plain["ms_per_step"],
        "own_share": 1 - first / plain["ms_per_step"], "plain_of_bound": bare["bound_ms"] / plain["ms_per_step"],
    }  # fmt: skip


def strict(card: Card) -> Figures:
    """Plain decoding and verification of 8 with ``strict``, over the default right before it."""
    n, vocab = 12 if card.tiny else 96, card.shape.vocab

    def both() -> dict[str, Figures]:
        plain = card.decoded(card.engine(), 1, 300, n)
        return {"plain": plain, "eight": card.decoded(card.engine(Oracle(vocab), size=7), 1, 300, 8 * n)}

    usual = both()
    default, memory = card.model, (64 << 20) if card.tiny else (8 << 30)
    card._model = TransformersModel(card.module, name="strict", kv_memory=memory, graphs=True, strict=True, warn=print)
    try:
        found = both()
    finally:
        card._model.close()
        card._model = default
    over = {f"{name}_over_default": found[name]["ms_per_step"] / usual[name]["ms_per_step"] for name in found}
    return {**found, **over}


def sampled(card: Card) -> Figures:
    """Steps of rows that sample, whose choices need noise: over greedy ones of the same width."""
    n, found = 12 if card.tiny else 64, Figures()
    kinds: dict[str, Figures] = {"temperature": {}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.95}}
    for name, given in kinds.items():
        engine = card.engine(Oracle(card.shape.vocab), size=7)
        params = SamplingParams(max_tokens=8 * n, temperature=0.8, seed=1, **given)
        prompt = shapes.text(5, 300, card.shape.vocab)
        stats = engine.generate(prompt, params).stats
        found[name] = 1e3 * stats.decode_seconds / max(stats.steps - 1, 1)
    return found


def eagle(card: Card) -> Figures:
    """EAGLE-3's shape drafting chains whose tokens are right by a given chance, over plain decoding."""
    model, n = card.model, 12 if card.tiny else 192
    network = shapes.eagle(model, card.shape, 500 if card.tiny else 32000)
    plain = card.figures["steps"]["plain"]["tokens_per_second"]
    found: Figures = {"chance": card.chance}
    for size in (3, 5, 7):
        drafter = RecordedEagle(network, card.shape.layers, card.shape.vocab, card.chance)
        one = card.decoded(card.engine(drafter, size=size), 1, 300, n)
        found[f"chain of {size}"] = {**one, "over_plain": one["tokens_per_second"] / plain}
    found["over_plain"] = max(each["over_plain"] for each in found.values() if isinstance(each, dict))
    drafter = RecordedEagle(network, card.shape.layers, card.shape.vocab, card.chance)
    found["16 rows, chain of 3"] = card.decoded(card.engine(drafter, size=3, max_rows=16), 16, 300, n // 2)
    network.close()
    return found


def rows(card: Card) -> Figures:
    """Many rows at once, plainly and with an oracle's drafts."""
    n = 8 if card.tiny else 96
    return {
        f"{count} rows": card.decoded(card.engine(max_rows=count), count, 300, n)
        for count in ((1, 4) if card.tiny else (1, 8, 16, 64))
    }


def beside(card: Card) -> Figures:
    """transformers' generate on the same weights: plain, assisted by the same draft model, prompt lookup."""
    n = 12 if card.tiny else 96
    small = shapes.TINIER if card.tiny else shapes.SMALL
    assistant = shapes.llama(small, card.device, card.dtype, chance=card.chance)
    vocab, prompt = card.shape.vocab, shapes.text(3, 300, card.shape.vocab)
    repeated = shapes.text(3, n + 100, vocab)
    repeated += repeated[:4]  # the answer stands in the prompt
    _ = card.model  # which fuses the module's weights
    found: Figures = {}

    def theirs(name: str, ids: list[int], **given: Any) -> None:
        tensor = torch.tensor([ids], device=card.device)
        options = {"do_sample": False, "attention_mask": torch.ones_like(tensor), "pad_token_id": 0, **given}
        card.module.generate(tensor, max_new_tokens=8, **options)
        card.wait()
        begin = time.perf_counter()
        out = card.module.generate(tensor, max_new_tokens=n, **options)
        card.wait()
        found[f"transformers {name}"] = n / (time.perf_counter() - begin)
        if out[0, len(ids) :].tolist() != shapes.text((ids[-1] + shapes.STRIDE) % vocab, n, vocab):
            raise AssertionError(f"transformers' answer ({name}) is not the one that is known")

    def ours(name: str, ids: list[int], drafter: Drafter | None, **given: Any) -> None:
        engine = card.engine(drafter, **given)
        engine.generate(ids, max_tokens=8)
        begin = time.perf_counter()
        engine.generate(ids, max_tokens=n)
        found[f"outpace {name}"] = n / (time.perf_counter() - begin)

    theirs("plain", prompt)
    ours("plain", prompt, None)
    theirs("assisted", prompt, assistant_model=assistant)
    drafting = TransformersModel(assistant, name="assistant", kv_memory=(64 << 20) if card.tiny else (4 << 30))
    ours("assisted", prompt, ModelDrafter(drafting, "model", vocab), size=5)
    drafting.close()
    network = shapes.eagle(card.model, card.shape, 500 if card.tiny else 32000)
    ours("eagle", prompt, RecordedEagle(network, card.shape.layers, vocab, card.chance), size=5)
    theirs("lookup", repeated, prompt_lookup_num_tokens=10)
    ours("lookup", repeated, build(parse("ngram"), DraftContext(card.model, None, LoadOptions(), 10)), size=10)
    for name, other in (("plain", "plain"), ("assisted", "assisted"), ("eagle", "assisted"), ("lookup", "lookup")):
        found[f"{name} over transformers'"] = found[f"outpace {name}"] / found[f"transformers {other}"]
    return found


def tests(card: Card) -> Figures:
    """tests/gpu in a process of their own."""
    if card.tiny:
        return {"skipped": "they are run as tests where there is no card"}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(10.0, card.ends - time.monotonic()))
    if done.returncode:
        raise AssertionError(done.stdout[-3000:] + done.stderr[-1000:])
    return {"passed": done.stdout.splitlines()[-1]}


# A stage, and the seconds it takes at most: less left, and it is not begun.
STAGES: dict[str, tuple[Callable[[Card], Figures], float]] = {
    "machine": (machine, 20), "forwards": (forwards, 60), "steps": (steps, 40), "rows": (rows, 40),
    "eagle": (eagle, 60), "beside": (beside, 70), "sampled": (sampled, 30), "strict": (strict, 40),
    "products": (products, 60), "tests": (tests, 60),
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU in float32: the script itself")
    parser.add_argument("--seconds", type=float, default=560, help="all stages together; default: 560")
    parser.add_argument("--chance", type=float, default=0.75, help="that a drafted token is right; default: 0.75")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only these, after those that they need")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    device = torch.device("cpu" if given.tiny else "cuda")
    dtype = torch.float32 if given.tiny else torch.bfloat16
    card = Card(device, dtype, given.tiny, given.chance, time.monotonic() + given.seconds)
    failed = False
    with Measuring() as measuring:
        for name, (stage, most) in STAGES.items():
            if given.stage and name not in given.stage and name not in ("machine", "forwards", "steps"):
                continue
            begin = time.monotonic()
            if begin + most > card.ends:
                card.figures[name] = {"skipped": f"{card.ends - begin:.0f} s were left of {most:.0f}"}
            else:
                try:
                    card.figures[name] = stage(card)
                except Exception as error:
                    failed = True
                    card.figures[name] = {"failed": f"{type(error).__name__}: {error}"}
                    traceback.print_exc()
            print(f"-- {name} ({time.monotonic() - begin:.0f} s)", flush=True)
            show(card.figures[name])
            emit(given, {"figures": card.figures}, partial=True)
    emit(given, {"figures": card.figures})
    return measuring.end(int(failed))


def show(figures: Figures, indent: str = "  ") -> None:
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            print(f"{indent}{name}:")
            show(value, indent + "  ")
        elif isinstance(value, dict):
            print(f"{indent}{name}: " + ", ".join(f"{key} {_short(each)}" for key, each in value.items()), flush=True)
        else:
            print(f"{indent}{name}: {_short(value)}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ids(tokens: list[int]) -> I32:
    return np.array(tokens, np.int32)
