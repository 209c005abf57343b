"""Models by their Hugging Face id: GGUF files by quantisation (``user/repo:Q4_K_M``), and whole repositories.

huggingface_hub downloads, resumes, locks and caches. This module chooses the files, compares checksums, and turns
failures into one line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from outpace.common.files import cache_dir, write_json
from outpace.common.units import format_bytes
from outpace.errors import Argument, ModelError

log = logging.getLogger(__name__)

USUAL = "Q4_K_M"  # what a name without a quantisation means, where a repository has it
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # what, bytes -> takes bytes that came

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<wanted>[\w.+/-]+))?", re.ASCII)
_HUB = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/(.+?)/?")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANTISATION = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_[A-Z0-9]+)*|BF16|FP?16|FP?32))(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_PICKLES = ("*.bin", "*.pt")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


_OFFLINE = (
    ", and no network is to be used: leave out ", Argument("offline", True), " and HF_HUB_OFFLINE, or download it first"
)  # fmt: skip


def quantisation(name: str) -> str:
    """What a file's name tells of it; "" where it tells none."""
    found = _QUANTISATION.findall(_stem(name))
    return found[-1].upper() if found else ""


def _stem(name: str) -> str:
    """A file's name without the ending and the shard."""
    return _SHARD.sub("", PurePosixPath(name).stem)


def from_hub(spec: str, *, revision: str | None, allow_pickle: bool, offline: bool) -> Path:
    """A snapshot of a Hugging Face repository: from the local cache, else downloaded. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    weights = ["*.safetensors", *_PICKLES] if allow_pickle else ["*.safetensors"]
    request: dict[str, Any] = {"revision": revision, "allow_patterns": _SMALL_FILES + weights, "endpoint": _endpoint()}
    try:
        cached = Path(snapshot_download(spec, local_files_only=True, **request))
        if offline or complete(cached, allow_pickle):
            return cached
    except HFValidationError as error:
        raise ModelError(f"{spec!r} is neither a file, a folder nor a Hugging Face id: check the spelling") from error
    except LocalEntryNotFoundError as error:
        if offline:
            raise ModelError(f"{spec} is not in the local cache", *_OFFLINE) from error
    try:
        return Path(snapshot_download(spec, **request))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{spec} could not be downloaded ({reason}): check the name, ",
            Argument("revision"),
            " and the connection, or use a local folder or ",
            Argument("model", "demo"),
        ) from error


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository. ``digest``: its SHA-256; "": the hub gives none."""

    name: str
    size: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Variant:
    """One model of a repository: a GGUF file, or the shards of one, in order."""

    files: tuple[File, ...]

    @property
    def label(self) -> str:
        """Its quantisation, as files are called; where the name has none, the name."""
        name = self.files[0].name
        return quantisation(name) or _stem(name)

    @property
    def path(self) -> str:
        """What tells it from others of the same quantisation."""
        return _SHARD.sub("", self.files[0].name.removesuffix(".gguf"))

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def whole(self) -> bool:
        """Whether all shards are there."""
        shard = _SHARD.search(PurePosixPath(self.files[0].name).stem)
        return len(self.files) == (int(shard[2]) if shard else 1)

    def called(self, wanted: str) -> bool:
        file = PurePosixPath(self.files[0].name)
        stem = _stem(file.name)
        names = (self.label, self.label.removeprefix("UD-"), stem, self.path, str(file), file.name)
        return wanted.lower() in [name.lower() for name in names]


def variants(files: Sequence[File]) -> list[Variant]:
    """Models among files, by name. GGUF files that go with a model (``mmproj-``) are none."""
    groups: dict[str, list[File]] = {}
    for file in files:
        name = PurePosixPath(file.name).name.lower()
        if name.endswith(".gguf") and not name.startswith(("mmproj", "imatrix", ".")):
            groups.setdefault(_SHARD.sub("", file.name[: -len(".gguf")]), []).append(file)
    return [Variant(tuple(sorted(group, key=lambda file: file.name))) for _, group in sorted(groups.items())]


def without_hub(spec: str) -> str:
    """A model's name without the hub's address, which Ollama and browsers write before it."""
    match = _HUB.fullmatch(spec)
    return spec if match is None else match[1]


def is_name(spec: str) -> bool:
    """Whether ``spec`` names a GGUF file in a hub: with a quantisation, or in a repository that says it holds such."""
    match = _NAME.fullmatch(spec)
    return match is not None and (match["wanted"] is not None or match["repo"].lower().endswith("gguf"))


