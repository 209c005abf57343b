"""Checks wheels and source distributions in a folder: their size, that every module is in, and of what is built the
extension and its types alone.

``python scripts/check_dist.py FOLDER``; needs the standard library alone, so that every runner has what it takes.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

LIMIT = 20 * 1000 * 1000  # bytes of a wheel
BUILT = (".so", ".pyd", ".dylib", ".o", ".a")
TYPES = "outpace/_native.pyi"  # which the build writes
SOURCE = Path(__file__).parents[1] / "src"


def problems(path: Path) -> list[str]:
    """What is wrong with one distribution; empty: nothing."""
    found = []
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        built = [name for name in names if name.endswith(BUILT)]
        if len(built) != 1 or not built[0].startswith("outpace/_native."):
            found.append(f"has {built or 'no extension'}, expected outpace/_native alone: was there a compiler?")
        elif ("-abi3-" in path.name) != (".abi3." in built[0] or built[0] == "outpace/_native.pyd"):
            found.append(f"is named otherwise than its extension, {built[0]}")
        if path.name.endswith("-any.whl"):
            found.append("is for any platform, though the extension is not")
        if TYPES not in names:
            found.append(f"lacks {TYPES}")
    else:
        with tarfile.open(path) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
        found += [f"has {name}, which is built" for name in names if name.endswith((*BUILT, TYPES))]
        found += [
            f"lacks {name}" for name in ("native/CMakeLists.txt", "LICENSE", "pyproject.toml") if name not in names
        ]
    inside = "" if path.suffix == ".whl" else "src/"
    modules = {inside + path.relative_to(SOURCE).as_posix() for path in (SOURCE / "outpace").rglob("*.py")}
    shipped = ("drafters/learned/demo/config.json", "drafters/learned/demo/model.safetensors", "models/demo-draft.gguf")
    drafters = {f"{inside}outpace/{name}" for name in shipped}
    if lacking := sorted((modules | drafters) - set(names)):
        found.append(f"lacks {len(lacking)} files, such as {lacking[0]}: is it excluded in pyproject.toml?")
    if path.stat().st_size > LIMIT:
        found.append(f"takes {path.stat().st_size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}")
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python scripts/check_dist.py FOLDER", file=sys.stderr)
        return 2
    paths = sorted(p for p in Path(arguments[0]).glob("*") if p.name.endswith((".whl", ".tar.gz")))
    if not paths:
        print(f"check_dist: {arguments[0]} has no wheel and no source distribution", file=sys.stderr)
        return 1
    bad = 0
    for path in paths:
        found = problems(path)
        bad += bool(found)
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {'; '.join(found) or 'ok'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
