"""A datastore of token sequences on disk, searched by the longest end of a context: what ``retrieval`` reads.

A folder with ``datastore.json`` and segments. A segment is three arrays on disk: ``tokens`` int32 [n], sequences
with END between them; ``order`` int32 [m], the positions at which something follows something, sorted by what precedes
them, read backwards (a suffix array of the reversed tokens, exact to DEPTH tokens); ``keys`` int64 [m], the last three
of those tokens in one number. So the places that end like a context lie side by side, the longest matches nearest to
where the context itself would stand, and one binary search finds them. Segments have a bounded size and are built one
after another, so a corpus may be larger than memory; adding to a datastore adds segments.

What stands in the files is not trusted: positions outside a segment are passed over, and a token outside the vocabulary
ends what follows a place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outpace import _fast
from outpace.common.arrays import I32
from outpace.common.files import StrPath, replacing, write_json
from outpace.drafters.lookup.segment_files import I64, MANIFEST, Arrays, open_arrays, read_manifest
from outpace.errors import Argument, DrafterError

if TYPE_CHECKING:
    from outpace.text.tokenizer import Tokenizer

DEPTH = 16  # tokens of a context that order the places
END = -1  # stands between sequences: nothing is matched or continued across it
SEGMENT = 4_000_000  # tokens; building one takes about 40 bytes a token
_BITS, _KEYED = 21, 3  # of a token in a key; tokens in a key
MOST_TOKENS = (1 << _BITS) - 1  # of a vocabulary
_FORMAT = 1


class Datastore:
    """An open datastore. Raises DrafterError when ``path`` is none, is damaged, or is of another vocabulary.

    ``arrays``: tokens, order and keys of its segments. ``files``: where they lie.
    """

    def __init__(self, path: StrPath, vocabulary: str | None = None) -> None:
        """``vocabulary``: the target's fingerprint, or None to trust that it fits."""
        self.path = Path(path)
        self.manifest = read_manifest(self.path / MANIFEST, _FORMAT)
        if vocabulary is not None and self.manifest["vocabulary"] != vocabulary:
            raise DrafterError(
                f"{path} was built for another vocabulary (that of {self.manifest['model']}): "
                "build one with this model's, outpace datastore build --model"
            )
        self.files: list[_fast.native.Mapped] = []
        self.arrays: list[Arrays] = []
        for name in self.manifest["segments"]:
            arrays, files = open_arrays(self.path / name)
            self.arrays.append(arrays)
            self.files += files
        if len(self) != self.manifest["tokens"]:
            raise DrafterError(
                f"{path} has {len(self)} tokens, and {self.manifest['tokens']} were written: build the datastore anew"
            )

    def __len__(self) -> int:
        """Tokens in it."""
        return sum(len(tokens) for tokens, _, _ in self.arrays)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Of a vocabulary: equal when every id means the same token."""
    text = "\0".join(tokenizer.token(i) or "" for i in range(tokenizer.vocab_size))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def build(
    path: StrPath,
    sequences: Iterable[Sequence[int]],
    *,
    vocabulary: str,
    model: str,
    add: bool = False,
    segment: int = SEGMENT,
    done: Callable[[int], None] = lambda tokens: None,
) -> Datastore:
    """Write a datastore of ``sequences`` of token ids; ``add``: more segments to one that is there.

    ``done(n)`` is called for every n tokens that are indexed. Whole or not at all: what was there stays until the end.
    Raises DrafterError.
    """
    target = Path(path)
    if add:
        existing = Datastore(target, vocabulary)
        manifest = existing.manifest
    elif target.exists():
        raise DrafterError(f"{target} exists: add to it with ", Argument("add", True), ", or give another path")
    else:
        manifest = {"format": _FORMAT, "vocabulary": vocabulary, "model": model, "segments": [], "tokens": 0}
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        work.mkdir(parents=True)
        names: list[str] = []
        for tokens in _batches(sequences, segment):
            names.append(f"{len(manifest['segments']) + len(names):05d}")
            _write_segment(work / names[-1], tokens)
            manifest["tokens"] += len(tokens)
            done(len(tokens))
        if not names:
            raise DrafterError("the corpus has no text of at least two tokens: give files with some")
        manifest["segments"] = [*manifest["segments"], *names]
        if add:
            for file in sorted(work.iterdir()):
                os.replace(file, target / file.name)
            write_json(target / MANIFEST, manifest)  # only now are the new segments part of it
        else:
            write_json(work / MANIFEST, manifest)
            os.replace(work, target)
    except OSError as error:
        raise DrafterError(f"{target} cannot be written ({error}): check the folder and the disk") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Datastore(target, vocabulary)


def _batches(sequences: Iterable[Sequence[int]], segment: int) -> Iterable[I32]:
    """The sequences one after another, each with END behind it, in arrays of about ``segment`` tokens."""
    parts: list[I32] = []
    size = 0
    for sequence in sequences:
        for start in range(0, len(sequence), segment):
            part = np.append(np.asarray(sequence[start : start + segment], np.int32), np.int32(END))
            if len(part) < 3:  # nothing follows anything
                continue
            parts.append(part)
            size += len(part)
            if size >= segment:
                yield np.concatenate(parts)
                parts, size = [], 0
    if parts:
        yield np.concatenate(parts)


def _write_segment(path: Path, tokens: I32) -> None:
    order = _order(tokens)
    for name, array in (("tokens", tokens), ("order", order), ("keys", _keys(tokens, order))):
        with replacing(Path(f"{path}.{name}.npy")) as file:
            np.save(file, array)


def _order(tokens: I32) -> I32:
    """Positions int32 [m] with something before and after them, sorted by the DEPTH tokens before them, backwards.

    Prefix doubling: ranks of 1, 2, 4, ... tokens, each from two of the ranks before (Manber and Myers, 1993).
    """
    n = len(tokens)
    rank = np.zeros(n, np.int64)
    rank[1:] = tokens[:-1] + 1
    length = 1
    while True:
        before = np.zeros(n, np.int64)
        before[length:] = rank[:-length] if length < n else 0
        pair = rank * (int(rank.max(initial=0)) + 2) + before + 1
        order = np.argsort(pair, kind="stable")
        steps = np.diff(pair[order]) != 0
        length *= 2
        if length >= DEPTH or steps.all():
            break
        rank = np.empty(n, np.int64)
        rank[order] = np.concatenate([[1], np.cumsum(steps) + 1])
    follows = (tokens != END) & (np.concatenate([[END], tokens[:-1]]) != END)
    return np.asarray(order[follows[order]], np.int32)


def _keys(tokens: I32, order: I32) -> I64:
    """The last _KEYED tokens before each position, the nearest one in the highest bits; END and nothing are 0."""
    keys = np.zeros(len(order), np.int64)
    for back in range(1, _KEYED + 1):
        at = order - back
        token = np.where(at >= 0, tokens[np.maximum(at, 0)].astype(np.int64) + 1, 0)
        keys |= token << (_BITS * (_KEYED - back))
    return keys