def from_name(
    name: str, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Path:
    """A GGUF file of a hub repository, from Hugging Face's cache or downloaded into it; of a model in shards the first.

    ``name``: "user/repo:Q4_K_M", in whatever case, or the name of the file after the colon; without one, Q4_K_M or the
    only file there is. ``progress`` is called where there is something to download. HF_ENDPOINT is another hub,
    HF_TOKEN (or ``hf auth login``) the key to what is not public. A file that is in the cache is not asked for again.
    Raises ModelError.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r} is no name of a model in a hub: write user/repo:{USUAL}")
    repo, wanted = match["repo"], match["wanted"]
    listing = cache_dir() / "hub" / f"{repo.replace('/', '--')}@{quote(revision or 'main', safe='')}.json"
    commit, files = _read(listing)
    if files:
        try:
            found = _cached(repo, commit, _choose(name, repo, wanted, files))
        except ModelError:  # what was asked for may have come since
            found = []
        if found:
            return found[0]
    if offline:
        there = ", ".join(v.label for v in variants(files) if _cached(repo, commit, v))
        raise ModelError(f"{name} is not in the local cache ({there or 'nothing of this repository is'})", *_OFFLINE)
    try:
        commit, files = _ask(repo, revision)
        variant = _choose(name, repo, wanted, files)
        listing.parent.mkdir(parents=True, exist_ok=True)
        write_json(listing, {"commit": commit, "files": [asdict(file) for file in files]})
        return _download(name, repo, commit, variant, progress)
    except ModelError:
        raise
    except Exception as error:  # the library's, its HTTP client's, the system's
        raise _refused(name, repo, error) from error


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def _ask(repo: str, revision: str | None) -> tuple[str, list[File]]:
    """The commit that ``revision`` is now, and the repository's GGUF files."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=_endpoint()).model_info(repo, revision=revision, files_metadata=True)
    files = [
        File(file.rfilename, file.size or 0, str(file.lfs.sha256 or "") if file.lfs else "")
        for file in info.siblings or ()
        if file.rfilename.lower().endswith(".gguf")
    ]
    return info.sha or revision or "main", files


def _download(name: str, repo: str, commit: str, variant: Variant, progress: Progress | None) -> Path:
    """The first file, once all are in the cache and have the checksums that the hub gives."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    missing = [f for f in variant.files if not isinstance(try_to_load_from_cache(repo, f.name, revision=commit), str)]
    total = sum(file.size for file in missing)
    log.info("%s: downloading %s", name, format_bytes(total))
    with nullcontext(_ignore) if progress is None or not missing else progress("downloading", total) as advance:

        class Bar:
            """What the library calls of a progress bar; bytes in transfer, which it counts apart, are not shown."""

            def __init__(self, **options: Any) -> None: ...

            def __enter__(self) -> Bar:
                return self

            def update(self, n: float | None = 1) -> None:
                advance(int(n or 0))

            def ignore(self, *args: Any, **options: Any) -> None: ...

            update_transfer = set_transfer_postfix_str = set_postfix_str = refresh = close = __exit__ = ignore

        for file in missing:
            path = Path(hf_hub_download(repo, file.name, revision=commit, endpoint=_endpoint(), tqdm_class=Bar))
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if file.digest not in ("", digest):
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise ModelError(
                    f"{repo}/{file.name} was downloaded, but its checksum is {digest}, not {file.digest}: try again; "
                    "if that does not help, the hub or something on the way changes the file"
                )
    return _cached(repo, commit, variant)[0]


def _ignore(count: int) -> None:
    """Nobody watches the download."""


def _cached(repo: str, commit: str, variant: Variant) -> list[Path]:
    """Where the files lie in Hugging Face's cache; none where one of them is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(repo, file.name, revision=commit) for file in variant.files]
    paths = [Path(path) for path in found if isinstance(path, str)]
    return paths if len(paths) == len(found) else []


def _refused(name: str, repo: str, error: Exception) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code in (401, 403):
        key = "HF_TOKEN does not open it" if os.environ.get("HF_TOKEN") else "set HF_TOKEN to a token that may read it"
        return ModelError(f"{name} is not public ({reason}): accept its terms on {_endpoint()}/{repo}, and {key}")
    if code == 404:
        return ModelError(f"{name} is not there ({reason}): check the name on {_endpoint()}/{repo}, and HF_ENDPOINT")
    if isinstance(error, OSError) and error.errno is not None:
        return ModelError(f"{name} cannot be written ({error}): free some space, or set HF_HOME and OUTPACE_CACHE")
    remedy = "try again later" if code == 429 else "check the connection and HF_ENDPOINT, and try again"
    return ModelError(f"{name} could not be downloaded from {_endpoint()} ({reason}): {remedy}")


def _read(listing: Path) -> tuple[str, list[File]]:
    """What the hub answered last; no files where it was not asked, or where that cannot be read any more."""
    try:
        value = json.loads(listing.read_text(encoding="utf-8"))
        return str(value["commit"]), [File(**item) for item in value["files"]]
    except (OSError, ValueError, TypeError, KeyError):
        return "", []


def _choose(name: str, repo: str, wanted: str | None, files: Sequence[File]) -> Variant:
    """Raises ModelError that lists what there is."""
    there = [variant for variant in variants(files) if variant.whole]
    if not there:
        raise ModelError(f"{name}: {repo} has no GGUF files: name a repository that has, or {repo} itself as a folder")
    fits = [v for v in there if v.called(wanted or USUAL)] or ([] if wanted or len(there) > 1 else there)
    exact = [v for v in fits if v.label.lower() == (wanted or USUAL).lower()]
    fits = exact if len(exact) == 1 else fits
    if len(fits) == 1:
        return fits[0]
    if fits:
        named = ", ".join(f"{repo}:{v.path}" for v in fits)
        raise ModelError(f"{name} may be several files of {repo}: name one of {named}")
    have = ", ".join(f"{v.label} ({format_bytes(v.size)})" for v in there)
    missing = f"no {wanted}" if wanted else f"no {USUAL}, and more than one other"
    raise ModelError(f"{repo} has {missing}: name one of {have}, as in {repo}:{there[0].label}")


def complete(folder: Path, allow_pickle: bool) -> bool:
    """Whether a cached snapshot has a configuration and all of its weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((folder / name).is_file() for name in files)
    patterns = ("*.safetensors", *_PICKLES) if allow_pickle else ("*.safetensors",)
    return (folder / "config.json").is_file() and any(
        path.is_file() for pattern in patterns for path in folder.glob(pattern)
    )
