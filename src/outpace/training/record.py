"""``Recorder``: what a running engine answers, kept as training data: bounded, and only where somebody asked for it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.common.files import StrPath
from outpace.errors import Argument, DataError, ParameterError
from outpace.models.fingerprint import ARITHMETIC, difference, identity
from outpace.models.options import LoadOptions
from outpace.training import folder as folders
from outpace.training.data import Answer, Answers

if TYPE_CHECKING:
    from outpace.common.arrays import I32
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result

log = logging.getLogger(__name__)

MOST = 300_000  # tokens, prompts with them
EVERY = 20.0  # seconds between two writes
SOURCE = "recorded"


class Recorder:
    """The newest finished answers, in a folder of training data (docs/training-data.md) of one shard.

    ``model``, ``load``, ``target``: how the target is loaded again, and its identity. At most ``most`` tokens are kept,
    the oldest answers go first, and an answer that was given before is there once. The folder is made for its owner
    alone, since it has what users wrote. Raises DataError for one of another target or kind.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        model: str,
        load: Mapping[str, Any],
        target: Mapping[str, Any],
        most: int = MOST,
        every: float = EVERY,
    ) -> None:
        if most < 1:
            raise ParameterError(Argument("most", most), " is out of range: give at least 1 token")
        path = Path(path)
        self.path, self._most, self._every = path, most, every
        self._kept: dict[tuple[str, str], Answer] = {}  # by digests of prompt and answer, the oldest first
        self.tokens = 0
        if (path / folders.META).exists():
            self._meta = self._found(target)
        else:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise DataError(f"{path} is there and holds something else than recorded answers: name another folder")
            counts = {"answers": 0, "tokens": 0, "answer_tokens": 0}
            self._meta = {
                "format": folders.FORMAT, "model": model, "target": dict(target), "load": dict(load),
                "options": {"made by": SOURCE}, "counts": counts,
            }  # fmt: skip
            with folders.writing(path, "nothing was recorded"):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                folders.write_meta(path, self._meta)
        self._written, self._unsaved = time.monotonic(), False

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, prompt: I32, answer: tuple[int, ...], *, temperature: float, seed: int, finish: str) -> None:
        """Keep an answer: ``prompt`` int32 [n] and the answer's token ids. Raises DataError when the disk is full."""
        answer_ids = np.array(answer, np.int32)
        if not len(prompt) or not len(answer_ids) or len(prompt) + len(answer_ids) > self._most:
            return
        tokens = np.concatenate([np.asarray(prompt, np.int32), answer_ids])
        self._take(Answer(_digest(prompt), SOURCE, tokens, len(prompt), temperature, 0, finish, seed & (2**63 - 1)))
        self._unsaved = True
        if time.monotonic() - self._written > self._every:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet: whole, or not at all. Raises DataError."""
        if not self._unsaved:
            return
        answers, before = list(self._kept.values()), self._meta["counts"]["answers"]
        answer_tokens = sum(len(a.tokens) - a.prompt_length for a in answers)
        counts = {"answers": len(answers), "tokens": self.tokens, "answer_tokens": answer_tokens}
        self._meta = {**self._meta, "counts": counts}
        with folders.writing(self.path, f"{before} answers are there"):
            if len(answers) < before:  # the folder never claims more than it has
                folders.write_meta(self.path, self._meta)
            write_answers(folders.shard_path(self.path, 0), answers, self._meta["target"].get("fingerprint"))
            folders.write_meta(self.path, self._meta)
        self._unsaved, self._written = False, time.monotonic()

    def _take(self, answer: Answer) -> None:
        key = answer.id, _digest(answer.tokens[answer.prompt_length :])
        if (again := self._kept.pop(key, None)) is not None:
            self.tokens -= len(again.tokens)
        self._kept[key] = answer
        self.tokens += len(answer.tokens)
        while self.tokens > self._most:
            self.tokens -= len(self._kept.pop(next(iter(self._kept))).tokens)

    def _found(self, target: Mapping[str, Any]) -> dict[str, Any]:
        """Go on with what is there."""
        meta = folders.read_meta(self.path)
        if meta["options"].get("made by") != SOURCE:
            raise DataError(f"{self.path} has other answers than recorded ones: name another folder")
        if (what := difference(meta["target"], target, ARITHMETIC)) is not None:
            raise DataError(f"{self.path} has answers of another target ({what}): name another folder, or that model")
        for cut_short in self.path.glob(".*.tmp"):  # by a kill
            cut_short.unlink()
        if folders.shards(self.path):
            for answer in Answers.open(self.path):
                self._take(answer)
        return meta


def write_answers(path: Path, answers: list[Answer], fingerprint: str | None) -> None:
    """A shard of answers; those to one prompt are numbered. Raises OSError."""
    seen: Counter[str] = Counter()
    samples = []
    for answer in answers:
        samples.append(seen[answer.id])
        seen[answer.id] += 1
    columns: dict[str, list[Any]] = {
        name: [getattr(a, name) for a in answers]
        for name in ("id", "source", "temperature", "seed", "prompt_length", "tokens", "finish")
    }
    folders.write_shard(path, {**columns, "sample": samples}, fingerprint)


@contextmanager
def recording(
    engine: Engine,
    path: StrPath,
    *,
    model: str,
    load: LoadOptions,
    most: int = MOST,
    later: Callable[[Callable[[], None]], None] | None = None,
) -> Iterator[Recorder]:
    """Record what ``engine`` answers in the block. ``load``: how ``model`` was loaded; ``later``: has what it is given
    done in another thread, one after another and all of it before the block ends, so that the engine's waits for no
    disk.

    Answers of rules and lossy acceptance are left out: they are not what the target says. A disk that cannot be
    written ends the recording, with a warning, and no request. Raises DataError before it begins.
    """
    own = {
        n: v for n, v in asdict(load).items() if v != getattr(LoadOptions(), n) and n not in ("threads", "kv_memory")
    }
    recorder: Recorder | None = Recorder(path, model=model, load=own, target=identity(engine.model, load), most=most)
    assert recorder is not None
    yielded, before = recorder, engine.on_result

    def on_result(result: Result) -> None:
        if before is not None:
            before(result)
        if recorder is None or result.finish_reason not in ("stop", "length") or result.acceptance == "typical":
            return
        request = engine.request(result.request)
        if request.params.rules:
            return
        temperature = request.params.temperature
        record = partial(keep, request.prompt, result.token_ids, temperature, result.seed, result.finish_reason)
        record() if later is None else later(record)

    def keep(prompt: I32, answer: tuple[int, ...], temperature: float, seed: int, finish: str) -> None:
        nonlocal recorder
        if recorder is None:
            return
        try:
            recorder.add(prompt, answer, temperature=temperature, seed=seed, finish=finish)
        except DataError as error:
            log.warning("nothing more is recorded: %s", error)
            recorder = None

    engine.on_result = on_result
    try:
        yield yielded
    finally:
        engine.on_result = before
        if recorder is not None:
            recorder.flush()


def _digest(tokens: Any) -> str:
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:16]
