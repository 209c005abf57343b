"""Models in Hugging Face's cache by the names that ``--model`` takes, and their removal.

``hf cache`` lists and removes whole repositories.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.common.files import StrPath
from outpace.errors import ModelError, ParameterError
from outpace.models.weights.hub import File, complete, quantisation, variants, without_hub


@dataclass(frozen=True, slots=True)
class Download:
    """The files of one model. ``type``: a GGUF file's quantisation, safetensors, or download where it has not ended.
    ``whole``: all of its files are there. ``used``: when, as time.time() counts, as far as the file system says."""

    name: str  # as --model takes it
    paths: tuple[Path, ...]
    blobs: tuple[Path, ...]  # which hold what the paths name; models and revisions share them
    bytes: int
    whole: bool
    type: str
    used: float


@dataclass(frozen=True, slots=True)
class _Held:
    """A file of a snapshot; ``there``: it can be read, and is no link to one that is gone."""

    path: Path
    blob: Path
    bytes: int
    used: float
    there: bool


def folder() -> Path:
    """Where they are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def found() -> list[Download]:
    """All there are, by name. huggingface_hub's own scan leaves a whole repository out for one link whose file is gone,
    and says nothing of downloads that have not ended."""
    models = []
    for repo in folder().glob("models--*"):
        name = repo.name.removeprefix("models--").replace("--", "/")
        for snapshot in (repo / "snapshots").glob("*/"):
            paths = {held.path.relative_to(snapshot).as_posix(): held for held in _files(snapshot)}
            for one in variants([File(name, held.bytes) for name, held in paths.items()]):
                files = [paths[file.name] for file in one.files]
                models.append(_download(f"{name}:{one.label}", files, one.whole, type_of(files[0].path)))
            if "config.json" in paths and any(file.endswith(".safetensors") for file in paths):
                files = [paths[file] for file in sorted(paths) if not file.endswith(".gguf")]
                models.append(_download(name, files, complete(snapshot, allow_pickle=False), "safetensors"))
        if begun := [held for held in _files(repo / "blobs") if held.path.suffix == ".incomplete"]:
            models.append(_download(name, begun, False, "download"))
    return sorted(models, key=lambda model: model.name.lower())


def _files(folder: Path) -> Iterator[_Held]:
    for here, _, names in os.walk(folder):
        for path in (Path(here, name) for name in names):
            # The first link alone: a blob may be a link, too, to what caches share.
            blob = Path(os.path.abspath(path.parent / os.readlink(path))) if path.is_symlink() else path
            try:
                stat, there = path.stat(), os.access(path, os.R_OK)
                yield _Held(path, blob, stat.st_size, max(stat.st_atime, stat.st_mtime), there)
            except OSError:
                yield _Held(path, blob, 0, path.lstat().st_mtime, False)


def type_of(file: StrPath) -> str:
    """A GGUF file's quantisation, as its name tells it; where that tells none, the type that most of its weights
    have."""
    from outpace.models.weights.gguf import GGUFFile

    if named := quantisation(Path(file).name):
        return named
    try:
        return GGUFFile.open(file).type
    except ModelError:  # cut off, or no such file after all
        return "GGUF"


def _download(name: str, files: Sequence[_Held], whole: bool, kind: str) -> Download:
    paths, blobs = tuple(file.path for file in files), tuple(file.blob for file in files)
    used, whole = max(file.used for file in files), whole and all(file.there for file in files)
    return Download(name, paths, blobs, sum(file.bytes for file in files), whole, kind, used)


def remove(names: Sequence[str]) -> int:
    """Delete the models of these names, whatever their case; "user/repo" is all of a repository's.

    Returns how many bytes that freed: revisions share files, and what a model that stays has, too, stays. Raises
    ParameterError for a name that is not there, before anything is deleted; OSError.
    """
    there, chosen = found(), dict[tuple[Path, ...], Download]()
    for name in map(without_hub, names):
        fits = [each for each in there if name.lower() in (each.name.lower(), each.name.partition(":")[0].lower())]
        if not fits:
            named = ", ".join(each.name for each in there) or "none"
            raise ParameterError(f"{name} was not downloaded: there is {named}")
        chosen |= {each.paths: each for each in fits}
    kept = {blob for each in there if each.paths not in chosen for blob in each.blobs}
    gone = {blob for each in chosen.values() for blob in each.blobs} - kept
    freed = _bytes(gone)
    for path in [*gone, *(path for paths in chosen for path in paths)]:
        path.unlink(missing_ok=True)
    return freed


def size(models: Iterable[Download]) -> int:
    """Bytes of some models on the disk, files that several have counted once."""
    return _bytes({blob for each in models for blob in each.blobs})


def _bytes(blobs: Iterable[Path]) -> int:
    return sum(blob.lstat().st_size for blob in blobs if os.path.lexists(blob))
