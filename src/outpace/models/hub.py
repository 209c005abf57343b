"""Models by their Hugging Face id: GGUF files by quantisation (``user/repo:Q4_K_M``), and whole repositories."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from outpace.common.files import cache_dir, locked, write_json
from outpace.common.units import format_bytes
from outpace.errors import Argument, ModelError
from outpace.models.download import Remote, StatusError, UnreachableError, Web

log = logging.getLogger(__name__)

ENDPOINT = "https://huggingface.co"
USUAL = "Q4_K_M"  # what a name without a quantisation means, where a repository has it
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # what, bytes -> is told bytes done

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<wanted>[\w.+/-]+))?", re.ASCII)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANTISATION = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_[A-Z0-9]+)*|BF16|FP?16|FP?32))(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def label(name: str) -> str:
    """The quantisation that a file's name tells; where it tells none, the name without the ending and the shard."""
    stem = _SHARD.sub("", PurePosixPath(name).stem)
    found = _QUANTISATION.findall(stem)
    return found[-1].upper() if found else stem


def from_hub(spec: str, *, revision: str | None, allow_pickle: bool, offline: bool) -> Path:
    """A snapshot of a Hugging Face repository: from the local cache, else downloaded. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    weights = ["*.safetensors", "*.bin"] if allow_pickle else ["*.safetensors"]
    request: dict[str, Any] = {"revision": revision, "allow_patterns": _SMALL_FILES + weights}
    try:
        cached = Path(snapshot_download(spec, local_files_only=True, **request))
        if offline or _complete(cached, allow_pickle):
            return cached
    except HFValidationError as error:
        raise ModelError(f"{spec!r} is neither a file, a folder nor a Hugging Face id: check the spelling") from error
    except LocalEntryNotFoundError as error:
        if offline:
            raise ModelError(
                f"{spec} is not in the local cache, and HF_HUB_OFFLINE is set: unset it, or download the model first"
            ) from error
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
class _File:
    """A file of a repository. ``digest``: as in ``Remote``; "": the listing does not say."""

    name: str
    size: int
    digest: str

    @property
    def stem(self) -> str:
        """The name in its folder, without the ending and the number of a shard."""
        return _SHARD.sub("", PurePosixPath(self.name).stem)


@dataclass(frozen=True, slots=True)
class _Variant:
    """One model of a repository: a GGUF file, or all shards of one, in order."""

    files: tuple[_File, ...]

    @property
    def label(self) -> str:
        """Its quantisation, as files are called; where the name has none, the name."""
        return label(self.files[0].name)

    @property
    def path(self) -> str:
        """What tells it from others of the same quantisation."""
        return _SHARD.sub("", self.files[0].name.removesuffix(".gguf"))

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def called(self, wanted: str) -> bool:
        names = (self.label, self.label.removeprefix("UD-"), self.files[0].stem, self.path, self.files[0].name)
        return wanted.lower() in [name.lower() for name in (*names, PurePosixPath(self.files[0].name).name)]


def is_name(spec: str) -> bool:
    """Whether ``spec`` names a GGUF file in a hub: with a quantisation, or in a repository that says it holds such."""
    match = _NAME.fullmatch(spec)
    return match is not None and (match["wanted"] is not None or match["repo"].lower().endswith("gguf"))


def from_name(
    name: str, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Path:
    """A GGUF file of a hub repository: from the cache, else downloaded, checked, and kept there; of a model in shards
    the first.

    ``name``: "user/repo:Q4_K_M", in whatever case, or the name of the file after the colon; without one, Q4_K_M or the
    only file there is. ``progress`` is asked for a place to tell of a download, where there is one. HF_ENDPOINT is
    another hub, HF_TOKEN the key to what is not public. A file that is in the cache is not asked for again. Raises
    ModelError.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r} is no name of a model in a hub: write user/repo:{USUAL}")
    repo, wanted = match["repo"], match["wanted"]
    home = cache_dir() / "hub" / repo.replace("/", "--")
    listing = home / f"{quote(revision or 'main', safe='')}.json"
    cached = _read(listing)
    if cached is not None:
        try:
            found = _places(home, _choose(name, repo, wanted, cached[1]))
        except ModelError:  # what was asked for may have come since
            found = {}
        if found and all(_whole(path, file) for file, path in found.items()):
            return next(iter(found.values()))
    if offline:
        there = [] if cached is None else [v.label for v in _variants(cached[1]) if _here(home, v)]
        raise ModelError(
            f"{name} is not in the local cache ({', '.join(there) or 'nothing of this repository is'}), and no network "
            "is to be used: leave out --offline and HF_HUB_OFFLINE, or download it first"
        )
    web = Web(os.environ.get("HF_TOKEN") or None)
    commit, files = _ask(web, name, repo, revision)
    variant = _choose(name, repo, wanted, files)
    try:
        variant = _with_digests(web, name, repo, commit, variant)
        known = {file.name: file for file in variant.files}
        home.mkdir(parents=True, exist_ok=True)
        write_json(listing, {"commit": commit, "files": [asdict(known.get(file.name, file)) for file in files]})
        places = _places(home, variant)
        next(iter(places.values())).parent.mkdir(exist_ok=True)
        with _alone(home, name):
            missing = {file: path for file, path in places.items() if not _whole(path, file)}
            if missing:
                _download(web, name, repo, commit, missing, progress)
    except (StatusError, UnreachableError) as error:
        raise _refused(name, repo, error) from error
    except OSError as error:
        raise ModelError(
            f"{home} cannot be written ({error.strerror or error}): free some space, or set OUTPACE_CACHE"
        ) from error
    return next(iter(places.values()))


