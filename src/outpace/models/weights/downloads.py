"""GGUF files in Hugging Face's cache by the names that ``--model`` takes, and their removal.

``hf cache`` lists and removes whole repositories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import Argument, ParameterError
from outpace.models.weights.hub import File, variants


@dataclass(frozen=True, slots=True)
class Download:
    """The files of one model. ``whole``: all of its shards are there."""

    name: str  # as --model takes it
    paths: tuple[Path, ...]
    bytes: int
    whole: bool


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
        for revision in repo.revisions:
            paths = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
            for one in variants([File(name, file.size_on_disk) for name, file in paths.items()]):
                files = tuple(paths[file.name].file_path for file in one.files)
                models.append(Download(f"{repo.repo_id}:{one.label}", files, one.size, one.whole))
    return sorted(models, key=lambda model: model.name.lower())


def remove(names: Sequence[str]) -> int:
    """Delete the models of these names, whatever their case; "user/repo" is all of a repository's.

    Returns how many bytes that freed. Raises ParameterError for a name that is not there, before anything is deleted;
    OSError.
    """
    there, chosen = found(), dict[tuple[Path, ...], Download]()
    for name in names:
        fits = [each for each in there if name.lower() in (each.name.lower(), each.name.partition(":")[0].lower())]
        if not fits:
            named = ", ".join(each.name for each in there) or "none"
            raise ParameterError(Argument("remove", name), f" was not downloaded: there is {named}")
        chosen |= {each.paths: each for each in fits}
    for paths in chosen:
        for path in paths:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    return sum(each.bytes for each in chosen.values())
