"""``python -m benchmarks NAME ...`` runs a benchmark; ``NAME --help`` has its options, ``--help`` lists them all."""

from __future__ import annotations

import ast
import difflib
import pkgutil
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
INSIDE = ("servers", "streams", "soak_server")  # what benchmarks share; no benchmarks


def names() -> list[str]:
    return [found.name for found in pkgutil.iter_modules([str(HERE)]) if found.name not in (*INSIDE, "__main__")]


def about(name: str) -> str:
    """The first line of its docstring; nothing is imported."""
    path = HERE / name / "__main__.py" if (HERE / name).is_dir() else HERE / f"{name}.py"
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]


def main() -> None:
    known = names()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks NAME ...\n")
        print("\n".join(f"  {each:<11} {about(each)}" for each in known))
        sys.exit(0 if len(sys.argv) > 1 else 2)
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        print(f"there is no benchmark {name}: {f'did you mean {close[0]}?' if close else '--help lists them'}")
        sys.exit(2)
    sys.argv[:2] = [f"python -m benchmarks {name}"]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