@contextmanager
def _alone(home: Path, name: str) -> Iterator[None]:
    """One process downloads of a repository; others wait, and find what it left."""
    log.info("%s: waiting, if another process downloads from the same repository", name)
    with locked(home / ".lock"):
        yield


def _download(
    web: Web, name: str, repo: str, commit: str, missing: dict[_File, Path], progress: Progress | None
) -> None:
    total = sum(file.size for file in missing)
    log.info("%s: downloading %s to %s", name, format_bytes(total), next(iter(missing.values())).parent)
    with _silent() if progress is None else progress("downloading", total) as advance:
        for file, path in missing.items():
            url = f"{_endpoint()}/{repo}/resolve/{quote(commit, safe='')}/{quote(file.name)}"
            web.fetch(Remote(url, f"{repo}/{file.name}", file.size, file.digest), path, advance)


@contextmanager
def _silent() -> Iterator[Callable[[int], None]]:
    yield lambda done: None


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def _ask(web: Web, name: str, repo: str, revision: str | None) -> tuple[str, list[_File]]:
    """The commit that ``revision`` is now, and the repository's GGUF files. Raises ModelError."""
    at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    try:
        answer = web.json(f"{_endpoint()}/api/models/{repo}{at}?blobs=true")
        commit, siblings = answer.get("sha") or revision or "main", answer["siblings"]
        files = [_file(item) for item in siblings if str(item["rfilename"]).lower().endswith(".gguf")]
    except (StatusError, UnreachableError) as error:
        raise _refused(name, repo, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{name}: what {_endpoint()} says of the repository cannot be read ({error!r}): check HF_ENDPOINT"
        ) from error
    return str(commit), files


def _file(item: dict[str, Any]) -> _File:
    """A file, as the hub's API describes it. Raises TypeError, KeyError or ValueError."""
    stored = item.get("lfs") or {}
    digest = str(stored.get("sha256") or (item.get("blobId") if not stored else "") or "").removeprefix("sha256:")
    size = stored.get("size", item.get("size"))
    return _File(str(item["rfilename"]), -1 if size is None else int(size), digest if _DIGEST.fullmatch(digest) else "")


