"""Models in Hugging Face's cache by the names that ``--model`` takes, and their removal.

``hf cache`` lists and removes whole repositories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.common.files import StrPath
from outpace.errors import ModelError, ParameterError
from outpace.models.weights.hub import File, complete, quantisation, variants, without_hub

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo


@dataclass(frozen=True, slots=True)
class Download:
    """The files of one model. ``type``: a GGUF file's quantisation, or safetensors. ``whole``: all of its shards are
    there. ``used``: when, as time.time() counts, as far as the file system says."""

    name: str  # as --model takes it
    paths: tuple[Path, ...]
    bytes: int
    whole: bool
    type: str
    used: float


def folder() -> Path:
    """Where they are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def found() -> list[Download]:
    """All there are, by name."""
    from huggingface_hub import scan_cache_dir

    if not folder().is_dir():
        return []
    models = []
    for repo in scan_cache_dir(folder()).repos:
        if repo.repo_type != "model":
            continue
        for revision in repo.revisions:
            paths = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
            for one in variants([File(name, file.size_on_disk) for name, file in paths.items()]):
                files = [paths[file.name] for file in one.files]
                models.append(_download(f"{repo.repo_id}:{one.label}", files, one.whole, type_of(files[0].file_path)))
            if "config.json" in paths and any(name.endswith(".safetensors") for name in paths):
                files = [paths[name] for name in sorted(paths) if not name.endswith(".gguf")]
                whole = complete(revision.snapshot_path, allow_pickle=False)
                models.append(_download(repo.repo_id, files, whole, "safetensors"))
    return sorted(models, key=lambda model: model.name.lower())


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


def _download(name: str, files: Sequence[CachedFileInfo], whole: bool, kind: str) -> Download:
    paths = tuple(file.file_path for file in files)
    used = max(max(file.blob_last_accessed, file.blob_last_modified) for file in files)
    return Download(name, paths, sum(file.size_on_disk for file in files), whole, kind, used)


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
    kept = {path.resolve() for each in there if each.paths not in chosen for path in each.paths}
    gone = {path.resolve() for paths in chosen for path in paths} - kept
    freed = sum(path.stat().st_size for path in gone if path.is_file())
    for path in [*gone, *(path for paths in chosen for path in paths)]:
        path.unlink(missing_ok=True)
    return freed


def size(models: Iterable[Download]) -> int:
    """Bytes of some models on the disk, files that several have counted once."""
    files = {path.resolve() for each in models for path in each.paths}
    return sum(path.stat().st_size for path in files if path.is_file())