def _with_digests(web: Web, name: str, repo: str, commit: str, variant: _Variant) -> _Variant:
    """The variant with sizes and checksums that the listing lacks, from the files' headers. Raises ModelError."""
    files = []
    for file in variant.files:
        if not file.digest or file.size < 0:
            headers = web.head(f"{_endpoint()}/{repo}/resolve/{quote(commit, safe='')}/{quote(file.name)}")
            tag = headers.get("X-Linked-Etag") or headers.get("ETag") or ""
            digest = file.digest or tag.removeprefix("W/").strip('"')
            size = file.size if file.size >= 0 else headers.get("X-Linked-Size") or headers.get("Content-Length") or ""
            if not _DIGEST.fullmatch(digest) or not str(size).isdigit():
                raise ModelError(
                    f"{name}: {_endpoint()} gives no checksum of {file.name}, so a damaged download could not be told: "
                    "download it yourself, and give its path"
                )
            file = replace(file, size=int(size), digest=digest)
        files.append(file)
    return _Variant(tuple(files))


def _refused(name: str, repo: str, error: StatusError | UnreachableError) -> ModelError:
    code = error.code if isinstance(error, StatusError) else None
    if code in (401, 403):
        key = "HF_TOKEN does not open it" if os.environ.get("HF_TOKEN") else "set HF_TOKEN to a token that may read it"
        return ModelError(f"{name} is not public ({error}): accept its terms on {_endpoint()}/{repo}, and {key}")
    if code == 404:
        return ModelError(f"{name} is not there ({error}): check the name on {_endpoint()}/{repo}, and HF_ENDPOINT")
    later = "try again later, it goes on where it stopped" if code == 429 else "check the connection and try again"
    return ModelError(f"{name} could not be downloaded from {_endpoint()} ({error}): {later}")


def _variants(files: Sequence[_File]) -> list[_Variant]:
    """What a repository has, by name. Files that go with a model (``mmproj-``) are none, and so is one whose shards are
    not all there."""
    groups: dict[str, list[_File]] = {}
    for file in files:
        if not PurePosixPath(file.name).name.lower().startswith(("mmproj", "imatrix", ".")):
            groups.setdefault(_SHARD.sub("", file.name[: -len(".gguf")]), []).append(file)
    found = []
    for _, group in sorted(groups.items()):
        shard = _SHARD.search(PurePosixPath(group[0].name).stem)
        if len(group) == (int(shard[2]) if shard else 1):
            found.append(_Variant(tuple(sorted(group, key=lambda file: file.name))))
    return found


def _choose(name: str, repo: str, wanted: str | None, files: Sequence[_File]) -> _Variant:
    """Raises ModelError that lists what there is."""
    there = _variants(files)
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
    have = ", ".join(f"{v.label} ({format_bytes(v.size)})" if v.size >= 0 else v.label for v in there)
    missing = f"no {wanted}" if wanted else f"no {USUAL}, and more than one other"
    raise ModelError(f"{repo} has {missing}: name one of {have}, as in {repo}:{there[0].label}")


def _places(home: Path, variant: _Variant) -> dict[_File, Path]:
    """Where its files lie in the cache: in a folder that other content would not have, so that nothing is replaced."""
    key = hashlib.sha256(" ".join(file.digest for file in variant.files).encode()).hexdigest()[:16]
    return {file: home / key / PurePosixPath(file.name).name for file in variant.files}


def _whole(path: Path, file: _File) -> bool:
    """Whether the file is there; under its own name it only comes once it was checked."""
    return path.is_file() and path.stat().st_size == file.size


def _here(home: Path, variant: _Variant) -> bool:
    return all(_whole(path, file) for file, path in _places(home, variant).items())


def _read(listing: Path) -> tuple[str, list[_File]] | None:
    """What the hub said last; None where it was not asked, or where that cannot be read any more."""
    try:
        value = json.loads(listing.read_text(encoding="utf-8"))
        return str(value["commit"]), [_File(**item) for item in value["files"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _complete(folder: Path, allow_pickle: bool) -> bool:
    """Whether a cached snapshot has a configuration and all of its weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((folder / name).is_file() for name in files)
    patterns = ("*.safetensors", "*.bin") if allow_pickle else ("*.safetensors",)
    return (folder / "config.json").is_file() and any(any(folder.glob(pattern)) for pattern in patterns)
